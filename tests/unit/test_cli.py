"""The command line: verbs, exit codes, one JSON document with --json, errors with what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from supervisor.config import OPTIONS
from supervisor.errors import ExitCode
from tests.unit.images import JOB_ID, Workshop, some_images, workshops


@dataclass(frozen=True)
class Ran:
    """How one command went."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The one JSON line on stderr."""
        (line,) = self.err.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@dataclass
class Shell:
    """Runs `lastgasp` as people do, in an environment of its own."""

    folder: Path

    def __call__(self, *arguments: str, **environ: str) -> Ran:
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "COLUMNS": "200",
            **environ,
        }
        done = subprocess.run(
            [sys.executable, "-m", "supervisor", *arguments],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def lastgasp(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    """A store with a job's checkpoints, and the configuration that finds it."""
    (tmp_path / "job.toml").write_text(
        f'[job]\nid = "{JOB_ID}"\nruntime_dir = "{tmp_path}/run"\n'
        f'[store]\nurl = "file://{tmp_path}/store"\n'
    )
    yield from workshops(tmp_path)


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["ls", "--nonsense"],
        ["run"],
        ["run", "--"],
        ["completion", "tcsh"],
        ["notify", "--deadline", "soon", "--job-id"],
        ["show", "1", "2", "3"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_64_with_one_line_of_what_is_wrong(
    lastgasp: Shell, arguments: list[str]
) -> None:
    ran = lastgasp(*arguments)

    assert ran.code == ExitCode.USAGE
    assert ran.err.startswith("lastgasp: ")
    assert "[usage]" in ran.err.splitlines()[0]
    assert ran.out == ""


@pytest.mark.parametrize("arguments", [[], ["config"]])
def test_no_verb_shows_the_help_and_is_64(lastgasp: Shell, arguments: list[str]) -> None:
    ran = lastgasp(*arguments)

    assert ran.code == ExitCode.USAGE
    assert "Commands:" in ran.err
    assert "[usage]" not in ran.err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "-h"], ["config", "--help"]])
def test_help_is_no_error(lastgasp: Shell, arguments: list[str]) -> None:
    ran = lastgasp(*arguments)

    assert ran.code == 0
    assert "Usage:" in ran.out


def test_an_error_with_json_is_one_document_on_stderr(lastgasp: Shell) -> None:
    ran = lastgasp("ls", "--json", "--nonsense")

    assert ran.error["message_type"] == "exit_error"
    assert (ran.error["code"], ran.error["error_id"]) == (64, "usage")
    assert "--nonsense" in ran.error["message"]
    assert ran.out == ""


def test_json_after_the_dashes_is_the_trainings_own(lastgasp: Shell) -> None:
    ran = lastgasp("run", "-c", "none.toml", "--", "torchrun", "--json")

    assert ran.code == ExitCode.CONFIG
    assert ran.err.startswith("lastgasp: ")


# ---------------------------------------------------------------- configuration


def test_a_bad_configuration_is_78_with_every_problem(lastgasp: Shell, folder: Path) -> None:
    (folder / "job.toml").write_text('[job]\nid = "a b"\n[checkpoint]\nkepe = 3\n')

    ran = lastgasp("config", "check")

    assert ran.code == ExitCode.CONFIG
    assert "3 problems" in ran.err
    assert "job.toml:2: job.id" in ran.err
    assert "job.toml:4: no setting 'kepe'" in ran.err
    assert "what to do:" in ran.err


def test_a_bad_configuration_with_json_is_78_in_the_document_too(
    lastgasp: Shell, folder: Path
) -> None:
    (folder / "job.toml").write_text("[job]\n")

    ran = lastgasp("config", "check", "--json")

    assert ran.code == ExitCode.CONFIG
    assert (ran.error["code"], ran.error["error_id"]) == (78, "config_invalid")
    assert ran.error["hint"]


def test_config_check_is_0_for_a_good_one(lastgasp: Shell, workshop: Workshop) -> None:
    assert lastgasp("config", "check").code == 0
    assert lastgasp("config", "check", "--json").document == {"is_valid": True, "job_id": JOB_ID}


def test_config_show_tells_every_value_and_its_origin(lastgasp: Shell, workshop: Workshop) -> None:
    ran = lastgasp("config", "show", "--json", LASTGASP_CHECKPOINT__KEEP="7")

    assert set(ran.document) == {option.name for option in OPTIONS}
    assert ran.document["checkpoint.keep"] == {
        "value": 7,
        "origin": "environment LASTGASP_CHECKPOINT__KEEP",
    }
    assert ran.document["job.id"]["origin"] == "job.toml:2"
    assert "checkpoint.keep" in lastgasp("config", "show").out


