"""What the pages have in fenced blocks: commands, and files that a reader is told to write."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^( *)```([a-z]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
PROGRAMS = (
    "fedclade",
    "python",
    "pip",
    "make",
    "source",
    "flwr",
    "ray",
    "mkdocs",
    "jupyter",
    "tensorboard",
    "git",
    "cd",
    "export",
)
NAMED = re.compile(r"# ([\w./-]+\.(?:py|toml))\b.*")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, where its first line is a comment that says
        so.
        """
        first = NAMED.fullmatch(self.text.split("\n", 1)[0])
        return first[1] if first and self.language in ("python", "toml") else None

    @property
    def commands(self) -> list[str]:
        """Each command as it is typed, without the comment after it; lines that are output or
        drawings are none.
        """
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            shlex.join(words) for line in lines if (words := _words(line)) and words[0] in PROGRAMS
        ]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # a quotation mark alone: text, not a command
        return []


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            found[2],
            re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE),
            text[: found.start()].count("\n") + 1,
        )
        for found in FENCE.finditer(text)
    ]
