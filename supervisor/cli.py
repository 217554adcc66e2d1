"""The command line: verbs to calls. Tables for people, one JSON document with --json, logs on
stderr only, exit codes from `errors.ExitCode`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import click

from supervisor import config as configs
from supervisor.errors import ExitCode, JobFinished, SupervisorError, UsageError

Document = dict[str, Any]
LOOK_LIMIT_S = 60.0


def main() -> NoReturn:
    """Entry point; every way out goes through here."""
    wants_json = "--json" in sys.argv[1 : sys.argv.index("--") if "--" in sys.argv else None]
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except SupervisorError as error:
        _fail(int(error.exit_code), error.error_id, error.message, error.hint, wants_json)
    except click.exceptions.Abort:
        _fail(int(ExitCode.INTERRUPTED), "interrupted", "interrupted", "", wants_json)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"see `{context.command_path} --help`" if context else ""
        _fail(int(ExitCode.USAGE), "usage", error.format_message(), hint, wants_json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(int(ExitCode.TERMINATED))


def _fail(code: int, error_id: str, message: str, hint: str, wants_json: bool) -> NoReturn:
    if wants_json:
        document = {
            "message_type": "exit_error",
            "code": code,
            "error_id": error_id,
            "message": message,
            "hint": hint,
        }
        click.echo(json.dumps(document), err=True)
    else:
        click.echo(f"lastgasp: {message} [{error_id}]", err=True)
        if hint:
            click.echo(f"  what to do: {hint}", err=True)
    sys.exit(code)


def _out(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, default=str))


def _config_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-c", "--config", "path", metavar="FILE", help="Configuration (lastgasp.toml or job.toml)."
    )(function)


def _json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="One JSON document.")(function)


def _load(path: str | None, **flags: Any) -> configs.Config:
    return configs.load(configs.find_file(path), environ=os.environ, flags=flags)


def _help_without_verb(context: click.Context) -> None:
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(int(ExitCode.USAGE))


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.pass_context
def cli(context: click.Context) -> None:
    """Keep a training job alive on machines that are taken away."""
    _help_without_verb(context)


@cli.command()
@_config_option
@click.option("--job-id", help="Overrides [job] id.")
@click.option("--store", "store_url", help="Overrides [store] url.")
@click.option("--allow-fresh", is_flag=True, help="Begin at step 0 if there is no checkpoint.")
@_json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    path: str | None,
    job_id: str | None,
    store_url: str | None,
    allow_fresh: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Launch COMMAND (torchrun ...) under supervision: lastgasp run -c job.toml -- torchrun ..."""
    from supervisor.wiring import RunOptions, Supervised

    if not command:
        raise UsageError(
            "there is no command to run",
            hint="lastgasp run -c job.toml -- torchrun --nproc-per-node=2 train.py",
        )
    flags: dict[str, Any] = {"job.id": job_id, "store.url": store_url}
    if as_json:
        flags["log.format"] = "json"
    config = _load(path, **flags)
    try:
        return Supervised(
            config, RunOptions(argv=command, allow_fresh=allow_fresh), os.environ
        ).run()
    except JobFinished as error:
        click.echo(f"lastgasp: {error.message}; {error.hint}", err=True)
        return int(ExitCode.DONE)


@cli.command()
@_config_option
@_json_option
@click.option("--watch", is_flag=True, help="Show it again each second.")
def status(path: str | None, as_json: bool, watch: bool) -> int:
    """How the job is doing: from its supervisor, else from the store."""
    from supervisor.showing import print_status

    config = _load(path)
    while True:
        document = _status(config)
        if as_json:
            _out(document)
        else:
            print_status(document)
        if not watch:
            return int(ExitCode.DONE)
        time.sleep(1.0)


def _status(config: configs.Config) -> Document:
    from supervisor.control import SupervisorNotRunning, ask

    try:
        document: Document = ask(configs.runtime_dir(config, os.environ), "status")["status"]
    except SupervisorNotRunning:
        return _status_from_store(config)
    return {"is_live": True, **document}