def test_config_schema_needs_no_configuration(lastgasp: Shell) -> None:
    ran = lastgasp("config", "schema")

    assert ran.code == 0
    assert ran.document["properties"]["job"]["required"] == ["id"]


def test_version_names_the_formats(lastgasp: Shell) -> None:
    ran = lastgasp("version", "--json")

    assert set(ran.document) == {"version", "protocol", "part_format", "python"}
    assert lastgasp("version").out.startswith("lastgasp ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(lastgasp: Shell, shell: str) -> None:
    ran = lastgasp("completion", shell)

    assert ran.code == 0
    assert "_LASTGASP_COMPLETE" in ran.out


# ---------------------------------------------------------------- run


def test_a_command_that_does_not_exist_is_told_before_anything_is_touched(
    lastgasp: Shell, workshop: Workshop, folder: Path
) -> None:
    ran = lastgasp("run", "--json", "--", "torchrun", "train.py", PATH="/nonexistent")

    assert ran.code == ExitCode.USAGE
    assert ran.error["error_id"] == "command_not_found"
    assert "torch is installed" in ran.error["hint"]
    assert not (folder / "run").exists()


def test_a_store_that_is_not_there_is_69(lastgasp: Shell, folder: Path) -> None:
    ran = lastgasp(
        "run", "--json", "--job-id", "a", "--store", f"file://{folder}/none", "--", "true",
        LASTGASP_JOB__RUNTIME_DIR=f"{folder}/run",
    )  # fmt: skip

    assert ran.code == ExitCode.STORE_UNREACHABLE
    assert ran.error["error_id"] == "store_not_found"


# ---------------------------------------------------------------- looking at a store


def test_a_job_without_checkpoints_has_an_empty_list(lastgasp: Shell, workshop: Workshop) -> None:
    assert lastgasp("ls", "--json").document == {"checkpoints": []}
    assert "no checkpoint" in lastgasp("ls").out
    assert lastgasp("verify").code == 0

    ran = lastgasp("show", "--json")

    assert ran.code == ExitCode.USAGE
    assert ran.error["error_id"] == "checkpoint_unknown"


def test_ls_lists_what_was_committed(lastgasp: Shell, workshop: Workshop) -> None:
    for step in (10, 20):
        workshop.persist(some_images(2), step=step)

    rows = lastgasp("ls", "--json").document["checkpoints"]

    assert [(row["id"], row["step"], row["is_bad"]) for row in rows] == [
        ("1-10", 10, False),
        ("1-20", 20, False),
    ]
    assert rows[0]["committed_at"] <= rows[1]["committed_at"]
    table = lastgasp("ls").out
    assert "1-10" in table
    assert "good" in table


@pytest.mark.parametrize("which", [[], ["1-20"], ["20"]])
def test_show_describes_a_checkpoint_by_id_step_or_as_the_newest(
    lastgasp: Shell, workshop: Workshop, which: list[str]
) -> None:
    workshop.persist(some_images(2, seed=1), step=10)
    done = workshop.persist(some_images(2, seed=2), step=20)

    document = lastgasp("show", "--json", *which).document

    assert (document["id"], document["seq"], document["world_size"]) == ("1-20", done.seq, 2)
    assert document["size_bytes"] == done.size_bytes
    assert [shard["rank"] for shard in document["shards"]] == [0, 1]
    assert lastgasp("show", *which).code == 0


def test_show_of_an_unknown_checkpoint_names_the_newest(
    lastgasp: Shell, workshop: Workshop
) -> None:
    workshop.persist(some_images(1), step=10)

    ran = lastgasp("show", "99", "--json")

    assert ran.code == ExitCode.USAGE
    assert "1-10" in ran.error["hint"]


def test_verify_is_0_for_whole_checkpoints(lastgasp: Shell, workshop: Workshop) -> None:
    done = workshop.persist(some_images(2), step=10)

    cheap = lastgasp("verify", "--json")
    deep = lastgasp("verify", "--json", "--read-data", "100%", "1-10")

    assert (cheap.code, deep.code) == (0, 0)
    assert cheap.document["checkpoints"][0]["checked_bytes"] == 0
    assert deep.document["checkpoints"][0]["checked_bytes"] == done.size_bytes
    assert "whole" in lastgasp("verify").out


def test_verify_of_a_damaged_checkpoint_is_1_and_names_the_shard(
    lastgasp: Shell, workshop: Workshop
) -> None:
    done = workshop.persist(some_images(2), step=10)
    workshop.persist(some_images(2), step=20)
    path = workshop.shard_path(workshop.manifest(done.seq), 1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)

    ran = lastgasp("verify", "--json", "--read-data", "100%")

    bad, good = ran.document["checkpoints"]
    assert ran.code == 1
    assert (bad["id"], bad["is_whole"], bad["error_id"]) == ("1-10", False, "shard_corrupt")
    assert "rank 1" in bad["problem"]
    assert good["is_whole"]
    assert "NOT WHOLE" in lastgasp("verify", "--read-data", "1").out


def test_verify_finds_a_missing_and_a_short_shard_without_reading_data(
    lastgasp: Shell, workshop: Workshop
) -> None:
    first = workshop.persist(some_images(1), step=10)
    second = workshop.persist(some_images(1), step=20)
    workshop.shard_path(workshop.manifest(first.seq), 0).unlink()
    os.truncate(workshop.shard_path(workshop.manifest(second.seq), 0), 100)

    ran = lastgasp("verify", "--json")

    assert ran.code == 1
    found = [item["error_id"] for item in ran.document["checkpoints"]]
    assert found == ["shard_missing", "shard_corrupt"]


def test_gc_shows_and_only_with_delete_removes_what_retention_let_go(
    lastgasp: Shell, workshop: Workshop
) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        workshop.persist(some_images(1, seed=step), step=step)
    before = len(workshop.data_files())

    shown = lastgasp("gc", "--json", "--grace", "0s")
    after_showing = len(workshop.data_files())
    deleted = lastgasp("gc", "--json", "--grace", "0s", "--delete")

    assert shown.document["is_dry_run"] is True
    assert shown.document["num_objects"] > 0
    assert after_showing == before
    assert deleted.document["is_dry_run"] is False
    assert len(workshop.data_files()) == len(workshop.steps()) < before
    assert lastgasp("verify", "--read-data", "100%").code == 0


def test_poison_sets_a_checkpoint_aside_and_unpoison_takes_that_back(
    lastgasp: Shell, workshop: Workshop
) -> None:
    workshop.persist(some_images(1), step=10)

    poisoned = lastgasp("poison", "1-10", "--reason", "nan")
    marked = lastgasp("ls", "--json").document["checkpoints"][0]["is_bad"]
    lastgasp("unpoison", "1-10")

    assert poisoned.code == 0
    assert marked is True
    assert lastgasp("ls", "--json").document["checkpoints"][0]["is_bad"] is False


@pytest.mark.parametrize("share", ["0", "101%", "much", "nan"])
def test_a_share_that_is_none_is_64(lastgasp: Shell, workshop: Workshop, share: str) -> None:
    ran = lastgasp("verify", "--json", f"--read-data={share}")

    assert ran.code == ExitCode.USAGE
    assert "100%" in ran.error["hint"]


def test_status_without_a_supervisor_is_what_the_store_says(
    lastgasp: Shell, workshop: Workshop
) -> None:
    done = workshop.persist(some_images(1), step=10)

    document = lastgasp("status", "--json").document

    assert document["is_live"] is False
    assert document["last_commit"] == {"seq": done.seq, "step": 10, "generation": 1}
    assert "no supervisor answers" in lastgasp("status").out


@pytest.mark.parametrize("verb", ["save", "notify", "drill"])
def test_an_order_without_a_supervisor_is_an_error_with_what_to_do(
    lastgasp: Shell, workshop: Workshop, verb: str
) -> None:
    ran = lastgasp(verb, "--json")

    assert ran.code != 0
    assert ran.error["error_id"] == "supervisor_not_running"
    assert "lastgasp run" in ran.error["hint"]


def test_a_reader_that_leaves_early_is_no_error_of_ours(workshop: Workshop, folder: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m supervisor config schema | head -c 10",
        shell=True,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stderr == ""


def test_a_deadline_beyond_all_measure_is_a_usage_error(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(f'[job]\nid = "x"\n[store]\nurl = "file://{tmp_path}"\n')

    done = subprocess.run(
        ["lastgasp", "notify", "-c", str(config), "--deadline", "99999999999s"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )

    assert done.returncode == ExitCode.USAGE
    assert "up to 30d" in done.stderr
