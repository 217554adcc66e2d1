"""Under a supervisor: a state of BENCH_GIB that trains until the job has been drilled."""

import os
import time

import torch
from torch import distributed as dist

import trainer_sdk

ranks = int(os.environ["WORLD_SIZE"])
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(int(os.environ["RANK"]))
numel = int(float(os.environ["BENCH_GIB"]) * 2**30 / 4 / 3 / 8 / ranks)
model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(numel)) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
with trainer_sdk.attach(model=model, optimizer=optimizer) as run:
    receipt = run.restore()
    if int(os.environ["RANK"]) == 0:
        print(f"RESTORED {receipt.seconds:.3f}", flush=True)
    while run.global_step < int(os.environ["BENCH_STEPS"]):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        time.sleep(0.5)
        run.step()
