"""Panels as pictures: SVG and PNG, the same bytes every time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedclade.reproduce.panels import Panel, Picture, Series

FORMATS = ("svg", "png")
# The colors of Okabe and Ito without yellow, which is hard to see on white; then others that differ
# from them and from each other.
_COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5BB5", "#000000"),
    *("#8B4513", "#7FC31C", "#B00020", "#1B3A6B", "#F04EDB", "#8A8A2B", "#00C5B5", "#A9A9D9"),
)
_NO_GROUP = "#999999"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 130,
    "svg.hashsalt": "fedclade",
}
# Remove dates and versions, so that files are reproducible.
_METADATA: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}
_WIDTH, _HEIGHT, _PER_ROW = 4.0, 3.1, 3  # inches of a panel; panels in a row
_MAX_MARKED = 25  # points of a line
_MAX_LABELED = 40  # nodes of a graph


def draw(picture: Picture, folder: Path, formats: tuple[str, ...] = FORMATS) -> list[Path]:
    """Write a picture into a folder.

    Args:
        picture: the picture.
        folder: where the files are written; it is created if it does not exist.
        formats: the endings of the files.

    Returns:
        The written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_STYLE):
        figure = _figure(picture)
        for kind in formats:
            path = folder / f"{picture.file}.{kind}"
            figure.savefig(path, metadata=_METADATA[kind], bbox_inches="tight")
            written.append(path)
    return written


def colors(count: int) -> list[str]:
    """This many different colors, which two panels of a picture share."""
    if count <= len(_COLORS):
        return list(_COLORS[:count])
    rainbow = matplotlib.colormaps["turbo"](np.linspace(0.03, 0.97, count))
    return [matplotlib.colors.to_hex(color) for color in rainbow]


