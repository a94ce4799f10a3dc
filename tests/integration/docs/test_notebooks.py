"""The notebooks run, and their saved outputs are those of a new execution."""

from __future__ import annotations

import copy
import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedclade.data.datasets import CACHE

nbformat = pytest.importorskip(
    "nbformat", reason="nbformat is not installed: pip install 'fedclade[docs]'"
)
pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'fedclade[docs]'")

ROOT = Path(__file__).resolve().parents[3]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "docs" / "notebooks.py"))
NOTEBOOKS: list[Path] = TOOL["NOTEBOOKS"]
NEEDS: dict[str, str] = TOOL["NEEDS"]
RESULTS = {
    "newcomer": ["groups found: 5", "(ARI, 1 is perfect): 1.00", "40 of 40 clients gain, 0 lose"],
    "researcher": ["clade_groups  ", "over 3 seeds, ARI 1.00", "quick version"],
    "engineer": ["(2, 1)", "equal bit for bit: True", "group-1/model.safetensors"],
    "hospitals": ["fedavg and local: no difference shown", "fedavg and clade: no difference shown"],
    "permuted_labels": ["clade_groups is better than fedavg", "4  1.00"],
    "drift": ["4  1.00", "clade_groups"],
    "writers": ["No groups: every client differs", "clade is better than fedavg"],
    "roles": ["clade is better than fedavg", "clade is better than local"],
}
LONGEST = 92  # characters that fit between the menus of the site
COMPARED = "method  accuracy %  seconds\nfedavg       27.30     6.82\n"
TABLE = " method  accuracy %   s\n ────\n fedavg  62.27 ± 2.56  0.2 \n"


def test_there_are_three_paths_and_five_stories() -> None:
    assert [file.stem for file in NOTEBOOKS] == sorted(RESULTS)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_saved_notebook_has_outputs_is_small_and_names_no_folder_of_a_machine(file: Path) -> None:
    text = file.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) // 2
    assert file.stat().st_size < TOOL["MAX_BYTES"]
    lines = [line for cell in code for line in "".join(cell["source"]).splitlines()]
    assert max(map(len, lines)) <= LONGEST
    assert not any(place in text for place in ("/home/", "/root/", "/work/", "/tmp/", "\\u001b"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_the_saved_outputs_show_what_the_text_claims(file: Path) -> None:
    outputs = "".join(map(TOOL["output_text"], TOOL["outputs"](nbformat.read(file, as_version=4))))
    assert all(result in outputs for result in RESULTS[file.stem])


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_new_execution_gives_the_saved_outputs(
    file: Path, real_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name := NEEDS.get(file.stem)) is not None:
        monkeypatch.setenv("FEDCLADE_DATA", str(_data_folder(name, real_data)))
    saved = nbformat.read(file, as_version=4)
    assert TOOL["stale_cells"](saved, TOOL["execute"](file)) == [], "run `make notebooks`"


def _data_folder(name: str, real_data: Callable[[str], Path]) -> Path:
    """The folder of a data set; the test is skipped if there is none."""
    if name == "mnist":  # with the writers of its images
        return real_data(name).parent
    searched = (os.environ.get("FEDCLADE_DATA", "data"), CACHE, ROOT.parent / "shared" / "data")
    places = [Path(place).expanduser() for place in searched]
    for place in places:
        if (place / f"{name}.csv").exists() or (place / f"{name}.csv.xz").exists():
            return place
    pytest.skip(f"no {name}.csv or {name}.csv.xz in {', '.join(map(str, places))}")


def test_the_stories_of_other_data_say_what_they_need_and_where_it_belongs() -> None:
    for stem, name in NEEDS.items():
        first, *_ = json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text())["cells"]
        text = "".join(first["source"])
        assert "**Data**" in text
        assert f"{name}." in text
        assert "~/.cache/fedclade" in text


@pytest.mark.parametrize(
    ("saved", "new"),
    [
        (TABLE, TABLE.replace("0.2 ", "11.5").replace("────", "─────")),
        (TABLE, TABLE.replace("62.27", "62.29")),
        ("<Net object at 0x7f12>", "<Net object at 0x55ab>"),
        ("saved in /tmp/abc1/runs", "saved in /tmp/xyz2/runs"),
        (COMPARED, COMPARED.replace("6.82", "16.9")),
    ],
)
def test_times_folders_addresses_and_rounding_do_not_make_an_output_stale(
    saved: str, new: str
) -> None:
    assert TOOL["same_text"](saved, new)


@pytest.mark.parametrize(
    ("saved", "new"),
    [
        (TABLE, TABLE.replace("62.27", "72.27")),
        (TABLE, TABLE.replace("fedavg", "local")),
        (TABLE, TABLE + " local   95.07 ± 1.14  0.2 \n"),
        ("5 groups found", "4 groups found"),
        ("loss 0.12", "loss 0.19"),
        ("ARI 1.00", "ARI"),
    ],
)
def test_other_results_and_words_make_an_output_stale(saved: str, new: str) -> None:
    assert not TOOL["same_text"](saved, new)


def test_a_cell_whose_output_changed_is_named() -> None:
    saved = nbformat.read(ROOT / "notebooks" / "newcomer.ipynb", as_version=4)
    new = copy.deepcopy(saved)
    cell = next(cell for cell in new.cells if cell.get("outputs"))
    assert TOOL["stale_cells"](saved, new) == []
    cell.outputs[0].text += "one more line\n"
    assert TOOL["stale_cells"](saved, new) == [cell.id]
    cell.outputs.clear()
    assert TOOL["stale_cells"](saved, new) == [cell.id]
