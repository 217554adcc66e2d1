"""Given cases of kind g that one node with EC2 metadata can meet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import assert_exact, read_log
from tests.metadata_server import ACTION_PATH, Fault, Imds

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def ec2(imds: Imds, **more: str) -> dict[str, str]:
    return {
        "LASTGASP_NOTICE__SOURCES": "ec2",
        "LASTGASP_NOTICE__EC2_ENDPOINT": imds.url,
        "LASTGASP_NOTICE__POLL": "100ms",
        "TOY_STEP_S": "0.15",
        **more,
    }


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_c99_refused_tokens_are_renewed_and_the_notice_behind_them_is_acted_on(
    quick_cluster, quick_twin
):
    """404 is no notice; then ten polls are refused; then there is one."""
    with Imds() as imds:
        first, second = quick_cluster.node("a"), quick_cluster.node("b")
        quick_cluster.start(first, **ec2(imds))
        quick_cluster.wait_for_step(3)
        no_notice = not [e for e in first.events() if e["event"] == "notice.received"]
        imds.expire_tokens()
        imds.fail(ACTION_PATH, Fault(times=10, status=401))
        imds.announce(in_seconds(40))

        code = quick_cluster.finish(first)
        failed = first.event("notice.source_failed")
        imds.withdraw()
        quick_cluster.lose(first)
        finished = quick_cluster.run(second, **ec2(imds))

    assert no_notice
    assert failed["source"] == "ec2"
    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_c100_advice_alone_saves_early_and_an_interruption_stops(quick_cluster, quick_twin):
    with Imds() as imds:
        imds.recommend_rebalance()
        first, second = quick_cluster.node("a"), quick_cluster.node("b")
        never = {"LASTGASP_CHECKPOINT__EVERY_STEPS": "1000"}
        quick_cluster.start(first, **ec2(imds, TOY_STEP_S="0.3", **never))
        advised = quick_cluster.wait_for_event(first, "notice.received", kind="advice")
        saved = quick_cluster.wait_for_event(first, "checkpoint.committed")
        at_step = quick_cluster.lines(0)[-1]["step"]
        quick_cluster.wait_for_step(at_step + 5)  # it trains on
        num_commits = len([e for e in first.events() if e["event"] == "checkpoint.committed"])
        status = quick_cluster.cli(first, "status")
        imds.announce(in_seconds(40))
        code = quick_cluster.finish(first)
        imds.withdraw()
        quick_cluster.lose(first)
        finished = quick_cluster.run(second, **ec2(imds))

    assert advised["source"] == "ec2-rebalance"
    assert saved["step"] <= at_step
    assert num_commits == 1
    assert status["phase"] == "training"
    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] > at_step
    assert_exact(read_log(quick_cluster.log), quick_twin)


def test_c100_advice_may_be_configured_to_cause_nothing(quick_cluster, quick_twin):
    with Imds() as imds:
        imds.recommend_rebalance()
        node = quick_cluster.node("a")
        quiet = {
            "LASTGASP_CHECKPOINT__EVERY_STEPS": "1000",
            "LASTGASP_NOTICE__SAVE_ON_ADVICE": "false",
        }

        code = quick_cluster.run(node, **ec2(imds, TOY_STEP_S="0.05", **quiet))

    commits = [e["step"] for e in node.events() if e["event"] == "checkpoint.committed"]
    assert node.event("notice.received")["kind"] == "advice"
    assert commits == [50]  # the one at the end
    assert code == ExitCode.DONE
    assert_exact(read_log(quick_cluster.log), quick_twin)
