#!/usr/bin/env python3
"""Checks of local resume (local.py), which goes with model.py.

    python local_checks.py --quick     every mutation and small complete searches (default)
    python local_checks.py --full      the larger complete searches (about 10 minutes)
    python local_checks.py --walk N    N random steps at larger bounds (--seed S)
    python local_checks.py --only TEXT only the checks whose name contains TEXT
    python local_checks.py --trace     print the trace of every violation found

A check names the invariant that has to break, or None when nothing may break.
The exit status is 1 if any check ends otherwise.
"""
import argparse
import random
import sys

from explore import bfs, walk
from local import LocalModel
from model import A1B1C1, A2, mix, report
from protocol import Config

A1 = A1B1C1[:1]
# C runs on the machine on which A ran, B on another.
ABA = dict(procs=A1B1C1, machines=(0, 1, 0), restart=0)
BASE = dict(merge=True, gens=3, steps=2, gc=None, crash=0, lost=0, restart=2, skip=False)
FAST = mix(BASE, liveness=False)
PAIR = mix(FAST, procs=A2, gens=2, steps=1, restart=1)
ONE = mix(FAST, procs=A1)
# The rule by places, as first built: see README.md.
PLACES = mix(ONE, rule="places", offer="newest")

MUTATIONS = [
    ("each node restores the newest it holds", "I15", mix(PAIR, mutation="per_node")),
    ("set that was not verified", "I22", mix(PAIR, torn=1, mutation="unverified")),
    ("group holds only some ranks", "I15", mix(PAIR, mutation="partial")),
    ("old set after a newer commit", "I14", mix(ONE, rule="no_newer")),
    ("old set brought along by another launch", "I14", mix(FAST, ABA, rule="no_newer")),
    ("set of an older generation, compared by step", "I14",
     mix(FAST, ABA, skip=True, rule="by_step")),
    ("set kept after its commit was poisoned", "I18",
     mix(ONE, gens=2, steps=3, restart=1, poison=1, rule="no_taint")),
    ("set kept after a step-back", "I14", mix(ONE, steps=3, back=1, rule="no_taint")),
    ("set kept after a step-back, consequence", "I18",
     mix(ONE, steps=3, back=1, rule="no_taint", ignore=("I14",))),
    ("decided before append", "I14", mix(FAST, ABA, mutation="outside_make")),
    ("decided before append, poison", "I18",
     mix(ONE, gens=2, steps=3, restart=1, poison=1, mutation="outside_make")),
    ("generation known by its number only", "I22",
     mix(ONE, foreign=True, rule="by_number")),
    ("flushes a set that was not restored", "I7", mix(ONE, mutation="stale_flush")),
    ("refers to the keys of the old upload", "I10", mix(ONE, mutation="old_keys")),
    ("new process group under the old token", "I7", mix(PAIR, mutation="same_token")),
    ("by places: set of another life of the job", "I22", mix(PLACES, foreign=True)),
    ("by places: second copy of a poisoned commit", "I18", mix(PLACES, poison=1, lose=1)),
    ("by places: POISON taken back", "I14", mix(PLACES, poison=1, unpoison=1)),
]
SLOW_MUTATIONS = [
    ("by places: bad commit retired", "I14",
     mix(PLACES, steps=3, gens=2, restart=1, poison=2, lose=1, retire_bad=True, gc="batch")),
    ("by places: bad commit retired, consequence", "I18",
     mix(PLACES, steps=3, gens=2, restart=1, poison=2, lose=1, retire_bad=True, gc="batch",
         ignore=("I14",))),
]

QUICK = [
    ("1 node, 2 steps", mix(BASE, procs=A1)),
    ("1 node, 2 steps, set of another life", mix(BASE, procs=A1, gens=2, foreign=True)),
    ("1 node, 2 gens, 2 steps, lose, poison, step-back",
     mix(BASE, procs=A1, gens=2, restart=1, lose=1, poison=1, back=1)),
    ("2 nodes, 2 gens, 1 step, lose 1, torn 1", mix(PAIR, lose=1, torn=1, liveness=True)),
    ("3 launches, 2 machines, 3 gens, 1 step, lost 1",
     mix(BASE, ABA, steps=1, lost=1)),
]

