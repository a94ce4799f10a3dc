"""A comparison of 2,400 clients: the page is small, and shows all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedclade as fc
from fedclade.analysis import report

from .conftest import cells, planted, train

CLIENTS = 2_400


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    clients = planted(CLIENTS)
    for method in (fc.FedAvg(), fc.CladeGroups()):
        train(method, clients, folder / f"{method.name}-seed0", rounds=2)
    return report.write_report([folder], folder / "page.html")


def test_the_page_is_small(many: Path) -> None:
    assert many.stat().st_size < 3_000_000


def test_everything_is_drawn(many: Path, opened: Callable[..., Any]) -> None:
    tab = opened(many.as_uri())
    assert tab.locator("#run-title").inner_text() == "Run clade_groups-seed0"  # of the best
    assert tab.locator("#map-svg .mark").count() == CLIENTS
    assert tab.locator("#before-after-svg .mark").count() == CLIENTS
    assert tab.locator("#curves-svg .trace").count() == 2
    assert tab.locator("#learning-all-svg .trace").count() == 3
    assert tab.locator("#learning-groups-svg .trace").count() == 4
    assert tab.locator("#tree-svg .trace").count() == 119
    assert tab.locator("#tree-cut").count() == 1
    assert tab.locator("#spread-svg .bin").count() > 1
    assert tab.locator("#gains-svg .bin").count() > 1
    assert tab.locator("#traffic-svg .trace").count() == 2
    assert tab.locator("#seconds-svg .trace").count() == 1
    assert cells(tab, "groups-table", 2) == ["600"] * 4
    assert tab.evaluate("document.documentElement.scrollWidth") <= 1280
    tab.locator("#map").get_by_role("button", name="group 3").click()
    assert tab.locator("#map-svg .mark:not(.dim)").count() == CLIENTS // 4


# The sum of red, green and blue at three places: both ends of the diagonal, and another corner.
BRIGHTNESS = """(id) => {
  const canvas = document.getElementById(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const { width, height } = canvas;
  const at = (x, y) => 4 * (Math.floor(y * height) * width + Math.floor(x * width));
  const places = [at(0.1, 0.1), at(0.9, 0.9), at(0.1, 0.9)];
  return places.map((place) => data[place] + data[place + 1] + data[place + 2]);
}"""


def test_reordering_brings_groups_together(many: Path, opened: Callable[..., Any]) -> None:
    """Consecutive clients are in different groups: before, every cell is a mean over all groups;
    after, groups are dark squares along the diagonal.
    """
    tab = opened(many.as_uri())
    before, after = (
        tab.evaluate(BRIGHTNESS, f"matrix-{which}-canvas") for which in ("before", "after")
    )
    assert after[2] > 2 * max(after[:2])
    assert max(before) < 1.5 * min(before)
