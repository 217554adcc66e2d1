"""Local resume: a complete, verified set on this node that is newer than any commit.

Rule (commit protocol, section 17): only a set of which every rank's image is here, whole and
verified, may be offered, and only if it is newer by (generation, step) than the newest good commit.
"""

from __future__ import annotations

from dataclasses import replace

from supervisor.checkpoint.fetch import (
    FetchedCheckpoint,
    Images,
    verified_in_memory,
    verified_in_spool,
)
from supervisor.checkpoint.spool import Spool, SpooledCheckpoint
from supervisor.clock import Deadline
from supervisor.commit.log import CommitLog
from supervisor.commit.records import LocalStep
from supervisor.errors import ShardMissing

STEP_BACK_FAILS = 3


class LocalSets:
    """What this node could resume from by itself.

    Invariant: `take` gives exactly the set that `newest` offered, or fails.
    """

    def __init__(self, spool: Spool | None) -> None:
        self._spool = spool
        self._offered: FetchedCheckpoint | None = None
        self._discarded: set[tuple[int, int]] = set()

    def newest(
        self,
        log: CommitLog,
        in_memory: tuple[LocalStep, Images] | None,
        *,
        world: int,
        deadline: Deadline,
    ) -> LocalStep | None:
        """The newest verified set that is newer than the newest good commit, kept for `take`.

        A set of a generation that the log does not know is of another life of this job's name.

        Raises:
            LogError, StoreError: the log cannot be read.
        """
        self._offered = None
        state = log.tail(deadline).state
        if state.fails >= STEP_BACK_FAILS:
            return None  # what was newest did not survive its start: an older commit is due
        committed = (state.good[-1].gen, state.good[-1].step) if state.good else (0, -1)
        candidates = [
            item for item in self._candidates(in_memory, committed) if item[0][0] <= state.gen
        ]
        for at, source in sorted(candidates, key=lambda item: item[0], reverse=True):
            found = (
                verified_in_spool(source)
                if isinstance(source, SpooledCheckpoint)
                else verified_in_memory(source, world)
            )
            if found is not None and found.world == world:
                self._offered = replace(found, gen=at[0], step=at[1])
                return LocalStep(gen=at[0], step=at[1])
        return None

    def _candidates(
        self, in_memory: tuple[LocalStep, Images] | None, committed: tuple[int, int]
    ) -> list[tuple[tuple[int, int], SpooledCheckpoint | Images]]:
        found: list[tuple[tuple[int, int], SpooledCheckpoint | Images]] = []
        if self._spool is not None:
            found = [((item.record.gen, item.record.step), item) for item in self._spool.ready()]
        if in_memory is not None:
            # Memory last: of two sets of one step the sort is stable and reversed, memory wins.
            found.append(((in_memory[0].gen, in_memory[0].step), in_memory[1]))
        return [
            (at, source)
            for at, source in reversed(found)
            if at > committed and at not in self._discarded
        ]

    def take(self, local: LocalStep, *, world: int) -> FetchedCheckpoint:
        """The set that the claim names.

        Raises:
            ShardMissing: it is not here (any more).
        """
        offered = self._offered
        if offered is not None and (offered.gen, offered.step) == (local.gen, local.step):
            return offered
        for item in self._spool.ready() if self._spool else ():
            if (item.record.gen, item.record.step) == (local.gen, local.step):
                found = verified_in_spool(item)
                if found is not None and found.world == world:
                    return found
        raise ShardMissing(
            f"the local set of generation {local.gen}, step {local.step} is not on this node",
            hint="the group starts again from the newest commit",
        )

    def discard(self, local: LocalStep) -> None:
        """Never offer this set again."""
        self._discarded.add((local.gen, local.step))
        self._offered = None

    def forget(self) -> None:
        """The offered set was restored: let go of its memory."""
        self._offered = None
