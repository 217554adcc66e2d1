"""Which tensors all ranks hold in common: proven through the job's own store, never assumed.

No collective is used, and every wait is bounded: without a proof a tensor is the rank's own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from trainer_sdk.capture import LiveTensor
from trainer_sdk.dtypes import byte_view, dtype_name
from trainer_sdk.restoring import sample_of

log = logging.getLogger("trainer_sdk")


def default_store() -> Any:
    """The store of the default process group, or None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        from torch.distributed.distributed_c10d import _get_default_store  # no public name

        return _get_default_store()
    except (ImportError, ValueError):
        return None


def content_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and every byte."""
    digest = hashlib.sha256(f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}".encode())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest.update(byte_view(plain))
    return digest.hexdigest()


def prove_replicas(
    store: Any,
    digests: Mapping[str, str],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> tuple[frozenset[str], frozenset[str]]:
    """Compare the digests of all ranks.

    Args:
        store: a key-value store of this plan alone.
        digests: name and content digest of everything that may be held in common.

    Returns:
        The names that every rank holds equally, and those that differ or are not everywhere.

    Raises:
        TimeoutError: not every rank answered in time.
    """
    deadline = time.monotonic() + timeout_s
    text = json.dumps(dict(sorted(digests.items())), separators=(",", ":"))
    total = hashlib.sha256(text.encode()).hexdigest()
    # The names go first: whoever sees a rank's total can read its names.
    store.set(f"names/{rank}", text)
    store.set(f"total/{rank}", total)
    totals = _get_all(store, "total", world_size, deadline)
    if set(totals) == {total.encode()}:
        return frozenset(digests), frozenset()
    everyone = [json.loads(names) for names in _get_all(store, "names", world_size, deadline)]
    names = set().union(*everyone)
    equal = {name for name in names if len({each.get(name, "") for each in everyone}) == 1}
    return frozenset(equal), frozenset(names - equal)


def _get_all(store: Any, kind: str, world_size: int, deadline: float) -> list[bytes]:
    keys = [f"{kind}/{rank}" for rank in range(world_size)]
    left_s = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait(keys, timedelta(seconds=left_s))
    except RuntimeError as error:  # torch raises DistStoreError or its base on a timeout
        raise TimeoutError(f"not all of {world_size} ranks published their {kind}") from error
    return [bytes(store.get(key)) for key in keys]


def replica_digest(tensors: Iterable[LiveTensor], *, step: int, names: Iterable[str]) -> str:
    """A digest over a sample of tensors that all ranks hold, and over their names.

    The sampled elements move with the step, so a difference that hides from one sample shows in
    a later one.
    """
    digest = hashlib.sha256("\n".join(names).encode())
    samples = [sample_of(live.tensor, start=step * 7919) for live in tensors]
    by_width: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for sample in samples:
        by_width.setdefault((sample.dtype, sample.device), []).append(sample)
    for group in by_width.values():
        digest.update(torch.cat(group).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]
