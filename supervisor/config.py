"""The configuration: TOML, environment and flags into one frozen struct.

Precedence: flag > environment (`LASTGASP_SECTION__KEY`) > file > default. Every problem is found in
one pass and told with its place, the value got, what is allowed, and what to do. Secrets have no
place in here: the store's credentials come from where boto3 finds them.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from supervisor.errors import ConfigError
from supervisor.units import parse_duration, parse_size, show_size
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.names import check_job_id

ENVIRONMENT_PREFIX = "LASTGASP_"
_JOB_ID_FORM = "1 to 63 of A-Z a-z 0-9 . _ -, beginning and ending with a letter or digit"
# Source: S3 User Guide, "General purpose bucket naming rules".
_BUCKET = re.compile(r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
DEFAULT_PATHS = ("lastgasp.toml", "job.toml")
MINIMUM_KEEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting. `read` turns a raw value into ours or raises ValueError with what is allowed."""

    name: str
    default: Any
    read: Callable[[Any], Any]
    doc: str
    schema: Mapping[str, Any]

    @property
    def section(self) -> str:
        return self.name.split(".")[0]

    @property
    def key(self) -> str:
        return self.name.split(".")[1]

    @property
    def environment_name(self) -> str:
        return f"{ENVIRONMENT_PREFIX}{self.section.upper()}__{self.key.upper()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value in force and where it came from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Config:
    """All settings by their full name, each with its origin."""

    settings: Mapping[str, Setting]

    def __getitem__(self, name: str) -> Any:
        return self.settings[name].value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("a non-empty text without NUL")
    return value


def _path(value: Any) -> str:
    return os.path.abspath(os.path.expanduser(_text(value)))


def _job_id(value: Any) -> str:
    try:
        return check_job_id(_text(value))
    except ProtocolError as error:
        raise ValueError(_JOB_ID_FORM) from error


def _store_url(value: Any) -> str:
    url = _text(value)
    if url.startswith("s3://") and _BUCKET.match(url.removeprefix("s3://").split("/")[0]):
        return url.rstrip("/")
    if url.startswith("file://"):
        path = os.path.expanduser(url.removeprefix("file://"))
        if path.startswith(("./", "../")):
            path = os.path.abspath(path)
        # file://host/share would name another machine; a directory of a store is never the root.
        if os.path.isabs(path) and os.path.normpath(path) != "/":
            return f"file://{os.path.normpath(path)}"
    raise ValueError(
        '"s3://bucket/prefix" with a bucket of 3 to 63 of a-z 0-9 . -, or "file:///a/directory"'
    )


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("true", "1", "false", "0"):
        return value in ("true", "1")
    raise ValueError("true or false")


def _whole(minimum: int, maximum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        allowed = f"a whole number from {minimum} to {maximum}"
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(allowed)
        if not minimum <= value <= maximum:
            raise ValueError(allowed)
        return value

    return read


def _duration(minimum_s: float, maximum_s: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        seconds = parse_duration(value)
        if not minimum_s <= seconds <= maximum_s:
            raise ValueError(f"a duration from {minimum_s:g}s to {maximum_s:g}s")
        return seconds

    return read


def _size(minimum: int, maximum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        size_bytes = parse_size(value)
        if not minimum <= size_bytes <= maximum:
            raise ValueError(f"a size from {minimum} B to {show_size(maximum)}")
        return size_bytes

    return read


def _listen(value: Any) -> str:
    text = _text(value)
    host, _, port = text.rpartition(":")
    is_address = host and port.isascii() and port.isdigit() and int(port) <= 65535
    if text != "off" and not is_address:
        raise ValueError('host:port such as "127.0.0.1:9877", or "off"')
    return text


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(f'"{item}"' for item in allowed))
        return str(value)

    return read


def _list_of(*allowed: str) -> Callable[[Any], tuple[str, ...]]:
    def read(value: Any) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list) or any(item not in allowed for item in items):
            raise ValueError("a list of " + ", ".join(f'"{item}"' for item in allowed))
        return tuple(items)

    return read


_STRING: Mapping[str, Any] = {"type": "string"}
_DURATION_SCHEMA: Mapping[str, Any] = {
    "anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\d+(\.\d+)?(ms|s|m|h|d)$"}]
}


_SIZE_SCHEMA: Mapping[str, Any] = {
    "title": "size",
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)? ?(B|[KMGT]i?B)?$"}],
}


