"""Trains until it is told to stop; tells on a line of its own when its first step was done."""

import os
import time

import torch
from torch import distributed as dist

import trainer_sdk

if int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
numel = int(float(os.environ["BENCH_GIB"]) * 2**30 / 4 / 3 / 8 / int(os.environ["WORLD_SIZE"]))
model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(numel)) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
with trainer_sdk.attach(model=model, optimizer=optimizer) as run:
    run.restore()
    ready_at = time.time()
    optimizer.step()
    if os.environ["RANK"] == "0":
        print(f"FIRST {time.time()} {ready_at}", flush=True)
    run.step()
    while "BENCH_ONE_STEP" not in os.environ:
        time.sleep(0.2)
        optimizer.step()
        run.step()
