"""What is shipped for systemd, Docker and Kubernetes is valid and agrees with the code."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from supervisor.config import BY_NAME, load
from supervisor.errors import ExitCode
from supervisor.units import parse_duration

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/systemd/lastgasp@.service"
DOCKERFILE = ROOT / "deploy/docker/Dockerfile"
POD = ROOT / "deploy/kubernetes/pod.yaml"
KUBERNETES_VERSION = "1.37"


def unit(section: str = "Service") -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return dict(parser[section])


def codes(name: str) -> set[int]:
    return {int(word) for word in unit()[name].split()}


def documents(kind: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(POD.read_text()) if item["kind"] == kind]


# ---------------------------------------------------------------- systemd


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed (apt-get install systemd)",
)
def test_systemd_has_nothing_to_say_against_the_unit(tmp_path: Path) -> None:
    """It exits with 0 on unknown keys, so any word on stderr counts."""
    instance = tmp_path / "lastgasp@llama.service"
    instance.write_text(UNIT.read_text())

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(instance)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_restarts_what_was_preempted_and_nothing_that_a_person_must_mend() -> None:
    assert codes("RestartForceExitStatus") == {
        ExitCode.PREEMPTED_COMMITTED,
        ExitCode.PREEMPTED_OLDER_STANDS,
    }
    assert codes("RestartPreventExitStatus") == {
        ExitCode.USAGE,
        ExitCode.FENCED,
        ExitCode.CONFIG,
        ExitCode.ALREADY_RUNNING,
        ExitCode.NO_CHECKPOINT,
    }
    assert codes("SuccessExitStatus") == {
        ExitCode.PREEMPTED_COMMITTED,
        ExitCode.INTERRUPTED,
        ExitCode.TERMINATED,
    }


def test_the_unit_keeps_sigterm_away_from_training_and_gives_it_the_lead_time() -> None:
    service = unit()
    lead_s = parse_duration(BY_NAME["notice.sigterm_lead"].default)

    assert service["KillMode"] == "mixed"
    assert service["Type"] == "notify"
    assert parse_duration(service["TimeoutStopSec"]) >= lead_s + 30
    assert parse_duration(service["WatchdogSec"]) >= 10
    assert unit("Unit")["After"] == "network-online.target"


def test_the_unit_has_no_sandbox_that_would_break_cuda() -> None:
    breaking = {"PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock",
                "MemoryDenyWriteExecute", "SystemCallFilter", "ProtectKernelModules"}  # fmt: skip

    assert not breaking & unit().keys()


def test_the_files_of_the_readme_are_those_of_the_unit_and_load() -> None:
    text = (UNIT.parent / "README.md").read_text()
    (sample,) = re.findall(r"llama\.toml >/dev/null <<'END'\n(.*?)\nEND", text, re.S)

    flags = {
        f"{section}.{key}": value
        for section, body in tomllib.loads(sample).items()
        for key, value in body.items()
    }
    config = load(None, environ={}, flags=flags)

    assert config["job.id"] == "llama"
    assert "COMMAND=torchrun" in text
    assert unit()["EnvironmentFile"] == "/etc/lastgasp/%i.env"
    assert unit()["ExecStart"].endswith("lastgasp run -c /etc/lastgasp/%i.toml -- $COMMAND")


# ---------------------------------------------------------------- docker


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_has_no_torch() -> None:
    installs = [rest for word, rest in instructions() if word == "RUN" and "install" in rest]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert installs
    assert not any("torch" in rest for rest in installs)
    assert '".[daemon]"' in installs[0]
    wanted = extras["dependencies"] + extras["optional-dependencies"]["daemon"]
    assert not any(name.startswith(("torch", "numpy")) for name in wanted)


def test_the_image_is_not_root_and_hears_sigterm() -> None:
    by_word = dict(instructions())

    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", by_word["USER"])
    assert by_word["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(by_word["ENTRYPOINT"]) == ["lastgasp"]


def test_what_the_image_is_built_from_is_sent_to_the_builder() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [
        name
        for word, rest in instructions()
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    ]

    assert "*" in ignore
    for name in copied:
        assert f"!{name}" in ignore
        assert (ROOT / name).exists()


# ---------------------------------------------------------------- kubernetes


@pytest.mark.parametrize(
    "document", list(yaml.safe_load_all(POD.read_text())), ids=lambda item: item["kind"]
)
def test_kubernetes_accepts_every_document_to_the_letter(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_the_pods_configuration_is_good_and_its_paths_are_mounted() -> None:
    (config_map,) = documents("ConfigMap")
    (pod,) = documents("Pod")
    (container,) = pod["spec"]["containers"]
    environ = {item["name"]: item["value"] for item in container["env"]}
    flags = {
        f"{section}.{key}": value
        for section, body in tomllib.loads(config_map["data"]["job.toml"]).items()
        for key, value in body.items()
    }

    config = load(None, environ=environ, flags=flags)

    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(config["job.runtime_dir"].startswith(mount) for mount in mounts)
    assert config["spool.path"] in mounts
    grace_s = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= config["notice.sigterm_lead"] + 30
    (port,) = container["ports"]
    assert config["status.listen"] == f"0.0.0.0:{port['containerPort']}"


def test_the_pod_is_restricted() -> None:
    (pod,) = documents("Pod")
    (container,) = pod["spec"]["containers"]

    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "livenessProbe" not in container
