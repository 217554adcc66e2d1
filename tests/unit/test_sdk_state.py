"""Live state through an image and back: every kind of tensor and object, ranks, damage."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn

from trainer_sdk.capture import Role
from trainer_sdk.dtypes import is_same_bits
from trainer_sdk.errors import RestoreError, UnsupportedState, UsageError
from trainer_sdk.image import FileSlot, MappedSlot, write_in_order, write_small, write_tensors
from trainer_sdk.plan import build_plan
from trainer_sdk.registry import Registry
from trainer_sdk.restoring import Restoration, restore_generators, restore_objects
from trainer_sdk.saved import SavedImage, SavedState
from trainer_sdk.tree import dump_json


def registry_of(**objects: Any) -> Registry:
    registry = Registry()
    registry.add_all(objects)
    return registry


def stage(
    registry: Registry,
    *,
    rank: int = 0,
    world_size: int = 1,
    replicated: frozenset[str] | None = frozenset(),
    is_file: bool = False,
) -> bytes:
    """The image of one rank; `replicated` None: everything that may be."""
    snapshot = registry.snapshot()
    if replicated is None:
        replicated = frozenset(
            live.name for live in snapshot.tensors.values() if live.may_be_replica
        )
    state = dump_json(
        {"format": 1, "step": 1, "objects": snapshot.objects, "user": registry.user.to_json()}
    )
    plan = build_plan(
        snapshot.structure(),
        rank=rank,
        world_size=world_size,
        replicated=replicated,
        state_bytes=len(state),
    )
    fd = os.memfd_create("slot")
    os.ftruncate(fd, plan.slot_bytes)
    slot = FileSlot(os.dup(fd)) if is_file else MappedSlot(os.dup(fd), plan.slot_bytes)
    if is_file:
        write_in_order(slot, plan, snapshot.tensors, state=state, rng=snapshot.rng)
    else:
        write_small(slot, plan, state=state, rng=snapshot.rng)
        write_tensors(slot, plan.places, snapshot.tensors)
    slot.release()
    image = os.pread(fd, plan.image_bytes, 0)
    os.close(fd)
    return image


def open_images(images: Sequence[bytes], *, rank: int = 0) -> SavedState:
    opened = []
    for index, image in enumerate(images):
        fd = os.memfd_create("image")
        os.write(fd, image)
        opened.append(SavedImage(fd, size_bytes=len(image), name=str(index)))
    return SavedState(opened, rank=rank)


def restore(
    registry: Registry, images: Sequence[bytes], *, rank: int = 0, world_size: int = 1
) -> Restoration:
    saved = open_images(images, rank=rank)
    try:
        return restore_objects(registry.objects, saved, world_size=world_size)
    finally:
        saved.close()


class Holder(nn.Module):
    """A module with any buffers."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(numpy.prod(shape)) * dtype.itemsize
    content = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("is_file", [False, True], ids=["mapped", "file"])
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype_name: str, is_file: bool) -> None:
    dtype = getattr(torch, dtype_name)
    held = {"a": noise((3, 5), dtype), "b": noise((), dtype), "c": noise((0, 4), dtype)}
    image = stage(registry_of(m=Holder(**held)), is_file=is_file)
    fresh = Holder(**{name: torch.zeros_like(tensor) for name, tensor in held.items()})

    outcome = restore(registry_of(m=fresh), [image])

    assert outcome.exactly == ["m"]
    for name, tensor in held.items():
        assert is_same_bits(tensor, getattr(fresh, name))


