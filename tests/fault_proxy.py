"""An HTTP proxy in front of a real S3 server: passes on, logs every request, misbehaves on demand.

It forwards the `Host` header as it came, so that signatures stay valid. A `Rule` says which
requests it befalls and how often; the first rule that is due decides. Bodies are never changed on
the way to the server unless a rule says so.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

REPLY_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it came."""

    at: float
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    size_bytes: int
    status: int = 0  # what the client was answered; 0: nothing
    done_at: float = 0.0

    @property
    def key(self) -> str:
        return urllib.parse.unquote(self.path.split("/", 2)[-1])

    @property
    def access_key_id(self) -> str:
        """Who signed it, in a query string or a header."""
        signed = self.query.get("X-Amz-Credential") or self.headers.get("authorization", "")
        return signed.rpartition("Credential=")[2].split("/")[0]


Fault = Callable[["_Exchange"], None]


@dataclass(kw_only=True)
class Rule:
    """A fault and the requests it befalls.

    Args:
        method: of HTTP; empty for any. `key`: a piece of the key. `query`: a name in the query.
        skip: matching requests that pass first. `times`: how many it befalls; None for all.
        share: of the matching requests, drawn by a seeded generator.
    """

    fault: Fault
    method: str = ""
    key: str = ""
    query: str = ""
    header: str = ""
    when: Callable[[Request], bool] = lambda request: True
    skip: int = 0
    times: int | None = None
    share: float = 1.0
    num_hits: int = 0

    def befalls(self, request: Request, draw: float) -> bool:
        matches = (
            self.method in ("", request.method)
            and self.key in request.key
            and (not self.query or self.query in request.query)
            and (not self.header or self.header in request.headers)
            and self.when(request)
        )
        if not matches:
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if (self.times is not None and self.num_hits >= self.times) or draw >= self.share:
            return False
        self.num_hits += 1
        return True


# ---------------------------------------------------------------- faults


def answer(status: int, code: str = "", **headers: str) -> Fault:
    """Refuse without asking the server; `code` is S3's error code."""
    body = f"<Error><Code>{code}</Code><Message>fault</Message></Error>".encode() if code else b""
    return lambda exchange: exchange.reply(status, body, headers)


def delay(seconds: float) -> Fault:
    """Pass it on later."""

    def fault(exchange: _Exchange) -> None:
        time.sleep(seconds)
        exchange.relay()

    return fault


def delay_reply(seconds: float) -> Fault:
    """The server does it at once, and the client hears of it later."""

    def fault(exchange: _Exchange) -> None:
        reply = exchange.forward()
        time.sleep(seconds)
        exchange.reply(*_in_order(*reply))

    return fault


def append_to_body(trailer: bytes) -> Fault:
    """Have the server store more than was sent."""

    def fault(exchange: _Exchange) -> None:
        exchange.alter_body(lambda body: body + trailer)
        exchange.relay()

    return fault


def flip_bit_of_body(exchange: _Exchange) -> None:
    """Have the server store other bytes of the same length."""
    exchange.alter_body(lambda body: bytes([body[0] ^ 1]) + body[1:])
    exchange.relay()


def hold_until(event: threading.Event) -> Fault:
    """Pass it on once the event is set."""

    def fault(exchange: _Exchange) -> None:
        event.wait(REPLY_LIMIT_S)
        exchange.relay()

    return fault


def black_hole(seconds: float) -> Fault:
    """Read it, never answer, hang up in the end."""

    def fault(exchange: _Exchange) -> None:
        time.sleep(seconds)
        exchange.reset()

    return fault


def cut_request(exchange: _Exchange) -> None:
    """Reset the connection; the server sees nothing of it."""
    exchange.reset()


def lose_reply(exchange: _Exchange) -> None:
    """The server does it, and the client never hears of it."""
    exchange.forward()
    exchange.reset()


def replace_reply(status: int, body: bytes = b"") -> Fault:
    """The server does it, and the client hears something else."""

    def fault(exchange: _Exchange) -> None:
        exchange.forward()
        exchange.reply(status, body, {})

    return fault


