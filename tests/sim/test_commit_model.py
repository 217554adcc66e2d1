"""The model of the commit protocol and of local resume: complete searches within small bounds.

Each mutation of the rules has to break the invariant that its check names, and the rules as they
are must break none. `tests/sim/commit_model/README.md` has the rule and the larger searches.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "commit_model"


def run(script: str, *options: str) -> list[str]:
    """The lines of checks that ended as they should; fails if one did not."""
    done = subprocess.run(
        [sys.executable, script, *options], cwd=MODEL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all as expected\n")
    return [line for line in done.stdout.splitlines() if line.startswith("ok ")]


def broken(lines: list[str]) -> set[str]:
    """The invariants that some mutation broke."""
    return {match[1] for line in lines if (match := re.search(r" s  ([IL]\d+): ", line))}


@pytest.mark.timeout(240)
def test_local_resume_keeps_every_invariant_and_each_mutation_is_caught() -> None:
    lines = run("local_checks.py", "--quick")

    assert broken(lines) == {"I7", "I10", "I14", "I15", "I18", "I22"}
    assert sum("nothing broken" in line for line in lines) == 5


@pytest.mark.timeout(240)
def test_commit_protocol_keeps_every_invariant_and_each_mutation_is_caught() -> None:
    lines = run("model.py", "--quick")

    assert len(lines) == 51
    assert {"I1", "I2", "I5", "I6", "I8", "I12", "I20", "I21", "L1"} <= broken(lines)