FULL = [
    ("1 node, 3 gens, 3 steps", mix(BASE, procs=A1, steps=3)),
    ("1 node, 3 gens, 3 steps, lose 1", mix(BASE, procs=A1, steps=3, lose=1)),
    ("1 node, 3 gens, 2 steps, lose 1, poison 1, step-back 1",
     mix(BASE, procs=A1, lose=1, poison=1, back=1)),
    ("1 node, 3 gens, 2 steps, lose 1, poison 1, unpoison 1",
     mix(BASE, procs=A1, lose=1, poison=1, unpoison=1)),
    ("1 node, 3 gens, 2 steps, poison 2, bad ones retired, gc",
     mix(BASE, procs=A1, poison=2, retire_bad=True, gc="batch")),
    ("1 node, 2 gens, 3 steps, poison 2, bad ones retired, gc",
     mix(BASE, procs=A1, gens=2, restart=1, steps=3, poison=2, retire_bad=True, gc="batch")),
    ("1 node, 3 gens, 2 steps, crash 1, lost 1", mix(BASE, procs=A1, crash=1, lost=1)),
    ("1 node, 3 gens, 2 steps, lose 1, stale reads",
     mix(BASE, procs=A1, lose=1, stale=True)),
    ("1 node, 3 gens, 2 steps, newest offered, poison 2, step-back 1, lose 1",
     mix(BASE, procs=A1, offer="newest", poison=2, back=1, lose=1)),
    ("2 nodes, 2 gens, 2 steps, lose 1, drops",
     mix(BASE, procs=A2, gens=2, restart=1, lose=1, skip=True)),
    ("2 nodes, 2 gens, 2 steps, lose 1, poison 1, step-back 1",
     mix(BASE, procs=A2, gens=2, restart=1, lose=1, poison=1, back=1)),
    ("2 nodes, 2 gens, 1 step, lose 1, torn 1, crash 1, lost 1",
     mix(BASE, procs=A2, gens=2, steps=1, restart=1, lose=1, torn=1, crash=1, lost=1)),
    ("2 nodes, 3 gens, 1 step, lose 1", mix(BASE, procs=A2, steps=1, lose=1)),
    ("2 nodes, 3 gens, 1 step, lost 1", mix(BASE, procs=A2, steps=1, lost=1)),
    ("2 nodes, 3 gens, 1 step, many paused collectors",
     mix(BASE, procs=A2, steps=1, gc="zombie")),
    ("3 launches, 2 machines, 3 gens, 2 steps", mix(BASE, ABA)),
    ("3 launches, 2 machines, 3 gens, 2 steps, poison 1",
     mix(BASE, ABA, poison=1, restart=1)),
]

WIDE = dict(procs=tuple((launch, node, 2) for launch in "ABC" for node in range(2)),
            machines=(0, 1, 2, 3, 0, 1), world=2, gens=6, steps=8, crash=4, lost=4, poison=3,
            back=1, restart=4, lose=2, torn=1, unpoison=1, gc="zombie", gc_split=True,
            slots=3, any_static=False, foreign=True)
WALKS = [dict(), dict(stale=True), dict(keep=2, commit_retires=True),
         dict(retire_bad=True, offer="newest")]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("--full", action="store_true")
    ap.add_argument("--walk", type=int, default=0)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--only", default="")
    ap.add_argument("--trace", action="store_true")
    ap.add_argument("--seconds", type=float, default=None)
    arg = ap.parse_args()
    fine = True

    def run(name, want, options):
        nonlocal fine
        if arg.only in name:
            res = bfs(LocalModel(Config(name=name, **options)), max_seconds=arg.seconds)
            fine &= report(name, res, want, arg.trace)

    if arg.walk:
        print("== random walks: 3 launches x 2 nodes on 4 machines, 6 generations, 8 steps")
        for n, extra in enumerate(WALKS):
            cfg = Config(**mix(WIDE, extra))
            done, spent, seed = 0, 0.0, arg.seed + 1000000 * n
            while done < arg.walk // len(WALKS):
                res = walk(LocalModel(cfg), random.Random, range(seed, seed + 100), 600,
                           live_every=25)
                seed += 100
                done += res.transitions
                spent += res.seconds
                if res.error:
                    break
            res.states, res.transitions, res.seconds = done, done, spent
            fine &= report("walk %s, seeds %d to %d" % (
                extra or "base", arg.seed + 1000000 * n, seed - 1), res, None, True)
    elif arg.full:
        for name, want, options in SLOW_MUTATIONS:
            run(name, want, options)
        for name, options in FULL:
            run(name, None, options)
    else:
        print("== local resume broken on purpose")
        for name, want, options in MUTATIONS:
            run(name, want, options)
        print("== local resume, complete searches")
        for name, options in QUICK:
            run(name, None, options)
    print("all as expected" if fine else "SOMETHING IS NOT AS EXPECTED")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
