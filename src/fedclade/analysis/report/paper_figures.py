"""Figures for papers, from the descriptions that the page draws: PNG, SVG and PDF, the same bytes
every time.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedclade.analysis.report.figure_descriptions import OTHER, OTHERS
from fedclade.errors import InvalidInputError, nearest

FORMATS = ("png", "svg", "pdf")
# The colors of Okabe and Ito, without yellow, which is hard to see on white. Markers differ too, so
# that color is never the only difference.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5BB5", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GRAY = "0.45"
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "fedclade",
    "svg.fonttype": "none",  # text stays text: it can be searched and edited
    "pdf.fonttype": 42,
}
# Remove dates and versions, so that files are reproducible.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
_SHORT_LEGEND = 5  # entries that fit into the axes
_SCREEN_DPI = 110


class ReportFigure(Figure):
    """A figure that a notebook shows, also where pyplot was never imported."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        with matplotlib.rc_context(_STYLE):
            self.savefig(image, dpi=_SCREEN_DPI, metadata=_METADATA["png"], bbox_inches="tight")
        return image.getvalue()


def draw(data: dict[str, Any], out: Path, formats: Sequence[str]) -> list[Path]:
    """Write every figure in every format. With several runs, file names start with the name of the
    run.
    """
    for name in formats:
        if name not in FORMATS:
            raise InvalidInputError(
                f"formats = '{name}': unknown.{nearest(name, FORMATS)}", "formats"
            )
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(_STYLE):
        for name, figure in figures(data):
            for kind in formats:
                path = out / f"{name}.{kind}"
                figure.savefig(path, metadata=_METADATA[kind], bbox_inches="tight")
                written.append(path)
    return written


def figures(data: dict[str, Any]) -> list[tuple[str, Figure]]:
    """The figures of the comparison, of the diagnoses and of each run, with their names.

    Args:
        data: the content of a report, from `page_data.collect`.
    """
    with matplotlib.rc_context(_STYLE):
        return list(_each(data))


