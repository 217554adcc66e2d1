"""The registered objects of one run, and the snapshot of all of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer_sdk.capture import Sink, Snapshot, StateObject, split_aliases
from trainer_sdk.errors import UnsupportedState, UsageError
from trainer_sdk.loader import LoaderObject
from trainer_sdk.modules import ModuleObject
from trainer_sdk.optimizers import OptimizerObject
from trainer_sdk.protocol.image import MAX_HEADER_BYTES
from trainer_sdk.restoring import Carried, apply_carried
from trainer_sdk.rng import PREFIX as RNG_PREFIX
from trainer_sdk.rng import capture_rng
from trainer_sdk.stateful import stateful_object
from trainer_sdk.tree import decode_tree, encode_tree, refuse_tensor

log = logging.getLogger("trainer_sdk")
# Bytes of an entry in a header besides its name, which stands there twice: once as a key of the
# tensor table and once in the layout. Measured on float32 matrices.
_ENTRY_BYTES = 150
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class UserValues(MutableMapping[str, Any]):
    """Plain values of the training script, by attribute or item; saved with the rest."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})
        self._values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        encode_tree(value, f"user/{name}", refuse_tensor)
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"run.user has no value {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            raise UsageError(f"run.user.{name} is a method", hint=f"use run.user[{name!r}]")
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self._values[name]

    def to_json(self) -> Any:
        """The JSON form.

        Raises:
            UnsupportedState: a value became something that cannot be held.
        """
        return encode_tree(self._values, "user", refuse_tensor)

    def restore(self, tree: Any) -> None:
        """Take saved values over those set so far."""
        self._values.update(decode_tree(tree, "user", _no_tensor))


def _no_tensor(name: str) -> Any:
    raise KeyError(name)


class Registry:
    """Objects by name, in the order registered."""

    def __init__(self) -> None:
        self.objects: dict[str, StateObject] = {}
        self.carried: dict[str, Carried] = {}
        self.user = UserValues()

    def add_all(self, objects: Mapping[str, Any]) -> list[StateObject]:
        """Register objects; modules first, so that optimizers find their parameters' names.

        Raises:
            UnsupportedState, UsageError: nothing was registered.
        """
        flat = dict(_flatten(objects))
        for name in flat:
            _check_name(name, self.objects)
        before = dict(self.objects)
        try:
            modules = [
                (name, value) for name, value in flat.items() if isinstance(value, nn.Module)
            ]
            others = [item for item in flat.items() if not isinstance(item[1], nn.Module)]
            for name, value in modules + others:
                self.objects[name] = self._wrap(name, value)
            added = [self.objects[name] for name in flat]
            self._try_out(added)
        except BaseException:
            for name in self.objects.keys() - before.keys():
                _release(self.objects[name])
            self.objects = before
            raise
        return added

    def adopt_carried(self, added: list[StateObject]) -> list[str]:
        """Give objects that appear late the state that was saved under their names."""
        found = []
        for target in added:
            carried = self.carried.get(target.name)
            if carried is not None:
                apply_carried(target, carried)
                del self.carried[target.name]
                found.append(target.name)
        return found

    @property
    def loaders(self) -> list[LoaderObject]:
        """Registered loaders, the training loader first."""
        return [each for each in self.objects.values() if isinstance(each, LoaderObject)]

    @property
    def optimizers(self) -> list[OptimizerObject]:
        """Registered torch optimizers."""
        return [each for each in self.objects.values() if isinstance(each, OptimizerObject)]

    @property
    def modules(self) -> list[ModuleObject]:
        """Registered torch modules."""
        return [each for each in self.objects.values() if isinstance(each, ModuleObject)]

    def parameter_names(self) -> dict[int, tuple[str, str]]:
        """id of every parameter of a registered module -> (module, name in it); first name wins."""
        names: dict[int, tuple[str, str]] = {}
        for module in self.modules:
            for name, tensor, _ in module.named_tensors():
                names.setdefault(id(tensor), (module.name, name))
        return names

    def snapshot(self) -> Snapshot:
        """References to the whole state as it is now.

        Raises:
            UnsupportedState: an object grew something that cannot be held.
        """
        sink = Sink()
        objects: dict[str, Any] = {}
        for name, target in self.objects.items():
            objects[name] = {
                "kind": target.kind,
                "class": target.class_name,
                "state": target.capture(sink),
            }
        for name, carried in self.carried.items():
            objects[name] = {
                "kind": carried.kind,
                "class": carried.class_name,
                "state": carried.state,
            }
            for tensor_name, tensor in carried.tensors.items():
                sink.put_other(tensor_name, tensor)
        stored, aliases = split_aliases(sink.tensors.values())
        rng = {f"{RNG_PREFIX}{name}": state for name, state in capture_rng().items()}
        return Snapshot(tensors=stored, aliases=aliases, objects=objects, rng=rng)

    def release(self) -> None:
        """Leave every object as it was found, and let go of all of them."""
        for target in self.objects.values():
            _release(target)
        self.objects = {}
        self.carried = {}

    def _wrap(self, name: str, value: Any) -> StateObject:
        if isinstance(value, nn.Module):
            return ModuleObject(name, value)
        if isinstance(value, Optimizer):
            return OptimizerObject(name, value, self.parameter_names)
        if isinstance(value, DataLoader) or _is_loader(value):
            loader = LoaderObject(name, value, is_training=not self.loaders)
            if loader.approximate_reason:
                log.warning("%s is not exactly resumable: %s", name, loader.approximate_reason)
            return loader
        return stateful_object(name, value)

    def _try_out(self, added: list[StateObject]) -> None:
        """Find out now, not inside the lead time, what cannot be saved."""
        capture_rng()
        sink = Sink()
        for target in added:
            target.capture(sink)
        names = list(sink.tensors)
        for optimizer in self.optimizers:
            if optimizer in added and not optimizer.optimizer.state:
                names += [
                    f"{optimizer.name}/state/{name}/{moment}"
                    for group in optimizer.group_names()
                    for name in group
                    for moment in _MOMENTS
                ]
        size = sum(2 * len(name) + _ENTRY_BYTES for name in names)
        if size > MAX_HEADER_BYTES:
            raise UnsupportedState(
                added[0].name,
                f"{len(names)} tensors need a header of {size} bytes, over the limit of "
                f"{MAX_HEADER_BYTES}",
                hint="register fewer, larger tensors, or shorter names",
            )


def _is_loader(value: Any) -> bool:
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(value, torchdata.StatefulDataLoader)


def _flatten(objects: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in objects.items():
        if isinstance(value, list | tuple):
            yield from ((f"{name}.{index}", item) for index, item in enumerate(value))
        elif type(value) is dict:
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        elif value is not None:
            yield name, value


def _check_name(name: str, taken: Mapping[str, object]) -> None:
    if not name or "/" in name or name == "lastgasp":
        raise UsageError(f"{name!r} cannot be the name of an object")
    if name in taken:
        raise UsageError(f"an object named {name!r} is registered already")


def _release(target: StateObject) -> None:
    if isinstance(target, LoaderObject):
        target.uninstall()
