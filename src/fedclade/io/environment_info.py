"""The machine, the versions and the commit of a measurement; every file of results has them."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from fedclade import __version__

PACKAGES = ("numpy", "scipy", "scikit-learn", "umap-learn", "numba")


def environment_info(device: str = "cpu") -> dict[str, str]:
    """Machine, number of cores, commit and versions.

    The commit ends with "+" if the source has uncommitted changes. For a copy without a git
    history, set FEDCLADE_COMMIT.

    Args:
        device: "cpu", or a CUDA device whose name is the machine's name.
    """
    return {
        "machine": torch.cuda.get_device_name() if device != "cpu" else _processor(),
        "cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "commit": os.environ.get("FEDCLADE_COMMIT") or _commit() or "unknown",
        "python": platform.python_version(),
        "fedclade": __version__,
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _commit() -> str:
    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True
        )
        return process.stdout.strip() if process.returncode == 0 else ""

    return git("rev-parse", "--short", "HEAD") + "+" * bool(
        git("status", "--porcelain", "--untracked-files=no", ".")
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
