"""Small tables for notebooks (`_repr_html_`): escaped text, no scripts, no styles of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_CELL = "text-align:left;vertical-align:top;padding:0 1em 0 0"


def html_table(title: str, rows: Mapping[str, object], notes: Iterable[str] = ()) -> str:
    """A title, a table of names and values, and lines of text.

    Args:
        title: the title.
        rows: the value of each name.
        notes: the lines below the table.
    """
    lines = [f"<b>{escape(title)}</b>"]
    if rows:
        lines.append("<table>")
        lines += [
            f'<tr><th style="{_CELL}">{escape(name)}</th>'
            f'<td style="{_CELL}">{escape(str(value))}</td></tr>'
            for name, value in rows.items()
        ]
        lines.append("</table>")
    lines += [f"<div>{escape(note)}</div>" for note in notes]
    return "\n".join(lines)


def html_grid(title: str, rows: Iterable[Mapping[str, object]], notes: Iterable[str] = ()) -> str:
    """A title and a table with a heading for each column.

    Args:
        title: the title.
        rows: the cells of each row by the name of their column, the same columns in every row.
        notes: the lines below the table.
    """
    listed = list(rows)
    heads = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in next(iter(listed), {}))
    lines = [f"<b>{escape(title)}</b>", f"<table><tr>{heads}</tr>"]
    for row in listed:
        cells = "".join(f'<td style="{_CELL}">{escape(str(cell))}</td>' for cell in row.values())
        lines.append(f"<tr>{cells}</tr>")
    lines.append("</table>")
    lines += [f"<div>{escape(note)}</div>" for note in notes]
    return "\n".join(lines)


def html_progress(label: str, done: int, total: int, note: str) -> str:
    """A bar with its numbers.

    Args:
        label: what is running.
        done: what is done of it.
        total: the whole.
        note: text after the bar.
    """
    return (
        f'<div>{escape(label)} <progress value="{done}" max="{total}"></progress>'
        f" {done}/{total} {escape(note)}</div>"
    )
