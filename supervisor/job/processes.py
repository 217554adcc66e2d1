"""Find and end every process of a launch, wherever it hangs in the process tree.

torchrun puts each rank into a session of its own, and when torchrun is killed its ranks live on. So
neither process groups nor parentage find them all; the launch id in their environment does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil

from supervisor.clock import Clock
from supervisor.job.launch import JobProcess
from supervisor.job.rank_env import MARKER

TERM_GRACE_S = 5.0
KILL_LIMIT_S = 30.0
LOOK_EVERY_S = 0.05
SHELLS = frozenset({"sh", "ash", "bash", "dash", "ksh", "zsh", "busybox"})


def members(launch: str) -> list[psutil.Process]:
    """Every process whose environment carries this launch id, except ourselves."""
    own_uid = os.getuid()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.uids().real != own_uid:
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == launch:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def stop_job(
    job: JobProcess | None,
    launch: str,
    *,
    clock: Clock,
    patience_s: float,
    on_left: Callable[[list[int]], None],
) -> None:
    """End a launch: wait, then one SIGTERM to torchrun, then SIGKILL to all that is left.

    torchrun gets one SIGTERM only: a second one during its own wait restarts its clock and a third
    can orphan ranks.

    Args:
        patience_s: how long torchrun may take to end by itself, its ranks having left already.
        on_left: told the pids that survived even SIGKILL (stuck in the kernel).

    Source: torch/distributed/elastic/multiprocessing/api.py, SignalException handling.
    """
    if job is not None and not job.has_ended and not job.wait(patience_s):
        _send(job.pid, signal.SIGTERM)
        job.wait(TERM_GRACE_S)
    give_up_at = clock.monotonic() + KILL_LIMIT_S
    while left := members(launch):
        for process in left:
            _send(process.pid, signal.SIGKILL)
        if clock.monotonic() > give_up_at:
            on_left([process.pid for process in left])
            return
        # Not psutil's own wait: it would reap our child, and its exit code were lost as 0.
        clock.sleep(LOOK_EVERY_S)


def shell_above_us() -> str | None:
    """A `sh -c ...` that waits for us, and so gets the signals that are meant for us; else None.

    Its whole command is not returned: it may hold what nobody should read in a log.
    """
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent is not None else []
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    if not command or os.path.basename(command[0]).lstrip("-") not in SHELLS:
        return None
    flags = [argument for argument in command[1:3] if argument.startswith("-")]
    is_script = any("c" in flag and not flag.startswith("--") for flag in flags)
    return f"{os.path.basename(command[0])} -c" if is_script else None


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself meanwhile
