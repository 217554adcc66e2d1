"""What every bench needs: interleaved trials, medians, a supervised job, a line to paste."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
JOBS = ROOT / "bench" / "jobs"


def interleave(
    ways: dict[str, Callable[[], float | None]], *, trials: int
) -> dict[str, list[float]]:
    """Run every way in turn, so that what else the machine does hits all of them alike.

    A way that returns a number measured itself; otherwise the call is timed, in seconds. What an
    earlier way left in the page cache is written before the next begins.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(trials):
        for name, way in ways.items():
            os.sync()
            began_at = time.perf_counter()
            own = way()
            taken[name].append(time.perf_counter() - began_at if own is None else own)
    return taken


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is to be; either bound may be missing."""

    most: float | None = None
    least: float | None = None

    def __str__(self) -> str:
        return f"at most {self.most:.3g}" if self.most is not None else f"at least {self.least:.3g}"

    def is_met(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )


def figure(name: str, value: float, unit: str, goal: Goal | None = None) -> None:
    """One line of the summary that `python -m bench.all` prints in the end."""
    line = {"name": name, "value": value, "unit": unit}
    if goal is not None:
        line |= {"goal": str(goal), "is_met": goal.is_met(value)}
    print("FIGURE " + json.dumps(line), flush=True)


def report(title: str, taken: dict[str, list[float]], *, unit: str, reference: str) -> None:
    """Medians, raw values, and each median relative to the reference."""
    print(f"\n{title} ({unit}; medians of {len(next(iter(taken.values())))})")
    base = statistics.median(taken[reference])
    for name, values in taken.items():
        median = statistics.median(values)
        ratio = median / base if base else float("nan")
        raw = " ".join(f"{value:.4g}" for value in values)
        print(f"  {name:34} {median:10.4g}   {ratio:6.2f} x {reference}   raw: {raw}")


def write_config(home: Path, *, store_url: str = "", **checkpoint: str) -> Path:
    """A job.toml for a bench; the store is a folder beside it unless given."""
    home.mkdir(parents=True, exist_ok=True)
    if not store_url:
        (home / "store").mkdir(exist_ok=True)
        store_url = f"file://{home}/store"
    settings = "\n".join(f"{key} = {value}" for key, value in checkpoint.items())
    path = home / "job.toml"
    path.write_text(
        f'[job]\nid = "bench"\nruntime_dir = "{home}/run"\n'
        f'[store]\nurl = "{store_url}"\n[spool]\npath = "{home}/spool"\n'
        f"[checkpoint]\n{settings}\n[restart]\nmax_crashes = 0\n"
        '[status]\nlisten = "off"\n[log]\nformat = "json"\n'
    )
    return path


def start_job(config: Path, script: Path, *, ranks: int = 1, **env: str) -> subprocess.Popen[str]:
    """A supervised torchrun; its output is a pipe that the caller reads."""
    command = [BIN / "lastgasp", "run", "-c", config, "--"]
    command += [BIN / "torchrun", f"--nproc-per-node={ranks}", script]
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def result_of(process: subprocess.Popen[str]) -> Any:
    """What the job prints behind RESULT; the process may go on."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        if line.startswith("RESULT "):
            return json.loads(line[7:])
        seen.append(line)
    raise SystemExit("the job gave no result:\n" + "".join(seen[-40:]))


def cpu_s() -> float:
    """CPU seconds of this process and its threads so far."""
    times = os.times()
    return times.user + times.system
