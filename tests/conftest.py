"""Fixtures for all tests. Tests that need real data are skipped if the data are not available."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedclade.conformance import example_clients
from fedclade.data import Clients, LabelClusters, load, partition
from fedclade.registry import REGISTRY

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
UNPACK = ROOT.parent / "shared" / "data" / "unpack.py"
UNPACKED = ROOT / "data"


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections, which take a tenth of a second otherwise.

    An engine that runs out of memory starts a collection.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """The path of NAME.npz: from $FEDCLADE_DATA, or unpacked once from ../shared/data into
    ./data.
    """

    def find(name: str) -> Path:
        for folder in (os.environ.get("FEDCLADE_DATA"), UNPACKED):
            if folder and (path := Path(folder) / f"{name}.npz").exists():
                return path
        if not UNPACK.exists():
            pytest.skip(
                f"real data: no {name}.npz in $FEDCLADE_DATA or {UNPACKED}, and no {UNPACK} to"
                " unpack it from"
            )
        UNPACKED.mkdir(exist_ok=True)
        path = UNPACKED / f"{name}.npz"
        with (UNPACKED / ".lock").open("w") as lock:  # two test processes may need the same file
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                subprocess.run(
                    [sys.executable, UNPACK, UNPACKED, name], check=True, stdout=subprocess.DEVNULL
                )
        return path

    return find


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    """Remove what a test registers."""
    before = {kind: dict(things) for kind, things in REGISTRY.items()}
    yield
    for kind, things in before.items():
        REGISTRY[kind].clear()
        REGISTRY[kind].update(things)


@pytest.fixture(scope="session")
def digits() -> Clients:
    """Twenty clients in five groups."""
    return partition(
        load("digits"), LabelClusters(clusters=5, classes=2), clients=20, seed=0, probe=None
    )


@pytest.fixture(scope="session")
def small_digits() -> Clients:
    """The groups of `digits` with 12 samples a client, for tests that measure no accuracy."""
    return example_clients.small_digits()


@pytest.fixture
def ragged() -> Clients:
    """Six clients with 1 to 40 samples of 6 numbers and three classes; some have one class only."""
    return example_clients.ragged_clients()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium. Without one, the tests that need it are skipped."""
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="the pip package playwright is not installed (pip install '.[dev]')",
    )
    executable = (
        os.environ.get("FEDCLADE_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if executable is None:
        pytest.skip("no Chromium: install the package chromium, or set $FEDCLADE_CHROMIUM")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()
