"""A run and its supervisor: saves, holds, polls, the end, lost and found supervisors."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

import trainer_sdk
from tests.fakes import FakeSupervisor, wait_until
from tests.unit.test_sdk_state import open_images
from trainer_sdk.data import ResumableSampler
from trainer_sdk.errors import RejectedBySupervisor, RestoreError, UsageError
from trainer_sdk.protocol.control_page import RankState
from trainer_sdk.protocol.messages import (
    Boundary,
    Finished,
    Hello,
    Note,
    Order,
    Planned,
    Replan,
    Restored,
    RestoreFailed,
    SaveRequested,
    Sealed,
    Unsealed,
)
from trainer_sdk.replicas import content_digest, prove_replicas, replica_digest
from trainer_sdk.run import Run

STAGE = Order(action="stage", step=0, slot=1)
EXIT = Order(action="exit", step=0)


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSupervisor]:
    monkeypatch.setenv("LASTGASP_SOCKET", str(tmp_path / "socket"))
    supervisor = FakeSupervisor(tmp_path / "socket")
    yield supervisor
    supervisor.dispose()


class Script:
    """A small training script in one object."""

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run = trainer_sdk.attach(model=self.model, optimizer=self.optimizer, **more)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).pow(2).mean().backward()

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.backward()
            self.optimizer.step()
            self.run.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


@pytest.fixture
def script(supervisor: FakeSupervisor) -> Iterator[Script]:
    """A script that has restored (nothing), made one step and has slots."""
    script = begin(supervisor)
    yield script
    script.run.close()


def begin(supervisor: FakeSupervisor, **more: Any) -> Script:
    supervisor.start()
    script = Script(**more)
    script.run.restore()
    script.step()
    supervisor.wait_for_slots()
    wait_until(lambda: script.run._session._link.inbox.num_slot_grants > 0)
    return script


def assert_holds(image: bytes, weights: dict[str, torch.Tensor]) -> None:
    saved = open_images([image])
    for name, weight in weights.items():
        assert torch.equal(saved.tensor(f"model/{name}"), weight)
    saved.close()


# ---------------------------------------------------------------- saves


def test_save_is_staged_at_exactly_the_step_asked_for(
    supervisor: FakeSupervisor, script: Script
) -> None:
    supervisor.page.ask_save(3, 0)
    script.step()
    assert not supervisor.all_of(Sealed)
    script.step()
    weights = script.weights()
    script.step()

    sealed = supervisor.wait_for(Sealed)
    assert (sealed.step, sealed.slot, sealed.is_final) == (3, 0, False)
    assert 0 < sealed.blocked_s <= sealed.staged_s
    assert supervisor.page.read_seal(0).step == 3
    assert_holds(supervisor.images[3], weights)
    script.step()
    assert len(supervisor.all_of(Sealed)) == 1


def test_save_of_a_passed_boundary_is_refused_once(
    supervisor: FakeSupervisor, script: Script
) -> None:
    script.step(3)
    supervisor.page.ask_save(2, 0)
    script.step(2)

    assert supervisor.wait_for(Unsealed).step == 2
    assert "was passed" in supervisor.all_of(Unsealed)[0].reason
    assert len(supervisor.all_of(Unsealed)) == 1


def test_save_without_slots_says_why(supervisor: FakeSupervisor) -> None:
    supervisor.gives_slots = False
    supervisor.start()
    script = Script()
    script.run.restore()
    supervisor.page.ask_save(2, 0)
    script.step(3)

    assert "no slots" in supervisor.wait_for(Unsealed).reason
    script.run.close()


def test_state_that_outgrows_its_plan_gets_larger_slots_and_is_saved_all_the_same(
    supervisor: FakeSupervisor, script: Script
) -> None:
    script.run.user.notes = ["x" * 1000] * 100
    supervisor.page.ask_save(2, 0)
    script.step()

    assert supervisor.wait_for(Planned, count=2).slot_bytes > 100_000
    assert supervisor.wait_for(Sealed).step == 2
    saved = open_images([supervisor.images[2]])
    assert saved.state["user"] == {"notes": ["x" * 1000] * 100}


def test_object_registered_later_is_in_the_next_image(
    supervisor: FakeSupervisor, script: Script
) -> None:
    script.run.register(table=torch.arange(20_000))
    script.step()
    supervisor.wait_for(Planned, count=2)
    wait_until(lambda: script.run._session._link.inbox.num_slot_grants == 2)
    supervisor.page.ask_save(4, 0)
    script.step(2)

    supervisor.wait_for(Sealed)
    saved = open_images([supervisor.images[4]])
    assert torch.equal(saved.tensor("table/tensor"), torch.arange(20_000))


def test_slot_in_a_file_holds_the_same_bytes(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    supervisor.staging = "disk"
    script = begin(supervisor)
    supervisor.page.ask_save(2, 0)
    script.step()
    weights = script.weights()

    supervisor.wait_for(Sealed)
    assert_holds(supervisor.images[2], weights)
    script.run.close()


def test_script_may_ask_for_a_save(supervisor: FakeSupervisor, script: Script) -> None:
    script.run.save()

    supervisor.wait_for(SaveRequested)


# ---------------------------------------------------------------- overlapped saves


def overlapped(supervisor: FakeSupervisor) -> Script:
    supervisor.schedule = "overlapped"
    return begin(supervisor)


def test_overlapped_save_holds_the_boundarys_state(supervisor: FakeSupervisor) -> None:
    """C11: training runs on at once, and the image is still that of the step asked for."""
    script = overlapped(supervisor)
    for step in range(2, 12):
        supervisor.page.ask_save(step, step % 2)
        script.step()
        weights = script.weights()
        script.backward()
        script.optimizer.step()
        supervisor.wait_for(Sealed, count=step - 1)
        assert_holds(supervisor.images[step], weights)

    assert not supervisor.all_of(Unsealed)
    script.run.close()


@pytest.mark.parametrize("how", ["data", "in place", "one element"])
def test_change_before_the_optimizers_step_drops_the_image(
    supervisor: FakeSupervisor, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = overlapped(supervisor)
    supervisor.page.ask_save(2, 0)
    script.step(2)
    supervisor.wait_for(Sealed)
    may_copy = hold_copies(monkeypatch)
    supervisor.page.ask_save(4, 0)
    script.step()
    with torch.no_grad():
        target = script.model[0].weight.data if how == "data" else script.model[0].weight
        if how == "one element":
            target[3, 1] += 1  # between the sampled ones: only the version counter shows it
        else:
            target.mul_(0.5)
    may_copy.set()
    script.step()
    supervisor.page.ask_save(6, 1)
    script.step()
    weights = script.weights()
    script.model[0].weight.data.mul_(0.5)
    script.step()

    assert "model/0.weight changed" in supervisor.wait_for(Unsealed).reason
    assert supervisor.page.read_seal(0) is None
    assert supervisor.wait_for(Note).event == "overlap.abandoned"
    supervisor.wait_for(Sealed, count=2)
    assert_holds(supervisor.images[6], weights)
    script.run.close()


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make background copies start late, as on a busy machine."""
    may_copy = threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "trainer-sdk-copy":
            run = thread.run
            thread.run = lambda: (may_copy.wait(10), run())  # type: ignore[method-assign]
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    return may_copy


