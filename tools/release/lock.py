"""Write locked.txt and locked-dev.txt: the packages that `make` installs in addition to torch, each
at one version and with the SHA-256 of all its files.

    make lock                      after a change of pyproject.toml or of torch: keeps versions
    make lock ARGS=--upgrade       newest versions (or any other option of `uv pip compile`)

locked.txt is what README's commands need (fedclade with Flower and tables, and what builds it);
locked-dev.txt is what tests, checks and the site need in addition. Both come from one resolution
for all systems and Python versions, and no package is in both.

torch is not locked: the right build depends on the machine (CPU or CUDA), and each build has its
own hash. Packages that only a CUDA build needs are left out too, because they have gigabytes. All
other packages that torch needs are locked.
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
        (match[1], match[0])
        for match in re.finditer(r"^([a-z0-9-]+)==(?:.*\\\n)*.*\n", text, re.MULTILINE)
    ]


def split(everything: str, first: set[str]) -> tuple[str, str]:
    """The lines of the packages that are in `first`, and of all others, without those that
    come with torch.
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
        # uv keeps the versions that its output file has.
        everything.write_text(
            "".join(file.read_text().replace("-r locked.txt\n", "") for file in (FIRST, MORE))
        )
        _compile(
            wanted, "--extra", "dev", "--generate-hashes", "--output-file", everything, *options
        )
        first = _compile(
            wanted, "--extra", "flower", "--extra", "tables", "--constraints", everything
        )
        locked, more = split(everything.read_text(), {name for name, _ in packages(first)})
    FIRST.write_text(HEAD.format("What `make demo` installs in addition to torch.") + locked)
    MORE.write_text(
        HEAD.format("What tests, checks and the site need on top.") + "-r locked.txt\n" + more
    )


def _compile(wanted: Path, *options: str | Path) -> str:
    # No header and no index: they have addresses that are valid on one machine only.
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
        sys.exit(done.returncode)  # uv has printed the reason
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
