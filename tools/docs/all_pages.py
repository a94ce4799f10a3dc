"""Regenerate every generated page and picture of docs/, and the names that the commands know.

python tools/docs/all_pages.py

It does not write docs/licences.md: tools/release/licences.py does, after `make lock`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "cli_index.py",
    "methods_table.py",
    "method_pages.py",
    "method_tables.py",
    "method_pictures.py",
    "quickstart_picture.py",
    "diagnosis_page.py",
    "privacy_page.py",
    "reproduction_page.py",
    "which_page.py",
)


def main() -> None:
    for script in SCRIPTS:
        print(script, flush=True)
        subprocess.run([sys.executable, HERE / script], check=True)


if __name__ == "__main__":
    main()
