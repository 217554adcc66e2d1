"""`make demo`: a spot machine is taken away in mid-epoch, and the job goes on where it stood.

Runs the job of train.py three times with real torchrun: never stopped; on "node A" until a notice
with a deadline of 20 s; and on "node B", after A's folders were deleted. Then it compares lines.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BIN = Path(sys.executable).parent
WORLD = 2
NOTICE_AT = 30
DEADLINE_S = 20
LIMIT_S = 120.0

console = Console(highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=["file", "s3"], default="file")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="lastgasp-demo-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        store_url, env = open_store(arguments.store, scratch, stack)
        return run(scratch, store_url, env)


def open_store(kind: str, scratch: Path, stack: ExitStack) -> tuple[str, dict[str, str]]:
    """A folder, or a real S3 server on loopback."""
    if kind == "file":
        (scratch / "store").mkdir()
        return f"file://{scratch}/store", {}
    sys.path.insert(0, str(ROOT))
    from tests.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

    say("starting an S3 server on loopback")
    server = S3Server()
    server.start()
    stack.callback(server.stop)
    server.make_bucket("demo-bucket")
    return "s3://demo-bucket/runs", {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AWS_REGION": REGION,
        "LASTGASP_STORE__ENDPOINT_URL": server.endpoint_url,
        "LASTGASP_STORE__ADDRESSING_STYLE": "path",
    }


def run(scratch: Path, store_url: str, env: dict[str, str]) -> int:
    began_at = time.monotonic()
    say(f"the job: {WORLD} ranks, a small transformer on the text in docs/demo/text.txt")
    say("1 of 3  without interruption, for comparison")
    twin = scratch / "twin"
    launch(["torchrun", "--standalone"], twin, env).wait(LIMIT_S)
    twin_lines = read(twin)
    say(f"        {len(twin_lines[0])} steps done")

    say(f"2 of 3  node A, store {store_url}: a notice will come after step {NOTICE_AT}")
    log = scratch / "log"
    node_a = make_node(scratch / "node-a", store_url)
    process = supervise(node_a, log, {**env, "DEMO_PACE_S": "0.05"})
    wait_for_step(log, NOTICE_AT, process)
    notified_at = time.monotonic()
    command(node_a, env, "notify", "--deadline", f"{DEADLINE_S}s", "--reason", "demo")
    code = process.wait(LIMIT_S)
    stopped_at = len(read(log)[0])
    say(
        f"        notice with {DEADLINE_S} s to live; step {stopped_at} committed and node A left "
        f"{time.monotonic() - notified_at:.1f} s later (exit code {code})"
    )
    if code != 75:
        return fail(node_a, "node A should have exited with 75 (preempted, committed)")
    print_events(node_a)
    shutil.rmtree(node_a)
    say("        node A's folders are deleted: only the store is left")

    say("3 of 3  node B: a new machine, the same command")
    node_b = make_node(scratch / "node-b", store_url)
    code = supervise(node_b, log, env).wait(LIMIT_S)
    if code != 0:
        return fail(node_b, f"node B exited with {code}")
    console.print(receipt_of(node_b))
    verdict = compare(read(log), twin_lines, stopped_at)
    say(f"took {time.monotonic() - began_at:.0f} s")
    if verdict:
        print_next_commands()
    return 0 if verdict else 1


# ---------------------------------------------------------------- processes


def launch(prefix: list[str], log: Path, env: dict[str, str], **options: Any) -> Any:
    log.mkdir(parents=True, exist_ok=True)
    full = {
        **os.environ,
        **env,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DEMO_LOG": str(log),
    }
    options.setdefault("stderr", subprocess.DEVNULL)
    return subprocess.Popen(
        [*prefix, f"--nproc-per-node={WORLD}", str(HERE / "train.py")], env=full, **options
    )


def make_node(folder: Path, store_url: str) -> Path:
    folder.mkdir()
    (folder / "job.toml").write_text(
        f"""[job]
