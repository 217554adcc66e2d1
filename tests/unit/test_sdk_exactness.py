"""An interrupted run continued equals the run that was never stopped, line for line."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import trainer_sdk
from tests.fakes import FakeSupervisor, wait_until
from trainer_sdk.data import ResumableSampler
from trainer_sdk.protocol.messages import Order
from trainer_sdk.receipt import Receipt
from trainer_sdk.rng import capture_rng

NUM_SAMPLES = 37
BATCH = 5
STEPS_AN_EPOCH = 8
NUM_EPOCHS = 3


class AugmentedNumbers(Dataset[Any]):
    """Samples augmented from all three generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        assert type(index) is int
        noise = torch.rand(4) + float(numpy.random.rand()) + random.random()
        return index, noise + index / NUM_SAMPLES


@dataclass
class Life:
    """What one life of the training script logged."""

    lines: list[tuple[Any, ...]]
    receipt: Receipt
    is_preempted: bool


def new_loader(num_workers: int, *, persistent: bool = False) -> DataLoader[Any]:
    return DataLoader(
        AugmentedNumbers(),
        batch_size=BATCH,
        sampler=ResumableSampler(NUM_SAMPLES, seed=3),
        num_workers=num_workers,
        persistent_workers=persistent,
    )


def live(
    supervisor: FakeSupervisor, loader: Any, *, stop_at: int = 0, num_epochs: int = NUM_EPOCHS
) -> Life:
    """Train until the end, or until the supervisor stops it at a step."""
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run = trainer_sdk.attach(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=loader
    )
    supervisor.on_boundary = lambda _, step: [
        Order(action="stage", step=step),
        *([Order(action="exit", step=step)] if step == stop_at else []),
    ]
    life = Life([], Receipt(), False)
    try:
        with run:
            life.receipt = run.restore()
            for epoch in run.epochs(num_epochs):
                for indices, batch in loader:
                    loss = model(batch).pow(2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    life.lines.append(
                        (
                            run.global_step + 1,
                            epoch,
                            indices.tolist(),
                            loss.item().hex(),
                            scheduler.get_last_lr()[0],
                            digest(model, optimizer),
                        )
                    )
                    if stop_at and run.global_step + 1 == stop_at:
                        assert supervisor.page is not None
                        supervisor.page.ask_hold(0)
                    run.step()
                life.lines.append(("end of epoch", epoch, torch.rand(1).item()))
    except trainer_sdk.Preempted:
        life.is_preempted = True
        wait_until(lambda: stop_at in supervisor.images)  # told by another thread
    return life


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    content = hashlib.sha256()
    for tensor in model.state_dict().values():
        content.update(tensor.numpy().tobytes())
    for state in optimizer.state.values():
        for tensor in state.values():
            content.update(tensor.numpy().tobytes())
    for state in capture_rng().values():
        content.update(state)
    return content.hexdigest()[:16]


@pytest.fixture
def new_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[FakeSupervisor] = []

    def make(*, resume: bytes | None = None, step: int = 0) -> FakeSupervisor:
        if made:
            made[-1].dispose()
        supervisor = FakeSupervisor(tmp_path / "socket")
        if resume is not None:
            supervisor.resume_images, supervisor.resume_step = [resume], step
            supervisor.generation = 2
        made.append(supervisor)
        return supervisor.start()

    monkeypatch.setenv("LASTGASP_SOCKET", str(tmp_path / "socket"))
    yield make
    if made:
        made[-1].dispose()


@pytest.mark.parametrize(
    ("num_workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["0", "2", "2 kept"]
)
@pytest.mark.parametrize("stop_at", [11, STEPS_AN_EPOCH, STEPS_AN_EPOCH + 1])
def test_interrupted_run_continues_exactly(
    new_supervisor: Any, num_workers: int, persistent: bool, stop_at: int
) -> None:
    """C01, C03, C13: in the middle of an epoch, on its last batch, and one step after it."""
    twin = live(new_supervisor(), new_loader(num_workers, persistent=persistent))
    first = new_supervisor()
    before = live(first, new_loader(num_workers, persistent=persistent), stop_at=stop_at)
    second = new_supervisor(resume=first.images[stop_at], step=stop_at)
    after = live(second, new_loader(num_workers, persistent=persistent))

    assert before.is_preempted
    assert before.lines + after.lines == twin.lines
    assert not after.receipt.approximately
    assert not after.receipt.not_restored


@pytest.mark.parametrize("num_workers", [0, 2])
def test_run_interrupted_again_and_again_in_one_epoch_continues_exactly(
    new_supervisor: Any, num_workers: int
) -> None:
    """The position counts from the epoch's beginning, not from the last restore."""
    twin = live(new_supervisor(), new_loader(num_workers))
    lines: list[tuple[Any, ...]] = []
    image, step = None, 0
    for stop_at in (10, 11, 14, 0):
        supervisor = new_supervisor(resume=image, step=step)
        lines += live(supervisor, new_loader(num_workers), stop_at=stop_at).lines
        image, step = supervisor.images.get(stop_at), stop_at

    assert lines == twin.lines
