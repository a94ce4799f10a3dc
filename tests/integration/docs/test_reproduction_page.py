"""docs/reproduction.md is the page that its script makes from results/papers/."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_made_from_the_results(tmp_path: Path) -> None:
    written = tmp_path / "reproduction.md"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "reproduction_page.py", "--out", written],
        check=True,
        capture_output=True,
    )
    docs = ROOT / "docs"
    made, stored = (
        {path.name: path.read_text() for path in (folder / "images").glob("papers/*")}
        for folder in (tmp_path, docs)
    )
    assert made == stored, "run python tools/docs/reproduction_page.py"
    assert written.read_text() == (docs / "reproduction.md").read_text(), (
        "run python tools/docs/reproduction_page.py"
    )
