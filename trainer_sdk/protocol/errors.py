"""Errors of the shared part: bytes from outside that are not what the protocol says."""

from __future__ import annotations


class ProtocolError(Exception):
    """Bytes from outside that do not follow the protocol; `hint` says what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class VersionMismatch(ProtocolError):
    """The other side speaks a version that this one does not know."""


class ImageError(ProtocolError):
    """A shard image that is not a safetensors file of our layout."""
