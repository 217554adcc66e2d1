"""From the images of a checkpoint to the live state: everything is checked before it is written."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_sdk import failpoints
from trainer_sdk.capture import MAX_SAMPLE, SavedReader, Sink, StateObject
from trainer_sdk.dtypes import flat_bits, is_same_bits
from trainer_sdk.errors import RestoreError, TrainerSdkError
from trainer_sdk.loader import LoaderObject
from trainer_sdk.modules import ModuleObject
from trainer_sdk.optimizers import OptimizerObject
from trainer_sdk.rng import capture_rng, derive_rng, restore_rng
from trainer_sdk.saved import SavedState
from trainer_sdk.stateful import StatefulObject
from trainer_sdk.tree import dump_json

log = logging.getLogger("trainer_sdk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """State in a checkpoint whose object has not come back yet; saved again as it is."""

    kind: str
    class_name: str
    state: Any
    tensors: Mapping[str, torch.Tensor]

    # SavedReader, so that an object that appears later can be restored from it

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.tensors if name.startswith(prefix)]

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()

    def copy_into(self, name: str, live: torch.Tensor) -> None:
        with torch.no_grad():
            live.copy_(self.tensors[name])


@dataclass(slots=True, kw_only=True)
class Restoration:
    """What became of every object."""

    exactly: list[str] = field(default_factory=list)
    approximately: dict[str, str] = field(default_factory=dict)
    not_restored: dict[str, str] = field(default_factory=dict)
    carried: dict[str, Carried] = field(default_factory=dict)


def restore_objects(
    objects: Mapping[str, StateObject], saved: SavedState, *, world_size: int
) -> Restoration:
    """Check everything, then write everything, then compare bit by bit. Generators come later.

    Raises:
        RestoreError: the live objects do not fit (nothing was written), or what was written does
            not read back.
    """
    trees: dict[str, Any] = saved.state["objects"]
    outcome = Restoration()
    _check(objects, trees, saved)
    for name in objects:
        if name not in trees:
            outcome.not_restored[name] = "not in the checkpoint; starts fresh"
    failpoints.hit("restore.copy.before")
    for name in sorted(trees.keys() & objects.keys(), key=lambda name: _order(objects[name])):
        _apply(objects[name], trees[name]["state"], saved)
    failpoints.hit("restore.copy.after")
    for name in trees.keys() - objects.keys():
        outcome.carried[name] = carry(name, trees[name], saved)
        outcome.not_restored[name] = "saved, but not registered yet; kept until it is"
    for name, target in objects.items():
        if name in trees:
            _judge(target, trees[name]["state"], saved, outcome, world_size=world_size)
    return outcome


def carry(name: str, tree: Mapping[str, Any], saved: SavedState) -> Carried:
    """Keep a copy of an object's saved state."""
    tensors = {tensor: saved.tensor(tensor) for tensor in saved.names(f"{name}/")}
    return Carried(
        kind=tree["kind"],
        class_name=tree.get("class", ""),
        state=tree["state"],
        tensors=tensors,
    )


def apply_carried(target: StateObject, carried: Carried) -> None:
    """Restore an object that appeared after the restore.

    Raises:
        RestoreError: it does not fit what was saved under its name.
    """
    faults = _kind_fault(target, carried.kind, carried.class_name)
    faults = faults or target.mismatches(carried.state, carried)
    if faults:
        raise RestoreError(f"{target.name} does not fit the checkpoint", mismatches=faults)
    _apply(target, carried.state, carried)


def _order(target: StateObject) -> int:
    """Loaders and modules first, optimizers last: nothing writes learning rates after them."""
    return 1 if isinstance(target, OptimizerObject) else 0


def _kind_fault(target: StateObject, kind: str, class_name: str) -> list[str]:
    if target.kind != kind:
        return [f"{target.name}: a {target.kind} here, a {kind} in the checkpoint"]
    if class_name and target.class_name and target.class_name != class_name:
        return [f"{target.name}: a {target.class_name} here, a {class_name} in the checkpoint"]
    return []


def _check(objects: Mapping[str, StateObject], trees: Mapping[str, Any], saved: SavedState) -> None:
    faults = []
    for name, target in objects.items():
        if name in trees:
            tree = trees[name]
            kind_fault = _kind_fault(target, tree["kind"], tree.get("class", ""))
            faults += kind_fault or target.mismatches(tree["state"], saved)
        elif isinstance(target, ModuleObject | OptimizerObject):
            faults.append(f"{name}: a {target.kind} that is not in the checkpoint")
    if not faults:
        faults = _group_order_faults(objects, trees)
    if faults:
        raise RestoreError(
            "the checkpoint does not fit the training script; nothing was restored",
            mismatches=faults,
            hint="register() after restore() what is to start fresh, or use another job id",
        )