# ---------------------------------------------------------------- holds


def test_hold_stages_and_leaves(supervisor: FakeSupervisor, script: Script) -> None:
    supervisor.orders.append([STAGE, EXIT])
    supervisor.page.ask_hold(0)

    with pytest.raises(trainer_sdk.Preempted) as caught:
        script.step()

    assert caught.value.code == 0
    assert not isinstance(caught.value, Exception)
    assert supervisor.wait_for(Sealed).step == 2
    assert_holds(supervisor.images[2], script.weights())


def test_hold_proceeds_to_the_agreed_boundary(supervisor: FakeSupervisor, script: Script) -> None:
    supervisor.orders.append([Order(action="proceed", step=5)])
    supervisor.orders.append([STAGE, EXIT])
    supervisor.page.ask_hold(0)

    with pytest.raises(trainer_sdk.Preempted):
        script.step(10)

    assert [message.step for message in supervisor.all_of(Boundary)] == [2, 5]
    assert list(supervisor.images) == [5]


def test_withdrawn_notice_lets_training_go_on(supervisor: FakeSupervisor, script: Script) -> None:
    def withdraw(fake: FakeSupervisor, step: int) -> list[Order]:
        fake.page.clear_hold()
        return [STAGE, Order(action="resume", step=step)]

    supervisor.on_boundary = withdraw
    supervisor.page.ask_hold(0)
    script.step(4)

    assert script.run.global_step == 5
    assert supervisor.page.rank_state == RankState.TRAINING
    assert len(supervisor.all_of(Boundary)) == 1


