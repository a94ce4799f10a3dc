"""The tables in docs/diagnosis.md are those that the script makes from the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_made_from_the_results(tmp_path: Path) -> None:
    page, written = ROOT / "docs" / "diagnosis.md", tmp_path / "diagnosis.md"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "diagnosis_page.py", "--out", written],
        check=True,
        capture_output=True,
    )
    assert written.read_text() == page.read_text(), "run python tools/docs/diagnosis_page.py"