def _status_from_store(config: configs.Config) -> Document:
    from supervisor.commit.reader import describe_commits

    log, deadline = _open_log(config)
    state = log.tail(deadline).state
    commits = describe_commits(state)
    newest = next((commit for commit in reversed(commits) if commit.is_good), None)
    return {
        "is_live": False,
        "note": "no supervisor answers on this node; this is what the store says",
        "job_id": config["job.id"],
        "store": log.store.url,
        "phase": "finished" if state.finished is not None else "unknown",
        "generation": state.gen,
        "last_commit": None
        if newest is None
        else {"seq": newest.seq, "step": newest.step, "generation": newest.gen},
    }


def _open_log(config: configs.Config) -> tuple[Any, Any]:
    from supervisor import wiring
    from supervisor.clock import Deadline, SystemClock

    clock = SystemClock()
    store = wiring.open_store(config, clock, on_retry=lambda error_id: None)
    return wiring.open_log(config, clock, store), Deadline.after(clock, LOOK_LIMIT_S)


@cli.command("ls")
@_config_option
@_json_option
def list_(path: str | None, as_json: bool) -> int:
    """The checkpoints in the store, oldest first."""
    from supervisor.commit.reader import list_commits
    from supervisor.showing import print_commits

    log, deadline = _open_log(_load(path))
    rows = [
        {
            "id": f"{commit.gen}-{commit.step}",
            "seq": commit.seq,
            "generation": commit.gen,
            "step": commit.step,
            "is_bad": not commit.is_good,
            "committed_at": _when(log, commit.seq, deadline),
        }
        for commit in list_commits(log, deadline)
    ]
    if as_json:
        _out({"checkpoints": rows})
    else:
        print_commits(rows, log.store.url)
    return int(ExitCode.DONE)


def _when(log: Any, seq: int, deadline: Any) -> str:
    info = log.store.head(log.keys.log(seq), timeout_s=deadline.remaining_s())
    return datetime.fromtimestamp(info.modified_at, UTC).isoformat(timespec="seconds")


@cli.command()
@_config_option
@_json_option
@click.argument("checkpoint", required=False)
def show(path: str | None, as_json: bool, checkpoint: str | None) -> int:
    """One checkpoint whole: CHECKPOINT is GENERATION-STEP, a step, or the newest."""
    from supervisor import inspecting
    from supervisor.commit.reader import read_manifest
    from supervisor.showing import print_manifest

    log, deadline = _open_log(_load(path))
    commit = inspecting.find_commit(log, checkpoint, deadline)
    document = inspecting.describe(read_manifest(log, commit.seq, deadline), commit)
    if as_json:
        _out(document)
    else:
        print_manifest(document)
    return int(ExitCode.DONE)


@cli.command()
@_config_option
@_json_option
@click.option(
    "--read-data",
    is_flag=False,
    flag_value="100%",
    metavar="SHARE",
    help="Read and hash a share of the bytes, such as 5%; all without a share.",
)
@click.argument("checkpoint", required=False)
def verify(path: str | None, as_json: bool, read_data: str | None, checkpoint: str | None) -> int:
    """Check that checkpoints are whole: the one given, else all."""
    from supervisor import inspecting
    from supervisor.commit.reader import list_commits
    from supervisor.showing import print_verdicts

    share = inspecting.parse_share(read_data) if read_data else 0.0
    log, deadline = _open_log(_load(path))
    commits = (
        [inspecting.find_commit(log, checkpoint, deadline)]
        if checkpoint
        else list(list_commits(log, deadline))
    )
    verdicts = [
        inspecting.verify(log, commit, share=share, deadline=_open_deadline()) for commit in commits
    ]
    if as_json:
        _out(
            {
                "checkpoints": [
                    {
                        "id": f"{v.commit.gen}-{v.commit.step}",
                        "is_whole": not v.problem,
                        "num_shards": v.num_shards,
                        "checked_bytes": v.checked_bytes,
                        "error_id": v.error_id,
                        "problem": v.problem,
                    }
                    for v in verdicts
                ]
            }
        )
    else:
        print_verdicts(verdicts)
    return 1 if any(verdict.problem for verdict in verdicts) else int(ExitCode.DONE)


