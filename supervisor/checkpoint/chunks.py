"""How an image is cut: the same chunk is hashed, written, sent and verified. Pure."""

from __future__ import annotations

CHUNK_BYTES = 16 << 20
PAGE_BYTES = 4096
# Source: S3 User Guide, multipart upload limits: at most 10,000 parts.
MAX_CHUNKS = 10_000


def chunk_size(image_bytes: int) -> int:
    """Bytes of a chunk of an image of this size: 16 MiB, or what 10,000 parts need."""
    needed = -(-image_bytes // MAX_CHUNKS)
    return max(CHUNK_BYTES, -(-needed // PAGE_BYTES) * PAGE_BYTES)


def chunk_ranges(image_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Start and end of every chunk."""
    return [
        (start, min(start + chunk_bytes, image_bytes))
        for start in range(0, image_bytes, chunk_bytes)
    ]
