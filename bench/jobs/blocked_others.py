"""How long the alternatives hold training up for the same bytes, beside a warm memcpy."""

import json
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

NUM_TENSORS = 24
TRIALS = int(os.environ["BENCH_TRIALS"])
PATH = os.path.join(os.environ["BENCH_FOLDER"], "others")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began_at = time.perf_counter()
    result = call()
    return time.perf_counter() - began_at, result


def main() -> None:
    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", os.environ["BENCH_PORT"]
    dist.init_process_group("gloo", rank=0, world_size=1)
    numel = int(float(os.environ["BENCH_GIB"]) * 2**30 / 4 / NUM_TENSORS)
    state = {f"t{index}": torch.zeros(numel) for index in range(NUM_TENSORS)}
    copies = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=True,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    taken: dict[str, list[float]] = {}

    def note(name: str, seconds: float, trial: int) -> None:
        if trial:  # the first trial touches memory for the first time
            taken.setdefault(name, []).append(seconds)

    for trial in range(TRIALS + 1):
        seconds, _ = timed(lambda: [copies[name].copy_(t) for name, t in state.items()])
        note("memcpy", seconds, trial)
        seconds, _ = timed(lambda: torch.save(state, PATH))
        note("torch.save", seconds, trial)
        os.unlink(PATH)
        seconds, future = timed(lambda: dcp.async_save(state, checkpoint_id=PATH))
        note("dcp.async_save", seconds, trial)
        future.result()
        shutil.rmtree(PATH)
        seconds, response = timed(
            lambda: dcp.async_save(state, checkpoint_id=PATH, async_stager=stager)
        )
        time.sleep(float(os.environ["BENCH_FORWARD_S"]))
        waited_s, _ = timed(response.staging_completion.result)
        note("dcp.async_save, staging thread", seconds + waited_s, trial)
        response.upload_completion.result()
        shutil.rmtree(PATH)
    print("RESULT " + json.dumps(taken), flush=True)
    os._exit(0)  # DCP's threads are not joined


if __name__ == "__main__":
    main()