def _open_deadline() -> Any:
    from supervisor.clock import Deadline, SystemClock

    return Deadline.after(SystemClock(), 3600.0)


def _ask(path: str | None, verb: Any, as_json: bool, **options: Any) -> int:
    from supervisor.control import ask

    answer = ask(configs.runtime_dir(_load(path), os.environ), verb, **options)
    if as_json:
        _out(answer)
    else:
        click.echo(answer["said"])
    return int(ExitCode.DONE) if answer["is_ok"] else int(ExitCode.USAGE)


@cli.command()
@_config_option
@_json_option
@click.option(
    "--delete", "is_real", is_flag=True, help="Delete; without it only show what would be."
)
@click.option("--grace", default="24h", show_default=True, help="Spare what became garbage since.")
@click.option("--limit", default=10_000, show_default=True, help="Objects a run deletes at most.")
def gc(path: str | None, as_json: bool, is_real: bool, grace: str, limit: int) -> int:
    """Delete what no kept checkpoint refers to. Needs delete rights; safe at any time."""
    from supervisor.commit.sweep import sweep
    from supervisor.units import show_size

    log, _ = _open_log(_load(path))
    report = sweep(log, _open_deadline(), grace_s=_seconds(grace), dry_run=not is_real, cap=limit)
    document = {
        "is_dry_run": not is_real,
        "num_objects": len(report.garbage),
        "size_bytes": report.garbage_bytes,
        "unknown_keys": list(report.unknown),
        "is_capped": report.is_capped,
    }
    if as_json:
        _out(document)
    else:
        verb = "deleted" if is_real else "would go with --delete"
        size = show_size(report.garbage_bytes)
        click.echo(f"{len(report.garbage)} objects of {size} {verb}; {report.num_kept} stay")
    return int(ExitCode.DONE)


@cli.command()
@_config_option
@_json_option
@click.option("--reason", default="", help="Kept in the log.")
@click.argument("checkpoint")
def poison(path: str | None, as_json: bool, reason: str, checkpoint: str) -> int:
    """Mark a checkpoint as bad: nothing resumes from it, and nothing deletes it."""
    return _mark(path, as_json, checkpoint, reason, is_bad=True)


@cli.command()
@_config_option
@_json_option
@click.option("--reason", default="", help="Kept in the log.")
@click.argument("checkpoint")
def unpoison(path: str | None, as_json: bool, reason: str, checkpoint: str) -> int:
    """Take back that a checkpoint is bad."""
    return _mark(path, as_json, checkpoint, reason, is_bad=False)


def _mark(path: str | None, as_json: bool, checkpoint: str, reason: str, *, is_bad: bool) -> int:
    from supervisor import inspecting
    from supervisor.commit import rules

    log, deadline = _open_log(_load(path))
    commit = inspecting.find_commit(log, checkpoint, deadline)
    change = rules.poison if is_bad else rules.unpoison
    log.append(change(commit.seq, why=reason, who="command line"), deadline=deadline)
    document = {"id": f"{commit.gen}-{commit.step}", "is_bad": is_bad}
    if as_json:
        _out(document)
    else:
        click.echo(f"{document['id']}: {'set aside' if is_bad else 'good'}")
    return int(ExitCode.DONE)


@cli.command()
@_config_option
@_json_option
def save(path: str | None, as_json: bool) -> int:
    """Take a checkpoint at the next boundary; training goes on."""
    return _ask(path, "save", as_json)


@cli.command()
@_config_option
@_json_option
@click.option("--reason", default="", help="Shown in logs and status.")
@click.option("--deadline", default="120s", show_default=True, help="Time until the end.")
@click.option("--withdraw", is_flag=True, help="Take an earlier notice back.")
def notify(path: str | None, as_json: bool, reason: str, deadline: str, withdraw: bool) -> int:
    """Tell the supervisor that this machine will be taken away."""
    if withdraw:
        return _ask(path, "withdraw", as_json)
    return _ask(path, "notify", as_json, reason=reason, deadline_s=_seconds(deadline))


