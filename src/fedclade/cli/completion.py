"""What the shell completes after TAB: experiments, methods and other names. Nothing heavy is
imported: a shell waits for it.
"""

from __future__ import annotations

from pathlib import Path

from fedclade.cli.index import read_index


def experiments(incomplete: str) -> list[str]:
    """Presets, TOML files and the folders that may hold them."""
    presets = [name for name in read_index()["presets"] if name.startswith(incomplete)]
    folder, _, start = incomplete.rpartition("/")
    inside = sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).glob("*"))
    head = incomplete.removesuffix(start)
    files = [
        f"{head}{path.name}{'/' if path.is_dir() else ''}"
        for path in inside
        if path.name.startswith(start)
        and (path.suffix == ".toml" or (path.is_dir() and not path.name.startswith(".")))
    ]
    return presets + files


def methods(incomplete: str) -> list[str]:
    """Methods, also after a comma."""
    head, comma, start = incomplete.rpartition(",")
    names = [name for name in read_index()["methods"] if name.startswith(start)]
    return [f"{head}{comma}{name}" for name in names]


def kinds(incomplete: str) -> list[str]:
    """What `fedclade list` lists."""
    return [kind for kind in read_index() if kind.startswith(incomplete)]


def described(incomplete: str) -> list[str]:
    """What `fedclade describe` describes."""
    index = read_index()
    names = {
        name for kind in ("methods", "partitions", "models", "datasets") for name in index[kind]
    }
    return sorted(name for name in names if name.startswith(incomplete))
