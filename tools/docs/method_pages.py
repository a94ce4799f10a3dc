"""The parts of docs/methods/ that come from the code: parameters, defaults, what leaves a client.

python tools/docs/method_pages.py [--check]

A page has `<!-- parameters: NAME … -->` before a table of parameters, and `<!-- leaves: NAME … -->`
before what leaves a client; each ends at `<!-- end -->`. Names and defaults of parameters come from
the code. The script keeps the last column of the table, which has their descriptions. It fails if a
parameter has no row or a row has no parameter.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from fedclade.methods import METHODS
from fedclade.methods.base import GROUPS, NEEDS, Method, hyperparameters

PAGES = Path(__file__).resolve().parents[2] / "docs" / "methods"
BLOCK = re.compile(r"(<!-- (parameters|leaves): ([a-z_ ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CELLS = re.compile(r"(?<!\\)\|")
NONE = (
    "The method has no parameters. `[local]` and `[run]` of [the experiment](../experiments.md)"
    " apply.\n"
)


def parameters(kinds: list[type[Method]], block: str) -> str:
    known = {field.name: field for kind in kinds for field in fields(kind)}
    settable = {field.name for kind in kinds for field in hyperparameters(kind)}
    if not settable:
        return NONE
    rows, documented = [], set()
    for line in block.splitlines()[2:]:
        first, default, meaning = (cell.strip() for cell in CELLS.split(line)[1:-1])
        names = re.findall(r"`([a-z_0-9]+)`", first)
        if not names or not set(names) <= known.keys():
            raise SystemExit(
                f"{', '.join(kind.name for kind in kinds)}: {first} is not a parameter"
            )
        if set(names) <= settable:
            default = ", ".join(_defaults(kinds, name) for name in names)
        documented |= set(names)
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {default} | {meaning} |\n")
    if missing := sorted(settable - documented):
        raise SystemExit(f"{kinds[0].name}: the page does not describe {', '.join(missing)}")
    return "| parameter | default | |\n| --- | --- | --- |\n" + "".join(rows)


def _defaults(kinds: list[type[Method]], name: str) -> str:
    defaults = {
        kind.name: _default(field)
        for kind in kinds
        for field in hyperparameters(kind)
        if field.name == name
    }
    if len(set(defaults.values())) == 1 and len(defaults) == len(kinds):
        return next(iter(defaults.values()))
    return ", ".join(f"{value} ({kind})" for kind, value in defaults.items())


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "required"
    return "none" if field.default is None else f"`{field.default!r}`".replace("'", '"')


def leaves(kinds: list[type[Method]]) -> str:
    return "".join(
        f"{textwrap.fill(line, 140, subsequent_indent='  ', break_on_hyphens=False)}\n"
        for kind in kinds
        for line in _leaves(kind, len(kinds) > 1)
    )


def _leaves(kind: type[Method], named: bool) -> list[str]:
    prefix = f"`{kind.name}`: " if named else ""
    first, rest = kind.client_disclosure[0], kind.client_disclosure[1:]
    disclosure = (first if named else first.upper()) + rest
    cost = (
        f"{kind.upload_cost} up, {kind.download_cost}"
        f" down{f'; {kind.extra_traffic}' if kind.extra_traffic else ''}".replace("*", "·")
    )
    return [
        (f"- {prefix}{disclosure}."),
        (
            f"- The server needs {NEEDS[kind.server_visibility]}. Groups: the method"
            f" {GROUPS[kind.groups]}."
        ),
        f"- Bytes of a client in a round: {cost} ([W, K, G](README.md)).",
    ]


def page(text: str) -> str:
    def filled(block: re.Match[str]) -> str:
        kinds = [METHODS[name] for name in block[3].split()]
        content = parameters(kinds, block[4].strip()) if block[2] == "parameters" else leaves(kinds)
        return f"{block[1]}\n{content}\n{block[5]}"

    return BLOCK.sub(filled, text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="Change nothing; fail if a page is out of date."
    )
    check = parser.parse_args().check
    for file in sorted(PAGES.glob("*.md")):
        text = page(file.read_text())
        if check and text != file.read_text():
            raise SystemExit(f"{file} is out of date: python tools/docs/method_pages.py")
        if not check:
            file.write_text(text)


if __name__ == "__main__":
    main()
