"""Measured results as compact JSON: one row of numbers per line, so that files stay short and a
diff shows which rows changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedclade.io.atomic import write_text

_WIDTH = 100


def dumps(content: Mapping[str, Any]) -> str:
    """`content` as JSON, in which each key of the top level starts a line.

    Below the top level, a list or object is divided over several lines only if it is longer than a
    line and all its values are lists or objects: records are one line each.
    """
    return _format(json.loads(json.dumps(content)), depth=0) + "\n"


def write_results(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of results; its folder is created if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, dumps(content))


def read_results(path: Path) -> dict[str, Any]:
    """The content of a file of results."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def _format(value: Any, depth: int) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if not _is_divided(value, text, depth):
        return text
    values = list(value.values()) if isinstance(value, dict) else value
    keys = (
        [f"{json.dumps(key, ensure_ascii=False)}: " for key in value]
        if isinstance(value, dict)
        else [""] * len(value)
    )
    indent = " " * (depth + 1)
    lines = [
        f"{indent}{key}{_format(entry, depth + 1)}" for key, entry in zip(keys, values, strict=True)
    ]
    return f"{text[0]}\n" + ",\n".join(lines) + f"\n{' ' * depth}{text[-1]}"


def _is_divided(value: Any, text: str, depth: int) -> bool:
    if not isinstance(value, dict | list) or not value:
        return False
    if depth == 0:
        return True
    values = value.values() if isinstance(value, dict) else value
    return len(text) > _WIDTH and all(isinstance(entry, dict | list) for entry in values)
