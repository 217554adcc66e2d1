"""Structured log of the daemon: JSON lines on stderr unless on a terminal.

The event is a constant `noun.verb_past`, listed here; everything variable is a key with its unit.
Values of keys that look like secrets are never written.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

EVENTS: Mapping[str, str] = {
    "checkpoint.abandoned": "a checkpoint will not become whole, with the reason",
    "checkpoint.committed": "a checkpoint is restorable from the store; its sizes and times",
    "checkpoint.persist_failed": "a checkpoint did not reach the store; it is retried",
    "checkpoint.spooled": "a checkpoint is on the local disk",
    "checkpoint.staged": "every rank's image of a step is held by the supervisor",
    "claim.failed": "no generation could be claimed",
    "claim.late": "a claim came after the job had moved on",
    "deadline.missed": "a fresh image or its upload was not in time",
    "evacuation.completed": "the end of an evacuation, with its result",
    "evacuation.decided": "what a notice makes us commit, with the numbers",
    "evacuation.nothing_to_save": "a notice before any training of this life",
    "fetch.completed": "the images to restore are here and verified",
    "fetch.failed": "the images to restore could not be had",
    "finish.missing": "training ended well without run.finish()",
    "finish.not_recorded": "the end of the job could not be made durable",
    "generation.claimed": "this launch owns the job now",
    "generation.fenced": "another launch took the job over",
    "group.restarted": "torchrun started its workers anew by itself",
    "job.crash_loop": "too many crashes in a row",
    "job.crashed": "training ended by itself and not well",
    "job.exited": "torchrun is gone",
    "job.exited_during_upload": "torchrun is gone while an upload goes on",
    "job.finished": "the job is done for good",
    "job.hung": "no rank made progress for the limit",
    "job.launch_failed": "torchrun could not be started",
    "job.launched": "torchrun runs",
    "job.strays_left": "processes that even SIGKILL did not end",
    "job.stopped": "no process of the job is left",
    "job.taken_up": "a job of an earlier supervisor is supervised again",
    "log.lines_dropped": "nobody read our output for a while; so many lines are missing here",
    "notice.received": "a preemption notice",
    "notice.sooner": "a second notice with an earlier deadline",
    "notice.source_failed": "a notice source does not answer; it is retried",
    "notice.source_recovered": "a notice source answers again",
    "notice.withdrawn": "a source took its notice back",
    "peer.denied": "another user, or one connection too many, was not let in",
    "peer.dropped": "a connection broke the protocol",
    "rank.ignored": "a rank joined while its group is being ended",
    "rank.joined": "a rank said hello",
    "rank.never_attached": "training runs without the SDK",
    "rank.note": "a rank reports something weaker than usual",
    "rank.restore_failed": "a rank could not take its state",
    "rank.restored": "a rank has its state",
    "record.failed": "a record of the log could not be written",
    "relaunch.scheduled": "the job will be started again",
    "restore.completed": "every rank has its state",
    "signals.may_not_arrive": "a shell stands between us and whoever sends SIGTERM",
    "slots.failed": "image slots could not be allocated",
    "spool.failed": "the local disk does not take checkpoints",
    "store.limited": "the store works, but weaker or slower than others; the reason says how",
    "uploads.left": "unfinished uploads of older generations could not be aborted: they cost money",
    "uploads.reaped": "unfinished uploads of older generations were aborted",
    "spool.rejected": "a set on the local disk is not used; the reason says why",
    "status.unavailable": "the status address could not be bound",
    "action.failed": "carrying out a decision failed in a way nobody foresaw: please report it",
    "thread.refused": "the system gives no more threads; one kept for this does the work",
    "world.changed": "the job resumes with another number of ranks",
    "supervisor.started": "the daemon begins",
    "supervisor.stopped": "the daemon ends",
}
_SECRET = re.compile(r"(secret|token|password|credential|authorization|signature)", re.I)
# Query parameters of signed URLs and the same words in an Authorization header.
_SIGNED = re.compile(r"(\b(?:signature|credential|security-token|sig)=)[^&\s\"',]+", re.I)


def redact(logger: Any, method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop what looks like a secret, by its key or as part of a signed URL."""
    del logger, method
    for key, value in entry.items():
        entry[key] = _clean(key, value)
    return entry


def _clean(key: Any, value: Any) -> Any:
    if _SECRET.search(str(key)):
        return "[redacted]"
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {name: _clean(name, item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item) for item in value]
    return _SIGNED.sub(r"\1[redacted]", str(value))


def configure(*, level: str, style: str, file: Any = None) -> None:
    """Set structlog up for this process; `style` is auto, json or console; `file`: stderr."""
    is_console = style == "console" or (style == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if is_console
        else structlog.processors.JSONRenderer(default=str)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=file or sys.stderr),
        cache_logger_on_first_use=False,
    )


def bind(**fields: object) -> Any:
    """A logger with these keys on every line."""
    return structlog.get_logger().bind(**fields)
