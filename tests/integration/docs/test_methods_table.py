"""The table in docs/methods/README.md is the one that the code makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_of_methods_is_up_to_date(tmp_path: Path) -> None:
    made = tmp_path / "README.md"
    subprocess.run(
        [sys.executable, ROOT / "tools" / "docs" / "methods_table.py", "--out", made],
        check=True,
        capture_output=True,
    )
    assert made.read_text() == (ROOT / "docs" / "methods" / "README.md").read_text(), (
        "run python tools/docs/methods_table.py"
    )
