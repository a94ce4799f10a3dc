"""The workflow, the pre-commit hooks and the citation agree with the Makefile and the package."""

from __future__ import annotations

import os
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedclade

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'fedclade[docs]'")

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
PROBLEMS: Any = runpy.run_path(str(ROOT / "tools" / "release" / "commit_subject.py"))["problems"]


def read(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text())


def make(target: str) -> set[str]:
    """The commands of a target, with the Makefile's variables replaced by their values."""
    variables = dict(re.findall(r"^(\w+) :=? *(.*)$", MAKEFILE, re.MULTILINE))
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    commands = set()
    for line in recipe[1].splitlines():
        command = line.strip().removeprefix("@")
        while "$(" in command:
            command = re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], command)
        commands.add(command)
    return commands


def test_the_workflow_checks_out_and_calls_ci_run() -> None:
    workflow = read(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert actions[0].startswith("actions/checkout@")
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert job["timeout-minutes"] <= 120


def test_the_workflow_uses_the_oldest_python_that_the_package_allows() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    versions = [step["with"].get("python-version") for step in job["steps"] if "with" in step]
    assert PROJECT["requires-python"].removeprefix(">=") in versions


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    hooks = repository["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)
    lint = [hook for hook in hooks if "commit-msg" not in hook.get("stages", [])]
    assert all(hook["pass_filenames"] is False for hook in lint)
    assert {hook["entry"] for hook in lint} == make("lint")


def test_only_make_test_all_measures_coverage() -> None:
    (command,) = make("test-all")
    assert "--cov=fedclade" in command.split()
    others = make("test") | make("test-docs")
    assert not any("--cov" in other for other in others)


def test_pre_commit_checks_the_subject_of_a_commit() -> None:
    config = read(".pre-commit-config.yaml")
    assert "commit-msg" in config["default_install_hook_types"]
    (hook,) = [hook for hook in config["repos"][0]["hooks"] if hook.get("stages") == ["commit-msg"]]
    program, script = hook["entry"].split()
    assert program == ".venv/bin/python"
    assert (ROOT / script).is_file()


@pytest.mark.parametrize(
    "subject",
    [
        "Add pytest-cov",
        "Process late clients",
        "Bring back the table",
        "Seed the sampler",
        "Focus the help text",
        "Merge branch 'main'",
        "Describe " + "a" * 63,
    ],
)
def test_a_subject_is_accepted(subject: str) -> None:
    assert PROBLEMS(subject) == []


@pytest.mark.parametrize(
    ("subject", "part"),
    [
        ("Describe " + "a" * 64, "73"),
        ("Added a test", "'Added'"),
        ("Adding a test", "'Adding'"),
        ("Adds a test", "'Adds'"),
        ("The tests run", "'The'"),
        ("add a test", "'add'"),
        ("CUDA: capture graphs", "'CUDA:'"),
        ("Add a test.", "period"),
        ("", "''"),
    ],
)
def test_a_subject_is_rejected(subject: str, part: str) -> None:
    (reason,) = PROBLEMS(subject)
    assert part in reason


def test_the_version_is_the_same_everywhere() -> None:
    assert read("CITATION.cff")["version"] == fedclade.__version__ == PROJECT["version"]


def test_the_citation_has_what_cff_requires() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["keywords"] == PROJECT["keywords"]
