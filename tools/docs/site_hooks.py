"""Hooks for mkdocs: pages and files that are outside docs/.

Links between pages work in the repository, so docs/extend.md links to ../CONTRIBUTING.md. The site
has nothing above docs/: pages of the root and notebooks become pages of the site, a single file is
copied to files/, and a link to a folder becomes plain text.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = {
    f"notebooks/{name}.ipynb": f"notebooks/{name}.md"
    for name in (
        *("newcomer", "researcher", "engineer"),
        *("hospitals", "permuted_labels", "drift", "writers", "roles"),
    )
}
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    **NOTEBOOKS,
}
# The alternatives exclude each other: else text with many backticks takes exponential time.
LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)"
)


def on_files(files: Files, config: Any) -> Files:
    for outside, inside in PAGES.items():
        if files.get_file_from_path(inside) is None:
            files.append(File.generated(config, inside, content=_text(ROOT / outside)))
    for notebook, inside in NOTEBOOKS.items():
        for name, image in _images(ROOT / notebook).items():
            path = f"{posixpath.dirname(inside)}/{name}"
            files.append(File.generated(config, path, content=image))
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
    at = page.file.src_uri
    outside = next((name for name, inside in PAGES.items() if inside == at != "index.md"), None)
    folder = (ROOT / (outside or f"docs/{at}")).parent
    return LINK.sub(lambda link: _site_link(link, folder, posixpath.dirname(at)), markdown)


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
    """A page as Markdown; for a notebook its text, its code and its outputs."""
    if file.suffix != ".ipynb":
        return file.read_text()
    parts = []
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![figure]({_image_name(cell)})")
            else:
                text = "".join(output.get("text") or data["text/plain"]).strip("\n")
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _images(notebook: Path) -> dict[str, bytes]:
    return {
        _image_name(cell): base64.b64decode(output["data"]["image/png"])
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    }


def _image_name(cell: dict[str, Any]) -> str:
    return f"{cell['id']}.png"


def _is_ours(target: Path) -> bool:
    return target.is_relative_to(ROOT)
