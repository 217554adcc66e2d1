"""Failpoints: silent unless asked, and strict about names."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from supervisor import failpoints
from supervisor.errors import ConfigError
from supervisor.failpoints import FailpointError, hit
from trainer_sdk.protocol.failpoints import ENVIRONMENT_NAME


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def ask_for(text: str) -> None:
        monkeypatch.setenv(ENVIRONMENT_NAME, text)
        failpoints.reload()

    yield ask_for
    monkeypatch.delenv(ENVIRONMENT_NAME, raising=False)
    failpoints.reload()


def test_nothing_happens_unless_asked(ask: Callable[[str], None]) -> None:
    ask("log.put.after=error")

    hit("log.put.before")
    with pytest.raises(FailpointError, match=r"log\.put\.after"):
        hit("log.put.after")


def test_only_the_hit_that_was_asked_for(ask: Callable[[str], None]) -> None:
    ask("upload.chunk.after=error@3, log.put.after=error")

    hit("upload.chunk.after")
    hit("upload.chunk.after")
    with pytest.raises(FailpointError):
        hit("upload.chunk.after")
    hit("upload.chunk.after")


def test_from_a_hit_on_an_errno_is_raised(ask: Callable[[str], None]) -> None:
    ask("spool.write.before=ENOSPC@2+")

    hit("spool.write.before")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left") as caught:
            hit("spool.write.before")
        assert caught.value.errno == errno.ENOSPC


def test_a_slow_device_is_waited_for(ask: Callable[[str], None]) -> None:
    ask("spool.write.before=sleep:0.05")
    began_at = time.monotonic()

    hit("spool.write.before")

    assert time.monotonic() - began_at >= 0.05


@pytest.mark.parametrize(
    "text",
    [
        "spool.write.before=ENOTHING",
        "spool.write.before=sleep",
        "log.put.after=kill@0",
        "log.put=kill",
        "log.put.after",
        "log.put.after=stop",
        "log.put.after=kill@x",
        "x=kill",
    ],
)
def test_misspelt_requests_are_refused(ask: Callable[[str], None], text: str) -> None:
    with pytest.raises(ConfigError, match=ENVIRONMENT_NAME):
        ask(text)


def test_undeclared_name_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="not a declared failpoint"):
        hit("log.put.sideways")


def test_kill_cannot_be_caught() -> None:
    code = (
        "from supervisor.failpoints import hit\ntry:\n hit('log.put.after')\nfinally:\n print('x')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {ENVIRONMENT_NAME: "log.put.after=kill"},
        capture_output=True,
        check=False,
        timeout=30,
    )

    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
