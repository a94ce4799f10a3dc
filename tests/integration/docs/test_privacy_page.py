"""The tables in docs/privacy.md agree with the code and with the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fedclade.methods import METHODS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "privacy.md"


def test_the_tables_are_up_to_date(tmp_path: Path) -> None:
    written = tmp_path / "privacy.md"
    script = ROOT / "tools" / "docs" / "privacy_page.py"
    subprocess.run([sys.executable, script, "--out", written], check=True, capture_output=True)
    assert written.read_text() == PAGE.read_text(), "run python tools/docs/privacy_page.py"


def test_every_method_is_there() -> None:
    assert all(
        f"\n| {name} | {method.client_disclosure} |" in PAGE.read_text()
        for name, method in METHODS.items()
    )
