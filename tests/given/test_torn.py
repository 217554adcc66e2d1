"""Given cases of kind b that are about names and order: what points at what, and when."""

from __future__ import annotations

import json
import shutil

import pytest

from supervisor.errors import ExitCode
from tests.conftest import s3_options
from tests.e2e.disks import checkpoints_folder, leftovers
from tests.e2e.harness import SIZED_COMMAND, Cluster, assert_sized, read_log
from tests.fault_proxy import delay
from tests.tampering import job_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SIZED = {"SIZED_STEPS": "14", "SIZED_STEP_S": "0.1"}


@pytest.mark.s3
def test_c34_nothing_names_an_object_that_is_not_there_whole(make_cluster, s3_server, proxy):
    """Shards travel slowly, small objects at once: each part and record still comes after them."""
    options = s3_options(s3_server, proxy.url, **SIZED, SIZED_MIB="40")
    cluster = make_cluster(world=1, **options)
    node = cluster.node("a")
    proxy.add(delay(0.8), method="PUT", key="/data/")
    proxy.add(delay(0.8), method="POST", key="/data/")

    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    client = s3_server.client()
    bucket = cluster.store_url.split("/")[2]
    whole_at = {
        request.key.removeprefix("runs/jobs/toy/"): request.done_at
        for request in proxy.seen("POST", "/data/")
        if "uploadId" in request.query
    }
    votes = [request for request in proxy.seen("PUT", "/part/") if request.status == 200]
    voted_at = {}
    for vote in votes:
        part = json.loads(client.get_object(Bucket=bucket, Key=vote.key)["Body"].read())
        for shard in part["shards"]:
            assert vote.at > whole_at[shard["key"]]
            head = client.head_object(Bucket=bucket, Key=f"runs/jobs/toy/{shard['key']}")
            assert head["ContentLength"] == shard["size_bytes"]
        voted_at[vote.key.removeprefix("runs/jobs/toy/")] = vote.done_at
    records = [request for request in proxy.seen("PUT", "/log/") if request.status == 200]
    num_commits = 0
    for request in records:
        record = json.loads(client.get_object(Bucket=bucket, Key=request.key)["Body"].read())
        for ref in record["body"].get("parts", []):
            assert request.at > voted_at[ref["key"]]
            num_commits += 1
    client.close()
    assert code == ExitCode.DONE
    assert num_commits == len(votes) >= 2


@pytest.fixture
def saved(make_cluster):
    """A job that was committed at steps 5 and 10 and then killed, on a node that is still there."""
    cluster: Cluster = make_cluster(world=1, env=SIZED)
    node = cluster.node("a")
    cluster.start(node, command=SIZED_COMMAND, SIZED_STEPS="1000")
    cluster.wait_for_event(node, "checkpoint.spooled", step=10)
    cluster.wait_for_event(node, "checkpoint.committed", step=10)
    cluster.kill_everything(node)
    return cluster, node


def test_c35_folders_that_only_look_like_checkpoints_are_passed_over(saved, make_cluster):
    """In the spool: empty, truncated, without a record, and of another job, all with higher steps
    than what the log knows."""
    cluster, node = saved
    other = make_cluster(world=1, env=SIZED)
    foreign = other.node("a")
    other.start(foreign, command=SIZED_COMMAND, SIZED_MIB="2")
    other.finish(foreign)
    folder = checkpoints_folder(node)
    good = folder / "0000000001-000000000010"
    (folder / "0000000001-000000000100").mkdir()
    for name, step in (("truncated", 101), ("no record", 102)):
        copy = folder / f"0000000001-{step:012d}"
        shutil.copytree(good, copy)
        if name == "no record":
            (copy / "READY.json").unlink()
            continue
        record = json.loads((copy / "READY.json").read_text())
        (copy / "READY.json").write_text(json.dumps({**record, "step": step}))
        [image] = copy.glob("*.safetensors")
        image.write_bytes(image.read_bytes()[:-4096])
    theirs = checkpoints_folder(foreign) / "0000000001-000000000014"
    ours = folder / "0000000001-000000000014"
    shutil.rmtree(ours, ignore_errors=True)
    shutil.copytree(theirs, ours)

    cluster.start(node, command=SIZED_COMMAND)
    code = cluster.finish(node)

    assert node.event("restore.completed")["step"] == 10
    assert code == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=14)
    said = [
        (event.get("step"), event["reason"])
        for event in node.events()
        if event["event"] == "spool.rejected"
    ]
    assert {step for step, _ in said} >= {14, 100, 101, 102}, said
    assert all(reason for _, reason in said)


@pytest.mark.parametrize("damage", ["truncated", "gone", "foreign"])
def test_c35_a_damaged_newest_checkpoint_in_the_store_is_named_and_the_older_one_used(
    saved, damage
):
    cluster, node = saved
    shards = {
        item["id"]: cluster.cli(node, "show", item["id"])["shards"][0]["key"]
        for item in cluster.cli(node, "ls")["checkpoints"]
    }
    older, newest = (job_folder(cluster) / key for key in shards.values())
    cluster.lose(node)
    newest.chmod(0o600)
    if damage == "truncated":
        newest.write_bytes(newest.read_bytes()[:-4096])
    elif damage == "gone":
        newest.unlink()
    else:
        newest.write_bytes(older.read_bytes())
    second = cluster.node("b")

    cluster.start(second, command=SIZED_COMMAND)
    code = cluster.finish(second)

    failed = second.event("fetch.failed")
    wanted = {"truncated": "shard_corrupt", "gone": "shard_missing", "foreign": "shard_corrupt"}
    assert failed["error_id"] == wanted[damage]
    assert failed["reason"]
    assert second.event("restore.completed")["step"] == 5
    assert code == ExitCode.DONE
    assert_sized(read_log(cluster.log), last_step=14)


def test_c37_four_ranks_on_slow_directories_publish_once_and_leave_nothing(make_cluster):
    """One process publishes for all, whatever a rename or a link takes."""
    cluster = make_cluster(world=4, env={**SIZED, "OMP_NUM_THREADS": "1"})
    node = cluster.node("a")
    slow = ",".join(
        f"{name}.before=sleep:0.2" for name in ("spool.publish", "dir.rename", "dir.link")
    )
    command = ["torchrun", "--nproc-per-node=4", SIZED_COMMAND[1]]

    cluster.start(node, command=command, LASTGASP_FAILPOINTS=slow, SIZED_STEP_S="0.3")
    code = cluster.finish(node)

    assert code == ExitCode.DONE
    assert not [event for event in node.events() if event["level"] == "error"]
    assert leftovers(node) == []
    assert list((cluster.folder / "store" / "tmp").iterdir()) == []
    verdicts = cluster.cli(node, "verify", "--read-data")["checkpoints"]
    assert verdicts
    assert all(verdict["is_whole"] for verdict in verdicts)
