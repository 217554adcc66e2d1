"""The job that exactness is proved on: run by torchrun, with or without a supervisor.

Small, but with everything that goes wrong on a resume: dropout, BatchNorm, decoupled weight decay,
warm-up and cosine, a shuffled prime number of samples, worker processes, and augmentation that
draws from the torch, numpy and python generators. Each rank appends one JSON line a step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainer_sdk
from trainer_sdk.data import ResumableSampler

SAMPLES = 97
WIDTH = 16


class Augmented(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Every sample is disturbed by all three generators, wherever it is fetched."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.features = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.targets = torch.randn(SAMPLES, 1, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        noise = torch.randn(WIDTH) * 0.01 + float(np.random.rand()) * 0.01 + random.random() * 0.01
        return index, self.features[index] + noise, self.targets[index]


def build() -> nn.Module:
    # Eight channels of four: the last batch of an epoch has one sample, on which a BatchNorm over
    # plain features refuses to train.
    return nn.Sequential(
        nn.Linear(WIDTH, 32),
        nn.Unflatten(1, (8, 4)),
        nn.BatchNorm1d(8),
        nn.Flatten(),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(32, 1),
    )


def warm_up_and_cosine(step: int) -> float:
    return min(1.0, (step + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(step, 60) / 60))


def digest(*parts: Any) -> str:
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            sha.update(part.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(part).encode())
    return sha.hexdigest()[:16]


def optimizer_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    parts: list[Any] = []
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            parts += [name, key, value]
    return digest(*parts)


def generators_digest() -> str:
    _, words, *rest = np.random.get_state()
    return digest(torch.get_rng_state(), random.getstate(), words.tobytes(), rest)


def in_groups(loader: Any, size: int) -> Iterator[list[Any]]:
    """The batches that make one optimizer step together; the last group may be short."""
    group = []
    for batch in loader:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def draw_some(rank: int) -> None:
    """A different amount of random numbers on each rank."""
    for _ in range(rank):
        torch.rand(1)
        np.random.rand()
        random.random()


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1234 + rank)
    epochs = int(os.environ.get("TOY_EPOCHS", "2"))
    pause_s = float(os.environ.get("TOY_STEP_S", "0"))
    log_path = Path(os.environ["TOY_LOG"]) / f"rank-{rank}.jsonl"

    bare = build()
    model = nn.parallel.DistributedDataParallel(bare) if world > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine)
    dataset = Augmented()
    workers = int(os.environ.get("TOY_WORKERS", "2"))
    accumulate = int(os.environ.get("TOY_ACCUMULATE", "1"))
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=ResumableSampler(dataset, seed=7),
        num_workers=workers,
        persistent_workers="TOY_PERSISTENT" in os.environ,
        multiprocessing_context=os.environ.get("TOY_CONTEXT"),
    )
    with (
        trainer_sdk.attach(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, dataloader=loader
        ) as run,
        open(log_path, "a", buffering=1) as log,
    ):
        receipt = run.restore()
        print(f"rank {rank}: {receipt}", file=sys.stderr, flush=True)
        for epoch in run.epochs(epochs):
            for group in in_groups(loader, accumulate):
                optimizer.zero_grad()
                ids, loss = [], 0.0
                for number, (some, features, targets) in enumerate(group):
                    part = nn.functional.mse_loss(model(features), targets) / accumulate
                    part.backward()
                    ids += some.tolist()
                    loss += part.item()
                    if notice := os.environ.get("TOY_NOTICE_INSIDE"):
                        maybe_give_notice(notice, run.global_step + 1, pause_s=0.5 * (number == 1))
                    if fault := os.environ.get("TOY_KILL_INSIDE"):
                        at_step, flag = fault.split(":")
                        if number == 1:
                            maybe_fail(f"kill:0:{at_step}:{flag}", rank, run.global_step + 1)
                if "TOY_DRAWS" in os.environ:
                    draw_some(rank)
                optimizer.step()
                scheduler.step()
                time.sleep(pause_s)
                line = {
                    "step": run.global_step + 1,
                    "epoch": epoch,
                    "ids": ids,
                    "loss": loss.hex(),
                    "lr": scheduler.get_last_lr()[0].hex(),
                    "weights": digest(*bare.state_dict().values()),
                    "optimizer": optimizer_digest(bare, optimizer),
                    "generators": generators_digest(),
                }
                log.write(json.dumps(line) + "\n")
                if fault := os.environ.get("TOY_FAULT"):
                    maybe_fail(fault, rank, line["step"])
                if notice := os.environ.get("TOY_NOTICE"):
                    maybe_give_notice(notice, line["step"])
                run.step()
    if world > 1:
        dist.destroy_process_group()


def maybe_fail(fault: str, rank: int, step: int) -> None:
    """`exit:RANK:STEP` or `kill:RANK:STEP:FLAGFILE`: the latter only while the file is absent."""
    kind, at_rank, at_step, *rest = fault.split(":")
    if rank != int(at_rank) or step != int(at_step):
        return
    if rest:
        flag = Path(rest[0])
        if flag.exists():
            return
        flag.touch()
    if kind == "kill":
        os.kill(os.getpid(), 9)
    sys.exit(3)


def maybe_give_notice(notice: str, step: int, *, pause_s: float = 1.5) -> None:
    """`STEP[,STEP…]:FILE`: have the watched file appear, so that this very boundary is the last."""
    steps, path = notice.split(":")
    if str(step) in steps.split(",") and pause_s:
        Path(path).touch()
        time.sleep(pause_s)


if __name__ == "__main__":
    main()
