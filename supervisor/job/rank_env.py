"""The environment of the job: what torchrun and the ranks get from us. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_sdk.protocol import environment

# Present in every process of a job, however it was started; how strays are found.
MARKER = environment.LAUNCH
_RENDEZVOUS_FLAGS = (
    "--standalone",
    "--rdzv-backend",
    "--rdzv_backend",
    "--rdzv-endpoint",
    "--rdzv_endpoint",
    "--rdzv-id",
    "--rdzv_id",
    "--master-addr",
    "--master_addr",
    "--master-port",
    "--master_port",
    "--nnodes",
)
# torchrun takes every flag from PET_<FLAG> too. Source: torch/distributed/argparse_util.py.
_RENDEZVOUS_NAMES = ("PET_STANDALONE", "PET_RDZV", "PET_MASTER_", "PET_NNODES")
_SECRET_PREFIXES = ("LASTGASP_STORE__",)


def job_env(
    inherited: Mapping[str, str],
    *,
    argv: Sequence[str],
    socket_path: str,
    launch: str,
    job_id: str,
    shutdown_timeout_s: int,
) -> dict[str, str]:
    """The environment for torchrun.

    A torchrun without any rendezvous setting gets `--standalone` by its environment, so that two
    jobs on one host never meet on the default port.

    Source: torch/distributed/run.py, `check_env` (PET_STANDALONE) and
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT (torch 2.12 and newer; older ones ignore it).
    """
    env = {
        name: value for name, value in inherited.items() if not name.startswith(_SECRET_PREFIXES)
    }
    env[environment.SOCKET] = socket_path
    env[environment.LAUNCH] = launch
    env[environment.JOB_ID] = job_id
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(shutdown_timeout_s))
    if _lacks_rendezvous(argv, inherited):
        env["PET_STANDALONE"] = "1"
    return env


def _lacks_rendezvous(argv: Sequence[str], inherited: Mapping[str, str]) -> bool:
    is_given = any(
        argument == flag or argument.startswith(flag + "=")
        for argument in argv
        for flag in _RENDEZVOUS_FLAGS
    )
    return not is_given and not any(name.startswith(_RENDEZVOUS_NAMES) for name in inherited)
