"""Results are written one row per line and read back exactly."""

from __future__ import annotations

import json
from pathlib import Path

from fedclade.io.compact_json import dumps, read_results, write_results

CONTENT = {
    "machine": "AMD EPYC",
    "seconds": 0.1 + 0.2,
    "names": ["β", "γ"] * 20,
    "none": {},
    "rows": [{"method": "clade", "seed": seed, "values": [1e-300, 2.5] * 5} for seed in range(3)],
    "groups": {"a": [{"x": 1.0, "y": [1, 2]}] * 4, "b": [{"x": None, "y": []}] * 4},
}


def test_values_are_read_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_results(path, CONTENT)
    assert read_results(path) == CONTENT
    assert path.read_text("utf-8") == dumps(CONTENT)


def test_each_record_is_one_line() -> None:
    lines = [line.strip().rstrip(",") for line in dumps(CONTENT).splitlines()]
    assert '"machine": "AMD EPYC"' in lines
    assert '"names": ' + json.dumps(CONTENT["names"], ensure_ascii=False) in lines
    for row in CONTENT["rows"]:
        assert json.dumps(row) in lines
    assert lines[lines.index('"groups": {') + 1] == '"a": ' + json.dumps(CONTENT["groups"]["a"])


def test_keys_that_are_numbers_become_text() -> None:
    assert json.loads(dumps({"rounds": {1: (2, 3)}})) == {"rounds": {"1": [2, 3]}}
