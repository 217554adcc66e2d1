"""The process's generators as bytes: python, numpy (if imported), torch CPU, CUDA devices in use.

A state has the same length each time, so a plan stays valid. Restoring draws nothing.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainer_sdk.errors import TrainerSdkError, UnsupportedState

PREFIX = "lastgasp/rng/"
PYTHON = "python"
NUMPY = "numpy"
TORCH = "torch"
_CUDA = "cuda/"
_CURRENT = "cuda/current"
# random.Random.getstate(): version, 624 words and the position, the spare gauss value or None.
_PYTHON_FORM = struct.Struct("<I625I?d")
# numpy's legacy MT19937 state: 624 words, position, has_gauss, gauss.
_NUMPY_FORM = struct.Struct("<624Iiid")


class RngError(TrainerSdkError):
    """A saved generator state that this process cannot take."""


def capture_rng() -> dict[str, bytes]:
    """The state of every generator of this process, by short name.

    Raises:
        UnsupportedState: numpy's global generator is not MT19937.
    """
    states = {PYTHON: _capture_python(), TORCH: _tensor_bytes(torch.random.get_rng_state())}
    if "numpy" in sys.modules:
        states[NUMPY] = _capture_numpy()
    if _has_cuda():
        states |= _capture_cuda()
    return states


def restore_rng(states: Mapping[str, bytes]) -> list[str]:
    """Put generators back; draws nothing.

    Returns:
        The names of saved generators that this process does not have.

    Raises:
        RngError: a state of another form.
    """
    missing = []
    for name, state in states.items():
        try:
            if not _restore_one(name, state):
                missing.append(name)
        except (struct.error, ValueError, TypeError, RuntimeError) as error:
            raise RngError(f"generator {name}: the saved state does not fit: {error}") from error
    return missing


def derive_rng(states: Mapping[str, bytes], *, rank: int, world_size: int) -> None:
    """Seed every generator for a rank that the checkpoint did not have.

    Rule: seed = first 8 bytes of SHA-256(saved torch and python state, rank, world size).
    """
    content = states.get(TORCH, b"") + states.get(PYTHON, b"") + f"{rank}/{world_size}".encode()
    seed_all(int.from_bytes(hashlib.sha256(content).digest()[:8], "little"))


def seed_all(seed: int) -> None:
    """Seed python, numpy (if imported), torch CPU and initialised CUDA devices."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave every generator as it was, whatever the block draws."""
    states = capture_rng()
    try:
        yield
    finally:
        restore_rng(states)


def _has_cuda() -> bool:
    return torch.cuda.is_available() and bool(
        torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    )


def _tensor_bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _bytes_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _capture_python() -> bytes:
    version, words, gauss = random.getstate()
    return _PYTHON_FORM.pack(version, *words, gauss is not None, 0.0 if gauss is None else gauss)


def _restore_python(state: bytes) -> None:
    version, *words, has_gauss, gauss = _PYTHON_FORM.unpack(state)
    random.setstate((version, tuple(words), gauss if has_gauss else None))


def _capture_numpy() -> bytes:
    state = sys.modules["numpy"].random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise UnsupportedState(
            "numpy.random", f"the global generator is a {state['bit_generator']}, not MT19937"
        )
    inner = state["state"]
    words = [int(word) for word in inner["key"]]
    return _NUMPY_FORM.pack(*words, int(inner["pos"]), int(state["has_gauss"]), state["gauss"])


def _restore_numpy(state: bytes) -> None:
    import numpy  # saved, so the script uses it and would import it anyway

    *words, position, has_gauss, gauss = _NUMPY_FORM.unpack(state)
    key = numpy.array(words, dtype=numpy.uint32)
    numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))


def _capture_cuda() -> dict[str, bytes]:
    states = {}
    current = torch.cuda.current_device()
    for index in range(torch.cuda.device_count()):
        name = _CURRENT if index == current else f"{_CUDA}{index}"
        states[name] = _tensor_bytes(torch.cuda.get_rng_state(index))
    return states


def _restore_cuda(name: str, state: bytes) -> bool:
    if not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if name == _CURRENT else int(name.removeprefix(_CUDA))
    if index >= torch.cuda.device_count():
        return False
    torch.cuda.set_rng_state(_bytes_tensor(state), index)
    return True


def _restore_one(name: str, state: bytes) -> bool:
    if name == PYTHON:
        _restore_python(state)
    elif name == NUMPY:
        _restore_numpy(state)
    elif name == TORCH:
        torch.random.set_rng_state(_bytes_tensor(state))
    elif name.startswith(_CUDA):
        return _restore_cuda(name, state)
    else:
        raise RngError(f"unknown generator {name!r}")
    return True
