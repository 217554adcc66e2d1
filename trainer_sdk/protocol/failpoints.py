"""Named places at which tests make a process die or fail. Does nothing unless the environment asks.

`LASTGASP_FAILPOINTS="log.put.after=kill,upload.chunk.after=error@3,spool.write.before=ENOSPC@2+"`:
`kill` sends SIGKILL to the own process, `error` raises what the caller fails with, the name of an
errno raises that OSError, `sleep:SECONDS` waits. `@N` acts at the Nth hit only, `@N+` from the Nth
on, else at every hit. An unknown name or action is refused at the first hit, so that a misspelt
test cannot pass. The supervisor and its ranks read the same variable; each counts its own hits.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainer_sdk.protocol.errors import ProtocolError

ENVIRONMENT_NAME: Final = "LASTGASP_FAILPOINTS"

NAMES: Final = frozenset(
    f"{place}.{when}"
    for place in (
        "stage.copy",  # in a rank: tensors into the image
        "stage.seal",  # in a rank: the commit word
        "restore.copy",  # in a rank: the image into tensors
        "log.put",  # the commit: a slot of the log
        "hint.put",
        "part.put",  # a node's vote
        "upload.chunk",
        "upload.complete",
        "retire.append",
        "sweep.delete",
        "dir.link",  # directory store: the name of a slot or small object
        "dir.rename",  # directory store: the name of a shard
        "spool.open",  # a file of the spool, with its space reserved
        "spool.write",
        "spool.fsync",
        "spool.close",
        "spool.publish",  # the directory of a whole checkpoint gets its name
        "spool.note",  # where an upload can be resumed
        "job.note",  # who runs torchrun: read by the supervisor that takes the job up
        "fetch.chunk",  # a chunk of a restore
    )
    for when in ("before", "after")
)

_ACTION: Final = re.compile(
    r"(?P<kind>kill|error|E[A-Z]+|sleep:(?P<seconds>\d+(\.\d+)?))(@(?P<hit>[1-9]\d*)(?P<on>\+)?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Action:
    kind: str
    seconds: float
    first_hit: int
    last_hit: int | None  # None: without end

    def is_due(self, count: int) -> bool:
        return self.first_hit <= count and (self.last_hit is None or count <= self.last_hit)

    def perform(self, name: str, fail: Callable[[str], Exception]) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "error":
            raise fail(f"failpoint {name}")
        if self.kind.startswith("sleep"):
            # A real wait: what a test asks for is a slow device, whatever clock the code reads.
            time.sleep(self.seconds)
            return
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number))


def parse(text: str) -> dict[str, _Action]:
    """Read the value of the environment variable.

    Raises:
        ProtocolError: an unknown name or action.
    """
    actions: dict[str, _Action] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, action = item.partition("=")
        match = _ACTION.fullmatch(action)
        if name not in NAMES or match is None or not _is_known(match["kind"]):
            raise ProtocolError(
                f"{ENVIRONMENT_NAME}: {item!r} is not name=kill|error|ERRNO|sleep:SECONDS[@N[+]]",
                hint="it is meant for tests: take it out of the environment",
            )
        first = int(match["hit"] or 1)
        is_open = match["hit"] is None or match["on"] is not None
        actions[name] = _Action(
            kind=match["kind"],
            seconds=float(match["seconds"] or 0),
            first_hit=first,
            last_hit=None if is_open else first,
        )
    return actions


def _is_known(kind: str) -> bool:
    return not kind.startswith("E") or hasattr(errno, kind)


class Failpoints:
    """The hits of one process. Reads the environment once, at the first hit.

    Args:
        fail: makes the error for the action `error`.
    """

    def __init__(self, fail: Callable[[str], Exception]) -> None:
        self._fail = fail
        self._lock = threading.Lock()
        self._actions: dict[str, _Action] | None = None
        self._hits: dict[str, int] = {}

    def reload(self) -> None:
        """Read the environment again and forget the hits: for tests within one process."""
        with self._lock:
            self._actions = parse(os.environ.get(ENVIRONMENT_NAME, ""))
            self._hits = {}

    def hit(self, name: str) -> None:
        """Pass a failpoint.

        Raises:
            ValueError: the name is not declared.
            ProtocolError: the environment asks for something unknown.
            Exception, OSError: a test asked for it.
        """
        if name not in NAMES:
            raise ValueError(f"{name!r} is not a declared failpoint")
        if self._actions is None:
            self.reload()
        action = (self._actions or {}).get(name)
        if action is None:
            return
        with self._lock:
            count = self._hits[name] = self._hits.get(name, 0) + 1
        if action.is_due(count):
            action.perform(name, self._fail)
