"""The device of a run, the precision of its products, and torch's settings."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch

from fedclade.errors import InvalidInputError, require

Precision: TypeAlias = Literal["tf32", "float32", "bf16"]


def pick_device(device: str) -> torch.device:
    """The torch device of this name; "auto" is CUDA if there is a CUDA device."""
    device = str(device)  # also accepts a torch.device
    kind, _, index = device.partition(":")
    require(
        device in ("auto", "cpu", "cuda") or (kind == "cuda" and index.isdecimal()),
        "device",
        device,
        "must be 'auto', 'cpu', 'cuda' or 'cuda:' with a number",
    )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInputError(
            f"device = {device!r}: torch finds no CUDA device. Use device = 'cpu' or 'auto'.",
            "device",
        )
    if index:
        found = torch.cuda.device_count()
        allowed = f"torch finds {found} CUDA devices, from 'cuda:0' to 'cuda:{found - 1}'"
        require(int(index) < found, "device", device, allowed)
    return torch.device(device)


def check_precision(precision: str, device: torch.device) -> None:
    """Raise `InvalidInputError` unless the device can compute in this precision."""
    require(
        precision in get_args(Precision),
        "engine.precision",
        precision,
        "must be 'tf32', 'float32' or 'bf16'",
    )
    if precision == "bf16":
        require(
            has_bf16(device),
            "engine.precision",
            precision,
            f"this {'GPU' if device.type == 'cuda' else 'CPU'} has no instructions for bfloat16;"
            " use 'tf32' or 'float32'",
        )


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16. Without them torch computes in float32 and
    rounds, which is slower than float32 alone.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if platform.machine() in ("arm64", "aarch64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)


@contextmanager
def torch_settings(device: torch.device, precision: Precision) -> Iterator[None]:
    """One thread and this precision for torch; the caller's settings come back after it."""
    threads, float32, cudnn = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn,
    )
    before = (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)
    torch.set_num_threads(1)
    if device.type == "cuda":
        fast = precision != "float32"
        torch.set_float32_matmul_precision("high" if fast else "highest")
        # Kernels must not be chosen by timing: two runs could differ.
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = fast, True, False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(float32)
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
