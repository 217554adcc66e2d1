"""Named places at which tests make a process die or fail. Does nothing unless the environment asks.

`LASTGASP_FAILPOINTS="log.put.after=kill,upload.chunk.after=error@3"`: `kill` sends SIGKILL to the
own process, `error` raises `FailpointError`; `@N` acts at the Nth hit only, else at every hit. An
unknown name or action is refused at the first hit, so that a misspelt test cannot pass.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from typing import Final

from supervisor.errors import ConfigError, TransientStoreError

ENVIRONMENT_NAME: Final = "LASTGASP_FAILPOINTS"

NAMES: Final = frozenset(
    f"{place}.{when}"
    for place in (
        "log.put",  # the commit: a slot of the log
        "hint.put",
        "part.put",  # a node's vote
        "upload.chunk",
        "upload.complete",
        "retire.append",
        "sweep.delete",
        "dir.link",  # directory store: the name of a slot or small object
        "dir.rename",  # directory store: the name of a shard
        "spool.write",
        "spool.fsync",
        "spool.publish",  # the directory of a whole checkpoint gets its name
    )
    for when in ("before", "after")
)


class FailpointError(TransientStoreError):
    """A failure that a test asked for."""

    error_id = "failpoint"


@dataclass(frozen=True, slots=True)
class _Action:
    kind: str
    at_hit: int  # 0: every hit


def parse(text: str) -> dict[str, _Action]:
    """Read the value of the environment variable.

    Raises:
        ConfigError: an unknown name or action.
    """
    actions: dict[str, _Action] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, action = item.partition("=")
        kind, _, count = action.partition("@")
        if name not in NAMES or kind not in ("kill", "error") or not (count or "1").isdigit():
            raise ConfigError(f"{ENVIRONMENT_NAME}: {item!r} is not name=kill|error[@N]")
        actions[name] = _Action(kind, int(count or 0))
    return actions


class _Failpoints:
    """The hits of one process. Reads the environment once, at the first hit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: dict[str, _Action] | None = None
        self._hits: dict[str, int] = {}

    def reload(self) -> None:
        with self._lock:
            self._actions = parse(os.environ.get(ENVIRONMENT_NAME, ""))
            self._hits = {}

    def hit(self, name: str) -> None:
        if name not in NAMES:
            raise ValueError(f"{name!r} is not a declared failpoint")
        if self._actions is None:
            self.reload()
        action = (self._actions or {}).get(name)
        if action is None:
            return
        with self._lock:
            count = self._hits[name] = self._hits.get(name, 0) + 1
        if action.at_hit in (0, count):
            if action.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FailpointError(f"failpoint {name}")


_FAILPOINTS = _Failpoints()


def hit(name: str) -> None:
    """Pass a failpoint.

    Raises:
        ValueError: the name is not declared.
        FailpointError: a test asked for it.
    """
    _FAILPOINTS.hit(name)


def reload() -> None:
    """Read the environment again and forget the hits: for tests within one process."""
    _FAILPOINTS.reload()
