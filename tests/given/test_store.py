"""Given cases of kind f: the object store refuses, stalls, forgets or damages."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.checkpoint.chunks import chunk_ranges, chunk_size
from supervisor.errors import ExitCode
from supervisor.store.s3_upload import MAX_PART_BYTES, MIN_PART_BYTES, UploadPlan
from tests.conftest import s3_options
from tests.e2e.harness import (
    SIZED_COMMAND,
    assert_exact,
    assert_sized,
    base_env,
    read_log,
)
from tests.fault_proxy import (
    FaultProxy,
    answer,
    append_to_body,
    delay_reply,
    flip_bit_of_body,
    replace_status,
)
from tests.s3_server import (
    ACCESS_KEY_ID,
    SECOND_ACCESS_KEY_ID,
    SECRET_ACCESS_KEY,
    S3Server,
)

pytestmark = [pytest.mark.e2e, pytest.mark.s3, pytest.mark.timeout(300)]
MIB = 1 << 20


def refuse_checksums(proxy: FaultProxy) -> None:
    """A store from before 2022: any header about a checksum is a bad request."""
    for header in (
        "x-amz-checksum-sha256",
        "x-amz-checksum-mode",
        "x-amz-checksum-algorithm",
        "x-amz-sdk-checksum-algorithm",
        "x-amz-trailer",
        "x-amz-mp-object-size",
    ):
        proxy.add(answer(400, "InvalidArgument"), header=header)


def object_keys(server: S3Server, cluster) -> list[str]:
    client = server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=cluster.store_url.split("/")[2])
    keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
    client.close()
    return keys


def test_c83_a_store_that_refuses_checksum_headers_is_read_back_instead(
    proxied_cluster, proxy, quick_twin
):
    node = proxied_cluster.node("a")
    refuse_checksums(proxy)

    code = proxied_cluster.run(node)

    assert code == ExitCode.DONE
    assert "read back" in node.event("store.limited")["reason"]
    whole = proxied_cluster.cli(node, "verify", "--read-data")["checkpoints"]
    assert whole
    assert all(verdict["is_whole"] for verdict in whole)
    assert_exact(read_log(proxied_cluster.log), quick_twin)


@pytest.mark.parametrize(
    "damage", [append_to_body(b"\r\nx-amz-checksum-crc32:AAAA\r\n"), flip_bit_of_body]
)
@pytest.mark.parametrize("takes_checksums", [True, False])
def test_c83_a_store_that_keeps_other_bytes_never_counts_as_complete(
    proxied_cluster, proxy, s3_server, damage, takes_checksums
):
    """Neither with a store that verifies, nor with one that only reads back."""
    node = proxied_cluster.node("a")
    if not takes_checksums:
        refuse_checksums(proxy)
    proxy.add(damage, method="PUT", key="/data/")
    proxied_cluster.start(node, TOY_STEP_S="0.3", LASTGASP_STORE__CHUNK_TIMEOUT="3s")

    failed = proxied_cluster.wait_for_event(node, "checkpoint.persist_failed")
    still_training = node.process.poll() is None
    listed = proxied_cluster.cli(node, "ls")["checkpoints"]
    proxied_cluster.kill_everything(node)

    assert failed["error_id"] in ("store_checksum_mismatch", "store_refused")
    assert still_training
    assert listed == []
    assert not [key for key in object_keys(s3_server, proxied_cluster) if "/part/" in key]


def test_c84_f24_slow_down_on_half_of_the_requests_is_waited_out(
    proxied_cluster, proxy, quick_twin
):
    node = proxied_cluster.node("a")
    rule = proxy.add(answer(503, "SlowDown"), key="/data/", share=0.5)

    code = proxied_cluster.run(node)

    assert rule.num_hits > 0
    assert code == ExitCode.DONE
    assert proxied_cluster.cli(node, "ls")["checkpoints"]
    assert_exact(read_log(proxied_cluster.log), quick_twin)


def test_c84_a_deadline_missed_by_throttling_is_said_and_the_older_checkpoint_stands(
    proxied_cluster, proxy, quick_twin
):
    first, second = proxied_cluster.node("a"), proxied_cluster.node("b")
    proxied_cluster.start(first, TOY_STEP_S="0.1")
    proxied_cluster.wait_for_event(first, "checkpoint.committed", step=5)
    rule = proxy.add(answer(503, "SlowDown"), method="PUT", key="/data/")

    proxied_cluster.cli(first, "notify", "--deadline", "4s")
    code = proxied_cluster.finish(first)
    missed = first.event("deadline.missed")
    num_refused = rule.num_hits
    proxy.clear()
    proxied_cluster.lose(first)
    finished = proxied_cluster.run(second)

    assert code == ExitCode.PREEMPTED_OLDER_STANDS
    assert "in time" in missed["reason"]
    assert num_refused < 60, "waits between tries did not grow"
    assert finished == ExitCode.DONE
    assert second.event("restore.completed")["step"] == 5
    assert_exact(read_log(proxied_cluster.log), quick_twin)


def test_c85_the_upload_ends_though_the_trainer_is_gone_and_the_supervisor_was_told_to_stop(
    proxied_cluster, proxy
):
    first, second = proxied_cluster.node("a"), proxied_cluster.node("b")
    sized = {"SIZED_MIB": "40", "SIZED_STEPS": "30", "SIZED_STEP_S": "0.1"}
    proxied_cluster.start(first, command=SIZED_COMMAND, **sized)
    proxied_cluster.wait_for_step(3)
    proxy.add(delay_reply(6.0), method="PUT", key="/data/")

    first.process.send_signal(signal.SIGTERM)
    proxied_cluster.wait_for_event(first, "checkpoint.staged")
    time.sleep(1.0)
    first.process.send_signal(signal.SIGTERM)
    proxied_cluster.wait(lambda: not proxied_cluster.ranks(), "the trainers' end")
    is_still_uploading = first.process.poll() is None
    code = proxied_cluster.finish(first)
    said = first.stderr
    stopped_at = first.event("checkpoint.committed")["step"]
    proxy.clear()
    proxied_cluster.lose(first)
    proxied_cluster.start(second, command=SIZED_COMMAND, **sized)
    finished = proxied_cluster.finish(second)

    assert is_still_uploading
    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert "Traceback" not in said
    assert second.event("restore.completed")["step"] == stopped_at
    assert_sized(read_log(proxied_cluster.log), last_step=30)


COLD_START = """
import hashlib, secrets, sys, threading
from supervisor.clock import SystemClock
from supervisor.store.s3 import open_s3
from supervisor.store.s3_session import S3Settings
store = open_s3(S3Settings(bucket=sys.argv[1], endpoint_url=sys.argv[2], addressing_style="path"),
                clock=SystemClock())
