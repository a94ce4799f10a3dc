"""The page as text: complete, small, and data cannot execute."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from fedclade.analysis import report
from fedclade.analysis.report.html import SCRIPTS

EVIL = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> & \" '"


def embedded(text: str) -> dict[str, object]:
    element = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert element is not None
    return dict(json.loads(element.group(1)))


def test_the_page_contains_its_data(one: Path, tmp_path: Path) -> None:
    out = report.write_report([one], tmp_path / "new" / "page.html")
    assert embedded(out.read_text()) == json.loads(json.dumps(report.collect([one])))
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]


def test_the_same_folder_gives_the_same_page(one: Path) -> None:
    assert report.page(report.collect([one])) == report.page(report.collect([one]))


def test_data_cannot_execute(copied: Path) -> None:
    lines = [json.loads(line) for line in (copied / "rounds.jsonl").read_text().splitlines()]
    lines[0]["failures"] = [{"client": 0, "reason": EVIL}]
    (copied / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = report.collect([copied]) | {"title": EVIL, "headline": EVIL}
    text = report.page(data)
    assert embedded(text)["title"] == EVIL
    assert text.count("<script") == 2
    assert "<img" not in text.replace("createElement", "")


@pytest.mark.parametrize("live", [False, True])
def test_the_policy_allows_only_the_page_s_script_and_style(one: Path, live: bool) -> None:
    text = report.page(report.collect([one]), live=live)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    allowed = policy.group(1).replace("&#39;", "'")
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        assert inside is not None
        digest = base64.b64encode(hashlib.sha256(inside.group(1).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in allowed
    assert allowed.startswith("default-src 'none'")
    assert ("connect-src 'self'" in allowed) == live
    assert f'data-live="{"yes" if live else "no"}"' in text


def test_the_page_has_no_external_resources(one: Path) -> None:
    text = report.page(report.collect([one]))
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched


def test_scripts_are_small_and_all_are_used() -> None:
    folder = files("fedclade.analysis.report") / "templates"
    names = {path.name for path in folder.iterdir() if path.name.endswith(".js")}
    assert names == set(SCRIPTS)
    for name in SCRIPTS:
        text = (folder / name).read_text()
        assert len(text.splitlines()) < 300
        assert "innerHTML" not in text
