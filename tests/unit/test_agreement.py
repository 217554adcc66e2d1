"""The stop step, checked over every interleaving of small groups that train in lockstep.

A rank publishes boundary n, then looks whether a hold is asked for. If not, it goes into step n+1,
which it can only finish once every other rank has come into that step too (a collective). If so, it
waits for an order. The supervisor may read the pages, or take a message, at any point in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from supervisor.lifecycle import agreement

STEPS = 4


@dataclass(frozen=True)
class Rank:
    published: int = 0
    doing: str = "training"  # training -> published -> held | training
    held_at: int | None = None
    proceeds_to: int = 0


@dataclass(frozen=True)
class World:
    ranks: tuple[Rank, ...]
    is_hold_raised: bool = False
    stop_step: int | None = None
    told: tuple[int, ...] = ()  # boundaries of Boundary messages that the supervisor has taken
    inbox: tuple[tuple[int, int], ...] = ()


def can_finish_step(world: World, index: int) -> bool:
    """The collective of a step needs every rank to be at least in that step."""
    step = world.ranks[index].published + 1
    return all(
        rank.published >= step or (rank.published == step - 1 and rank.doing == "training")
        for rank in world.ranks
    )


def with_rank(world: World, index: int, rank: Rank) -> World:
    ranks = list(world.ranks)
    ranks[index] = rank
    return replace(world, ranks=tuple(ranks))


def successors(world: World):
    if not world.is_hold_raised:
        yield replace(world, is_hold_raised=True)
    for index, rank in enumerate(world.ranks):
        if rank.doing == "training" and rank.published < STEPS and can_finish_step(world, index):
            moved = replace(rank, published=rank.published + 1, doing="published")
            yield with_rank(world, index, moved)
        if rank.doing == "published":
            holds = world.is_hold_raised and rank.published >= rank.proceeds_to
            if holds:
                held = replace(rank, doing="held", held_at=rank.published)
                after = with_rank(world, index, held)
                yield replace(after, inbox=(*after.inbox, (index, rank.published)))
            else:
                yield with_rank(world, index, replace(rank, doing="training"))
    if world.inbox:
        yield supervise(world)


def supervise(world: World) -> World:
    """Take one Boundary message and decide with the production rule."""
    index, _ = world.inbox[0]
    told = tuple(sorted({*world.told, index}))
    held = {i: world.ranks[i].held_at for i in told if world.ranks[i].held_at is not None}
    passed = {i: rank.published for i, rank in enumerate(world.ranks) if i not in held}
    target = agreement.stop_step(held, passed)
    assert target is not None
    world = replace(world, inbox=world.inbox[1:], stop_step=target, told=told)
    for released in agreement.to_release(held, target):
        rank = replace(world.ranks[released], doing="training", held_at=None, proceeds_to=target)
        world = with_rank(world, released, rank)
        world = replace(world, told=tuple(i for i in world.told if i != released))
    return world


def explore(num_ranks: int) -> tuple[int, set[World]]:
    start = World(ranks=tuple(Rank() for _ in range(num_ranks)))
    seen, todo, ends = {start}, [start], set()
    while todo:
        world = todo.pop()
        following = list(successors(world))
        if not following:
            ends.add(world)
        for following_world in following:
            if following_world not in seen:
                seen.add(following_world)
                todo.append(following_world)
    return len(seen), ends


def test_every_interleaving_ends_with_all_ranks_at_one_boundary():
    """No rank is left in a collective, and none stands elsewhere than the others."""
    for num_ranks in (1, 2, 3):
        num_states, ends = explore(num_ranks)

        assert num_states > 5**num_ranks
        for world in ends:
            held = {i: rank.held_at for i, rank in enumerate(world.ranks)}
            # The only other end is a job that came to its last step before the hold was seen.
            if any(rank.published == STEPS and rank.doing != "held" for rank in world.ranks):
                continue
            assert len(set(held.values())) == 1, world
            assert agreement.is_reached(held, world_size=num_ranks, target=world.stop_step), world


@given(
    st.dictionaries(st.integers(0, 7), st.integers(0, 100), min_size=1),
    st.dictionaries(st.integers(8, 15), st.integers(0, 100)),
)
def test_the_stop_step_is_one_that_every_rank_can_still_reach(held, passed):
    target = agreement.stop_step(held, passed)

    assert target is not None
    assert all(target >= boundary for boundary in held.values())
    assert all(target > boundary for boundary in passed.values())
    assert target in {*held.values(), *(boundary + 1 for boundary in passed.values())}
    assert agreement.to_release(held, target) == sorted(r for r, b in held.items() if b < target)


def test_nothing_is_agreed_while_no_rank_holds():
    assert agreement.stop_step({}, {0: 7, 1: 8}) is None
