"""Given cases of kind j: names out of manifests, and who may talk to the socket."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from supervisor.errors import ExitCode
from tests.e2e.harness import SIZED_COMMAND, assert_sized, base_env, read_log
from tests.fakes import connect_as_nobody
from tests.tampering import change_last_part, job_folder, overwrite

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SIZED = {"SIZED_STEPS": "14", "SIZED_STEP_S": "0.05"}
EVIL_NAMES = {
    "up": "../x",
    "absolute": "/etc/hostname",
    "through": "data/a/../../x",
    "empty": "",
    "nul": "data/00/0000000001/000000000010/000000-\0",
    "long": "d" * 300,
    "newline": "data/24/0000000001/000000000010/000000-245e7e34d8c74682917bb34634aae7bf\n",
    "another job's": "../another/data/24/0000000001/000000000010/000000-" + "2" * 32,
    "another step's": "data/24/0000000001/000000000005/000000-245e7e34d8c74682917bb34634aae7bf",
}


def outside(cluster) -> dict[str, bytes]:
    """Every file around the store, which nobody may touch."""
    return {
        str(path.relative_to(cluster.folder)): path.read_bytes()
        for path in cluster.folder.iterdir()
        if path.is_file()
    }


@pytest.mark.parametrize("field", ["key", "name"])
@pytest.mark.parametrize("evil", EVIL_NAMES)
def test_c133_f64_a_name_that_leads_elsewhere_is_refused_before_anything_is_opened(
    copied, evil, field
):
    cluster, node = copied
    (cluster.folder / "x").write_text("mine")
    before = outside(cluster)

    def rename(part: dict) -> None:
        part["shards"][0][field] = EVIL_NAMES[evil]

    change_last_part(cluster, rename)

    shown = cluster.cli(node, "show", check=False)
    verdicts = cluster.cli(node, "verify", "--read-data", check=False)["checkpoints"]

    assert shown["error_id"] == "manifest_invalid"
    assert [verdict["is_whole"] for verdict in verdicts] == [True, False]
    assert verdicts[1]["error_id"] == "manifest_invalid"
    assert outside(cluster) == before


@pytest.mark.parametrize("evil", ["up", "absolute"])
def test_c133_f64_a_relaunch_sets_such_a_checkpoint_aside_and_takes_the_older_one(copied, evil):
    cluster, node = copied

    def rename(part: dict) -> None:
        part["shards"][0]["key"] = EVIL_NAMES[evil]

    change_last_part(cluster, rename)
    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    failed = node.event("claim.failed")
    assert failed["error_id"] == "manifest_invalid"
    assert "marked bad" in failed["reason"]
    assert node.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    listed = cluster.cli(node, "ls")["checkpoints"]
    assert [item["step"] for item in listed if item["is_bad"]] == [10]
    assert "Traceback" not in node.stderr


def test_c133_f64_a_link_in_a_shards_place_is_not_followed(copied):
    cluster, node = copied
    [key] = [shard["key"] for shard in cluster.cli(node, "show")["shards"]]
    path = job_folder(cluster) / key
    elsewhere = cluster.folder / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)

    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert node.event("restore.completed")["step"] == 5


@pytest.mark.parametrize("field", ["key", "name"])
@pytest.mark.parametrize("evil", ["up", "absolute", "nul", "long"])
def test_c133_f64_a_spool_record_with_such_a_name_is_passed_over(copied, saved, evil, field):
    cluster, node = copied
    shutil.copytree(saved.folder / "a" / "spool", node.folder / "spool")
    [record] = (node.folder / "spool").rglob("*-000000000010/READY.json")
    document = json.loads(record.read_bytes())
    document["shards"][0][field] = EVIL_NAMES[evil]
    overwrite(record, json.dumps(document).encode())
    before = outside(cluster)

    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert node.event("fetch.completed")["source"] == "store"
    assert node.event("restore.completed")["step"] == 10
    assert outside(cluster) == before
    assert "Traceback" not in node.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_c135_f63_with_an_open_umask_nobody_else_can_talk_to_it_or_take_its_place(make_cluster):
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o777)
        place = Path(home) / "deep" / "run"
        cluster = make_cluster(world=1, env=SIZED)
        node = cluster.node("a")
        config = node.folder / "job.toml"
        text = config.read_text().replace(f'"{node.folder}/run"', f'"{place}"')
        config.write_text(text.replace(f'"{node.folder}/spool"', f'"{home}/disk/spool"'))
        old = os.umask(0)
        try:
            cluster.start(node, command=SIZED_COMMAND, SIZED_STEPS="60")
        finally:
            os.umask(old)
        cluster.wait_for_event(node, "checkpoint.spooled")
        socket_path = place / "supervisor.sock"
        modes = {
            str(path): stat.S_IMODE(path.lstat().st_mode)
            for top in (place.parent, Path(home) / "disk")
            for path in [top, *top.rglob("*")]
        }

        refused = connect_as_nobody(str(socket_path))
        moved = subprocess.run(
            ["mv", str(place), f"{home}/taken"],
            user=65534,
            cwd="/",
            capture_output=True,
            check=False,
        )
        for path in (place.parent, place, socket_path):
            os.chmod(path, 0o777)
        denied = connect_as_nobody(str(socket_path))
        cluster.wait_for_event(node, "peer.denied")
        code = cluster.finish(node)

    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    assert refused == "Permission denied"
    assert moved.returncode != 0
    assert denied == "closed at once"
    assert node.event("peer.denied")["error_id"] == "peer_denied"
    assert code == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=60)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_c135_a_directory_that_another_user_made_before_us_is_refused(make_cluster):
    cluster = make_cluster(world=1, env=SIZED)
    node = cluster.node("a")
    place = node.folder / "run"
    place.mkdir()
    os.chown(place, 65534, 65534)

    done = subprocess.run(
        ["lastgasp", "run", "-c", str(node.folder / "job.toml"), "--", *SIZED_COMMAND],
        env=base_env(cluster.log), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == ExitCode.CONFIG
    assert "[runtime_dir_unsafe]" in done.stderr
    assert "what to do:" in done.stderr
    assert list(place.iterdir()) == []
