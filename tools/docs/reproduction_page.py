"""docs/reproduction.md from results/papers/: the papers' tables as they were measured.

python tools/docs/reproduction_page.py [--out docs/reproduction.md]

A file of results/papers/ is the table.json that `fedclade reproduce TABLE` writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fedclade.io.compact_json import read_results
from fedclade.reproduce.markdown import from_json, page
from fedclade.reproduce.spec import tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "papers"
FIRST = ("flt_1", "flt_2", "flt_4", "flis_1", "cfl_figure8", "fedgmcc_1")  # the most informative
ABOUT = """# The papers, reproduced

`python tools/docs/reproduction_page.py` makes this page from [results](../results/papers), which
`fedclade reproduce TABLE` wrote; a test compares them. Rows *in italics* are ours: the paper does
not have them. "within" means within the tolerance of the table. A table's file in
src/fedclade/reproduce/tables/ has all settings and tolerances. Accuracy is the unweighted mean over
all clients, each on its own test data.

"""


def written() -> str:
    order = [*FIRST, *(name for name in tables() if name not in FIRST)]
    outcomes = [from_json(read_results(file)) for file in RESULTS.glob("*.json")]
    outcomes.sort(key=lambda outcome: order.index(outcome.table))
    contents = [f"- [{outcome.title}](#{_anchor(outcome.title)})" for outcome in outcomes]
    missing = [
        f"- {table.title} (`fedclade reproduce {name}`)"
        for name, table in tables().items()
        if name not in {o.table for o in outcomes}
    ]
    later = (
        ["", "Not yet measured at full size; each runs with `--quick`:", "", *missing]
        if missing
        else []
    )
    return (
        ABOUT
        + "\n".join([*contents, *later, ""])
        + "\n"
        + "\n".join(page(outcome, level=2) for outcome in outcomes)
    )


def _anchor(title: str) -> str:
    """The anchor that Markdown viewers derive from a heading."""
    return "".join(
        sign for sign in title.lower().replace(" ", "-") if sign.isalnum() or sign in "-_"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "reproduction.md")
    parser.parse_args().out.write_text(written())


if __name__ == "__main__":
    main()
