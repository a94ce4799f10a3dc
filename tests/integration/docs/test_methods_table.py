"""The table in docs/methods/README.md is the one that the script makes from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_of_methods_is_up_to_date(tmp_path: Path) -> None:
    written = tmp_path / "README.md"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "methods_table.py", "--out", written],
        check=True,
        capture_output=True,
    )
    assert written.read_text() == (ROOT / "docs" / "methods" / "README.md").read_text(), (
        "run python tools/docs/methods_table.py"
    )