def _figure(picture: Picture) -> Figure:
    columns = min(_PER_ROW, len(picture.panels))
    rows = math.ceil(len(picture.panels) / columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    names = dict.fromkeys(series.name for panel in picture.panels for series in panel.series)
    styles = {
        name: {"color": color, "marker": _MARKERS[index % len(_MARKERS)], "index": index}
        for index, (name, color) in enumerate(zip(names, colors(len(names)), strict=True))
    }
    for index, panel in enumerate(picture.panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
        axes.set_title(panel.title, loc="left", wrap=True)
        if panel.kind == "matrix":
            _matrix(axes, panel)
        elif panel.kind == "graph":
            _graph(axes, panel)
        elif panel.kind == "tree":
            _tree(axes, panel)
        else:
            for series in panel.series:
                _series(axes, series, styles[series.name], panel.kind == "lines")
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(len(handles), 2 * columns),
            fontsize=8,
        )
    return figure


def _series(axes: Axes, series: Series, style: dict[str, Any], is_line: bool) -> None:
    color, marker, index = style["color"], style["marker"], style["index"]
    x, y = np.array(series.x, float), np.array(series.y, float)
    if is_line or series.connect:
        axes.plot(
            x,
            y,
            label=series.name,
            color=color,
            marker=marker,
            markersize=3.5,
            markevery=max(1, len(x) // 10) if is_line or len(x) > _MAX_MARKED else 1,
            linewidth=1.3,
            linestyle=_DASHES[index // len(_MARKERS) % len(_DASHES)],
        )
        if series.connect:  # the path ends here
            axes.plot(x[-1:], y[-1:], color=color, marker=marker, markersize=7)
    else:
        axes.scatter(
            x, y, label=series.name, color=color, marker=marker, s=14, alpha=0.75, linewidths=0
        )
    if series.low is not None and series.high is not None:
        axes.fill_between(
            x,
            np.array(series.low, float),
            np.array(series.high, float),
            color=color,
            alpha=0.15,
            linewidth=0,
        )


def _matrix(axes: Axes, panel: Panel) -> None:
    values = np.array(panel.matrix, float)
    low, high = float(values.min()), float(values.max())
    if low < 0 < high:  # zero is white
        high = max(-low, high)
        low, colormap = -high, "RdBu_r"
    else:
        colormap = "Blues"
    image = axes.imshow(values, cmap=colormap, vmin=low, vmax=high, interpolation="nearest")
    for boundary in panel.boundaries:
        axes.axhline(boundary - 0.5, color="0.2", linewidth=0.6)
        axes.axvline(boundary - 0.5, color="0.2", linewidth=0.6)
    axes.figure.colorbar(image, ax=axes, label=panel.scale_label, shrink=0.85)


def _node_colors(groups: tuple[int, ...], nodes: int) -> list[str]:
    """The color of each node. Nodes without a group are gray."""
    if not groups:
        return [_COLORS[0]] * nodes
    known = sorted({group for group in groups if group >= 0})
    by_group = dict(zip(known, colors(len(known)), strict=True))
    return [by_group.get(group, _NO_GROUP) for group in groups]


def _graph(axes: Axes, panel: Panel) -> None:
    nodes = len(panel.groups)
    if panel.positions:
        places = np.array(panel.positions, float)
    else:  # a circle, on which the members of a group are neighbors
        order = np.argsort(panel.groups, kind="stable")
        angle = np.empty(nodes)
        angle[order] = 2 * np.pi * np.arange(nodes) / nodes
        places = np.stack([np.cos(angle), np.sin(angle)], 1)
    largest = max((abs(weight) for *_, weight in panel.edges), default=1.0) or 1.0
    for first, second, weight in panel.edges:
        strength = abs(weight) / largest
        axes.plot(
            *places[[first, second]].T,
            color="0.35",
            linewidth=0.3 + 0.7 * strength,
            alpha=0.1 + 0.5 * strength,
            zorder=1,
        )
    axes.scatter(
        places[:, 0],
        places[:, 1],
        c=_node_colors(panel.groups, nodes),
        s=60 if nodes <= _MAX_LABELED else 18,
        edgecolors="white",
        linewidths=0.5,
        zorder=2,
    )
    if nodes <= _MAX_LABELED:
        for place, label in zip(places, panel.labels, strict=False):
            axes.annotate(label, place, (4, 4), textcoords="offset points", fontsize=7)
    axes.set(xticks=[], yticks=[], aspect="equal" if not panel.positions else "auto")
    axes.margins(0.1)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _tree(axes: Axes, panel: Panel) -> None:
    """Roots at the top; a parent is over the middle of its children."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(panel.parents):
        children.setdefault(parent, []).append(node)
    places: dict[int, tuple[float, float]] = {}
    leaves = 0

    def place(node: int, depth: int) -> float:
        nonlocal leaves
        below = [place(child, depth + 1) for child in children.get(node, [])]
        if below:
            x = (below[0] + below[-1]) / 2
        else:
            x, leaves = float(leaves), leaves + 1
        places[node] = (x, -float(depth))
        return x

    for root in children.get(-1, []):
        place(root, 0)
    for node, parent in enumerate(panel.parents):
        if parent >= 0:
            axes.plot(*zip(places[parent], places[node], strict=True), color="0.45", linewidth=1)
    shown = np.array([places[node] for node in range(len(panel.parents))])
    axes.scatter(shown[:, 0], shown[:, 1], c=_node_colors(panel.groups, len(shown)), s=40, zorder=2)
    for node, label in enumerate(panel.labels):  # under a leaf, beside another node
        place_of_text: dict[str, Any] = (
            {"xytext": (7, 2)}
            if node in children
            else {"xytext": (0, -7), "ha": "center", "va": "top"}
        )
        axes.annotate(label, places[node], textcoords="offset points", fontsize=7, **place_of_text)
    axes.set(xticks=[], yticks=[], xlim=(-0.6, leaves - 0.4), ylim=(shown[:, 1].min() - 0.5, 0.3))
    for spine in axes.spines.values():
        spine.set_visible(False)
