"""The fenced blocks of the pages: commands, and files that a reader writes."""

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
        """The file name in the comment of the first line, if the block is a file."""
        first = NAMED.fullmatch(self.text.split("\n", 1)[0])
        return first[1] if first and self.language in ("python", "toml") else None

    @property
    def commands(self) -> list[str]:
        """The commands of the block without comments. Lines of output are not commands."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        return [
            shlex.join(words) for line in lines if (words := _words(line)) and words[0] in PROGRAMS
        ]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:  # a single quotation mark: text, not a command
        return []


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            fence[2],
            re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE),
            text[: fence.start()].count("\n") + 1,
        )
        for fence in FENCE.finditer(text)
    ]
