"""Tables for people, on stdout. Nothing here decides or computes anything."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from supervisor.config import Config
from supervisor.doctor import Finding
from supervisor.inspecting import Verdict
from supervisor.units import show_duration, show_size


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def print_status(document: dict[str, Any]) -> None:
    """The status document as a few lines."""
    console = _console()
    if not document.get("is_live"):
        console.print(document["note"])
    rows: list[tuple[str, Any]] = [
        ("job", document["job_id"]),
        ("store", document["store"]),
        ("phase", document["phase"]),
        ("generation", document["generation"]),
    ]
    if document.get("is_live"):
        rows += [
            ("step", document["step"]),
            ("would lose now", _steps(document["would_lose_steps"])),
            ("emergency needs", show_duration(document["predicted_emergency_s"])),
        ]
    commit = document.get("last_commit")
    if commit:
        rows.append(("last commit", f"step {commit['step']}"))
    else:
        rows.append(("last commit", "none in this life"))
    notice = document.get("notice")
    if notice:
        rows.append(("notice", f"{notice['source']}, {notice['deadline_in_s']:.1f} s left"))
    for upload in document.get("uploads", []):
        done, total = show_size(upload["uploaded_bytes"]), show_size(upload["total_bytes"])
        rows.append(("uploading", f"{done} of {total}"))
    if document.get("last_error"):
        error = document["last_error"]
        rows.append(
            ("last error", f"{error['event']}: {error.get('reason') or error.get('detail', '')}")
        )
    table = _table("", "")
    table.show_header = False
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table)


def _steps(count: int | None) -> str:
    return "-" if count is None else f"{count} steps"


def print_commits(rows: list[dict[str, Any]], url: str) -> None:
    """The list of checkpoints."""
    console = _console()
    if not rows:
        console.print(f"no checkpoint at {url}")
        return
    table = _table("id", "step", "generation", "committed (UTC)", "state")
    for row in rows:
        state = "set aside" if row["is_bad"] else "good"
        table.add_row(
            row["id"], str(row["step"]), str(row["generation"]), row["committed_at"][:19], state
        )
    console.print(table)


def print_manifest(document: dict[str, Any]) -> None:
    """One checkpoint."""
    console = _console()
    console.print(
        f"checkpoint {document['id']}: step {document['step']}, world size "
        f"{document['world_size']}, {show_size(document['size_bytes'])}"
        + (", set aside" if document["is_bad"] else "")
    )
    table = _table("rank", "name", "size", "sha256", "key")
    for shard in document["shards"]:
        table.add_row(
            str(shard["rank"]),
            shard["name"],
            show_size(shard["size_bytes"]),
            shard["sha256"][:16],
            shard["key"],
        )
    console.print(table)


def print_verdicts(verdicts: list[Verdict]) -> None:
    """What verify found."""
    console = _console()
    if not verdicts:
        console.print("no checkpoint to verify")
    for verdict in verdicts:
        name = f"{verdict.commit.gen}-{verdict.commit.step}"
        if verdict.problem:
            console.print(f"{name}: NOT WHOLE: {verdict.problem} \\[{verdict.error_id}]")
        else:
            read = (
                f"{show_size(verdict.checked_bytes)} of data read and hashed"
                if verdict.checked_bytes
                else "sizes and records fit; the data was not read (--read-data)"
            )
            console.print(f"{name}: whole: {verdict.num_shards} shards, {read}")


def print_findings(findings: list[Finding]) -> None:
    """What doctor found."""
    console = _console()
    for finding in findings:
        console.print(f"{finding.result:4}  {finding.check}: {finding.detail}", markup=False)
        if finding.mend:
            console.print(f"      what to do: {finding.mend}", markup=False)


def print_settings(config: Config) -> None:
    """Every setting with its origin."""
    table = _table("setting", "value", "from")
    for name, setting in config.settings.items():
        table.add_row(name, "-" if setting.value is None else str(setting.value), setting.origin)
    _console().print(table)


def print_drill(document: dict[str, Any]) -> None:
    """An evacuation's milestones against its deadline."""
    console = _console()
    deadline_s = document["deadline_s"]
    table = _table("phase", "after notice", f"of {show_duration(deadline_s)}")
    for name, seconds in document["milestones_s"].items():
        is_bound = name in ("told", "staged", "spooled", "committed")
        share = f"{seconds / deadline_s:.0%}" if is_bound else "after the save"
        table.add_row(name, f"{seconds:.2f} s", share)
    console.print(table)
    console.print(
        f"committed step {document['committed_step']}, resumed from step "
        f"{document['resume_step']}; margin "
        + ("none" if document["margin_s"] is None else f"{document['margin_s']:.2f} s")
    )
    console.print("in time" if document["is_in_time"] else "NOT in time")