LAYOUTS = {
    "transposed": torch.randn(4, 6).t(),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided": torch.randn(10, 10)[::2, 1::3],
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("is_file", [False, True], ids=["mapped", "file"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_comes_back_by_value(layout: str, is_file: bool) -> None:
    """C09."""
    tensor = LAYOUTS[layout]
    image = stage(registry_of(m=Holder(t=tensor)), is_file=is_file)
    other = torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
    fresh = Holder(t=other.clone() if layout != "expanded" else torch.zeros(3, 1).expand(3, 5))
    if layout == "channels last":
        fresh = Holder(t=torch.zeros_like(tensor, memory_format=torch.channels_last))

    restore(registry_of(m=fresh), [image])

    assert is_same_bits(tensor.resolve_conj().resolve_neg(), fresh.t)


def test_stock_safetensors_opens_an_image(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    (tmp_path / "image").write_bytes(stage(registry_of(model=model)))

    loaded = safetensors.torch.load_file(tmp_path / "image")

    assert torch.equal(loaded["model/weight"], model.weight)
    assert bytes(loaded["lastgasp/state"].numpy().tobytes()).startswith(b'{"format":1')


class Tied(nn.Module):
    """Tied weights, a buffer that is a slice of another, two names for one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        base = torch.randn(5, 4)
        self.register_buffer("base", base)
        self.register_buffer("part", base[1:3])
        self.register_buffer("column", base[:, 2])
        self.register_buffer("same", base)


def test_aliases_are_stored_once_and_share_storage_again() -> None:
    """C08."""
    model, fresh = Tied(), Tied()
    registry = registry_of(m=model)
    snapshot = registry.snapshot()
    saved = open_images([stage(registry)])

    restore_objects(registry_of(m=fresh).objects, saved, world_size=1)

    assert set(snapshot.tensors) == {"m/embedding.weight", "m/base"}
    for name in ("m/part", "m/column", "m/same", "m/head.weight"):
        assert torch.equal(saved.tensor(name), model.state_dict()[name[2:]])
    assert fresh.head.weight is fresh.embedding.weight
    fresh.base.fill_(7)
    assert fresh.part.eq(7).all()
    assert fresh.column.eq(7).all()
    assert fresh.same.eq(7).all()


def test_untied_copies_of_tied_tensors_are_restored_by_value() -> None:
    model, fresh = Tied(), Tied()
    fresh.head.weight = nn.Parameter(torch.zeros(6, 4))

    restore(registry_of(m=fresh), [stage(registry_of(m=model))])

    assert torch.equal(fresh.head.weight, model.embedding.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prefixes_of_compile_are_stripped() -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    image = stage(registry_of(m=torch.compile(model)))

    restore(registry_of(m=fresh), [image])

    assert torch.equal(fresh.weight, model.weight)


class WithExtra(nn.Linear):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra: Any = {}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_comes_back() -> None:
    """C16: empty at the start of the new life, nested when it was saved."""
    model, fresh = nn.Sequential(WithExtra()), nn.Sequential(WithExtra())
    model[0].extra = {1: [None, (2, {"a.b/c": torch.arange(3)})], "n": numpy.arange(2)}
    image = stage(registry_of(m=model))

    restore(registry_of(m=fresh), [image])

    back = fresh[0].extra
    assert back[1][0] is None
    assert back[1][1][0] == 2
    assert torch.equal(back[1][1][1]["a.b/c"], torch.arange(3))
    assert back["n"].tolist() == [0, 1]


def test_non_persistent_buffers_are_named_as_not_restored() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(1), persistent=False)

    outcome = restore(registry_of(m=model), [stage(registry_of(m=model))])

    assert "cache" in outcome.not_restored["m buffers"]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "m/t: layout sparse_coo"),
        (torch.empty(2, device="meta"), "m/t: on the meta device"),
    ],
    ids=["sparse", "meta"],
)
def test_tensor_that_cannot_be_held_is_refused_by_name(tensor: torch.Tensor, reason: str) -> None:
    """C09."""
    with pytest.raises(UnsupportedState, match=reason):
        registry_of(m=Holder(t=tensor))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensor_is_refused_by_name() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)

    with pytest.raises(UnsupportedState, match="m/t: a quantised"):
        registry_of(m=Holder(t=tensor))


def test_lazy_module_is_refused_with_a_hint() -> None:
    with pytest.raises(UnsupportedState, match=r"m/weight: not initialised.*one batch"):
        registry_of(m=nn.LazyLinear(2))


def test_object_without_state_is_refused() -> None:
    with pytest.raises(UnsupportedState, match="thing: a object has no state_dict"):
        registry_of(thing=object())


@pytest.mark.parametrize("name", ["lastgasp", "a/b", ""])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Registry().add_all({name: nn.Linear(1, 1)})


def test_refused_registration_leaves_nothing_behind() -> None:
    registry = registry_of(a=nn.Linear(1, 1))

    with pytest.raises(UnsupportedState):
        registry.add_all({"b": nn.Linear(1, 1), "c": object()})

    assert list(registry.objects) == ["a"]


def test_more_names_than_a_header_holds_are_refused_at_registration() -> None:
    """C15, at a tenth of its size and the same length in bytes."""
    model = nn.Module()
    tiny = torch.zeros(1)
    for index in range(20_000):
        model._buffers[f"{index:0400d}"] = tiny[:]

    with pytest.raises(UnsupportedState, match="20000 tensors need a header"):
        registry_of(m=model)


# ---------------------------------------------------------------- optimizers


def two_layers(order: str) -> nn.Module:
    model = nn.Module()
    for name in order:
        model.add_module(name, nn.Linear(3, 3))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, num_steps: int = 2) -> None:
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[p] for name, p in sorted(model.named_parameters())}


def assert_same_moments(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].keys() == other[name].keys()
        for key, value in one[name].items():
            if isinstance(value, torch.Tensor):
                assert is_same_bits(value, other[name][key]), (name, key)
            else:
                assert value == other[name][key]


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.1), amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "stepped"])
def test_optimizer_state_follows_names_in_any_order(kind: str, has_stepped: bool) -> None:
    """C10: layers swapped in construction order, groups in another order."""
    model, fresh = two_layers("ab"), two_layers("ba")
    new = OPTIMIZERS[kind]
    optimizer = new([{"params": model.a.parameters()}, {"params": model.b.parameters()}])
    other = new([{"params": fresh.b.parameters()}, {"params": fresh.a.parameters()}])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3) if kind == "amsgrad" else 0.3
    train(model, optimizer)
    if has_stepped:
        train(fresh, other)
    image = stage(registry_of(m=model, optimizer=optimizer))

    outcome = restore(registry_of(m=fresh, optimizer=other), [image])

    assert outcome.exactly == ["m", "optimizer"]
    assert_same_moments(moments(model, optimizer), moments(fresh, other))
    assert float(other.param_groups[1]["lr"]) == pytest.approx(0.3)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_restoring_takes_no_hidden_step(kind: str) -> None:
    """C07: with decay 0.5 one step would show in every weight."""
    model, fresh = two_layers("ab"), two_layers("ab")
    optimizer, other = (OPTIMIZERS[kind](each.parameters()) for each in (model, fresh))
    train(model, optimizer, num_steps=5)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    image = stage(registry_of(m=model, optimizer=optimizer))

    restore(registry_of(m=fresh, optimizer=other), [image])

    for name, weight in weights.items():
        assert torch.equal(fresh.get_parameter(name), weight)
        assert torch.equal(model.get_parameter(name), weight)
    assert_same_moments(moments(model, optimizer), moments(fresh, other))


@pytest.mark.parametrize(("weights", "kept"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_moments_keep_their_own_dtype(weights: str, kept: str) -> None:
    """C05."""
    model, fresh = (two_layers("a").to(getattr(torch, weights)) for _ in range(2))
    optimizer, other = (torch.optim.AdamW(each.parameters()) for each in (model, fresh))
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.randn(parameter.shape).to(getattr(torch, kept)),
        }
    image = stage(registry_of(m=model, optimizer=optimizer))

    restore(registry_of(m=fresh, optimizer=other), [image])

    assert_same_moments(moments(model, optimizer), moments(fresh, other))
    assert other.state[fresh.a.weight]["exp_avg"].dtype == getattr(torch, kept)


def test_lbfgs_history_comes_back() -> None:
    model, fresh = two_layers("a"), two_layers("a")
    optimizer, other = (torch.optim.LBFGS(each.parameters()) for each in (model, fresh))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.a(torch.ones(2, 3)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    image = stage(registry_of(m=model, optimizer=optimizer))

    outcome = restore(registry_of(m=fresh, optimizer=other), [image])

    assert "optimizer" in outcome.exactly
    assert other.state[fresh.a.weight]["n_iter"] == optimizer.state[model.a.weight]["n_iter"]


def test_parameter_of_no_attached_module_is_refused_by_name() -> None:
    stray = nn.Linear(2, 2)

    with pytest.raises(
        UnsupportedState, match=r"optimizer/group 0/parameter 0.*no attached module"
    ):
        registry_of(optimizer=torch.optim.SGD(stray.parameters()))


def test_named_parameters_need_no_attached_module() -> None:
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    other = torch.optim.AdamW(list(fresh.named_parameters())[::-1])
    train(model, optimizer)
    image = stage(registry_of(optimizer=optimizer))

    restore(registry_of(optimizer=other), [image])

    assert_same_moments(moments(model, optimizer), moments(fresh, other))


def test_groups_of_other_members_are_refused_and_nothing_is_written() -> None:
    model, fresh = two_layers("ab"), two_layers("ab")
    optimizer = torch.optim.SGD(
        [{"params": model.a.parameters()}, {"params": model.b.parameters()}]
    )
    other = torch.optim.SGD(fresh.parameters())
    before = fresh.a.weight.detach().clone()
    image = stage(registry_of(m=model, optimizer=optimizer))

    with pytest.raises(RestoreError, match=r"group 0 \(4 parameters: a\.bias"):
        restore(registry_of(m=fresh, optimizer=other), [image])

    assert torch.equal(fresh.a.weight, before)


# ---------------------------------------------------------------- other objects


def test_generators_and_schedulers_come_back() -> None:
    objects: list[dict[str, Any]] = []
    for seed in (1, 2):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        objects.append(
            {
                "m": model,
                "optimizer": optimizer,
                "scheduler": torch.optim.lr_scheduler.SequentialLR(
                    optimizer,
                    [
                        torch.optim.lr_scheduler.LinearLR(optimizer),
                        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
                    ],
                    milestones=[3],
                ),
                "torch_generator": torch.Generator().manual_seed(seed),
                "numpy_generator": numpy.random.default_rng(seed),
                "numpy_legacy": numpy.random.RandomState(seed),
                "table": torch.full((3,), float(seed)),
            }
        )
    first, second = objects
    for _ in range(5):
        first["optimizer"].step()
        first["scheduler"].step()
    image = stage(registry_of(**first))

    outcome = restore(registry_of(**second), [image])

    assert sorted(outcome.exactly) == sorted(first)
    assert second["scheduler"].get_last_lr() == first["scheduler"].get_last_lr()
    assert torch.equal(second["table"], first["table"])
    for draw in (
        lambda each: torch.rand(2, generator=each["torch_generator"]).tolist(),
        lambda each: each["numpy_generator"].random(2).tolist(),
        lambda each: each["numpy_legacy"].rand(2).tolist(),
    ):
        assert draw(first) == draw(second)


def test_object_that_does_not_keep_its_state_is_named_approximate() -> None:
    class Forgetful:
        def state_dict(self) -> dict[str, int]:
            return {"drawn": id(self)}

        def load_state_dict(self, _: Any) -> None: ...

    first, second = Forgetful(), Forgetful()

    outcome = restore(registry_of(f=second), [stage(registry_of(f=first))])

    assert "differs from what it was given" in outcome.approximately["f"]


# ---------------------------------------------------------------- does not fit


def test_mismatches_are_named_one_by_one_before_anything_is_written() -> None:
    model = Holder(a=torch.ones(2), b=torch.ones(3), gone=torch.ones(1))
    fresh = Holder(a=torch.zeros(2), b=torch.zeros(4, dtype=torch.float64), new=torch.zeros(1))

    with pytest.raises(RestoreError) as caught:
        restore(registry_of(m=fresh, n=nn.Linear(1, 1)), [stage(registry_of(m=model))])

    text = str(caught.value)
    assert "m/b: shape [4] here, [3] in the checkpoint" in text
    assert "m/gone: in the checkpoint, not in the module" in text
    assert "m/new: in the module, not in the checkpoint" in text
    assert "n: a module that is not in the checkpoint" in text
    assert not caught.value.is_checkpoint_bad
    assert fresh.a.eq(0).all()


def test_saved_object_that_is_not_registered_is_carried() -> None:
    """C06: its state is kept, named, saved again, and applied when the object appears."""

    class Scaler:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"scale": 1.0, "history": torch.zeros(3)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    scaler, late = Scaler(), Scaler()
    scaler.state = {"scale": 1024.0, "history": torch.arange(3.0)}
    registry = registry_of(m=nn.Linear(1, 1))
    outcome = restore(registry, [stage(registry_of(m=nn.Linear(1, 1), scaler=scaler))])
    registry.carried = outcome.carried
    again = registry_of(m=nn.Linear(1, 1))
    again.carried = restore(again, [stage(registry)]).carried

    added = again.add_all({"scaler": late})
    found = again.adopt_carried(added)

    assert "saved, but not registered" in outcome.not_restored["scaler"]
    assert found == ["scaler"]
    assert late.state["scale"] == 1024.0
    assert torch.equal(late.state["history"], torch.arange(3.0))
    assert not again.carried


# ---------------------------------------------------------------- several ranks


def ranks_of(world_size: int, *, seed: int = 5) -> list[tuple[nn.Module, Registry]]:
    """Replicas with one buffer that differs by rank."""
    ranks = []
    for rank in range(world_size):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(200, 130), nn.Linear(130, 7))
        model.register_buffer("own", torch.full((300,), float(rank)))
        model.register_buffer("count", torch.tensor(3))
        model.register_buffer("rowless", torch.empty(0, 4))
        ranks.append((model, registry_of(m=model)))
    return ranks


@pytest.mark.parametrize("saved_world", [1, 3, 8])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_replicas_are_stored_once_and_any_world_size_restores_them(
    saved_world: int, world_size: int
) -> None:
    """C47."""
    saved = ranks_of(saved_world)
    images = [
        stage(registry, rank=rank, world_size=saved_world, replicated=None)
        for rank, (_, registry) in enumerate(saved)
    ]
    live = ranks_of(world_size, seed=6)

    for rank, (model, registry) in enumerate(live):
        outcome = restore(registry, images, rank=rank, world_size=world_size)

        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, saved[0][0].get_parameter(name))
        assert model.own.eq(rank % saved_world).all()
        assert ("m" in outcome.exactly) == (world_size == saved_world)
    weight_bytes = sum(p.numel() * 4 for p in saved[0][0].parameters())
    header_bytes = 4096 * 4
    assert sum(map(len, images)) < weight_bytes + saved_world * (300 * 4 + header_bytes + 20_000)


def test_each_rank_gets_its_own_generators_back() -> None:
    """C04."""
    images, streams = [], []
    for rank in range(2):
        torch.manual_seed(100 + rank)
        images.append(stage(registry_of(m=nn.Linear(1, 1)), rank=rank, world_size=2))
        streams.append(torch.rand(3))
    for rank in range(2):
        saved = open_images(images, rank=rank)

        restore_generators(saved, Restoration(), rank=rank, world_size=2)

        assert torch.equal(torch.rand(3), streams[rank])


def test_new_rank_gets_a_stream_of_its_own() -> None:
    images = [stage(registry_of(m=nn.Linear(1, 1)))]
    draws = []
    for rank in range(3):
        outcome = Restoration()
        restore_generators(open_images(images, rank=rank), outcome, rank=rank, world_size=3)
        draws.append(torch.rand(1).item())
        assert "generators" in outcome.approximately

    assert len(set(draws)) == 3


# ---------------------------------------------------------------- damage


def two_images() -> list[bytes]:
    return [
        stage(registry, rank=rank, world_size=2, replicated=None)
        for rank, (_, registry) in enumerate(ranks_of(2))
    ]


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda images: images[:1], "no image of rank 1"),
        (lambda images: [images[0], images[0]], "no image of rank 1"),
        (lambda images: [*images, images[1]], "3 images of 2 ranks"),
        (lambda images: [images[0], images[1][:-1]], "image 1"),
        (lambda images: [images[0], b""], "image 1"),
        (
            lambda images: [images[0], images[1].replace(b'\\"world\\":2', b'\\"world\\":3')],
            "not of one checkpoint",
        ),
        (
            lambda images: [images[0], images[1].replace(b'\\"format\\":1', b'\\"format\\":9')],
            "layout is not of format 1",
        ),
    ],
    ids=["missing", "twice", "surplus", "short", "empty", "other world", "other format"],
)
def test_images_that_do_not_add_up_are_a_bad_checkpoint(harm: Any, text: str) -> None:
    images = harm(two_images())

    with pytest.raises(RestoreError, match=text) as caught:
        open_images(images)

    assert caught.value.is_checkpoint_bad


def test_hole_in_a_tensor_is_a_bad_checkpoint_and_nothing_is_written() -> None:
    (_, second), other = two_images(), ranks_of(1)[0][1]
    alone = stage(other, replicated=None).replace(b'\\"world\\":1', b'\\"world\\":2')
    model, registry = ranks_of(1, seed=9)[0]
    before = model[0].weight.detach().clone()

    with pytest.raises(RestoreError, match=r"m/0\.weight: pieces .* overlap") as caught:
        restore(registry, [alone, second])

    assert caught.value.is_checkpoint_bad
    assert torch.equal(model[0].weight, before)


def test_piece_that_no_rank_stored_is_a_bad_checkpoint() -> None:
    registries = [registry for _, registry in ranks_of(3)]
    images = [
        stage(registry, rank=rank, world_size=world, replicated=None)
        for rank, (registry, world) in enumerate(zip(registries[:2], (3, 2), strict=True))
    ]
    images[0] = images[0].replace(b'\\"world\\":3', b'\\"world\\":2')

    with pytest.raises(RestoreError, match=r"m/0\.weight: pieces hold \d+ of 26000 elements"):
        open_images(images)


def test_roles_decide_what_may_be_replicated() -> None:
    model = Holder(small=torch.zeros(256), large=torch.zeros(257))
    model.weight = nn.Parameter(torch.zeros(1000))
    snapshot = registry_of(m=model, table=torch.zeros(2)).snapshot()

    held = {name: live.may_be_replica for name, live in snapshot.tensors.items()}

    assert held == {"m/weight": True, "m/small": True, "m/large": False, "table/tensor": False}
    assert snapshot.tensors["table/tensor"].role is Role.OTHER


def test_file_of_many_buffers_equals_the_mapped_image() -> None:
    torch.manual_seed(0)
    registry = registry_of(
        m=Holder(a=torch.randn(1100, 1001), b=torch.randn(900, 1000).t(), c=torch.ones(3)),
        n=nn.Linear(1000, 1200, dtype=torch.bfloat16),
    )

    assert stage(registry, is_file=True) == stage(registry)


class WithStateOfItsOwn(torch.optim.SGD):
    """As sharding and wrapping optimizers are: the inherited attributes do not tell their state."""

    def state_dict(self) -> dict[str, Any]:
        return {"elsewhere": 1, **super().state_dict()}


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)

    with pytest.raises(UnsupportedState, match="WithStateOfItsOwn") as caught:
        Registry().add_all({"model": model, "sharded": WithStateOfItsOwn(model.parameters(), lr=1)})

    assert "sharded" in str(caught.value)


def test_optimizer_state_of_no_parameter_is_refused_when_it_appears() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    registry = Registry()
    registry.add_all({"model": model, "optimizer": optimizer})
    optimizer.state["global"] = {"count": 1}  # type: ignore[index]

    with pytest.raises(UnsupportedState, match="'global'"):
        registry.snapshot()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return optimizer


def in_order(order: int) -> tuple[nn.Module, list[nn.Parameter]]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return model, [p for layer in [*model][::order] for p in layer.parameters()]


def test_state_that_spans_parameters_is_refused_in_another_order() -> None:
    """LBFGS keeps vectors over all parameters, one after the other."""
    model, parameters = in_order(1)
    saved = stage(registry_of(m=model, o=stepped(model, torch.optim.LBFGS(parameters))))
    other, reordered = in_order(-1)
    again = registry_of(m=other, o=torch.optim.LBFGS(reordered))

    with pytest.raises(RestoreError, match="another order than in the checkpoint, and o/state"):
        restore(again, [saved])
    same, parameters = in_order(1)
    assert restore(registry_of(m=same, o=torch.optim.LBFGS(parameters)), [saved]).exactly


def test_a_scheduler_is_refused_when_its_groups_change_places_and_an_optimizer_alone_is_not() -> (
    None
):
    def build(order: int) -> tuple[nn.Module, Any, Any]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups = [
            {"params": layer.parameters(), "lr": lr}
            for layer, lr in zip(model, (1, 2), strict=True)
        ]
        optimizer = torch.optim.SGD(groups[::order], lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = build(1)
    saved = stage(registry_of(m=model, o=optimizer, s=scheduler))
    model, optimizer, scheduler = build(-1)

    with pytest.raises(RestoreError, match="s: may keep values by the position"):
        restore(registry_of(m=model, o=optimizer, s=scheduler), [saved])
    assert restore(registry_of(m=model, o=optimizer), [saved]).exactly == ["m", "o"]


def test_state_of_another_class_is_refused_by_both_names() -> None:
    model = nn.Linear(2, 2)
    saved = stage(registry_of(m=model, o=torch.optim.AdamW(model.parameters())))
    late = registry_of(m=model)
    late.carried = restore(late, [saved]).carried

    with pytest.raises(RestoreError, match="o: a SGD here, a AdamW in the checkpoint"):
        restore(registry_of(m=model, o=torch.optim.SGD(model.parameters())), [saved])
    added = late.add_all({"o": torch.optim.SGD(model.parameters())})
    with pytest.raises(RestoreError, match="o: a SGD here, a AdamW in the checkpoint"):
        late.adopt_carried(added)


def test_generators_without_a_state_are_refused_and_bit_generators_are_held() -> None:

    with pytest.raises(UnsupportedState, match="entropy"):
        registry_of(r=random.SystemRandom())
    bits = numpy.random.SFC64(3)
    saved = stage(registry_of(b=bits))
    expected = bits.random_raw()
    again = numpy.random.SFC64(4)
    restore(registry_of(b=again), [saved])

    assert again.random_raw() == expected


def test_lists_and_dictionaries_of_objects_get_a_name_each() -> None:
    parts = {"g": nn.Linear(1, 1), "d": nn.Linear(1, 2)}

    assert list(registry_of(nets=parts, pair=[nn.Linear(1, 1)]).objects) == [
        "nets.g",
        "nets.d",
        "pair.0",
    ]
