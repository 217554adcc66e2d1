"""Under a supervisor: how long saves hold training up, beside a warm memcpy of the same state.

The state is BENCH_GIB of parameters and Adam's two moments. Each BENCH_EVERY steps there is a save;
forward and backward are a sleep, in which an overlapped save may copy.
"""

import json
import os
import time

import torch

import trainer_sdk

NUM_LAYERS = 8
EVERY = int(os.environ["BENCH_EVERY"])
TRIALS = int(os.environ["BENCH_TRIALS"])
NUMEL = int(float(os.environ["BENCH_GIB"]) * 2**30 / 4 / 3 / NUM_LAYERS)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(NUM_LAYERS)]
        )


def backward(model: Model) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def copy_all(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> float:
    began_at = time.perf_counter()
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began_at


def main() -> None:
    torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    result: dict[str, list[float]] = {"memcpy": [], "blocked": [], "after": [], "plain": []}
    with trainer_sdk.attach(model=model, optimizer=optimizer) as run:
        run.restore()
        for _ in range(2):
            backward(model)
            optimizer.step()
            run.step()
            time.sleep(2.0)  # pages of the slots are faulted in meanwhile
        tensors = [parameter.detach() for parameter in model.parameters()]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if value.numel() > 1]
        copies = [torch.zeros_like(tensor) for tensor in tensors]
        while len(result["blocked"]) < TRIALS + 1:
            is_save = (run.global_step + 1) % EVERY == 0
            memcpy_s = copy_all(tensors, copies)
            began_at = time.perf_counter()
            run.step()
            blocked_s = time.perf_counter() - began_at
            backward(model)
            time.sleep(1.0)
            began_at = time.perf_counter()
            optimizer.step()
            optimizer_s = time.perf_counter() - began_at
            if is_save:
                result["memcpy"].append(memcpy_s)
                result["blocked"].append(blocked_s)
            result["after" if is_save else "plain"].append(optimizer_s)
            time.sleep(1.0)
        # The first save of a life touches pages and caches for the first time.
        cut = {name: values[1:] for name, values in result.items()}
        print("RESULT " + json.dumps(cut), flush=True)


if __name__ == "__main__":
    main()
