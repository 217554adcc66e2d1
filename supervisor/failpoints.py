"""The supervisor's failpoints; see `trainer_sdk.protocol.failpoints` for how to ask for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from supervisor.errors import ConfigError, TransientStoreError
from trainer_sdk.protocol import failpoints
from trainer_sdk.protocol.errors import ProtocolError


class FailpointError(TransientStoreError):
    """A failure that a test asked for."""

    error_id = "failpoint"
    mend = "take LASTGASP_FAILPOINTS out of the environment"


_FAILPOINTS = failpoints.Failpoints(fail=FailpointError)


def hit(name: str) -> None:
    """Pass a failpoint.

    Raises:
        ValueError: the name is not declared.
        ConfigError: the environment asks for something unknown.
        FailpointError, OSError: a test asked for it.
    """
    with _config_errors():
        _FAILPOINTS.hit(name)


def reload() -> None:
    """Read the environment again and forget the hits: for tests within one process."""
    with _config_errors():
        _FAILPOINTS.reload()


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise ConfigError(error.message, hint=error.hint) from error
