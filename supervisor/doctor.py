"""`lastgasp doctor`: does this node have what a save in an emergency needs? One line a check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from supervisor import wiring
from supervisor.checkpoint.image_file import ImageWriter
from supervisor.checkpoint.spool_errors import SpoolError
from supervisor.clock import SystemClock
from supervisor.config import Config, runtime_dir, spool_root
from supervisor.errors import SupervisorError
from supervisor.memory import available_bytes
from supervisor.notices.base import SourceFailed
from supervisor.notices.ec2 import Ec2Source, is_ec2
from supervisor.private_dirs import make_private
from supervisor.ranks.slots import SlotBuffer
from supervisor.units import show_size

TRIAL_BYTES = 64 << 20
PROBE_LIMIT_S = 20.0
MAX_SKEW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    result: Literal["pass", "warn", "fail"]
    detail: str
    mend: str = ""


def examine(config: Config, environ: Mapping[str, str]) -> list[Finding]:
    """Run every check; a check that breaks is a finding, never an error."""
    checks: list[Callable[[], Finding]] = [
        lambda: _store(config),
        lambda: _clock_skew(config),
        lambda: _spool(config, environ),
        _memory,
        lambda: _runtime(config, environ),
        _torchrun,
        lambda: _metadata(config),
    ]
    return [check() for check in checks]


def _failed(check: str, error: SupervisorError) -> Finding:
    return Finding(check=check, result="fail", detail=error.message, mend=error.hint)


def _store(config: Config) -> Finding:
    clock = SystemClock()
    try:
        store = wiring.open_store(config, clock, on_retry=lambda error_id: None)
        prefix = wiring.open_log(config, clock, store).keys.prefix
        store.probe(prefix, timeout_s=PROBE_LIMIT_S)
        key = f"{prefix}probe/{uuid.uuid4().hex}"
        data = memoryview(bytes(8 << 20))
        began_at = clock.monotonic()
        store.put_bytes(key, bytes(data), timeout_s=PROBE_LIMIT_S)
        took_s = clock.monotonic() - began_at
        store.delete(key, timeout_s=PROBE_LIMIT_S)
    except SupervisorError as error:
        return _failed("store", error)
    rate = show_size(int(len(data) / max(took_s, 1e-6)))
    return Finding(
        check="store",
        result="pass",
        detail=f"{store.url}: create-if-absent holds; one 8 MiB object at {rate}/s",
    )


def _clock_skew(config: Config) -> Finding:
    clock = SystemClock()
    try:
        store = wiring.open_store(config, clock, on_retry=lambda error_id: None)
        skew_s = clock.wall() - store.server_time(timeout_s=PROBE_LIMIT_S)
    except SupervisorError as error:
        return _failed("clock", error)
    if abs(skew_s) > MAX_SKEW_S:
        return Finding(
            check="clock",
            result="fail",
            detail=f"this machine's clock is {skew_s:.0f} s off the store's",
            mend="S3 refuses requests that are 15 minutes off: start chrony or systemd-timesyncd",
        )
    return Finding(check="clock", result="pass", detail=f"{abs(skew_s):.1f} s off the store's")


def _spool(config: Config, environ: Mapping[str, str]) -> Finding:
    root = spool_root(config, environ)
    path = os.path.join(root, f"doctor-{uuid.uuid4().hex}")
    clock = SystemClock()
    try:
        make_private(root)
        free = shutil.disk_usage(root).free
        began_at = clock.monotonic()
        writer = ImageWriter(path, size_bytes=TRIAL_BYTES)
        writer.write(SlotBuffer.in_memory("doctor", TRIAL_BYTES).view(TRIAL_BYTES), 0)
        writer.finish()
        took_s = clock.monotonic() - began_at
        os.unlink(path)
    except SpoolError as error:
        return _failed("spool", error)
    except OSError as error:
        return Finding(
            check="spool", result="fail", detail=f"{root}: {error.strerror}",
            mend="set [spool] path to a disk that this user may write to",
        )  # fmt: skip
    how = "O_DIRECT" if writer.is_direct else "through the page cache (no O_DIRECT here)"
    return Finding(
        check="spool",
        result="pass" if writer.is_direct else "warn",
        detail=f"{root}: {show_size(int(TRIAL_BYTES / took_s))}/s {how}, {show_size(free)} free",
        mend="" if writer.is_direct else "a local ext4 or xfs disk is faster",
    )


def _memory() -> Finding:
    return Finding(
        check="memory",
        result="pass",
        detail=f"{show_size(available_bytes())} to be had within the cgroup's limit; images need "
        "twice the job's state on this node",
    )


def _runtime(config: Config, environ: Mapping[str, str]) -> Finding:
    path = runtime_dir(config, environ)
    parent = path
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.access(parent, os.W_OK):
        return Finding(
            check="runtime directory",
            result="fail",
            detail=f"{path} cannot be made: {parent} is not writable",
            mend="set [job] runtime_dir",
        )
    return Finding(check="runtime directory", result="pass", detail=path)


def _torchrun() -> Finding:
    path = shutil.which("torchrun")
    if path is None:
        return Finding(
            check="torchrun",
            result="warn",
            detail="not on PATH",
            mend="activate the environment of the training, or give its path after `--`",
        )
    try:
        told = subprocess.run(
            [path, "--help"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(check="torchrun", result="warn", detail=f"{path}: {error}")
    has_timeout = re.search(r"--shutdown[-_]timeout", told) is not None
    return Finding(
        check="torchrun",
        result="pass",
        detail=f"{path}; shutdown timeout {'can' if has_timeout else 'cannot'} be set (lastgasp "
        "does not depend on it: ranks are told over the socket)",
    )


def _metadata(config: Config) -> Finding:
    wanted = config["notice.sources"]
    if "ec2" not in wanted and not ("auto" in wanted and is_ec2()):
        watched = config["notice.file"]
        return Finding(
            check="notices",
            result="pass" if watched else "warn",
            detail=f"file {watched}" if watched else "no metadata source on this machine",
            mend="" if watched else "SIGTERM and `lastgasp notify` work; see [notice] sources",
        )
    source = Ec2Source(
        endpoint=config["notice.ec2_endpoint"], clock=SystemClock(), poll_s=config["notice.poll"]
    )
    try:
        source.look()
    except SourceFailed as error:
        return Finding(check="notices", result="fail", detail=error.message, mend=error.hint)
    return Finding(check="notices", result="pass", detail="EC2 metadata answers by IMDSv2")