def _option(
    name: str,
    default: Any,
    read: Callable[[Any], Any],
    doc: str,
    schema: Mapping[str, Any] = _STRING,
) -> Option:
    return Option(name=name, default=default, read=read, doc=doc, schema=schema)


def _choice(name: str, default: str, allowed: tuple[str, ...], doc: str) -> Option:
    return _option(name, default, _one_of(*allowed), doc, {"enum": list(allowed)})


def _seconds(name: str, default: Any, limits: tuple[float, float], doc: str) -> Option:
    return _option(name, default, _duration(*limits), doc, _DURATION_SCHEMA)


def _bytes(name: str, default: Any, limits: tuple[int, int], doc: str) -> Option:
    return _option(name, default, _size(*limits), doc, _SIZE_SCHEMA)


def _number(name: str, default: Any, limits: tuple[int, int], doc: str) -> Option:
    schema = {"type": "integer", "minimum": limits[0], "maximum": limits[1]}
    return _option(name, default, _whole(*limits), doc, schema)


REQUIRED: Any = object()
DAY_S = 86400.0

OPTIONS: tuple[Option, ...] = (
    _option("job.id", REQUIRED, _job_id, "Name of the job; it is the prefix in the store."),
    _option("job.runtime_dir", None, _path, "Socket, lock and state file; owner only."),
    _option("store.url", REQUIRED, _store_url, "s3://bucket/prefix or file:///directory."),
    _option("store.endpoint_url", None, _text, "S3-compatible endpoint; AWS's own if absent."),
    _option("store.region", None, _text, "Region; from the AWS environment if absent."),
    _choice("store.addressing_style", "auto", ("auto", "path", "virtual"), "How buckets appear."),
    _choice(
        "store.checksums",
        "auto",
        ("auto", "sha256", "read-back", "off"),
        "How a stored shard is verified: by a SHA-256 that the store checks and keeps, by reading "
        "it back, or not; auto: the first where the store can, else the second.",
    ),
    _option("store.sse_kms_key_id", None, _text, "KMS key for server-side encryption."),
    _option("store.ca_bundle", None, _path, "Certificates to trust for the endpoint."),
    _number("store.upload_threads", 8, (1, 64), "Chunks in flight at once."),
    _seconds("store.chunk_timeout", "120s", (1, DAY_S), "For one chunk, retries included."),
    _option("spool.path", None, _path, "Local disk for checkpoints; NVMe if there is one."),
    _option(
        "spool.require_mount",
        False,
        _bool,
        "Refuse to start unless spool.path is a mount point, which it is not after a reboot that "
        "did not mount the disk.",
        {"type": "boolean"},
    ),
    _bytes(
        "spool.ballast",
        "64MiB",
        (0, 1 << 40),
        "Reserved there, and given up for a checkpoint when the disk is full; 0 for none.",
    ),
    _bytes(
        "spool.min_rate",
        "16MiB",
        (1, 1 << 40),
        "Bytes a second. A disk that falls behind by more than spool.patience is given up for that "
        "checkpoint, which goes to the store alone.",
    ),
    _seconds(
        "spool.patience", "10s", (0.1, 3600), "How long the disk may fall behind, or do nothing."
    ),
    _number("checkpoint.every_steps", None, (1, 10**9), "Save at every multiple of this step."),
    _seconds("checkpoint.every", None, (1, 30 * DAY_S), "Save after so much time."),
    _choice("checkpoint.staging", "auto", ("auto", "memory", "disk"), "Where images are staged."),
    _choice(
        "checkpoint.schedule", "boundary", ("boundary", "overlapped"), "When tensors are copied."
    ),
    _number("checkpoint.keep", 3, (MINIMUM_KEEP, 10_000), "Good checkpoints that retention keeps."),
    _option(
        "notice.sources",
        ("auto",),
        _list_of("auto", "ec2", "file", "none"),
        "Where preemption notices come from; SIGTERM and `lastgasp notify` always count.",
        {"type": "array", "items": {"enum": ["auto", "ec2", "file", "none"]}},
    ),
    _option("notice.file", None, _path, "A file whose appearance is a notice."),
    _seconds("notice.file_lead", "60s", (1, DAY_S), "Lead time of the file, unless it says one."),
    _seconds("notice.sigterm_lead", "60s", (1, DAY_S), "Lead time after SIGTERM."),
    _option(
        "notice.ec2_endpoint",
        "http://169.254.169.254",
        _text,
        "EC2 metadata address.",
    ),
    _seconds("notice.poll", "2s", (0.05, 60), "Seconds between two looks at a source."),
    _choice("notice.after", "exit", ("exit", "hold"), "hold: relaunch if the machine survives."),
    _option(
        "notice.save_on_advice", True, _bool, "Advice causes a checkpoint.", {"type": "boolean"}
    ),
    _number("restart.max_crashes", 10, (0, 10**6), "Crashes in a row without a commit."),
    _seconds("restart.backoff", "1s", (0, 3600), "First wait after a crash; it doubles."),
    _seconds("restart.backoff_cap", "60s", (0, DAY_S), "Longest wait after a crash."),
    _seconds("restart.hang_limit", "30m", (1, 30 * DAY_S), "No progress for so long: restart."),
    _seconds("restart.attach_warning", "2m", (1, DAY_S), "Warn if no rank attached by then."),
    _option(
        "status.listen",
        "127.0.0.1:9877",
        _listen,
        'Address of /metrics and /status.json, or "off".',
    ),
    _choice(
        "log.level", "info", ("debug", "info", "warning", "error"), "Least level that is shown."
    ),
    _choice("log.format", "auto", ("auto", "json", "console"), "auto: JSON unless on a terminal."),
)
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}
SECTIONS = tuple(dict.fromkeys(option.section for option in OPTIONS))


