"""What a save costs training: ours at the boundary and overlapped, DCP, torch.save, a memcpy.

python -m bench.blocked [--gib 2.0]

Counted is everything that training waits for: `run.step()`, and what the SDK's hook holds the next
`optimizer.step()` for. Beside it stands how much slower that step was, which also holds what
hashing, disk and upload take from the same cores; the control, in which the supervisor stands
still, tells the two apart. DCP's staging thread is counted alike: the call, and the wait for its
staging before the optimizer's step, after as long a forward and backward.
Ours run in jobs of their own under a real supervisor, each beside a
warm memcpy of its own state; the others in one process beside theirs. The memcpy is the limit, so
ratios to it compare.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.common import BIN, JOBS, Goal, figure, report, result_of, start_job, write_config

IDLE = "saved, flush idle"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--forward", type=float, default=1.0, help="seconds of forward and backward"
    )
    parser.add_argument("--schedules", default="boundary,overlapped")
    arguments = parser.parse_args()
    env = {
        "BENCH_GIB": str(arguments.gib),
        "BENCH_TRIALS": str(arguments.trials),
        "BENCH_THREADS": str(arguments.threads),
        "BENCH_FORWARD_S": str(arguments.forward),
        "BENCH_EVERY": "4",
        "BENCH_PORT": "29877",
    }
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for schedule in filter(None, arguments.schedules.split(",")):
            config = write_config(
                Path(folder) / schedule, every_steps="4", schedule=f'"{schedule}"'
            )
            job = start_job(config, JOBS / "blocked.py", **env)
            result = result_of(job)
            job.communicate()
            ratios[schedule] = told(f"{schedule}, {arguments.gib:g} GiB", result)
        others = subprocess.Popen(
            [str(BIN / "python"), str(JOBS / "blocked_others.py")],
            env={**os.environ, **env, "BENCH_FOLDER": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        taken = result_of(others)
        others.communicate()
    report("the alternatives", taken, unit="seconds", reference="memcpy")
    base = statistics.median(taken["memcpy"])
    like = {"boundary": "dcp.async_save", "overlapped": "dcp.async_save, staging thread"}
    for name in taken:
        figure(f"training blocked, {name}", statistics.median(taken[name]) / base, "x memcpy")
    for schedule, ratio in ratios.items():
        theirs = statistics.median(taken[like[schedule]]) / base
        goal = Goal(most=min(theirs, 1.2 if schedule == "boundary" else 0.05))
        figure(f"training blocked, ours, {schedule}", ratio, "x memcpy", goal)


def told(title: str, result: dict[str, Any]) -> float:
    """Print all of it; the ratio to a memcpy of what training waits for, by the control."""
    plain_s = statistics.median(result["optimizer"]["plain"])
    taken = {"memcpy": result["memcpy"]}
    for kind in ("saved", IDLE):
        steps, waits = result["step"][kind], result["wait"][kind]
        taken |= {
            f"{kind}: run.step()": steps,
            f"{kind}: optimizer.step() waits for the save": waits,
            f"{kind}: both": [a + b for a, b in zip(steps, waits, strict=True)],
            f"{kind}: optimizer.step() beyond a plain one": [
                seconds - plain_s for seconds in result["optimizer"][kind]
            ],
        }
    report(title, taken, unit="seconds", reference="memcpy")
    low, high = min(result["optimizer"]["plain"]), max(result["optimizer"]["plain"])
    print(f"  a plain optimizer.step() takes {plain_s:.4g} s ({low:.4g} to {high:.4g})")
    base = statistics.median(result["memcpy"])
    for kind in ("saved", IDLE):
        slower = statistics.median(taken[f"{kind}: optimizer.step() beyond a plain one"])
        figure(f"{title}, {kind}: optimizer.step() slower by", slower / base, "x memcpy")
    return statistics.median(taken["saved: both"]) / base


if __name__ == "__main__":
    main()
