"""docs/licences.md: the licences of all packages that fedclade is installed and tested with, as the
packages declare them.

python tools/release/licences.py     in an environment with all extras (`make test` sets one up)
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution, requires
from pathlib import Path

from lock import FIRST, MORE, packages
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Licenses

fedclade is under Apache-2.0. `python tools/release/licences.py` makes this page from what torch and
each package of locked.txt and locked-dev.txt declares, on Linux with Python 3.11. `pip install
fedclade` installs the packages marked *needed*. The others come with an extra (`flower`, `onnx`,
`track`, `ot`, `tables`, `transformers`, `docs`, `browser`) or are for developers only. No code of
them is copied into fedclade.

The table `heart` (`fedclade/data/bundled/heart.csv`) is the UCI Heart Disease data set by Andras
Janosi, William Steinbrunn, Matthias Pfisterer and Robert Detrano (1988), under CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/). The files of its four hospitals are joined into one,
with a column `hospital`; fedclade adds the column `disease` when it reads the table.

| package | version | license | |
| --- | --- | --- | --- |
"""


def licence(package: Distribution) -> str:
    """The SPDX expression where there is one, else the classifiers, else the first line of the
    field.
    """
    metadata = package.metadata
    if metadata.get("License-Expression"):
        return str(metadata["License-Expression"])
    kinds = [
        classifier.rsplit("::", 1)[1].strip()
        for classifier in metadata.get_all("Classifier") or []
        if classifier.startswith("License ::")
    ]
    kinds = [kind for kind in kinds if kind != "OSI Approved"]
    field = (metadata.get("License") or "").strip().splitlines()
    return "; ".join(kinds) or (field[0][:60] if field else "not declared")


def needed(name: str, names: set[str]) -> set[str]:
    """Add to `names` the packages that this one needs without any extra, and their own needs."""
    for text in requires(name) or []:
        if "extra ==" in text:
            continue
        other = _plain(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])
        if other not in names:
            try:
                distribution(other)
            except PackageNotFoundError:  # for another platform or Python
                continue
            names.add(other)
            needed(other, names)
    return names


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def page() -> str:
    core = needed("fedclade", set())
    rows = [_row(distribution("torch").version.partition("+")[0], "torch", core)]
    for name, lines in sorted(packages(FIRST.read_text() + MORE.read_text())):
        locked = Requirement(lines.partition("\\")[0])
        if locked.marker is None or locked.marker.evaluate():
            rows.append(_row(str(locked.specifier).removeprefix("=="), name, core))
    return HEAD + "".join(rows)


def _row(version: str, name: str, core: set[str]) -> str:
    package = distribution(name)
    return (
        f"| {package.metadata['Name']} | {version} | {licence(package)} |"
        f" {'needed' if name in core else ''} |\n"
    )


if __name__ == "__main__":
    (ROOT / "docs" / "licences.md").write_text(page())
