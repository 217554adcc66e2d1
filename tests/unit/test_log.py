"""The daemon's log: JSON lines, constant events, and never a secret."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from supervisor import log as logs
from supervisor.log_sink import LineSink
from tests.fakes import wait_until

CANARY = "canary-7f3a"
SIGNED = (
    "https://bucket.s3.amazonaws.com/key?X-Amz-Algorithm=AWS4-HMAC-SHA256"
    f"&X-Amz-Credential={CANARY}%2F20310203&X-Amz-Security-Token={CANARY}&X-Amz-Signature={CANARY}"
)


@pytest.fixture(autouse=True)
def _structlog_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_is_one_json_document_with_time_level_and_bound_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure(level="info", style="json")

    logs.bind(job_id="j").bind(generation=3).warning("notice.received", source="ec2")

    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["job_id"]) == ("notice.received", "warning", "j")
    assert (line["generation"], line["source"]) == (3, "ec2")
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*Z$", str(line["ts"]))


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="warning", style="json")

    logs.bind().info("job.launched")
    logs.bind().error("job.crashed")

    assert [line["event"] for line in lines(capsys)] == ["job.crashed"]


def test_without_a_terminal_auto_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="info", style="auto")

    logs.bind().info("job.launched")

    assert lines(capsys)[0]["event"] == "job.launched"


def test_a_console_line_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="info", style="console")

    logs.bind().info("job.launched", token=CANARY)

    told = capsys.readouterr().err
    assert "job.launched" in told
    assert not told.startswith("{")
    assert CANARY not in told


class _Failure(Exception):
    def __str__(self) -> str:
        return f"GET {SIGNED} failed"


@pytest.mark.parametrize("style", ["json", "console"])
@pytest.mark.parametrize(
    "fields",
    [
        {"secret_access_key": CANARY},
        {"aws_session_token": CANARY},
        {"Authorization": CANARY},
        {"reason": f"403 for {SIGNED}"},
        {"error": _Failure()},
        {"headers": {"Authorization": CANARY, "Accept": "x"}},
        {"headers": [{"X-Amz-Security-Token": CANARY}]},
        {"request": {"url": SIGNED, "deep": [{"password": CANARY}]}},
        {"urls": (SIGNED, "x")},
        {"reason": f"AWS4-HMAC-SHA256 Credential={CANARY}/x, SignedHeaders=h, Signature={CANARY}"},
        {"url": f"https://account.blob.core.windows.net/c?sv=1&sig={CANARY}"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_secret_is_written(
    capsys: pytest.CaptureFixture[str], style: str, fields: dict[str, object]
) -> None:
    logs.configure(level="debug", style=style)

    logs.bind().error("record.failed", **fields)

    told = capsys.readouterr().err
    assert CANARY not in told
    assert "redacted" in told


def test_what_is_no_secret_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(level="info", style="json")
    fields = {"step": 7, "took_s": 1.5, "is_ok": True, "none": None, "pids": [1, 2], "text": "a=b"}

    logs.bind().info("job.stopped", **fields)

    (line,) = lines(capsys)
    assert fields.items() <= line.items()


def test_event_names_are_nouns_and_verbs_and_explained() -> None:
    for event, meaning in logs.EVENTS.items():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", event), event
        assert meaning


def test_every_event_in_the_code_is_listed() -> None:
    """Constant first arguments of log calls and of Report, wherever they stand."""
    source = Path(logs.__file__).parent
    used = set()
    for path in source.rglob("*.py"):
        text = path.read_text()
        used |= set(re.findall(r"\.(?:debug|info|warning|error)\(\s*\"([a-z]+\.[a-z_]+)\"", text))
        used |= set(
            re.findall(r"(?:report|Report)\(\s*(?:\"\w+\",\s*)?\"([a-z]+\.[a-z_]+)\"", text)
        )

    assert len(used) > 20
    assert used <= set(logs.EVENTS), sorted(used - set(logs.EVENTS))


# ---------------------------------------------------------------- a reader that stops reading


def test_c77_f72_a_full_pipe_stops_nobody_and_what_is_missing_is_counted():
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    sink = LineSink(write_end, max_lines=10)

    for number in range(500):
        sink.write(f'{{"event": "line {number}", "pad": "{"x" * 80}"}}\n')  # never waits
    dropped = sink.num_dropped
    read = bytearray()
    reader = threading.Thread(target=lambda: read.extend(b"".join(all_of(read_end))), daemon=True)
    reader.start()
    wait_until(lambda: sink.num_waiting == 0)  # there is room again
    sink.write('{"event": "after"}\n')
    sink.close()
    os.close(write_end)
    reader.join(10)

    events = [json.loads(line)["event"] for line in read.decode().splitlines()]
    assert dropped > 400
    assert len(events) - 1 + dropped == 500
    assert events[-1] == "after"


def all_of(fd: int) -> Iterator[bytes]:
    while data := os.read(fd, 65536):
        yield data


def test_output_that_is_gone_is_counted_and_ends_nothing():
    read_end, write_end = os.pipe()
    os.close(read_end)
    sink = LineSink(write_end)

    sink.write("one\n")
    sink.write("two\n")
    sink.close()
    os.close(write_end)

    assert sink.num_dropped == 2
