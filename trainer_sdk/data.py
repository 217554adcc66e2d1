"""A sampler whose position is one global number, so that any world size can go on from it.

The order of an epoch depends on (seed, epoch) only; the position counts samples that training
consumed on all ranks together, not what loaders prefetched.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sized

import torch
import torch.distributed
from torch.utils.data import Sampler

from trainer_sdk.errors import UsageError


class EpochIndex(int):
    """A sample's index that carries its epoch to a worker process; the dataset sees an int."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        self = super().__new__(cls, index)
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[type[EpochIndex], tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


def mix_seed(*values: object) -> int:
    """A well spread seed in [0, 2^63) from any values."""
    text = "/".join(map(str, values)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class ResumableSampler(Sampler[int]):
    """Samples for one rank of an epoch's order, continuing anywhere in it.

    Iterating again goes on to the next epoch by itself; `set_epoch` chooses one. The epoch that was
    restored keeps its position, any other starts at its beginning. Every rank takes the same number
    of samples: the end is padded from the beginning of the order, or cut with `drop_last`.

    Args:
        data_source_or_len: the dataset, or its length.
        num_replicas, rank: as in DistributedSampler; by default of the process group, or of
            torchrun's environment.
    """

    def __init__(
        self,
        data_source_or_len: Sized | int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.length = (
            data_source_or_len if isinstance(data_source_or_len, int) else len(data_source_or_len)
        )
        if num_replicas is not None and not 0 <= (rank or 0) < num_replicas:
            raise UsageError(f"rank {rank} is not one of {num_replicas} replicas")
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self.cursor = 0
        self.carries_epoch = False
        self._num_replicas = num_replicas
        self._rank = rank
        # Whether `epoch` and `cursor` were chosen for the next iteration and not used yet.
        self._is_chosen = True
        # A registered loader says when an iteration starts: some loaders make several iterators
        # of their sampler for one.
        self.is_driven = False

    @property
    def num_replicas(self) -> int:
        """Ranks that share the order."""
        return self._num_replicas if self._num_replicas is not None else _world()[1]

    @property
    def rank(self) -> int:
        """This rank among the replicas."""
        return self._rank if self._rank is not None else _world()[0]

    def __len__(self) -> int:
        """Samples of a whole epoch on this rank, wherever the position is."""
        whole = self.length // self.num_replicas
        is_exact = self.drop_last or self.length % self.num_replicas == 0
        return whole if is_exact else whole + 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        if epoch != self.epoch or not self._is_chosen:
            self.set_position(epoch, 0)

    def set_position(self, epoch: int, cursor: int) -> None:
        """Make the next iteration continue after `cursor` samples of that epoch."""
        self.epoch, self.cursor = epoch, cursor
        self._is_chosen = True

    def skip_to_next(self) -> None:
        """Treat the chosen epoch as over: the next iteration takes the one after it."""
        self._is_chosen = False

    def begin(self) -> None:
        """Settle epoch and position of the iteration that is about to start."""
        if not self._is_chosen:
            self.epoch, self.cursor = self.epoch + 1, 0
        self._is_chosen = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_driven:
            self.begin()
        epoch = self.epoch
        indices = self.remaining(epoch, self.cursor)[self.rank :: self.num_replicas]
        if self.carries_epoch:
            return iter([EpochIndex(index, epoch) for index in indices])
        return iter(indices)

    def remaining(self, epoch: int, cursor: int) -> list[int]:
        """What all ranks together still take of an epoch after `cursor` samples, in order."""
        order = self._order(epoch)
        rest = order[cursor:]
        excess = len(rest) % self.num_replicas
        if not rest or not excess:
            return rest
        if self.drop_last:
            return rest[: len(rest) - excess]
        wanted = self.num_replicas - excess
        return rest + (order * (wanted // len(order) + 1))[:wanted]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator()
        generator.manual_seed(mix_seed("order", self.seed, epoch))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order


def _world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
