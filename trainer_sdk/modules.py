"""torch modules: parameters and persistent buffers by name, in place; then any extra state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainer_sdk.capture import Role, SavedReader, Sink
from trainer_sdk.ddp import GradientOrder, find_ddp
from trainer_sdk.dtypes import dtype_name
from trainer_sdk.tree import decode_tree, encode_tree

_EXTRA = "_extra_state"
_COMPILED = "_orig_mod"


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel, DataParallel and torch.compile."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif isinstance(module._modules.get(_COMPILED), nn.Module):
            inner = module._modules[_COMPILED]
            assert inner is not None
            module = inner
        else:
            return module


def clean_name(name: str) -> str:
    """A dotted name without the parts that torch.compile adds."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def _join(path: str, name: str) -> str:
    return clean_name(f"{path}.{name}" if path else name)


class ModuleObject:
    """A registered module. Identities and aliases of its tensors survive a restore."""

    kind = "module"
    class_name = ""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = unwrap(module)
        ddp = find_ddp(module)
        self.gradient_order = GradientOrder(ddp) if ddp is not None else None

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor, Role]]:
        """Every parameter and persistent buffer, under each of its names."""
        for path, module in self.module.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield _join(path, name), parameter, Role.PARAMETER
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield _join(path, name), buffer, Role.BUFFER

    def unsaved_buffers(self) -> list[str]:
        """Buffers that the module declares not persistent."""
        return [
            _join(path, name)
            for path, module in self.module.named_modules()
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None
        ]

    def capture(self, sink: Sink) -> Any:
        for name, tensor, role in self.named_tensors():
            sink.put(f"{self.name}/{name}", tensor, role)
        return {
            path: encode_tree(module.get_extra_state(), self._extra_path(path), sink.put_other)
            for path, module in self._stateful_modules()
        }

    def mismatches(self, state: Any, saved: SavedReader) -> list[str]:
        prefix, extra = f"{self.name}/", f"{self.name}/{_EXTRA}/"
        held = {name for name in saved.names(prefix) if not name.startswith(extra)}
        live = {f"{prefix}{name}": tensor for name, tensor, _ in self.named_tensors()}
        faults = [
            f"{name}: in the checkpoint, not in the module" for name in sorted(held - {*live})
        ]
        faults += [
            f"{name}: in the module, not in the checkpoint" for name in live if name not in held
        ]
        for name in live.keys() & held:
            fault = describe_difference(live[name], saved.spec(name))
            if fault:
                faults.append(f"{name}: {fault}")
        modules = {path for path, _ in self._stateful_modules()}
        for path in sorted(modules ^ set(state)):
            faults.append(f"{self.name}/{path}: extra state on one side only")
        return faults

    def apply(self, state: Any, saved: SavedReader) -> None:
        for name, tensor, _ in self.named_tensors():
            saved.copy_into(f"{self.name}/{name}", tensor)
        for path, module in self._stateful_modules():
            module.set_extra_state(decode_tree(state[path], self._extra_path(path), saved.tensor))

    def _stateful_modules(self) -> list[tuple[str, nn.Module]]:
        return [
            (clean_name(path), module)
            for path, module in self.module.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def _extra_path(self, path: str) -> str:
        return f"{self.name}/{_EXTRA}/{path}"


def describe_difference(live: torch.Tensor, spec: tuple[tuple[int, ...], torch.dtype]) -> str:
    """How a live tensor differs in shape or dtype from a saved one; "" when it does not."""
    shape, dtype = spec
    if tuple(live.shape) != shape:
        return f"shape {list(live.shape)} here, {list(shape)} in the checkpoint"
    if live.dtype != dtype:
        return f"dtype {dtype_name(live.dtype)} here, {dtype_name(dtype)} in the checkpoint"
    return ""
