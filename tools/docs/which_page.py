"""docs/which.md: which method for which federation, from measured results only.

python tools/docs/which_page.py [--out docs/which.md]

Numbers come from results/papers (`fedclade reproduce`) and from all_methods.json and clade.json
in results/methods (benchmarks/all_methods.py and clade.py). The advice is written here;
each piece of advice has a condition on the numbers, and the page is not written if one fails.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from markdown_table import table

from fedclade.io.compact_json import read_results
from fedclade.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
OUT = ROOT / "docs" / "which.md"
# The columns of the papers' table: heading, file of results/papers/, its column.
PAPERS = (
    ("five groups of classes, MNIST", "flt_1", "MNIST"),
    ("… CIFAR-10", "flt_1", "CIFAR-10"),
    ("groups on a ring, MNIST", "flt_2", "MNIST"),
    ("… CIFAR-10", "flt_2", "CIFAR-10"),
    ("ten groups, 2,400 clients, EMNIST", "flt_4", "MLP"),
    ("labels permuted, CIFAR-10", "cfl_figure8", "1,000 images: end"),
    ("labels flipped, genomic", "fedgmcc_1", "genomic, EMD 26.3"),
    ("writers", "flt_3", "MLP"),
    ("own styles, EMD 17", "fedgmcc_1", "EMNIST62, EMD 17.1"),
    ("… EMD 49", "fedgmcc_1", "EMNIST62, EMD 48.9"),
)
TITLES = {
    "fedavg": "FedAvg",
    "local": "Local",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "lg_fedavg": "LG-FedAvg",
    "per_fedavg": "Per-FedAvg",
    "fedavg_finetune": "FedAvg, fine-tuned",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "fedbn": "FedBN",
    "ditto": "Ditto",
    "apfl": "APFL",
    "feddbe": "FedDBE",
    "fedala": "FedALA",
    "knn_per": "kNN-Per",
    "ifca": "IFCA",
    "fedem": "FedEM",
    "fedsem": "FedSEM",
    "pca_hc": "PCA+kM+HC",
    "pfedgraph": "pFedGraph",
    "flt": "FLT",
    "flux": "FLUX",
    "pacfl": "PACFL",
    "cfl": "CFL",
    "flis_dc": "FLIS-DC",
    "flis_hc": "FLIS-HC",
    "feddrift": "FedDrift",
    "fedgmcc": "FedGMCC",
    "clade": "Clade",
    "clade_groups": "CladeGroups",
    "oracle": "true groups",
}
NEXT = 9  # methods in the sentence on who loses least, after Clade
GROUPING = (
    *("ifca", "fedsem", "pca_hc", "flt", "pacfl", "flux", "cfl", "flis_dc", "flis_hc", "fedgmcc"),
    "feddrift",
    *("clade_groups", "clade"),
)


@dataclass(frozen=True)
class Numbers:
    """Accuracy in percent, the mean over seeds; None where nothing was measured."""

    digits: dict[tuple[str, str], list[dict[str, float]]]
    papers: dict[tuple[str, str, str], tuple[float, int]]
    of_images: dict[tuple[str, str], list[float]]  # of MNIST, from benchmarks/clade.py

    @property
    def federations(self) -> list[str]:
        """The small federations, in the order of the results."""
        return list(dict.fromkeys(federation for federation, _ in self.digits))

    def small(self, federation: str, method: str, what: str = "accuracy") -> float | None:
        values = [
            row[what] for row in self.digits.get((federation, method), []) if row[what] is not None
        ]
        return statistics.fmean(values) if values else None

    def paper(self, table: str, column: str, method: str) -> float | None:
        return self.papers.get((table, column, method), (None, 0))[0]

    def images(self, federation: str) -> dict[str, float]:
        """The accuracy of each method on a federation of MNIST's images."""
        return {
            method: statistics.fmean(values)
            for (name, method), values in self.of_images.items()
            if name == federation
        }


def read_numbers() -> Numbers:
    digits: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in read_results(RESULTS / "methods" / "all_methods.json")["rows"]:
        digits.setdefault((row["federation"], row["method"]), []).append(row)
    papers: dict[tuple[str, str, str], tuple[float, int]] = {}
    for name in dict.fromkeys(name for _, name, _ in PAPERS):
        for cell in read_results(RESULTS / "papers" / f"{name}.json")["cells"]:
            if cell["mean"] is not None and cell["row"] != "Central SGD":
                papers.setdefault(
                    (name, cell["column"], cell["method"]), (cell["mean"], len(cell["values"]))
                )
    images: dict[tuple[str, str], list[float]] = {}
    for row in read_results(RESULTS / "methods" / "clade.json")["rows"]:
        if row["data"] == "mnist":
            images.setdefault((row["federation"], row["method"]), []).append(row["accuracy"])
    return Numbers(digits, papers, images)


