"""Many small trainings in one process, each with something that a resume loses easily.

Every kind of optimizer, scheduler, tensor, generator and extra state has a section of its own in
each step's JSON line, so a test can say which of them differs. ZOO_REVERSED builds the layers and
the parameter groups in the opposite order; ZOO_ONLY takes the sections of that prefix only.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
import zlib
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import trainer_sdk
from tests.jobs.toy import digest, maybe_give_notice

STEPS = int(os.environ.get("ZOO_STEPS", "12"))
IS_REVERSED = "ZOO_REVERSED" in os.environ
ORDER = -1 if IS_REVERSED else 1


def seed_by(name: str) -> None:
    """The same initial values whatever was built before."""
    torch.manual_seed(zlib.crc32(name.encode()))


def tree_digest(value: Any) -> str:
    """Sees types, order and every bit."""
    if isinstance(value, torch.Tensor):
        shown = value.to_dense() if value.is_sparse else value
        return f"{value.dtype}{tuple(value.shape)}{digest(shown.resolve_conj())}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes()!r}"
    if isinstance(value, dict):
        items = [f"{key!r}:{tree_digest(item)}" for key, item in value.items()]
        return f"{type(value).__name__}{items}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value).__name__}{[tree_digest(item) for item in value]}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}{sorted(map(repr, value))}"
    return f"{type(value).__name__} {value!r}"


class Exhibit:
    """One model with its optimizer and scheduler."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        batch: Callable[[], torch.Tensor] = lambda: torch.randn(5, 4),
    ) -> None:
        self.name = name
        self.model = model
        self.optimizer = optimizer(model)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.batch = batch
        self.loss = 0.0

    def objects(self) -> dict[str, Any]:
        return {
            f"{self.name}_model": self.model,
            f"{self.name}_optimizer": self.optimizer,
            f"{self.name}_scheduler": self.scheduler,
        }

    def step(self) -> None:
        batch = self.batch()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(batch).float().pow(2).mean()
            loss.backward()
            return loss

        self.loss = float(self.optimizer.step(closure))
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            self.scheduler.step(self.loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def section(self) -> dict[str, Any]:
        state, rates = {}, []
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, values in self.optimizer.state.items():
            state[names[id(parameter)]] = tree_digest(dict(sorted(values.items())))
        for group in self.optimizer.param_groups:
            values = {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            }
            rates.append(tree_digest(dict(sorted(values.items(), key=lambda item: item[0]))))
        return {
            "loss": self.loss.hex(),
            "lr": [float(group["lr"]).hex() for group in self.optimizer.param_groups][::ORDER],
            "groups": sorted(rates),
            "weights": {
                name: tree_digest(p) for name, p in sorted(self.model.state_dict().items())
            },
            "state": dict(sorted(state.items())),
        }


# ---------------------------------------------------------------- models


class Twins(nn.Module):
    """Two layers of one shape, so that state which follows positions lands on the wrong one."""

    def __init__(
        self, name: str = "twins", dtype: torch.dtype = torch.float32, *, is_fixed: bool = False
    ) -> None:
        super().__init__()
        layers = {}
        for layer in ("first", "second"):
            seed_by(name + layer)
            layers[layer] = nn.Linear(4, 4).to(dtype)
        for layer in sorted(layers, reverse=IS_REVERSED and not is_fixed):
            self.add_module(layer, layers[layer])
        self.dtype = dtype

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(features.to(self.dtype))))


class Tied(nn.Module):
    """A tied head, a buffer that is a slice of another, one buffer under two names."""

    def __init__(self) -> None:
        super().__init__()
        seed_by("tied")
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("whole", torch.arange(10.0))
        self.register_buffer("part", self.whole[3:6])
        self.register_buffer("again", self.whole)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.whole[4] += 1  # shows in `part` and `again` as long as they are one
        return self.head(self.embedding(ids))

    def sharing(self) -> dict[str, Any]:
        return {
            "is_tied": self.head.weight is self.embedding.weight,
            "head": digest(self.head.weight),
            "part": self.part.tolist(),
            "again": self.again.tolist(),
            "is_slice": self.part.data_ptr() == self.whole[3:].data_ptr(),
        }


