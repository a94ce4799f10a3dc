"""docs/real_federations.md has the numbers and the groups of results/papers/flamby_heart.json."""

from pathlib import Path

from fedclade.io.compact_json import read_results
from fedclade.reproduce.compare_to_paper import Cell
from fedclade.reproduce.markdown import from_json
from fedclade.reproduce.studies.hospitals import EXPECTED_PAIRS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "real_federations.md").read_text()
COLUMNS = ("Cleveland", "Hungary", "Switzerland", "Long Beach", "mean of the hospitals")
ROWS = (
    *("Pooled", "Local", "FedAvg", "FedAvg, lr 0.01"),
    *("Clade", "Clade, lr 0.01", "CladeGroups", "CladeGroups, lr 0.01"),
)


def cells() -> dict[tuple[str, str], Cell]:
    outcome = from_json(read_results(ROOT / "results" / "papers" / "flamby_heart.json"))
    return {(cell.row, cell.column): cell for cell in outcome.cells}


def accuracy_lines() -> list[str]:
    found = cells()
    lines = []
    for row in ROWS:
        texts = []
        for column in COLUMNS:
            cell = found[row, column]
            published = "" if cell.paper is None else f" ({cell.paper:.1f})"
            texts.append(f"{cell.mean:.1f}{published}")
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return lines


def group_lines() -> list[str]:
    found = cells()
    assert set(found["CladeGroups", "another pair in one group"].values) == {0.0}
    for row in ("Clade", "Clade, lr 0.01"):  # as the page says: these groups in every seed
        assert found[row, "groups"].values == found["CladeGroups", "groups"].values
    lines = []
    for seed in range(5):
        groups = []
        for first, second in EXPECTED_PAIRS:
            together = found["CladeGroups", f"{first} and {second} in one group"].values[seed]
            groups += [f"{{{first}, {second}}}"] if together else [f"{{{first}}}", f"{{{second}}}"]
        lines.append(f"| {seed} | {', '.join(groups)} |")
    return lines


def test_the_accuracies_are_those_of_the_results() -> None:
    for line in accuracy_lines():
        assert line in PAGE


def test_the_groups_are_those_of_the_results() -> None:
    for line in group_lines():
        assert line in PAGE


def test_the_page_says_how_many_numbers_are_within_the_tolerance() -> None:
    marks = [cell.mark for cell in cells().values() if cell.paper is not None]
    assert f"{marks.count('within')} of its {len(marks)} published numbers" in PAGE.replace(
        "\n", " "
    )
