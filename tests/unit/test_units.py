"""Durations and sizes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.units import parse_duration, parse_size, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("250ms", 0.25), ("10m", 600), ("1.5h", 5400), ("2d", 172800), (" 5 s ", 5),
     ("7", 7), (7, 7), (0.5, 0.5)],
)  # fmt: skip
def test_a_duration_is_seconds(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "wrong", ["", "s", "-1s", "1 week", "1s2", "1S", "1e3s", "1.s", "0x10", None, True, [], "1s\n1"]
)
def test_what_is_no_duration_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(ValueError, match="90s"):
        parse_duration(wrong)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512MiB", 512 << 20), ("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5KiB", 1536),
     ("17", 17), (17, 17), ("1B", 1), ("3TB", 3 * 10**12)],
)  # fmt: skip
def test_a_size_is_bytes(text: Any, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("wrong", ["", "GiB", "2G", "-1B", "2 gib", None, False, 1.5])
def test_what_is_no_size_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_size(wrong)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (90, "90s"), (120, "2m"), (7200, "2h"), (172800, "2d"), (0.25, "250ms"),
     (1.5, "1.5s"), (0, "0ms")],
)  # fmt: skip
def test_a_duration_is_shown_in_the_largest_whole_unit(seconds: float | None, text: str) -> None:
    assert show_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB")],
)
def test_a_size_is_shown_in_binary_units(size_bytes: int | None, text: str) -> None:
    assert show_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=10**7))
def test_whole_seconds_come_back_as_they_were_shown(seconds: int) -> None:
    assert parse_duration(show_duration(seconds)) == seconds
