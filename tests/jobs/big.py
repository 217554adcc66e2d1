"""One tensor of BIG_BYTES and next to nothing else.

One JSON line a step: what the tensor holds, seen through a sample. BIG_PAUSE_S lies between two
steps, until there is a file `enough` in TOY_LOG. With BIG_LEAVE the job leaves after the restore.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import trainer_sdk


class Big(nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        content = torch.arange(num_bytes // 4, dtype=torch.int32)
        self.table = nn.Parameter(content, requires_grad=False)

    def sample(self) -> list[int]:
        part = self.table[::1009]
        return [int(part.sum(dtype=torch.int64)), int(self.table[0]), int(self.table[-1])]


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(os.environ["TOY_LOG"])
    model = Big(int(os.environ["BIG_BYTES"]))
    run = trainer_sdk.attach(model=model)
    with open(folder / "rank-0.jsonl", "a", buffering=1) as log:
        receipt = run.restore()
        print(receipt, file=sys.stderr, flush=True)
        log.write(json.dumps({"step": run.global_step, "sample": model.sample()}) + "\n")
        if "BIG_LEAVE" in os.environ:
            run.close()
            return
        while not (folder / "enough").exists():
            model.table.add_(1)
            step = run.global_step + 1
            log.write(json.dumps({"step": step, "sample": model.sample()}) + "\n")
            run.step()
            time.sleep(float(os.environ["BIG_PAUSE_S"]))
        run.finish()


if __name__ == "__main__":
    main()
