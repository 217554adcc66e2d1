"""Writes the reference documents that the code knows best: `python docs/generate.py`.

A test fails while a document differs from what this gives.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import supervisor
from supervisor.config import OPTIONS, REQUIRED, SECTIONS, Option
from supervisor.errors import REPORTED, SupervisorError
from supervisor.lifecycle import Phase
from supervisor.log import EVENTS
from supervisor.metrics import Metrics

FOLDER = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n"
CONFIGURATION_INTRO = """\
One TOML file (`lastgasp.toml` or `job.toml` in the working directory, or `-c FILE`). Each setting
may also come from the environment, as `LASTGASP_SECTION__KEY`. A flag wins over the environment,
the environment over the file, the file over the default; `lastgasp config show` tells each value
and where it came from. Every problem is told at once, with its line. Durations are written as
`90s`, `10m`, `2h` or a number of seconds.
"""
ERRORS_INTRO = """\
An error is shown as `lastgasp: MESSAGE [ID]` and what to do; with `--json` as one document with
`error_id`, `message`, `hint` and `code`. The same ids are in the log and in the labels of metrics.
The exit code is that of a command which ends by the error; while a job runs most errors are retried
or worked around. `retry` says whether trying again by itself may help. What to do is told with the
message too, often more exactly.
"""
METRICS_INTRO = """\
Served at `/metrics` of `[status] listen`, in the Prometheus text format. No label has unbounded
values.
"""
LOG_INTRO = """\
The daemon writes one line an event to stderr: JSON, or for people on a terminal. Every line has
`ts` (UTC), `level`, `event` and `job_id`; whatever varies is a key with its unit in the name.
Values that look like secrets are replaced by `[redacted]`.
"""
SECTION_TITLES: Mapping[str, str] = {
    "job": "The job and where it keeps its socket",
    "store": "Where checkpoints are durable",
    "spool": "The local copy",
    "checkpoint": "When and how checkpoints are taken",
    "notice": "Preemption notices",
    "restart": "Relaunches",
    "status": "Status and metrics over HTTP",
    "log": "The log",
}


def documents() -> dict[str, str]:
    """Name to content of every generated document."""
    return {
        "configuration.md": configuration(),
        "errors.md": errors(),
        "metrics.md": metrics(),
        "log-events.md": log_events(),
    }


# ---------------------------------------------------------------- configuration


def configuration() -> str:
    """Every setting, by section, and a sample in which every line is a default."""
    parts = [
        "# Configuration\n",
        NOTE,
        CONFIGURATION_INTRO,
        "Credentials have no place in here: the store's are found where boto3 finds them.\n",
    ]
    for section in SECTIONS:
        parts += [f"## [{section}]\n", f"{SECTION_TITLES[section]}.\n"]
        own = [option for option in OPTIONS if option.section == section]
        rows = [
            (f"`{o.key}`", _default(o), _allowed(o.schema), o.doc, f"`{o.environment_name}`")
            for o in own
        ]
        parts.append(_table(("key", "default", "takes", "meaning", "environment"), rows))
    parts += ["## All defaults\n", f"```toml\n{_sample()}```\n"]
    return "\n".join(parts)


def _default(option: Option) -> str:
    if option.default is REQUIRED:
        return "required"
    return "none" if option.default is None else f"`{_toml(option.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _allowed(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{item}`" for item in schema["enum"])
    if schema.get("type") == "array":
        return "list of " + _allowed(schema["items"])
    if "anyOf" in schema:
        return str(schema.get("title", "duration"))
    if "minimum" in schema:
        return f"{schema['minimum']} to {schema['maximum']}"
    return {"string": "text", "boolean": "`true`, `false`"}[schema["type"]]


def _sample() -> str:
    lines = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        for option in (o for o in OPTIONS if o.section == section):
            lines.append(f"# {option.doc}")
            if option.default is REQUIRED:
                lines.append(f'{option.key} = "..."')
            elif option.default is None:
                lines.append(f"# {option.key} =")
            else:
                lines.append(f"# {option.key} = {_toml(option.default)}")
        lines.append("")
    return "\n".join(lines)


# ---------------------------------------------------------------- errors


def errors() -> str:
    """Every error id that an operator can meet."""
    rows = []
    for kind in sorted(_error_types(), key=lambda kind: kind.error_id):
        rows.append(
            (
                f"`{kind.error_id}`",
                _first_sentence(kind),
                kind.mend,
                str(int(kind.exit_code)),
                "yes" if kind.is_retryable else "no",
            )
        )
    reported = [(f"`{name}`", *texts) for name, texts in sorted(REPORTED.items())]
    return "\n".join(
        [
            "# Errors\n",
            NOTE,
            ERRORS_INTRO,
            _table(("id", "meaning", "what to do", "exit code", "retry"), rows),
            "## In the log, in status and in metrics only\n",
            _table(("id", "meaning", "what to do"), reported),
        ]
    )


def _error_types() -> set[type[SupervisorError]]:
    for module in pkgutil.walk_packages(supervisor.__path__, "supervisor."):
        if _is_ours(module) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found: set[type[SupervisorError]] = set()
    waiting: list[type[SupervisorError]] = [SupervisorError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("supervisor."):
            found.add(kind)
            waiting += kind.__subclasses__()
    # A class without an id of its own is no error of its own to the operator.
    return {kind for kind in found if "error_id" in vars(kind)}


def _is_ours(module: pkgutil.ModuleInfo) -> bool:
    """supervisord's package may share the name `supervisor`; its modules are not ours."""
    own = Path(__file__).parents[1] / "supervisor"
    path = getattr(module.module_finder, "path", "")
    return own == Path(path) or own in Path(path).parents


def _first_sentence(kind: type) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return text.removesuffix(".")


# ---------------------------------------------------------------- metrics and log events


def metrics() -> str:
    """Every metric of /metrics."""
    registry = Metrics([phase.value for phase in Phase]).registry
    rows = []
    for collector in sorted(registry._collector_to_names, key=lambda item: item._name):  # type: ignore[attr-defined]
        suffix = "_total" if collector._type == "counter" else ""  # type: ignore[attr-defined]
        labels = ", ".join(f"`{name}`" for name in collector._labelnames)  # type: ignore[attr-defined]
        rows.append(
            (
                f"`{collector._name}{suffix}`",  # type: ignore[attr-defined]
                collector._type,  # type: ignore[attr-defined]
                labels or "-",
                collector._documentation,  # type: ignore[attr-defined]
            )
        )
    return "\n".join(
        [
            "# Metrics\n",
            NOTE,
            METRICS_INTRO,
            _table(("name", "type", "labels", "meaning"), rows),
            "`state` is one of " + ", ".join(f"`{phase.value}`" for phase in Phase) + ".\n",
        ]
    )


def log_events() -> str:
    """Every event of the daemon's log."""
    rows = [(f"`{event}`", meaning) for event, meaning in sorted(EVENTS.items())]
    return "\n".join(
        [
            "# Log events\n",
            NOTE,
            LOG_INTRO,
            _table(("event", "meaning"), rows),
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write every document beside this file."""
    for name, text in documents().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
