"""What may be appended to the log, decided on the state of the exact predecessor. Pure.

Each function returns a `Make`: called with the state and the number of the slot to be written, it
answers with a body to append, `Done` (the goal is reached already) or `Refuse`. `CommitLog.append`
calls it again after each lost slot, so every test that decides something stands in here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from supervisor.commit.records import (
    Body,
    Commit,
    Epoch,
    Fail,
    Finish,
    LiveCommit,
    LocalStep,
    LogState,
    PartRef,
    Pin,
    Poison,
    Retire,
    Unpin,
    Unpoison,
    step,
)
from supervisor.errors import (
    AppendRefused,
    Fenced,
    JobFinished,
    LogError,
    NoCheckpointFound,
    NoGoodCheckpoint,
)


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing to append: the record in slot `seq` (0: none in particular) reached the goal."""

    seq: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The rules forbid this; the error says which."""

    error: LogError


Make = Callable[[LogState, int], Body | Done | Refuse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many good commits are kept besides those in use."""

    keep: int = 3

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep {self.keep}: at least one good commit must stay")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a process group wants when it claims a generation (node 0, before restore).

    Args:
        launch: id of one submission, kept across its restarts.
        round: the launcher's restart count, rising.
        group: 128 random bits, hex, drawn by rank 0 when the process group forms.
        attempt: the scheduler's own count of tries, where it has one.
        allow_fresh: whether to begin at step 0 when the job has no commit.
        resume_at: an operator's choice of commit (its seq); it must be good.
        local: the newest step whose images the nodes of this group hold completely and verified.
        drain_grace_s: how long to wait while parts of the last generation still appear.
        fail_limit: failures without a commit after which an older commit is used.
        reopen: run a job again that is marked as finished.
    """

    launch: str
    round: int
    group: str
    attempt: int | None = None
    nodes: int
    world: int
    layout: str
    allow_fresh: bool = False
    resume_at: int | None = None
    local: LocalStep | None = None
    drain_grace_s: float = 0.0
    fail_limit: int = 3
    reopen: bool = False
    why: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.world:
            raise ValueError(f"{self.nodes} nodes for a world of {self.world}")
        if self.fail_limit < 1:
            raise ValueError(f"fail_limit {self.fail_limit} must be at least 1")


def excess(state: LogState, retention: Retention) -> tuple[int, ...]:
    """The commits that retention lets go: never one in use, pinned, bad or among the newest."""
    newest = {commit.seq for commit in state.good[-retention.keep :]}
    in_use = {state.resume, state.anchor, state.last_commit}
    kept = newest | in_use | state.pinned | set(state.bad)
    return tuple(commit.seq for commit in state.live if commit.seq not in kept)


def claim(request: ClaimRequest) -> Make:
    """Begin a generation, or find the one this very group began."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if state.finished is not None and not request.reopen:
            return Refuse(JobFinished(state.finished, hint="to run it again, reopen the job"))
        token = state.token
        if token and token.group == request.group:
            return Done(state.epoch or 0)
        refusal = _superseded(state, request)
        if refusal:
            return Refuse(Fenced(refusal, hint="another group took this job over; let it run"))
        resume = _choose_resume(state, request)
        if isinstance(resume, Refuse):
            return resume
        newer = [c.seq for c in state.good if resume and c.seq > resume.seq]
        local = _usable_local(state, request, resume, stepped_back=bool(newer))
        if resume is None and local is None and not (request.allow_fresh or seq == 1):
            return Refuse(
                NoCheckpointFound(
                    "the job has begun before but has no commit",
                    hint="check the store's URL and the job id; if it never came to its first "
                    "checkpoint, start it with --allow-fresh",
                )
            )
        return Epoch(
            launch=request.launch,
            round=request.round,
            group=request.group,
            attempt=request.attempt,
            nodes=request.nodes,
            world=request.world,
            layout=request.layout,
            resume=resume.seq if resume else None,
            skip=tuple(newer),
            local=local,
            reopen=state.finished is not None,
            why=request.why,
        )

    return make


def _superseded(state: LogState, request: ClaimRequest) -> str:
    """Why this group may not claim any more; empty if it may."""
    token = state.token
    if token is None:
        return ""
    if request.group in state.groups:
        return f"group {request.group} claimed before and was superseded"
    if request.launch == token.launch:
        if request.round < token.round:
            return f"round {request.round} of this launch is over; round {token.round} claimed"
    elif request.launch in state.launches:
        return f"launch {token.launch} took over from launch {request.launch}"
    both_known = request.attempt is not None and token.attempt is not None
    if both_known and (request.attempt or 0) < (token.attempt or 0):
        return f"attempt {request.attempt} is over; attempt {token.attempt} claimed"
    return ""


def _choose_resume(state: LogState, request: ClaimRequest) -> LiveCommit | Refuse | None:
    good = state.good
    if request.resume_at is not None:
        chosen = next((c for c in good if c.seq == request.resume_at), None)
        if chosen:
            return chosen
        return Refuse(
            NoCheckpointFound(
                f"commit {request.resume_at} is not among the good ones: {[c.seq for c in good]}",
                hint="`lastgasp ls` shows what can be resumed from",
            )
        )
    if good:
        # Starts that failed from a local set say nothing against the newest commit.
        has_failed = state.fails >= request.fail_limit and state.local is None
        return good[-2] if has_failed and len(good) > 1 else good[-1]
    if state.live:
        return Refuse(
            NoGoodCheckpoint(
                f"all {len(state.live)} commits are marked bad",
                hint="look at them with `lastgasp ls`, then `lastgasp unpoison` the right one",
            )
        )
    return None