class Layouts(nn.Module):
    """Tensors that are not laid out row by row."""

    def __init__(self) -> None:
        super().__init__()
        seed_by("layouts")
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 5))
        self.register_buffer("strided", torch.randn(8, 8)[::2, 1::3])
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("scalar", torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("wide", torch.randn(3, dtype=torch.complex128))
        self.register_buffer("fp16", torch.randn(3).half())
        self.register_buffer("eighth", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("counts", torch.arange(3, dtype=torch.int16))
        self.register_buffer("bits", torch.arange(3).to(torch.uint64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.scalar += 1
        self.strided += 1
        image = features[:, :1].reshape(1, 1, -1, 1).expand(1, 2, -1, 2)
        return self.conv(image).mean() + (features @ self.transposed.t()) * self.expanded.mean()


class Frozen(nn.Module):
    """Parameters without gradient, some without any use, BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        seed_by("frozen")
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.base(features))))


class Bag(nn.Module):
    """Rows of an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        seed_by("bag")
        self.rows = nn.Embedding(9, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


# ---------------------------------------------------------------- optimizers of other people


class Lion(torch.optim.Optimizer):
    """A user's optimizer: python values of many types in the state and in the groups."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "history": [], "mode": None})

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        loss = closure()
        for group in self.param_groups:
            group["history"].append(len(group["history"]) / 3)
            group["mode"] = "odd" if len(group["history"]) % 2 else None
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float64)
                    state["norms"] = deque(maxlen=3)
                    state["step"] = 0
                state["step"] += 1
                state["norms"].append(float(parameter.grad.norm()))
                update = state["momentum"] * 0.9 + parameter.grad * 0.1
                with torch.no_grad():
                    parameter -= group["lr"] * update.sign().to(parameter.dtype)
                state["momentum"].mul_(0.99).add_(parameter.grad, alpha=0.01)
        return loss


class Fp32Moments(torch.optim.Optimizer):
    """Moments in a dtype of their own."""

    def __init__(self, parameters: Any, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.dtype = dtype

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            held = state.setdefault("average", torch.zeros_like(parameter, dtype=self.dtype))
            held.mul_(0.9).add_(parameter.grad.to(self.dtype) * 0.123456789)
            with torch.no_grad():
                parameter.sub_((held * 0.05).to(parameter.dtype))
        return loss


# ---------------------------------------------------------------- extra state


class Color(Enum):
    RED = "red"
    BLUE = 2


class Level(IntEnum):
    LOW = 1
    HIGH = 5


class Access(Flag):
    READ = 1
    WRITE = 2


Point = namedtuple("Point", "x y")


@dataclass
class Record:
    best: float
    where: Point
    tags: list[str] = field(default_factory=list)


class Extra(nn.Module):
    """Starts with an empty list; later holds about everything that plain Python offers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.kept: dict[Any, Any] = {"history": []}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state

    def grow(self, step: int) -> None:
        # Nothing below looks at what is there already but the history, so a value that came back
        # in another form shows.
        history = self.kept["history"]
        history.append({"step": step, 7: {"a.b": [(), (step,)], "c/d": None, "": [[]]}})
        self.kept[step] = (step, None, [step, {step: {step}}])
        self.kept[(1, "x", None)] = frozenset({step, "y", b"z", (2, 3)})
        self.kept.setdefault("deque", deque(maxlen=4)).append(Point(step, deque([step])))
        self.kept.setdefault("counts", Counter()).update("abc"[: step % 3])
        self.kept.setdefault("lists", defaultdict(list))[step % 4].append(step)
        self.kept.setdefault("ordered", OrderedDict())[f"k{step}"] = step
        self.kept["enums"] = [Color.RED, Color.BLUE, Level.HIGH, Access.READ | Access.WRITE]
        self.kept["enum keys"] = {Color.RED: 1, Level.LOW: 2, True: 3, 2.5: 4}
        self.kept["record"] = Record(best=step / 3, where=Point(1, [2]), tags=["t"])
        self.kept["numbers"] = [2**80, -(2**63), 1e-310, float("inf"), -0.0, 3 + 4j, True]
        self.kept["nan"] = [float("nan")]
        self.kept["texts"] = ["", "\ud800", "é\n\0", b"\xff\0", bytearray(b"q"), "$"]
        self.kept["$"] = {"$": {"$": "t"}}
        self.kept["range"] = range(step, 100, 3)
        self.kept["slice"] = slice(None, step)
        self.kept["path"] = Path("a") / str(step)
        self.kept["tensor"] = {"t": torch.full((2,), float(step)), "a/b": [torch.tensor(step)]}
        self.kept["arrays"] = [
            np.arange(step, dtype=">i4"),
            np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            np.array(["a", "bc"]),
            np.array("2024-01-01", dtype="datetime64[D]"),
            np.zeros((0, 2), dtype=bool),
            np.arange(2000, dtype=np.float64),
        ]
        self.kept["scalars"] = [np.float32(step), np.int64(step), np.bool_(True), np.str_("s")]
        self.kept["torch"] = [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")]


class Generators:
    """Generators of the script's own, besides the global ones."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(3)
        self.python = random.Random(4)
        self.numpy = np.random.default_rng(5)
        self.legacy = np.random.RandomState(6)
        self.philox = np.random.Generator(np.random.Philox(7))
        self.sfc = np.random.SFC64(8)

    def objects(self) -> dict[str, Any]:
        return {f"generator_{name}": value for name, value in vars(self).items()}

    def draw(self) -> dict[str, Any]:
        return {
            "torch": torch.rand(1, generator=self.torch).item().hex(),
            "python": self.python.gauss(0, 1).hex(),
            "numpy": [float(self.numpy.random()).hex(), int(self.numpy.integers(9, dtype=np.int8))],
            "legacy": float(self.legacy.randn()).hex(),
            "philox": int(self.philox.integers(1 << 30)),
            "sfc": int(self.sfc.random_raw()),
            "global": [
                torch.rand(1).item().hex(),
                random.gauss(0, 1).hex(),
                float(np.random.randn()).hex(),
            ],
        }


class Metric:
    """A stateful object of the script."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.window: deque[float] = deque(maxlen=5)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


# ---------------------------------------------------------------- the collection


def linear_decay(step: int) -> float:
    return 1 - step / 10


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 6)


class Cooling:
    """A callable with a state of its own, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Unequal groups whose order follows ZOO_REVERSED."""
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.02, "weight_decay": 0.5},
        {"params": list(model.second.parameters()), "lr": 0.01, "tag": ("second", 2)},
    ]
    return groups[::ORDER]


def optimizer_exhibits() -> Iterator[Exhibit]:
    o = torch.optim
    plain: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: o.SGD(p, lr=0.1),
        "momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5, nesterov=True),
        "adamw": lambda p: o.AdamW(p, lr=0.1, weight_decay=0.5),
        "amsgrad": lambda p: o.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
        "fused": lambda p: o.Adam(p, lr=0.01, fused=True),
        "capturable": lambda p: o.Adam(p, lr=torch.tensor(0.01), foreach=False),
        "adafactor": lambda p: o.Adafactor(p, lr=0.05),
        "rmsprop": lambda p: o.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
        "adagrad": lambda p: o.Adagrad(p, lr=0.05, lr_decay=0.1),
        "adadelta": lambda p: o.Adadelta(p),
        "nadam": lambda p: o.NAdam(p, lr=0.01),
        "radam": lambda p: o.RAdam(p, lr=0.01),
        "adamax": lambda p: o.Adamax(p, lr=0.01),
        "rprop": lambda p: o.Rprop(p, lr=0.01),
        "asgd": lambda p: o.ASGD(p, lr=0.01, t0=3),
        "lbfgs": lambda p: o.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
        "lion": lambda p: Lion(p, lr=0.003),
    }
    for name, make in plain.items():
        # What LBFGS keeps spans all parameters in their order, so another order is refused.
        model = Twins(name, is_fixed=name == "lbfgs")
        yield Exhibit(f"opt_{name}", model, lambda m, make=make: make(m.parameters()))
    if hasattr(o, "Muon"):
        yield Exhibit(
            "opt_muon",
            Twins("muon"),
            lambda m: o.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.02),
        )
    yield Exhibit(
        "opt_sparse",
        Bag(),
        lambda m: o.SparseAdam(list(m.parameters()), lr=0.05),
        batch=lambda: torch.randint(0, 9, (5,)),
    )
    yield Exhibit("opt_named", Twins("named"), lambda m: o.AdamW(m.named_parameters(), lr=0.1))


def dtype_exhibits() -> Iterator[Exhibit]:
    for weights, moments in [
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "float64"),
    ]:
        yield Exhibit(
            f"dtype_{weights}_{moments}",
            Twins(weights, getattr(torch, weights)),
            lambda m, moments=moments: Fp32Moments(m.parameters(), getattr(torch, moments)),
        )


