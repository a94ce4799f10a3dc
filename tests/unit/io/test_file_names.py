"""File names from any text."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedclade.io.file_names import safe_file_name

NAMES = ["", ".", "..", "../x", "/", "/etc/passwd", "a/b", "a\\b", "x" * 5000, "Süd", "\0", "a b"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_is_a_path(name: str, tmp_path: Path) -> None:
    path = tmp_path / safe_file_name(name)
    path.write_text("here")
    assert path.resolve().parent == tmp_path.resolve()
    assert len(path.name) < 100
    assert path.name.isascii()


def test_plain_names_stay_and_others_stay_apart() -> None:
    assert safe_file_name("node-0_A") == "node-0_A"
    names = [*NAMES, "a_b", "__x", "_"]
    assert len({safe_file_name(name) for name in names}) == len(names)
