"""The stop step: the one boundary at which all ranks of this node stop. Pure.

A rank publishes its boundary before it looks for a hold, and the supervisor raises the hold before
it reads the boundaries. So a rank that does not hold yet will hold at its published boundary plus
one at the latest, or already waits at the published one. The stop step is the largest of these:
every rank can reach it, since a rank that waits at boundary n has taken part in every collective
before n and asks nobody for anything after it.

Should a rank turn up later still (its hold became visible late), the stop step rises to where it
stands; nobody has been told to leave before all stand at one boundary.
"""

from __future__ import annotations

from collections.abc import Mapping


def stop_step(held: Mapping[int, int], passed: Mapping[int, int]) -> int | None:
    """The first boundary that all ranks can still reach.

    Args:
        held: boundary of each rank that waits for an order.
        passed: last published boundary of each rank that does not.

    Returns:
        None while no rank holds: nothing forces a step yet.
    """
    if not held:
        return None
    return max([*held.values(), *(boundary + 1 for boundary in passed.values())])


def to_release(held: Mapping[int, int], target: int) -> list[int]:
    """Ranks that wait below the stop step and must train on to it."""
    return sorted(rank for rank, boundary in held.items() if boundary < target)


def is_reached(held: Mapping[int, int], *, world_size: int, target: int) -> bool:
    """Whether every rank stands at the stop step."""
    return len(held) == world_size and all(boundary == target for boundary in held.values())
