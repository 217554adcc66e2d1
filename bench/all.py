"""Every bench, one after the other, and a table of what they found: python -m bench.all [--quick]

Each may also be run by itself; each says what it compares. `--quick` takes small states and few
trials, which shows that everything runs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

QUICK: dict[str, list[str]] = {
    "bench.blocked": ["--gib", "0.25", "--trials", "1", "--forward", "0.3"],
    "bench.spool": ["--gib", "0.25", "--trials", "2"],
    "bench.upload": ["--gib", "0.125", "--trials", "1"],
    "bench.emergency": ["--gib", "0.25", "--drills", "1"],
    "bench.relaunch": ["--gib", "0.25", "--trials", "1"],
    "bench.step_cost": [],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for module, options in QUICK.items():
        print(f"\n==== python -m {module}", flush=True)
        figures += run([module, *(options if arguments.quick else [])])
    print("\n==== figures")
    width = max(len(item["name"]) for item in figures)
    for item in figures:
        goal = ""
        if "goal" in item:
            goal = f"goal {item['goal']}: {'met' if item['is_met'] else 'MISSED'}"
        print(f"{item['name']:{width}}  {item['value']:8.3g} {item['unit']:34} {goal}")


def run(command: list[str]) -> list[dict[str, Any]]:
    """Pass its output on; its figures."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        if line.startswith("FIGURE "):
            found.append(json.loads(line[7:]))
        else:
            print(line, end="", flush=True)
    if process.wait() != 0:
        print(f"{command[0]} failed")
    return found


if __name__ == "__main__":
    main()
