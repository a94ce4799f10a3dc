"""What each figure shows, as plain dictionaries. The page and the files for papers (PNG, SVG, PDF)
draw the same description, so names, axes, colors and values cannot differ between them.

`kind` says how a figure is drawn:

- "lines": `series`, each with a name, a color and [x, y] points; a band is [x, low, high].
- "dots": `rows`, each with a name, a color and a value; `low` and `high` are its interval.
- "bars": `rows`, each with a name and a value.
- "histogram": `values` with their `groups`.
- "map": `px`, `py` and `groups` of the clients `id`.
- "matrix" and "tree": see `similarity_layout`.

A color is a number from 0 to `COLORS` − 1, and stands for one thing in a figure; `OTHER` is gray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedclade.analysis.report.metric import Metric, short

Figure = dict[str, Any]
COLORS = 8
OTHER = -1
OTHERS = "other"
NAMED_CLIENTS = 30  # with at most this many, figures show the name of each client


def colors_of(sizes: Mapping[int, int]) -> dict[int, int]:
    """The color of each group. With more groups than colors the largest have one and the others
    are gray; all are gray if no group has two clients.

    Args:
        sizes: the number of clients of each group.
    """
    groups = sorted(group for group in sizes if group >= 0)
    if len(groups) > COLORS:
        if max(sizes.values()) == 1:
            return {}
        groups = sorted(sorted(groups, key=lambda group: -sizes[group])[: COLORS - 1])
    return {group: color for color, group in enumerate(groups)}


def color_of_rank(rank: int, number: int) -> int:
    """The color of a setting of a comparison, the best first."""
    return rank if number <= COLORS or rank < COLORS - 1 else OTHER


def axis(metric: Metric) -> dict[str, str]:
    return {"label": f"{metric.label} (%)" if metric.unit else metric.label, "unit": metric.unit}


def series(
    name: str,
    color: int,
    points: Sequence[Sequence[float]],
    *,
    band: Sequence[Sequence[float]] | None = None,
    dashed: bool = False,
    group: int | None = None,
) -> dict[str, Any]:
    line: dict[str, Any] = {"name": name, "color": color, "points": [*points]}
    if band:
        line["band"] = [*band]
    if dashed:
        line["dashed"] = True
    if group is not None:
        line["group"] = group
    return line


def lines(
    label: str, y: Mapping[str, str], drawn: Sequence[dict[str, Any]], *, from_zero: bool = False
) -> Figure | None:
    """Curves over the rounds; None if there is no point."""
    known = [line for line in drawn if line["points"]]
    if not known:
        return None
    figure: Figure = {
        "kind": "lines",
        "label": label,
        "x": {"label": "Round"},
        "y": dict(y),
        "series": known,
    }
    if from_zero:
        figure["fromZero"] = True
    return dict(short(figure, 6))


def dots(
    label: str,
    x: Mapping[str, str],
    rows: Sequence[dict[str, Any]],
    rules: Sequence[tuple[float, str]] = (),
) -> Figure | None:
    """A row for each value, with its interval if it has one, and vertical lines with names."""
    if not rows:
        return None
    figure = {"kind": "dots", "label": label, "x": dict(x), "rows": [*rows], "rules": [*rules]}
    return dict(short(figure))


def bars(
    label: str,
    x: Mapping[str, str],
    rows: Sequence[dict[str, Any]],
    rules: Sequence[tuple[float, str]] = (),
) -> Figure:
    figure = {"kind": "bars", "label": label, "x": dict(x), "rows": [*rows], "rules": [*rules]}
    return dict(short(figure))


def histogram(
    label: str,
    x: Mapping[str, str],
    values: Sequence[float | None],
    groups: Sequence[int],
    rules: Sequence[tuple[float, str]],
) -> Figure:
    return dict(
        short(
            {
                "kind": "histogram",
                "label": label,
                "x": dict(x),
                "y": {"label": "Clients"},
                "values": values,
                "groups": groups,
                "rules": rules,
            }
        )
    )
