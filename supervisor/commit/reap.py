"""Abort uploads that no generation can finish any more, so that no store bills for them.

An upload belongs to the generation in its key. Once a newer one is claimed, the older can commit
nothing, so what it left unfinished is dead, whatever its age: no clock decides.
"""

from __future__ import annotations

from supervisor.clock import Deadline
from supervisor.commit.log import CALL_TIMEOUT_S, CommitLog
from trainer_sdk.protocol.errors import ProtocolError
from trainer_sdk.protocol.names import DATA_PREFIX, parse_data_key


def reap_uploads(log: CommitLog, *, gen: int, deadline: Deadline) -> int:
    """Abort this job's uploads of generations below `gen`, which must be claimed; returns how many.

    Raises:
        StoreError: the rest stays; it costs money and harms nothing.
    """
    num_reaped = 0
    prefix = log.keys.full(DATA_PREFIX)
    for upload in log.store.open_uploads(prefix, timeout_s=deadline.sooner(CALL_TIMEOUT_S)):
        try:
            name = parse_data_key(log.keys.relative(upload.key))
        except ProtocolError:
            continue  # not one of ours
        if name.generation < gen:
            log.store.drop_upload(upload, timeout_s=deadline.sooner(CALL_TIMEOUT_S))
            num_reaped += 1
    return num_reaped