together = threading.Barrier(32)
errors = []
def first(index):
    together.wait()
    try:
        if index % 4 == 3:
            list(store.open_uploads("jobs/j/", timeout_s=60))
        else:
            store.put_bytes(f"jobs/j/{sys.argv[3]}-{index}", b"x" * 1000, timeout_s=60)
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=first, args=(index,)) for index in range(32)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(errors), *errors[:3])
"""


def test_c86_32_threads_on_a_cold_process_all_upload(s3_server, tmp_path):
    s3_server.make_bucket("cold")
    env = base_env(
        tmp_path, AWS_ACCESS_KEY_ID=ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY=SECRET_ACCESS_KEY,
        AWS_REGION="us-east-1",
    )  # fmt: skip

    said = [
        subprocess.run(
            [sys.executable, "-c", COLD_START, "cold", s3_server.endpoint_url, str(number)],
            env=env, capture_output=True, text=True, timeout=120, check=True,
        ).stdout.strip()
        for number in range(25)
    ]  # fmt: skip

    assert said == ["0"] * 25


def write_credentials(path: Path, access_key_id: str) -> None:
    """Written anew in place, as a rotating agent does."""
    beside = path.with_suffix(".new")
    beside.write_text(
        f"[default]\naws_access_key_id = {access_key_id}\n"
        f"aws_secret_access_key = {SECRET_ACCESS_KEY}\n"
    )
    os.replace(beside, path)


@pytest.fixture
def rotating_cluster(make_cluster, s3_server, proxy, tmp_path):
    """A cluster whose credentials come from a file, and that file."""
    path = tmp_path / "credentials"
    write_credentials(path, ACCESS_KEY_ID)
    options = s3_options(s3_server, proxy.url, AWS_SHARED_CREDENTIALS_FILE=str(path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del options["env"][name]
    return make_cluster(world=1, **options), path


def test_c87_credentials_renewed_in_the_file_are_taken_in_the_middle_of_an_upload(
    rotating_cluster, proxy, s3_server
):
    """Every request signed with the first key is refused as expired once three chunks are there."""
    cluster, path = rotating_cluster
    node = cluster.node("a")
    other = SECOND_ACCESS_KEY_ID
    proxy.add(
        answer(400, "ExpiredToken"),
        skip=6,
        when=lambda request: request.access_key_id == ACCESS_KEY_ID and "/data/" in request.key,
    )
    sized = {"SIZED_MIB": "150", "SIZED_STEPS": "12", "SIZED_STEP_S": "0.3"}

    cluster.start(node, command=SIZED_COMMAND, **sized)
    cluster.wait(
        lambda: [request for request in proxy.seen("PUT", "/data/") if request.status == 400],
        "the first refusal",
    )
    write_credentials(path, other)
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert cluster.cli(node, "ls")["checkpoints"][-1]["step"] == 12
    renewed = [request for request in proxy.seen() if request.access_key_id == other]
    assert renewed
    assert_sized(read_log(cluster.log), last_step=12)


def test_c87_f31_credentials_that_stay_expired_end_the_upload_and_keep_the_local_copy(
    rotating_cluster, proxy
):
    cluster, _ = rotating_cluster
    node = cluster.node("a")
    sized = {"SIZED_MIB": "20", "SIZED_STEPS": "40", "SIZED_STEP_S": "0.2"}
    cluster.start(
        node,
        command=SIZED_COMMAND,
        LASTGASP_STORE__CHUNK_TIMEOUT="2s",
        LASTGASP_NOTICE__SIGTERM_LEAD="8s",
        **sized,
    )
    cluster.wait_for_step(1)
    proxy.add(answer(400, "ExpiredToken"), key="/data/")

    failed = cluster.wait_for_event(node, "checkpoint.persist_failed")
    at_step = cluster.lines(0)[-1]["step"]
    cluster.wait_for_step(at_step + 1)  # it trains on
    node.process.send_signal(signal.SIGTERM)
    code = cluster.finish(node)
    spooled = list((node.folder / "spool").rglob("*.safetensors"))
    proxy.clear()
    cluster.start(node, command=SIZED_COMMAND, **sized)
    finished = cluster.finish(node)

    assert failed["error_id"] == "s3_credentials_expired"
    assert "renew the credentials" in failed["reason"]
    assert SECRET_ACCESS_KEY not in node.stderr
    assert code == ExitCode.PREEMPTED_OLDER_STANDS
    assert spooled
    assert finished == ExitCode.DONE
    assert node.event("generation.claimed")["is_local"]
    assert_sized(read_log(cluster.log), last_step=40)


@given(size_bytes=st.integers(1, 48 << 40))
def test_c88_every_size_is_cut_into_parts_that_s3_takes(size_bytes):
    """Source: S3 User Guide, multipart upload limits: 10,000 parts of 5 MiB to 5 GiB."""
    chunk_bytes = chunk_size(size_bytes)
    num_parts = -(-size_bytes // chunk_bytes)

    plan = UploadPlan(key="k", size_bytes=size_bytes, chunk_bytes=chunk_bytes)

    assert num_parts == plan.num_chunks <= 10_000
    assert MIN_PART_BYTES <= chunk_bytes <= MAX_PART_BYTES


@pytest.mark.parametrize("size_bytes", [60 << 30, (5 << 30) + 1, 160 << 30, (156 << 30) + 1])
def test_c88_a_large_image_is_cut_without_gap_or_overlap(size_bytes):
    ranges = chunk_ranges(size_bytes, chunk_size(size_bytes))

    assert ranges[0][0] == 0
    assert ranges[-1][1] == size_bytes
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert len(ranges) <= 10_000


def open_uploads(server: S3Server, bucket: str) -> list[str]:
    client = server.client()
    listed = client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
    client.close()
    return [item["Key"] for item in listed]


def test_c89_f7_an_upload_cut_by_a_kill_is_gone_after_the_relaunch_and_others_are_left(
    make_cluster, s3_server
):
    cluster = make_cluster(world=1, **s3_options(s3_server, s3_server.endpoint_url))
    bucket = cluster.store_url.split("/")[2]
    client = s3_server.client()
    foreign = "runs/jobs/another/data/0000000001/000000000005/000000-x.safetensors"
    client.create_multipart_upload(Bucket=bucket, Key=foreign)
    client.close()
    node, second = cluster.node("a"), cluster.node("b")
    sized = {"SIZED_MIB": "70", "SIZED_STEPS": "12", "SIZED_STEP_S": "0.2"}
    cluster.start(
        node, command=SIZED_COMMAND, LASTGASP_FAILPOINTS="upload.chunk.after=kill@3", **sized
    )
    killed = cluster.finish(node)
    cut = open_uploads(s3_server, bucket)
    cluster.lose(node)

    cluster.start(second, "--allow-fresh", command=SIZED_COMMAND, **sized)
    code = cluster.finish(second)

    assert killed == -signal.SIGKILL
    assert len(cut) == 2
    assert code == ExitCode.DONE
    assert second.event("uploads.reaped")["num_uploads"] == 1
    assert open_uploads(s3_server, bucket) == [foreign]


def test_c90_a_missing_list_permission_is_explained_before_anything_starts(
    proxied_cluster, proxy, quick_twin
):
    """Without s3:ListBucket a missing key reads as forbidden: a job must not begin anew by it."""
    node, second = proxied_cluster.node("a"), proxied_cluster.node("b")
    proxied_cluster.start(node, TOY_STEP_S="0.1")
    proxied_cluster.wait_for_event(node, "checkpoint.committed", step=5)
    proxied_cluster.lose(node)
    for method in ("GET", "HEAD"):
        proxy.add(replace_status(404, 403), method=method)
    proxy.add(answer(403, "AccessDenied"), method="GET", query="list-type")

    refused = proxied_cluster.run(second)
    said = second.stderr
    proxy.clear()
    finished = proxied_cluster.run(second)

    assert refused == ExitCode.STORE_UNREACHABLE
    assert "[s3_access_denied]" in said
    assert "s3:ListBucket" in said
    assert "Traceback" not in said
    assert finished == ExitCode.DONE
    assert second.event("restore.completed")["step"] == 5
    assert_exact(read_log(proxied_cluster.log), quick_twin)