id = "demo"
runtime_dir = "{folder}/run"
[store]
url = "{store_url}"
[spool]
path = "{folder}/spool"
[checkpoint]
every_steps = 20
[status]
listen = "off"
[log]
format = "json"
"""
    )
    return folder


def supervise(node: Path, log: Path, env: dict[str, str]) -> Any:
    prefix = ["lastgasp", "run", "-c", str(node / "job.toml"), "--", "torchrun"]
    with open(node / "output", "wb") as out:
        return launch(prefix, log, env, stderr=out, stdout=out)


def command(node: Path, env: dict[str, str], verb: str, *arguments: str) -> None:
    subprocess.run(
        [str(BIN / "lastgasp"), verb, "-c", str(node / "job.toml"), *arguments],
        env={**os.environ, **env},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def wait_for_step(log: Path, step: int, process: Any) -> None:
    """Show how training goes until it is there."""
    give_up_at = time.monotonic() + LIMIT_S
    with console.status("        starting torchrun …") as shown:
        while time.monotonic() < give_up_at and process.poll() is None:
            done = max((len(lines) for lines in read(log).values()), default=0)
            shown.update(f"        step {done}" if done else "        starting torchrun …")
            if done >= step:
                return
            time.sleep(0.05)
    raise SystemExit(f"the job did not come to step {step}")


# ---------------------------------------------------------------- what came of it


def read(log: Path) -> dict[int, list[dict[str, Any]]]:
    """Each rank's whole lines."""
    found = {}
    for rank in range(WORLD):
        path = log / f"rank-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        found[rank] = [json.loads(line) for line in lines]
    return found


def print_events(node: Path) -> None:
    """The supervisor's own account of the evacuation."""
    wanted = ("notice.received", "evacuation.decided", "checkpoint.staged", "checkpoint.spooled")
    wanted += ("checkpoint.committed", "evacuation.completed")
    events = [json.loads(line) for line in output(node) if line.startswith('{"job_id"')]
    start = next(i for i, event in enumerate(events) if event["event"] == "notice.received")
    for event in events[start:]:
        if event["event"] in wanted:
            hidden = ("event", "job_id", "level", "ts")
            facts = " ".join(f"{k}={v}" for k, v in event.items() if k not in hidden)
            line = f"        {event['ts'][11:23]} {event['event']:22} {facts}"
            console.print(line, style="dim", soft_wrap=True)


def output(node: Path) -> list[str]:
    return (node / "output").read_text(errors="replace").splitlines()


def receipt_of(node: Path) -> str:
    lines = output(node)
    start = next(i for i, line in enumerate(lines) if line.startswith("restored step"))
    end = start + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    return "\n".join(f"        {line}" for line in lines[start:end])


def compare(run: dict[int, Any], twin: dict[int, Any], stopped_at: int) -> bool:
    """Every line of every rank; the table shows rank 0 around the interruption."""
    table = Table("step", "epoch", "node", "samples", "loss", "weights", "the same")
    num_equal = num_lines = 0
    is_whole = all(
        [line["step"] for line in run[rank]] == [line["step"] for line in twin[rank]]
        for rank in twin
    )
    for rank in twin:
        expected = {line["step"]: line for line in twin[rank]}
        for line in run[rank]:
            is_equal = line == expected.get(line["step"])
            num_lines += 1
            num_equal += is_equal
            step = line["step"]
            if rank == 0 and (abs(step - stopped_at - 0.5) < 4 or not is_equal):
                samples = ",".join(map(str, line["samples"][:3])) + ",…"
                node = "A" if step <= stopped_at else "B"
                loss = f"{float.fromhex(line['loss']):.6f}"
                verdict = "every bit" if is_equal else "NO"
                row = (str(step), str(line["epoch"]), node, samples, loss, line["weights"])
                table.add_row(*row, verdict)
    console.print(table)
    say(
        f"{num_equal} of {num_lines} lines (step, epoch, sample ids, loss, learning rate, weights; "
        f"{WORLD} ranks) equal the uninterrupted run"
    )
    return num_equal == num_lines and is_whole and num_lines > 0


def print_next_commands() -> None:
    say(
        """
Next, with your own script (README.md, "Quick start"):
  lastgasp config check -c job.toml
  lastgasp doctor -c job.toml
  lastgasp run -c job.toml -- torchrun --nproc-per-node=8 train.py
  lastgasp drill -c job.toml --deadline 30s     # in another terminal: rehearse the fire"""
    )


def fail(node: Path, why: str) -> int:
    console.print(f"[bold]{why}[/bold]; its output ends:")
    console.print("\n".join(output(node)[-30:]), markup=False)
    return 1


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