def _usable_local(
    state: LogState, request: ClaimRequest, resume: LiveCommit | None, *, stepped_back: bool
) -> LocalStep | None:
    """The local step, if it is sound and nothing speaks for going back."""
    local = request.local
    if local is None or stepped_back or request.resume_at is not None:
        return None
    if state.fails >= request.fail_limit:
        return None
    return local if is_local_sound(state, local, resume=resume.seq if resume else None) else None


def is_local_sound(state: LogState, local: LocalStep, *, resume: int | None) -> bool:
    """Whether a set that a node holds continues what the log would resume from.

    It does if the last generation itself staged it after its newest commit, or was to restore it
    and committed nothing since. The commit to resume from must be the nearest before it: otherwise
    what lies between was marked bad, and the set stems from that. Checked in
    tests/sim/commit_model (README there).
    """
    nearest = state.last_commit if state.has_committed else state.resume
    if resume != nearest:
        return False
    token = state.token
    is_of_last_group = (
        token is not None
        and (local.gen, local.group) == (state.gen, token.group)
        and local.step > state.last_step
    )
    was_to_be_restored = not state.has_committed and state.local == local
    return is_of_last_group or was_to_be_restored


def commit(
    *,
    at_step: int,
    parts: tuple[PartRef, ...],
    base: int | None,
    flags: tuple[str, ...],
    retention: Retention,
) -> Make:
    """Make a step visible; the caller appends it under its generation."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if state.gen == 0:
            return Refuse(AppendRefused("no generation has begun"))
        if state.last_step >= at_step:
            return Done(state.last_commit or 0)
        if base is not None and base not in state.live_seqs:
            return Refuse(AppendRefused(f"step {at_step}: its base, commit {base}, is retired"))
        if state.finished is not None and at_step > state.finished:
            return Refuse(AppendRefused(f"step {at_step}: the job ended at {state.finished}"))
        body = Commit(step=at_step, parts=parts, base=base, flags=flags)
        after = step(state, body, seq=seq)
        return Commit(
            step=at_step, parts=parts, base=base, flags=flags, retire=excess(after, retention)
        )

    return make


def retire(
    commits: Collection[int] | None, *, retention: Retention, by_operator: bool = False
) -> Make:
    """Let go of these commits (None: all that retention lets go).

    An operator may also name bad ones, never one in use or pinned, nor the last good one.
    """

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        free = set(excess(state, retention))
        if by_operator:
            in_use = {state.resume, state.anchor, state.last_commit, *state.pinned}
            free |= set(state.bad) - in_use
        wanted = free if commits is None else set(commits) & state.live_seqs
        if not wanted:
            return Done(0)
        if wanted - free:
            return Refuse(
                AppendRefused(
                    f"commits {sorted(wanted - free)} cannot be retired",
                    hint="they are in use, pinned, or among the newest good ones",
                )
            )
        return Retire(commits=tuple(sorted(wanted)))

    return make


def poison(commit_seq: int, *, why: str, who: str) -> Make:
    """Mark a commit as bad."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if commit_seq not in state.live_seqs:
            return Refuse(_not_live(commit_seq))
        if commit_seq in state.bad:
            return Done(0)
        return Poison(commit=commit_seq, why=why[:500], who=who[:500])

    return make


def unpoison(commit_seq: int, *, why: str, who: str) -> Make:
    """Take the mark back."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if commit_seq not in state.live_seqs:
            return Refuse(_not_live(commit_seq))
        if commit_seq not in state.bad:
            return Done(0)
        return Unpoison(commit=commit_seq, why=why[:500], who=who[:500])

    return make


def pin(name: str, commit_seq: int) -> Make:
    """Keep a commit under a name; a name in use moves to the new commit."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if commit_seq not in state.live_seqs:
            return Refuse(_not_live(commit_seq))
        if any((p.name, p.commit) == (name, commit_seq) for p in state.pins):
            return Done(0)
        return Pin(name=name, commit=commit_seq)

    return make


def unpin(name: str) -> Make:
    """End a pin."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        for entry in state.pins:
            if entry.name == name:
                return Unpin(name=name, commit=entry.commit)
        return Done(0)

    return make


def fail(*, why: str, node: int) -> Make:
    """Count a generation that ended by itself before its first commit; once for each."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if state.gen == 0:
            return Refuse(AppendRefused("no generation has begun"))
        if state.fail_gen == state.gen or state.has_committed:
            return Done(0)
        return Fail(why=why[:500], node=node)

    return make


def finish(*, at_step: int) -> Make:
    """Mark the job as finished; appended under the generation that finished it."""

    def make(state: LogState, seq: int) -> Body | Done | Refuse:
        if state.finished is not None:
            return Done(0)
        if state.gen == 0:
            return Refuse(AppendRefused("no generation has begun"))
        if at_step < state.last_step:
            return Refuse(
                AppendRefused(f"step {at_step} is older than the commit of {state.last_step}")
            )
        return Finish(step=at_step)

    return make


def _not_live(seq: int) -> AppendRefused:
    return AppendRefused(
        f"commit {seq} does not exist or is retired", hint="`lastgasp ls` shows the commits"
    )
