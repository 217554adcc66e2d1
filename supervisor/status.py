"""The status server: /metrics, /healthz, /readyz, /status.json and a page at /. Read-only.

Bound to loopback unless configured. Requests are served by threads of their own with limits, so a
slow client delays nothing.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from supervisor.errors import ConfigError

REQUEST_TIMEOUT_S = 5.0
Headers = list[tuple[str, str]]
StartResponse = Callable[[str, Headers], Any]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 16

    def server_bind(self) -> None:
        """Without WSGIServer's reverse look-up, which hangs where there is no DNS."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not events of the job."""

    def address_string(self) -> str:
        return str(self.client_address[0])


class StatusServer:
    """Serves what `snapshot` gives. `is_alive` and `is_ready` answer the probes."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        snapshot: Callable[[], dict[str, Any]],
        is_alive: Callable[[], bool],
        is_ready: Callable[[], bool],
    ) -> None:
        self._metrics = make_wsgi_app(registry)
        self._snapshot = snapshot
        self._is_alive = is_alive
        self._is_ready = is_ready
        self.address = ""

    def start(self, listen: str) -> None:
        """Bind and serve.

        Raises:
            OSError: the address is taken.
            ConfigError: not host:port.
        """
        host, port = parse_address(listen)
        server = make_server(host, port, self._answer, _Server, _Handler)
        self.address = f"{host}:{server.server_port}"
        threading.Thread(target=server.serve_forever, name="status-server", daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _text(start, "405 Method Not Allowed", "only GET\n")
        if path == "/metrics":
            body: Iterable[bytes] = self._metrics(environ, start)
            return body
        if path == "/status.json":
            return _reply(start, "200 OK", "application/json", json.dumps(self._snapshot()))
        if path == "/healthz":
            return _probe(start, self._is_alive())
        if path == "/readyz":
            return _probe(start, self._is_ready())
        if path == "/":
            return _text(start, "200 OK", json.dumps(self._snapshot(), indent=2) + "\n")
        return _text(start, "404 Not Found", "try / /metrics /healthz /readyz /status.json\n")


def parse_address(listen: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: not host:port.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"status.listen = {listen!r} is not an address",
            hint='it takes host:port such as "127.0.0.1:9877", or "off"',
        )
    return host.strip("[]"), int(port)


def _probe(start: StartResponse, is_well: bool) -> Iterable[bytes]:
    if is_well:
        return _text(start, "200 OK", "ok\n")
    return _text(start, "503 Service Unavailable", "not ok\n")


def _text(start: StartResponse, status: str, body: str) -> Iterable[bytes]:
    return _reply(start, status, "text/plain; charset=utf-8", body)


def _reply(start: StartResponse, status: str, kind: str, body: str) -> Iterable[bytes]:
    data = body.encode()
    start(status, [("Content-Type", kind), ("Content-Length", str(len(data)))])
    return [data]
