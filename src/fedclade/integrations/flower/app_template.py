"""`fedclade flower new`: writes a Flower app that runs unchanged, which you then edit."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from fedclade.errors import InvalidInputError

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "task.py": "@PACKAGE@/task.py",
    "server_app.py": "@PACKAGE@/server_app.py",
    "client_app.py": "@PACKAGE@/client_app.py",
}


def new_app(folder: Path) -> list[Path]:
    """Write the app's files into a new or empty folder; returns their paths."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(
            f"{folder}: it is not empty; give a new or an empty folder.", str(folder)
        )
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not re.match(r"[a-z]", name):
        raise InvalidInputError(
            f"{folder}: its name becomes that of a Python package; it must begin with a letter.",
            str(folder),
        )
    filled = {"@NAME@": name, "@PACKAGE@": name.replace("-", "_"), "@PUBLISHER@": "fedclade"}
    written = []
    for source, place in _FILES.items():
        text = (
            resources.files("fedclade.integrations.flower")
            .joinpath("template", f"{source}.txt")
            .read_text()
        )
        for mark, value in filled.items():
            text, place = text.replace(mark, value), place.replace(mark, value)
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    package = folder / filled["@PACKAGE@"] / "__init__.py"
    package.write_text(f'"""{name}."""\n')
    return [*written, package]
