"""The site builds without a warning and without the network. Its generated pages and pictures are
those that their scripts write.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.docs.markdown import FENCE, ROOT, name_of, pages

from fedclade.methods import METHODS

METHOD_PAGES = {
    name: ROOT / "docs" / "methods" / f"{'flis' if name.startswith('flis') else name}.md"
    for name in METHODS
}
PARTS = ("## What happens", "## Parameters", "## What leaves a client", "## When it fails")
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")
SOURCE = r'<(?:script|img|iframe)[^>]*\ssrc="(?:https?:)?//'
FETCHED = re.compile(
    SOURCE + r'|<link[^>]*\srel="(?:stylesheet|preconnect|icon)"[^>]*href="(?:https?:)?//'
)


def script(name: str, *arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_page_with_everything(name: str) -> None:
    text = METHOD_PAGES[name].read_text()
    assert all(f"\n{part}\n" in text for part in PARTS)
    assert f"](../images/methods/{METHOD_PAGES[name].stem}.svg)" in text
    assert re.search(rf"<!-- parameters: [a-z_ ]*\b{name}\b", text)
    assert re.search(rf"<!-- leaves: [a-z_ ]*\b{name}\b", text)


def test_the_pages_agree_with_the_code() -> None:
    script("method_pages.py", "--check")


def test_the_measured_tables_of_methods_are_made_from_the_results() -> None:
    script("method_tables.py", "--check")


def test_the_pictures_are_those_that_are_drawn(tmp_path: Path) -> None:
    script("method_pictures.py", "--out", tmp_path)
    kept = ROOT / "docs" / "images" / "methods"
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in kept.iterdir()}
    assert all(file.read_text() == (kept / file.name).read_text() for file in tmp_path.iterdir()), (
        "run python tools/docs/method_pictures.py"
    )


def test_which_method_is_made_from_the_results(tmp_path: Path) -> None:
    script("which_page.py", "--out", tmp_path / "which.md")
    assert (tmp_path / "which.md").read_text() == (ROOT / "docs" / "which.md").read_text(), (
        "run python tools/docs/which_page.py"
    )


@pytest.mark.parametrize("page", [name_of(page) for page in pages()])
def test_links_lead_to_files_of_the_repository(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text())
    missing = [
        link for link in LINK.findall(text) if not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert not missing


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'fedclade[docs]'")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing(site: Path) -> None:
    built = list(site.rglob("*.html"))
    assert len(built) > 30
    for page in built:
        assert not FETCHED.search(page.read_text()), page


@pytest.mark.slow
def test_the_search_works_when_the_site_is_opened_as_a_file(site: Path, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto((site / "methods" / "clade.html").as_uri())
    tab.locator("input[name=query]").click()
    tab.keyboard.type("dirichlet")
    tab.locator(".md-search-result__item").first.wait_for()
    assert "matching" in tab.locator(".md-search-result__meta").inner_text()
    tab.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "width", "scheme"),
    [
        ("index.html", 1280, "light"),
        ("coming_from.html", 390, "dark"),
        ("reproduction/flt.html", 390, "light"),
    ],
)
def test_axe_finds_no_serious_violation(
    site: Path, browser: Any, page: str, width: int, scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright",
        reason="the pip package axe-playwright-python is not installed",
    )
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto((site / page).as_uri())
    violations = axe.Axe().run(tab).response["violations"]
    context.close()
    assert [
        (violation["id"], violation["nodes"][0]["html"])
        for violation in violations
        if violation["impact"] in ("serious", "critical")
    ] == []
