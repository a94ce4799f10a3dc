"""Execute the notebooks and save them with their outputs.

    python tools/docs/notebooks.py [FILE …]           default: every file of notebooks/
    python tools/docs/notebooks.py --check [FILE …]   compare the saved outputs; change no file

Each notebook runs in its own kernel and in an empty folder. Saved files contain no times of
execution, no versions and no terminal codes, so that they change only if the notebook or its
results do. A notebook whose data set is not on this machine is left out.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient

from fedclade.data.datasets import is_available

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {"writers": "mnist", "roles": "shakespeare"}  # data sets that do not come with fedclade
MAX_BYTES = 300_000
TIMEOUT = 900  # seconds for one cell, also on a busy machine
TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")
DECIMAL = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
SECONDS = re.compile(r"\s+\d+\.\d+$")
# Models agree to the byte on one machine only; on another machine rounding may change a few
# predictions. Whole numbers (groups, counts, bytes) must be equal.
TOLERANCE = {"rel_tol": 0.05, "abs_tol": 0.02}


def execute(file: Path) -> Any:
    """Return the notebook in `file` with the outputs of a new execution."""
    book = nbformat.read(file, as_version=4)
    metadata = dict(book.metadata)
    programs = Path(sys.executable).parent  # `fedclade` in a cell is the one of this environment
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "IPYTHONDIR": folder,
            "COLUMNS": "120",
        }
        with patch.dict(os.environ, environment):
            os.environ.pop("MPLBACKEND", None)  # figures become images of the notebook
            NotebookClient(
                book,
                timeout=TIMEOUT,
                kernel_name="python3",
                record_timing=False,
                coalesce_streams=True,
                resources={"metadata": {"path": folder}},
            ).execute()
    book.metadata = metadata  # the kernel adds the version of Python
    for output in outputs(book):
        if output.output_type == "stream":
            plain = TERMINAL_CODE.sub("", output.text)
            output.text = "\n".join(line.rstrip() for line in plain.splitlines()) + "\n"
    return book


def normalize(text: str) -> str:
    """Return the text without what differs between two executions: the column of seconds of a
    table, temporary folders, memory addresses, and spaces between columns.
    """
    lines, in_table = [], False
    for line in map(str.rstrip, text.splitlines()):
        if line.lstrip().startswith("method "):
            in_table = line.endswith((" s", " seconds"))
        lines.append(SECONDS.sub("", line) if in_table else line)
    text = "\n".join(" ".join(line.split()) for line in lines)
    text = re.sub(r"─+", "─", text).replace(tempfile.gettempdir(), "/tmp")
    text = re.sub(r"/tmp/[\w.-]+", "FOLDER", text)
    return re.sub(r"\b0x[0-9a-f]+", "ADDRESS", text).strip()


def same_text(saved: str, new: str) -> bool:
    """Whether two outputs are equal after `normalize`, decimals within `TOLERANCE`."""
    saved, new = normalize(saved), normalize(new)
    return DECIMAL.sub("#", saved) == DECIMAL.sub("#", new) and all(
        math.isclose(float(a), float(b), **TOLERANCE)
        for a, b in zip(DECIMAL.findall(saved), DECIMAL.findall(new), strict=True)
    )


def stale_cells(saved: Any, new: Any) -> list[str]:
    """Return the ids of the cells whose saved outputs differ from the new ones."""
    return [
        old_cell.id
        for old_cell, new_cell in zip(saved.cells, new.cells, strict=True)
        if not _same_outputs(old_cell.get("outputs", []), new_cell.get("outputs", []))
    ]


def _same_outputs(saved: list[Any], new: list[Any]) -> bool:
    return len(saved) == len(new) and all(
        a.output_type == b.output_type
        and sorted(a.get("data", {})) == sorted(b.get("data", {}))
        and same_text(output_text(a), output_text(b))
        for a, b in zip(saved, new, strict=True)
    )


def output_text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


def outputs(book: Any) -> Iterator[Any]:
    for cell in book.cells:
        yield from cell.get("outputs", [])


def main(*arguments: str) -> None:
    check = "--check" in arguments
    files = [Path(name) for name in arguments if name != "--check"] or NOTEBOOKS
    for file in files:
        if (name := NEEDS.get(file.stem)) is not None and not is_available(name):
            print(f"{file.name}: left out: no data set '{name}' here; its first lines say where")
            continue
        book = execute(file)
        if check:
            if stale := stale_cells(nbformat.read(file, as_version=4), book):
                sys.exit(f"{file}: outputs of {', '.join(stale)} are stale. Run `make notebooks`.")
            print(f"{file.name}: outputs are up to date", flush=True)
        else:
            nbformat.write(book, file)
            print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB", flush=True)
            if file.stat().st_size > MAX_BYTES:
                sys.exit(f"{file}: larger than {MAX_BYTES / 1000:.0f} kB. Draw smaller figures.")


if __name__ == "__main__":
    main(*sys.argv[1:])
