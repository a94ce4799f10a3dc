"""docs/images/screenshots/: the report, a diagnosis and a live page, as Chromium shows them.

python tools/docs/screenshots.py [--out docs/images/screenshots]

The runs are those of examples/stay.csv: twelve invented hospitals, which code the diagnosis in two
ways. The live page is that of the same comparison before its last run has ended. It needs Chromium
(or $FEDCLADE_CHROMIUM) and takes about two minutes; fonts differ between machines, so no test
compares the pictures.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from fedclade.analysis import report
from fedclade.analysis.report.live_server import Live

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "images" / "screenshots"
WIDTH, HEIGHT, COLORS = 1040, 780, 128
METHODS = "fedavg,local,clade_groups,clade"


def fedclade(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "fedclade", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def unfinished(comparison: Path, folder: Path) -> Path:
    """A copy of the comparison as it was before its last run had ended."""
    shutil.copytree(comparison, folder)
    names = [run["name"] for run in json.loads((folder / "plan.json").read_text())["runs"]]
    (folder / "comparison.json").unlink()
    for name in names[6:]:
        shutil.rmtree(folder / name)
    running = folder / names[5]
    (running / "summary.json").unlink()
    (running / "client_features.safetensors").unlink(missing_ok=True)
    lines = (running / "rounds.jsonl").read_text().splitlines()[:20]
    (running / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def photograph(browser: Any, address: str, out: Path, ready: str) -> None:
    tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    tab.goto(address)
    tab.locator(ready).first.wait_for()
    picture = Image.open(io.BytesIO(tab.screenshot()))
    picture.quantize(COLORS).save(out, optimize=True)
    tab.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    chromium = os.environ.get("FEDCLADE_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        folder = Path(scratch)
        shutil.copy(ROOT / "examples" / "stay.csv", folder)
        fedclade(folder, "init", "stay.csv", "--client", "hospital", "--target", "diagnosis")
        compare = ("compare", "stay.toml", "--methods", METHODS, "--seeds", "3", "-q")
        fedclade(folder, *compare, "--out", "stay")
        fedclade(folder, "diagnose", "stay.toml", "--out", "diagnosis")
        page = report.write_report(folder / "diagnosis", folder / "diagnosis.html")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        address = (folder / "stay" / "report.html").as_uri()
        photograph(browser, address, out / "report.png", "#forest-svg")
        photograph(browser, page.as_uri(), out / "diagnosis.png", "#diagnosis-0-pilots-svg")
        with Live(unfinished(folder / "stay", folder / "live" / "stay")) as live:
            photograph(browser, live.address, out / "live.png", "#progress-bar")
        browser.close()


if __name__ == "__main__":
    main()
