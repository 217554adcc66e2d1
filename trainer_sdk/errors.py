"""Errors of the training side. Every one names what it is about and, where it can, the mend."""

from __future__ import annotations

from collections.abc import Sequence


class TrainerSdkError(Exception):
    """Root of the tree; `hint` says what to do next."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class UsageError(TrainerSdkError, ValueError):
    """The SDK was called in an order or with arguments that cannot work."""


class UnsupportedState(TrainerSdkError, ValueError):
    """Something registered that an image cannot hold; `path` names it."""

    def __init__(self, path: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {reason}", hint=hint)
        self.path = path


class PlanError(TrainerSdkError):
    """The state cannot be laid out as an image."""


class StagingError(TrainerSdkError):
    """An image could not be written whole; the slot stays unsealed and training goes on."""


class RejectedBySupervisor(TrainerSdkError):
    """The supervisor does not let this rank take part; reconnecting does not help."""

    def __init__(self, error_id: str, reason: str) -> None:
        super().__init__(f"the supervisor refused this rank: {reason}", hint=f"see {error_id}")
        self.error_id = error_id


class RestoreError(TrainerSdkError):
    """The checkpoint was not restored; `mismatches` names every reason.

    `is_checkpoint_bad`: the images themselves are at fault, so an older checkpoint may do.
    """

    def __init__(
        self,
        message: str,
        *,
        mismatches: Sequence[str] = (),
        is_checkpoint_bad: bool = False,
        hint: str = "",
    ) -> None:
        lines = "".join(f"\n  - {mismatch}" for mismatch in mismatches)
        super().__init__(message + lines, hint=hint)
        self.mismatches = tuple(mismatches)
        self.is_checkpoint_bad = is_checkpoint_bad


class Preempted(SystemExit):
    """Raised by `run.step()` and `run.poll()` when all ranks stop for a preemption.

    Uncaught it ends the process with code 0; `except Exception` does not catch it. The state is
    in an image that the supervisor owns, so nothing has to be saved on the way out.
    """

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step

    def __str__(self) -> str:
        return f"preempted at step {self.step}"
