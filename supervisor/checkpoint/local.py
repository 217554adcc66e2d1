"""Local resume: a complete, verified set on this node that is newer than any commit.

Rule (commit protocol, section 17): only a set of which every rank's image is here, whole and
verified, may be offered, and only if it continues what the log would resume from; see
`commit.rules.is_local_sound`, which the claim asks again on the exact predecessor.
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
from supervisor.commit.records import LocalStep, LogState
from supervisor.commit.rules import is_local_sound
from supervisor.errors import ShardMissing


class LocalSets:
    """What this node could resume from by itself.

    Invariant: `take` gives exactly the set that `newest` offered, or fails.
    """

    def __init__(self, spool: Spool | None) -> None:
        self._spool = spool
        self._offered: tuple[LocalStep, FetchedCheckpoint] | None = None
        self._discarded: set[LocalStep] = set()

    def newest(
        self,
        log: CommitLog,
        in_memory: tuple[LocalStep, Images] | None,
        *,
        world: int,
        deadline: Deadline,
    ) -> LocalStep | None:
        """The newest sound and verified set, kept for `take`.

        Raises:
            LogError, StoreError: the log cannot be read.
        """
        self._offered = None
        state = log.tail(deadline).state
        candidates: list[tuple[LocalStep, SpooledCheckpoint | Images]] = []
        if in_memory is not None:
            candidates.append(in_memory)  # first: of two sets of one step memory wins
        candidates += self._spooled()
        self._tell_unsound(state)
        sound = [item for item in candidates if self._is_sound(state, item[0])]
        for at, source in sorted(sound, key=lambda item: (-item[0].gen, -item[0].step)):
            found = (
                self._verified(source)
                if isinstance(source, SpooledCheckpoint)
                else verified_in_memory(source, world)
            )
            if found is not None and found.world == world:
                self._offered = at, replace(found, gen=at.gen, step=at.step)
                return at
        return None

    def _tell_unsound(self, state: LogState) -> None:
        """A set that is newer than every commit and yet not used is worth a word."""
        newest = max(((commit.gen, commit.step) for commit in state.good), default=(0, 0))
        for at, item in self._spooled():
            if (at.gen, at.step) > newest and not self._is_sound(state, at):
                assert self._spool is not None
                self._spool.pass_over(
                    item, "the last group of this job did not stage it after its newest commit"
                )

    def _verified(self, item: SpooledCheckpoint) -> FetchedCheckpoint | None:
        return verified_in_spool(self._spool, item) if self._spool is not None else None

    def may_have(self, state: LogState) -> bool:
        """Whether the spool holds a set that the log would accept, going by its record alone."""
        return any(self._is_sound(state, at) for at, _ in self._spooled())

    def _spooled(self) -> list[tuple[LocalStep, SpooledCheckpoint]]:
        return [
            (LocalStep(gen=i.record.gen, step=i.record.step, group=i.record.group), i)
            for i in (self._spool.ready() if self._spool else ())
        ]

    def _is_sound(self, state: LogState, at: LocalStep) -> bool:
        resume = state.good[-1].seq if state.good else None
        return at not in self._discarded and is_local_sound(state, at, resume=resume)

    def take(self, local: LocalStep, *, world: int) -> FetchedCheckpoint:
        """The set that the claim names.

        Raises:
            ShardMissing: it is not here (any more).
        """
        if self._offered is not None and self._offered[0] == local:
            return self._offered[1]
        for at, item in self._spooled():
            found = self._verified(item) if at == local else None
            if found is not None and found.world == world:
                return found
        raise ShardMissing(
            f"the local set of generation {local.gen}, step {local.step} is not on this node",
            hint="the group starts again from the newest commit",
        )

    def discard(self, local: LocalStep) -> None:
        """Never offer this set again."""
        self._discarded.add(local)
        self._offered = None

    def forget(self) -> None:
        """The offered set was restored: let go of its memory."""
        self._offered = None
