"""Configuration: precedence and origins, every problem at once with its place and its mend."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from supervisor.config import (
    OPTIONS,
    Config,
    find_file,
    json_schema,
    load,
    runtime_dir,
    spool_root,
)
from supervisor.errors import ConfigError, ExitCode

GOOD = """\
[job]
id = "llama"

[store]
url = "s3://bucket/prefix"
"""


def write(folder: Path, text: str) -> str:
    path = folder / "job.toml"
    path.write_text(text)
    return str(path)


def problems_of(path: str | None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, **{"environ": {}, **options})
    assert caught.value.exit_code is ExitCode.CONFIG
    assert caught.value.hint
    return caught.value.message


def test_a_minimal_file_gives_every_setting_with_its_origin(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)

    config = load(path, environ={})

    assert config["job.id"] == "llama"
    assert config.settings["job.id"].origin == f"{path}:2"
    assert config.settings["store.url"].origin == f"{path}:5"
    assert config.settings["checkpoint.keep"].origin == "default"
    assert set(config.settings) == {option.name for option in OPTIONS}


def test_no_file_is_needed_when_the_environment_says_all() -> None:
    environ = {"LASTGASP_JOB__ID": "a", "LASTGASP_STORE__URL": "s3://bucket/p/"}

    config = load(None, environ=environ)

    assert config["store.url"] == "s3://bucket/p"
    assert config.settings["job.id"].origin == "environment LASTGASP_JOB__ID"


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + '[checkpoint]\nkeep = 4\n[log]\nlevel = "debug"\n')
    environ = {"LASTGASP_CHECKPOINT__KEEP": "5", "LASTGASP_JOB__ID": "from-environment"}
    flags = {"job.id": "from-flag", "store.url": None}

    config = load(path, environ=environ, flags=flags)

    assert (config["job.id"], config.settings["job.id"].origin) == ("from-flag", "command line")
    assert config["checkpoint.keep"] == 5
    assert config["log.level"] == "debug"
    assert config["log.format"] == "auto"
    assert config["store.url"] == "s3://bucket/prefix"


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[job]\nid = "not ok"\n\n[checkpoint]\nkeep = 2\nevery_step = 5\n'
        '[notice]\npoll = "1 hour"\n',
    )

    told = problems_of(path, environ={"LASTGASP_LOG__LEVEL": "loud"})

    assert told.startswith("6 problems")
    assert f"{path}:2: job.id = 'not ok'" in told
    assert f"{path}:5: checkpoint.keep = 2 is not valid; it takes a whole number from 3" in told
    assert f"{path}:6: no setting 'every_step' in [checkpoint]; did you mean 'every_steps'" in told
    assert f"{path}:8: notice.poll = '1 hour'" in told
    assert "environment LASTGASP_LOG__LEVEL: log.level = 'loud'" in told
    assert "[store] url is missing" in told
    assert "LASTGASP_STORE__URL" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[checkpont]\nkeep = 3\n", "did you mean 'keep' in [checkpoint]?"),
        ("[chekpoint]\n", "no section [chekpoint]; did you mean [checkpoint]?"),
        ('[store]\nid = "x"\n', "did you mean 'id' in [job]?"),
        ("[job]\nzzzzqq = 1\n", "`lastgasp config schema` lists them"),
        ('id = "x"\n', "'id' stands outside any section"),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_the_likely_one(
    tmp_path: Path, text: str, told: str
) -> None:
    path = write(tmp_path, text)

    assert told in problems_of(path)


def test_a_misspelt_name_in_the_environment_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)

    told = problems_of(path, environ={"LASTGASP_CHECKPOINT__KEPE": "9"})

    assert "LASTGASP_CHECKPOINT__KEPE names no setting; did you mean 'keep'" in told


def test_other_names_of_ours_in_the_environment_are_no_settings(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)

    load(path, environ={"LASTGASP_SOCKET": "/x", "LASTGASP_FAILPOINTS": "", "OTHER__THING": "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint.keep", 2),
        ("checkpoint.keep", "three"),
        ("checkpoint.keep", True),
        ("checkpoint.keep", 3.5),
        ("checkpoint.keep", "²"),
        ("checkpoint.keep", -1),
        ("checkpoint.every", "0s"),
        ("checkpoint.every", True),
        ("checkpoint.every", math.inf),
        ("checkpoint.every", math.nan),
        ("checkpoint.every", 10**400),
        ("checkpoint.every", "-5s"),
        ("checkpoint.every", []),
        ("checkpoint.staging", "Memory"),
        ("checkpoint.staging", ["memory"]),
        ("notice.sources", "ec2,moon"),
        ("notice.sources", ["moon"]),
        ("notice.sources", 3),
        ("notice.save_on_advice", "yes"),
        ("notice.save_on_advice", 1),
        ("notice.save_on_advice", []),
        ("job.id", ""),
        ("job.id", "../up"),
        ("job.id", 7),
        ("store.url", "bucket"),
        ("store.url", "s3://"),
        ("store.url", "s3://ab"),
        ("store.url", "file://"),
        ("store.url", "gs://bucket"),
        ("status.listen", "9877"),
        ("status.listen", ":9877"),
        ("status.listen", "localhost:http"),
        ("status.listen", "localhost:70000"),
    ],
)
def test_a_value_outside_its_range_is_refused_with_what_is_allowed(name: str, value: Any) -> None:
    flags = {"job.id": "a", "store.url": "s3://bucket", name: value}

    told = problems_of(None, flags=flags)

    assert f"command line: {name} = {value!r} is not valid; it takes " in told
    assert "invalid literal" not in told


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("checkpoint.every", "10m", 600.0),
        ("checkpoint.every", 90, 90.0),
        ("checkpoint.every_steps", "500", 500),
        ("notice.sources", "auto,ec2", ("auto", "ec2")),
        ("notice.sources", ["none"], ("none",)),
        ("notice.save_on_advice", "false", False),
        ("notice.save_on_advice", "1", True),
        ("store.url", "file:///data/store", "file:///data/store"),
        ("status.listen", "off", "off"),
        ("status.listen", "[::1]:0", "[::1]:0"),
    ],
)
def test_a_good_value_is_read(name: str, value: Any, expected: Any) -> None:
    flags = {"job.id": "a", "store.url": "s3://bucket", name: value}

    config = load(None, environ={}, flags=flags)

    assert config[name] == expected


def test_paths_are_absolute_and_home_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    flags = {"job.id": "a", "store.url": "file://./store", "spool.path": "~/spool"}

    config = load(None, environ={}, flags=flags)

    assert config["store.url"] == f"file://{tmp_path}/store"
    assert config["spool.path"] == "/home/someone/spool"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"[job\n", "not TOML"),
        (b'[job]\nid = "\xff"\n', "not UTF-8"),
        (b"[job]\nid = " + b"9" * 5000, "not TOML"),
        (b"a = " + b"[" * 5000, "not TOML"),
        (b"[job]\n[job]\n", "not TOML"),
        (b"[job]\nid = x\n", "not TOML"),
    ],
)
def test_what_is_not_toml_is_told(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)

    assert told in problems_of(str(path))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "does not exist" in problems_of(str(tmp_path / "none.toml"))
    assert "cannot be read" in problems_of(str(tmp_path))


def test_the_first_default_file_that_exists_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_file(None) is None
    (tmp_path / "job.toml").touch()
    assert find_file(None) == "job.toml"
    (tmp_path / "lastgasp.toml").touch()

    assert find_file(None) == "lastgasp.toml"
    assert find_file("given.toml") == "given.toml"


def test_every_default_is_within_its_own_limits() -> None:
    config = load(None, environ={}, flags={"job.id": "a", "store.url": "s3://bucket"})

    for option in OPTIONS:
        value = config[option.name]
        assert value is None or not isinstance(value, str) or value


# ---------------------------------------------------------------- schema


def test_the_schema_is_a_schema_and_takes_a_sample() -> None:
    schema = json.loads(json.dumps(json_schema()))
    sample = {
        "job": {"id": "llama"},
        "store": {"url": "s3://bucket/prefix", "upload_threads": 4},
        "checkpoint": {"every": "10m", "every_steps": 500, "staging": "auto"},
        "notice": {"sources": ["ec2"], "poll": 2, "save_on_advice": False},
    }

    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(sample)


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": {"id": "a"}},
        {"job": {}, "store": {"url": "s3://bucket"}},
        {"job": {"id": "a"}, "store": {"url": "s3://bucket"}, "checkpoint": {"keep": 1}},
        {"job": {"id": "a"}, "store": {"url": "s3://bucket"}, "checkpoint": {"kepe": 5}},
        {"job": {"id": "a"}, "store": {"url": "s3://bucket"}, "checkpoint": {"every": "soon"}},
        {"job": {"id": "a"}, "store": {"url": "s3://bucket"}, "other": {}},
    ],
)
def test_the_schema_refuses_what_loading_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(json_schema()).validate(wrong)


def test_every_default_satisfies_the_schema() -> None:
    for section, body in json_schema()["properties"].items():
        for key, schema in body["properties"].items():
            if "default" in schema:
                default = json.loads(json.dumps(schema["default"]))
                jsonschema.Draft202012Validator(schema).validate(default)
                assert schema["description"], f"{section}.{key}"


# ---------------------------------------------------------------- places


def a_config(**flags: Any) -> Config:
    return load(None, environ={}, flags={"job.id": "a", "store.url": "s3://bucket", **flags})


def test_places_that_are_configured_win_over_systemds() -> None:
    config = a_config(**{"job.runtime_dir": "/r", "spool.path": "/s"})
    environ = {"RUNTIME_DIRECTORY": "/run/x", "STATE_DIRECTORY": "/var/lib/x"}

    assert runtime_dir(config, environ) == "/r"
    assert spool_root(config, environ) == "/s"


def test_systemds_places_are_the_default_of_a_service() -> None:
    environ = {"RUNTIME_DIRECTORY": "/run/x:/run/y", "STATE_DIRECTORY": "/var/lib/x"}

    assert runtime_dir(a_config(), environ) == "/run/x/a"
    assert spool_root(a_config(), environ) == "/var/lib/x/spool"


def test_without_either_the_spool_is_in_the_users_state_directory() -> None:
    assert spool_root(a_config(), {"HOME": "/h"}) == "/h/.local/state/lastgasp/spool"
    assert spool_root(a_config(), {"XDG_STATE_HOME": "/x", "HOME": "/h"}) == "/x/lastgasp/spool"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store.url", "s3://BAD_bucket name/x"),
        ("store.url", "s3://ab/x"),
        ("store.url", "file:///"),
        ("store.url", "file://host/share"),
        ("store.url", "file:///a\0b"),
        ("spool.path", "/a\0b"),
        ("job.runtime_dir", "/a\0b"),
    ],
)
def test_a_place_that_cannot_be_meant_is_refused(name: str, value: str) -> None:
    flags = {"job.id": "x", "store.url": "file:///store", name: value}

    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load(None, environ={}, flags=flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"notice.sources": ["file"]}, "notice.file names none"),
        ({"notice.sources": ["none", "ec2"]}, '"none" beside others'),
        ({"spool.path": "/store"}, "the store's own directory"),
    ],
)
def test_settings_that_contradict_each_other_are_told(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(None, environ={}, flags={"job.id": "x", "store.url": "file:///store", **flags})


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbf[job]\nid = "x"\n[store]\nurl = "file:///store"\n')

    assert load(str(path), environ={})["job.id"] == "x"
