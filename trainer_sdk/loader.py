"""Where training stands in its loaders, and how a loader goes on from there.

A plain DataLoader over a ResumableSampler is exact, workers' augmentation included; a loader with
`state_dict` is asked for it; any other is counted and named as approximate.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data._utils import fetch as torch_fetch

from trainer_sdk.capture import SavedReader, Sink
from trainer_sdk.data import EpochIndex, ResumableSampler, mix_seed
from trainer_sdk.protocol import environment
from trainer_sdk.rng import preserved_rng, seed_all
from trainer_sdk.termination import guard_worker
from trainer_sdk.tree import decode_tree, encode_tree


class LoaderMode(StrEnum):
    """How a loader is resumed."""

    RESUMABLE = "resumable"
    STATEFUL = "stateful"
    APPROXIMATE = "approximate"


class LoaderObject:
    """A registered loader.

    `num_delivered` counts batches that training received in this life. The training loader is the
    first one registered: one that ended in its epoch resumes with an empty remainder, so that the
    code at the end of the epoch runs; any other loader that ended starts anew.
    """

    kind = "loader"
    class_name = ""

    def __init__(self, name: str, loader: Any, *, is_training: bool) -> None:
        self.name = name
        self.loader = loader
        self.is_training = is_training
        self.sampler = _find_sampler(loader)
        self.mode, self.approximate_reason = _choose_mode(loader, self.sampler)
        self.num_delivered = 0
        self._num_in_epoch = 0
        self._epoch = 0
        self._is_epoch_chosen = True
        self._is_started = False
        self._is_ended = False
        self._is_resuming = False
        self._pending: Any = None
        self._serial = 0
        self._install()

    # ------------------------------------------------------------ hooks into the loader

    def _install(self) -> None:
        self._make_iterator: Callable[[], Any] | None = getattr(self.loader, "_get_iterator", None)
        if self._make_iterator is None:
            if self.mode is LoaderMode.RESUMABLE:
                self.mode = LoaderMode.APPROXIMATE
                self.approximate_reason = "this torch has no DataLoader._get_iterator to count at"
            return
        self.loader._get_iterator = self._new_iterator
        if self.sampler is not None:
            self.sampler.is_driven = True
        if getattr(self.loader, "num_workers", 0) == 0:
            return
        seed = None
        if self.mode is LoaderMode.RESUMABLE:
            assert self.sampler is not None
            self.sampler.carries_epoch = True
            seed = self.sampler.seed
        is_guarded = bool(os.environ.get(environment.SOCKET))
        then = getattr(self.loader, "worker_init_fn", None)
        self.loader.worker_init_fn = WorkerSetup(then, seed, is_guarded=is_guarded)

    def uninstall(self) -> None:
        """Leave the loader as it was found."""
        if self._make_iterator is not None:
            self.loader.__dict__.pop("_get_iterator", None)
        setup = getattr(self.loader, "worker_init_fn", None)
        if isinstance(setup, WorkerSetup):
            self.loader.worker_init_fn = setup.then
        if self.sampler is not None:
            self.sampler.is_driven = self.sampler.carries_epoch = False
        # The run may be garbage in a cycle from now on; a loader with workers must not be in it.
        self.loader = self._make_iterator = None

    def _new_iterator(self) -> Any:
        assert self._make_iterator is not None
        with self._guard():
            if self.mode is LoaderMode.STATEFUL:
                return self._new_stateful_iterator(self._make_iterator)
            serial = self.begin()
            return TrackedIterator(self._make_iterator(), self, serial)

    def _new_stateful_iterator(self, make: Callable[[], Any]) -> Any:
        was_started, was_chosen = self._is_started, self._is_epoch_chosen
        self.begin()
        iterator = make()
        if getattr(iterator, "_finished", False):
            # A finished state came back: the loader asks for the next epoch's iterator at once.
            self._is_started, self._is_epoch_chosen = was_started, was_chosen
        iterator._reset = _begin_before_reset(weakref.ref(self), weakref.ref(iterator))
        return iterator

    def _guard(self) -> AbstractContextManager[None]:
        """Torch draws a base seed for each iterator; the interrupted life drew this one already."""
        is_resuming, self._is_resuming = self._is_resuming, False
        self._pending = None
        return _preserved(self.loader) if is_resuming else nullcontext()

    def begin(self) -> int:
        """An iteration starts; returns its serial number."""
        self._serial += 1
        self._num_in_epoch = 0
        self._is_started, self._is_ended = True, False
        if self.sampler is not None:
            self.sampler.begin()
        if not self._is_epoch_chosen:
            self._epoch += 1
        self._is_epoch_chosen = False
        return self._serial

    def count(self, serial: int) -> None:
        """Training received a batch."""
        if serial == self._serial:
            self.num_delivered += 1
            self._num_in_epoch += 1

    def end(self, serial: int) -> None:
        """Training saw the end of the iteration."""
        if serial == self._serial:
            self._is_ended = True

    # ------------------------------------------------------------ position

    @property
    def position(self) -> int:
        """A number that changes whenever training receives a batch."""
        if self.mode is LoaderMode.STATEFUL:
            iterator = getattr(self.loader, "_iterator", None)
            return self._serial << 32 | int(getattr(iterator, "_num_yielded", 0))
        return self.num_delivered

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one before the first."""
        return self.sampler.epoch if self.sampler is not None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the restored one keeps its position."""
        if epoch != self._epoch or not self._is_epoch_chosen:
            self._epoch, self._is_epoch_chosen = epoch, True
        for target in (self.sampler, getattr(self.loader, "sampler", None)):
            choose = getattr(target, "set_epoch", None)
            if callable(choose):
                choose(epoch)

    def _cursor(self) -> int:
        assert self.sampler is not None
        batch = getattr(self.loader.batch_sampler, "batch_size", None) or 1
        consumed = self._num_in_epoch * batch * self.sampler.num_replicas
        return min(self.sampler.cursor + consumed, self.sampler.length)

    # ------------------------------------------------------------ state

    def capture(self, sink: Sink) -> Any:
        if self._pending is not None:
            return self._capture_pending(sink)
        state: dict[str, Any] = {
            "mode": str(self.mode),
            "epoch": self.epoch,
            "is_started": self._is_started,
            "is_ended": self._is_ended,
        }
        if self.mode is LoaderMode.RESUMABLE:
            assert self.sampler is not None
            state |= _sampler_identity(self.loader, self.sampler) | {"cursor": self._cursor()}
        generator = getattr(self.loader, "generator", None)
        if isinstance(generator, torch.Generator):
            state["generator"] = sink.put_other(f"{self.name}/generator", generator.get_state())
        if self.mode is LoaderMode.STATEFUL:
            state["state"] = self._capture_stateful(sink)
        return state

    def _capture_pending(self, sink: Sink) -> Any:
        state, tensors = self._pending
        for name, tensor in tensors.items():
            sink.put_other(name, tensor)
        return state

    def _capture_stateful(self, sink: Sink) -> Any:
        if hasattr(self.loader, "_iterator"):
            if self.loader._iterator is None:
                return None  # asking would create the iterator and draw its seed too early
            self._is_ended = bool(getattr(self.loader._iterator, "_finished", False))
        with preserved_rng():
            return encode_tree(self.loader.state_dict(), f"{self.name}/state", sink.put_other)

    def mismatches(self, state: Any, saved: SavedReader) -> list[str]:
        if state["mode"] != self.mode:
            return [f"{self.name}: a {self.mode} loader here, {state['mode']} in the checkpoint"]
        if self.mode is not LoaderMode.RESUMABLE:
            return []
        assert self.sampler is not None
        here = _sampler_identity(self.loader, self.sampler)
        return [
            f"{self.name}: {key} {here[key]} here, {state[key]} in the checkpoint"
            for key in ("length", "seed", "shuffle")
            if here[key] != state[key]
        ]

    def apply(self, state: Any, saved: SavedReader) -> None:
        is_over = state["is_ended"] and not self.is_training
        self._epoch, self._is_epoch_chosen = state["epoch"], not is_over
        self._is_resuming = state["is_started"] and not is_over
        tensors = {name: saved.tensor(name) for name in saved.names(f"{self.name}/")}
        if self.sampler is not None:
            self.sampler.set_position(state["epoch"], state.get("cursor", 0))
            if is_over:
                self.sampler.skip_to_next()
        if "generator" in state and self.loader.generator is not None:
            self.loader.generator.set_state(saved.tensor(state["generator"]))
        if state.get("state") is not None:
            self.loader.load_state_dict(
                decode_tree(state["state"], f"{self.name}/state", saved.tensor)
            )
        has_workers = getattr(self.loader, "num_workers", 0) > 0
        if state.get("has_workers", has_workers) != has_workers:
            self.approximate_reason = self.approximate_reason or (
                "samples are exact; augmentation is not, since workers came or went"
            )
        self._pending = (state, tensors)


# References from an iterator back to its loader are weak: in a cycle it would be left to the
# garbage collector, which finalises the queues to the workers before the iterator can stop them.
_WeakLoader = Callable[[], LoaderObject | None]


def _begin_before_reset(owner: _WeakLoader, iterator: Callable[[], Any]) -> Callable[..., None]:
    def reset(*args: Any, **kwargs: Any) -> None:
        target, held = owner(), iterator()
        if target is not None:
            target.begin()
        type(held)._reset(held, *args, **kwargs)

    return reset


class TrackedIterator:
    """A DataLoader's iterator that counts what training receives."""

    def __init__(self, inner: Any, owner: LoaderObject, serial: int) -> None:
        self._inner = inner
        self._owner: _WeakLoader = weakref.ref(owner)
        self._serial = serial

    def __iter__(self) -> TrackedIterator:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            owner = self._owner()
            if owner is not None:
                owner.end(self._serial)
            raise
        owner = self._owner()
        if owner is not None:
            owner.count(self._serial)
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Called by the DataLoader for the next epoch of persistent workers."""
        owner = self._owner()
        if owner is not None:
            self._serial = owner.begin()
        self._inner._reset(loader, first_iter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WorkerSetup:
    """Runs in each worker: the user's function first, then seeds every sample by its index, if
    there is a seed."""

    def __init__(
        self, then: Callable[[int], None] | None, seed: int | None, *, is_guarded: bool
    ) -> None:
        self.then = then
        self.seed = seed
        self.is_guarded = is_guarded

    def __call__(self, worker_id: int) -> None:
        if self.then is not None:
            self.then(worker_id)
        if self.is_guarded:
            guard_worker()
        if self.seed is None:
            return
        # This is the worker's own process, where one fetcher serves one loader.
        fetcher = _seeded_fetcher(torch_fetch._MapDatasetFetcher, self.seed)
        torch_fetch._MapDatasetFetcher = fetcher  # type: ignore[misc]


def _seeded_fetcher(base: Any, seed: int) -> Any:
    class SeededFetcher(base):  # type: ignore[misc]
        def fetch(self, possibly_batched_index: Any) -> Any:
            if not self.auto_collation:
                return self.collate_fn(self._one(possibly_batched_index))
            if getattr(self.dataset, "__getitems__", None):
                return self.collate_fn(self._many(possibly_batched_index))
            return self.collate_fn([self._one(index) for index in possibly_batched_index])

        def _one(self, index: Any) -> Any:
            if not isinstance(index, EpochIndex):
                return self.dataset[index]
            seed_all(mix_seed("sample", seed, index.epoch, int(index)))
            return self.dataset[int(index)]

        def _many(self, indices: Any) -> Any:
            if indices and isinstance(indices[0], EpochIndex):
                plain = [int(index) for index in indices]
                seed_all(mix_seed("samples", seed, indices[0].epoch, *plain))
                return self.dataset.__getitems__(plain)
            return self.dataset.__getitems__(indices)

    return SeededFetcher


@contextmanager
def _preserved(loader: Any) -> Iterator[None]:
    generator = getattr(loader, "generator", None)
    with preserved_rng():
        if isinstance(generator, torch.Generator):
            state = generator.get_state()
            yield
            generator.set_state(state)
        else:
            yield


def _find_sampler(loader: Any) -> ResumableSampler | None:
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        sampler = getattr(loader, "sampler", None)
        return sampler if isinstance(sampler, ResumableSampler) else None
    sampler = getattr(batches, "sampler", None)
    return sampler if isinstance(sampler, ResumableSampler) else None


def _choose_mode(loader: Any, sampler: ResumableSampler | None) -> tuple[LoaderMode, str]:
    if callable(getattr(loader, "state_dict", None)):
        has_workers = getattr(loader, "num_workers", 0) > 0
        reason = (
            "samples are exact; augmentation drawn in its workers is not" if has_workers else ""
        )
        return LoaderMode.STATEFUL, reason
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return LoaderMode.APPROXIMATE, "an iterable dataset starts its epoch again"
    if sampler is None or not isinstance(loader, DataLoader):
        return LoaderMode.APPROXIMATE, (
            "its sampler starts the epoch again; use trainer_sdk.data.ResumableSampler"
        )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return LoaderMode.APPROXIMATE, "its batch sampler cannot be counted"
    if not getattr(loader, "in_order", True) and loader.num_workers > 0:
        return LoaderMode.APPROXIMATE, "in_order=False delivers batches in no fixed order"
    return LoaderMode.RESUMABLE, ""


def _sampler_identity(loader: Any, sampler: ResumableSampler) -> dict[str, Any]:
    return {
        "length": sampler.length,
        "seed": sampler.seed,
        "shuffle": sampler.shuffle,
        "has_workers": loader.num_workers > 0,
    }
