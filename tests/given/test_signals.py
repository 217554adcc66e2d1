"""Kind d of the given cases: signals, notices at any moment, threads and subprocesses."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import assert_exact, read_log

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def signal_all(cluster, node, number: int) -> None:
    """One signal to every process of the tree at once, as `kill -TERM -pgid` or systemd sends it:
    supervisor, torchrun, ranks and loader workers."""
    supervisor = psutil.Process(node.process.pid)
    tree = [supervisor, *cluster.processes("all")]
    for process in tree:
        os.kill(process.pid, number)


@pytest.mark.parametrize("kind", ["persistent", "anew"])
def test_c58_sigterm_to_the_whole_tree_still_saves_the_step_it_came_in(make_cluster, twin, kind):
    env = {"TOY_WORKERS": "4"} | ({"TOY_PERSISTENT": "1"} if kind == "persistent" else {})
    cluster = make_cluster(env=env)
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.3", LASTGASP_CHECKPOINT__EVERY_STEPS="1000")
    cluster.wait_for_step(7)

    signal_all(cluster, first, signal.SIGTERM)
    code = cluster.finish(first)
    last_step = cluster.lines(0)[-1]["step"]
    cluster.lose(first)
    finished = cluster.run(second)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] == last_step >= 7
    assert_exact(read_log(cluster.log), twin(2))
