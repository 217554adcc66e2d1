"""A newer generation is noticed, told once, and never taken for an older watch's business."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.fence import FenceWatch
from tests.unit.images import Workshop, workshops


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    yield from workshops(tmp_path)


class Told:
    """What the watch tells, and a way to wait for it."""

    def __init__(self, workshop: Workshop) -> None:
        self.generations: list[int] = []
        self._heard = threading.Event()
        self.watch = FenceWatch(workshop.log, workshop.clock, on_fenced=self._hear)

    def _hear(self, generation: int) -> None:
        self.generations.append(generation)
        self._heard.set()

    def probe(self, generation: int, wait_s: float) -> None:
        """Naming a generation has it looked at now."""
        self._heard.clear()
        self.watch.watch(generation)
        self._heard.wait(wait_s)


def test_a_generation_that_a_newer_claim_ended_is_told(workshop: Workshop) -> None:
    first = workshop.claim(1)
    told = Told(workshop)

    told.probe(first.gen, 0.2)
    before = list(told.generations)
    workshop.claim(1)
    told.probe(first.gen, 10)

    assert before == []
    assert told.generations == [first.gen]


def test_nothing_is_told_of_a_generation_that_nobody_watches(workshop: Workshop) -> None:
    """While our own relaunch claims, our own last generation is no fence."""
    first = workshop.claim(1)
    workshop.claim(1)
    told = Told(workshop)

    told.probe(0, 0.2)

    assert told.generations == []
    told.probe(first.gen, 10)
    assert told.generations == [first.gen]
