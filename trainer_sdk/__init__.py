"""What training code calls. Importing it does not import torch; `attach()` does.

    with trainer_sdk.attach(model=model, optimizer=optimizer, dataloader=loader) as run:
        run.restore()
        for epoch in run.epochs(3):
            for batch in loader:
                ...
                run.step()

Without a supervisor (no LASTGASP_SOCKET in the environment) it only counts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_sdk.errors import (
    Preempted,
    RejectedBySupervisor,
    RestoreError,
    TrainerSdkError,
    UnsupportedState,
    UsageError,
)

if TYPE_CHECKING:
    from trainer_sdk.run import Run

__all__ = [
    "Preempted",
    "RejectedBySupervisor",
    "RestoreError",
    "TrainerSdkError",
    "UnsupportedState",
    "UsageError",
    "attach",
]


def attach(**objects: Any) -> Run:
    """Register the training state by name and reach the supervisor.

    Args:
        objects: modules, optimizers, schedulers, loaders, generators, or anything with
            `state_dict` and `load_state_dict`; None is skipped, a list becomes `name.0`, `name.1`,
            a dictionary `name.key`.

    Returns:
        The run; use it as a context manager, or call `finish()` at the end.

    Raises:
        UnsupportedState: a named object that an image cannot hold.
        UsageError: this process has a run already.
    """
    from trainer_sdk.run import attach as attach_run  # keeps torch out of the import

    return attach_run(objects)


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module("trainer_sdk.data")
    raise AttributeError(f"module 'trainer_sdk' has no attribute {name!r}")