def title_of(method: str) -> str:
    """The short name of a method: that of TITLES, or the start of its title."""
    return TITLES.get(method) or METHODS[method].title.partition(":")[0]


def link(method: str) -> str:
    page = "flis" if method.startswith("flis") else method
    return f"[{title_of(method)}](methods/{page}.md)"


def cell(value: float | None, best: bool = False) -> str:
    text = "–" if value is None else f"{value:.1f}"
    return f"**{text}**" if best else text


def near_best(values: list[float | None], reach: float) -> float:
    known = [value for value in values if value is not None]
    return max(known) - reach if known else 0.0


def small_table(numbers: Numbers) -> str:
    least = {
        federation: near_best(
            [numbers.small(federation, method) for method in METHODS if method != "oracle"], 0.5
        )
        for federation in numbers.federations
    }
    rows = []
    for method in METHODS:
        values = [
            (federation, numbers.small(federation, method)) for federation in numbers.federations
        ]
        if all(value is None for _, value in values):  # FedBN: the model has no BatchNorm
            continue
        rows.append(
            [
                link(method),
                *(
                    cell(
                        value,
                        method != "oracle" and value is not None and value >= least[federation],
                    )
                    for federation, value in values
                ),
            ]
        )
    return table(["accuracy, %", *numbers.federations], rows)


def groups_table(numbers: Numbers) -> str:
    true = [
        federation
        for federation in numbers.federations
        if numbers.small(federation, "oracle") is not None
    ]
    rows = [
        [
            link(method),
            *(
                f"{numbers.small(federation, method, 'clusters'):.1f},"
                f" {numbers.small(federation, method, 'ari'):.2f}"
                for federation in true
            ),
        ]
        + [
            f"{numbers.small(federation, method, 'clusters'):.1f}"
            for federation in ("iid", "quantity skew")
        ]
        for method in GROUPING
    ]
    return table(["groups, ARI", *true, "iid: groups", "quantity skew: groups"], rows)


def papers_table(numbers: Numbers) -> str:
    # Columns without CladeGroups are not complete: the best of the others means little.
    columns = [
        (head, name, column)
        for head, name, column in PAPERS
        if numbers.paper(name, column, "clade_groups") is not None
    ]
    shown = [
        method
        for method in METHODS
        if any(numbers.paper(name, column, method) is not None for _, name, column in columns)
    ]
    least = [
        near_best(
            [numbers.paper(name, column, method) for method in shown if method != "oracle"], 0.5
        )
        for _, name, column in columns
    ]
    rows = []
    for method in shown:
        values = [numbers.paper(name, column, method) for _, name, column in columns]
        bold = [
            method != "oracle" and value is not None and value >= low
            for value, low in zip(values, least, strict=True)
        ]
        rows.append(
            [link(method), *(cell(value, best) for value, best in zip(values, bold, strict=True))]
        )
    return table(["accuracy, %", *(head for head, _, _ in columns)], rows)


