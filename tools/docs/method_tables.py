"""The measured tables of docs/methods/, from results/methods/.

python tools/docs/method_tables.py [--check]

A table is between `<!-- table: NAME -->` and `<!-- end -->` in its page. benchmarks/flt_groups.py,
clade_groups.py, flis_beta.py and baselines.py write the results.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from markdown_table import replace_block, table
from scipy.stats import t as student_t

from fedclade.io.compact_json import read_results

ROOT = Path(__file__).resolve().parents[2]
PAGES, RESULTS = ROOT / "docs" / "methods", ROOT / "results" / "methods"
Results = dict[str, Any]
FIRST_REPORTED = 10  # seeds before it chose the constants of Clade and its rivals
IMAGES = ("mnist", "fashion_mnist")
NO_RIVALS = ("clade", "clade_groups", "oracle", "oracle+server")


def flt_groups(results: Results, scenario: str) -> str:
    """Rows: manifold, distance and cut; columns: k."""
    rows = [row for row in results["rows"] if row["scenario"].startswith(f"{scenario}:")]
    ks = list(dict.fromkeys(row["k"] for row in rows))
    lines: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        cells = lines.setdefault((row["manifold"], row["distance"], row["cut"]), [])
        cells.append(f"{row['right']}/{row['seeds']}, {row['ari']:.2f}")
    head = ["manifold", "distance", "cut", *(f"k = {k}" for k in ks)]
    return table(head, [[*setting, *cells] for setting, cells in lines.items()])


def clade_groups(results: Results) -> str:
    head = ["federation", "groups found (true)", "ARI: mean, minimum", "seeds", "seconds"]
    lines = []
    for row in results["rows"]:
        counts = ", ".join(f"{number}×{times}" for number, times in row["found"].items())
        lines.append(
            [
                row["federation"],
                f"{counts} ({row['groups']})",
                f"{row['ari_mean']:.3f}, {row['ari_min']:.3f}",
                str(row["seeds"]),
                f"{row['seconds']:.1f}",
            ]
        )
    return table(head, lines)


def clade_rivals(results: Results, data: tuple[str, ...], plus: bool) -> str:
    """Rows: data sets and federations; columns: Clade, its strongest rivals and what they miss.

    Args:
        results: the rows of benchmarks/clade.py.
        data: the data sets.
        plus: whether to name the strongest rival with Clade's server too.
    """
    runs: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in results["rows"]:
        if row["data"] in data and row["seed"] >= FIRST_REPORTED:
            of = runs.setdefault((row["data"], row["federation"]), {})
            of.setdefault(row["method"], {})[row["seed"]] = row["accuracy"]
    head = ["data", "federation", "FedAvg", "Local", "CladeGroups", "true groups", "Clade"]
    head += ["strongest rival", "Clade − rival, mean [95 %]"]
    head += ["strongest with the server", "difference"] if plus else []
    lines = []
    for (name, federation), of in runs.items():
        cells = [_mean(of.get(method)) for method in ("fedavg", "local", "clade_groups", "oracle")]
        line = [name, federation, *cells, _mean(of["clade"])]
        kinds = [lambda rival: "+" not in rival, lambda rival: "+" in rival]
        for is_kind in kinds[: 2 if plus else 1]:
            others = [rival for rival in of if is_kind(rival) and rival not in NO_RIVALS]
            chosen = results["rivals"].get(federation, []) if name == "digits" else []
            named = [rival for rival in others if rival in chosen]
            rival = max(named or others, key=lambda rival: mean(of[rival].values()))
            line += [f"{rival} {_mean(of[rival])}", _difference(of["clade"], of[rival])]
        lines.append(line)
    return table(head, lines)


def clade_costs(results: Results) -> str:
    """What Clade costs in units of FedAvg, for each federation."""
    sums: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in results["rows"]:
        if row["method"] in ("clade", "fedavg") and row["seed"] >= FIRST_REPORTED:
            of = sums.setdefault((row["data"], row["federation"], row["method"]), {})
            for name in ("bytes_up", "bytes_down", "cpu_s"):
                of[name] = of.get(name, 0.0) + row[name]
    lines = []
    for data, federation, method in sums:
        if method == "clade":
            clade, fedavg = sums[data, federation, method], sums[data, federation, "fedavg"]
            lines.append([data, federation, *(f"{clade[k] / fedavg[k]:.1f}" for k in clade)])
    return table(["data", "federation", "bytes up", "bytes down", "processor time"], lines)


def _mean(values: dict[int, float] | None) -> str:
    return f"{mean(values.values()):.1f}" if values else "–"


def _difference(clade: dict[int, float], rival: dict[int, float]) -> str:
    """The mean of the paired differences, and a 95 % interval of it by Student's t."""
    pairs = [clade[seed] - rival[seed] for seed in clade if seed in rival]
    center = mean(pairs)
    if len(pairs) < 2:
        return f"{center:+.1f}"
    error = stdev(pairs) / math.sqrt(len(pairs)) * float(student_t.ppf(0.975, len(pairs) - 1))
    return f"{center:+.2f} [{center - error:+.2f}, {center + error:+.2f}]"


