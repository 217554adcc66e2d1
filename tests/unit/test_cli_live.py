"""The command line beside a supervisor that runs; its job is a shell that never attaches."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from supervisor.daemon import MAX_REPLY_BYTES, _reply_body
from supervisor.errors import ExitCode
from tests.fakes import wait_until
from trainer_sdk.protocol import framing, messages

PROGRAM = [sys.executable, "-m", "supervisor"]


class Live:
    """A supervisor process in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "store").mkdir()
        (folder / "job.toml").write_text(
            f'[job]\nid = "live"\nruntime_dir = "{folder}/run"\n'
            f'[store]\nurl = "file://{folder}/store"\n[spool]\npath = "{folder}/spool"\n'
            f'[notice]\nsources = ["none"]\nsigterm_lead = "2s"\n'
            f'[status]\nlisten = "127.0.0.1:0"\n'
        )
        self.environ = {"PATH": os.environ["PATH"], "HOME": str(folder)}
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*PROGRAM, "run", "--json", "--", "sh", "-c", "sleep 600"],
                cwd=folder,
                env=self.environ,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: "job.launched" in self.events())

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines()]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def ask(self, *arguments: str) -> tuple[int, Any]:
        """The exit code of another command in this folder, and its document or error."""
        done = subprocess.run(
            [*PROGRAM, *arguments, "--json"],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or done.stderr)

    def connect(self) -> socket.socket:
        path, directory = framing.short_socket_path(str(self.folder / "run/supervisor.sock"))
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(path)
        if directory is not None:
            os.close(directory)
        return sock

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    running = Live(tmp_path_factory.mktemp("live"))
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get("LASTGASP_SOCKET", "").startswith(str(running.folder)):
                process.kill()
        except psutil.Error:
            continue


def a_control(verb: str) -> bytes:
    return messages.encode(
        messages.Control(protocol=messages.PROTOCOL_VERSION, verb=verb)  # type: ignore[arg-type]
    )


def test_status_comes_from_the_supervisor(live: Live) -> None:
    code, document = live.ask("status")

    assert code == 0
    assert document["is_live"] is True
    assert (document["job_id"], document["phase"]) == ("live", "starting")


def test_a_drill_is_refused_while_the_job_does_not_train(live: Live) -> None:
    code, error = live.ask("drill")

    assert (code, error["error_id"]) == (ExitCode.USAGE, "drill_refused")
    assert live.process.poll() is None


def test_a_second_run_of_the_job_is_79_and_leaves_the_first_alone(live: Live) -> None:
    done = subprocess.run(
        [*PROGRAM, "run", "--json", "--", "true"],
        cwd=live.folder,
        env=live.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    error = json.loads(done.stderr)
    assert (done.returncode, error["error_id"]) == (ExitCode.ALREADY_RUNNING, "already_running")
    assert live.ask("status")[1]["phase"] == "starting"


def test_orders_with_descriptors_leave_none_behind(live: Live) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{live.process.pid}/fd"))

    with live.connect() as sock:
        framing.send_frame(sock, a_control("status"))
        framing.receive_frame(sock)
        before = count()
        for _ in range(5):
            framing.send_frame(sock, a_control("status"), [0] * messages.MAX_FDS)
            framing.receive_frame(sock)

        wait_until(lambda: count() <= before)


def test_a_peer_that_breaks_the_protocol_is_dropped_and_logged(live: Live) -> None:
    with live.connect() as sock:
        framing.send_frame(sock, messages.encode(messages.Boundary(step=1)))

        assert sock.recv(1) == b""

    wait_until(lambda: "peer.dropped" in live.events())
    assert live.ask("status")[0] == 0


def test_every_event_in_the_log_is_one_line_with_the_job(live: Live) -> None:
    assert all(line["job_id"] == "live" for line in live.lines())
    assert "supervisor.started" in live.events()


def test_sigterm_before_any_training_is_143_and_nothing_is_left(live: Live) -> None:
    children = psutil.Process(live.process.pid).children(recursive=True)
    assert children

    code = live.end()

    assert code == ExitCode.TERMINATED
    # Killed, and perhaps not yet waited for by whoever inherited it.
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]


# ---------------------------------------------------------------- large answers


def test_an_answer_with_large_receipts_fits_into_a_frame() -> None:
    """Eight ranks with receipts of a quarter megabyte each once ended the daemon."""
    ranks = {str(rank): {"step": 5, "receipt": '"' * 250_000} for rank in range(8)}

    body = _reply_body("", {"phase": "training", "ranks": ranks})

    messages.encode(messages.Reply(is_ok=True, body=body))
    assert json.loads(body)["status"]["ranks"]["7"] == {"step": 5}


def test_an_answer_that_fits_is_whole() -> None:
    ranks = {"0": {"step": 5, "receipt": '"' * (MAX_REPLY_BYTES // 4)}}

    body = _reply_body("x", {"ranks": ranks})

    messages.encode(messages.Reply(is_ok=True, body=body))
    assert json.loads(body) == {"said": "x", "status": {"ranks": ranks}}
