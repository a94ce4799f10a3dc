"""Hooks for mkdocs: pages and files that are outside docs/.

Links between pages work in the repository, so docs/extend.md links to ../CONTRIBUTING.md. The site
contains only docs/. So pages of the root and notebooks become pages of the site, a single file is
copied to files/, and a link to a folder becomes plain text.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {
    f"notebooks/{name}.ipynb": f"notebooks/{name}.md"
    for name in ("newcomer", "researcher", "engineer")
}
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    **NOTEBOOKS,
}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for outside, inside in PAGES.items():
        if files.get_file_from_path(inside) is None:
            files.append(File.generated(config, inside, content=_text(ROOT / outside)))
    for source in [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in PAGES)]:
        for link in LINK.finditer(_text(source)):
            target = (source.parent / link[2]).resolve()
            if (
                target.is_file()
                and _is_ours(target)
                and not target.is_relative_to(ROOT / "docs")
                and target.suffix not in (".md", ".ipynb")
            ):
                path = f"files/{target.relative_to(ROOT).as_posix()}"
                if files.get_file_from_path(path) is None:
                    files.append(File.generated(config, path, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    path = page.file.src_uri
    outside = next((name for name, inside in PAGES.items() if inside == path != "index.md"), None)
    folder = (ROOT / (outside or f"docs/{path}")).parent
    return LINK.sub(lambda link: _site_link(link, folder, posixpath.dirname(path)), markdown)


def _site_link(link: re.Match[str], folder: Path, site_folder: str) -> str:
    """The link for the site, seen from `site_folder`."""
    text, target, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
    if not _is_ours(target):
        return link[0]
    name = target.relative_to(ROOT).as_posix()
    if name in PAGES:
        path = PAGES[name]
    elif name.startswith("docs/"):
        path = name.removeprefix("docs/")
    elif target.is_file():
        path = f"files/{name}"
    else:
        return text if target.exists() else link[0]
    return f"[{text}]({posixpath.relpath(path, site_folder or '.')}{anchor})"


def _text(file: Path) -> str:
    """A page as Markdown; for a notebook its text and its code."""
    if file.suffix != ".ipynb":
        return file.read_text()
    cells = json.loads(file.read_text())["cells"]
    parts = [
        (
            "".join(cell["source"])
            if cell["cell_type"] == "markdown"
            else f"```python\n{''.join(cell['source'])}\n```"
        )
        for cell in cells
    ]
    return "\n\n".join(parts) + "\n"


def _is_ours(target: Path) -> bool:
    return target.is_relative_to(ROOT)
