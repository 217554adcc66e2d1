"""The one torchrun of this supervisor: launch, take up, stop, and the record of it on disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

from supervisor import failpoints
from supervisor.clock import Clock
from supervisor.job.launch import JobProcess, JobRecord, is_same_process, start_time
from supervisor.job.processes import stop_job
from supervisor.job.rank_env import job_env

RECORD_FORMAT = 1


class JobKeeper:
    """Invariant: the record on disk names the launch before its first process exists, so that a
    restarted supervisor finds every process of it."""

    def __init__(
        self,
        *,
        argv: Sequence[str],
        environ: Mapping[str, str],
        job_id: str,
        runtime_dir: str,
        socket_path: str,
        shutdown_timeout_s: int,
        clock: Clock,
    ) -> None:
        self._argv = tuple(argv)
        self._environ = environ
        self._job_id = job_id
        self._path = os.path.join(runtime_dir, "job.json")
        self._socket_path = socket_path
        self._shutdown_timeout_s = shutdown_timeout_s
        self._clock = clock
        self._process: JobProcess | None = None
        self.submission = uuid.uuid4().hex
        self.launch_id = ""
        self.round = 0

    def take_up(self, *, on_exit: Callable[[int | None], None]) -> bool:
        """Find the job of an earlier supervisor. What is left of a dead one is ended.

        Returns:
            Whether a torchrun is running and watched now.
        """
        record = self._read()
        if record is None:
            return False
        if not is_same_process(record):
            stop_job(
                None, record.launch, clock=self._clock, patience_s=0, on_left=lambda pids: None
            )
            return False
        self.submission, self.launch_id, self.round = (
            record.submission,
            record.launch,
            record.round,
        )
        self._process = JobProcess.take_up(record.pid)
        self._process.watch(on_exit)
        return True

    def launch(self, *, on_exit: Callable[[int | None], None]) -> int:
        """Start the next round.

        Raises:
            OSError: the command cannot be executed.
        """
        self.round += 1
        self.launch_id = uuid.uuid4().hex
        self._write(pid=os.getpid(), started_at=0.0)
        env = job_env(
            self._environ,
            argv=self._argv,
            socket_path=self._socket_path,
            launch=self.launch_id,
            job_id=self._job_id,
            shutdown_timeout_s=self._shutdown_timeout_s,
        )
        process = JobProcess.start(self._argv, env)
        self._write(pid=process.pid, started_at=start_time(process.pid) or 0.0)
        self._process = process
        process.watch(on_exit)
        return process.pid

    def stop(self, *, patience_s: float, on_left: Callable[[list[int]], None]) -> None:
        """End every process of the present launch; blocks."""
        if self.launch_id:
            stop_job(
                self._process,
                self.launch_id,
                clock=self._clock,
                patience_s=patience_s,
                on_left=on_left,
            )

    def _read(self) -> JobRecord | None:
        try:
            with open(self._path, "rb") as file:
                record = msgspec.json.decode(file.read(1 << 20), type=JobRecord)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return record if record.fmt == RECORD_FORMAT else None

    def _write(self, *, pid: int, started_at: float) -> None:
        record = JobRecord(
            fmt=RECORD_FORMAT,
            submission=self.submission,
            launch=self.launch_id,
            round=self.round,
            pid=pid,
            started_at=started_at,
            argv=self._argv,
        )
        temporary = self._path + ".tmp"
        failpoints.hit("job.note.before")
        with open(temporary, "wb", opener=_private) as file:
            file.write(msgspec.json.encode(record))
        os.rename(temporary, self._path)
        failpoints.hit("job.note.after")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
