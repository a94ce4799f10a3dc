"""docs/reproduction.md, a page for each paper in docs/reproduction/, and docs/images/papers/ from
results/papers/: the papers' tables and figures as they were measured. README.md gets the number of
measured cells.

python tools/docs/reproduction_page.py [--out docs/reproduction.md]

A file of results/papers/ is the table.json that `fedclade reproduce TABLE` writes.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from fedclade.io.compact_json import read_results
from fedclade.reproduce.compare_to_paper import Outcome
from fedclade.reproduce.coverage import PAPERS, count, paper_items, total
from fedclade.reproduce.draw import draw
from fedclade.reproduce.markdown import from_json, page
from fedclade.reproduce.spec import tables

ROOT = Path(__file__).resolve().parents[2]
DEFAULT, README = ROOT / "docs" / "reproduction.md", ROOT / "README.md"
RESULTS = ROOT / "results" / "papers"
IMAGES = "images/papers/"  # relative to the first page
OTHERS = "benchmarks"
# The page of each paper, and its title. A table belongs to the paper that its name begins with.
PAGES = {
    "flt": "FLT, reproduced",
    "flis": "FLIS, reproduced",
    "cfl": "CFL, reproduced",
    "fedgmcc": "FedGMCC, reproduced",
    OTHERS: "Other benchmarks",
}
FIRST = ("flt_1", "flt_2", "flt_4", "flis_1", "cfl_figure8", "fedgmcc_1")  # the most informative
ABOUT = """# The papers, reproduced

`python tools/docs/reproduction_page.py` makes this page and the page of each paper from
[results](../results/papers), which `fedclade reproduce TABLE` wrote; a test compares them. Rows *in
italics* are ours: the paper does not have them. A table's file in src/fedclade/reproduce/tables/
has all settings and tolerances. Accuracy is the unweighted mean over all clients, each on its own
test data.

The words and columns of the tables:

- **judgment**: *within* the tolerance of the table, or outside it: *better* or *worse*, by the
  direction of the difference, and *differs* for numbers without a direction, such as that of
  groups; *not reached* if our runs have no such number. Nothing is judged without a number of the
  paper, and in rows with a star. The number in brackets is that of a footnote.
- **worst tenth, %**: the mean accuracy of the tenth of the clients with the lowest accuracy.
- **variance, %²**: the variance of the accuracy over clients.
- **worse than FedAvg, %** and **worse than Local, %**: the share of clients with a lower accuracy
  than under FedAvg, or Local, in the same table.
"""
# What else is measured for a table that has no page yet.
ELSEWHERE = {"pfl_cifar10": "[the speed and the accuracy](speed.md#pfls-benchmark-on-cifar-10) are"}
BENCHMARKS = """Numbers of other benchmarks, which are not counted above; in brackets, as above,
the cells with a published number."""


def outcomes() -> list[Outcome]:
    """The results, the most informative first."""
    order = [*FIRST, *(name for name in tables() if name not in FIRST)]
    found = [from_json(read_results(file)) for file in RESULTS.glob("*.json")]
    return sorted(found, key=lambda outcome: order.index(outcome.table))


def written(outcomes: list[Outcome]) -> dict[str, str]:
    """The text of each file, by its path relative to the folder of the first page."""
    by_name = {outcome.table: outcome for outcome in outcomes}
    lines = [
        "",
        f"**{total(outcomes)} cells with a number in a paper are measured**; without the accuracies"
        f" on training data, {total(outcomes, '^(?!train_)')}. A table of the workshop version that"
        " repeats cells of another table does not count. The list has every table and figure of the"
        " papers; in brackets: measured cells.",
        "",
        "| | reproduced here |",
        "| --- | --- |",
    ]
    for item in paper_items():
        places = [_place(name, by_name.get(name)) for name in item.found()]
        text = "<br>".join(places) or f"Cannot be had here: {item.reason or 'not set up yet'}."
        lines.append(f"| {PAPERS[item.paper]}, {item.name} | {text} |")
    lines += ["", BENCHMARKS, ""]
    lines += [
        f"- {table.benchmark}: {_place(name, by_name.get(name))}"
        for name, table in tables().items()
        if table.benchmark
    ]
    texts = {"reproduction.md": ABOUT + "\n".join([*lines, ""])}
    for paper, title in PAGES.items():
        parts = [
            page(outcome, 2, f"../{IMAGES}") for outcome in outcomes if _paper(outcome) == paper
        ]
        head = f"# {title}\n\n[All papers](../reproduction.md) explains how to read the tables.\n"
        texts[f"reproduction/{paper}.md"] = "\n".join([head, *parts])
    return texts


def _paper(outcome: Outcome) -> str:
    """The page of a table."""
    if tables()[outcome.table].benchmark:
        return OTHERS
    return next(paper for paper in PAGES if outcome.table.startswith(f"{paper}_"))


def _place(name: str, outcome: Outcome | None) -> str:
    """A link to the table on the page of its paper, or the command that makes it."""
    table = tables()[name]
    cells = count(table, outcome)
    numbers = f" ({cells})" if cells.total else ""
    if outcome is None:
        rest = f"; {ELSEWHERE[name]} measured" if name in ELSEWHERE else ""
        return f"{table.title}{numbers}: not yet measured, `fedclade reproduce {name}`{rest}"
    return f"[{outcome.title}](reproduction/{_paper(outcome)}.md#{_anchor(outcome.title)}){numbers}"


def _anchor(title: str) -> str:
    """The anchor that Markdown viewers derive from a heading."""
    return "".join(
        sign for sign in title.lower().replace(" ", "-") if sign.isalnum() or sign in "-_"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT)
    out: Path = parser.parse_args().out
    results = outcomes()
    (out.parent / "reproduction").mkdir(exist_ok=True)
    for name, text in written(results).items():
        (out if name == DEFAULT.name else out.parent / name).write_text(text)
    if out == DEFAULT:
        count_in_readme = r"\d+ of \d+(?= cells with a number)"
        README.write_text(re.sub(count_in_readme, str(total(results)), README.read_text()))
    folder = out.parent / IMAGES
    pictures = [picture for outcome in results for picture in outcome.pictures]
    drawn = {path for picture in pictures for path in draw(picture, folder, ("svg",))}
    for path in set(folder.glob("*.svg")) - drawn:
        path.unlink()


if __name__ == "__main__":
    main()
