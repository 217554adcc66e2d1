"""The environment that torchrun and the ranks get."""

from __future__ import annotations

import pytest

from supervisor.job.rank_env import MARKER, job_env

TORCHRUN = ["torchrun", "--nproc-per-node=2", "train.py"]


def env_of(argv: list[str] = TORCHRUN, /, **inherited: str) -> dict[str, str]:
    return job_env(
        inherited,
        argv=argv,
        socket_path="/run/lastgasp/j/supervisor.sock",
        launch="ab" * 16,
        job_id="j",
        shutdown_timeout_s=60,
    )


def test_ranks_learn_where_their_supervisor_is() -> None:
    env = env_of(PATH="/bin")

    assert env["LASTGASP_SOCKET"] == "/run/lastgasp/j/supervisor.sock"
    assert env["LASTGASP_JOB_ID"] == "j"
    assert env[MARKER] == "ab" * 16
    assert env["PATH"] == "/bin"


def test_the_names_of_an_outer_supervisor_are_replaced() -> None:
    env = env_of(LASTGASP_SOCKET="/outer", LASTGASP_LAUNCH="outer", LASTGASP_JOB_ID="outer")

    assert "outer" not in "".join(env.values())


def test_settings_of_the_store_do_not_reach_the_training() -> None:
    env = env_of(LASTGASP_STORE__URL="s3://x", LASTGASP_STORE__SSE_KMS_KEY_ID="k")

    assert not [name for name in env if name.startswith("LASTGASP_STORE__")]


def test_two_jobs_on_one_host_never_meet_on_torchruns_default_port() -> None:
    assert env_of()["PET_STANDALONE"] == "1"


@pytest.mark.parametrize(
    "flag",
    [
        ["--standalone"],
        ["--rdzv-endpoint=h:1"],
        ["--rdzv_endpoint", "h:1"],
        ["--rdzv-backend=c10d"],
        ["--master-addr=h"],
        ["--master_port", "29500"],
        ["--nnodes=2"],
    ],
)
def test_a_rendezvous_given_by_flag_is_left_alone(flag: list[str]) -> None:
    assert "PET_STANDALONE" not in env_of(["torchrun", *flag, "train.py"])


@pytest.mark.parametrize(
    "name", ["PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_MASTER_ADDR", "PET_NNODES"]
)
def test_a_rendezvous_given_by_the_environment_is_left_alone(name: str) -> None:
    """A static rendezvous of several nodes would otherwise become several jobs of one node."""
    assert "PET_STANDALONE" not in env_of(**{name: "2"})


def test_torchruns_wait_for_its_ranks_is_ours_unless_the_user_chose() -> None:
    assert env_of()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "60"
    chosen = env_of(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5")

    assert chosen["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"


def test_what_was_inherited_is_not_changed() -> None:
    inherited = {"PATH": "/bin"}

    job_env(inherited, argv=TORCHRUN, socket_path="s", launch="l", job_id="j", shutdown_timeout_s=1)

    assert inherited == {"PATH": "/bin"}
