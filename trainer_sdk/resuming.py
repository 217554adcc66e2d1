"""From the images of a checkpoint to a restored rank and its receipt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainer_sdk.capture import Snapshot
from trainer_sdk.errors import RestoreError
from trainer_sdk.protocol.messages import ShardRef
from trainer_sdk.receipt import Receipt
from trainer_sdk.registry import Registry
from trainer_sdk.restoring import Restoration, restore_generators, restore_objects, state_digest
from trainer_sdk.saved import SavedImage, SavedState


def restore_from_images(
    registry: Registry,
    shards: Sequence[tuple[ShardRef, int]],
    *,
    step: int,
    rank: int,
    world_size: int,
    source: str,
    started_at: float,
) -> Receipt:
    """Restore every registered object, then the generators.

    Args:
        shards: all images of the checkpoint with a descriptor each, owned by this call.
        step: the step that the images must be of.
        started_at: CLOCK_MONOTONIC in seconds when the restore began, for the receipt.

    Raises:
        RestoreError: nothing was written if the checkpoint and the objects do not fit together.
    """
    images: list[SavedImage] = []
    try:
        for shard, fd in shards:
            images.append(SavedImage(fd, size_bytes=shard.size_bytes, name=shard.name))
        saved = SavedState(images, rank=rank)
        if saved.state.get("step") != step:
            raise RestoreError(
                f"images of step {saved.state.get('step')}, not of step {step}",
                is_checkpoint_bad=True,
            )
        unordered = _replay_gradient_order(registry, saved)
        outcome = restore_objects(registry.objects, saved, world_size=world_size)
        outcome.approximately.update(unordered)
        registry.carried = outcome.carried
        registry.user.restore(saved.state["user"])
        snapshot = registry.snapshot()
        # The last act: nothing below draws from a generator.
        restore_generators(saved, outcome, rank=rank, world_size=world_size)
        return _receipt(saved, outcome, snapshot, started_at=started_at, source=source)
    finally:
        for image in images:
            image.close()


def _replay_gradient_order(registry: Registry, saved: SavedState) -> dict[str, str]:
    """Bring DDP's buckets back, before anything else is restored; what could not be, by name.

    Collective, so every rank must decide alike: by what rank 0 saved.
    """
    failed = {}
    orders = saved.state_of_rank(0).get("gradient_order", {})
    for module in registry.modules:
        names = orders.get(module.name)
        if module.gradient_order is None or names is None:
            continue
        fault = module.gradient_order.replay(names)
        if fault:
            failed[f"{module.name}: gradient buckets"] = fault
    return failed


def _receipt(
    saved: SavedState,
    outcome: Restoration,
    snapshot: Snapshot,
    *,
    started_at: float,
    source: str,
) -> Receipt:
    was_polling = bool(saved.state.get("is_polling"))
    if was_polling:
        outcome.approximately["code after the boundary"] = (
            "it was interrupted in run.poll() and is not run again"
        )
    tensors = {live.name: live.tensor for live in snapshot.tensors.values()}
    return Receipt(
        step=saved.state["step"],
        epoch=saved.state["epoch"],
        source=source,
        seconds=time.monotonic() - started_at,
        exactly=tuple(outcome.exactly),
        approximately=outcome.approximately,
        not_restored=outcome.not_restored,
        digest=state_digest(tensors, snapshot.objects),
        was_polling=was_polling,
    )
