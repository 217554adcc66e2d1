"""Rows 24 to 38 of the fault matrix that a single node meets, against a real S3 server.

Rows 24 and 31 are C84 and C87, row 7 is C89 in `tests/given/test_store.py`.
"""

from __future__ import annotations

import signal

import pytest

from supervisor.errors import ExitCode
from tests.conftest import s3_options
from tests.e2e.harness import SIZED_COMMAND, assert_exact, read_log
from tests.fault_proxy import (
    answer,
    black_hole,
    corrupt_reply,
    cut_reply,
    cut_request,
    lose_reply,
    replace_reply,
    replace_status,
)
from tests.s3_server import SECRET_ACCESS_KEY

pytestmark = [pytest.mark.e2e, pytest.mark.s3, pytest.mark.timeout(300)]
SIZED = {"SIZED_MIB": "40", "SIZED_STEPS": "12", "SIZED_STEP_S": "0.2"}


@pytest.fixture
def sized(make_cluster, s3_server, proxy):
    """Images of three chunks, so that uploads are multipart."""
    return make_cluster(world=1, **s3_options(s3_server, proxy.url, **SIZED))


@pytest.mark.parametrize("fault", [cut_request, lose_reply], ids=["cut", "reply lost"])
def test_f25_f26_a_part_whose_connection_is_reset_is_sent_again(sized, proxy, fault):
    node = sized.node("a")
    rule = proxy.add(fault, method="PUT", query="partNumber", skip=1, times=2)

    sized.start(node, command=SIZED_COMMAND)
    code = sized.finish(node)

    assert rule.num_hits == 2
    assert code == ExitCode.DONE
    verdicts = sized.cli(node, "verify", "--read-data")["checkpoints"]
    assert verdicts[-1]["id"].endswith("-12")
    assert all(verdict["is_whole"] for verdict in verdicts)


def test_f25_a_part_that_is_never_answered_is_given_up_in_time_and_sent_again(sized, proxy):
    node = sized.node("a")
    proxy.add(black_hole(20.0), method="PUT", query="partNumber", times=1)

    sized.start(node, command=SIZED_COMMAND, LASTGASP_STORE__CHUNK_TIMEOUT="6s")
    code = sized.finish(node)

    assert code == ExitCode.DONE
    assert sized.cli(node, "ls")["checkpoints"][-1]["step"] == 12


@pytest.mark.parametrize("key", ["/log/", "/part/"])
def test_f26_f27_a_lost_reply_of_a_small_write_is_settled_by_reading_back(
    proxied_cluster, proxy, quick_twin, key
):
    """The write was applied: its repetition answers 412, and it still counts once."""
    node = proxied_cluster.node("a")
    rule = proxy.add(lose_reply, method="PUT", key=key, skip=1, times=2)

    code = proxied_cluster.run(node)

    listed = [item["step"] for item in proxied_cluster.cli(node, "ls")["checkpoints"]]
    assert rule.num_hits == 2
    assert code == ExitCode.DONE
    assert listed == sorted(set(listed))
    assert listed[-1] == 50
    assert_exact(read_log(proxied_cluster.log), quick_twin)


def test_f28_a_conflict_on_a_slot_is_tried_again(proxied_cluster, proxy, quick_twin):
    node = proxied_cluster.node("a")
    conflict = answer(409, "ConditionalRequestConflict")
    rule = proxy.add(conflict, method="PUT", key="/log/", times=3)

    code = proxied_cluster.run(node)

    assert rule.num_hits == 3
    assert code == ExitCode.DONE
    assert_exact(read_log(proxied_cluster.log), quick_twin)


def test_f29_a_complete_that_answers_200_with_an_error_inside_is_not_believed(sized, proxy):
    """Source: S3 API reference, CompleteMultipartUpload: 200 may come before the error."""
    node = sized.node("a")
    body = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>x</Message></Error>"
    rule = proxy.add(answer_200(body), method="POST", key="/data/", query="uploadId", times=2)

    sized.start(node, command=SIZED_COMMAND)
    code = sized.finish(node)

    assert rule.num_hits == 2
    assert code == ExitCode.DONE
    verdicts = sized.cli(node, "verify", "--read-data")["checkpoints"]
    assert all(verdict["is_whole"] for verdict in verdicts)


