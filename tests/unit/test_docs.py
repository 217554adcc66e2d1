"""Generated documents are fresh, and those written by hand agree with the code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from supervisor.config import OPTIONS, load
from supervisor.errors import ExitCode, StoreThrottled

DOCS = Path(__file__).parents[2] / "docs"


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATED: dict[str, str] = _load_generator().documents()


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_generated_document_is_fresh(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATED[name], "run `python docs/generate.py`"


def test_every_error_id_is_listed_once() -> None:
    ids = re.findall(r"^\| `([a-z0-9_]+)` \|", GENERATED["errors.md"], re.M)

    assert len(ids) == len(set(ids))
    assert {"store_unreachable", "fenced", "disk_full", "shard_corrupt", "drill_refused"} <= set(
        ids
    )
    for path in (DOCS.parent / "supervisor").rglob("*.py"):
        for found in re.findall(r'\berror_id(?:: \S+)? ?= ?"(\w+)"', path.read_text()):
            assert found in ids, f"{path}: {found}"


def test_every_error_has_a_meaning_and_a_mend() -> None:
    for line in GENERATED["errors.md"].splitlines():
        if line.startswith("| `"):
            _, _, meaning, mend, *rest, _ = line.split("|")
            assert meaning.strip()
            assert mend.strip()
            if rest:
                code, retry = rest
                assert int(code) in set(ExitCode)
                assert retry.strip() in ("yes", "no")


def test_an_error_without_a_hint_of_its_own_says_what_its_kind_is_mended_by() -> None:
    assert StoreThrottled("put x: slow down").hint == StoreThrottled.mend
    assert StoreThrottled("put x: slow down", hint="wait").hint == "wait"


def test_every_setting_is_documented_and_the_sample_is_all_defaults(tmp_path: Path) -> None:
    text = GENERATED["configuration.md"]
    (sample,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    uncommented = re.sub(r"^# (\w+ = )", r"\1", sample, flags=re.M)
    filled = uncommented.replace('id = "..."', 'id = "a"').replace(
        'url = "..."', 'url = "s3://bkt"'
    )
    path = tmp_path / "job.toml"
    path.write_text(filled)

    sampled = load(str(path), environ={})

    default = load(None, environ={}, flags={"job.id": "a", "store.url": "s3://bkt"})
    for option in OPTIONS:
        assert f"`{option.environment_name}`" in text
        assert sampled[option.name] == default[option.name], option.name


def test_the_table_of_exit_codes_is_the_one_in_the_code() -> None:
    text = (DOCS / "exit-codes.md").read_text()

    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.M)

    assert [(int(code), name) for code, name in rows] == [(int(c), c.name) for c in ExitCode]


def test_documents_come_out_the_same_from_a_fresh_process() -> None:
    """Nothing depends on what was imported before, such as errors of other tests."""
    script = (
        "import importlib.util as u\n"
        f"s = u.spec_from_file_location('g', {str(DOCS / 'generate.py')!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "print(m.errors(), end='')"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == GENERATED["errors.md"]