def find_file(explicit: str | None) -> str | None:
    """The file to read: the given one, else the first default that exists."""
    if explicit is not None:
        return explicit
    return next((path for path in DEFAULT_PATHS if os.path.exists(path)), None)


def load(
    path: str | None, *, environ: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> Config:
    """Read, merge and check everything.

    Raises:
        ConfigError: with every problem at once.
    """
    problems: list[str] = []
    text, document = _read_file(path)
    raw = _from_document(path, text, document, problems)
    for option in OPTIONS:
        if option.environment_name in environ:
            origin = f"environment {option.environment_name}"
            raw[option.name] = (environ[option.environment_name], origin)
        if flags and flags.get(option.name) is not None:
            raw[option.name] = (flags[option.name], "command line")
    problems += _unknown_in_environment(environ)
    settings = _check(raw, path, problems)
    problems += _contradictions(settings)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(
            f"{count} in the configuration:\n" + "\n".join(f"  - {text}" for text in problems),
            hint="`lastgasp config schema` lists every setting",
        )
    return Config(settings)


def _contradictions(settings: Mapping[str, Setting]) -> list[str]:
    """Values that are each valid and together are not what anyone means."""
    found = []
    sources = settings.get("notice.sources")
    if sources is not None and "none" in sources.value and len(sources.value) > 1:
        found.append(f'{sources.origin}: notice.sources has "none" beside others; keep one side')
    if sources is not None and "file" in sources.value and not _value(settings, "notice.file"):
        found.append(f'{sources.origin}: notice.sources has "file", but notice.file names none')
    url, spool = _value(settings, "store.url") or "", _value(settings, "spool.path")
    if spool and url == f"file://{spool}":
        found.append(
            f"{settings['spool.path'].origin}: spool.path is the store's own directory; give the "
            "spool another, best on a local disk"
        )
    return found


def _value(settings: Mapping[str, Setting], name: str) -> Any:
    return settings[name].value if name in settings else None


def _unknown_in_environment(environ: Mapping[str, str]) -> list[str]:
    """A setting that is misspelt there would be passed over in silence."""
    known = {option.environment_name for option in OPTIONS}
    return [
        f"environment: {name} names no setting"
        + _suggest(name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".", 1))
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name and name not in known
    ]


def _read_file(path: str | None) -> tuple[str, dict[str, Any]]:
    if path is None:
        return "", {}
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")
        return text, tomllib.loads(text)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the configuration file {path} does not exist",
            hint="give its path with -c, or write one: see the quick start in README.md",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}",
            hint="-c takes a TOML file that this user may read",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}", hint="save it as UTF-8") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and numbers without end
        raise ConfigError(
            f"{path}: not TOML: {error}",
            hint='texts need quotes (id = "x"), and a section stands once; https://toml.io',
        ) from error


