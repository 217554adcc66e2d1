"""An error of ours that ends the process is told to the supervisor, so that it does not try again.

Whatever the script does about such an error is its own affair: only if it is what the interpreter
dies of does the supervisor hear of it, from an exit handler, over a connection of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import weakref
from collections.abc import Callable

from trainer_sdk.errors import TrainerSdkError
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.framing import close_all, connect, receive_frame, send_frame
from trainer_sdk.protocol.messages import (
    Hello,
    Rejected,
    RestoreFailed,
    Welcome,
    decode_from_supervisor,
    encode,
)

# Claiming a generation asks the store, which may be slow.
PATIENCE_S = 30.0
HEARD_WITHIN_S = 1.0
MAX_REASON = 60_000

log = logging.getLogger("trainer_sdk")


# The errors that were raised and are still referred to by someone: one may end this process.
_alive: weakref.WeakKeyDictionary[TrainerSdkError, tuple[str, Callable[[str], None]]] = (
    weakref.WeakKeyDictionary()
)


def tell_if_fatal(error: TrainerSdkError, tell: Callable[[str], None]) -> None:
    """Have `tell` called with the reason, in an exit handler, if this process ends by `error`."""
    _alive[error] = (str(error)[:MAX_REASON], tell)


def _tell_at_exit() -> None:
    # Source: CPython, PyErr_PrintEx: an exception that nobody caught is kept in sys.last_value.
    fatal = getattr(sys, "last_value", None)
    if not isinstance(fatal, TrainerSdkError) or fatal not in _alive:
        return
    reason, tell = _alive[fatal]
    try:
        tell(reason)
    except (OSError, ProtocolError, TrainerSdkError):
        log.debug("the supervisor did not hear why this process ends")


atexit.register(_tell_at_exit)


def tell_anew(reason: str, path: str, hello: Hello) -> None:
    """Tell the supervisor at `path` over a connection of its own.

    Raises:
        OSError, ProtocolError: it does not listen.
    """
    with connect(path, timeout_s=PATIENCE_S) as sock:
        send_frame(sock, encode(hello))
        while True:
            body, fds = receive_frame(sock)
            close_all(fds)
            message = decode_from_supervisor(body)
            if isinstance(message, Welcome):
                send_frame(sock, encode(RestoreFailed(reason=reason, is_checkpoint_bad=False)))
                # The supervisor must not see our end before it sees the reason; it does not answer.
                sock.settimeout(HEARD_WITHIN_S)
                with contextlib.suppress(TimeoutError):
                    sock.recv(1)
                return
            if isinstance(message, Rejected):
                return
