"""Federations with real processes, which are always stopped after the tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest


class Start(Protocol):
    def __call__(self, nodes: int, secure: bool, **more: Any) -> Any: ...


@pytest.fixture(scope="module")
def start_federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`Federation.up` in a new folder; stops every federation after the tests of the module."""
    from fedclade.integrations.flower.local_deployment.deployment import Federation
    from fedclade.integrations.flower.local_deployment.supervisor import processes

    folders: list[Path] = []

    def start(nodes: int, secure: bool, **more: Any) -> Federation:
        folders.append(tmp_path_factory.mktemp("federation") / "fed")
        return Federation.up(folders[-1], nodes, secure, **more)

    yield start
    for folder in folders:
        if (folder / "plan.json").exists():
            Federation.open(folder).down()
        assert processes(folder) == {}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new app, from the template."""
    from fedclade.integrations.flower.app_template import new_app

    folder = tmp_path_factory.mktemp("apps") / "clinics"
    new_app(folder)
    return folder
