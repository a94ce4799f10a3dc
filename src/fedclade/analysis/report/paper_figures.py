"""Figures for papers, from the data of the page: PNG, SVG and PDF, the same bytes every time."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedclade.analysis.report.similarity_layout import MIXED
from fedclade.errors import InvalidInputError, nearest

FORMATS = ("png", "svg", "pdf")
# The colors of Okabe and Ito, without yellow, which is hard to see on white. Markers differ too, so
# that color is never the only difference.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5BB5", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "fedclade",
    "pdf.fonttype": 42,
}
# Remove dates and versions, so that files are reproducible.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
_MAX_LEGEND = 12  # groups


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
        for name, figure in _figures(data):
            for kind in formats:
                path = out / f"{name}.{kind}"
                figure.savefig(path, metadata=_METADATA[kind], bbox_inches="tight")
                written.append(path)
    return written


def _figures(data: dict[str, Any]) -> list[tuple[str, Figure]]:
    figures: list[tuple[str, Figure]] = []
    if data["compared"]:
        figures.append(("curves", _compared(data)))
    for run in data["runs"]:
        prefix = (
            f"{re.sub(r'[^A-Za-z0-9._-]+', '-', run['name'])}-" if len(data["runs"]) > 1 else ""
        )
        if any(value is not None for value in run["rounds"]["value"]):
            figures.append((f"{prefix}curves", _curves(run, data["metric"])))
        if run["map"]:
            figures += [
                (f"{prefix}map", _map(run)),
                (f"{prefix}matrix", _matrix(run)),
                (f"{prefix}dendrogram", _dendrogram(run)),
            ]
        if run["clients"] and any(value is not None for value in run["clients"].get("value", ())):
            figures.append((f"{prefix}distribution", _distribution(run, data["metric"])))
    return figures


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _label(metric: dict[str, Any]) -> str:
    return f"{metric['label']} ({metric['unit']})" if metric["unit"] else str(metric["label"])


def _line_style(index: int) -> dict[str, Any]:
    return {"color": _COLORS[index % len(_COLORS)], "marker": _MARKERS[index % len(_MARKERS)]}


def _color(group: int) -> str:
    return "0.45" if group < 0 else _COLORS[group % len(_COLORS)]


def _compared(data: dict[str, Any]) -> Figure:
    figure, axes = _new(4.5, 3)
    for index, row in enumerate(data["compared"]):
        if row["curve"]:
            rounds, mean, low, high = np.array(row["curve"], float).T
            axes.plot(
                rounds,
                mean,
                label=row["label"],
                markersize=4,
                markevery=max(1, len(rounds) // 10),
                **_line_style(index),
            )
            axes.fill_between(rounds, low, high, color=_color(index), alpha=0.15, linewidth=0)
    axes.set(xlabel="Round", ylabel=_label(data["metric"]))
    if axes.lines:
        axes.legend()
    return figure


def _curves(run: dict[str, Any], metric: dict[str, Any]) -> Figure:
    figure, axes = _new(4.5, 3)
    for index, (column, name) in enumerate((("value", "mean client"), ("worst", "worst tenth"))):
        known = [
            (number, value)
            for number, value in zip(run["rounds"]["round"], run["rounds"][column], strict=True)
            if value is not None
        ]
        if known:
            axes.plot(
                *zip(*known, strict=True),
                label=name,
                markersize=4,
                markevery=max(1, len(known) // 10),
                **_line_style(index),
            )
    axes.set(xlabel="Round", ylabel=_label(metric))
    axes.legend()
    return figure


def _map(run: dict[str, Any]) -> Figure:
    figure, axes = _new(4, 3.5)
    x, y, cluster = (np.array(run["map"][name]) for name in ("x", "y", "cluster"))
    groups = np.unique(cluster)
    for group in groups:
        members = cluster == group
        style = _line_style(int(group)) if group >= 0 else {"color": "0.45", "marker": "o"}
        axes.scatter(
            x[members],
            y[members],
            s=12,
            alpha=0.7,
            linewidths=0,
            label=f"group {group}" if group >= 0 else "no group yet",
            **style,
        )
    axes.set(xlabel="First component", ylabel="Second component")
    if 1 < len(groups) <= _MAX_LEGEND:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _matrix(run: dict[str, Any]) -> Figure:
    matrix = run["matrix"]
    figure = Figure(figsize=(6.4, 3), layout="constrained")
    both = figure.subplots(1, 2)
    for axes, which, title in zip(
        both, ("before", "after"), ("ordered by client", "ordered by group"), strict=True
    ):
        cells = np.frombuffer(base64.b64decode(matrix[which]), np.uint8).reshape(
            matrix["side"], matrix["side"]
        )
        image = axes.imshow(
            cells / 255 * matrix["high"],
            cmap="Blues_r",
            vmin=0,
            vmax=matrix["high"],
            interpolation="nearest",
        )
        axes.set(xticks=[], yticks=[], title=title)
    for _, _, end in matrix["groups"][:-1]:
        border = end * matrix["side"] / matrix["clients"] - 0.5
        both[1].axhline(border, color="0.3", linewidth=0.5)
        both[1].axvline(border, color="0.3", linewidth=0.5)
    figure.colorbar(image, ax=list(both), label=f"{matrix['measure']} distance", shrink=0.9)
    return figure


def _dendrogram(run: dict[str, Any]) -> Figure:
    tree = run["tree"]
    figure, axes = _new(6.4, 3)
    for left, right, left_foot, height, right_foot, group in tree["links"]:
        axes.plot(
            [left, left, right, right],
            [left_foot, height, height, right_foot],
            color="0.45" if group == MIXED else _color(group),
            lw=1,
        )
    for x, (group, _) in enumerate(tree["leaves"]):
        style = _line_style(group) if group >= 0 else {"color": "0.45", "marker": "o"}
        axes.plot([x], [0], markersize=3, clip_on=False, **style)
    if tree["cut"] is not None:
        axes.axhline(tree["cut"], color="black", linestyle="--", linewidth=0.8)
    axes.set(xticks=[], xlabel="Clients", ylabel="Height of the merge", ylim=(0, None))
    return figure


def _distribution(run: dict[str, Any], metric: dict[str, Any]) -> Figure:
    figure, axes = _new(4.5, 2.6)
    values = np.array([value for value in run["clients"]["value"] if value is not None], float)
    axes.hist(values, bins=20, color="0.6")
    axes.axvline(
        values.mean(), color="black", linestyle="--", linewidth=1, label=f"mean {values.mean():.4g}"
    )
    axes.set(xlabel=_label(metric), ylabel="Clients")
    axes.legend()
    return figure
