"""The data of pictures: panels, which a study returns or which are made from the rounds of runs.

A panel has numbers only; `draw` turns it into a picture. `as_json` keeps what the picture needs:
four significant digits, and 256 levels of a matrix.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from fedclade.reproduce.paper_metrics import History

PanelKind = Literal["lines", "matrix", "graph", "tree", "points"]
_SIGNIFICANT = 4
_LEVELS = 255


@dataclass(frozen=True)
class Series:
    """One line or one set of points.

    Args:
        name: the name in the legend. Series of one name have one color in all panels of a picture.
        x: the horizontal coordinates.
        y: the vertical coordinates; NaN for none.
        low: the lower edge of a band around a line; None for no band.
        high: the upper edge of the band.
        connect: in a panel of points, draw a path from point to point.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    connect: bool = False

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.x):
                raise ValueError(
                    f"series '{self.name}': {name} has {len(values)} values, x has {len(self.x)}"
                )


@dataclass(frozen=True)
class Panel:
    """One part of a picture.

    Args:
        title: what it shows.
        kind: "lines" and "points" need `series`; "matrix" needs `matrix`; "graph" needs `groups`
            and `edges`; "tree" needs `parents`.
        x_label: the label of the horizontal axis.
        y_label: the label of the vertical axis.
        series: the lines or points.
        matrix: the rows of a heat map.
        boundaries: in a matrix, the indices at which a new group of rows and columns starts.
        scale_label: what the colors of a matrix mean.
        edges: the edges of a graph: two nodes and the weight.
        positions: the place of each node; a circle if empty.
        groups: the group of each node of a graph or tree, which gives its color; -1 for none.
        parents: for each node of a tree its parent, -1 for the root.
        labels: a text for each node.
    """

    title: str
    kind: PanelKind
    x_label: str = ""
    y_label: str = ""
    series: tuple[Series, ...] = ()
    matrix: tuple[tuple[float, ...], ...] = ()
    boundaries: tuple[int, ...] = ()
    scale_label: str = ""
    edges: tuple[tuple[int, int, float], ...] = ()
    positions: tuple[tuple[float, float], ...] = ()
    groups: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        needs = {"matrix": "matrix", "graph": "groups", "tree": "parents"}.get(self.kind, "series")
        if not getattr(self, needs):
            raise ValueError(f"panel '{self.title}': a panel of kind {self.kind} needs {needs}")
        if len({len(row) for row in self.matrix}) > 1:
            raise ValueError(f"panel '{self.title}': the rows of the matrix differ in length")
        nodes = len(self.parents or self.groups)
        for name in ("positions", "groups", "labels"):
            values = getattr(self, name)
            if self.kind in ("graph", "tree") and values and len(values) != nodes:
                raise ValueError(
                    f"panel '{self.title}': {name} has {len(values)} entries for {nodes} nodes"
                )

    def as_json(self) -> dict[str, Any]:
        """The fields that are not at their defaults, rounded."""
        content: dict[str, Any] = {}
        for name, value in _given(self).items():
            if name == "series":
                content[name] = [_series_json(series) for series in self.series]
            elif name == "matrix":
                content[name] = _packed(self.matrix)
            else:
                content[name] = _rounded(value)
        return content

    @staticmethod
    def from_json(content: dict[str, Any]) -> Panel:
        """Read what `as_json` wrote."""
        given = {name: _frozen(value) for name, value in content.items()}
        if "series" in content:
            given["series"] = tuple(
                Series(**{name: _numbers(value) for name, value in series.items()})
                for series in content["series"]
            )
        if "matrix" in content:
            given["matrix"] = _unpacked(content["matrix"])
        return Panel(**given)


@dataclass(frozen=True)
class StudyResult:
    """What a study returns.

    Args:
        history: the numbers by round; the last row is the result.
        panels: the panels of a picture.
    """

    history: History
    panels: tuple[Panel, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A picture of a table: its panels, and what the paper's figure shows.

    Args:
        file: the name of its files without the ending, such as "flt_figure6-accuracy".
        title: what it shows.
        reading: what the paper's figure shows, in our words.
        panels: its panels.
    """

    file: str
    title: str
    reading: str
    panels: tuple[Panel, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "title": self.title,
            "reading": self.reading,
            "panels": [panel.as_json() for panel in self.panels],
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> Picture:
        """Read what `as_json` wrote."""
        panels = tuple(Panel.from_json(panel) for panel in content["panels"])
        return Picture(content["file"], content["title"], content["reading"], panels)


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    return {name: given for name, given in values.items() if given != defaults[name]}


def _series_json(series: Series) -> dict[str, Any]:
    return {name: _rounded(value) for name, value in _given(series).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = float(f"{value:.{_SIGNIFICANT}g}")
        return int(rounded) if rounded.is_integer() else rounded
    return [_rounded(entry) for entry in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return tuple(math.nan if entry is None else float(entry) for entry in value)


def _packed(matrix: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The matrix as bytes between its lowest and its highest value."""
    values = np.array(matrix, float)
    low, high = _rounded(float(values.min())), _rounded(float(values.max()))
    levels = np.rint((values - low) / ((high - low) or 1.0) * _LEVELS).clip(0, _LEVELS)
    packed = zlib.compress(levels.astype(np.uint8).tobytes(), 9)
    return {
        "shape": list(values.shape),
        "low": low,
        "high": high,
        "levels": base64.b64encode(packed).decode(),
    }


def _unpacked(content: dict[str, Any]) -> tuple[tuple[float, ...], ...]:
    levels = np.frombuffer(zlib.decompress(base64.b64decode(content["levels"])), np.uint8)
    low, high = content["low"], content["high"]
    values = low + levels.astype(float) / _LEVELS * (high - low)
    return tuple(map(tuple, values.reshape(content["shape"]).tolist()))
