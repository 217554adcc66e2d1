"""Kind a of the given cases: a resumed job equals the one that was never stopped, bit for bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors

from supervisor.errors import ExitCode
from tests.e2e.harness import ROOT, TOY, Cluster, assert_exact, read_log, run_twin
from tests.given.stored import saved_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
MOMENTS = [sys.executable, str(ROOT / "tests" / "jobs" / "moments.py")]
ZOO = [sys.executable, str(ROOT / "tests" / "jobs" / "zoo.py")]
ZOO_STOPS = (3, 5, 10)
ZOO_STEPS = 12
# Batches of an epoch on each of two ranks: 97 samples, batch 4.
EPOCH = 13
TOY_STOPS = (7, EPOCH + 6, 2 * EPOCH, 2 * EPOCH + 1)


class Lives:
    """One job that was stopped again and again, each time on a new node, and its twin."""

    def __init__(self, cluster: Cluster, stops: tuple[int, ...], twin: dict[int, Any]) -> None:
        self.cluster = cluster
        self.twin = twin
        self.stops = stops
        self.codes: list[int] = []
        self.nodes = [cluster.node(f"node-{number}") for number in range(len(stops) + 1)]

    def run(self, **last_env: str) -> Lives:
        """Stop at each step in turn, every time leaving nothing but the store."""
        for node, stop in zip(self.nodes, self.stops, strict=False):
            notice = f"{stop}:{node.notice_file}"
            self.codes.append(self.cluster.run(node, TOY_NOTICE=notice))
            self.cluster.kill_everything(node)
        self.codes.append(self.cluster.run(self.nodes[-1], **last_env))
        return self

    @property
    def log(self) -> dict[int, list[dict[str, Any]]]:
        return read_log(self.cluster.log)

    def by_step(self) -> dict[int, dict[str, Any]]:
        """Rank 0's lines of all lives."""
        return {line["step"]: line for line in self.log[0]}

    def restored(self) -> list[dict[str, Any]]:
        """What each life of the zoo found itself with before its first step."""
        text = (self.cluster.log / "restored.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def was_stopped_and_resumed_at_each_step(self) -> bool:
        committed, done = ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE
        resumed = [node.event("restore.completed")["step"] for node in self.nodes[1:]]
        return self.codes == [committed] * len(self.stops) + [done] and resumed == [*self.stops]


def make_lives(
    folder: Path, stops: tuple[int, ...], *, world: int, **options: Any
) -> Iterator[Lives]:
    env = options.get("env", {})
    twin = run_twin(folder / "twin", world=world, command=options.get("command"), **env)
    cluster = Cluster(folder=folder / "cluster", world=world, **options)
    try:
        yield Lives(cluster, stops, twin)
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """TOY with 2 ranks and 3 epochs, stopped in the first epoch, in the middle of the second, on
    its last batch, and on the step after that."""
    folder = tmp_path_factory.mktemp("toy")
    for lives in make_lives(folder, TOY_STOPS, world=2, env={"TOY_EPOCHS": "3", "TOY_DRAWS": "1"}):
        yield lives.run()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """The zoo, stopped three times; the last life builds layers and groups the other way round."""
    folder = tmp_path_factory.mktemp("zoo")
    for lives in make_lives(folder, ZOO_STOPS, world=1, command=ZOO):
        yield lives.run(ZOO_REVERSED="1")


def sections(lines: dict[int, dict[str, Any]], prefix: str, *keys: str) -> dict[str, Any]:
    """By step and name, some parts of the sections with that prefix."""
    return {
        f"{name} at step {step}": [section[key] for key in keys] if keys else section
        for step, line in sorted(lines.items())
        for name, section in line.items()
        if name.startswith(prefix)
    }


def assert_same(lives: Lives, prefix: str, *keys: str) -> None:
    """These sections equal the twin's at every step, and were what they had been before the first
    step of each life."""
    twin = {line["step"]: line for line in lives.twin[0]}
    expected = sections(twin, prefix, *keys)
    found = sections(lives.by_step(), prefix, *keys)

    assert expected
    assert set(found) == set(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def assert_unchanged_by_the_restore(lives: Lives, prefix: str, *keys: str) -> None:
    twin = {line["step"]: line for line in lives.twin[0]}
    for life in lives.restored()[1:]:
        step = life["step"]
        expected = sections({step: twin[step]}, prefix, *keys)
        found = sections({step: life["sections"]}, prefix, *keys)
        assert [name for name in expected if found[name] != expected[name]] == []


def test_c04_each_rank_goes_on_with_its_own_stream_of_random_numbers(make_cluster, tmp_path):
    """Four ranks, of which rank r draws r extra numbers a step from each generator."""
    env = {"TOY_DRAWS": "1", "TOY_WORKERS": "0", "TOY_EPOCHS": "1"}
    twin = run_twin(tmp_path / "twin", world=4, **env)
    cluster = make_cluster(world=4, env=env)
    first, second = cluster.node("a"), cluster.node("b")

    code = cluster.run(first, TOY_NOTICE=f"5:{first.notice_file}")
    cluster.lose(first)
    finished = cluster.run(second)

    assert (code, finished) == (ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE)
    assert second.event("restore.completed")["step"] == 5
    log = read_log(cluster.log)
    assert_exact(log, twin)
    for step in range(1, 8):
        streams = {
            line["generators"] for lines in log.values() for line in lines if line["step"] == step
        }
        assert len(streams) == 4


def test_c11_an_image_holds_its_own_step_while_training_runs_on_and_the_disk_is_slow(
    make_cluster,
) -> None:
    """CPU parameters, overlapped saves, a slow store and spool: each checkpoint is its step's."""
    steps = 30
    cluster = make_cluster(
        world=1,
        command=MOMENTS,
        env={
            "MOMENTS_STEPS": str(steps),
            "MOMENTS_S": "0.01",
            "LASTGASP_CHECKPOINT__SCHEDULE": "overlapped",
            "LASTGASP_FAILPOINTS": "upload.chunk.before=sleep:0.5,spool.write.before=sleep:0.3",
        },
    )
    node = cluster.node("a")

    code = cluster.run(node)

    assert code == ExitCode.DONE
    weights = {line["step"]: line["weights"] for line in cluster.lines(0)}
    saved = saved_weights(cluster)
    assert 5 in saved
    assert len(saved) >= 3
    assert {step: saved[step] for step in saved if saved[step] != weights[step]} == {}


def test_c14_a_step_is_an_optimizer_step_and_a_group_restarts_from_its_first_batch(
    make_cluster, tmp_path
) -> None:
    """Groups of four batches: the notice in the middle of a group, and in the last short group of
    an epoch, which has one batch."""
    env = {"TOY_ACCUMULATE": "4", "TOY_WORKERS": "0"}
    toy_alone = [sys.executable, str(TOY)]
    twin = run_twin(tmp_path / "twin", world=1, command=toy_alone, **env)
    cluster = make_cluster(world=1, env=env, command=toy_alone)
    node = cluster.node("a")
    codes = []
    for step in (2, 7):  # 25 batches are 7 steps, the last of them of one batch
        setting = "TOY_NOTICE_INSIDE" if step == 2 else "TOY_NOTICE"
        codes.append(cluster.run(node, **{setting: f"{step}:{node.notice_file}"}))
        node.notice_file.unlink()
        assert cluster.lines(0)[-1]["step"] == step
    codes.append(cluster.run(node))

    assert codes == [ExitCode.PREEMPTED_COMMITTED] * 2 + [ExitCode.DONE]
    assert [len(line["ids"]) for line in twin[0]] == [16] * 6 + [1] + [16] * 6 + [1]
    assert_exact(read_log(cluster.log), twin)


def test_c14_killed_in_the_middle_of_a_group_no_batch_is_lost_or_seen_twice(
    make_cluster, tmp_path
) -> None:
    env = {"TOY_ACCUMULATE": "4", "TOY_WORKERS": "0", "LASTGASP_CHECKPOINT__EVERY_STEPS": "3"}
    toy_alone = [sys.executable, str(TOY)]
    twin = run_twin(tmp_path / "twin", world=1, command=toy_alone, **env)
    cluster = make_cluster(world=1, env=env, command=toy_alone)
    node = cluster.node("a")

    code = cluster.run(node, TOY_KILL_INSIDE=f"5:{tmp_path}/killed", TOY_STEP_S="0.1")

    assert code == ExitCode.DONE
    assert node.event("restore.completed")["step"] == 3
    assert_exact(read_log(cluster.log), twin)


on_toy = pytest.mark.xdist_group("given-toy")
on_zoo = pytest.mark.xdist_group("given-zoo")


@on_toy
def test_c01_a_stop_in_the_second_epoch_goes_on_in_that_epochs_order(toy: Lives) -> None:
    assert toy.was_stopped_and_resumed_at_each_step()
    assert_exact(toy.log, toy.twin)
    first = [line["ids"] for line in toy.log[0] if line["epoch"] == 0]
    second = [line["ids"] for line in toy.log[0] if line["epoch"] == 1]
    assert first[7:] != second[7:]


@on_toy
def test_c02_all_generators_come_back_from_data_that_needs_no_pickle(toy: Lives) -> None:
    images = [path for path in (toy.cluster.folder / "store").rglob("*") if "/data/" in str(path)]
    files = [path for path in images if path.is_file()]
    kinds = set()
    for path in files:
        content = path.read_bytes()
        assert b"\x80\x02}" not in content[:8]
        with safetensors.safe_open(path, framework="numpy") as image:
            kinds |= {key for key in image.keys() if key.startswith("lastgasp/rng/")}  # noqa: SIM118

    assert len(files) >= 2 * len(TOY_STOPS)
    assert kinds == {"lastgasp/rng/python", "lastgasp/rng/numpy", "lastgasp/rng/torch"}
    twin = {(rank, line["step"]): line for rank in (0, 1) for line in toy.twin[rank]}
    for rank, lines in toy.log.items():
        for line in lines:
            assert line["generators"] == twin[rank, line["step"]]["generators"]


@on_toy
def test_c13_stops_at_the_border_of_epochs_neither_drop_nor_repeat_an_epoch(toy: Lives) -> None:
    """On the last batch of the second epoch, and on the step after it."""
    assert toy.was_stopped_and_resumed_at_each_step()
    epochs = {line["step"]: line["epoch"] for line in toy.log[0]}
    assert [epochs[step] for step in (13, 14, 26, 27, 39)] == [0, 1, 1, 2, 2]
    assert len(epochs) == 3 * EPOCH
    assert_exact(toy.log, toy.twin)


def test_c13_an_epoch_as_long_as_the_distance_of_saves(make_cluster, tmp_path) -> None:
    """Killed after the save on the very last batch of an epoch; persistent workers."""
    env = {"TOY_PERSISTENT": "1", "LASTGASP_CHECKPOINT__EVERY_STEPS": "25", "TOY_EPOCHS": "3"}
    toy_alone = [sys.executable, str(TOY)]
    twin = run_twin(
        tmp_path / "twin", world=1, command=toy_alone, TOY_PERSISTENT="1", TOY_EPOCHS="3"
    )
    cluster = make_cluster(world=1, env=env, command=toy_alone)
    first, second = cluster.node("a"), cluster.node("b")
    cluster.start(first, TOY_STEP_S="0.05")
    cluster.wait_for_event(first, "checkpoint.committed", step=25)
    cluster.lose(first)

    code = cluster.run(second)

    assert code == ExitCode.DONE
    assert second.event("restore.completed")["step"] == 25
    assert_exact(read_log(cluster.log), twin)
    assert len({line["step"] for line in cluster.lines(0)}) == 3 * 25


@on_zoo
def test_c03_learning_rates_are_equal_at_every_step(zoo: Lives) -> None:
    """Linear decay and warm-up, stopped in the middle, inside the warm-up and on the last step of
    the decay; and every other kind of scheduler."""
    assert zoo.was_stopped_and_resumed_at_each_step()
    assert_same(zoo, "lr_", "lr", "groups")
    assert_unchanged_by_the_restore(zoo, "lr_", "lr", "groups")


@on_zoo
def test_c05_every_optimizer_tensor_keeps_its_dtype_and_bytes(zoo: Lives) -> None:
    assert_unchanged_by_the_restore(zoo, "dtype_", "state", "weights")
    assert_same(zoo, "dtype_")


@on_zoo
def test_c06_an_object_that_appears_with_the_first_step_takes_its_saved_state(zoo: Lives) -> None:
    assert_same(zoo, "scaler")
    told = zoo.restored()[1]["not_restored"]["scaler"]
    assert "not registered yet" in told


@on_zoo
def test_c07_neither_saving_nor_loading_takes_a_hidden_step(zoo: Lives) -> None:
    """Weights, step counts and moments of every optimizer, before the first step of each life."""
    assert_unchanged_by_the_restore(zoo, "opt_", "weights", "state", "groups")
    assert_same(zoo, "opt_")


@on_zoo
def test_c08_tensors_that_share_memory_are_stored_once_and_share_it_again(zoo: Lives) -> None:
    assert_same(zoo, "sharing")
    assert_same(zoo, "tied")
    assert_unchanged_by_the_restore(zoo, "sharing")
    shown = zoo.by_step()[ZOO_STEPS]["sharing"][0]
    assert shown["is_tied"]
    assert shown["is_slice"]
    assert shown["part"][1] == shown["again"][4] == 4 + ZOO_STEPS
    keys = stored_keys(zoo, "tied_model/")
    assert len([key for key in keys if key.endswith("weight")]) == 1
    assert len([key for key in keys if key.endswith(("whole", "part", "again"))]) == 1


@on_zoo
def test_c09_any_layout_comes_back_by_value(zoo: Lives) -> None:
    assert_same(zoo, "layouts")
    assert_unchanged_by_the_restore(zoo, "layouts", "weights")


@on_zoo
def test_c10_state_follows_names_when_layers_and_groups_change_places(zoo: Lives) -> None:
    """The last life builds everything the other way round."""
    assert zoo.restored()[-1]["step"] == ZOO_STOPS[-1]
    assert_unchanged_by_the_restore(zoo, "order", "weights", "state", "groups")
    assert_same(zoo, "order")
    assert_same(zoo, "opt_")


@on_zoo
def test_c16_extra_state_keeps_its_structure_and_types(zoo: Lives) -> None:
    assert_unchanged_by_the_restore(zoo, "extra")
    for prefix in ("extra", "metric", "averaged", "loose", "draws"):
        assert_same(zoo, prefix)
    for life, stop in zip(zoo.restored()[1:], ZOO_STOPS, strict=True):
        assert life["user"] == repr({"best": {"step": stop, "where": (stop, None)}})
        assert life["approximately"] == {}


def stored_keys(lives: Lives, prefix: str) -> list[str]:
    """The entries of one image under a prefix."""
    found = [p for p in (lives.cluster.folder / "store").rglob("*") if "/data/" in str(p)]
    newest = max((p for p in found if p.is_file()), key=lambda p: p.stat().st_mtime)
    with safetensors.safe_open(newest, framework="numpy") as image:
        return [key for key in image.keys() if key.startswith(prefix)]  # noqa: SIM118
