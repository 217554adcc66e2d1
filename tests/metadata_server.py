"""A scriptable instance metadata service over real HTTP on loopback.

It knows one thing of each cloud: which paths there are, what authorises a request, and what
"nothing" looks like. What happens is scripted by tests: notices, and faults per path. The EC2 shape
is `Imds`; another cloud is another subclass of `MetadataServer` with its own `answer`.
"""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is sent back."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with the next `times` requests of a path; None: with all of them.

    `status`, `body` and `headers` replace the answer where given. `drops` resets the connection
    without an answer; `cuts` sends half a body and closes; `hangs` answers nothing until the server
    stops, as a dropped packet does.
    """

    times: int | None = None
    status: int | None = None
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drops: bool = False
    cuts: bool = False
    hangs: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    status: int | None  # None: no answer was sent


class MetadataServer:
    """Serves `answer` with the scripted faults on top. Use it as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[tuple[str, str], list[list[Any]]] = {}
        self._is_over = threading.Event()
        self.requests: list[Request] = []
        owner = self

        class Handler(_Handler):
            metadata = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="metadata", daemon=True
        )

    def __enter__(self) -> MetadataServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, path: str, fault: Fault, *, method: str = "GET") -> None:
        """Script a fault; several of one path happen one after the other."""
        with self._lock:
            self._faults.setdefault((method, path), []).append([fault, fault.times])

    def mend(self) -> None:
        """Forget every fault."""
        with self._lock:
            self._faults.clear()

    def count(self, path: str, *, method: str = "GET") -> int:
        """How many requests of a path came so far."""
        with self._lock:
            return sum(r.path == path and r.method == method for r in self.requests)

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """What a healthy service says. Overridden by each cloud."""
        raise NotImplementedError

    # ------------------------------------------------------------ threads of the server

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            scripted = self._faults.get((method, path), [])
            while scripted and scripted[0][1] == 0:
                scripted.pop(0)
            if not scripted:
                return None
            if scripted[0][1] is not None:
                scripted[0][1] -= 1
            fault: Fault = scripted[0][0]
            return fault

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def wait(self, seconds: float | None) -> None:
        self._is_over.wait(seconds)


class Imds(MetadataServer):
    """EC2's metadata service, version 2 only.

    `now` is the clock by which tokens expire.

    Source: EC2 User Guide, "Use the Instance Metadata Service" (PUT with a TTL of 1 to 21600
    seconds, 400 for another one, 401 without a valid token) and "Spot Instance interruption
    notices" (404 while there is none).
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._tokens: dict[str, float] = {}
        self._documents: dict[str, bytes] = {}
        self.max_ttl_s = 21600

    def announce(self, time_text: str, action: str = "terminate") -> None:
        """The instance will be interrupted at `time_text`."""
        self.put(ACTION_PATH, json.dumps({"action": action, "time": time_text}).encode())

    def recommend_rebalance(self) -> None:
        """The instance is at an elevated risk."""
        self.put(REBALANCE_PATH, b'{"noticeTime":"2031-02-03T03:50:00Z"}')

    def put(self, path: str, body: bytes) -> None:
        """Have a path answer 200 with this body."""
        self._documents[path] = body

    def withdraw(self, path: str = ACTION_PATH) -> None:
        """Have a path answer 404 again."""
        self._documents.pop(path, None)

    def expire_tokens(self) -> None:
        """No token given so far is good any more."""
        self._tokens.clear()

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        if path == TOKEN_PATH:
            return self._give_token(method, headers)
        if method != "GET":
            return Answer(status=405)
        expires_at = self._tokens.get(headers.get(TOKEN_HEADER.lower(), ""))
        if expires_at is None or self._now() >= expires_at:
            return Answer(status=401)
        if path not in self._documents:
            return Answer(status=404, body=b"<html>404 - Not Found</html>")
        return Answer(body=self._documents[path])

    def _give_token(self, method: str, headers: Mapping[str, str]) -> Answer:
        if method != "PUT":
            return Answer(status=405)
        asked = headers.get(TTL_HEADER.lower(), "")
        if not asked.isdigit() or not 1 <= int(asked) <= 21600:
            return Answer(status=400)
        ttl_s = min(int(asked), self.max_ttl_s)
        token = f"token-{len(self.requests)}-{len(self._tokens)}"
        self._tokens[token] = self._now() + ttl_s
        return Answer(body=token.encode(), headers={TTL_HEADER: str(ttl_s)})


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that accepts connections and never says a word."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(16)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


class _Server(socketserver.ThreadingTCPServer):
    # Not http.server.HTTPServer: that one asks the DNS for our name when it binds.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no error of the service."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes; together they cost 40 ms
    metadata: MetadataServer

    def do_GET(self) -> None:
        self._serve("GET")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def log_message(self, format: str, *args: Any) -> None:
        """The request log is `requests`."""

    def _serve(self, method: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        fault = self.metadata.next_fault(method, self.path) or Fault()
        if fault.delay_s:
            self.metadata.wait(fault.delay_s)
        if fault.drops or fault.hangs:
            self.metadata.note(Request(method=method, path=self.path, headers=headers, status=None))
            if fault.hangs:
                self.metadata.wait(None)
            self._reset()
            return
        answer = self.metadata.answer(method, self.path, headers)
        status = fault.status or answer.status
        body = answer.body if fault.body is None else fault.body
        self.metadata.note(Request(method=method, path=self.path, headers=headers, status=status))
        self.send_response(status)
        for name, value in {**answer.headers, **fault.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) * 2 + 2 if fault.cuts else len(body)))
        self.end_headers()
        self.wfile.write(body)
        if fault.cuts:
            self._reset()

    def _reset(self) -> None:
        """Close with RST rather than FIN. Source: socket(7), SO_LINGER with a time of 0."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
