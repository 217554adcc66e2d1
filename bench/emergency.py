"""From the notice to the commit, and from the relaunch to the first step, by real drills.

python -m bench.emergency [--gib 2.0] [--ranks 2]

The limit of the first is the larger of spooling and uploading the state; of the second, the start
of Python, torch and torchrun, which the run measures as launch to the first hello of a rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.common import BIN, JOBS, Goal, figure, start_job, write_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--drills", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), every='"1h"')
        job = start_job(
            config,
            JOBS / "emergency.py",
            ranks=arguments.ranks,
            BENCH_GIB=str(arguments.gib),
            BENCH_STEPS="100000",
        )
        events: list[dict[str, Any]] = []
        reader = threading.Thread(target=collect, args=(job, events), daemon=True)
        reader.start()
        found = []
        for number in range(arguments.drills):
            wait_for(events, "restore.completed", number + 1)
            time.sleep(6)
            found.append(drill(config, number, events))
        job.terminate()
        job.wait()
    committed = statistics.median(ratio for ratio, _ in found)
    figure(
        "notice to committed, less 1 s",
        committed,
        "x the larger of spool and upload",
        Goal(most=1.15),
    )
    figure(
        "relaunch on the same node to training",
        statistics.median(ratio for _, ratio in found),
        "x launch to first hello",
    )


def collect(job: subprocess.Popen[str], events: list[dict[str, Any]]) -> None:
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith('{"job_id"'):
            events.append({**json.loads(line), "seen_at": time.monotonic()})


def wait_for(events: list[dict[str, Any]], name: str, count: int) -> None:
    give_up_at = time.monotonic() + 120
    while sum(event["event"] == name for event in events) < count:
        if time.monotonic() > give_up_at:
            raise SystemExit(f"no {name} in time: {events[-5:]}")
        time.sleep(0.1)


def drill(config: Path, number: int, events: list[dict[str, Any]]) -> tuple[float, float]:
    """The two ratios of one drill."""
    start = len(events)
    done = subprocess.run(
        [str(BIN / "lastgasp"), "drill", "-c", str(config), "--json", "--deadline", "60s"],
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(done.stdout)
    marks = document["milestones_s"]
    mine = events[start:]

    def at(name: str) -> float:
        return float(next(event["seen_at"] for event in mine if event["event"] == name))

    committed = next(event for event in mine if event["event"] == "checkpoint.committed")
    # A spool that came after the commit has no place in the commit's own line.
    spool_s = committed["spool_s"] or marks.get("spooled", marks["staged"]) - marks["staged"]
    limit_s = max(spool_s, committed["upload_s"])
    to_hello_s = at("rank.joined") - at("job.launched")
    to_training_s = at("restore.completed") - at("job.launched")
    print(
        f"drill {number}: notice to staged {marks['staged']:.2f} s, to committed "
        f"{marks['committed']:.2f} s; spool {spool_s:.2f} s, upload "
        f"{committed['upload_s']} s, so {marks['committed'] / limit_s:.2f} x the larger "
        f"(of {committed['size_bytes'] / 2**30:.2f} GiB)"
    )
    print(
        f"         relaunch to training {to_training_s:.2f} s, of it {to_hello_s:.2f} s until "
        f"the first rank's hello: {to_training_s / to_hello_s:.2f} x"
    )
    return (marks["committed"] - 1.0) / limit_s, to_training_s / to_hello_s


if __name__ == "__main__":
    main()
