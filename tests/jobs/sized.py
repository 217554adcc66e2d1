"""A job with a state of a chosen size, one rank or several: for what depends on bytes and time.

Every step adds one to a parameter of SIZED_MIB and logs (step, first and last value), so that what
was restored can be told from the log. Runs under torchrun or plain python.

Environment: SIZED_MIB, SIZED_STEPS, SIZED_STEP_S (seconds), SIZED_SAVE_AT (comma separated steps at
which `run.save()` is called just before), SIZED_EXIT ("STEP:CODE"; code -N is a signal).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import trainer_sdk


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    size = int(float(os.environ.get("SIZED_MIB", "1")) * (1 << 20)) // 4
    last_step = int(os.environ.get("SIZED_STEPS", "20"))
    pause_s = float(os.environ.get("SIZED_STEP_S", "0.05"))
    save_at = {int(step) for step in os.environ.get("SIZED_SAVE_AT", "").split(",") if step}
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = -torch.ones(size)
    log_path = Path(os.environ["TOY_LOG"]) / f"rank-{rank}.jsonl"
    with (
        trainer_sdk.attach(model=model, optimizer=optimizer) as run,
        open(log_path, "a", buffering=1) as log,
    ):
        print(f"rank {rank}: {run.restore()}", file=sys.stderr, flush=True)
        while run.global_step < last_step:
            optimizer.step()
            values = [float(model.weight[0]), float(model.weight[-1])]
            log.write(json.dumps({"step": run.global_step + 1, "values": values}) + "\n")
            maybe_exit(run.global_step + 1)
            if run.global_step + 1 in save_at:
                run.save()
            time.sleep(pause_s)
            run.step()


def maybe_exit(step: int) -> None:
    at_step, _, code = os.environ.get("SIZED_EXIT", "0:0").partition(":")
    if step != int(at_step):
        return
    if int(code) < 0:
        os.kill(os.getpid(), -int(code))
        time.sleep(60)
    sys.exit(int(code))


if __name__ == "__main__":
    main()