def scheduler_exhibits() -> Iterator[Exhibit]:
    s = schedulers
    kinds: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "linear_decay": lambda o: s.LambdaLR(o, linear_decay),
        "warm_up": lambda o: s.LambdaLR(o, warm_up),
        "cooling": lambda o: s.LambdaLR(o, Cooling()),
        "multiplicative": lambda o: s.MultiplicativeLR(o, lambda step: 0.95),
        "step": lambda o: s.StepLR(o, 3),
        "multi_step": lambda o: s.MultiStepLR(o, [2, 7]),
        "exponential": lambda o: s.ExponentialLR(o, 0.9),
        "cosine": lambda o: s.CosineAnnealingLR(o, 8),
        "restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3, 2),
        "one_cycle": lambda o: s.OneCycleLR(o, 0.1, total_steps=40),
        "cyclic": lambda o: s.CyclicLR(o, 0.001, 0.1, step_size_up=4, mode="triangular2"),
        "plateau": lambda o: s.ReduceLROnPlateau(o, patience=0, cooldown=1, threshold=0.5),
        "polynomial": lambda o: s.PolynomialLR(o, 9),
        "sequential": lambda o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, total_iters=4), s.ExponentialLR(o, 0.8)], [4]
        ),
        "chained": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.3, 5), s.ExponentialLR(o, 0.9)]),
        "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, anneal_epochs=5),
    }
    for name, make in kinds.items():
        yield Exhibit(
            f"lr_{name}",
            Twins(f"lr{name}"),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
            make,
        )


