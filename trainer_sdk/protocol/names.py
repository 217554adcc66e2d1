"""Names of everything a job keeps in a store.

Every object of a job lies under `jobs/<job>/`. Keys inside records and part tables are *job keys*:
relative to that prefix, so that no table can name another job's data and a job can be copied to
another prefix. `JobKeys.full` turns a job key into the key the store wants.

A key that does not match its pattern to the last character is refused: names come back from stores
and tables that anyone may have written, and the same names become paths in a directory store.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from trainer_sdk.protocol.errors import ProtocolError

MAX_SEQ: Final = 10**20 - 1
MAX_GENERATION: Final = 10**10 - 1
MAX_STEP: Final = 10**12 - 1
MAX_NODE: Final = 10**5 - 1
MAX_RANK: Final = 10**6 - 1

LOG_PREFIX: Final = "log/"
PART_PREFIX: Final = "part/"
DATA_PREFIX: Final = "data/"
HINT_KEY: Final = "hint"

# Patterns are also used in the types of msgspec structs, hence the anchors. `\Z` and not `$`,
# which would let a trailing newline through.
JOB_ID_PATTERN: Final = r"^[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?\Z"
UID_PATTERN: Final = r"^[0-9a-f]{32}\Z"
SHA256_PATTERN: Final = r"^[0-9a-f]{64}\Z"
PART_KEY_PATTERN: Final = r"^part/([0-9]{10})/([0-9]{12})/([0-9]{5})-([0-9a-f]{32})\Z"
DATA_KEY_PATTERN: Final = r"^data/([0-9a-f]{2})/([0-9]{10})/([0-9]{12})/([0-9]{6})-([0-9a-f]{32})\Z"
_LOG_KEY_PATTERN: Final = r"^log/([0-9]{20})\Z"

_JOB_ID = re.compile(JOB_ID_PATTERN)
_UID = re.compile(UID_PATTERN)
_PART_KEY = re.compile(PART_KEY_PATTERN)
_DATA_KEY = re.compile(DATA_KEY_PATTERN)
_LOG_KEY = re.compile(_LOG_KEY_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """What the key of a part says: who voted for which step."""

    generation: int
    step: int
    node: int
    uid: str

    def __post_init__(self) -> None:
        _check_range("generation", self.generation, MAX_GENERATION)
        _check_range("step", self.step, MAX_STEP)
        _check_range("node", self.node, MAX_NODE)
        _check_uid(self.uid)

    @property
    def key(self) -> str:
        """The job key."""
        return f"{part_prefix(self.generation, self.step)}{self.node:05d}-{self.uid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataName:
    """What the key of a shard's bytes says. The two digits that spread the keys are the uid's."""

    generation: int
    step: int
    rank: int
    uid: str

    def __post_init__(self) -> None:
        _check_range("generation", self.generation, MAX_GENERATION)
        _check_range("step", self.step, MAX_STEP)
        _check_range("rank", self.rank, MAX_RANK)
        _check_uid(self.uid)

    @property
    def key(self) -> str:
        """The job key."""
        place = f"{self.generation:010d}/{self.step:012d}/{self.rank:06d}-{self.uid}"
        return f"{DATA_PREFIX}{self.uid[:2]}/{place}"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The full keys of one job, below the root of a store.

    Raises:
        ProtocolError: the job id is not valid.
    """

    job_id: str

    def __post_init__(self) -> None:
        check_job_id(self.job_id)

    @property
    def prefix(self) -> str:
        """What every full key of the job begins with; ends with a slash."""
        return f"jobs/{self.job_id}/"

    def full(self, job_key: str) -> str:
        """The store's key for a job key."""
        return self.prefix + job_key

    def relative(self, full_key: str) -> str:
        """The job key of a store's key.

        Raises:
            ProtocolError: the key belongs to something else.
        """
        if not full_key.startswith(self.prefix):
            raise ProtocolError(f"key {full_key!r} is not of job {self.job_id!r}")
        return full_key[len(self.prefix) :]

    def log(self, seq: int) -> str:
        """The full key of a log slot."""
        return self.full(log_key(seq))

    @property
    def hint(self) -> str:
        """The full key of the hint."""
        return self.full(HINT_KEY)


def check_job_id(job_id: str) -> str:
    """Return the id if it is valid: 1 to 63 letters, digits, dots, dashes, underscores.

    Raises:
        ProtocolError: it is not.
    """
    if _JOB_ID.match(job_id) is None or ".." in job_id:
        raise ProtocolError(
            f"job id {job_id!r} is not valid",
            hint="use 1 to 63 of A-Z a-z 0-9 . _ -, beginning and ending with a letter or digit",
        )
    return job_id


def log_key(seq: int) -> str:
    """The job key of a log slot; slots count from 1."""
    if not 1 <= seq <= MAX_SEQ:
        raise ValueError(f"log slot {seq} is not within 1 and {MAX_SEQ}")
    return f"{LOG_PREFIX}{seq:020d}"


def part_prefix(generation: int, step: int | None = None) -> str:
    """What the job keys of a generation's parts begin with, or those of one step."""
    prefix = f"{PART_PREFIX}{generation:010d}/"
    return prefix if step is None else f"{prefix}{step:012d}/"


def parse_log_key(job_key: str) -> int:
    """The number of a log slot.

    Raises:
        ProtocolError: not the key of a slot.
    """
    match = _LOG_KEY.match(job_key)
    if match is None or int(match[1]) == 0:
        raise ProtocolError(f"{job_key!r} is not the key of a log slot")
    return int(match[1])


def parse_part_key(job_key: str) -> PartName:
    """Read a part's key.

    Raises:
        ProtocolError: not the key of a part.
    """
    match = _PART_KEY.match(job_key)
    if match is None:
        raise ProtocolError(f"{job_key!r} is not the key of a part")
    return PartName(generation=int(match[1]), step=int(match[2]), node=int(match[3]), uid=match[4])


def parse_data_key(job_key: str) -> DataName:
    """Read a shard's key.

    Raises:
        ProtocolError: not the key of a shard, or its spreading digits are not its uid's.
    """
    match = _DATA_KEY.match(job_key)
    if match is None or match[1] != match[5][:2]:
        raise ProtocolError(f"{job_key!r} is not the key of a shard")
    return DataName(generation=int(match[2]), step=int(match[3]), rank=int(match[4]), uid=match[5])


def _check_range(what: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise ValueError(f"{what} {value} is not within 0 and {largest}")


def _check_uid(uid: str) -> None:
    if _UID.match(uid) is None:
        raise ValueError(f"uid {uid!r} is not 32 lower-case hex digits")
