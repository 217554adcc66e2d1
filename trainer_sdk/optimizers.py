"""torch optimizers: state by parameter name, written straight into `optimizer.state`.

Never through `load_state_dict`, which casts moments to the parameter's dtype and matches by
position, and never through a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from trainer_sdk.capture import Role, SavedReader, Sink
from trainer_sdk.errors import UnsupportedState
from trainer_sdk.modules import clean_name
from trainer_sdk.tree import decode_tree, encode_tree

# id of a parameter -> (name of the registered module, name in it)
ParameterNames = Callable[[], Mapping[int, tuple[str, str]]]
_NOT_SAVED = ("params", "param_names")


class OptimizerObject:
    """A registered optimizer. Its state follows parameter names, whatever the order."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: Optimizer, parameter_names: ParameterNames) -> None:
        """Raises:
        UnsupportedState: it keeps its state elsewhere than torch's own optimizers do, so taking
            what lies there would lose it in silence.
        """
        if type(optimizer).state_dict is not Optimizer.state_dict:
            raise UnsupportedState(
                name,
                f"{type(optimizer).__name__} has a state_dict() of its own",
                hint="attach the torch optimizer that it wraps; sharded optimizer state is not "
                "supported yet",
            )
        self.name = name
        self.optimizer = optimizer
        self.class_name = type(optimizer).__qualname__
        self._parameter_names = parameter_names
        self._cached: tuple[tuple[int, ...], list[list[str]]] | None = None

    def group_names(self) -> list[list[str]]:
        """The names of each group's parameters, in order.

        Raises:
            UnsupportedState: a parameter of no registered module and without a name of its own.
        """
        key = tuple(id(p) for group in self.optimizer.param_groups for p in group["params"])
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self._resolve_names())
        return self._cached[1]

    def _resolve_names(self) -> list[list[str]]:
        known = self._parameter_names()
        full = [
            [self._full_name(known, group, number, index) for index in range(len(group["params"]))]
            for number, group in enumerate(self.optimizer.param_groups)
        ]
        counts = Counter(name for names in full for _, name in names)
        return [
            [name if counts[name] == 1 else f"{owner}.{name}" for owner, name in names]
            for names in full
        ]

    def _full_name(
        self,
        known: Mapping[int, tuple[str, str]],
        group: dict[str, Any],
        number: int,
        index: int,
    ) -> tuple[str, str]:
        parameter = group["params"][index]
        if id(parameter) in known:
            return known[id(parameter)]
        if "param_names" in group:
            return "", clean_name(group["param_names"][index])
        raise UnsupportedState(
            f"{self.name}/group {number}/parameter {index}",
            f"shape {list(parameter.shape)} belongs to no attached module",
            hint="attach the module too, or build the optimizer from named_parameters()",
        )

    def capture(self, sink: Sink) -> Any:
        def put(path: str, tensor: torch.Tensor) -> str:
            return sink.put(path, tensor, Role.OPTIMIZER)

        groups, states = [], {}
        names_of = self.group_names()
        self._refuse_strays()
        for number, group in enumerate(self.optimizer.param_groups):
            values = {key: value for key, value in group.items() if key not in _NOT_SAVED}
            path = self._group_path(names_of[number])
            groups.append({"params": names_of[number], "values": encode_tree(values, path, put)})
            for name, parameter in zip(names_of[number], group["params"], strict=True):
                state = self.optimizer.state.get(parameter)
                if state:
                    states[name] = encode_tree(dict(state), f"{self.name}/state/{name}", put)
        return {"groups": groups, "state": states}

    def _refuse_strays(self) -> None:
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for key in self.optimizer.state:
            if id(key) not in known:
                shown = "another tensor" if isinstance(key, torch.Tensor) else repr(key)
                raise UnsupportedState(
                    f"{self.name}/state",
                    f"state of {shown}, which is none of its parameters",
                    hint="keep it in an object of its own with state_dict(), and attach that",
                )

    def mismatches(self, state: Any, saved: SavedReader) -> list[str]:
        live = {name for names in self.group_names() for name in names}
        held = {name for group in state["groups"] for name in group["params"]}
        faults = [
            f"{self.name}/{name}: in the checkpoint, not in the optimizer"
            for name in sorted(held - live)
        ]
        faults += [
            f"{self.name}/{name}: in the optimizer, not in the checkpoint"
            for name in sorted(live - held)
        ]
        if faults:
            return faults
        sets = Counter(frozenset(group["params"]) for group in state["groups"])
        for number, names in enumerate(self.group_names()):
            if not sets[frozenset(names)]:
                some = ", ".join(sorted(names)[:3])
                faults.append(
                    f"{self.name}: group {number} ({len(names)} parameters: {some}…) has no group "
                    "of the same parameters in the checkpoint"
                )
            sets[frozenset(names)] -= 1
        return faults or self._order_faults(state, saved)

    def has_other_order(self, state: Any) -> bool:
        """Whether the groups stand in another order than they were saved in."""
        here = [set(names) for names in self.group_names()]
        return here != [set(group["params"]) for group in state["groups"]]

    def _order_faults(self, state: Any, saved: SavedReader) -> list[str]:
        """State that spans several parameters, as that of LBFGS, goes by their order."""
        here = [name for names in self.group_names() for name in names]
        if here == [name for group in state["groups"] for name in group["params"]]:
            return []
        sizes = {
            name: parameter.numel()
            for names, group in zip(self.group_names(), self.optimizer.param_groups, strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
        }
        for name in state["state"]:
            for tensor in saved.names(f"{self.name}/state/{name}/"):
                if prod(saved.spec(tensor)[0]) > sizes[name]:
                    fault = "its parameters stand in another order than in the checkpoint"
                    return [f"{self.name}: {fault}, and {tensor} spans several of them"]
        return []

    def apply(self, state: Any, saved: SavedReader) -> None:
        remaining = list(state["groups"])
        for names, group in zip(self.group_names(), self.optimizer.param_groups, strict=True):
            found = next(item for item in remaining if set(item["params"]) == set(names))
            remaining.remove(found)
            path = self._group_path(names)
            values = decode_tree(found["values"], path, saved.tensor)
            _update_group(group, values, self.optimizer.param_groups)
            for name, parameter in zip(names, group["params"], strict=True):
                if name in state["state"]:
                    tree = state["state"][name]
                    values = decode_tree(tree, f"{self.name}/state/{name}", saved.tensor)
                    self._set_state(parameter, values, group)
                else:
                    self.optimizer.state.pop(parameter, None)

    def difference(self, state: Any, live: Any) -> str:
        """Whether a captured state says the same as a saved one, whatever the order."""
        groups = {frozenset(group["params"]): group["values"] for group in live["groups"]}
        for group in state["groups"]:
            values = groups[frozenset(group["params"])]
            for key, value in group["values"].items():
                if values.get(key) != value:
                    return f"{key} of a group differs"
        return "" if live["state"] == state["state"] else "the state of a parameter differs"

    def _group_path(self, names: list[str]) -> str:
        """Where tensors of a group stand, whatever its place among the groups."""
        return f"{self.name}/group/{min(names, default='')}"

    def _set_state(
        self, parameter: torch.Tensor, values: dict[Any, Any], group: dict[str, Any]
    ) -> None:
        live = self.optimizer.state.get(parameter, {})
        is_on_device = bool(group.get("capturable") or group.get("fused"))
        self.optimizer.state[parameter] = {
            key: _placed(value, live.get(key), parameter, is_on_device=is_on_device)
            for key, value in values.items()
        }


def _update_group(
    group: dict[str, Any], values: dict[str, Any], groups: list[dict[str, Any]]
) -> None:
    for key, value in values.items():
        live = group.get(key)
        if not isinstance(live, torch.Tensor) or not isinstance(value, torch.Tensor):
            group[key] = value
        elif any(other is not group and other.get(key) is live for other in groups):
            group[key] = value.to(live.device)  # a default shared by groups that differ by now
        else:
            live.copy_(value)  # a captured graph refers to this very tensor


def _placed(value: Any, live: Any, parameter: torch.Tensor, *, is_on_device: bool) -> Any:
    if isinstance(value, list):  # LBFGS keeps its history in lists
        return [_placed(item, None, parameter, is_on_device=is_on_device) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(live, torch.Tensor) and live.shape == value.shape and live.dtype == value.dtype:
        live.copy_(value)
        return live
    if value.dim() == 0 and not is_on_device:
        return value  # step counts stay on the CPU unless the kernels read them
    return value.to(parameter.device)
