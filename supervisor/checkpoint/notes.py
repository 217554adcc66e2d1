"""Where uploads under way can be resumed, noted on the local disk. A help: without a note the bytes
are sent again, and what was sent is found by a sweep."""

from __future__ import annotations

import os
import re

import msgspec

from supervisor import failpoints
from supervisor.checkpoint.files import MAX_JSON_BYTES, NOT_JSON, write_synced
from supervisor.checkpoint.spool_errors import spool_error
from supervisor.private_dirs import make_private

UPLOADS = "uploads"
NOTES_FORMAT = 1
_NOTE = re.compile(r"^(\d{10})-(\d{12})\.json(\.tmp)?\Z")


class UploadTokens(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an upload under way can be resumed: shard "rank/name" to (key, token)."""

    fmt: int
    gen: int
    step: int
    shards: dict[str, tuple[str, str]]


class UploadNotes:
    """The notes of one job, one file a checkpoint."""

    def __init__(self, folder: str) -> None:
        """Make the folder below the spool's.

        Raises:
            SpoolError, SpoolFull
        """
        self._folder = os.path.join(folder, UPLOADS)
        try:
            make_private(self._folder)
        except OSError as error:
            raise spool_error(error, self._folder) from error

    def remember(self, tokens: UploadTokens) -> None:
        """Note where uploads can be resumed.

        Raises:
            SpoolError, SpoolFull
        """
        path = self._path(tokens.gen, tokens.step)
        try:
            failpoints.hit("spool.note.before")
            write_synced(path + ".tmp", msgspec.json.encode(tokens))
            os.rename(path + ".tmp", path)
            failpoints.hit("spool.note.after")
        except OSError as error:
            raise spool_error(error, path) from error

    def recall(self, *, gen: int, step: int) -> UploadTokens | None:
        """What was noted of this checkpoint's uploads."""
        try:
            with open(self._path(gen, step), "rb") as file:
                tokens = msgspec.json.decode(file.read(MAX_JSON_BYTES), type=UploadTokens)
        except (OSError, *NOT_JSON):
            return None
        return tokens if tokens.fmt == NOTES_FORMAT else None

    def forget(self, *, gen: int, step: int) -> None:
        """Remove the notes of this checkpoint and of older ones: they are settled.

        Raises:
            SpoolError: some are left, which costs nothing but their space.
        """
        try:
            for name in os.listdir(self._folder):
                match = _NOTE.match(name)
                if match is not None and (int(match[1]), int(match[2])) <= (gen, step):
                    os.unlink(os.path.join(self._folder, name))
        except OSError as error:
            raise spool_error(error, self._folder) from error

    def forget_before(self, gen: int) -> None:
        """Remove the notes of older generations: nobody goes on with their uploads.

        Raises:
            SpoolError
        """
        self.forget(gen=gen, step=-1)

    def _path(self, gen: int, step: int) -> str:
        return os.path.join(self._folder, f"{gen:010d}-{step:012d}.json")
