"""A script that changed, or that uses the SDK wrongly: a clear word, at once, and nothing lost."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import ROOT, Cluster, assert_exact, read_log, run_twin

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("given-changed"),
]
JOB = [sys.executable, str(ROOT / "tests" / "jobs" / "changed.py")]
STOP = 10
# What each change is answered with; every text must stand in the supervisor's log and be what the
# script's own traceback ends with.
MISFITS = {
    "shape,dataset,seed,scheduler,optimizer": [
        "model/body.weight: shape [24, 16] here, [16, 16] in the checkpoint",
        "model/body.bias: shape [24] here, [16] in the checkpoint",
        "model/head.weight: shape [1, 24] here, [1, 16] in the checkpoint",
        "loader: length 50 here, 97 in the checkpoint",
        "loader: seed 1 here, 0 in the checkpoint",
        "scheduler: a StepLR here, a ExponentialLR in the checkpoint",
        "optimizer: a SGD here, a AdamW in the checkpoint",
    ],
    "rename,more layers": [
        "model/head.weight: in the checkpoint, not in the module",
        "model/decoder.weight: in the module, not in the checkpoint",
        "model/tail.weight: in the module, not in the checkpoint",
        "optimizer/head.weight: in the checkpoint, not in the optimizer",
    ],
    "dtype,other groups": [
        "model/body.weight: dtype bfloat16 here, float32 in the checkpoint",
        "optimizer: group 0 (3 parameters: body.bias, body.weight, head.weight",
    ],
    "group order": ["scheduler: may keep values by the position of the parameter groups"],
}
MISTAKES = {
    "sparse buffer": ["model/mask: layout sparse_coo (register its dense form)"],
    "attach twice": ["this process has a run already"],
    "no restore": ["call restore() before the first step (run.restore())"],
    "restore twice": ["restore() is called once, before the first step"],
    "late object": ["an object named 'model' is registered already"],
}


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return run_twin(tmp_path_factory.mktemp("changed-twin"), world=1, command=JOB)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A job that was stopped at a step: its store and its log are what is left."""
    cluster = Cluster(folder=tmp_path_factory.mktemp("changed") / "origin", world=1, command=JOB)
    node = cluster.node("a")
    assert cluster.run(node, TOY_NOTICE=f"{STOP}:{node.notice_file}") == 75
    yield cluster.folder
    cluster.close()


@pytest.fixture
def stopped(make_cluster, origin):
    """The stopped job and a node to go on with."""
    cluster = make_cluster(world=1, command=JOB)
    for name in ("store", "log"):
        shutil.copytree(origin / name, cluster.folder / name, dirs_exist_ok=True)
    return cluster, cluster.node("b")


def test_c10_a_script_that_does_not_fit_is_refused_by_name_and_nothing_is_lost(stopped, twin):
    """Each change is refused in one start; the script put right goes on exactly where it was."""
    cluster, node = stopped

    assert_each_is_refused(cluster, node, MISFITS)
    finished = cluster.run(node)

    assert finished == ExitCode.DONE
    assert node.event("restore.completed")["step"] == STOP
    assert_exact(read_log(cluster.log), twin)


def test_c09_what_cannot_be_held_and_other_mistakes_are_refused_at_once_by_name(stopped, twin):
    cluster, node = stopped

    assert_each_is_refused(cluster, node, MISTAKES)
    finished = cluster.run(node)

    assert finished == ExitCode.DONE
    # `restore twice` took a step before its mistake.
    assert node.event("restore.completed")["step"] >= STOP
    assert_exact(read_log(cluster.log), twin)


def assert_each_is_refused(cluster, node, refusals: dict[str, list[str]]) -> None:
    for change, texts in refusals.items():
        code = cluster.run(node, CHANGE=change)

        said, words = node.event("rank.restore_failed"), node.stderr
        assert code == 1, change
        assert not said["is_checkpoint_bad"]
        assert "job.crashed" not in words, change
        for text in texts:
            assert text in said["reason"], change
            assert text in words[words.index("Traceback") :], change
        frames = re.findall(r'File "[^"]*trainer_sdk/(\w+)\.py"', words)
        assert set(frames) <= {"run", "__init__"}, change


def test_another_batch_size_sees_the_rest_of_the_epoch_once_and_workers_may_come(stopped):
    cluster, node = stopped

    code = cluster.run(node, CHANGE="batch size")
    receipt = node.stderr

    assert code == ExitCode.DONE
    first = [id_ for line in cluster.lines(0) if line["epoch"] == 0 for id_ in line["ids"]]
    assert Counter(first) == Counter(range(97))
    assert len(cluster.lines(0)[STOP]["ids"]) == 6
    assert "loader" in receipt


def test_workers_that_came_are_told_and_the_samples_stay_exact(stopped, twin):
    cluster, node = stopped

    code = cluster.run(node, CHANGE="workers")

    assert code == ExitCode.DONE
    assert [line["ids"] for line in cluster.lines(0)] == [line["ids"] for line in twin[0]]
    assert re.search(r"approximately +loader +samples are exact; augmentation", node.stderr)


def test_an_error_of_ours_that_the_script_catches_does_not_end_training(make_cluster, twin):
    cluster = make_cluster(world=1, command=JOB)
    node = cluster.node("a")

    code = cluster.run(node, CHANGE="attach twice and catch")

    assert code == ExitCode.DONE
    assert "caught: this process has a run already" in node.stderr
    assert_exact(read_log(cluster.log), twin)
