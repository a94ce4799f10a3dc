"""The colors of groups: visible on the page, and distinguishable with color blindness."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

# Linear RGB as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "all cones": np.eye(3),
    "no red cones": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green cones": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no blue cones": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color: str) -> np.ndarray:
    value = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(*colors: str) -> float:
    light, dark = sorted((float(TO_XYZ[1] @ linear(color)) for color in colors), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def palettes() -> dict[str, tuple[str, list[str]]]:
    """For each scheme the color of the page and those of the groups."""
    light, dark = (
        (files("fedclade.analysis.report") / "templates" / "style.css")
        .read_text()
        .split("@media")[:2]
    )
    return {
        name: (re.findall(r"--page: (#\w{6})", part)[0], re.findall(r"--c\d: (#\w{6})", part))
        for name, part in (("light", light), ("dark", dark))
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_stand_out_from_the_page(scheme: str) -> None:
    page, colors = palettes()[scheme]
    assert len(colors) == 8
    assert min(contrast(page, color) for color in colors) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("eyes", EYES)
def test_any_two_colors_differ(scheme: str, eyes: str) -> None:
    colors = [lab(EYES[eyes] @ linear(color)) for color in palettes()[scheme][1]]
    # A difference of 2 is just visible.
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(colors, 2)) >= 15