def _seconds(text: str) -> float:
    from supervisor.units import parse_duration
    from trainer_sdk.protocol.messages import MAX_DEADLINE_S

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not valid; it takes {error}") from error
    if not 0 <= seconds <= MAX_DEADLINE_S:
        raise UsageError(f"{text!r} is not valid; it takes a duration up to 30d")
    return seconds


@cli.command()
@_config_option
@_json_option
@click.option("--deadline", default="120s", show_default=True, help="Lead time to rehearse.")
@click.option("--timeout", default="10m", show_default=True, help="Give up watching after.")
def drill(path: str | None, as_json: bool, deadline: str, timeout: str) -> int:
    """Rehearse: a false notice, the true path, a relaunch; phases against the deadline."""
    from supervisor.drill import rehearse
    from supervisor.showing import print_drill

    directory = configs.runtime_dir(_load(path), os.environ)
    document = rehearse(directory, deadline_s=_seconds(deadline), timeout_s=_seconds(timeout))
    if as_json:
        _out(document)
    else:
        print_drill(document)
    return int(ExitCode.DONE) if document["is_in_time"] else 1


@cli.command()
@_config_option
@_json_option
def doctor(path: str | None, as_json: bool) -> int:
    """Does this node have what a save in an emergency needs?"""
    from supervisor.doctor import examine
    from supervisor.showing import print_findings

    findings = examine(_load(path), os.environ)
    if as_json:
        rows = [
            {"check": f.check, "result": f.result, "detail": f.detail, "mend": f.mend}
            for f in findings
        ]
        _out({"findings": rows})
    else:
        print_findings(findings)
    return 1 if any(finding.result == "fail" for finding in findings) else int(ExitCode.DONE)


@cli.group("config", invoke_without_command=True)
@click.pass_context
def config_group(context: click.Context) -> None:
    """Check, show or describe the configuration."""
    _help_without_verb(context)


@config_group.command("check")
@_config_option
@_json_option
def config_check(path: str | None, as_json: bool) -> int:
    """Find every problem at once."""
    config = _load(path)
    if as_json:
        _out({"is_valid": True, "job_id": config["job.id"]})
    else:
        click.echo(f"{configs.find_file(path) or 'environment'}: good")
    return int(ExitCode.DONE)


@config_group.command("show")
@_config_option
@_json_option
def config_show(path: str | None, as_json: bool) -> int:
    """Every value in force and where it came from."""
    from supervisor.showing import print_settings

    config = _load(path)
    rows = {
        name: {"value": setting.value, "origin": setting.origin}
        for name, setting in config.settings.items()
    }
    if as_json:
        _out(rows)
    else:
        print_settings(config)
    return int(ExitCode.DONE)


@config_group.command("schema")
@_json_option
def config_schema(as_json: bool) -> int:
    """JSON Schema of the file, for editors."""
    del as_json
    _out(configs.json_schema())
    return int(ExitCode.DONE)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@_json_option
def completion(shell: str, as_json: bool) -> int:
    """Shell completion: eval "$(lastgasp completion bash)"."""
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    assert completer is not None
    source = completer(cli, {}, "lastgasp", "_LASTGASP_COMPLETE").source()
    if as_json:
        _out({"shell": shell, "source": source})
    else:
        click.echo(source)
    return int(ExitCode.DONE)


@cli.command()
@_json_option
def version(as_json: bool) -> int:
    """The version of lastgasp, its formats and Python."""
    import platform

    from supervisor.metrics import own_version
    from trainer_sdk.protocol.manifest import PART_FORMAT
    from trainer_sdk.protocol.messages import PROTOCOL_VERSION

    document = {
        "version": own_version(),
        "protocol": PROTOCOL_VERSION,
        "part_format": PART_FORMAT,
        "python": platform.python_version(),
    }
    if as_json:
        _out(document)
    else:
        click.echo(f"lastgasp {document['version']} (Python {document['python']})")
    return int(ExitCode.DONE)