def advice(numbers: Numbers) -> str:
    """The short table: kind of clients, recommended method, reason. Raises SystemExit if the
    numbers do not support a row.
    """
    small, paper = numbers.small, numbers.paper

    def value(number: float | None) -> float:
        if number is None:
            raise SystemExit("docs/which.md: a number that the advice needs was not measured")
        return number

    def holds(condition: bool, what: str) -> None:
        if not condition:
            raise SystemExit(f"docs/which.md: the numbers do not support the advice: {what}")

    of = {
        federation: {
            method: value(small(federation, method))
            for method in METHODS
            if small(federation, method) is not None
        }
        for federation in numbers.federations
    }
    others = {
        federation: max(value for name, value in values.items() if name != "clade")
        for federation, values in of.items()
    }
    for federation in ("iid", "quantity skew"):
        holds(
            of[federation]["clade"] > of[federation]["fedavg"] - 0.3
            and of[federation]["local"] < of[federation]["fedavg"] - 3,
            f"{federation}: FedAvg",
        )
        holds(
            others[federation] - of[federation]["scaffold"] < 0.5,
            f"{federation}: SCAFFOLD",
        )
    for federation in ("label clusters", "labels swapped", "labels permuted", "rotated"):
        holds(max(of[federation].values()) - of[federation]["clade"] < 0.5, f"{federation}: Clade")
    for federation in ("any two classes", "Dirichlet(0.1)"):
        holds(
            all(
                others[federation] - of[federation][method] < 1.0
                for method in ("lg_fedavg", "ditto")
            )
            and of[federation]["lg_fedavg"] - of[federation]["local"] < 2,
            f"{federation}: own models",
        )
    writers, angles = (numbers.images(name) for name in ("writers", "mixtures, rotated"))
    holds(writers["clade"] > max(writers["fedavg"], writers["local"]), "writers: Clade")
    holds(angles["clade"] > max(angles["fedavg"], angles["local"]), "mixtures in groups: Clade")

    def pair(federation: str, *methods: str) -> str:
        return ", ".join(f"{title_of(method)} {of[federation][method]:.1f}" for method in methods)

    def papers(name: str, column: str, *methods: str) -> str:
        return ", ".join(
            f"{title_of(method)} {value(paper(name, column, method)):.1f}" for method in methods
        )

    def images(federation: str, *methods: str) -> str:
        of_images = numbers.images(federation)
        return ", ".join(f"{title_of(method)} {of_images[method]:.1f}" for method in methods)

    rows = [
        [
            "have the same distribution, or differ in size only",
            f"{link('fedavg')} or {link('clade')}; {link('scaffold')} for twice the traffic",
            (
                f"digits, IID: {pair('iid', 'fedavg', 'scaffold', 'local', 'clade')}. What Clade"
                " gains here is its server's momentum, which FedAvg can have too"
                " (`server.optimizer`)"
            ),
        ],
        [
            "hold different classes, in groups",
            f"{link('clade')}; {link('clade_groups')} if you want the groups;"
            f" {link('fedsem')} if you know their number",
            (
                "digits, five groups:"
                f" {pair('label clusters', 'fedavg', 'local', 'fedsem', 'clade_groups', 'clade')};"
                " CIFAR-10, groups that share classes:"
                f" {papers('flt_2', 'CIFAR-10', 'fedavg', 'fedsem', 'flt', 'clade_groups')}"
            ),
        ],
        [
            "label the same inputs differently (labels permuted, swapped, flipped)",
            f"{link('clade')}; {link('cfl')} with most clients in each round",
            (
                "digits, two labels swapped:"
                f" {pair('labels swapped', 'fedavg', 'fedsem', 'clade_groups', 'clade')};"
                " CIFAR-10, labels permuted, 1,000 images for each client: "
                + papers(
                    "cfl_figure8", "1,000 images: end", "fedavg", "local", "cfl", "clade_groups"
                )
                + "; 2,500 images: "
                + papers("cfl_figure8", "end", "oracle", "clade")
            ),
        ],
        [
            "have different inputs for the same classes, in groups (rotated images, other devices)",
            f"{link('clade')}",
            (
                "digits, four rotations:"
                f" {pair('rotated', 'fedavg', 'local', 'fedsem', 'clade')}; MNIST, rotated groups"
                " with a class mixture for each client:"
                f" {images('mixtures, rotated', 'fedavg', 'local', 'clade_groups', 'clade')}."
                " Measured on small images only"
            ),
        ],
        [
            "each have their own mixture of classes, without groups (few classes each, Dirichlet)",
            f"{link('clade')}, {link('ditto')}, {link('lg_fedavg')} or {link('local')}",
            "digits, any two classes: "
            + pair("any two classes", "fedavg", "local", "lg_fedavg", "ditto", "clade")
            + "; Dirichlet(0.1): "
            + pair("Dirichlet(0.1)", "fedavg", "local", "ditto", "clade"),
        ],
        [
            "each have their own style (writers)",
            f"{link('clade')}, or FedAvg with [a personal layer](personal.md)",
            (
                "MNIST, 60 writers:"
                f" {images('writers', 'fedavg', 'local', 'fedavg_finetune', 'clade')}"
            ),
        ],
    ]
    return table(["your clients", "method", "measured accuracy, %"], rows)


