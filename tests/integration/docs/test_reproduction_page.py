"""docs/reproduction.md and the page of each paper are those that the script makes from
results/papers/.
"""

import subprocess
import sys
from pathlib import Path

from fedclade.io.compact_json import read_results
from fedclade.reproduce.coverage import total
from fedclade.reproduce.markdown import from_json

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
    texts, kept = (
        {path.name: path.read_text() for path in (folder / "reproduction").glob("*.md")}
        | {"first": (folder / "reproduction.md").read_text()}
        for folder in (tmp_path, docs)
    )
    assert texts == kept, "run python tools/docs/reproduction_page.py"


def test_the_readme_says_how_many_cells_are_measured() -> None:
    outcomes = [from_json(read_results(file)) for file in (ROOT / "results/papers").glob("*.json")]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{total(outcomes)} cells with a number in a paper are measured" in readme
