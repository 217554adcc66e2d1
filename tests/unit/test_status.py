"""The status server over real HTTP: what it answers, and that nobody can hold it up."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from supervisor.errors import ConfigError
from supervisor.metrics import Metrics
from supervisor.status import StatusServer, parse_address


class Served:
    """A server and the facts it serves."""

    def __init__(self) -> None:
        self.metrics = Metrics(["starting", "training"])
        self.snapshot: dict[str, Any] = {"phase": "training", "step": 7}
        self.is_alive = True
        self.is_ready = True
        self._server = StatusServer(
            self.metrics.registry,
            snapshot=lambda: self.snapshot,
            is_alive=lambda: self.is_alive,
            is_ready=lambda: self.is_ready,
        )
        self._server.start("127.0.0.1:0")
        host, _, port = self._server.address.rpartition(":")
        self.address = host, int(port)

    def ask(
        self, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Status, content type and body."""
        connection = http.client.HTTPConnection(*self.address, timeout=5)
        try:
            connection.request(method, path, headers=headers or {})
            reply = connection.getresponse()
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def shared() -> Served:
    return Served()


@pytest.fixture
def served(shared: Served) -> Served:
    shared.is_alive = shared.is_ready = True
    return shared


def test_metrics_are_what_prometheus_reads(served: Served) -> None:
    served.metrics.set_phase("training")
    served.metrics.notices.labels("ec2").inc()

    status, kind, body = served.ask("/metrics")

    families = {family.name: family for family in text_string_to_metric_families(body)}
    phases = {s.labels["state"]: s.value for s in families["lastgasp_job_state"].samples}
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert phases == {"starting": 0.0, "training": 1.0}
    assert families["lastgasp_preemption_notices"].samples[0].labels == {"source": "ec2"}
    assert all(name.startswith("lastgasp_") for name in families)


def test_every_metric_is_documented_and_in_base_units(served: Served) -> None:
    _, _, body = served.ask("/metrics")

    for family in text_string_to_metric_families(body):
        assert family.documentation, family.name
        assert not family.name.endswith(("_ms", "_mb", "_minutes", "_percent")), family.name


def test_the_status_is_one_json_document(served: Served) -> None:
    status, kind, body = served.ask("/status.json")

    assert (status, kind) == (200, "application/json")
    assert json.loads(body) == {"phase": "training", "step": 7}


def test_the_page_shows_the_status_to_people(served: Served) -> None:
    status, kind, body = served.ask("/")

    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert '"step": 7' in body


@pytest.mark.parametrize(("path", "fact"), [("/healthz", "is_alive"), ("/readyz", "is_ready")])
def test_a_probe_answers_what_is_so_now(served: Served, path: str, fact: str) -> None:
    assert served.ask(path)[0] == 200

    setattr(served, fact, False)

    assert served.ask(path)[0] == 503


@pytest.mark.parametrize("path", ["/nothing", "/metrics/", "/status.json/..", "/%2e%2e/etc"])
def test_another_path_is_404(served: Served, path: str) -> None:
    assert served.ask(path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/status.json"])
def test_nothing_can_be_changed_over_http(served: Served, method: str, path: str) -> None:
    assert served.ask(path, method)[0] == 405


def test_a_head_request_has_no_body(served: Served) -> None:
    status, _, body = served.ask("/healthz", "HEAD")

    assert (status, body) == (200, "")


def test_slow_clients_delay_nobody(served: Served) -> None:
    """Ten that never finish their request, and one that never reads its answer."""
    slow = [socket.create_connection(served.address) for _ in range(10)]
    try:
        for sock in slow:
            sock.sendall(b"GET /met")

        status, _, _ = served.ask("/healthz")

        assert status == 200
    finally:
        for sock in slow:
            sock.close()


def test_a_client_that_leaves_or_talks_rubbish_harms_nobody(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    for rubbish in (b"", b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(served.address) as sock:
            sock.sendall(rubbish)

    assert served.ask("/healthz")[0] == 200


def test_a_taken_address_is_an_error_that_the_caller_sees(served: Served) -> None:
    server = StatusServer(
        served.metrics.registry,
        snapshot=dict,
        is_alive=lambda: True,
        is_ready=lambda: True,
    )

    with pytest.raises(OSError):
        server.start(f"127.0.0.1:{served.address[1]}")


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("127.0.0.1:9877", ("127.0.0.1", 9877)), ("[::1]:80", ("::1", 80)), ("host:0", ("host", 0))],
)
def test_an_address_is_host_and_port(listen: str, expected: tuple[str, int]) -> None:
    assert parse_address(listen) == expected


@pytest.mark.parametrize("listen", ["", "9877", ":80", "host:", "host:http", "host:70000"])
def test_what_is_no_address_is_refused_with_a_hint(listen: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as caught:
        parse_address(listen)

    assert caught.value.hint
