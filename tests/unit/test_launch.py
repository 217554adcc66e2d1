"""A real process under supervision: started, taken up, ended with everything below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from supervisor.clock import SystemClock
from supervisor.errors import ExitCode
from supervisor.job.keeper import JobKeeper
from supervisor.job.launch import (
    CommandNotFound,
    JobProcess,
    JobRecord,
    check_command,
    is_same_process,
    start_time,
)
from supervisor.job.processes import members, stop_job
from supervisor.job.rank_env import MARKER
from tests.fakes import wait_until

SLEEP = ["sh", "-c", "sleep 600"]


class Ended:
    """What was told of a job's end."""

    def __init__(self) -> None:
        self.codes: list[int | None] = []
        self._event = threading.Event()

    def __call__(self, code: int | None) -> None:
        self.codes.append(code)
        self._event.set()

    def wait(self) -> int | None:
        assert self._event.wait(20)
        return self.codes[0]


@pytest.fixture
def launch() -> Iterator[str]:
    """A launch id, whose processes are gone afterwards."""
    name = uuid.uuid4().hex
    yield name
    for process in members(name):
        process.kill()


def environment(launch: str) -> dict[str, str]:
    return {**os.environ, MARKER: launch}


def start(launch: str, script: str) -> tuple[JobProcess, Ended]:
    job = JobProcess.start(["sh", "-c", script], environment(launch))
    ended = Ended()
    job.watch(ended)
    return job, ended


def stop(job: JobProcess | None, launch: str, *, patience_s: float = 0.0) -> list[int]:
    left: list[int] = []
    stop_job(job, launch, clock=SystemClock(), patience_s=patience_s, on_left=left.extend)
    return left


# ---------------------------------------------------------------- start and end


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9)])
def test_the_end_is_told_once_with_its_code(launch: str, script: str, code: int) -> None:
    job, ended = start(launch, script)

    assert ended.wait() == code
    assert job.has_ended
    assert ended.codes == [code]


def test_the_job_has_a_session_of_its_own_and_no_terminal_input(
    launch: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job, ended = start(launch, f"ps -o sid= -p $$ > {out}; read line; echo $? >> {out}")

    ended.wait()

    session, read_code = out.read_text().split()
    assert int(session) == job.pid
    assert read_code == "1"


def test_a_command_that_cannot_be_executed_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")

    with pytest.raises(OSError):
        JobProcess.start([str(tmp_path / "plain")], {})


def test_waiting_is_bounded(launch: str) -> None:
    job, _ = start(launch, "sleep 600")

    assert job.wait(0.05) is False
    assert not job.has_ended


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("program", "hint"), [("torchrun", "environment in which torch is"), ("nope", "the path of")]
)
def test_a_program_that_is_not_there_is_told_with_what_to_do(
    program: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    with pytest.raises(CommandNotFound, match=program) as caught:
        check_command([program, "train.py"])

    assert hint in caught.value.hint
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_program_that_is_there_is_fine() -> None:
    check_command(["sh"])
    check_command([sys.executable])


# ---------------------------------------------------------------- take up


def test_a_stranger_is_watched_by_its_pid_and_its_code_is_unknown(launch: str) -> None:
    child = subprocess.Popen(["sleep", "600"], env=environment(launch))
    job = JobProcess.take_up(child.pid)
    ended = Ended()
    job.watch(ended)
    assert not job.wait(0.05)

    child.kill()

    assert ended.wait() is None
    assert job.has_ended
    child.wait()


def test_a_stranger_that_is_gone_already_has_ended(launch: str) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    ended = Ended()

    JobProcess.take_up(child.pid).watch(ended)

    assert ended.wait() is None


def test_a_process_is_known_by_pid_and_start_time(launch: str) -> None:
    job, ended = start(launch, "sleep 600")
    began_at = start_time(job.pid)
    assert began_at is not None

    assert is_same_process(a_record(job.pid, began_at))
    assert not is_same_process(a_record(job.pid, began_at - 100))

    os.kill(job.pid, signal.SIGKILL)
    ended.wait()
    assert not is_same_process(a_record(job.pid, began_at))


def test_a_zombie_has_no_start_time() -> None:
    child = subprocess.Popen(["true"])
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)

    assert start_time(child.pid) is None
    child.wait()


def a_record(pid: int, started_at: float) -> JobRecord:
    return JobRecord(
        fmt=1, submission="s", launch="l", round=1, pid=pid, started_at=started_at, argv=("sh",)
    )


# ---------------------------------------------------------------- stop


