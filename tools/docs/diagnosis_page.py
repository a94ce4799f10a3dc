"""The tables of docs/diagnosis.md, from results/diagnosis.json (benchmarks/diagnosis.py).

python tools/docs/diagnosis_page.py [--out docs/diagnosis.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from markdown_table import replace_block, table

from fedclade.io.compact_json import read_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "results" / "diagnosis.json", ROOT / "docs" / "diagnosis.md"
NAMES = {"fedavg": "FedAvg", "local": "Local", "ifca": "IFCA", "cfl": "CFL", "clade": "Clade"}
Row = dict[str, Any]


def tables(results: dict[str, Any]) -> str:
    """Kinds and groups over all seeds, then advice for the seeds with training, then confidence."""
    return "\n".join(
        [
            kinds_table(results["rows"], results["expected"]),
            advice_table([row for row in results["rows"] if "final" in row]),
            confidence_table(results["scarce"]),
        ]
    )


def kinds_table(rows: list[Row], expected: dict[str, Row]) -> str:
    lines: list[list[str]] = []
    kinds: list[bool] = []
    groups: list[bool] = []
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        for name, planted in expected.items():
            seeds = [row for row in rows if (row["dataset"], row["federation"]) == (dataset, name)]
            kind = [row["kind"] == planted["kind"] for row in seeds]
            kinds += kind
            sure = sum(row["sure"] for row in seeds) / len(seeds)
            number, ari = "none found", "–"
            if planted["groups"] is not None:
                right = [row["groups"] == planted["groups"] for row in seeds]
                groups += right
                number = f"{sum(right)} of {len(right)} ({planted['groups']})"
                ari = f"{min(row['ari'] or 0.0 for row in seeds):.2f}"
            elif any(row["groups"] is not None for row in seeds):
                number = "found: " + ", ".join(str(row["groups"]) for row in seeds)
            share = f"{sum(kind)} of {len(kind)}"
            lines.append([dataset, name, share, number, ari, f"{100 * sure:.0f} %"])
    head = ["data", "planted", "kind right", "groups right (true)", "least ARI", "mean confidence"]
    return (
        f"{table(head, lines)}\n"
        f"Kind right in {_share(kinds, 'federations')};"
        f" number of groups right in {_share(groups, 'that have groups')}.\n"
    )


def _share(right: list[bool], what: str) -> str:
    return f"{sum(right)} of {len(right)} {what} ({100 * sum(right) / len(right):.1f} %)"


def advice_table(rows: list[Row]) -> str:
    head = ["data", "planted", "seed", *NAMES.values(), "recommended", "behind the best"]
    lines: list[list[str]] = []
    behind: list[float] = []
    for row in rows:
        final = row["final"]
        behind.append(max(final[method] for method in NAMES) - final["recommended"])
        settings = "".join(f", {key} = {value}" for key, value in row["settings"].items())
        lines.append(
            [
                row["dataset"],
                row["federation"],
                str(row["seed"]),
                *(f"{final[method]:.1f}" for method in NAMES),
                NAMES[row["method"]] + settings,
                f"{max(0.0, behind[-1]):.2f}",
                f"{row['gain']:+.1f}, {final['recommended'] - final['fedavg']:+.1f}",
            ]
        )
    good = sum(gap <= 1 for gap in behind)
    return (
        f"{table([*head, 'gain over FedAvg: expected, true'], lines)}\n"
        f"Within one point of the best of the five: {good} of {len(behind)};"
        f" largest difference: {max(behind):.2f} points.\n"
    )


def confidence_table(rows: list[Row]) -> str:
    lines = []
    for least, most in ((0.0, 0.6), (0.6, 0.9), (0.9, 1.0)):
        right = [row["right"] for row in rows if least <= row["sure"] < most]
        share = f"{100 * sum(right) / max(1, len(right)):.0f} %"
        lines.append([f"{100 * least:.0f} to {100 * most:.0f} %", str(len(right)), share])
    return table(["confidence", "federations", "kind right"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    out: Path = parser.parse_args().out
    out.write_text(replace_block(PAGE.read_text(), "diagnosis", tables(read_results(RESULTS))))


if __name__ == "__main__":
    main()
