"""Directories that nobody else may look into, or swap what is in them."""

from __future__ import annotations

import contextlib
import os


def make_private(path: str) -> None:
    """Make a directory and its missing parents, each of mode 0700 whatever the umask.

    What is there already keeps its mode: it is somebody's decision.

    Raises:
        OSError
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_private(parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.mkdir(path, 0o700)
