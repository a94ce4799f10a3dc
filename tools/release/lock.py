"""locked.txt and locked-dev.txt: what `make` installs beside torch, each package at one version
with the SHA-256 of all its files.

make lock                      after a change of pyproject.toml or of torch: versions stay where
they can make lock ARGS=--upgrade       the newest of all (or any other options of `uv pip compile`)

locked.txt is what `make demo` needs (fedclade with Flower, and what fedclade is built with);
locked-dev.txt is what tests, checks and the site need on top. One resolution, for all systems and
Pythons at once, makes both, and no package is in both.

torch is not in them: which build of it fits depends on the machine (CPU or CUDA), and each has
another hash. What only a CUDA build needs is left out too, as it would be gigabytes for nothing
elsewhere. All else that torch needs is locked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST, MORE = ROOT / "locked.txt", ROOT / "locked-dev.txt"
COMES_WITH_TORCH = re.compile(r"torch|triton|(nvidia|cuda)-.+")
HEAD = "# Made by `make lock`; do not edit. {}\n"


def packages(text: str) -> list[tuple[str, str]]:
    """The name and all lines of each package: a version, then its hashes on lines of their own."""
    return [
        (found[1], found[0])
        for found in re.finditer(r"^([a-z0-9-]+)==(?:.*\\\n)*.*\n", text, re.MULTILINE)
    ]


def split(everything: str, first: set[str]) -> tuple[str, str]:
    """The lines of the packages that are in `first`, and of all others, less what comes with
    torch.
    """
    kept = [
        (name, lines)
        for name, lines in packages(everything)
        if not COMES_WITH_TORCH.fullmatch(name)
    ]
    return "".join(lines for name, lines in kept if name in first), "".join(
        lines for name, lines in kept if name not in first
    )


def main(torch: str, *options: str) -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as folder:
        wanted, everything = Path(folder, "wanted.in"), Path(folder, "everything.txt")
        wanted.write_text(
            "\n".join([torch, *build, "editables"])
        )  # hatchling asks for editables when fedclade is installed with -e
        # uv keeps to the versions that it finds in the file that it writes.
        everything.write_text(
            "".join(file.read_text().replace("-r locked.txt\n", "") for file in (FIRST, MORE))
        )
        _compile(
            wanted, "--extra", "dev", "--generate-hashes", "--output-file", everything, *options
        )
        first = _compile(wanted, "--extra", "flower", "--constraints", everything)
        locked, more = split(everything.read_text(), {name for name, _ in packages(first)})
    FIRST.write_text(HEAD.format("What `make demo` installs beside torch.") + locked)
    MORE.write_text(
        HEAD.format("What tests, checks and the site need on top.") + "-r locked.txt\n" + more
    )


def _compile(wanted: Path, *options: str | Path) -> str:
    # No header, no index: an address that is good on one machine only has no place in these files.
    plain = ["--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
    everywhere = [
        "--universal",
        "--python-version",
        "3.11",
        "--fork-strategy",
        "fewest",
        "--only-binary",
        ":all:",
    ]
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        wanted,
        *plain,
        *everywhere,
        *options,
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # uv has said why
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
