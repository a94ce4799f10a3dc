"""docs/which.md: which method for which federation, from what was measured and nothing else.

python tools/docs/which_page.py [--out docs/which.md]

Numbers come from results/ (`fedclade reproduce`), benchmarks/results/which.json
(`which_measured.py`) and dirichlet.json (`clade_training.py`). What the page advises is written
here; each piece of advice names what must hold in the numbers for it to be true, and the page is
not written where it does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from fedclade.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from which_measured import FEDERATIONS  # noqa: E402 (a script of benchmarks/)

OUT = ROOT / "docs" / "which.md"
# The columns of the papers' table: heading, file of results/, its column.
PAPERS = (
    ("five groups of classes, MNIST", "flt_1", "MNIST"),
    ("… CIFAR-10", "flt_1", "CIFAR-10"),
    ("groups on a ring, MNIST", "flt_2", "MNIST"),
    ("… CIFAR-10", "flt_2", "CIFAR-10"),
    ("ten groups, 2,400 clients, EMNIST", "flt_4", "MLP"),
    ("labels permuted, CIFAR-10", "cfl_figure8", "end"),
    ("labels flipped, genomic", "fedgmcc_1", "genomic, flipped"),
    ("writers", "flt_3", "MLP"),
    ("own manners, EMD 17", "fedgmcc_1", "EMNIST62, EMD 17.1"),
    ("… EMD 49", "fedgmcc_1", "EMNIST62, EMD 48.9"),
)
TITLES = {
    "fedavg": "FedAvg", "local": "Local", "fedprox": "FedProx", "fednova": "FedNova", "scaffold": "SCAFFOLD", "lg_fedavg": "LG-FedAvg",
    "per_fedavg": "Per-FedAvg", "ifca": "IFCA", "fedsem": "FedSEM", "pca_hc": "PCA+kM+HC", "flt": "FLT", "cfl": "CFL", "flis_dc": "FLIS-DC",
    "flis_hc": "FLIS-HC", "fedgmcc": "FedGMCC", "clade": "Clade", "oracle": "true groups",
}  # fmt: skip
GROUPING = ("ifca", "fedsem", "pca_hc", "flt", "cfl", "flis_dc", "flis_hc", "fedgmcc", "clade")


@dataclass(frozen=True)
class Numbers:
    """Accuracy in percent, the mean over seeds; None where nothing was measured."""

    digits: dict[tuple[str, str], list[dict[str, float]]]
    papers: dict[tuple[str, str, str], tuple[float, int]]
    dirichlet: dict[str, list[float]]

    def small(self, federation: str, method: str, what: str = "accuracy") -> float | None:
        values = [
            row[what] for row in self.digits.get((federation, method), []) if row[what] is not None
        ]
        return statistics.fmean(values) if values else None

    def paper(self, table: str, column: str, method: str) -> float | None:
        return self.papers.get((table, column, method), (None, 0))[0]


def numbers() -> Numbers:
    digits: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in _read("benchmarks/results/which.json")["rows"]:
        digits.setdefault((row["federation"], row["method"]), []).append(row)
    papers: dict[tuple[str, str, str], tuple[float, int]] = {}
    for table in dict.fromkeys(table for _, table, _ in PAPERS):
        for cell in _read(f"results/{table}.json")["cells"]:
            if cell["mean"] is not None and cell["row"] != "Central SGD":
                papers.setdefault(
                    (table, cell["column"], cell["method"]), (cell["mean"], len(cell["values"]))
                )
    dirichlet: dict[str, list[float]] = {}
    for row in _read("benchmarks/results/dirichlet.json")["rows"]:
        dirichlet.setdefault(row["method"], []).append(row["accuracy"])
    return Numbers(digits, papers, dirichlet)


def _read(path: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads((ROOT / path).read_text())
    return found


def link(method: str) -> str:
    page = "flis" if method.startswith("flis") else method
    return f"[{TITLES[method]}](methods/{page}.md)"


def cell(value: float | None, best: bool = False) -> str:
    text = "–" if value is None else f"{value:.1f}"
    return f"**{text}**" if best else text


def table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in ([*head], ["---"] * len(head), *rows))


def near_best(values: list[float | None], reach: float) -> float:
    known = [value for value in values if value is not None]
    return max(known) - reach if known else 0.0


def small_table(found: Numbers) -> str:
    least = {
        each: near_best(
            [found.small(each, method) for method in METHODS if method != "oracle"], 0.5
        )
        for each in FEDERATIONS
    }
    rows = []
    for method in METHODS:
        values = [(each, found.small(each, method)) for each in FEDERATIONS]
        rows.append(
            [
                link(method),
                *(
                    cell(value, method != "oracle" and value is not None and value >= least[each])
                    for each, value in values
                ),
            ]
        )
    return table(["accuracy, %", *FEDERATIONS], rows)


def groups_table(found: Numbers) -> str:
    true = [each for each in FEDERATIONS if found.small(each, "oracle") is not None]
    rows = [
        [
            link(method),
            *(
                f"{found.small(each, method, 'clusters'):.1f},"
                f" {found.small(each, method, 'ari'):.2f}"
                for each in true
            ),
        ]
        + [f"{found.small(each, method, 'clusters'):.1f}" for each in ("iid", "quantity skew")]
        for method in GROUPING
    ]
    return table(["groups, ARI", *true, "iid: groups", "quantity skew: groups"], rows)


def papers_table(found: Numbers) -> str:
    shown = [
        method
        for method in METHODS
        if any(found.paper(name, column, method) is not None for _, name, column in PAPERS)
    ]
    least = [
        near_best(
            [found.paper(name, column, method) for method in shown if method != "oracle"], 0.5
        )
        for _, name, column in PAPERS
    ]
    rows = []
    for method in shown:
        values = [found.paper(name, column, method) for _, name, column in PAPERS]
        bold = [
            method != "oracle" and value is not None and value >= low
            for value, low in zip(values, least, strict=True)
        ]
        rows.append(
            [link(method), *(cell(value, best) for value, best in zip(values, bold, strict=True))]
        )
    return table(["accuracy, %", *(head for head, _, _ in PAPERS)], rows)


def advice(found: Numbers) -> str:
    """The short table. Each row: what clients are like, what to take, why; and what has to hold for
    it.
    """
    small, paper = found.small, found.paper

    def value(number: float | None) -> float:
        if number is None:
            raise SystemExit("docs/which.md: a number that its advice rests on was not measured")
        return number

    def holds(condition: bool, what: str) -> None:
        if not condition:
            raise SystemExit(f"docs/which.md would say what the numbers do not: {what}")

    of = {
        each: {
            method: value(small(each, method))
            for method in METHODS
            if small(each, method) is not None
        }
        for each in FEDERATIONS
    }
    for each in ("iid", "quantity skew"):
        holds(
            abs(of[each]["clade"] - of[each]["fedavg"]) < 1
            and of[each]["local"] < of[each]["fedavg"] - 3,
            f"{each}: FedAvg",
        )
        holds(max(of[each].values()) - of[each]["scaffold"] < 0.5, f"{each}: SCAFFOLD")
    for each in ("label clusters", "labels swapped", "labels permuted", "rotated"):
        holds(max(of[each].values()) - of[each]["clade"] < 0.5, f"{each}: Clade")
    for each in ("any two classes", "Dirichlet(0.1)"):
        holds(
            max(of[each].values()) - of[each]["lg_fedavg"] < 0.5
            and of[each]["lg_fedavg"] - of[each]["local"] < 2,
            f"{each}: own models",
        )
    holds(
        value(paper("flt_3", "MLP", "fedavg")) > value(paper("flt_3", "MLP", "clade")),
        "writers: FedAvg",
    )
    holds(
        value(paper("fedgmcc_1", "EMNIST62, EMD 48.9", "local"))
        > value(paper("fedgmcc_1", "EMNIST62, EMD 48.9", "clade")),
        "EMD 49: Local",
    )

    def pair(each: str, *methods: str) -> str:
        return ", ".join(f"{TITLES[method]} {of[each][method]:.1f}" for method in methods)

    def papers(name: str, column: str, *methods: str) -> str:
        return ", ".join(
            f"{TITLES[method]} {value(paper(name, column, method)):.1f}" for method in methods
        )

    rows = [
        [
            "are of one kind, or differ in size alone",
            f"{link('fedavg')}, or {link('scaffold')} for twice the traffic",
            (
                f"digits, IID: {pair('iid', 'fedavg', 'scaffold', 'local')}. Clade finds one group"
                f" and is FedAvg ({of['iid']['clade']:.1f})"
            ),
        ],
        [
            "hold different classes, in groups",
            f"{link('clade')}; {link('fedsem')} where you know the number of groups",
            (
                "MNIST, five groups:"
                f" {papers('flt_1', 'MNIST', 'fedavg', 'local', 'fedsem', 'clade')}; 2,400 clients:"
                f" {papers('flt_4', 'MLP', 'fedavg', 'fedsem', 'flt', 'clade')}"
            ),
        ],
        [
            "call the same things by other names (labels permuted, swapped, flipped)",
            f"{link('clade')}; {link('cfl')} with most clients in each round",
            (
                "CIFAR-10, labels permuted:"
                f" {papers('cfl_figure8', 'end', 'fedavg', 'local', 'cfl', 'clade')}; digits, two"
                f" labels swapped: {pair('labels swapped', 'fedavg', 'fedsem', 'clade')}"
            ),
        ],
        [
            "see the same things differently, in groups (rotated, other devices)",
            f"{link('clade')}",
            (
                f"digits, four rotations: {pair('rotated', 'fedavg', 'local', 'fedsem', 'clade')}."
                " Measured on small images only"
            ),
        ],
        [
            "each have a mixture of their own, without groups (few classes each, Dirichlet)",
            f"{link('lg_fedavg')} or {link('local')}; {link('clade')} comes near",
            "digits, any two classes:"
            f" {pair('any two classes', 'fedavg', 'local', 'lg_fedavg', 'clade')}; MNIST,"
            " Dirichlet(0.1), two seeds: "
            + ", ".join(
                f"{TITLES[method]} {statistics.fmean(found.dirichlet[method]):.1f}"
                for method in ("fedavg", "local", "clade")
            ),
        ],
        [
            "each have a manner of their own (writers)",
            (
                f"{link('fedavg')} where manners are near, {link('local')} where they are far apart"
                " and data are enough"
            ),
            (
                f"writers: {papers('flt_3', 'MLP', 'fedavg', 'local', 'clade')}; earth mover's"
                " distance 49:"
                f" {papers('fedgmcc_1', 'EMNIST62, EMD 48.9', 'fedavg', 'local', 'clade')}. One"
                " seed each"
            ),
        ],
    ]
    return table(["your clients", "take", "because, accuracy in %"], rows)


def written() -> str:
    found = numbers()
    seeds = min(len(rows) for rows in found.digits.values())
    absent = [
        TITLES[name]
        for name in METHODS
        if not any(found.paper(table, column, name) is not None for _, table, column in PAPERS)
    ]
    (first, clade), *others = sorted(
        (
            (name, _regret(found, name))
            for name in ("clade", "fedavg", "local", "fedsem", "lg_fedavg")
        ),
        key=lambda each: each[1],
    )
    if first != "clade" or any(
        _regret(found, name) < clade for name in METHODS if name != "oracle"
    ):
        raise SystemExit("docs/which.md would say that Clade loses least, and it does not")
    fewest, most = (
        min(count for _, count in found.papers.values()),
        max(count for _, count in found.papers.values()),
    )
    return f"""# Which method for which federation

