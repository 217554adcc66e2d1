"""The command line's side of the supervisor's socket."""

from __future__ import annotations

import json
import os
import socket
from typing import Any, Literal

from supervisor.errors import SupervisorError
from trainer_sdk.protocol import framing, messages
from trainer_sdk.protocol.errors import ProtocolError

TIMEOUT_S = 10.0
Verb = Literal["status", "save", "notify", "withdraw", "drill", "stop"]


class SupervisorNotRunning(SupervisorError):
    """No supervisor of this job answers on this node."""

    error_id = "supervisor_not_running"
    mend = "start it with `lastgasp run`, on this node, as this user"


def ask(
    directory: str, verb: Verb, *, reason: str = "", deadline_s: float | None = None
) -> dict[str, Any]:
    """Ask the running supervisor.

    Returns:
        Its answer: `is_ok`, `said` and the `status` document.

    Raises:
        SupervisorNotRunning: nobody answers.
    """
    control = messages.Control(
        protocol=messages.PROTOCOL_VERSION, verb=verb, reason=reason, deadline_s=deadline_s
    )
    path = os.path.join(directory, "supervisor.sock")
    try:
        with _connect(path) as sock:
            framing.send_frame(sock, messages.encode(control))
            body, fds = framing.receive_frame(sock)
            framing.close_all(fds)
        reply = messages.decode_from_supervisor(body)
    except (OSError, ProtocolError) as error:
        raise SupervisorNotRunning(
            f"no supervisor of this job answers at {path}: {error}",
            hint="start it with `lastgasp run`, or look at the store with `lastgasp ls`",
        ) from error
    if not isinstance(reply, messages.Reply):
        raise SupervisorNotRunning(f"what answers at {path} is not a supervisor")
    return {"is_ok": reply.is_ok, **json.loads(reply.body)}


def _connect(path: str) -> socket.socket:
    short, directory = framing.short_socket_path(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(TIMEOUT_S)
    try:
        sock.connect(short)
    except OSError:
        sock.close()
        raise
    finally:
        if directory is not None:
            os.close(directory)
    return sock