def written() -> str:
    numbers = read_numbers()
    seeds = min(len(rows) for rows in numbers.digits.values())
    measured = {
        name: _regret(numbers, name)
        for name in METHODS
        if name != "oracle" and numbers.small(numbers.federations[0], name) is not None
    }
    first, *others = sorted(measured, key=measured.__getitem__)
    if first != "clade":
        raise SystemExit("docs/which.md: the numbers do not show that Clade loses least")
    fewest, most = (
        min(count for _, count in numbers.papers.values()),
        max(count for _, count in numbers.papers.values()),
    )
    seeds_of_papers = "one seed" if most == 1 else f"{fewest} to {most} seeds"
    behind = ", ".join(
        f"{title_of(name)} up to {measured[name]:.1f}" for name in (*others[:NEXT], "fedavg")
    )
    return f"""# Which method for which federation

`python tools/docs/which_page.py` makes this page from results/, and a test compares them.
[`fedclade diagnose`](diagnosis.md) shows how your clients differ. Then choose:

{advice(numbers)}
If all clients have the same distribution, groups do not help. If groups of clients contradict each
other, a single model does not help. If you do not know which case you have, {link("clade")} loses
least: on the eight federations below it is at most {measured[first]:.1f} points behind the best
method ({behind}).
Clade is our own method, and its constants were chosen on these eight federations and seeds: its
page has [other seeds and data](methods/clade.md#what-was-measured). So also compare on your own
data (`fedclade compare`).

## All methods, eight small federations

Digits, 20 clients with 64 images on average, half of them in a round, 40 rounds, MLP(64), {seeds}
seeds (`python benchmarks/all_methods.py`). Every method has its defaults; IFCA, FedSEM and
PCA+kM+HC get the true number of groups. Means over all clients, each on its own test data;
**bold**: within half a point of the best. These federations are small: methods that need more data,
more local training or more clients in a round (FLT, FLIS, FedGMCC, CFL) are better on other
federations, which their pages describe.

{small_table(numbers)}
The number of groups that each method finds, and the agreement with the true groups (ARI: 1 is
perfect, 0 is chance):

{groups_table(numbers)}
## The papers' federations

From [the reproduction](reproduction.md), which has settings and standard deviations;
{seeds_of_papers}. If a table has several rows for a method, this table shows the first.
–: not measured.

{papers_table(numbers)}
## What was not measured

{not_measured(numbers)}
  FedAvg after local training is in FLIS's and FedEM's tables, FedRep in
  [stopped runs](../results/methods/pfllib_stopped_runs.json) of PFLlib's. FedNova and SCAFFOLD
  also on MNIST with Dirichlet(0.1): [the baselines](methods/baselines.md#comparison).
- Clade on most of the papers' data; measured: CFL's Figure 8, FLIS's Table 1 on CIFAR-10 at 20 %
  and FLT's Table 4 with the MLP ([the reproduction](reproduction.md)).
- Accuracy with more than 2,400 clients on published data. With 100,000 it was measured on generated
  samples only ([speed](speed.md#by-the-number-of-clients)).
- Texts with most methods. Measured: FedAvg, CFL and CladeGroups on [AG News](reproduction/cfl.md);
  Local, FedAvg and CladeGroups on [100 roles](reproduction/benchmarks.md) of Shakespeare; the eight
  methods of [the diagnosis](diagnosis.md#how-often-it-is-right) on 30 small roles.
- All accuracies here were measured in the simulator. On Flower the models agree within 1e-5
  ([how this is tested](flower.md)).
"""


def not_measured(numbers: Numbers) -> str:
    """Which methods the papers' table lacks: those of other tables, then those of none."""
    left = [
        name
        for name in METHODS
        if not any(numbers.paper(paper, column, name) is not None for _, paper, column in PAPERS)
    ]
    elsewhere = []
    for file in sorted((RESULTS / "papers").glob("*.json")):
        content = read_results(file)
        has = {cell["method"] for cell in content["cells"] if cell["mean"] is not None}
        new = [name for name in left if name in has]
        if new:
            title = content["title"].partition(":")[0]
            elsewhere.append(f"{', '.join(map(title_of, new))} ({title})")
            left = [name for name in left if name not in has]
    return (
        f"- {', '.join(map(title_of, left))} on data of any paper or benchmark.\n"
        "- Not in the table above, but measured in other tables of"
        f" [the reproduction](reproduction.md):\n  {'; '.join(elsewhere)}."
    )


def _regret(numbers: Numbers, method: str) -> float:
    """By how much a method is behind the best one, at most."""
    behind = []
    for federation in numbers.federations:
        values = {name: numbers.small(federation, name) for name in METHODS if name != "oracle"}
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
