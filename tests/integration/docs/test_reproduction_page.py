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
    assert written.read_text() == (ROOT / "docs" / "reproduction.md").read_text(), (
        "run python tools/docs/reproduction_page.py"
    )