def _from_document(
    path: str | None, text: str, document: Mapping[str, Any], problems: list[str]
) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for section, body in document.items():
        where = f"{path}:{_line_of(text, section, None)}"
        if not isinstance(body, dict):
            problems.append(
                f"{where}: {section!r} stands outside any section; put it under one of "
                + ", ".join(f"[{name}]" for name in SECTIONS)
            )
            continue
        for key, value in body.items():
            name = f"{section}.{key}"
            at = f"{path}:{_line_of(text, section, key)}"
            if name not in BY_NAME:
                problems.append(f"{at}: no setting {key!r} in [{section}]{_suggest(name)}")
            else:
                found[name] = (value, at)
        if section not in SECTIONS and not body:
            problems.append(f"{where}: no section [{section}]{_suggest(section)}")
    return found


def _suggest(name: str) -> str:
    section, _, key = name.partition(".")
    close = [option.name for option in OPTIONS if option.key == key][:1]
    if not close and section in SECTIONS:
        own = [option.key for option in OPTIONS if option.section == section]
        close = [f"{section}.{k}" for k in difflib.get_close_matches(key, own, n=1)]
    if not close:
        close = difflib.get_close_matches(name, [*BY_NAME, *SECTIONS], n=1, cutoff=0.7)
    if not close:
        return "; `lastgasp config schema` lists them"
    section, _, key = close[0].partition(".")
    return f"; did you mean {key!r} in [{section}]?" if key else f"; did you mean [{section}]?"


def _line_of(text: str, section: str, key: str | None) -> int:
    """The line of a key, found by its look; tomllib tells no positions. The section's, or 1, if
    the key is written in a way that this does not recognise."""
    current = ""
    section_line = 1
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            current = stripped.strip("[]").strip()
            if current == section:
                section_line = number
        name = stripped.split("=")[0].strip().strip("\"'")
        if key is None and current == "" and name == section:
            return number
        is_named = (current == section and name == key) or name == f"{section}.{key}"
        if key is not None and "=" in stripped and is_named:
            return number
    return section_line


def _check(
    raw: Mapping[str, tuple[Any, str]], path: str | None, problems: list[str]
) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for option in OPTIONS:
        value, origin = raw.get(option.name, (option.default, "default"))
        if value is REQUIRED:
            place = path or "no configuration file"
            problems.append(
                f"{place}: [{option.section}] {option.key} is missing. {option.doc} Or set "
                f"{option.environment_name}"
            )
            continue
        if value is None or (origin == "default" and isinstance(value, tuple | bool)):
            settings[option.name] = Setting(value=value, origin=origin)
            continue
        try:
            settings[option.name] = Setting(value=option.read(value), origin=origin)
        except ValueError as error:
            problems.append(f"{origin}: {option.name} = {value!r} is not valid; it takes {error}")
    return settings


def json_schema() -> dict[str, Any]:
    """A JSON Schema of the file, for editors."""
    properties: dict[str, Any] = {}
    for section in SECTIONS:
        own = [option for option in OPTIONS if option.section == section]
        properties[section] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                option.key: {
                    **option.schema,
                    "description": option.doc,
                    **({} if option.default in (None, REQUIRED) else {"default": option.default}),
                }
                for option in own
            },
            "required": [option.key for option in own if option.default is REQUIRED],
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lastgasp job configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": ["job", "store"],
    }


def runtime_dir(config: Config, environ: Mapping[str, str]) -> str:
    """Where the job's socket lives. systemd's RuntimeDirectory wins over the user's own."""
    job_id = config["job.id"]
    if config["job.runtime_dir"]:
        return str(config["job.runtime_dir"])
    if environ.get("RUNTIME_DIRECTORY"):
        return os.path.join(environ["RUNTIME_DIRECTORY"].split(":")[0], job_id)
    if os.getuid() == 0:
        return os.path.join("/run/lastgasp", job_id)
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "lastgasp", job_id)
    return os.path.join(spool_root(config, environ), "run", job_id)


def spool_root(config: Config, environ: Mapping[str, str]) -> str:
    """Where checkpoints are spooled. systemd's StateDirectory is the default of a service."""
    if config["spool.path"]:
        return str(config["spool.path"])
    if environ.get("STATE_DIRECTORY"):
        return os.path.join(environ["STATE_DIRECTORY"].split(":")[0], "spool")
    base = environ.get("XDG_STATE_HOME") or os.path.join(
        environ.get("HOME", "/var/lib"), ".local", "state"
    )
    return os.path.join(base, "lastgasp", "spool")
