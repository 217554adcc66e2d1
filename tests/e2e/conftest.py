"""Clusters and twins for the end-to-end tests."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Cluster, run_twin
from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

Twin = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Twin]:
    """The log of the uninterrupted job for a world size; run once for each."""
    found: dict[int, Twin] = {}

    def get(world: int) -> Twin:
        if world not in found:
            found[world] = run_twin(tmp_path_factory.mktemp(f"twin-{world}"), world=world)
        return found[world]

    return get


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
def s3_cluster(make_cluster: Callable[..., Cluster], s3_server: S3Server) -> Cluster:
    """A cluster whose store is a real S3 server."""
    bucket = f"e2e-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(bucket)
    return make_cluster(
        store_url=f"s3://{bucket}/runs",
        env={
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_REGION": REGION,
            "LASTGASP_STORE__ENDPOINT_URL": s3_server.endpoint_url,
            "LASTGASP_STORE__ADDRESSING_STYLE": "path",
        },
    )