Made by `python tools/docs/which_page.py` from what was measured; a test compares. What kind of federation is yours? `fedclade diagnose`
[says so](diagnosis.md). Then:

{advice(found)}
What holds throughout: if clients are of one kind, no grouping helps; if they are in groups that contradict each other, no single model
helps. Where you do not know, {link("clade")} loses least: on the eight federations below it is never more than {clade:.1f} points
behind the best method; {", ".join(f"{TITLES[name]} up to {points:.1f}" for name, points in others)}. It is our own method:
read its numbers with that in mind, and compare on your data (`fedclade compare`).

## All methods, eight small federations

Digits, 20 clients with 64 images on average, half of them in a round, 40 rounds, MLP(64), {seeds} seeds
(`python benchmarks/which_measured.py`). Every method has its defaults; IFCA, FedSEM and PCA+kM+HC are told the true number of groups.
Means over all clients, each on its own test data; **bold**: within half a point of the best. The small size matters: methods that need
more data, more local training or more clients in a round (FLT, FLIS, FedGMCC, CFL) do better elsewhere, as their pages say.

{small_table(found)}
How many groups they make of it, and the agreement with the true ones (ARI: 1 is perfect, 0 is chance):

{groups_table(found)}
## The papers' federations

From [the reproduction](reproduction.md), which has settings and spreads; {fewest} to {most} seeds. The first row of a method is taken
where a table has several. –: not measured.

{papers_table(found)}
## What was not measured

- {", ".join(absent)} on the papers' data. (FedNova and SCAFFOLD on MNIST with Dirichlet(0.1):
  [the baselines](methods/baselines.md#comparison); FLIS on two tables after a local fine-tune: [the reproduction](reproduction.md).)
- Groups and mixtures at once on large data; groups that change while training goes on.
- Accuracy with more than 2,400 clients. Texts with any methods but FedAvg, CFL and Clade ([AG News](reproduction.md)).
- Every accuracy here is of the simulator. On Flower the models are the same within 1e-5 ([how this is tested](flower.md)).
"""


def _regret(found: Numbers, method: str) -> float:
    """By how much a method is behind the best one, at most."""
    behind = []
    for each in FEDERATIONS:
        values = {name: found.small(each, name) for name in METHODS if name != "oracle"}
        behind.append(
            max(value for value in values.values() if value is not None) - (values[method] or 0.0)
        )
    return max(behind)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.parse_args().out.write_text(written())


if __name__ == "__main__":
    main()