def tensor_exhibits() -> Iterator[Exhibit]:
    yield Exhibit(
        "tied",
        Tied(),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        batch=lambda: torch.randint(0, 7, (5,)),
    )
    yield Exhibit("layouts", Layouts(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    yield Exhibit(
        "frozen",
        Frozen(),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    )
    yield Exhibit(
        "order",
        Twins("order"),
        lambda m: torch.optim.AdamW(two_groups(m)),
    )


def all_exhibits() -> list[Exhibit]:
    makers = (optimizer_exhibits, dtype_exhibits, scheduler_exhibits, tensor_exhibits)
    prefix = os.environ.get("ZOO_ONLY", "")
    return [each for make in makers for each in make() if each.name.startswith(prefix)]


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["TOY_LOG"])
    exhibits = all_exhibits()
    extra, generators, metric = Extra(), Generators(), Metric()
    averaged = torch.optim.swa_utils.AveragedModel(exhibits[0].model, use_buffers=True)
    loose = torch.zeros(3)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(99)
    objects: dict[str, Any] = {"extra": extra, "metric": metric, "loose": loose}
    objects |= generators.objects() | {"averaged": averaged}
    for exhibit in exhibits:
        objects |= exhibit.objects()
    scaler: Any = None

    def sections() -> dict[str, Any]:
        found = {exhibit.name: exhibit.section() for exhibit in exhibits}
        found["extra"] = tree_digest(extra.kept)
        found["metric"] = tree_digest(vars(metric))
        found["averaged"] = tree_digest(dict(sorted(averaged.state_dict().items())))
        found["loose"] = loose.tolist()
        found["scaler"] = None if scaler is None else tree_digest(scaler.state_dict())
        tied = [each.model for each in exhibits if isinstance(each.model, Tied)]
        found["sharing"] = [model.sharing() for model in tied]
        return found

    with (
        trainer_sdk.attach(**objects) as run,
        open(folder / "rank-0.jsonl", "a", buffering=1) as log,
        open(folder / "restored.jsonl", "a", buffering=1) as restored,
    ):
        receipt = run.restore()
        print(receipt, file=sys.stderr, flush=True)
        said = {
            "step": receipt.step,
            "exactly": receipt.exactly,
            "approximately": receipt.approximately,
            "not_restored": receipt.not_restored,
            "user": repr(dict(run.user)),
        }
        restored.write(json.dumps(said | {"sections": copy.deepcopy(sections())}) + "\n")
        while run.global_step < STEPS:
            step = run.global_step + 1
            if scaler is None:  # an object that appears with the first step only
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
                run.register(scaler=scaler)
            for exhibit in exhibits:
                exhibit.step()
            extra.grow(step)
            metric.values.append(step / 7)
            metric.window.append(step / 7)
            averaged.update_parameters(exhibits[0].model)
            loose += torch.rand(3)
            scaler.scale(torch.ones(1))
            scaler.update(scaler.get_scale() / 2 if step % 5 == 0 else scaler.get_scale() + 1)
            run.user.best = {"step": step, "where": (step, None)}
            time.sleep(float(os.environ.get("TOY_STEP_S", "0")))
            line = {"step": step, **sections(), "draws": generators.draw()}
            log.write(json.dumps(line) + "\n")
            if notice := os.environ.get("TOY_NOTICE"):
                maybe_give_notice(notice, step)
            run.step()


if __name__ == "__main__":
    main()
