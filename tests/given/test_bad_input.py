"""What bad input gets: a message with what to do, a stable id, the right code; nothing is lost."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.errors import ExitCode
from tests.conftest import s3_options
from tests.e2e.harness import SIZED_COMMAND, TOY, Cluster, Node, base_env

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
Arrange = Callable[[Cluster, Node, Path], None]


def broken_toml(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text() + "\n[job\n")


def not_utf8(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_bytes(config.read_bytes() + b"# \xff\xfe\n")


def gone(cluster: Cluster, node: Node, config: Path) -> None:
    config.unlink()


def a_folder(cluster: Cluster, node: Node, config: Path) -> None:
    config.unlink()
    config.mkdir()


def empty(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text("")


def misspelt(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text().replace("every_steps", "evry_steps"))


def wrong_type(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text().replace("every_steps = 5", 'every_steps = "often"'))


def out_of_range(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text().replace("every_steps = 5", "every_steps = 0"))


def odd_job_id(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text().replace('id = "toy"', 'id = "../toy"'))


def store_gone(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text().replace('/store"', '/nowhere"'))


def store_a_file(cluster: Cluster, node: Node, config: Path) -> None:
    (cluster.folder / "notes").write_text("mine")
    config.write_text(config.read_text().replace('/store"', '/notes"'))


def store_of_no_kind(cluster: Cluster, node: Node, config: Path) -> None:
    config.write_text(config.read_text().replace('"file://', '"ftp://'))


CONFIG, STORE = ExitCode.CONFIG, ExitCode.STORE_UNREACHABLE
CASES: dict[str, tuple[Arrange, ExitCode, str, str]] = {
    "no config": (gone, CONFIG, "config_invalid", "job.toml"),
    "config is a folder": (a_folder, CONFIG, "config_invalid", "job.toml"),
    "config is empty": (empty, CONFIG, "config_invalid", "LASTGASP_STORE__URL"),
    "config is no TOML": (broken_toml, CONFIG, "config_invalid", "line"),
    "config is not UTF-8": (not_utf8, CONFIG, "config_invalid", "UTF-8"),
    "misspelt": (misspelt, CONFIG, "config_invalid", "did you mean 'every_steps'"),
    "wrong type": (wrong_type, CONFIG, "config_invalid", "often"),
    "out of range": (out_of_range, CONFIG, "config_invalid", "every_steps"),
    "job id leads elsewhere": (odd_job_id, CONFIG, "config_invalid", "job.id"),
    "no such store": (store_gone, STORE, "store_not_found", "nowhere"),
    "store is a file": (store_a_file, STORE, "store_not_found", "notes"),
    "no such kind of store": (store_of_no_kind, CONFIG, "config_invalid", "store.url"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A store with the checkpoints of a job, which no mistake may touch."""
    cluster = Cluster(folder=tmp_path_factory.mktemp("trained") / "c", world=1)
    node = cluster.node("a")
    cluster.start(node, command=SIZED_COMMAND, SIZED_STEPS="1000")
    cluster.wait_for_event(node, "checkpoint.committed", step=10)
    cluster.kill_everything(node)
    yield cluster
    cluster.close()


def run(cluster: Cluster, node: Node, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["lastgasp", "run", "-c", str(node.folder / "job.toml"), "--", *SIZED_COMMAND],
        env={**base_env(cluster.log), **cluster.env, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_mend_and_touches_nothing(trained, name):
    arrange, code, error_id, words = CASES[name]
    node = trained.node(f"node-{list(CASES).index(name)}")
    arrange(trained, node, node.folder / "job.toml")
    before = contents(trained.folder / "store")

    done = run(trained, node)

    assert done.returncode == code, done.stderr
    assert f"[{error_id}]" in done.stderr
    assert words in done.stderr
    assert "what to do:" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(trained.folder / "store") == before


@pytest.mark.s3
@pytest.mark.parametrize(
    ("env", "error_id", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3_access_denied", "access key"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "s3_access_denied", "access key"),
        ({"LASTGASP_STORE__URL": "s3://no-such-bucket/x"}, "store_not_found", "no-such-bucket"),
        ({"LASTGASP_STORE__ENDPOINT_URL": "http://127.0.0.1:9"}, "store_unreachable", "endpoint"),
        ({"LASTGASP_STORE__ENDPOINT_URL": "ftp:/x"}, "config_invalid", "endpoint_url"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_named_with_its_mend(
    make_cluster, s3_server, env, error_id, words
):
    cluster = make_cluster(world=1, **s3_options(s3_server, s3_server.endpoint_url))
    node = cluster.node("a")

    done = run(cluster, node, **env)

    assert done.returncode == (CONFIG if error_id == "config_invalid" else STORE), done.stderr
    assert f"[{error_id}]" in done.stderr
    assert words in done.stderr
    assert "what to do:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_holds_another_job_is_shared_and_the_other_is_left_alone(trained):
    """Jobs are told apart by [job] id: a new one starts in a prefix of its own."""
    node = trained.node("other")
    config = node.folder / "job.toml"
    config.write_text(config.read_text().replace('id = "toy"', 'id = "another"'))
    theirs = trained.folder / "store" / "jobs" / "toy"
    before = contents(theirs)

    done = run(trained, node, SIZED_STEPS="6", TOY_LOG=str(node.folder))
    swept = trained.cli(node, "gc", "--delete", "--grace", "0s")

    assert done.returncode == ExitCode.DONE, done.stderr
    assert "fresh start" in done.stderr
    assert swept["unknown_keys"] == []
    assert contents(theirs) == before


def test_a_job_whose_log_was_removed_does_not_begin_anew_in_silence(make_cluster, trained):
    cluster = make_cluster(world=1)
    shutil.rmtree(cluster.folder / "store")
    shutil.copytree(trained.folder / "store", cluster.folder / "store")
    shutil.rmtree(cluster.folder / "store" / "jobs" / "toy" / "log")
    node = cluster.node("a")

    done = run(cluster, node)

    assert done.returncode == ExitCode.NO_CHECKPOINT
    assert "[no_checkpoint_found]" in done.stderr
    assert "what to do:" in done.stderr
    assert cluster.lines(0) == []


def test_the_script_of_another_job_under_this_jobs_id_is_refused_by_name_and_harms_nothing(
    make_cluster, trained
):
    """The same [job] id with another model: a copied config. Mended, it goes on where it stood."""

    cluster = make_cluster(world=1, env={"TOY_WORKERS": "0"})
    shutil.rmtree(cluster.folder / "store")
    shutil.copytree(trained.folder / "store", cluster.folder / "store")
    node = cluster.node("a")

    cluster.start(node, command=["torchrun", "--nproc-per-node=1", str(TOY)])
    refused = cluster.finish(node)
    said = node.event("rank.restore_failed")
    cluster.start(node, command=SIZED_COMMAND, SIZED_STEPS="12")
    code = cluster.finish(node)

    assert refused == 1
    assert said["error_id"] == "state_mismatch"
    assert "model" in said["reason"]
    assert not said["is_checkpoint_bad"]
    assert node.event("restore.completed")["step"] == 10
    assert code == ExitCode.DONE
