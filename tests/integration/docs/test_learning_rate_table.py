"""The table about `lr = "auto"` in docs/experiments.md has the numbers of results/."""

from __future__ import annotations

import statistics
from pathlib import Path

from fedclade.io.compact_json import read_results

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_has_the_measured_numbers() -> None:
    page = (ROOT / "docs" / "experiments.md").read_text()
    _, _, section = page.partition('### `lr = "auto"`')
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    rows = read_results(ROOT / "results" / "methods" / "learning_rate_search.json")["rows"]
    federations = list(dict.fromkeys(row["federation"] for row in rows))
    for federation, line in zip(federations, lines[2:], strict=True):
        expected = []
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [
                row for row in rows if (row["federation"], row["method"]) == (federation, method)
            ]
            assert len(own) == 3
            expected += [
                f"{statistics.fmean(row['default'] for row in own):.1f}",
                f"{statistics.fmean(row['auto'] for row in own):.1f}",
                ", ".join(f"{row['chosen_lr']:g}" for row in own),
            ]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == expected
