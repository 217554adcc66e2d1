"""Two ranks under DistributedDataParallel: replicas are stored once, per-rank state by its rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FakeSupervisor
from tests.unit.test_sdk_state import open_images
from trainer_sdk.protocol.messages import Order, Restored, Sealed

WORLD_SIZE = 2
STOP_AT = 4

SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
import trainer_sdk
from trainer_sdk.data import ResumableSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10 + rank)
model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Linear(300, 130))
model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.arange(37 * 4.0).reshape(37, 4) / 100
loader = DataLoader(data, batch_size=4, sampler=ResumableSampler(37, seed=1))
with trainer_sdk.attach(model=model, optimizer=optimizer, dataloader=loader) as run:
    run.restore()
    for epoch in run.epochs(2):
        for batch in loader:
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            line = [run.global_step + 1, epoch, batch.flatten().tolist(), loss.item().hex()]
            line.append([float(t.double().sum()).hex() for t in model.state_dict().values()])
            print(json.dumps(line), flush=True)
            run.step()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(folder: Path, supervisors: list[FakeSupervisor]) -> list[list[Any]]:
    """One life of all ranks; returns their lines."""
    port, processes = free_port(), []
    for rank, supervisor in enumerate(supervisors):
        supervisor.start()
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "LASTGASP_SOCKET": str(supervisor.path),
        }
        output = (folder / f"out{rank}").open("w")
        command = [sys.executable, "-c", SCRIPT]
        processes.append((subprocess.Popen(command, env=environment, stdout=output), output))
    try:
        assert [process.wait(60) for process, _ in processes] == [0] * WORLD_SIZE
    finally:
        for process, output in processes:
            process.kill()
            process.wait()
            output.close()
    return [
        [json.loads(line) for line in (folder / f"out{rank}").read_text().splitlines()]
        for rank in range(WORLD_SIZE)
    ]


def new_supervisors(folder: Path, *, stop_at: int = 0) -> list[FakeSupervisor]:
    def answer(_: FakeSupervisor, step: int) -> list[Order]:
        if stop_at and step < stop_at:
            return [Order(action="proceed", step=stop_at)]
        stage = Order(action="stage", step=step)
        return [stage, Order(action="exit", step=step)] if stop_at else [stage]

    supervisors = [FakeSupervisor(folder / f"socket{rank}") for rank in range(WORLD_SIZE)]
    for supervisor in supervisors:
        supervisor.on_boundary = answer
        supervisor.holds_from_start = bool(stop_at)
    return supervisors


@pytest.mark.timeout(180)
def test_ranks_store_replicas_once_and_continue_exactly(tmp_path: Path) -> None:
    twin = new_supervisors(tmp_path)
    expected = launch(tmp_path, twin)
    first = new_supervisors(tmp_path, stop_at=STOP_AT)
    before = launch(tmp_path, first)
    images = [supervisor.images[STOP_AT] for supervisor in first]
    second = new_supervisors(tmp_path)
    for supervisor in second:
        supervisor.resume_images, supervisor.resume_step = images, STOP_AT
    after = launch(tmp_path, second)

    assert [len(lines) for lines in before] == [STOP_AT] * WORLD_SIZE
    for rank in range(WORLD_SIZE):
        assert before[rank] + after[rank] == expected[rank]
        receipt = json.loads(second[rank].wait_for(Restored).receipt)
        assert not receipt["approximately"]
        assert not receipt["not_restored"]
    assert len({supervisor.wait_for(Sealed).replicas for supervisor in first}) == 1
    saved = open_images(images)
    assert saved.is_replica("model/3.weight")
    assert saved.is_replica("optimizer/state/3.weight/exp_avg")
    assert not saved.is_replica("model/1.running_mean")
    sizes = [len(image) for image in images]
    assert max(sizes) - min(sizes) < 80_000
    for supervisor in (*twin, *first, *second):
        supervisor.dispose()
