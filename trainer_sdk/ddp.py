"""DistributedDataParallel's gradient buckets: part of what an exact resume needs.

DDP orders its buckets anew after the first backward, by the order in which gradients became ready,
and with three or more ranks the place of a gradient in its bucket decides in which order a ring
all-reduce adds it up. So a process that starts anew would sum its first gradients in another order
than the process that was never stopped, and the last bits would differ.

The order is noted during the first backward and saved. On a restore one backward of zeros is run
through DDP in that order, before anything is restored, so that the buckets are what they were.

Source: torch/csrc/distributed/c10d/reducer.cpp, `Reducer::rebuild_buckets`, and
torch/nn/parallel/distributed.py, `_pre_forward`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GradientOrder:
    """The order in which the gradients of one DDP module became ready first.

    `names` is None until a whole backward was seen, and stays None if not every parameter took part
    in it; DDP then keeps its first buckets too.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.names: tuple[str, ...] | None = None
        self._names = {
            id(parameter): name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad
        }
        self._seen: list[str] = []
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in ddp.module.parameters()
            if parameter.requires_grad
        ]

    def _note(self, parameter: torch.Tensor) -> None:
        name = self._names[id(parameter)]
        if name in self._seen:  # a second backward began before every parameter had its gradient
            self.release()
            return
        self._seen.append(name)
        if len(self._seen) == len(self._names):
            self.names = tuple(self._seen)
            self.release()

    def release(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def replay(self, names: Sequence[str]) -> str:
        """Give DDP the buckets that this order led to. Collective: every rank does it.


        Returns:
            Why that is not possible; "" when it was done.
        """
        if set(names) != set(self._names.values()):
            return "the model has other parameters than when its gradients were ordered"
        if getattr(self.ddp, "_comm_hooks", None):
            return "a communication hook is registered, whose state a trial backward would change"
        parameters = dict(self.ddp.module.named_parameters())
        user_module = self.ddp.module
        self.ddp.module = _Zeros([parameters[name] for name in names])
        try:
            device = next(iter(parameters.values())).device
            with torch.enable_grad(), torch.autocast(device.type, enabled=False):
                self.ddp(torch.zeros((), device=device)).backward()
        finally:
            self.ddp.module = user_module
            for parameter in parameters.values():
                parameter.grad = None
        return ""


class _Zeros(nn.Module):
    """A loss of zero whose backward reaches the given parameters in the given order.

    autograd runs the newest node first, and a gradient is accumulated as soon as it is ready.
    Source: torch/csrc/autograd/engine.cpp, `CompareNodeTaskTime`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._ordered = tuple(parameters)  # a tuple: not registered as parameters of this module
        # DDP broadcasts the buffers of whatever module it holds, and refuses to broadcast none.
        self.register_buffer("_unused", torch.zeros(1, device=self._ordered[0].device))

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        for parameter in reversed(self._ordered):
            term = parameter.flatten()[:1].sum() * 0
            total = total + term.to(total.device, torch.float32)
        return total


def find_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a module, also when the bare module was registered."""
    if isinstance(module, DistributedDataParallel):
        return module
    inner = getattr(module, "_orig_mod", None)
    if isinstance(inner, DistributedDataParallel):
        return inner
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    for candidate in gc.get_objects():
        if type(candidate) is DistributedDataParallel and candidate.module is module:
            return candidate
    return None
