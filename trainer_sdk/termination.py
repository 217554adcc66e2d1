"""SIGTERM to a rank: while the supervisor has a notice, the rank lives on to its stop step.

Many platforms send SIGTERM to every process of a job at once. The supervisor hears it too and takes
it for a notice; a rank that died of it in the same moment could not save any more. So a rank waits
for the supervisor's word: with a notice it goes on to the boundary, without one it dies as it would
have. Nothing is saved from a signal handler. A handler of the script's own is never replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

# How long after SIGTERM the supervisor's notice may show. A rank that torchrun stops because
# another one failed lives so much longer.
_WORD_WITHIN_S = 3.0
_LOOK_EVERY_S = 0.01
# A loader worker serves its rank for so long after a SIGTERM; then the kernel ends it. Long enough
# for the batches up to the stop step, short enough for a loader that ends a worker which hangs.
_WORKER_GRACE_S = 15

_guards: weakref.WeakSet[TerminationGuard] = weakref.WeakSet()


class TerminationGuard:
    """Decides about SIGTERM on a thread of its own, so that a rank that hangs can still be ended.

    Invariant: it is in place only where nothing else handled SIGTERM, and `close()` leaves the
    process as it was found, unless the script has put a handler of its own there since.
    """

    def __init__(self, has_notice: Callable[[], bool]) -> None:
        """Take SIGTERM over; `has_notice` is asked from the guard's thread.

        Raises:
            ValueError: not the main thread.
        """
        self._has_notice = has_notice
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write_fd, False)
        self._is_closed = False
        try:
            signal.signal(signal.SIGTERM, self._on_signal)
        except ValueError:
            os.close(self._read_fd)
            os.close(self._write_fd)
            raise
        # The handler above waits for the main thread, which may hang; this descriptor does not.
        taken = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if taken != -1:  # an event loop's: it goes first
            signal.set_wakeup_fd(taken)
        self._thread = threading.Thread(
            target=self._decide, name="trainer-sdk-sigterm", daemon=True
        )
        self._thread.start()
        _guards.add(self)

    def close(self) -> None:
        """Give SIGTERM back."""
        if self._is_closed:
            return
        self._is_closed = True
        self._give_back()
        os.write(self._write_fd, b"\0")
        self._thread.join()
        if threading.current_thread() is not threading.main_thread():
            return  # the interpreter still writes into them: closed, the number were another file's
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _give_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; the handler then only ends the process
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, self._write_fd):
            signal.set_wakeup_fd(found)

    def forget_in_child(self) -> None:
        """A forked child is no rank: SIGTERM ends it at once."""
        self._is_closed = True
        self._give_back()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_closed:
            _die()
        with contextlib.suppress(BlockingIOError):  # full of signals already
            os.write(self._write_fd, bytes([number]))

    def _decide(self) -> None:
        while not self._is_closed:
            numbers = os.read(self._read_fd, 4096)
            if signal.SIGTERM in numbers and not self._is_closed and not self._is_excused():
                _die()

    def _is_excused(self) -> bool:
        if signal.getsignal(signal.SIGTERM) != self._on_signal:
            return True  # the script's own handler has run
        limit = time.monotonic() + _WORD_WITHIN_S
        while not self._is_closed and time.monotonic() < limit:
            if self._has_notice():
                return True
            time.sleep(_LOOK_EVERY_S)
        return self._is_closed


def guard_rank(has_notice: Callable[[], bool]) -> TerminationGuard | None:
    """A guard, or None where SIGTERM is the script's own affair."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return None
    return TerminationGuard(has_notice)


def guard_worker() -> None:
    """Have a loader worker go on serving its rank after a SIGTERM. It ends with its rank, whose
    death it notices by itself."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _serve_on)


def _serve_on(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.alarm(_WORKER_GRACE_S)


def _die() -> None:
    """Die of SIGTERM, from any thread and whatever the main thread is doing."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGTERM, None)  # SIG_DFL; python's own signal() is the main thread's
    os.kill(os.getpid(), signal.SIGTERM)


def _forget_in_child() -> None:
    for guard in list(_guards):
        guard.forget_in_child()
    _guards.clear()


os.register_at_fork(after_in_child=_forget_in_child)
