"""Rows 60 to 63 and 71 of the fault matrix: the socket of a live job, and secrets in output."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct

import pytest

from supervisor.errors import ExitCode
from tests.conftest import s3_options
from tests.e2e.harness import assert_exact, read_log
from tests.fault_proxy import answer, cut_request
from tests.s3_server import SECRET_ACCESS_KEY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_f61_ranks_go_on_without_a_supervisor_and_join_the_next_one(quick_cluster, quick_twin):
    node = quick_cluster.node("a")
    quick_cluster.start(node, TOY_STEP_S="0.2")
    quick_cluster.wait_for_step(6)
    trainers = {process.pid for process in quick_cluster.ranks()}

    quick_cluster.kill_supervisor(node)
    alone_at = quick_cluster.lines(0)[-1]["step"]
    quick_cluster.wait_for_step(alone_at + 4)  # nobody answers, and nobody waits
    quick_cluster.start(node)
    quick_cluster.wait_for_event(node, "rank.joined")
    still_there = {process.pid for process in quick_cluster.ranks()}
    code = quick_cluster.finish(node)

    assert still_there == trainers != set()
    assert code == ExitCode.DONE
    assert quick_cluster.cli(node, "ls")["checkpoints"][-1]["step"] == 50
    assert_exact(read_log(quick_cluster.log), quick_twin)


HOSTILE = {
    "oversized": struct.pack("<I", 0xFFFFFFFF),
    "two MiB": struct.pack("<I", 2 << 20) + b"x" * 4096,
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "deep": struct.pack("<I", 200_000) + b"[" * 200_000,
    "not utf-8": struct.pack("<I", 4) + b"\xff\xfe\xfd\xfc",
    "nan": struct.pack("<I", 45) + b'{"type":"control","verb":"notify","x":  NaN }',
    "cut": struct.pack("<I", 1000) + b"half",
    "empty": struct.pack("<I", 0),
}


def test_f62_hostile_bytes_on_the_socket_of_a_live_job_hurt_nobody_else(quick_cluster, quick_twin):
    node = quick_cluster.node("a")
    quick_cluster.start(node, TOY_STEP_S="0.15")
    quick_cluster.wait_for_step(3)
    place = str(node.folder / "run" / "supervisor.sock")

    for data in HOSTILE.values():
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(place)
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(20)
            with contextlib.suppress(ConnectionResetError):  # what it had not read is thrown away
                assert peer.recv(1) == b""
    held = [socket.socket(socket.AF_UNIX) for _ in range(50)]
    for peer in held:
        peer.connect(place)
    status = quick_cluster.cli(node, "status")
    code = quick_cluster.finish(node)
    for peer in held:
        peer.close()

    dropped = [event for event in node.events() if event["event"] == "peer.dropped"]
    assert len(dropped) == len(HOSTILE)
    assert {event["error_id"] for event in dropped} == {"protocol_error"}
    assert status["phase"] in ("training", "saving")
    assert code == ExitCode.DONE
    assert "Traceback" not in node.stderr
    assert_exact(read_log(quick_cluster.log), quick_twin)


@pytest.mark.s3
def test_f71_a_secret_appears_nowhere_whatever_goes_wrong(make_cluster, s3_server, proxy):
    """Debug logs, every kind of store error, each verb's output, and every file we wrote."""
    options = s3_options(
        s3_server,
        proxy.url,
        TOY_WORKERS="0",
        LASTGASP_LOG__LEVEL="debug",
        LASTGASP_STORE__CHUNK_TIMEOUT="2s",
    )
    cluster = make_cluster(world=1, **options)
    node = cluster.node("a")
    cluster.start(node, TOY_STEP_S="0.2")
    cluster.wait_for_step(2)
    for fault in (
        answer(403, "AccessDenied"),
        answer(403, "SignatureDoesNotMatch"),
        answer(400, "ExpiredToken"),
        answer(500, "InternalError"),
        cut_request,
    ):
        rule = proxy.add(fault, key="/data/", times=3)
        cluster.wait(lambda rule=rule: rule.num_hits > 0, "the fault")
    outputs = [
        str(cluster.cli(node, *verb, check=False))
        for verb in (("status",), ("ls",), ("show",), ("verify",), ("doctor",))
    ]
    proxy.clear()
    proxy.add(answer(403, "InvalidAccessKeyId"))
    outputs.append(str(cluster.cli(node, "ls", check=False)))
    proxy.clear()
    node.process.send_signal(signal.SIGTERM)
    cluster.finish(node)
    files = [path.read_bytes() for path in cluster.folder.rglob("*") if path.is_file()]

    for secret in (SECRET_ACCESS_KEY, "X-Amz-Signature", "AWS4-HMAC-SHA256"):
        assert not [text for text in outputs if secret in text]
        assert not [data for data in files if secret.encode() in data]
