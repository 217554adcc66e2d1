"""A rank's failpoints; see `trainer_sdk.protocol.failpoints` for how to ask for one."""

from __future__ import annotations

from trainer_sdk.errors import TrainerSdkError
from trainer_sdk.protocol.failpoints import Failpoints

hit = Failpoints(fail=TrainerSdkError).hit
