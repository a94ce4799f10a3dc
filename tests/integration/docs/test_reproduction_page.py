"""docs/reproduction.md is what its script makes of results/papers/."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_made_from_the_results(tmp_path: Path) -> None:
    made = tmp_path / "reproduction.md"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "reproduction_page.py", "--out", made],
        check=True,
        capture_output=True,
    )
    assert made.read_text() == (ROOT / "docs" / "reproduction.md").read_text(), (
        "run python tools/docs/reproduction_page.py"
    )
