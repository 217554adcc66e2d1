"""Fixtures that several suites share. Nothing here skips: what they need is installed with us."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SIZED_COMMAND, Cluster, Node, run_twin
from tests.fault_proxy import FaultProxy
from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

Twin = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server, started at the first test that wants it."""
    server = S3Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Twin]:
    """The log of the uninterrupted job for a world size; run once for each."""
    found: dict[int, Twin] = {}

    def get(world: int) -> Twin:
        if world not in found:
            found[world] = run_twin(tmp_path_factory.mktemp(f"twin-{world}"), world=world)
        return found[world]

    return get


@pytest.fixture(scope="session")
def quick_twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """The uninterrupted job of one rank without worker processes, which starts fast."""
    return run_twin(tmp_path_factory.mktemp("quick-twin"), world=1, TOY_WORKERS="0")


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*, world: int = 2, **options: Any) -> Cluster:
        cluster = Cluster(folder=tmp_path / f"cluster-{len(made)}", world=world, **options)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def quick_cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """The toy of `quick_twin` on a directory store."""
    return make_cluster(world=1, env={"TOY_WORKERS": "0"})


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The sized job, killed with checkpoints of steps 5 and 10; tests work on copies."""
    folder = tmp_path_factory.mktemp("saved") / "c"
    cluster = Cluster(folder=folder, world=1, env={"SIZED_STEP_S": "0.05"})
    node = cluster.node("a")
    cluster.start(node, command=SIZED_COMMAND, SIZED_STEPS="1000")
    cluster.wait_for_event(node, "checkpoint.committed", step=10)
    cluster.kill_everything(node)
    yield cluster
    cluster.close()


@pytest.fixture
def copied(make_cluster: Callable[..., Cluster], saved: Cluster) -> tuple[Cluster, Node]:
    """A copy of the saved job's store and log, to end at step 14, and a node without a spool."""
    cluster = make_cluster(world=1, env={"SIZED_STEPS": "14", "SIZED_STEP_S": "0.05"})
    for name in ("store", "log"):
        shutil.rmtree(cluster.folder / name)
        shutil.copytree(saved.folder / name, cluster.folder / name)
    return cluster, cluster.node("b")


def s3_options(server: S3Server, endpoint_url: str, **env: str) -> dict[str, Any]:
    """A cluster's options for a new bucket of the server, reached by this URL.

    The buckets of earlier tests go: a server has room for so many.
    """
    server.drop_buckets("e2e-")
    bucket = f"e2e-{uuid.uuid4().hex[:12]}"
    server.make_bucket(bucket)
    return {
        "store_url": f"s3://{bucket}/runs",
        "env": {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": REGION,
            "LASTGASP_STORE__ENDPOINT_URL": endpoint_url,
            "LASTGASP_STORE__ADDRESSING_STYLE": "path",
            **env,
        },
    }


@pytest.fixture
def s3_cluster(make_cluster: Callable[..., Cluster], s3_server: S3Server) -> Cluster:
    """A cluster whose store is a real S3 server."""
    return make_cluster(**s3_options(s3_server, s3_server.endpoint_url))


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """The S3 server behind a proxy that misbehaves on demand."""
    with FaultProxy(s3_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxied_cluster(
    make_cluster: Callable[..., Cluster], s3_server: S3Server, proxy: FaultProxy
) -> Cluster:
    """The toy of `quick_twin` whose store is behind `proxy`."""
    return make_cluster(world=1, **s3_options(s3_server, proxy.url, TOY_WORKERS="0"))
