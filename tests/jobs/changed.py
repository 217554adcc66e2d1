"""A small job whose script changes between two lives: CHANGE says how.

One JSON line a step, as the toy writes them.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainer_sdk
from tests.jobs.toy import Augmented, digest, maybe_give_notice
from trainer_sdk.data import ResumableSampler

CHANGES = os.environ.get("CHANGE", "").split(",")


def build() -> nn.Sequential:
    hidden = 24 if "shape" in CHANGES else 16
    model = nn.Sequential()
    model.add_module("body", nn.Linear(16, hidden))
    model.add_module("decoder" if "rename" in CHANGES else "head", nn.Linear(hidden, 1))
    if "more layers" in CHANGES:
        model.add_module("tail", nn.Linear(1, 1))
    if "sparse buffer" in CHANGES:
        model.register_buffer("mask", torch.eye(3).to_sparse())
    return model.double().float() if "dtype" not in CHANGES else model.bfloat16()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    body, head = ([*layer.parameters()] for layer in (model[0], model[1]))
    groups: list[dict[str, Any]] = [{"params": body, "lr": 0.02}, {"params": head, "lr": 0.01}]
    if "group order" in CHANGES:
        groups.reverse()
    if "other groups" in CHANGES:
        groups = [{"params": [*body, head[0]], "lr": 0.02}, {"params": [head[1]], "lr": 0.01}]
    if "more layers" in CHANGES:
        groups[1]["params"] += model[2].parameters()
    kind = torch.optim.SGD if "optimizer" in CHANGES else torch.optim.AdamW
    return kind(groups, lr=0.1)


def build_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    if "scheduler" in CHANGES:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def main() -> None:
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    folder = Path(os.environ["TOY_LOG"])
    model = build()
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    dataset = Augmented()
    size = 50 if "dataset" in CHANGES else len(dataset)
    batch = 6 if "batch size" in CHANGES else 4
    workers = 1 if "workers" in CHANGES else 0
    sampler = ResumableSampler(size, seed=1 if "seed" in CHANGES else 0)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    run = trainer_sdk.attach(**objects, scheduler=scheduler)
    if "attach twice" in CHANGES:
        trainer_sdk.attach(**objects)
    if "attach twice and catch" in CHANGES:
        try:
            trainer_sdk.attach(**objects)
        except trainer_sdk.UsageError as error:
            print(f"caught: {error}", file=sys.stderr)
    if "no restore" not in CHANGES:
        print(run.restore(), file=sys.stderr, flush=True)
    if "late object" in CHANGES:
        run.register(model=nn.Linear(2, 2))
    with run, open(folder / "rank-0.jsonl", "a", buffering=1) as log:
        for epoch in run.epochs(2):
            for ids, features, targets in loader:
                loss = nn.functional.mse_loss(model(features.to(model[0].weight.dtype)), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step = run.global_step + 1
                line = {
                    "step": step,
                    "epoch": epoch,
                    "ids": ids.tolist(),
                    "loss": loss.item().hex(),
                    "lr": [rate.hex() for rate in scheduler.get_last_lr()],
                    "weights": digest(*model.state_dict().values()),
                }
                log.write(json.dumps(line) + "\n")
                time.sleep(float(os.environ.get("TOY_STEP_S", "0")))
                if notice := os.environ.get("TOY_NOTICE"):
                    maybe_give_notice(notice, step)
                run.step()
                if "restore twice" in CHANGES:
                    run.restore()


if __name__ == "__main__":
    main()