def _group_order_faults(objects: Mapping[str, StateObject], trees: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: may keep values by the position of the parameter groups, and those of "
        f"{optimizer.name} stand in another order than in the checkpoint"
        for optimizer in objects.values()
        if isinstance(optimizer, OptimizerObject)
        and optimizer.name in trees
        and optimizer.has_other_order(trees[optimizer.name]["state"])
        for name, target in objects.items()
        if isinstance(target, StatefulObject)
        and target.goes_by_groups_of(optimizer.optimizer)
        and name in trees
    ]


def _apply(target: StateObject, state: Any, saved: SavedReader) -> None:
    try:
        target.apply(state, saved)
    except TrainerSdkError:
        raise
    except Exception as error:  # a user's load_state_dict may raise anything
        raise RestoreError(f"{target.name} did not take its state: {error!r}") from error


def _judge(
    target: StateObject,
    state: Any,
    saved: SavedState,
    outcome: Restoration,
    *,
    world_size: int,
) -> None:
    name = target.name
    reason = target.approximate_reason if isinstance(target, LoaderObject) else ""
    if not isinstance(target, LoaderObject):
        reason = _difference(target, state, saved)
    if reason and isinstance(target, ModuleObject | OptimizerObject):
        raise RestoreError(f"{name} does not read back as it was saved: {reason}")
    if not reason and saved.saved_world != world_size and not isinstance(target, LoaderObject):
        own = [tensor for tensor in saved.names(f"{name}/") if not saved.is_replica(tensor)]
        if own:
            reason = (
                f"{len(own)} per-rank tensors come from rank {saved.saved_rank} "
                f"of {saved.saved_world} (now {world_size})"
            )
    if reason:
        outcome.approximately[name] = reason
    else:
        outcome.exactly.append(name)
    if isinstance(target, ModuleObject) and (buffers := target.unsaved_buffers()):
        outcome.not_restored[f"{name} buffers"] = f"declared not persistent: {', '.join(buffers)}"


def _difference(target: StateObject, state: Any, saved: SavedState) -> str:
    """How the live state differs from the saved one, bit by bit; "" when it does not."""
    sink = Sink()
    live_state = target.capture(sink)
    if isinstance(target, OptimizerObject):
        if reason := target.difference(state, live_state):
            return reason
    elif dump_json(live_state) != dump_json(state):
        return "its state_dict() differs from what it was given"
    for live in sink.tensors.values():
        if not is_same_bits(live.tensor.cpu(), saved.view(live.name)):
            return f"{live.name} differs"
    return ""


def restore_generators(
    saved: SavedState, outcome: Restoration, *, rank: int, world_size: int
) -> None:
    """The last act of a restore: nothing may draw after it."""
    if rank >= saved.saved_world:
        derive_rng(saved.rng, rank=rank, world_size=world_size)
        outcome.approximately["generators"] = (
            f"rank {rank} is new: seeded from rank {saved.saved_rank}, rank and world size"
        )
        return
    missing = restore_rng(saved.rng)
    for name in missing:
        outcome.not_restored[f"generator {name}"] = "this process has none"
    for name in capture_rng().keys() - saved.rng.keys():
        outcome.not_restored[f"generator {name}"] = "not in the checkpoint"
    if saved.saved_world != world_size:
        outcome.approximately["generators"] = (
            f"each rank keeps its own stream; there were {saved.saved_world} ranks"
        )
    else:
        outcome.exactly.append("generators")


def sample_of(
    tensor: torch.Tensor, *, start: int = 0, max_sample: int = MAX_SAMPLE
) -> torch.Tensor:
    """At most `max_sample` elements, evenly spread, as integers of their width.

    A view of the live tensor where it is contiguous.
    """
    bits = flat_bits(tensor)
    stride = max(1, -(-bits.numel() // max_sample))
    return bits[start % stride :: stride]


def state_digest(tensors: Mapping[str, torch.Tensor], objects: Any) -> str:
    """A digest over a sample of every tensor and the JSON state."""
    digest = hashlib.sha256(dump_json(objects))
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(sample_of(tensors[name]).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
