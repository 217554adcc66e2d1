"""Real supervisors, real torchrun, real processes: what the end-to-end tests are written with.

A `Cluster` is one job's store and log folder; a `Node` is what one machine has: a spool, a runtime
directory, a notice file. Losing a node is killing everything on it and deleting its folders.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
TOY = ROOT / "tests" / "jobs" / "toy.py"
BIN = Path(sys.executable).parent
PATIENCE_S = 90.0


def base_env(log: Path, **more: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LASTGASP_", "TOY_", "PET_", "TORCHELASTIC_"))
    }
    return {
        **env,
        "PATH": f"{BIN}:{env['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOY_LOG": str(log),
        **more,
    }


def read_log(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Each rank's lines in the order written, those of every life."""
    return {
        int(path.stem.split("-")[1]): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank-*.jsonl"))
    }


def run_twin(
    folder: Path, *, world: int, command: list[str] | None = None, **env: str
) -> dict[int, list[dict[str, Any]]]:
    """The same job, never stopped and never supervised."""
    folder.mkdir(parents=True, exist_ok=True)
    command = command or ["torchrun", "--standalone", f"--nproc-per-node={world}", str(TOY)]
    subprocess.run(
        command, env=base_env(folder, **env), check=True, timeout=PATIENCE_S, capture_output=True
    )
    return read_log(folder)


def assert_exact(run: Mapping[int, list[dict[str, Any]]], twin: Mapping[int, Any]) -> None:
    """Every line of every life equals the twin's line of that step, and no step is missing."""
    assert sorted(run) == sorted(twin)
    for rank, lines in run.items():
        expected = {line["step"]: line for line in twin[rank]}
        for line in lines:
            assert line == expected[line["step"]], f"rank {rank}, step {line['step']}"
        assert {line["step"] for line in lines} == set(expected), f"rank {rank}"


@dataclass
class Node:
    """One machine."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0

    @property
    def notice_file(self) -> Path:
        return self.folder / "notice"

    @property
    def stderr(self) -> str:
        """What the supervisor and its job said in the newest start."""
        return (self.folder / f"stderr-{self.num_starts}.log").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The supervisor's structured log of the newest start.

        The job writes to the same file, so an event may begin in the middle of its line.
        """
        found = []
        for line in self.stderr.splitlines():
            at = line.find('{"')
            if at >= 0 and line.endswith("}"):
                try:
                    document = json.loads(line[at:])
                except json.JSONDecodeError:
                    continue  # the job's own braces
                if "event" in document:
                    found.append(document)
        return found

    def event(self, name: str) -> dict[str, Any]:
        """The last event of that name."""
        found = [event for event in self.events() if event["event"] == name]
        assert found, f"no {name}:\n{self.stderr[-6000:]}"
        return found[-1]


