"""An outcome as Markdown, for a run's folder and for docs/reproduction.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedclade.reproduce.compare_to_paper import Cell, Checked, Outcome, in_words
from fedclade.reproduce.execute import Sizes
from fedclade.reproduce.fairness import HEADINGS, shown, texts
from fedclade.reproduce.panels import Picture
from fedclade.reproduce.paper_metrics import metric_text

_DIGITS = 2
IMPORTED = "\\* The paper's number comes from another protocol: it is printed and not judged."


def page(outcome: Outcome, level: int = 1, images: str = "") -> str:
    """Title, notes, pictures, and a table for each column.

    Args:
        outcome: the results.
        level: the level of the heading.
        images: the path of the pictures' folder, with a slash at the end.
    """
    lines = [f"{'#' * level} {outcome.title}", "", *_head(outcome), ""]
    for picture in outcome.pictures:
        lines += [*_picture(picture, images), ""]
    footnotes: dict[str, int] = {}
    for column in outcome.data:
        cells = [cell for cell in outcome.cells if cell.column == column]
        if not cells:
            continue
        more = shown(cell.fairness for cell in cells)
        lines += [
            f"**{column}** ({metric_text(cells[0].metric)})",
            "",
            f"| | paper | measured | seeds | difference | judgment |"
            f"{_row(HEADINGS[name] for name in more)}",
            f"| --- | --- | --- | --- | --- | --- |{_row('---' for _ in more)}",
        ]
        lines += [f"{_line(cell, footnotes)}{_row(texts(cell.fairness, more))}" for cell in cells]
        lines.append("")
    lines += [f"{number}. {text}" for text, number in footnotes.items()]
    if any(cell.imported for cell in outcome.cells):
        lines += ["", IMPORTED]
    if outcome.claims:
        lines.append("")
        for text, verdict in map(claim_in_words, outcome.claims):
            lines.append(f"- {text}: **{verdict}**")
    return "\n".join(lines).rstrip() + "\n"


def _head(outcome: Outcome) -> list[str]:
    seeds = sorted({len(cell.values) for cell in outcome.cells})
    runs = (
        f"{' to '.join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))} seed{'s' * (seeds[-1] > 1)}"
        if seeds
        else "no runs"
    )
    facts = outcome.about
    lines = [
        f"Paper: {outcome.paper}. Measured: {runs}"
        f"{', ± the standard deviation over seeds' * bool(seeds and seeds[-1] > 1)};"
        f" {facts['machine']}, commit {facts['commit']}, torch {facts['torch']},"
        f" {outcome.seconds:,.0f} s of training."
    ]
    if outcome.quick:
        lines += [
            "",
            (
                "**Quick version (--quick): small and short, to check that everything runs. Do not"
                " compare these numbers with the paper.**"
            ),
        ]
    for column, data in outcome.data.items():
        names = outcome.wanted[column]
        if data is None:
            lines += [
                "",
                (
                    f"{column}: not measured, because {' or '.join(names)} was not available"
                    " (`fedclade data list`)."
                ),
            ]
        elif data != names[0]:
            lines += ["", f"{column}: {data} in place of {names[0]}."]
    notes = [*sizes_in_words(outcome), *outcome.notes]
    return [*lines, *(part for note in notes for part in ("", note))]


def sizes_in_words(outcome: Outcome) -> list[str]:
    """The clients, their training samples and the probe samples: one line for the columns that
    have the same.
    """
    columns: dict[str, list[str]] = {}
    for column, (least, most) in outcome.sizes.items():
        clients, samples, probe = (
            f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
            for low, high in zip(least, most, strict=True)
        )
        apart = f"{probe} probe samples set apart" if most.probe else "no probe samples"
        text = f"{clients} clients, {samples} training samples per client (median), {apart}."
        columns.setdefault(text, []).append(column)
    return [f"{'; '.join(names)}: {text}" for text, names in columns.items()]


def _picture(picture: Picture, images: str) -> list[str]:
    return [
        f"![{picture.title}]({images}{picture.file}.svg)",
        "",
        f"{picture.title}. The paper's figure: {picture.reading}",
    ]


def _row(texts: Iterable[str]) -> str:
    """The rest of a row of a table."""
    return "".join(f" {text} |" for text in texts)


def _line(cell: Cell, footnotes: dict[str, int]) -> str:
    note = ""
    if cell.why:
        note = f" [{footnotes.setdefault(cell.why, len(footnotes) + 1)}]"
    star = "\\*" if cell.imported else ""
    name = cell.row + star if cell.paper is not None else f"*{cell.row}*"
    return (
        f"| {name} | {number(cell.paper)} | {spread(cell)} | {len(cell.values)} |"
        f" {signed(cell.difference)} | {in_words(cell)}{note} |"
    )


def claim_in_words(claim: Checked) -> tuple[str, str]:
    """The claim with its numbers and its slack, and the verdict."""
    order = " ≤ ".join(
        f"{name} {value:.{_DIGITS}f}" for name, value in zip(claim.rising, claim.means, strict=True)
    )
    slack = f" (slack {claim.slack:g})" if claim.slack else ""
    return f"{claim.place}: {order}{slack}", "holds" if claim.holds else "does not hold"


def number(value: float | None) -> str:
    return "–" if value is None else _rounded(value)


def signed(value: float | None) -> str:
    return "" if value is None else f"{'+' * (value >= 0)}{_rounded(value)}"


def _rounded(value: float) -> str:
    """Two decimals, or none for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.{_DIGITS}f}"


def spread(cell: Cell) -> str:
    """The mean ± standard deviation; if some runs have no value, the number of runs that have
    one.
    """
    if cell.mean is None:
        reached = sum(value is not None for value in cell.values)
        return f"{reached} of {len(cell.values)} runs" if reached else "–"
    return number(cell.mean) + (f" ± {cell.std:.{_DIGITS}f}" if cell.std is not None else "")


def from_json(content: dict[str, Any]) -> Outcome:
    """Read an outcome that `Outcome.as_json` wrote."""
    cells = tuple(Cell(**{**cell, "values": tuple(cell["values"])}) for cell in content["cells"])
    claims = tuple(
        Checked(**{**claim, "rising": tuple(claim["rising"]), "means": tuple(claim["means"])})
        for claim in content["claims"]
    )
    wanted = {column: tuple(names) for column, names in content["wanted"].items()}
    return Outcome(
        **{
            **content,
            "cells": cells,
            "claims": claims,
            "wanted": wanted,
            "notes": tuple(content["notes"]),
            "sizes": {
                column: (Sizes(*least), Sizes(*most))
                for column, (least, most) in content.get("sizes", {}).items()
            },
            "pictures": tuple(map(Picture.from_json, content.get("pictures", ()))),
        }
    )
