"""The page on a phone, in dark mode, with a screen reader, and in print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Open = Callable[..., Any]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["one", "all", "diagnosis"])
def test_nothing_is_wider_than_the_screen(
    pages: dict[str, str], opened: Open, name: str, width: int
) -> None:
    tab = opened(pages[name], width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("all", 1280, "light"), ("all", 390, "dark"), ("diagnosis", 390, "light")],
)
def test_axe_finds_no_serious_violation(
    pages: dict[str, str], opened: Open, name: str, width: int, scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="the pip package axe-playwright-python is not installed",
    )
    tab = opened(pages[name], width, scheme)
    tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    violations = axe.Axe().run(tab).response["violations"]
    assert [
        (violation["id"], violation["nodes"][0]["html"])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ] == []


def test_the_first_tab_stop_skips_to_the_results(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["one"])
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the results"
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.id") == "main"


def test_every_figure_has_a_label_and_a_table(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["several"])
    drawings = tab.locator("svg[role=img], canvas[role=img]")
    assert drawings.count() == 14
    assert all(drawings.nth(at).get_attribute("aria-label") for at in range(drawings.count()))
    tab.locator("#learning-all-details summary").click()
    assert (
        tab.locator("#learning-all-table tbody tr").count() == 2
    )  # evaluated in two of four rounds


def test_print_has_figures_and_no_controls(pages: dict[str, str], opened: Open) -> None:
    tab = opened(pages["several"], 740, "dark")  # A4 with its margins
    assert "lighter is closer" in tab.locator("#matrix-caption").inner_text()
    tab.emulate_media(media="print")
    for control in ("#bar", ".zoom", "summary", ".controls", ".skip"):
        assert tab.locator(f"{control}:visible").count() == 0
    assert tab.locator("#curves-svg").is_visible()
    assert "darker is closer" in tab.locator("#matrix-caption").inner_text()  # paper is white
    assert tab.evaluate("document.documentElement.scrollWidth") <= 740