def flis_beta(results: Results) -> str:
    """A table for each variant and kind of labels; the default β is bold."""
    tables: dict[tuple[str, str], list[list[str]]] = {}
    for row in results["rows"]:
        columns = zip(row["models"], row["ari"], row["accuracy"], strict=True)
        cells = [
            f"{models:.1f}, {'–' if ari is None else f'{ari:.2f}'}, {accuracy:.1f}"
            for models, ari, accuracy in columns
        ]
        lines = tables.setdefault((row["variant"], row["labels"]), [])
        lines.append([row["federation"], *cells])
    parts = []
    for (variant, labels), lines in tables.items():
        default = results["default_beta"][variant]
        betas = [f"**{beta}**" if beta == default else f"{beta}" for beta in results["betas"]]
        parts.append(f"**{variant.upper()}, {labels}**\n\n{table(['β', *betas], lines)}")
    return "\n".join(parts)


def scaffold(results: Results) -> str:
    rounds = list(results["rows"][0]["accuracy"])
    head = [f"accuracy % after {rounds[0]}", *rounds[1:-1], f"{rounds[-1]} rounds"]
    return table(
        ["local epochs", "method", *head],
        [
            [str(row["epochs"]), row["method"], *map(_spread, row["accuracy"].values())]
            for row in results["rows"]
        ],
    )


def ifca(results: Results) -> str:
    head = ["federation", "participation", "IFCA", "seeds with ARI 1", "ARI", "accuracy %"]
    return table(
        head,
        [
            [
                row["federation"],
                f"{row['participation']:.0%}",
                row["options"],
                f"{row['exact']} of {results['seeds']}",
                _spread(row["ari"]),
                _spread(row["accuracy"]),
            ]
            for row in results["rows"]
        ],
    )


def _spread(value: dict[str, float]) -> str:
    """Mean and range over seeds."""
    return f"{value['mean']:.2f} ({value['min']:.2f}–{value['max']:.2f})"


# Page, name of the table, file of results, function that writes the table.
TABLES: tuple[tuple[str, str, str, Callable[[Results], str]], ...] = (
    ("flt_table", "scenario 1", "flt_groups", lambda results: flt_groups(results, "Scenario 1")),
    ("flt_table", "scenario 2", "flt_groups", lambda results: flt_groups(results, "Scenario 2")),
    ("clade_groups", "groups", "clade_groups", clade_groups),
    ("clade", "rivals", "clade", lambda results: clade_rivals(results, ("digits",), True)),
    ("clade", "costs", "clade", clade_costs),
    ("clade", "images", "clade", lambda results: clade_rivals(results, IMAGES, True)),
    ("flis", "beta", "flis_beta", flis_beta),
    ("baselines", "scaffold", "scaffold", scaffold),
    ("ifca", "starts", "ifca", ifca),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="Change nothing; fail if a page is out of date."
    )
    check = parser.parse_args().check
    for page, name, file, make in TABLES:
        path = PAGES / f"{page}.md"
        old = path.read_text()
        new = replace_block(old, name, make(read_results(RESULTS / f"{file}.json")))
        if check and new != old:
            raise SystemExit(f"{path} is out of date: python tools/docs/method_tables.py")
        if not check:
            path.write_text(new)


if __name__ == "__main__":
    main()
