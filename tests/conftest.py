"""Fixtures that several suites share. Nothing here skips: what a test needs must be there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3_server import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server, started at the first test that wants it."""
    server = S3Server()
    server.start()
    yield server
    server.stop()