def answer_200(body: bytes):
    return lambda exchange: exchange.reply(200, body, {"Content-Type": "application/xml"})


def test_f29_a_complete_whose_reply_is_lost_is_verified_by_the_object(sized, proxy):
    node = sized.node("a")
    rule = proxy.add(lose_reply, method="POST", key="/data/", query="uploadId", times=1)

    sized.start(node, command=SIZED_COMMAND)
    code = sized.finish(node)

    assert rule.num_hits == 1
    assert code == ExitCode.DONE
    assert sized.cli(node, "ls")["checkpoints"][-1]["step"] == 12


def test_f29_a_complete_that_claims_success_for_an_object_that_is_not_there(sized, proxy):
    node = sized.node("a")
    done = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
    proxy.add(answer_200(done), method="POST", key="/data/", query="uploadId", times=1)

    sized.start(node, command=SIZED_COMMAND, SIZED_STEPS="17")
    failed = sized.wait_for_event(node, "checkpoint.persist_failed")
    code = sized.finish(node)

    assert failed["step"] == 5
    assert "not there right after" in failed["reason"]
    assert code == ExitCode.DONE
    verdicts = sized.cli(node, "verify", "--read-data")["checkpoints"]
    assert all(verdict["is_whole"] for verdict in verdicts)


@pytest.mark.parametrize("code_of_store", ["AccessDenied", "KMS.DisabledException"])
def test_f30_a_store_that_forbids_writing_is_named_and_training_goes_on(
    proxied_cluster, proxy, quick_twin, code_of_store
):
    node = proxied_cluster.node("a")
    proxied_cluster.start(node, TOY_STEP_S="0.2")
    proxied_cluster.wait_for_step(2)
    status = 403 if code_of_store == "AccessDenied" else 400
    proxy.add(answer(status, code_of_store), method="PUT", key="/data/")

    failed = proxied_cluster.wait_for_event(node, "checkpoint.persist_failed")
    proxied_cluster.wait_for_step(8)
    proxied_cluster.wait_for_event(node, "checkpoint.spooled")
    document = proxied_cluster.cli(node, "status")
    proxy.clear()
    code = proxied_cluster.finish(node)

    assert failed["error_id"] == ("s3_access_denied" if status == 403 else "store_refused")
    assert "put_object 'runs/jobs/toy/data/" in failed["reason"]
    assert document["last_error"]["error_id"] == failed["error_id"]
    assert SECRET_ACCESS_KEY not in node.stderr
    assert code == ExitCode.DONE
    assert proxied_cluster.cli(node, "ls")["checkpoints"][-1]["step"] == 50
    assert_exact(read_log(proxied_cluster.log), quick_twin)


def test_f34_a_store_that_ignores_create_if_absent_is_refused_before_anything_starts(
    proxied_cluster, proxy
):
    node = proxied_cluster.node("a")
    proxy.add(replace_status(412, 200), method="PUT")

    code = proxied_cluster.run(node)

    assert code == ExitCode.STORE_UNREACHABLE
    assert "[store_lacks_conditional_put]" in node.stderr
    assert "what to do:" in node.stderr
    assert "job.launched" not in node.stderr
    assert proxied_cluster.lines(0) == []


@pytest.fixture
def stopped_at_7(proxied_cluster):
    """A job that was committed at steps 5 and 7 and whose node is gone."""
    first = proxied_cluster.node("a")
    code = proxied_cluster.run(first, TOY_NOTICE=f"7:{first.notice_file}", TOY_STEP_S="0.1")
    assert code == ExitCode.PREEMPTED_COMMITTED
    [newest] = proxied_cluster.cli(first, "show")["shards"]
    proxied_cluster.lose(first)
    return proxied_cluster, newest["key"]


