"""From the start on a new machine to the first step, with and without prefetch.

python -m bench.relaunch [--gib 2.0] [--ranks 2]

A job is saved and leaves; then it is started again with an empty spool, so that every byte comes
from the store, while torchrun, Python and torch start. The limit is the larger of two things that
cannot be had faster: the same command without a supervisor until it could take its first step, and
the fetch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import BIN, JOBS, Goal, figure, report, write_config

LIMIT = "the job without a supervisor"
WAYS = {"with prefetch": [str(BIN / "lastgasp")]}
WAYS["without prefetch"] = [sys.executable, str(JOBS / "no_prefetch.py")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3)
    arguments = parser.parse_args()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_GIB": str(arguments.gib)}
    job = [str(BIN / "torchrun"), f"--nproc-per-node={arguments.ranks}", str(JOBS / "relaunch.py")]
    taken: dict[str, list[float]] = {LIMIT: [], **{way: [] for way in WAYS}, "import torch": []}
    fetched: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), every='"1h"')
        life([*WAYS["with prefetch"], "run", "-c", str(config), "--", *job], env)
        for _ in range(arguments.trials):
            taken["import torch"].append(import_torch())
            taken[LIMIT].append(bare(job, env))
            for way, command in WAYS.items():
                shutil.rmtree(Path(folder) / "spool", ignore_errors=True)
                seconds, fetch_s = life([*command, "run", "-c", str(config), "--", *job], env)
                taken[way].append(seconds)
                if way == "without prefetch":
                    fetched.append(fetch_s)
    taken["the fetch alone"] = fetched
    title = f"start to first step, {arguments.gib:g} GiB from the store, {arguments.ranks} ranks"
    report(title, taken, unit="seconds", reference=LIMIT)
    median = {name: statistics.median(values) for name, values in taken.items()}
    limit_s = max(median[LIMIT], median["the fetch alone"])
    figure(
        "relaunch to first step, prefetched",
        median["with prefetch"] / limit_s,
        "x the larger of start and bytes",
        Goal(most=1.2),
    )
    figure(
        "relaunch to first step, not prefetched",
        median["without prefetch"] / limit_s,
        "x the larger of start and bytes",
    )


def import_torch() -> float:
    began_at = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began_at


def bare(job: list[str], env: dict[str, str]) -> float:
    """Until the job could take its first step, without anyone who restores its state."""
    os.sync()
    began_at = time.time()
    done = subprocess.run(
        job, env={**env, "BENCH_ONE_STEP": "1"}, capture_output=True, text=True, check=True
    )
    return first_step(done.stdout)[0] - began_at


def life(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first step, and of the fetch; the job is saved and leaves after it."""
    os.sync()
    began_at = time.time()
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("FIRST"):
            process.send_signal(signal.SIGTERM)
    process.wait()
    text = "".join(seen)
    if "FIRST" not in text:
        raise SystemExit(f"no first step:\n{text[-4000:]}")
    events = [json.loads(line) for line in seen if line.startswith('{"job_id"')]
    fetch_s = sum(event["seconds"] for event in events if event["event"] == "fetch.completed")
    return first_step(text)[0] - began_at, fetch_s


def first_step(text: str) -> tuple[float, float]:
    line = next(line for line in text.splitlines() if line.startswith("FIRST"))
    _, done_at, ready_at = line.split()
    return float(done_at), float(ready_at)


if __name__ == "__main__":
    main()