def test_everything_of_the_launch_is_ended_whatever_session_it_is_in(launch: str) -> None:
    """torchrun gives each rank a session of its own, and may be gone before its ranks are."""
    job, ended = start(launch, "setsid sleep 600 & setsid setsid sleep 600 & exit 0")
    ended.wait()
    wait_until(lambda: len(members(launch)) == 2)

    assert stop(job, launch) == []

    assert members(launch) == []


def test_a_process_that_ignores_sigterm_is_ended(launch: str) -> None:
    job, ended = start(launch, "trap '' TERM; sleep 600 & while :; do wait; done")
    wait_until(lambda: len(members(launch)) == 2)
    os.kill(job.pid, signal.SIGTERM)

    stop(None, launch)

    assert ended.wait() == -signal.SIGKILL
    assert members(launch) == []


def test_torchrun_gets_one_sigterm_and_time_to_end(launch: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ready = tmp_path / "ready"
    job, ended = start(
        launch,
        f"trap 'echo term >> {out}; exit 3' TERM; touch {ready}; while :; do sleep 0.01; done",
    )
    wait_until(ready.exists)

    stop(job, launch)

    assert ended.wait() == 3
    assert out.read_text() == "term\n"


def test_a_job_that_ends_by_itself_in_time_gets_no_signal(launch: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job, ended = start(launch, f"trap 'touch {out}' TERM; sleep 0.1; exit 5")

    stop(job, launch, patience_s=10.0)

    assert ended.wait() == 5
    assert not out.exists()


def test_another_launch_and_ourselves_are_left_alone(
    launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARKER, launch)
    other = uuid.uuid4().hex
    job, ended = start(other, "sleep 600")

    stop(None, launch)

    assert not job.has_ended
    stop(None, other)
    ended.wait()


# ---------------------------------------------------------------- the record


def a_keeper(tmp_path: Path, argv: list[str] = SLEEP) -> JobKeeper:
    return JobKeeper(
        argv=argv,
        environ=dict(os.environ),
        job_id="j",
        runtime_dir=str(tmp_path),
        socket_path=str(tmp_path / "supervisor.sock"),
        shutdown_timeout_s=60,
        clock=SystemClock(),
    )


def end(keeper: JobKeeper) -> None:
    keeper.stop(patience_s=0, on_left=lambda pids: None)


def test_a_restarted_supervisor_takes_its_job_up(tmp_path: Path) -> None:
    first = a_keeper(tmp_path)
    pid = first.launch(on_exit=lambda code: None)
    second = a_keeper(tmp_path)
    ended = Ended()

    assert second.take_up(on_exit=ended)

    assert (second.launch_id, second.submission, second.round) == (
        first.launch_id,
        first.submission,
        1,
    )
    os.kill(pid, signal.SIGKILL)
    assert ended.wait() is None
    end(second)
    assert members(second.launch_id) == []


def test_what_is_left_of_a_dead_job_is_ended_and_not_taken_up(tmp_path: Path) -> None:
    first = a_keeper(tmp_path, ["sh", "-c", "setsid sleep 600 & exit 1"])
    ended = Ended()
    first.launch(on_exit=ended)
    ended.wait()
    wait_until(lambda: len(members(first.launch_id)) == 1)

    assert not a_keeper(tmp_path).take_up(on_exit=lambda code: None)

    assert members(first.launch_id) == []


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"\xff", b"[" * 100_000, b'{"fmt":2}'], ids=lambda c: repr(c)[:12]
)
def test_without_a_record_that_can_be_read_there_is_nothing_to_take_up(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "job.json").write_bytes(content)

    assert not a_keeper(tmp_path).take_up(on_exit=lambda code: None)


def test_each_launch_is_another_round_with_another_id(tmp_path: Path) -> None:
    keeper = a_keeper(tmp_path)
    keeper.launch(on_exit=lambda code: None)
    first = keeper.launch_id
    end(keeper)

    keeper.launch(on_exit=lambda code: None)

    assert keeper.round == 2
    assert keeper.launch_id != first
    end(keeper)


def test_the_record_is_for_us_alone_and_never_half_written(tmp_path: Path) -> None:
    keeper = a_keeper(tmp_path)
    keeper.launch(on_exit=lambda code: None)
    end(keeper)

    assert (tmp_path / "job.json").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "job.json.tmp").exists()


def test_a_launch_that_fails_leaves_a_record_without_a_process(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    keeper = a_keeper(tmp_path, [str(tmp_path / "plain")])

    with pytest.raises(OSError):
        keeper.launch(on_exit=lambda code: None)

    assert not a_keeper(tmp_path).take_up(on_exit=lambda code: None)