def test_f35_a_shard_that_vanished_is_named_and_the_checkpoint_before_it_is_used(
    stopped_at_7, s3_server, quick_twin
):
    cluster, key = stopped_at_7
    client = s3_server.client()
    bucket, prefix = cluster.store_url.removeprefix("s3://").split("/")
    client.delete_object(Bucket=bucket, Key=f"{prefix}/jobs/toy/{key}")
    client.close()
    node = cluster.node("b")

    verdict = cluster.cli(node, "verify", check=False)["checkpoints"][-1]
    code = cluster.run(node)

    assert verdict["error_id"] == "shard_missing"
    assert "is gone" in node.event("fetch.failed")["reason"]
    assert node.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_f36_bytes_that_came_wrong_once_are_fetched_again(stopped_at_7, proxy, quick_twin):
    cluster, key = stopped_at_7
    node = cluster.node("b")
    rule = proxy.add(corrupt_reply, method="GET", key=key, times=1)

    code = cluster.run(node)

    assert rule.num_hits == 1
    assert node.event("restore.completed")["step"] == 7
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_f36_bytes_that_are_wrong_again_and_again_set_the_checkpoint_aside(
    stopped_at_7, proxy, quick_twin
):
    cluster, key = stopped_at_7
    node = cluster.node("b")
    rule = proxy.add(corrupt_reply, method="GET", key=key)

    code = cluster.run(node)

    bad = [item["step"] for item in cluster.cli(node, "ls")["checkpoints"] if item["is_bad"]]
    assert rule.num_hits >= 2
    assert node.event("fetch.failed")["is_checkpoint_bad"]
    assert bad == [7]
    assert node.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_f36_a_download_that_is_cut_goes_on(stopped_at_7, proxy, quick_twin):
    cluster, key = stopped_at_7
    node = cluster.node("b")
    rule = proxy.add(cut_reply, method="GET", key=key, times=2)

    code = cluster.run(node)

    assert rule.num_hits == 2
    assert node.event("restore.completed")["step"] == 7
    assert code == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


@pytest.mark.parametrize("fault", [cut_request, answer(503, "SlowDown")], ids=["reset", "503"])
def test_f37_a_bucket_that_cannot_be_reached_at_the_start_never_means_step_0(
    stopped_at_7, proxy, fault, quick_twin
):
    cluster, _ = stopped_at_7
    node = cluster.node("b")
    proxy.add(fault)

    code = cluster.run(node, "--allow-fresh")
    said = node.stderr
    num_lines = len(cluster.lines(0))
    proxy.clear()
    finished = cluster.run(node)

    assert code == ExitCode.STORE_UNREACHABLE
    assert "what to do:" in said
    assert "Traceback" not in said
    assert num_lines == 7
    assert finished == ExitCode.DONE
    assert_exact(read_log(cluster.log), quick_twin)


def test_f38_a_job_whose_checkpoints_are_all_gone_does_not_begin_anew(stopped_at_7, s3_server):
    cluster, _ = stopped_at_7
    node = cluster.node("b")
    for checkpoint in cluster.cli(node, "ls")["checkpoints"]:
        cluster.cli(node, "poison", checkpoint["id"])
    num_lines = len(cluster.lines(0))

    code = cluster.run(node)

    assert code == ExitCode.NO_CHECKPOINT
    assert "no_good_checkpoint" in node.stderr
    assert len(cluster.lines(0)) == num_lines


def test_a_store_that_comes_back_during_an_emergency_gets_the_checkpoint(
    proxied_cluster, proxy, quick_twin
):
    """Resets at first, then wrong answers, then good ones: all within the lead time."""
    first, second = proxied_cluster.node("a"), proxied_cluster.node("b")
    proxied_cluster.start(first, TOY_STEP_S="0.1")
    proxied_cluster.wait_for_step(6)
    proxy.add(cut_request, times=5)
    proxy.add(
        replace_reply(500, b"<Error><Code>InternalError</Code></Error>"), key="/data/", times=2
    )

    first.process.send_signal(signal.SIGTERM)
    code = proxied_cluster.finish(first)
    proxied_cluster.lose(first)
    finished = proxied_cluster.run(second)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] >= 6
    assert_exact(read_log(proxied_cluster.log), quick_twin)
