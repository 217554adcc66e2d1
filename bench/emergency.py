"""From the notice to the commit, and from the relaunch to the first step, by real drills.

python -m bench.emergency [--gib 1.0] [--ranks 2]

The limit of the first is the larger of spooling and uploading the state; of the second, the start
of Python, torch and torchrun, which the run measures as launch to the first hello of a rank.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.common import BIN, JOBS, start_job, write_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
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
        for number in range(arguments.drills):
            wait_for(events, "restore.completed", number + 1)
            time.sleep(6)
            drill(config, number, events)
        job.terminate()
        job.wait()


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


def drill(config: Path, number: int, events: list[dict[str, Any]]) -> None:
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
    limit_s = max(committed["spool_s"] or 0.0, committed["upload_s"])
    to_hello_s = at("rank.joined") - at("job.launched")
    to_training_s = at("restore.completed") - at("job.launched")
    print(
        f"drill {number}: notice to staged {marks['staged']:.2f} s, to committed "
        f"{marks['committed']:.2f} s; spool {committed['spool_s']} s, upload "
        f"{committed['upload_s']} s, so {marks['committed'] / limit_s:.2f} x the larger "
        f"(of {committed['size_bytes'] / 2**30:.2f} GiB)"
    )
    print(
        f"         relaunch to training {to_training_s:.2f} s, of it {to_hello_s:.2f} s until "
        f"the first rank's hello: {to_training_s / to_hello_s:.2f} x"
    )


if __name__ == "__main__":
    main()