def _each(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    described = list(data["figures"].items())
    for diagnosis in data["diagnoses"]:
        described += [
            (f"diagnosis-{name}", figure) for name, figure in diagnosis["figures"].items()
        ]
    for name, figure in described:
        yield name, _drawn(figure, {})
    for run in data["runs"]:
        prefix = (
            f"{re.sub(r'[^A-Za-z0-9._-]+', '-', run['name'])}-" if len(data["runs"]) > 1 else ""
        )
        for name, figure in run["figures"].items():
            yield f"{prefix}{name}", _drawn(figure, run["colors"])


def _drawn(figure: dict[str, Any], colors: Mapping[int, int]) -> Figure:
    """The figure of a description.

    Args:
        figure: the description.
        colors: the color of each group.
    """
    return _DRAW[figure["kind"]](figure, colors)


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = ReportFigure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _style(color: int) -> dict[str, Any]:
    if color < 0:
        return {"color": _GRAY, "marker": "o"}
    return {"color": _COLORS[color], "marker": _MARKERS[color]}


def _lines(described: dict[str, Any], _: Mapping[int, int]) -> Figure:
    figure, axes = _new(4.5, 3)
    grays = [line for line in described["series"] if line["color"] < 0]
    for line in described["series"]:
        x, y = zip(*line["points"], strict=True)
        others = f"{OTHERS} ({len(grays)})" if grays and line is grays[0] else "_"
        axes.plot(
            x,
            y,
            label=others if line["color"] < 0 else line["name"],
            markersize=4,
            markevery=max(1, len(x) // 10),
            linestyle="--" if line.get("dashed") else "-",
            **_style(line["color"]),
        )
        if "band" in line:
            x, low, high = zip(*line["band"], strict=True)
            color = _style(line["color"])["color"]
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel=described["x"]["label"], ylabel=described["y"]["label"])
    if described.get("fromZero"):
        axes.set_ylim(0, None)
    if len(described["series"]) > 1:
        axes.legend(**_legend_place(len(described["series"])))
    return figure


def _legend_place(entries: int) -> dict[str, Any]:
    """A long legend is next to the axes."""
    if entries <= _SHORT_LEGEND:
        return {}
    return {"fontsize": 7, "loc": "center left", "bbox_to_anchor": (1, 0.5)}


def _rows(described: dict[str, Any], _: Mapping[int, int]) -> Figure:
    """Dots with intervals, or bars, a row for each name."""
    rows = described["rows"]
    figure, axes = _new(4.5, 0.9 + 0.24 * len(rows))
    for place, row in enumerate(rows):
        style = _style(row.get("color", 0))
        if described["kind"] == "bars":
            axes.barh(place, row["value"], color=style["color"], height=0.6)
            continue
        if "low" in row:
            axes.plot([row["low"], row["high"]], [place, place], color=style["color"], lw=1.5)
        axes.plot([row["value"]], [place], markersize=6, linestyle="none", **style)
    for value, name in described["rules"]:
        axes.axvline(value, color="black", linestyle="--", linewidth=0.8)
        axes.annotate(
            name, (value, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom"
        )
    axes.set(
        xlabel=described["x"]["label"],
        yticks=range(len(rows)),
        yticklabels=[row["name"] for row in rows],
        ylim=(len(rows) - 0.5, -0.5),
    )
    return figure


def _map(described: dict[str, Any], colors: Mapping[int, int]) -> Figure:
    figure, axes = _new(4, 3.5)
    x, y, groups = (np.array(described[name]) for name in ("px", "py", "groups"))
    shown = {group: colors.get(int(group), OTHER) for group in np.unique(groups)}
    for group, color in shown.items():
        members = groups == group
        label = f"group {group}" if color >= 0 else None
        axes.scatter(
            x[members], y[members], s=12, alpha=0.7, linewidths=0, label=label, **_style(color)
        )
    others = sum(color < 0 for group, color in shown.items() if group >= 0)
    if others:
        axes.plot([], [], linestyle="none", label=f"{OTHERS} ({others} groups)", **_style(OTHER))
    for place, name in enumerate(described["names"] or ()):
        axes.annotate(name, (x[place], y[place]), (3, 3), textcoords="offset points", fontsize=6)
    axes.set(xlabel=described["x"]["label"], ylabel=described["y"]["label"])
    if len(shown) > 1:
        axes.legend(**_legend_place(len(shown) + _SHORT_LEGEND))
    return figure


def _matrix(described: dict[str, Any], _: Mapping[int, int]) -> Figure:
    figure = ReportFigure(figsize=(6.4, 3), layout="constrained")
    both = figure.subplots(1, 2)
    for axes, which, title in zip(
        both, ("before", "after"), ("ordered by client", "ordered by group"), strict=True
    ):
        cells = np.frombuffer(base64.b64decode(described[which]), np.uint8).reshape(
            described["side"], described["side"]
        )
        image = axes.imshow(
            cells / 255 * described["high"],
            cmap="Blues_r",
            vmin=0,
            vmax=described["high"],
            interpolation="nearest",
        )
        axes.set(xticks=[], yticks=[], title=title)
    if described["names"]:
        both[1].set_yticks(range(len(described["names"])), described["names"], fontsize=5)
    for _, _, end in described["groups"][:-1]:
        border = end * described["side"] / described["clients"] - 0.5
        both[1].axhline(border, color="0.3", linewidth=0.5)
        both[1].axvline(border, color="0.3", linewidth=0.5)
    figure.colorbar(image, ax=list(both), label=described["scale"], shrink=0.9)
    return figure


def _tree(described: dict[str, Any], colors: Mapping[int, int]) -> Figure:
    figure, axes = _new(6.4, 3)
    for left, right, left_foot, height, right_foot, group in described["links"]:
        axes.plot(
            [left, left, right, right],
            [left_foot, height, height, right_foot],
            color=_style(colors.get(group, OTHER))["color"],
            lw=1,
        )
    for x, (group, _) in enumerate(described["leaves"]):
        axes.plot([x], [0], markersize=3, clip_on=False, **_style(colors.get(group, OTHER)))
    if described["cut"] is not None:
        axes.axhline(described["cut"], color="black", linestyle="--", linewidth=0.8)
    axes.set(xticks=[], ylabel=described["y"]["label"], ylim=(0, None))
    if described["names"]:
        places = range(len(described["names"]))
        axes.set_xticks(places, described["names"], rotation=90, fontsize=6)
    else:
        axes.set_xlabel(described["x"]["label"])
    return figure


def _histogram(described: dict[str, Any], _: Mapping[int, int]) -> Figure:
    figure, axes = _new(4.5, 2.6)
    axes.hist([value for value in described["values"] if value is not None], bins=20, color="0.6")
    for place, (value, name) in enumerate(described["rules"]):
        style = ("--", ":")[place % 2]
        axes.axvline(value, color="black", linestyle=style, linewidth=1, label=name)
    axes.set(xlabel=described["x"]["label"], ylabel=described["y"]["label"])
    axes.legend()
    return figure


_DRAW: dict[str, Callable[[dict[str, Any], Mapping[int, int]], Figure]] = {
    "lines": _lines,
    "dots": _rows,
    "bars": _rows,
    "map": _map,
    "matrix": _matrix,
    "tree": _tree,
    "histogram": _histogram,
}