@dataclass
class Cluster:
    """One job and its store; nodes come and go."""

    folder: Path
    world: int
    store_url: str = ""
    extra: str = ""
    env: dict[str, str] = field(default_factory=dict)
    # What runs under the supervisor unless a start says otherwise; None: the toy under torchrun.
    command: list[str] | None = None
    # What the supervisor is started through, such as a shell that enters a cgroup first.
    wrapper: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "log").mkdir(parents=True)
        if not self.store_url:
            (self.folder / "store").mkdir()
            self.store_url = f"file://{self.folder}/store"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def node(self, name: str) -> Node:
        folder = self.folder / name
        folder.mkdir()
        (folder / "job.toml").write_text(
            f"""
[job]
id = "toy"
runtime_dir = "{folder}/run"
[store]
url = "{self.store_url}"
[spool]
path = "{folder}/spool"
[checkpoint]
every_steps = 5
[notice]
sources = ["file"]
file = "{folder}/notice"
file_lead = "30s"
poll = "50ms"
[restart]
backoff = "100ms"
[status]
listen = "127.0.0.1:0"
[log]
format = "json"
{self.extra}
"""
        )
        self.nodes.append(Node(folder))
        return self.nodes[-1]

    def start(self, node: Node, *flags: str, command: list[str] | None = None, **env: str) -> None:
        """`lastgasp run` on this node."""
        node.num_starts += 1
        command = (
            command or self.command or ["torchrun", f"--nproc-per-node={self.world}", str(TOY)]
        )
        full = {**base_env(self.log, **self.env), **env}
        supervisor = ["lastgasp", "run", "-c", str(node.folder / "job.toml"), *flags]
        with open(node.folder / f"stderr-{node.num_starts}.log", "wb") as stderr:
            node.process = subprocess.Popen(
                [*self.wrapper, *supervisor, "--", *command],
                env=full,
                stderr=stderr,
                stdout=stderr,
                start_new_session=True,
            )

    def finish(self, node: Node, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the supervisor to exit; its exit code."""
        assert node.process is not None
        try:
            return node.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{node.stderr[-6000:]}") from None

    def run(self, node: Node, *flags: str, command: list[str] | None = None, **env: str) -> int:
        """Start and wait."""
        self.start(node, *flags, command=command, **env)
        return self.finish(node)

    def cli(self, node: Node, *arguments: str, check: bool = True) -> Any:
        """A verb with --json on this node."""
        verb, *rest = arguments
        done = subprocess.run(
            ["lastgasp", verb, "-c", str(node.folder / "job.toml"), "--json", *rest],
            env={**base_env(self.log), **self.env},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stderr
        return json.loads(done.stdout or done.stderr.splitlines()[-1])

    def wait_for_step(self, step: int, *, rank: int = 0) -> None:
        """Until this rank has logged a step at or past `step`."""
        self.wait(lambda: any(line["step"] >= step for line in self.lines(rank)), f"step {step}")

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.log / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, is_so: Any, what: str, timeout_s: float = PATIENCE_S) -> None:
        give_up_at = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < give_up_at, f"waited in vain for {what}"
            time.sleep(0.02)

    def wait_for_event(self, node: Node, name: str, **fields: Any) -> dict[str, Any]:
        """Until the supervisor logged this event with these fields."""

        def found() -> list[dict[str, Any]]:
            return [
                event
                for event in node.events()
                if event["event"] == name
                and all(event.get(key) == value for key, value in fields.items())
            ]

        self.wait(lambda: bool(found()) or self._has_ended(node), f"event {name} {fields}")
        assert found(), f"no {name} {fields}:\n{node.stderr[-6000:]}"
        return found()[-1]

    def _has_ended(self, node: Node) -> bool:
        return node.process is not None and node.process.poll() is not None

    # ------------------------------------------------------------ violence

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of this cluster: `trainer` (ranks), `torchrun`, or `all` of the job."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TOY_LOG") != str(self.log):
                    continue
                command = " ".join(process.cmdline())
                is_supervisor = "lastgasp" in command
                is_torchrun = "torchrun" in command and not is_supervisor
                is_trainer = not is_supervisor and not is_torchrun
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            kind = {"torchrun": is_torchrun, "trainer": is_trainer, "all": not is_supervisor}
            if kind[name]:
                found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The ranks' main processes, without their loader workers."""
        trainers = self.processes("trainer")
        pids = {process.pid for process in trainers}
        return [process for process in trainers if process.ppid() not in pids]

    def kill(self, *processes: psutil.Process) -> None:
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def kill_supervisor(self, node: Node) -> None:
        assert node.process is not None
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()

    def kill_everything(self, node: Node) -> None:
        """Power cut as far as processes go."""
        self.kill_supervisor(node)
        while left := self.processes("all"):
            self.kill(*left)
            psutil.wait_procs(left, timeout=1)

    def lose(self, node: Node) -> None:
        """The machine is gone, and its disk with it."""
        if node.process is not None and node.process.poll() is None:
            self.kill_everything(node)
        shutil.rmtree(node.folder)

    def close(self) -> None:
        """End whatever a failed test left."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("TOY_LOG") == str(self.log):
                    process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        for node in self.nodes:
            if node.process is not None:
                node.process.wait()


SIZED = ROOT / "tests" / "jobs" / "sized.py"
SIZED_COMMAND = [sys.executable, str(SIZED)]


def assert_sized(run: Mapping[int, list[dict[str, Any]]], *, last_step: int) -> None:
    """Every line of the sized job has the values of its step, and no step is missing."""
    for rank, lines in run.items():
        for line in lines:
            assert line["values"] == [line["step"]] * 2, f"rank {rank}: {line}"
        assert {line["step"] for line in lines} == set(range(1, last_step + 1)), f"rank {rank}"