def test_hold_without_an_order_ends_by_itself(supervisor: FakeSupervisor) -> None:
    supervisor.hold_timeout_s = 0.2
    script = begin(supervisor)
    supervisor.page.ask_hold(0)
    script.step(5)

    assert len(supervisor.all_of(Boundary)) == 1
    script.run.close()


def test_hold_at_the_very_first_step_waits_for_its_slots(supervisor: FakeSupervisor) -> None:
    supervisor.start()
    script = Script()
    script.run.restore()
    supervisor.orders.append([STAGE, EXIT])
    supervisor.page.ask_hold(0)

    with pytest.raises(trainer_sdk.Preempted):
        script.step()

    assert list(supervisor.images) == [1]


def test_supervisor_lost_during_a_hold_does_not_stop_training(
    supervisor: FakeSupervisor, script: Script
) -> None:
    def die(fake: FakeSupervisor, _: int) -> list[Order]:
        threading.Thread(target=fake.stop).start()
        return []

    supervisor.on_boundary = die
    supervisor.page.ask_hold(0)
    script.step(3)

    assert script.run.global_step == 4


# ---------------------------------------------------------------- poll


def test_poll_after_a_boundary_stops_with_that_boundarys_state(
    supervisor: FakeSupervisor, script: Script
) -> None:
    """C60: a long evaluation."""
    script.step()
    script.model.eval()
    supervisor.orders.append([STAGE, EXIT])
    supervisor.page.ask_hold(0)

    with pytest.raises(trainer_sdk.Preempted):
        script.run.poll()

    saved = open_images([supervisor.images[2]])
    assert saved.state["is_polling"] is True


def test_poll_after_a_change_only_shows_life(supervisor: FakeSupervisor, script: Script) -> None:
    script.model.eval()
    script.backward()
    script.optimizer.step()
    supervisor.page.ask_hold(0)
    before = supervisor.page.beat_ns
    script.run.poll()

    assert supervisor.page.beat_ns > before
    assert not supervisor.all_of(Boundary)


def test_poll_with_a_batch_in_hand_only_shows_life(supervisor: FakeSupervisor) -> None:
    loader = DataLoader(torch.zeros(9, 4), batch_size=2, sampler=ResumableSampler(9))
    script = begin(supervisor, dataloader=loader)
    batches = iter(loader)
    next(batches)
    script.step()
    next(batches)
    supervisor.page.ask_hold(0)
    script.run.poll()

    assert not supervisor.all_of(Boundary)
    script.run.close()


# ---------------------------------------------------------------- the end


def test_finish_saves_the_final_state_and_waits_for_the_record(
    supervisor: FakeSupervisor, script: Script
) -> None:
    supervisor.orders.append([STAGE])
    script.run.finish()
    script.run.finish()

    assert supervisor.wait_for(Sealed).is_final
    assert supervisor.wait_for(Finished).step == 1
    assert_holds(supervisor.images[1], script.weights())
    with pytest.raises(UsageError, match="finished"):
        script.run.step()


