"""The only place that constructs I/O objects: configuration in, a daemon that can run out."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor import log as logs
from supervisor.checkpoint.fetch import FetchTools
from supervisor.checkpoint.flush import Flusher
from supervisor.checkpoint.local import LocalSets
from supervisor.checkpoint.notes import UploadNotes
from supervisor.checkpoint.pace import PaceLimits
from supervisor.checkpoint.persist import Tools
from supervisor.checkpoint.spool import Spool
from supervisor.checkpoint.spool_errors import SpoolError, SpoolNotMounted
from supervisor.checkpoint.workers import WorkerPool
from supervisor.clock import Clock, Deadline, SystemClock
from supervisor.commit.log import CommitLog
from supervisor.commit.rules import Retention
from supervisor.config import Config, runtime_dir, spool_root
from supervisor.daemon import Daemon, Mailbox
from supervisor.errors import JobFinished, NoCheckpointFound
from supervisor.job.keeper import JobKeeper
from supervisor.job.launch import check_command
from supervisor.job.processes import shell_above_us
from supervisor.lifecycle import JobState, Phase, Policy, inputs
from supervisor.lifecycle.inputs import Notice, NoticeKind
from supervisor.log_sink import LineSink
from supervisor.memory import available_bytes
from supervisor.metrics import Metrics
from supervisor.notices.base import NoticeSource, NoticeWatcher
from supervisor.notices.ec2 import Ec2Source, is_ec2
from supervisor.notices.file import FileSource
from supervisor.observer import Observer
from supervisor.performer import Parts, RankTerms
from supervisor.ranks.board import NUM_SLOTS, RankBoard
from supervisor.ranks.server import RankServer, RuntimeDir
from supervisor.ranks.slots import SlotBuffer
from supervisor.status import StatusServer
from supervisor.store.base import ObjectStore
from supervisor.store.directory import DirectoryStore
from supervisor.store.retry import Retrier, RetryingStore
from supervisor.store.s3 import open_s3
from supervisor.store.s3_session import S3Settings
from supervisor.systemd import ServiceManager
from trainer_sdk.protocol.names import DATA_PREFIX, PART_PREFIX

PROBE_LIMIT_S = 30.0
START_LIMIT_S = 60.0
READ_LIMIT_S = 30.0
# One SHA-256 stream is slower than an NVMe disk; more threads than this win nothing.
NUM_HASHERS = min(4, os.cpu_count() or 1)
NUM_READERS = 8
# Of what is free, images may take this much; the rest is the training's own.
MEMORY_SHARE = 0.8
COMMIT_LIMIT_S = 120.0


def open_store(config: Config, clock: Clock, *, on_retry: Callable[[str], None]) -> ObjectStore:
    """The configured store, with retries.

    Raises:
        StoreError, ConfigError
    """
    url: str = config["store.url"]
    store: ObjectStore
    if url.startswith("file://"):
        store = DirectoryStore(Path(url.removeprefix("file://")))
    else:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        settings = S3Settings(
            bucket=bucket,
            prefix=f"{prefix}/" if prefix else "",
            endpoint_url=config["store.endpoint_url"],
            region=config["store.region"],
            addressing_style=config["store.addressing_style"],
            checksums=config["store.checksums"],
            sse_kms_key_id=config["store.sse_kms_key_id"],
            ca_bundle=config["store.ca_bundle"],
        )
        store = open_s3(settings, clock=clock)
    retrier = Retrier(clock=clock, on_retry=lambda error: on_retry(error.error_id))
    return RetryingStore(store, retrier)


def open_log(config: Config, clock: Clock, store: ObjectStore) -> CommitLog:
    """The job's commit log in its store."""
    return CommitLog(store, job_id=config["job.id"], clock=clock, new_uid=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `lastgasp run` was told besides the configuration."""

    argv: Sequence[str]
    allow_fresh: bool


class Supervised:
    """A daemon with everything around it. `run` blocks until the job ended; then all is closed."""

    def __init__(self, config: Config, options: RunOptions, environ: Mapping[str, str]) -> None:
        """Check everything that can be checked before anything is started.

        Raises:
            SupervisorError: with what is wrong and what to do.
        """
        check_command(options.argv)
        self._config = config
        self._options = options
        self._environ = environ
        self._clock = SystemClock()
        self._sink = LineSink(sys.stderr.fileno())
        logs.configure(level=config["log.level"], style=config["log.format"], file=self._sink)
        self._log = logs.bind(job_id=config["job.id"])
        self._mailbox = Mailbox()
        self._runtime = RuntimeDir(runtime_dir(config, environ))
        self._watchers: list[NoticeWatcher] = []

    def run(self) -> int:
        """Supervise the job; returns the exit code.

        Raises:
            SupervisorError: it could not be started.
        """
        try:
            return self._run()
        finally:
            for watcher in self._watchers:
                watcher.stop()
            self._runtime.close()
            self._sink.close()

    def _run(self) -> int:
        config = self._config
        store = open_store(
            config,
            self._clock,
            on_retry=lambda error_id: self._mailbox.note("retry", error_id=error_id),
        )
        log = open_log(config, self._clock, store)
        for weakness in store.probe(log.keys.prefix, timeout_s=PROBE_LIMIT_S):
            self._log.warning("store.limited", store=store.url, reason=weakness)
        spool = self._open_spool()
        keeper = self._keeper()
        is_taken_up = keeper.take_up(
            on_exit=lambda code: self._mailbox.put(inputs.JobExited(code=code))
        )
        if not is_taken_up:
            self._check_log(log, spool)
        parts = self._parts(log, spool, keeper)
        observer = self._observer(store, spool)
        service = ServiceManager(self._environ, self._clock)
        daemon = Daemon(
            JobState(policy=self._policy()), parts, self._mailbox, observer, on_turn=service.turned
        )
        server = RankServer(self._runtime, clock=self._clock, post=self._mailbox.put)
        server.start()
        self._start_status(observer)
        self._start_watchers()
        self._handle_signals()
        self._warn_of_shell()
        service.ready()
        self._log.info("supervisor.started", store=store.url, pid=os.getpid())
        try:
            code = daemon.run(is_taken_up=is_taken_up)
        finally:
            server.stop()
        self._log.info("supervisor.stopped", exit_code=code)
        return code

    # ------------------------------------------------------------ parts

    def _open_spool(self) -> Spool | None:
        """The spool, or None with a warning: checkpoints then go to the store from memory alone."""
        must_mount = self._config["spool.require_mount"]
        try:
            return Spool(
                spool_root(self._config, self._environ),
                self._config["job.id"],
                ballast_bytes=self._config["spool.ballast"],
                require_mount=must_mount,
                on_rejected=lambda gen, step, reason: self._mailbox.note(
                    "spool_rejected", generation=gen, step=step, reason=reason
                ),
            )
        except SpoolError as error:
            if must_mount and isinstance(error, SpoolNotMounted):
                raise
            self._spool_failed(error)
            return None

    def _spool_failed(self, error: SpoolError) -> None:
        self._mailbox.note(
            "spool_failed",
            error_id=error.error_id,
            reason=error.message,
            hint=error.hint,
            is_suspect=error.is_suspect,
        )

    def _flusher(self, spool: Spool | None) -> Flusher | None:
        if spool is None:
            return None
        try:
            notes = UploadNotes(spool.path)
        except SpoolError as error:
            self._spool_failed(error)
            return None
        return Flusher(
            spool,
            notes,
            clock=self._clock,
            limits=PaceLimits(
                least_bytes_per_s=self._config["spool.min_rate"],
                patience_s=self._config["spool.patience"],
            ),
            on_error=self._spool_failed,
        )

    def _check_log(self, log: CommitLog, spool: Spool | None) -> None:
        """A finished job ends here, and one that lost its checkpoints too, before a GPU is used."""
        state = log.tail(Deadline.after(self._clock, START_LIMIT_S)).state
        if state.finished is not None:
            raise JobFinished(state.finished, hint="to train on, give the job another [job] id")
        is_new = state.gen == 0
        has_local = LocalSets(spool).may_have(state)
        if is_new and not self._options.allow_fresh and _has_remains(log):
            raise NoCheckpointFound(
                f"the log of job {log.keys.job_id!r} at {log.store.url} is gone, but objects of "
                "its checkpoints are there",
                hint="restore the log/ folder from a backup or bucket versions; to begin at step "
                "0, use --allow-fresh or another [job] id",
            )
        if not (is_new or state.live or has_local or self._options.allow_fresh):
            raise NoCheckpointFound(
                f"job {log.keys.job_id!r} was started before, but its log at {log.store.url} has "
                "no checkpoint to resume from",
                hint="if it never came to its first checkpoint, start it with --allow-fresh",
            )

    def _keeper(self) -> JobKeeper:
        return JobKeeper(
            argv=self._options.argv,
            environ=self._environ,
            job_id=self._config["job.id"],
            runtime_dir=self._runtime.path,
            socket_path=self._runtime.socket_path,
            shutdown_timeout_s=int(self._config["notice.sigterm_lead"]),
            clock=self._clock,
        )

    def _parts(self, log: CommitLog, spool: Spool | None, keeper: JobKeeper) -> Parts:
        config = self._config
        return Parts(
            clock=self._clock,
            log=log,
            board=RankBoard(
                clock=self._clock,
                launch=lambda: keeper.launch_id,
                make_slot=self._slot_maker(spool),
            ),
            keeper=keeper,
            persist=Tools(
                log=log,
                flusher=self._flusher(spool),
                clock=self._clock,
                hashers=WorkerPool("hash", NUM_HASHERS),
                uploaders=WorkerPool("upload", config["store.upload_threads"]),
                retention=Retention(keep=config["checkpoint.keep"]),
                chunk_timeout_s=config["store.chunk_timeout"],
                commit_timeout_s=COMMIT_LIMIT_S,
                on_uploaded=lambda size: self._mailbox.note("uploaded", size_bytes=size),
            ),
            fetch=FetchTools(
                store=log.store,
                keys=log.keys,
                spool=spool,
                readers=WorkerPool("read", NUM_READERS),
                chunk_timeout_s=config["store.chunk_timeout"],
                on_read=lambda source, size: None,
            ),
            local=LocalSets(spool),
            terms=self._terms(),
        )

    def _terms(self) -> RankTerms:
        return RankTerms(
            job_id=self._config["job.id"],
            schedule=self._config["checkpoint.schedule"],
            hold_timeout_s=600.0,
            plan_timeout_s=120.0,
        )

    def _slot_maker(self, spool: Spool | None) -> Callable[[int, int, int, int], SlotBuffer]:
        choice = self._config["checkpoint.staging"]

        def make(rank: int, slot: int, size_bytes: int, num_ranks: int) -> SlotBuffer:
            # The slots of ranks before us are given but not yet touched, so not yet counted.
            wanted = size_bytes * NUM_SLOTS * num_ranks
            fits = wanted <= available_bytes() * MEMORY_SHARE
            if choice == "memory" or spool is None or (choice == "auto" and fits):
                return SlotBuffer.in_memory(f"lastgasp-{rank}-{slot}", size_bytes)
            return SlotBuffer.on_disk(spool.path, size_bytes)

        return make

    def _observer(self, store: ObjectStore, spool: Spool | None) -> Observer:
        return Observer(
            self._log,
            Metrics([phase.value for phase in Phase]),
            self._clock,
            job_id=self._config["job.id"],
            store_url=store.url,
            spool_path=spool.path if spool else None,
            num_lines_dropped=lambda: self._sink.num_dropped if self._sink.has_room else 0,
        )

    def _policy(self) -> Policy:
        config = self._config
        every_s = config["checkpoint.every"]
        every_steps = config["checkpoint.every_steps"]
        if every_s is None and every_steps is None:
            every_s = 600.0
        return Policy(
            every_steps=every_steps,
            every_s=every_s,
            max_crashes=config["restart.max_crashes"],
            backoff_base_s=config["restart.backoff"],
            backoff_cap_s=config["restart.backoff_cap"],
            hang_limit_s=config["restart.hang_limit"],
            attach_warning_s=config["restart.attach_warning"],
            after_notice=config["notice.after"],
            save_on_advice=config["notice.save_on_advice"],
            allow_fresh=self._options.allow_fresh,
        )

    # ------------------------------------------------------------ around the daemon

    def _start_status(self, observer: Observer) -> None:
        listen = self._config["status.listen"]
        if listen == "off":
            return
        server = StatusServer(
            observer.metrics.registry,
            snapshot=lambda: observer.snapshot,
            is_alive=lambda: self._clock.monotonic() - observer.published_at < 30.0,
            is_ready=lambda: observer.snapshot.get("phase") in ("training", "saving"),
        )
        try:
            server.start(listen)
        except OSError as error:
            self._log.warning(
                "status.unavailable",
                listen=listen,
                reason=str(error),
                hint='another job may use it: set [status] listen, or "127.0.0.1:0" for any port',
            )

    def _start_watchers(self) -> None:
        for source in self._sources():
            watcher = NoticeWatcher(
                source,
                clock=self._clock,
                on_notice=lambda notice: self._mailbox.put(inputs.NoticeReceived(notice=notice)),
                on_withdrawn=lambda name: self._mailbox.put(inputs.NoticeWithdrawn(source=name)),
                on_health=lambda health, failure: self._mailbox.note(
                    "health", health=health, failure=failure
                ),
            )
            watcher.start()
            self._watchers.append(watcher)

    def _sources(self) -> list[NoticeSource]:
        config = self._config
        wanted = set(config["notice.sources"])
        found: list[NoticeSource] = []
        if "ec2" in wanted or ("auto" in wanted and is_ec2()):
            found.append(
                Ec2Source(
                    endpoint=config["notice.ec2_endpoint"],
                    clock=self._clock,
                    poll_s=config["notice.poll"],
                )
            )
        if config["notice.file"] and "none" not in wanted:
            found.append(
                FileSource(
                    path=config["notice.file"],
                    lead_s=config["notice.file_lead"],
                    clock=self._clock,
                    poll_s=config["notice.poll"],
                )
            )
        return found

    def _warn_of_shell(self) -> None:
        command = shell_above_us()
        if command is not None:
            self._log.warning(
                "signals.may_not_arrive",
                reason=f"started by `{command}`, which does not pass SIGTERM on",
                hint="start it with exec: sh -c 'exec lastgasp run ...'; notices by metadata, by "
                "file and by `lastgasp notify` arrive either way",
            )

    def _handle_signals(self) -> None:
        lead_s = self._config["notice.sigterm_lead"]

        def on_signal(number: int, frame: Any) -> None:
            del frame
            source = "sigint" if number == signal.SIGINT else "sigterm"
            notice = Notice(
                source=source,
                kind=NoticeKind.STOP,
                deadline_at=self._clock.monotonic() + lead_s,
                reason=signal.Signals(number).name,
            )
            self._mailbox.put(inputs.NoticeReceived(notice=notice))

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        # A terminal that goes away is no reason to stop training.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _has_remains(log: CommitLog) -> bool:
    """Whether this job stored anything. A log begins before the first object, so without a log
    there is nothing, unless somebody removed it."""
    prefixes = (DATA_PREFIX, PART_PREFIX)
    return any(
        True
        for prefix in prefixes
        for _ in log.store.list_keys(log.keys.full(prefix), timeout_s=START_LIMIT_S)
    )
