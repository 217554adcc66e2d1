"""Which rank stores what: balance, boxes, coverage."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sdk.layout import coverage_fault, flat_boxes
from trainer_sdk.plan import MIN_CUT_BYTES, TensorSpec, share_out

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, device="cpu")


@settings(max_examples=500, deadline=None)
@given(shapes, st.data())
def test_boxes_laid_end_to_end_are_the_flat_range(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    count = prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    tensor = torch.arange(count).reshape(shape)

    boxes = flat_boxes(shape, start, stop)

    cut = [
        tensor[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1)
        for box in boxes
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *cut]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 4000), st.sampled_from([1, 2, 4, 8])),
        max_size=8,
    ),
    st.integers(1, 9),
)
def test_shares_cover_every_tensor_and_are_balanced(
    sizes: list[tuple[int, int, int]], world_size: int
) -> None:
    width = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    tensors = [spec(str(i), (a, b), width[w]) for i, (a, b, w) in enumerate(sizes)]

    shares = share_out(tensors, world_size=world_size)

    total = sum(tensor.size_bytes for tensor in tensors)
    for share in shares:
        held = sum((stop - start) * each.dtype.itemsize for each, start, stop in share)
        assert abs(held - total / world_size) <= max(total / world_size * 0.05, MIN_CUT_BYTES)
    for tensor in tensors:
        ranges = sorted(
            (start, stop) for share in shares for each, start, stop in share if each is tensor
        )
        boxes = [box for start, stop in ranges for box in flat_boxes(tensor.shape, start, stop)]
        assert coverage_fault(tensor.shape, boxes) == ""
        assert len(ranges) == 1 or tensor.size_bytes >= MIN_CUT_BYTES


def test_tensors_without_elements_have_an_owner() -> None:
    tensors = [spec("a", (0, 3)), spec("b", (4, 0)), spec("c", ())]

    shares = share_out(tensors, world_size=3)

    assert sorted(each.name for share in shares for each, *_ in share) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([((0, 0), (4, 3))], ""),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""),
        ([((0, 0), (2, 3)), ((3, 0), (1, 3))], "9 of 12"),
        ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], "overlap"),
        ([((2, 0), (3, 3))], "outside"),
        ([((0,), (4,))], "1 dimensions"),
        ([], "0 of 12"),
    ],
)
def test_coverage_finds_holes_overlaps_and_strays(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], fault: str
) -> None:
    found = coverage_fault((4, 3), boxes)

    assert fault in found
    assert bool(fault) == bool(found)
