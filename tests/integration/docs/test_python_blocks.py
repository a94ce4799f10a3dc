"""Every Python block of the README and the docs runs, those of a page in order and in one
namespace.

Runs have two rounds: the test checks that the code runs, not its accuracy.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.docs.markdown import ROOT, blocks, name_of, pages

import fedclade as fc

ROUNDS = 2
BLOCKS = {
    name_of(page): [block for block in blocks(page) if block.language == "python"]
    for page in pages()
}
SLOW = {"docs/methods/flt.md"}  # UMAP compiles
NEEDS_DATA = {"docs/emd.md": "emnist62"}


class MyNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)


def digits() -> dict[str, Any]:
    return {
        "clients": fc.data.partition(
            fc.data.load("digits"),
            fc.data.LabelClusters(clusters=5, classes=2),
            clients=20,
            seed=0,
            probe=None,
        )
    }


def pictures() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "clients": fc.data.from_arrays(
            [(rng.random((12, 1, 28, 28), dtype=np.float32), np.arange(12) % 10) for _ in range(20)]
        )
    }


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    xs = {
        f"x{client}{part}": rng.normal(size=(12, 6)).astype("float32")
        for client in (0, 1)
        for part in ("", "_test")
    }
    return {**xs, **{name.replace("x", "y"): np.arange(12) % 3 for name in xs}, "MyNet": MyNet}


def regression() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pairs = [
        (rng.normal(size=(12, 6)).astype("float32"), rng.normal(size=12).astype("float32"))
        for _ in range(4)
    ]
    return {"sensors": fc.data.from_arrays([(*pair, *pair) for pair in pairs])}


def first_run() -> dict[str, Any]:
    fc.run(fc.Clade(), digits()["clients"], model=fc.models.MLP(16), rounds=2, out="runs/first")
    return {}


# Names that the blocks of a page use and do not define.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": arrays,
    "docs/data.md": arrays,
    "docs/python.md": regression,
    "docs/report.md": first_run,
    "docs/methods/flt.md": pictures,
    **{
        f"docs/methods/{name}.md": digits
        for name in ("clade", "clade_groups", "cfl", "flis", "fedgmcc", "fedsem", "pca_hc", "pacfl")
    },
    "docs/diagnosis.md": digits,
    "docs/personal.md": digits,
}


def marked(page: str) -> object:
    return pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page


@pytest.mark.parametrize(
    "page",
    [marked(page) for page, found in BLOCKS.items() if any(block.file is None for block in found)],
)
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    whole = fc.run

    def short(*given: Any, rounds: int = ROUNDS, **more: Any) -> fc.Result:
        return whole(*given, rounds=min(rounds, ROUNDS), **more)

    if page in NEEDS_DATA:
        monkeypatch.setenv(
            "FEDCLADE_DATA", str(request.getfixturevalue("real_data")(NEEDS_DATA[page]).parent)
        )
    monkeypatch.setattr(fc, "run", short)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(
        sys.modules, "page", module
    )  # dataclasses look for the module of their class
    given = {"fc": fc, "torch": torch, "dataclass": dataclass, **GIVEN.get(page, dict)()}
    for block in BLOCKS[page]:
        vars(module).update(given)
        if block.file is None:
            exec(
                compile("\n" * block.line + block.text, ROOT / page, "exec", dont_inherit=True),
                vars(module),
            )


def test_every_entry_belongs_to_a_page() -> None:
    assert GIVEN.keys() | SLOW | NEEDS_DATA.keys() <= BLOCKS.keys()
