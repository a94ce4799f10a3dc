"""Tables in Markdown, and pages in which some tables are generated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

END = "<!-- end -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; it ends with a line break."""
    return "".join(_line(row) for row in (head, ["---"] * len(head), *rows))


def _line(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"


def replace_block(page: str, name: str, content: str) -> str:
    """The page with new content between `<!-- table: NAME -->` and `<!-- end -->`."""
    begin = f"<!-- table: {name} -->"
    if begin not in page:
        raise SystemExit(f"{begin}: the page has no such line")
    block = f"{begin}\n\n{content.strip()}\n\n{END}"
    return re.sub(f"(?s){re.escape(begin)}.*?{END}", lambda _: block, page)
