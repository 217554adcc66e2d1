"""A job with awkward moments: long phases inside a step, evaluation, start-up, handlers, threads.

One JSON line a step as the toy writes them; `where` in TOY_LOG holds one line for every phase that
is entered. Environment, all optional:
MOMENTS_S        seconds spent in each awkward moment of every step
MOMENTS_STEPS    steps in all
MOMENTS_STARTUP  seconds between restore and the first step
MOMENTS_LONG     `STEP:SECONDS`, a step that takes long
MOMENTS_EVAL     `STEP:SECONDS[:poll]`, an evaluation after that step
MOMENTS_HANDLERS `before` or `after`: SIGTERM and SIGUSR1 handlers of the script's own
MOMENTS_IN       `thread` or `child`: where the training runs; `both`: a child attaches as well
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainer_sdk
from tests.jobs.toy import digest, optimizer_digest

FOLDER = Path(os.environ["TOY_LOG"])
PAUSE_S = float(os.environ.get("MOMENTS_S", "0"))
STEPS = int(os.environ.get("MOMENTS_STEPS", "40"))


def enter(phase: str, seconds: float = PAUSE_S) -> None:
    """Say where training is, and stay there."""
    with open(FOLDER / "where", "a") as file:
        file.write(phase + "\n")
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:  # pure Python, so that a handler could run at any instruction
        sum(range(100))


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        enter("backward")
        return gradient


class SlowAdam(torch.optim.AdamW):
    """Half of the parameters are updated when it pauses."""

    def step(self, closure: Any = None) -> None:
        groups = self.param_groups
        for group in groups:
            self.param_groups = [group]
            super().step()
            enter("optimizer")
        self.param_groups = groups


class SlowHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        enter("logging")  # with the handler's lock held


class Cycle:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        enter("gc")


def import_something() -> None:
    """A module whose body takes its time, with its import lock held."""
    source = FOLDER / "slow_module.py"
    source.write_text("from tests.jobs.moments import enter\nenter('import')\n")
    spec = importlib.util.spec_from_file_location("slow_module", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slow_module"] = module
    spec.loader.exec_module(module)
    del sys.modules["slow_module"]


def on_signal(number: int, frame: Any) -> None:
    with open(FOLDER / "signals", "a") as file:
        file.write(f"{os.getpid()} {signal.Signals(number).name}\n")


def install_handlers() -> None:
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR1, on_signal)


def show_handlers(when: str) -> None:
    names = [str(getattr(signal.getsignal(n), "__name__", signal.getsignal(n))) for n in (15, 10)]
    with open(FOLDER / "handlers", "a") as file:
        file.write(f"{when} {' '.join(names)}\n")


def attach_in_children(objects: dict[str, Any]) -> None:
    """What happens when processes of the rank attach too: forked ones and others."""

    def attach_anyway() -> None:
        try:
            trainer_sdk.attach(**objects)
        except trainer_sdk.UsageError as error:
            print(f"forked child: {error}", file=sys.stderr, flush=True)

    forked = multiprocessing.get_context("fork").Process(target=attach_anyway)
    forked.start()
    forked.join()
    code = "import torch, trainer_sdk; trainer_sdk.attach(m=torch.nn.Linear(1, 1)).restore()"
    subprocess.run([sys.executable, "-c", code], check=False)
    unaware = {name: value for name, value in os.environ.items() if name != "LASTGASP_RUN_PID"}
    subprocess.run([sys.executable, "-c", code], check=False, env=unaware)


def at_step(setting: str, step: int) -> list[str]:
    """What follows `STEP:` in a setting, if this is the step."""
    at, *rest = os.environ.get(setting, "-1").split(":")
    return rest if int(at) == step else []


def evaluate(run: Any, model: nn.Module, seconds: float, *, is_polling: bool) -> None:
    model.eval()
    enter("evaluation", 0)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        time.sleep(0.05)
        if is_polling:
            run.poll()
    model.train()
    enter("evaluated", 0)


def train() -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = SlowAdam(groups, lr=0.01)
    logger = logging.getLogger("moments")
    logger.addHandler(SlowHandler())
    objects = {"model": model, "optimizer": optimizer}
    if os.environ.get("MOMENTS_HANDLERS") == "before":
        install_handlers()
    show_handlers("before")
    with trainer_sdk.attach(**objects) as run, open(FOLDER / "rank-0.jsonl", "a", 1) as log:
        if os.environ.get("MOMENTS_HANDLERS") == "after":
            install_handlers()
        print(run.restore(), file=sys.stderr, flush=True)
        enter("start-up", float(os.environ.get("MOMENTS_STARTUP", "0")))
        if os.environ.get("MOMENTS_IN") == "both":
            attach_in_children(objects)
        while run.global_step < STEPS:
            step = run.global_step + 1
            if long := at_step("MOMENTS_LONG", step):
                enter("long step", float(long[0]))
            if PAUSE_S:
                import_something()
                logger.warning("step")
                Cycle()
                gc.collect()
            optimizer.zero_grad()
            loss = SlowBackward.apply(model(torch.randn(5, 4))).pow(2).mean()
            loss.backward()
            optimizer.step()
            line = {
                "step": step,
                "loss": loss.item().hex(),
                "weights": digest(*model.state_dict().values()),
                "optimizer": optimizer_digest(model, optimizer),
            }
            log.write(json.dumps(line) + "\n")
            run.step()
            if evaluation := at_step("MOMENTS_EVAL", step):
                evaluate(run, model, float(evaluation[0]), is_polling=len(evaluation) > 1)
    show_handlers("after")


def main() -> None:
    torch.set_num_threads(1)
    where = os.environ.get("MOMENTS_IN")
    if where == "thread":
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    elif where == "child" and "MOMENTS_CHILD" not in os.environ:
        code = subprocess.run(
            [sys.executable, __file__], env={**os.environ, "MOMENTS_CHILD": "1"}, check=False
        ).returncode
        sys.exit(code)
    else:
        train()


if __name__ == "__main__":
    main()
