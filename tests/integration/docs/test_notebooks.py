"""The notebooks run from top to bottom, each in a process of its own and a folder of its own; they
are kept without what they print.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip(
    "nbformat", reason="nbformat is not installed: pip install 'fedclade[docs]'"
)
nbclient = pytest.importorskip(
    "nbclient", reason="nbclient is not installed: pip install 'fedclade[docs]'"
)

NOTEBOOKS = sorted((Path(__file__).resolve().parents[3] / "notebooks").glob("*.ipynb"))
SAYS = {
    "newcomer": [
        "groups found: 5, agreement with the planted ones (ARI, 1 is perfect): 1.00",
        "40 of 40 clients gain, 0 lose",
    ],
    "researcher": ["clade     ", "over 3 seeds, ARI 1.00", "quick version"],
    "engineer": ["BatchNorm1d", "the same to the bit: True", "group"],
}


def test_there_are_three() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["engineer", "newcomer", "researcher"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_is_kept_without_outputs_and_without_places(file: Path) -> None:
    cells = json.loads(file.read_text())["cells"]
    assert all(
        not cell["outputs"] and cell["execution_count"] is None
        for cell in cells
        if cell["cell_type"] == "code"
    )
    assert not any(place in file.read_text() for place in ("/home/", "/root/", "/work/", "/tmp/"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_it_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )  # `fedclade` in a cell
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    book = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in book.cells for output in cell.get("outputs", [])
    )
    for words in SAYS[file.stem]:
        assert words in printed
