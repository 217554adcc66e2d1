"""What the images in a store hold, read by stock safetensors."""

from __future__ import annotations

import safetensors.torch

from tests.e2e.harness import Cluster
from tests.jobs.toy import digest

MOMENTS_WEIGHTS = ("0.weight", "0.bias", "2.weight", "2.bias")


def saved_weights(cluster: Cluster) -> dict[int, str]:
    """The digest of the weights of the moments job in every image of its store, by step."""
    found = {}
    for path in (cluster.folder / "store").rglob("*"):
        if path.is_file() and "/data/" in str(path):
            image = safetensors.torch.load_file(path)
            step = int(path.parent.name)
            found[step] = digest(*(image[f"model/{name}"] for name in MOMENTS_WEIGHTS))
    return found
