"""`run.step()` without a save, `import trainer_sdk`, and the supervisor at rest.

python -m bench.step_cost
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.common import JOBS, ROOT, Goal, figure, result_of, start_job, write_config


def main() -> None:
    imports = [start_of("import trainer_sdk") - start_of("pass") for _ in range(7)]
    raw = [round(value * 1000, 1) for value in imports]
    print(f"import trainer_sdk, beyond a bare python: {statistics.median(raw):.1f} ms; raw {raw}")
    figure("import trainer_sdk", statistics.median(raw), "ms")
    with tempfile.TemporaryDirectory() as folder:
        job = start_job(write_config(Path(folder), every='"1h"'), JOBS / "idle.py")
        median, least, most = result_of(job)
        print(f"run.step(): median {median:.0f} ns (least {least:.0f}, most {most:.0f})")
        figure("run.step() without a save", median / 1000, "us", Goal(most=2.0))
        watch(psutil.Process(job.pid))
        job.terminate()
        job.wait()


def start_of(code: str) -> float:
    began_at = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    return time.perf_counter() - began_at


def watch(supervisor: psutil.Process, seconds: float = 15.0) -> None:
    time.sleep(3)
    before, began_at = supervisor.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, took_s = supervisor.cpu_times(), time.monotonic() - began_at
    used_s = (after.user + after.system) - (before.user + before.system)
    resident_mb = supervisor.memory_info().rss / 1e6
    share = 100 * used_s / took_s
    print(
        f"supervisor beside a job at 10 steps/s: {resident_mb:.0f} MB resident, {share:.2f} % of a "
        f"core over {took_s:.0f} s"
    )
    figure("supervisor at rest", resident_mb, "MB resident", Goal(most=80.0))
    figure("supervisor at rest", share, "% of a core", Goal(most=0.5))


if __name__ == "__main__":
    main()
