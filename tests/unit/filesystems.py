"""File systems of a known size, for tests of full disks. Needs root, which tests have in CI."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tmpfs(folder: Path, *, size: str) -> Iterator[Path]:
    """A small tmpfs at `folder`, gone afterwards."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "lastgasp-test", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        # Lazily: a failed test may still hold a file open, and the next one must not suffer.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
