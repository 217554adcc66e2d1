"""Loaders go on where training stood."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.unit.test_sdk_state import open_images, registry_of, restore, stage
from trainer_sdk.data import EpochIndex, ResumableSampler
from trainer_sdk.errors import RestoreError
from trainer_sdk.loader import LoaderMode, LoaderObject
from trainer_sdk.registry import Registry
from trainer_sdk.rng import capture_rng, restore_rng

# torchdata 0.11 calls a name that newer torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

# ---------------------------------------------------------------- the sampler


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 60),
    first=st.integers(1, 5),
    second=st.integers(1, 5),
    batch=st.integers(1, 4),
    num_batches=st.integers(0, 20),
)
def test_any_world_size_sees_what_is_left_of_the_epoch(
    length: int, first: int, second: int, batch: int, num_batches: int
) -> None:
    """C51: nothing twice and nothing missing but the padding at the end."""
    samplers = [ResumableSampler(length, num_replicas=first, rank=r) for r in range(first)]
    seen = [index for sampler in samplers for index in list(sampler)[: num_batches * batch]]
    cursor = min(num_batches * batch * first, length)
    rest: list[int] = []
    for rank in range(second):
        sampler = ResumableSampler(length, num_replicas=second, rank=rank)
        sampler.set_position(0, cursor)
        rest += list(sampler)

    assert set(seen) | set(rest) == set(range(length))
    assert len(rest) - (length - cursor) < second
    if cursor < length:
        assert not set(seen) & set(rest[: length - cursor]) or len(rest) > length - cursor


def test_all_ranks_take_the_same_number_of_samples() -> None:
    for drop_last in (False, True):
        takes = [
            list(ResumableSampler(10, num_replicas=4, rank=rank, drop_last=drop_last))
            for rank in range(4)
        ]
        assert {len(take) for take in takes} == {2 if drop_last else 3}
        assert len(ResumableSampler(10, num_replicas=4, rank=0, drop_last=drop_last)) in (2, 3)


def test_iterating_again_goes_on_to_the_next_epoch() -> None:
    one, other = ResumableSampler(20), ResumableSampler(20)
    epochs = [list(one) for _ in range(3)]
    other.set_epoch(2)

    assert list(other) == epochs[2]
    assert epochs[0] != epochs[1]
    assert one.epoch == 2


def test_set_epoch_keeps_the_restored_position_of_that_epoch_only() -> None:
    sampler, whole = ResumableSampler(20), ResumableSampler(20)
    whole.set_epoch(1)
    order = list(whole)
    sampler.set_position(1, 15)
    sampler.set_epoch(1)

    assert list(sampler) == order[15:]
    sampler.set_epoch(1)
    assert list(sampler) == order
    sampler.set_position(1, 15)
    sampler.set_epoch(2)
    assert len(list(sampler)) == 20


def test_epoch_index_is_an_int_that_survives_the_way_to_a_worker() -> None:
    index = copy.copy(EpochIndex(5, 3))

    assert (index, index.epoch) == (5, 3)


# ---------------------------------------------------------------- which loader is how exact


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


LOADERS = {
    "resumable": (lambda: DataLoader(range(9), sampler=ResumableSampler(9)), LoaderMode.RESUMABLE),
    "unbatched": (
        lambda: DataLoader(range(9), batch_size=None, sampler=ResumableSampler(9)),
        LoaderMode.RESUMABLE,
    ),
    "own batches": (
        lambda: DataLoader(range(9), batch_sampler=BatchSampler(ResumableSampler(9), 2, False)),
        LoaderMode.RESUMABLE,
    ),
    "shuffled": (lambda: DataLoader(range(9), shuffle=True), LoaderMode.APPROXIMATE),
    "iterable": (lambda: DataLoader(Stream()), LoaderMode.APPROXIMATE),
    "out of order": (
        lambda: DataLoader(range(9), num_workers=1, in_order=False, sampler=ResumableSampler(9)),
        LoaderMode.APPROXIMATE,
    ),
    "stateful": (lambda: StatefulDataLoader(range(9)), LoaderMode.STATEFUL),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_that_are_not_exact_are_named_at_registration(kind: str) -> None:
    """C12."""
    new, mode = LOADERS[kind]
    loader = LoaderObject("loader", new(), is_training=True)

    assert loader.mode is mode
    assert bool(loader.approximate_reason) == (mode is LoaderMode.APPROXIMATE)


@pytest.mark.parametrize("kind", ["resumable", "unbatched", "own batches", "stateful"])
@pytest.mark.parametrize("num_batches", [0, 3])
def test_every_exact_loader_continues(kind: str, num_batches: int) -> None:
    new, _ = LOADERS[kind]
    first, second = new(), new()
    registry, other = registry_of(loader=first), registry_of(loader=second)
    batches = iter(first)
    for _ in range(num_batches):
        next(batches)
    image = stage(registry)
    rest = [*batches, *first]

    outcome = restore(other, [image])

    assert outcome.exactly == ["loader"]
    assert repr([*second, *second]) == repr(rest)


def test_wrapped_loader_is_left_as_it_was_found() -> None:
    def mine(worker_id: int) -> None: ...

    loader = DataLoader(range(9), num_workers=1, sampler=ResumableSampler(9), worker_init_fn=mine)
    registry = registry_of(loader=loader)
    assert loader.worker_init_fn is not mine
    registry.release()

    assert loader.worker_init_fn is mine
    assert "_get_iterator" not in vars(loader)


def test_other_data_is_refused() -> None:
    first = DataLoader(range(9), sampler=ResumableSampler(9))
    second = DataLoader(range(8), sampler=ResumableSampler(8, seed=4))

    with pytest.raises(RestoreError, match=r"length 8 here, 9 in the checkpoint(.|\n)*seed 4 here"):
        restore(registry_of(loader=second), [stage(registry_of(loader=first))])


def test_evaluation_loader_that_ended_starts_anew() -> None:
    def new() -> tuple[Any, Any, Registry]:
        train = DataLoader(range(9), sampler=ResumableSampler(9))
        check = DataLoader(range(5), sampler=ResumableSampler(5, shuffle=False))
        return train, check, registry_of(train=train, check=check)

    train, check, registry = new()
    batches = iter(train)
    next(batches)
    list(check)
    other_train, other_check, other = new()
    image = stage(registry)

    restore(other, [image])

    assert len(list(other_train)) == 8
    assert len(list(other_check)) == 5


def test_restored_position_is_saved_again_before_it_is_used() -> None:
    first = DataLoader(range(9), sampler=ResumableSampler(9))
    registry = registry_of(loader=first)
    batches = iter(first)
    next(batches)
    image = stage(registry)
    second = registry_of(loader=DataLoader(range(9), sampler=ResumableSampler(9)))
    restore(second, [image])
    again = stage(second)

    assert open_images([again]).state["objects"] == open_images([image]).state["objects"]


# ---------------------------------------------------------------- torchdata


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


def stateful(num_workers: int, *, is_ours: bool) -> Any:
    if is_ours:
        return StatefulDataLoader(
            Numbers(), batch_size=4, num_workers=num_workers, sampler=ResumableSampler(23)
        )
    return StatefulDataLoader(Numbers(), batch_size=4, num_workers=num_workers, shuffle=True)


def life(
    loader: Any, registry: Registry, *, start: int = 0, stop: int = 0
) -> tuple[list[Any], bytes]:
    """Batches and draws of the main generators, up to a step or for three epochs."""
    lines: list[Any] = []
    step, image = start, b""
    (track,) = registry.loaders
    for epoch in range(track.epoch, 3):
        track.set_epoch(epoch)
        for batch in loader:
            step += 1
            lines.append((epoch, batch.tolist(), torch.rand(1).item(), random.random()))
            if step == stop:
                return lines, stage(registry)
        lines.append(("end", epoch, float(numpy.random.rand())))
    return lines, image


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_ours", [False, True], ids=["own sampler", "our sampler"])
@pytest.mark.parametrize("stop", [2, 6, 7, 12])
def test_stateful_loader_continues_exactly(num_workers: int, is_ours: bool, stop: int) -> None:
    """C13: in the middle of an epoch, on its last batch (6, 12), and one after it."""
    lives = []
    image = b""
    for start, stop_at in ((0, 0), (0, stop), (stop, 0)):
        torch.manual_seed(4)
        random.seed(4)
        numpy.random.seed(4)
        loader = stateful(num_workers, is_ours=is_ours)
        registry = registry_of(loader=loader)
        if start:
            restore(registry, [image])
            restore_rng(open_images([image]).rng)
        lines, image = life(loader, registry, start=start, stop=stop_at)
        lives.append(lines)
        registry.release()

    assert lives[1] + lives[2] == lives[0]


def test_asking_a_stateful_loader_draws_nothing() -> None:
    loader = stateful(0, is_ours=False)
    registry = registry_of(loader=loader)
    before = capture_rng()
    stage(registry)
    assert capture_rng() == before
    batches = iter(loader)
    next(batches)
    before = capture_rng()
    stage(registry)

    assert capture_rng() == before
