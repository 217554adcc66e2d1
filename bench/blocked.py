"""How long a save blocks training: ours at the boundary and overlapped, DCP, torch.save, a memcpy.

python -m bench.blocked [--gib 1.0]

Ours run in jobs of their own under a real supervisor, each beside a warm memcpy of its own state;
the others in one process beside theirs. The memcpy is the limit, so ratios to it compare.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from bench.common import BIN, JOBS, report, result_of, start_job, write_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    env = {
        "BENCH_GIB": str(arguments.gib),
        "BENCH_TRIALS": str(arguments.trials),
        "BENCH_THREADS": str(arguments.threads),
        "BENCH_EVERY": "4",
        "BENCH_PORT": "29877",
    }
    with tempfile.TemporaryDirectory() as folder:
        for schedule in ("boundary", "overlapped"):
            config = write_config(
                Path(folder) / schedule, every_steps="4", schedule=f'"{schedule}"'
            )
            job = start_job(config, JOBS / "blocked.py", **env)
            result = result_of(job)
            job.communicate()
            plain_s = statistics.median(result["plain"])
            waits = [max(0.0, seconds - plain_s) for seconds in result["after"]]
            taken = {"memcpy": result["memcpy"], f"ours, {schedule}": result["blocked"]}
            taken["optimizer.step waits, beyond a plain one"] = waits
            title = f"training blocked by a save of {arguments.gib:g} GiB"
            report(title, taken, unit="seconds", reference="memcpy")
        others = subprocess.Popen(
            [str(BIN / "python"), str(JOBS / "blocked_others.py")],
            env={**os.environ, **env, "BENCH_FOLDER": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        report("the alternatives", result_of(others), unit="seconds", reference="memcpy")
        others.communicate()


if __name__ == "__main__":
    main()