def corrupt_reply(exchange: _Exchange) -> None:
    """One bit of the body is turned on its way to the client."""
    status, headers, body = exchange.forward()
    if body:
        body = bytes([body[0] ^ 1]) + body[1:]
    exchange.reply(status, body, headers)


def cut_reply(exchange: _Exchange) -> None:
    """Half of the body, then a reset."""
    status, headers, body = exchange.forward()
    exchange.send(status, headers, body[: len(body) // 2], announced=len(body))
    exchange.reset()


def replace_status(old: int, new: int) -> Fault:
    """The server's answer, with this status in place of that one."""

    def fault(exchange: _Exchange) -> None:
        status, headers, body = exchange.forward()
        exchange.reply(new if status == old else status, b"" if status == old else body, headers)

    return fault


# ---------------------------------------------------------------- the proxy


class FaultProxy:
    """Use as a context manager; `url` is the endpoint to configure."""

    def __init__(self, upstream_port: int, *, seed: int = 0) -> None:
        self.requests: list[Request] = []
        self.rules: list[Rule] = []
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        handler = type("Handler", (_Exchange,), {"proxy": self, "upstream_port": upstream_port})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, fault: Fault, **where: Any) -> Rule:
        """Have a fault befall requests from now on; see `Rule`."""
        rule = Rule(fault=fault, **where)
        with self._lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """Behave again."""
        with self._lock:
            self.rules.clear()

    def seen(self, method: str = "", key: str = "") -> list[Request]:
        """The requests so far."""
        with self._lock:
            return [
                request
                for request in self.requests
                if method in ("", request.method) and key in request.key
            ]

    def choose(self, request: Request) -> Fault | None:
        with self._lock:
            for rule in self.rules:
                if rule.befalls(request, self._rng.random()):
                    return rule.fault
        return None

    def log(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news here."""


@dataclass
class _Pending:
    request: Request
    body: bytes
    status: int = 0
    reply: tuple[int, dict[str, str], bytes] | None = field(default=None)


class _Exchange(BaseHTTPRequestHandler):
    """One connection; `do_any` is one request on it."""

    protocol_version = "HTTP/1.1"
    proxy: FaultProxy
    upstream_port: int
    _pending: _Pending

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        split = urllib.parse.urlsplit(self.path)
        request = Request(
            at=time.monotonic(),
            method=self.command,
            path=split.path,
            query=dict(urllib.parse.parse_qsl(split.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            size_bytes=len(body),
        )
        self._pending = _Pending(request, body)
        fault = self.proxy.choose(request)
        try:
            fault(self) if fault else self.relay()
        finally:
            status = self._pending.status
            self.proxy.log(replace(request, status=status, done_at=time.monotonic()))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def forward(self) -> tuple[int, dict[str, str], bytes]:
        """Ask the server; its reply is not passed on yet."""
        server = http.client.HTTPConnection("127.0.0.1", self.upstream_port, timeout=REPLY_LIMIT_S)
        try:
            headers = {n: v for n, v in self.headers.items() if n.lower() != "expect"}
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                server.putheader(name, value)
            server.endheaders(self._pending.body or None)
            reply = server.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            server.close()

    def alter_body(self, change: Callable[[bytes], bytes]) -> None:
        """For the signed requests of ours, whose signature does not cover the body."""
        self._pending.body = change(self._pending.body)
        self.headers.replace_header("Content-Length", str(len(self._pending.body)))

    def relay(self) -> None:
        self.reply(*_in_order(*self.forward()))

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send(status, headers, body, announced=len(body))

    def send(self, status: int, headers: dict[str, str], body: bytes, *, announced: int) -> None:
        self._pending.status = status
        hidden = {"content-length", "transfer-encoding", "connection"}
        self.send_response_only(status)
        is_head = self.command == "HEAD"
        for name, value in headers.items():
            if name.lower() not in hidden or (is_head and name.lower() == "content-length"):
                self.send_header(name, value)
        if not is_head:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)
        self.wfile.flush()

    def reset(self) -> None:
        """RST, not FIN."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    def log_message(self, format: str, *arguments: Any) -> None:
        """The proxy keeps its own log."""


def _in_order(
    status: int, headers: dict[str, str], body: bytes
) -> tuple[int, bytes, dict[str, str]]:
    return status, body, headers
