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
NAMES = {
    "fedavg": "FedAvg",
    "fedavg + personal layer": "FedAvg, personal layer",
    "scaffold": "SCAFFOLD",
    "local": "Local",
    "clade_groups": "CladeGroups",
    "clade": "Clade",
    "cfl": "CFL",
    "ifca": "IFCA",
}
Row = dict[str, Any]


def tables(results: dict[str, Any]) -> str:
    """Advice, then kinds and groups, then confidence."""
    return "\n".join(
        [
            advice_table([row for row in results["advice"] if "advice" in row]),
            kinds_table(results["rows"], results["expected"]),
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
    """The accuracy of each method, and how far the recommended one is behind the best."""
    head = ["federation", "seed", "kind found", *NAMES.values(), "recommended", "behind the best"]
    lines: list[list[str]] = []
    behind: list[float] = []
    covered: list[bool] = []
    for row in rows:
        final, advice = row["final"], row["advice"]
        behind.append(max(final.values()) - final[advice["method"]])
        gain, error = advice["gain"], advice["gain_stderr"]
        true = final[advice["method"]] - final["fedavg"]
        covered.append(true >= gain - 2 * error)
        lines.append(
            [
                row["federation"],
                str(row["seed"]),
                advice["kind"],
                *(f"{final[method]:.1f}" for method in NAMES),
                NAMES[advice["method"]],
                f"{behind[-1]:.2f}",
                f"{gain:+.1f} ± {error:.1f}; {true:+.1f}",
            ]
        )
    gain = "gain over FedAvg: expected ± standard error; true"
    return (
        f"{table([*head, gain], lines)}\n"
        "Recommended method within one point of the best of the eight:"
        f" {_share([gap <= 1 for gap in behind], 'runs')};"
        f" largest difference: {max(behind):.2f} points.\n"
        "True gain not below the expected gain minus two standard errors:"
        f" {_share(covered, 'runs')}.\n"
    )


def confidence_table(rows: list[Row]) -> str:
    lines: list[list[str]] = []
    for least, most in ((0.0, 0.6), (0.6, 0.9), (0.9, 1.0)):
        right = [row["right"] for row in rows if least <= row["sure"] < most]
        share = f"{100 * sum(right) / max(1, len(right)):.0f} %"
        lines.append([f"{100 * least:.0f} to {100 * most:.0f} %", str(len(right)), share])
    low, middle, _ = (share for *_, share in lines)
    return (
        f"{table(['confidence', 'federations', 'kind right'], lines)}\n"
        f"Below 90 % the stated confidence says little: {low} of the kinds were right below 60 %,"
        f" and {middle} from 60 to 90 %.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    out: Path = parser.parse_args().out
    out.write_text(replace_block(PAGE.read_text(), "diagnosis", tables(read_results(RESULTS))))


if __name__ == "__main__":
    main()