def test_finish_without_any_training_records_no_end(
    supervisor: FakeSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has no place for a checkpoint of step 0."""
    supervisor.start()
    with trainer_sdk.attach(model=nn.Linear(2, 2)) as run:
        run.restore()

    assert not supervisor.all_of(Sealed)
    assert "nothing was trained" in caplog.text


def test_training_without_run_step_is_told_at_the_end(supervisor: FakeSupervisor) -> None:
    """Otherwise all of it would be lost in silence."""
    supervisor.start()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainer_sdk.attach(model=model, optimizer=optimizer)
    run.restore()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    with pytest.raises(UsageError, match="never called"):
        run.finish()

    assert not supervisor.all_of(Sealed)


def test_finish_with_a_lost_supervisor_only_warns(
    supervisor: FakeSupervisor, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor.stop()
    wait_until(lambda: not script.run._session._link.inbox.is_connected)
    script.run.finish()

    assert "end of training is not recorded" in caplog.text


def test_error_in_the_script_does_not_finish_the_run(supervisor: FakeSupervisor) -> None:
    supervisor.start()
    run = Script().run
    run.restore()
    with pytest.raises(ZeroDivisionError), run:
        _ = 1 / 0

    assert not supervisor.all_of(Boundary)
    Script().run.close()  # the process is free for another run


# ---------------------------------------------------------------- lost and found


def test_new_supervisor_gets_page_and_slots_back(
    supervisor: FakeSupervisor, script: Script, tmp_path: Path
) -> None:
    supervisor.page.ask_save(2, 0)
    script.step()
    supervisor.wait_for(Sealed)
    supervisor.stop()
    wait_until(lambda: not script.run._session._link.inbox.is_connected)
    script.step(3)
    successor = FakeSupervisor(tmp_path / "socket").start()
    wait_until(lambda: script.run._session._link.inbox.is_connected)

    hello, num_fds = successor.hellos[-1]
    assert (num_fds, hello.num_slots, hello.has_restored, hello.generation) == (3, 2, True, 1)
    assert hello.incarnation == supervisor.hellos[0][0].incarnation
    assert successor.page.step == 5
    assert successor.image_in_slot(0) == supervisor.images[2]
    successor.page.ask_save(7, 1)
    script.step(2)
    assert successor.wait_for(Sealed).step == 7
    script.run.close()
    successor.dispose()


def test_slots_are_asked_for_again_when_the_wish_was_lost(
    supervisor: FakeSupervisor, tmp_path: Path
) -> None:
    supervisor.gives_slots = False
    supervisor.start()
    script = Script()
    script.run.restore()
    script.step()
    supervisor.wait_for(Planned)
    supervisor.stop()
    successor = FakeSupervisor(tmp_path / "socket").start()
    wait_until(lambda: script.run._session._link.inbox.num_connections == 2)
    script.step()
    successor.wait_for(Planned)
    script.run.close()
    successor.dispose()


def test_forked_child_does_not_hold_the_connection(
    supervisor: FakeSupervisor, script: Script
) -> None:
    link = script.run._session._link
    loader = DataLoader(SocketCounter(link._sock.fileno()), num_workers=1, batch_size=None)

    assert list(loader) == [False]
    assert link._sock.fileno() >= 0


class SocketCounter(torch.utils.data.Dataset[bool]):
    """Whether a descriptor is open, seen from a worker."""

    def __init__(self, fd: int) -> None:
        self.target = os.readlink(f"/proc/self/fd/{fd}")

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return self.target in links


def test_restore_waits_for_a_supervisor_that_starts_late(supervisor: FakeSupervisor) -> None:
    script = Script()
    timer = threading.Timer(0.3, supervisor.start)
    timer.start()
    receipt = script.run.restore()

    assert receipt.is_fresh
    assert supervisor.wait_for(Restored).step == 0
    timer.join()
    script.run.close()


def test_rejected_rank_is_told_so(supervisor: FakeSupervisor) -> None:
    supervisor.rejects = True
    supervisor.start()
    script = Script()

    with pytest.raises(RejectedBySupervisor, match="another generation"):
        script.run.restore()

    script.run.close()


def test_bad_image_is_reported_and_stops_the_script(supervisor: FakeSupervisor) -> None:
    supervisor.resume_images = [b"\0" * 9000]
    supervisor.start()
    script = Script()

    with pytest.raises(RestoreError, match="image 0"):
        script.run.restore()

    assert supervisor.wait_for(RestoreFailed).is_checkpoint_bad
    script.run.close()


def test_script_that_does_not_fit_is_reported_with_names(
    supervisor: FakeSupervisor, script: Script, tmp_path: Path
) -> None:
    supervisor.page.ask_save(2, 0)
    script.step()
    supervisor.wait_for(Sealed)
    script.run.close()
    supervisor.stop()
    successor = FakeSupervisor(tmp_path / "socket")
    successor.resume_images, successor.resume_step = [supervisor.images[2]], 2
    successor.start()
    run = trainer_sdk.attach(model=nn.Sequential(nn.Linear(4, 32)))

    with pytest.raises(RestoreError, match=r"model/0\.weight: shape \[32, 4\] here, \[64, 4\]"):
        run.restore()

    failed = successor.wait_for(RestoreFailed)
    assert "model/1.bias" in failed.reason
    assert not failed.is_checkpoint_bad
    run.close()
    successor.dispose()


def test_replan_is_answered_at_the_next_save(supervisor: FakeSupervisor, script: Script) -> None:
    supervisor.send(Replan(reason="replicas differ"))
    wait_until(lambda: bool(script.run._session._link.inbox.replan_reason))
    supervisor.page.ask_save(2, 0)
    script.step()

    assert supervisor.wait_for(Sealed).step == 2


# ---------------------------------------------------------------- use and misuse


def test_step_before_restore_is_an_error(supervisor: FakeSupervisor) -> None:
    supervisor.start()
    script = Script()

    with pytest.raises(UsageError, match="restore"):
        script.run.step()

    script.run.restore()
    with pytest.raises(UsageError, match="once"):
        script.run.restore()
    script.run.close()


def test_second_attach_is_an_error(script: Script) -> None:
    with pytest.raises(UsageError, match="a run already"):
        trainer_sdk.attach(model=nn.Linear(1, 1))


def test_attach_works_from_a_side_thread(supervisor: FakeSupervisor) -> None:
    """C67."""
    supervisor.orders.append([STAGE])
    thread = threading.Thread(target=lambda: begin(supervisor).run.finish())
    thread.start()
    thread.join(20)

    assert supervisor.wait_for(Finished).step == 1


def test_without_a_supervisor_it_only_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LASTGASP_SOCKET", raising=False)
    before = threading.active_count()
    with caplog.at_level(logging.WARNING, "trainer_sdk"), Script().run as run:
        assert run.restore().is_fresh
        epochs = [epoch for epoch in run.epochs(2) if run.step() is None]
        run.poll()
        run.save()

    assert epochs == [0, 1]
    assert run.global_step == 2
    assert threading.active_count() == before
    assert caplog.text.count("no supervisor") == 1


def test_importing_does_not_import_torch() -> None:
    code = (
        "import sys, trainer_sdk; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_preempted_ends_a_process_quietly() -> None:
    code = "import trainer_sdk\ntry: raise trainer_sdk.Preempted(3)\nexcept Exception: print('no')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_user_values_by_attribute_and_item(script: Script) -> None:
    user = script.run.user
    user.best = 0.5
    user["a/b"] = [1, (2,)]

    assert user["best"] == 0.5
    assert dict(user) == {"best": 0.5, "a/b": [1, (2,)]}
    with pytest.raises(trainer_sdk.UnsupportedState, match="user/model"):
        user.model = script.model
    with pytest.raises(AttributeError, match="nothing"):
        _ = user.nothing


def test_descriptors_and_threads_are_given_back(supervisor: FakeSupervisor) -> None:
    supervisor.orders.append([STAGE])
    script = begin(supervisor)
    script.run.finish()
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        again = Script()
        again.run.restore()
        again.run.close()
    names = [thread.name for thread in threading.enumerate()]

    assert not [name for name in names if name.startswith("trainer-sdk")]
    assert len(os.listdir("/proc/self/fd")) <= fds + 1


# ---------------------------------------------------------------- replicas


def prove(digests: list[dict[str, str]], *, timeout_s: float = 5.0) -> list[Any]:
    """What each rank concludes, ranks as threads on one store."""
    store, results = HashStore(), [None] * len(digests)

    def work(rank: int) -> None:
        try:
            results[rank] = prove_replicas(
                store, digests[rank], rank=rank, world_size=len(digests), timeout_s=timeout_s
            )
        except TimeoutError as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(digests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_equal_tensors_are_proven_and_others_stay_own() -> None:
    same = {"a": "1", "b": "2"}

    assert prove([same, same]) == [(frozenset("ab"), frozenset())] * 2
    assert prove([same, {"a": "1", "b": "3", "c": "4"}]) == [(frozenset("a"), frozenset("bc"))] * 2


def test_missing_rank_ends_the_proof_in_time() -> None:
    with pytest.raises(TimeoutError):
        prove_replicas(HashStore(), {"a": "1"}, rank=0, world_size=2, timeout_s=0.2)


def test_digests_see_every_bit() -> None:
    one = torch.zeros(100_000)
    other = one.clone()
    other[77_777] = -0.0

    assert content_digest(one) == content_digest(one.clone())
    assert content_digest(one) != content_digest(other)
    assert content_digest(one) != content_digest(one.reshape(1000, 100))


def test_sample_finds_a_difference_sooner_or_later(script: Script) -> None:
    registry = script.run._registry
    live = list(registry.snapshot().tensors.values())
    names = [each.name for each in live]
    before = [replica_digest(live, step=step, names=names) for step in range(300)]
    script.model[0].weight.data[3, 3] += 1
    after = [replica_digest(live, step=step, names=names) for step in range(300)]

    assert before != after
    assert replica_digest(live, step=1, names=names) != replica_digest(live, step=1, names=["a"])


def test_hello_names_the_rank(supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    supervisor.start()
    run: Run = Script().run
    run.restore()
    hello = supervisor.wait_for(Hello)
    run.close()

    assert (hello.rank, hello.world_size, hello.local_rank, hello.restart_count) == (3, 4, 1, 2)


def test_a_process_with_a_thousand_open_files_reaches_its_supervisor(
    supervisor: FakeSupervisor,
) -> None:
    """select() refuses descriptors past 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    supervisor.start()
    try:
        with trainer_sdk.attach(model=torch.nn.Linear(2, 2)) as run:
            receipt = run.restore()
            run.close()
    finally:
        for fd in files:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert receipt.is_fresh


def test_a_loader_that_cannot_be_continued_is_told_before_it_matters(
    supervisor: FakeSupervisor,
) -> None:
    """In the supervisor's log and status from the first start, not after the first resume."""
    supervisor.start()
    loader = DataLoader([1, 2, 3], shuffle=True)  # type: ignore[arg-type]
    with trainer_sdk.attach(model=nn.Linear(2, 2), dataloader=loader) as run:
        run.restore()
        note = supervisor.wait_for(Note)
        run.close()

    assert "ResumableSampler" in note.text


def test_a_forked_child_neither_holds_the_run_nor_writes_its_page(
    supervisor: FakeSupervisor, script: Script
) -> None:
    """The page is shared memory: a child that went on counting would move the rank's boundary."""
    before = supervisor.page.step
    pid = os.fork()
    if pid == 0:
        told = "nothing"
        try:
            script.run.step()
            trainer_sdk.attach(model=script.model)
        except UsageError as error:
            told = error.message
        os._exit(0 if "this rank's run is in process" in told else 1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert supervisor.page.step == before
    script.step()
    assert supervisor.page.step == before + 1


def test_attach_is_possible_again_after_the_end(supervisor: FakeSupervisor) -> None:
    script = begin(supervisor)
    script.run.close()

    assert "LASTGASP_RUN_PID" not in os.environ
    trainer_sdk.attach(model=script.model).close()
