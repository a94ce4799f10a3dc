"""Every table runs: `fedclade reproduce TABLE --quick`, on the real data of this machine."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedclade.cli.main import app
from fedclade.reproduce.execute import _is_available
from fedclade.reproduce.spec import STUDY_DATA, tables

UNPACKED = (
    "mnist",
    "fashion_mnist",
    "emnist47",
    "emnist62",
    "cifar100",
    "ag_news",
)  # what ../shared has
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.mark.slow
@pytest.mark.parametrize("name", tables())
def test_the_quick_version_of_every_table(
    name: str, real_data: Callable[[str], Path], tmp_path: Path
) -> None:
    table = tables()[name]
    root = [
        str(real_data(data).parent)
        for column in table.columns
        for data in column.data
        if data in UNPACKED
    ][:1]
    wanted = {table.settings_of(column).data for column in table.columns}
    if ("shakespeare",) in wanted:  # it is read as it is
        root = [str(SHARED)]
    if not any(
        data in STUDY_DATA or _is_available(data, next(iter(root), None))
        for each in wanted
        for data in each
    ):
        pytest.skip(
            f"real data: none of {', '.join(sorted({data for each in wanted for data in each}))} is"
            " here"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLT warns that the federation is too small for UMAP
        arguments = [
            "reproduce",
            name,
            "--quick",
            "--quiet",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "out"),
        ]
        result = CliRunner().invoke(app, [*arguments, *(["--data-root", root[0]] if root else [])])
    assert result.exception is None, result.exception
    cells = json.loads((tmp_path / "out" / "table.json").read_text())["cells"]
    assert cells
    assert all(cell["difference"] is None or cell["metric"] == "bytes" for cell in cells)
