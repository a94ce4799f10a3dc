"""`fedclade doctor`: versions, device, extras and data of this machine, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedclade import __version__
from fedclade.cli.console import out_console, print_json, print_out
from fedclade.cli.options import DataRootOption, JsonOption

REQUIRED = (
    *("torch", "numpy", "scipy", "scikit-learn", "safetensors", "pydantic", "typer", "click"),
    *("rich", "tomli-w", "threadpoolctl", "umap-learn", "jinja2", "matplotlib"),
    "typing-extensions",
)
# Extra -> what it is for, and its packages. A test compares both with pyproject.toml.
EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tables": ("CSV and Parquet files, data frames", ("pyarrow", "narwhals")),
    "images": ("folders of images", ("pillow",)),
    "hf": ("data sets of Hugging Face", ("datasets",)),
    "transformers": ("models of Hugging Face, adapters", ("transformers", "peft")),
    "flower": ("federations on Flower", ("flwr", "psutil")),
    "ray": ("one run on several cores or GPUs", ("ray",)),
    "privacy": ("differential privacy and secure sums", ("dp-accounting", "cryptography")),
    "onnx": ("export of models as ONNX", ("onnx", "onnxscript", "onnxruntime")),
    "metrics": ("AUROC, F1 and other metrics", ("torchmetrics",)),
    "frame": ("Result.to_frame()", ("pandas",)),
    "ot": ("distances by optimal transport", ("POT",)),
    "track": ("--track tensorboard", ("tensorboard",)),
    "mlflow": ("--track mlflow", ("mlflow-skinny",)),
}
_GIGABYTE = 1e9


@dataclass(frozen=True)
class Missing:
    """Something that this machine does not have.

    Args:
        what: what is missing.
        get: how to get it.
        required: whether fedclade cannot work without it.
    """

    what: str
    get: str
    required: bool = False


def doctor(data_root: DataRootOption = None, as_json: JsonOption = False) -> None:
    """Show versions, device, extras and data, and how to get what is missing.

    The exit code is 1 if something is missing that fedclade cannot work without.
    """
    missing: list[Missing] = []
    versions = {"fedclade": __version__, "python": platform.python_version()}
    for name in REQUIRED:
        versions[name] = _version(name) or "missing"
        if versions[name] == "missing":
            missing.append(Missing(name, f"pip install {name}", required=True))
    found = {
        "system": platform.platform(),
        "versions": versions,
        "device": _device(missing),
        "extras": _extras(missing),
        "data": _data(data_root, missing),
        "disk": _disk(missing),
    }
    _show(found, missing)
    if as_json:
        print_json(found | {"missing": [asdict(entry) for entry in missing]})
    if any(entry.required for entry in missing):
        raise typer.Exit(1)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device(missing: list[Missing]) -> dict[str, Any]:
    """The cores, and the GPUs that torch can use."""
    usable = hasattr(os, "sched_getaffinity")
    device: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)) if usable else os.cpu_count() or 1,
        "gpus": [],
    }
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of the system is missing
        missing.append(Missing(f"torch ({error})", "pip install --force-reinstall torch", True))
        return device
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        device["gpus"] = [torch.cuda.get_device_name(number) for number in range(count)]
    elif torch.version.cuda is not None:
        missing.append(
            Missing("a GPU for this build of torch", "check the driver with nvidia-smi, or use cpu")
        )
    return device


def _extras(missing: list[Missing]) -> dict[str, dict[str, Any]]:
    extras = {}
    for name, (use, packages) in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        is_here = None not in versions.values()
        extras[name] = {"for": use, "installed": is_here, "packages": versions}
        if not is_here:
            missing.append(Missing(f"{name}: {use}", f"pip install 'fedclade[{name}]'"))
    return extras


def _data(data_root: str | None, missing: list[Missing]) -> dict[str, Any]:
    """The folders that are searched for data sets, and the published ones that are in them."""
    if any(entry.required for entry in missing):  # data sets cannot be read without torch
        return {"folders": [], "found": []}
    from fedclade.data.dataset_catalog import CATALOGUE
    from fedclade.data.datasets import places

    folders = places(data_root)
    here = [
        name
        for name, published in CATALOGUE.items()
        if published.find_files(folders)
        or any((folder / f"{name}.npz").is_file() for folder in folders)
    ]
    away = [name for name in CATALOGUE if name not in here]
    if away:
        missing.append(
            Missing(f"data sets: {', '.join(away)}", "fedclade data get NAME (digits needs none)")
        )
    existing = [{"path": str(folder), "exists": folder.is_dir()} for folder in folders]
    return {"folders": existing, "found": here}


def _disk(missing: list[Missing]) -> dict[str, Any]:
    """Where runs are written: the current folder."""
    folder = Path.cwd()
    writable = os.access(folder, os.W_OK)
    if not writable:
        missing.append(Missing(f"the right to write to {folder}", "use --out DIR for your runs"))
    free = shutil.disk_usage(folder).free / _GIGABYTE
    return {"folder": str(folder), "writable": writable, "free_gb": round(free, 1)}


def _show(found: dict[str, Any], missing: list[Missing]) -> None:
    versions, device = found["versions"], found["device"]
    gpus = ", ".join(device["gpus"]) or "none that torch can use"
    folders = ", ".join(
        f"{folder['path']}{'' if folder['exists'] else ' (not there)'}"
        for folder in found["data"]["folders"]
    )
    disk = found["disk"]
    facts = {
        "fedclade": f"{versions['fedclade']}, Python {versions['python']}, {found['system']}",
        "packages": ", ".join(f"{name} {versions[name]}" for name in REQUIRED),
        "CPU": f"{device['cores']} cores",
        "GPU": gpus,
        "data folders": folders,
        "data sets": ", ".join(found["data"]["found"]) or "only those that come with fedclade",
        "runs": f"{disk['folder']}, {disk['free_gb']:,.1f} GB free",
    }
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name, escape(value))
    out_console.print(table)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("extra", "installed", "for"):
        table.add_column(heading)
    for name, extra in found["extras"].items():
        table.add_row(name, "yes" if extra["installed"] else "no", extra["for"])
    out_console.print(table)
    if not missing:
        print_out("Nothing is missing.")
    for entry in missing:
        print_out(f"{'Missing' if entry.required else 'Not here'}: {entry.what}. Get: {entry.get}")
