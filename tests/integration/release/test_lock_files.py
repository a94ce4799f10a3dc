"""What `make` installs: every package except torch has one version and hashes in locked.txt or
locked-dev.txt, and pip checks them.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = runpy.run_path(str(ROOT / "tools" / "release" / "lock.py"))


def locked(file: str) -> dict[str, Requirement]:
    return {
        name: Requirement(lines.partition("\\")[0])
        for name, lines in LOCK["packages"]((ROOT / file).read_text())
    }


def required(*extras: str) -> list[Requirement]:
    """The requirements of pyproject.toml with these extras, and with the extras that they need."""
    table, requirements = PROJECT["project"], []
    for requirement in map(
        Requirement,
        sum((table["optional-dependencies"][extra] for extra in extras), table["dependencies"]),
    ):
        nested = required(*requirement.extras) if requirement.name == "fedclade" else [requirement]
        requirements += nested
    return requirements


@pytest.mark.parametrize("file", ["locked.txt", "locked-dev.txt"])
def test_every_line_is_a_version_or_a_hash(file: str) -> None:
    text = (ROOT / file).read_text()
    rest = text
    for name, lines in LOCK["packages"](text):
        version, *hashes = lines.rstrip("\n").split(" \\\n")
        assert [
            (each.operator, "*" in each.version) for each in Requirement(version).specifier
        ] == [("==", False)], name
        assert hashes, name
        assert all(re.fullmatch("    --hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
        rest = rest.replace(lines, "")
    # So no line can have an address, an index, or a package without hashes.
    assert [line for line in rest.splitlines() if not line.startswith("# ")] == (
        ["-r locked.txt"] if file == "locked-dev.txt" else []
    )
    assert "://" not in text


def test_each_package_has_one_version_in_one_of_the_files() -> None:
    names = [
        name
        for file in ("locked.txt", "locked-dev.txt")
        for name, _ in LOCK["packages"]((ROOT / file).read_text())
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("extra", "files"), [("flower", ["locked.txt"]), ("dev", ["locked.txt", "locked-dev.txt"])]
)
def test_the_requirements_of_pyproject_are_locked(extra: str, files: list[str]) -> None:
    versions = {name: pin for file in files for name, pin in locked(file).items()}
    for requirement in [*required(extra), *map(Requirement, PROJECT["build-system"]["requires"])]:
        if requirement.name != "torch":
            (pin,) = versions[canonicalize_name(requirement.name)].specifier
            assert requirement.specifier.contains(pin.version), requirement


def test_all_dependencies_of_torch_except_cuda_libraries_have_hashes() -> None:
    names = locked("locked.txt").keys()
    for requirement in map(Requirement, requires("torch") or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            assert name in names or LOCK["COMES_WITH_TORCH"].fullmatch(name), name


def test_make_installs_only_locked_packages_torch_and_fedclade() -> None:
    lines = [
        line
        for line in (ROOT / "Makefile").read_text().splitlines()
        if "$(INSTALL)" in line or "pip install" in line
    ]
    assert [
        line.partition("$(INSTALL) ")[2] for line in lines if not line.startswith("INSTALL := ")
    ] == [
        "--only-binary :all: --require-hashes --no-deps -r locked.txt",
        "--only-binary :all: torch==$(TORCH)",
        "--no-deps --no-build-isolation -e .",
        "--only-binary :all: --require-hashes --no-deps -r locked-dev.txt",
    ]


def test_packages_are_split_by_name_without_torch() -> None:
    def lines(name: str, *digits: str) -> str:
        return f"{name} \\\n" + " \\\n".join(f"    --hash=sha256:{each}" for each in digits) + "\n"

    a, more = lines("a==1", "11", "12"), lines("torchy==1", "4")
    old, new = lines("b-c==2 ; python_version < '3.12'", "2"), lines("b-c==3", "3")
    cuda = lines("nvidia-nccl==1", "5", "6") + lines("torch==2", "7") + lines("triton==3", "8")
    split: Any = LOCK["split"]
    assert split(a + old + new + cuda + more, {"b-c", "torch"}) == (old + new, a + more)
