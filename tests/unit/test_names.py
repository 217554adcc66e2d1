"""Keys: exact patterns, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk.protocol import names
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.names import DataName, JobKeys, PartName

UID = "0123456789abcdef" * 2

uids = st.text("0123456789abcdef", min_size=32, max_size=32)
generations = st.integers(0, names.MAX_GENERATION)
steps = st.integers(0, names.MAX_STEP)


@given(generations, steps, st.integers(0, names.MAX_RANK), uids)
def test_data_key_reads_back(generation: int, step: int, rank: int, uid: str) -> None:
    name = DataName(generation=generation, step=step, rank=rank, uid=uid)

    assert names.parse_data_key(name.key) == name


@given(generations, steps, st.integers(0, names.MAX_NODE), uids)
def test_part_key_reads_back(generation: int, step: int, node: int, uid: str) -> None:
    name = PartName(generation=generation, step=step, node=node, uid=uid)

    assert names.parse_part_key(name.key) == name
    assert name.key.startswith(names.part_prefix(generation, step))
    assert name.key.startswith(names.part_prefix(generation))


@given(st.integers(1, names.MAX_SEQ), st.integers(1, names.MAX_SEQ))
def test_log_keys_sort_like_numbers(one: int, other: int) -> None:
    assert names.parse_log_key(names.log_key(one)) == one
    assert (names.log_key(one) < names.log_key(other)) == (one < other)


def test_keys_are_what_the_protocol_writes() -> None:
    keys = JobKeys("my-job")

    assert keys.log(7) == "jobs/my-job/log/00000000000000000007"
    assert keys.hint == "jobs/my-job/hint"
    assert (
        keys.full(PartName(generation=3, step=500, node=2, uid=UID).key)
        == f"jobs/my-job/part/0000000003/000000000500/00002-{UID}"
    )
    assert (
        DataName(generation=3, step=500, rank=9, uid=UID).key
        == f"data/01/0000000003/000000000500/000009-{UID}"
    )
    assert keys.relative(keys.hint) == "hint"


DATA = f"data/01/0000000003/000000000500/000009-{UID}"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "data",
        DATA + "\n",
        "/" + DATA,
        "../" + DATA,
        DATA + "/",
        DATA.replace("data/01", "data/02"),  # not the uid's digits
        DATA.replace("data/01", "data/.."),
        DATA.replace("000009-", "00009-"),
        DATA.replace("/0000000003/", "/3/"),
        DATA.replace("/0000000003/", "/000000000x/"),
        DATA.replace("abcdef", "ABCDEF"),
        DATA.replace("000009", "００００09"),  # other digits of Unicode
        DATA.replace("data/", "part/"),
        "jobs/my-job/" + DATA,
    ],
)
def test_anything_else_is_not_a_data_key(key: str) -> None:
    with pytest.raises(ProtocolError):
        names.parse_data_key(key)


@pytest.mark.parametrize(
    "key",
    ["", "log/1", "log/" + "0" * 20, "log/" + "1" * 20 + "\n", "log/" + "1" * 21, "log/../hint"],
)
def test_anything_else_is_not_a_log_key(key: str) -> None:
    with pytest.raises(ProtocolError):
        names.parse_log_key(key)


@pytest.mark.parametrize("key", ["", DATA, f"part/1/2/3-{UID}", f"part/0000000003/x/00001-{UID}"])
def test_anything_else_is_not_a_part_key(key: str) -> None:
    with pytest.raises(ProtocolError):
        names.parse_part_key(key)


@pytest.mark.parametrize("job_id", ["a", "A1", "llama-7b.v2_final", "x" * 63])
def test_good_job_ids(job_id: str) -> None:
    assert JobKeys(job_id).prefix == f"jobs/{job_id}/"


@pytest.mark.parametrize(
    "job_id",
    ["", ".", "..", "a/b", "../x", "-a", "a-", ".a", "a..b", "a b", "a\n", "ä", "x" * 64, "a\0"],
)
def test_bad_job_ids(job_id: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        JobKeys(job_id)

    assert caught.value.hint


def test_key_of_another_job_has_no_relative_form() -> None:
    with pytest.raises(ProtocolError):
        JobKeys("a").relative("jobs/ab/hint")


@pytest.mark.parametrize(
    ("generation", "step", "uid"),
    [(-1, 0, UID), (10**10, 0, UID), (0, -1, UID), (0, 10**12, UID), (0, 0, "x"), (0, 0, UID * 2)],
)
def test_values_that_do_not_fit_a_key(generation: int, step: int, uid: str) -> None:
    with pytest.raises(ValueError):
        PartName(generation=generation, step=step, node=0, uid=uid)
    with pytest.raises(ValueError):
        DataName(generation=generation, step=step, rank=0, uid=uid)


@pytest.mark.parametrize("seq", [0, -1, 10**20])
def test_slots_that_do_not_exist(seq: int) -> None:
    with pytest.raises(ValueError):
        names.log_key(seq)
