"""Small runs for reports, and a browser that opens pages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.analysis import report
from fedclade.data import Clients


def planted(clients: int, seed: int = 0) -> Clients:
    """Clients in four groups with two classes each; samples are near the center of their class."""
    generator = torch.Generator().manual_seed(seed)
    corners = 3 * torch.randn(8, 6, generator=generator)
    arrays = []
    for client in range(clients):
        y = 2 * (client % 4) + torch.arange(12) % 2
        x = corners[y] + torch.randn(12, 6, generator=generator)
        arrays.append((x[:8], y[:8], x[8:], y[8:]))
    return fc.data.from_arrays(arrays)


def train(method: Any, clients: Clients, out: Path, rounds: int = 4, **options: Any) -> Path:
    fc.run(
        method,
        clients,
        fc.models.Logistic(),
        rounds=rounds,
        clients_per_round=0.5,
        lr=0.1,
        eval_every=2,
        out=out,
        threads=1,
        **options,
        report=False,
    )
    return out


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Clade with 24 clients in four groups."""
    return train(fc.CladeGroups(), planted(24), tmp_path_factory.mktemp("one") / "clade")


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `compare` writes it: FedAvg and Clade, two seeds."""
    folder = tmp_path_factory.mktemp("several")
    for seed in (0, 1):
        for method in (fc.FedAvg(), fc.CladeGroups()):
            train(method, planted(24), folder / f"{method.name}-seed{seed}", seed=seed)
    return folder


@pytest.fixture
def copied(one: Path, tmp_path: Path) -> Path:
    """A copy of the run of Clade that a test may damage."""
    return Path(shutil.copytree(one, tmp_path / "copied"))


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """`opened(url, width, scheme)` is a tab with that page. After the test, the console must have
    no errors, and the page must have made no other request.
    """
    contexts: list[Any] = []
    errors: list[str] = []
    requests: list[str] = []

    def look(url: str, width: int = 1280, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on(
            "console",
            lambda message: (
                errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(url)
        return tab

    yield look
    for context in contexts:
        context.close()
    assert errors == []
    assert [
        url for url in requests if not url.startswith(("file:", "data:", "http://127.0.0.1:"))
    ] == []


@pytest.fixture(scope="session")
def pages(
    browser: Any, one: Path, several: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The address of each page on disk. The fixture needs the browser first: without one, no page
    is written.
    """
    folder = tmp_path_factory.mktemp("pages")
    diagnosis = folder / "diagnosed"
    diagnosis.mkdir()
    nothing = {"share": 0.0, "times_chance": 1.0, "p": 0.5}
    content = {
        "sentences": ["Label skew: very sure.", "Use Clade."],
        "kind": "label skew",
        "experiment": "my federation.toml",
        "evidence": {
            "labels": {"share": 0.4, "times_chance": 12.5, "p": 0.0},
            "inputs": nothing,
            "given_labels": nothing,
        },
        "probes": [
            {"method": "fedavg", "score": 60.0, "gain": 0.0, "gain_stderr": 0.0},
            {"method": "clade", "score": 80.5, "gain": 20.5, "gain_stderr": 1.5},
        ],
        "advice": {"method": "clade", "layer": None, "settings": {"recluster_every": 5}},
        "group": [0, 1, 0, 0],
        "members": [{"group": 0, "clients": 3, "names": "Aalen, Celle, Emden"}],
        "map": [
            {"client": at, "x": x, "y": 0.0, "name": name}
            for at, (x, name) in enumerate(
                [(0.0, "Aalen"), (5.0, "Bonn"), (0.1, "Celle"), (0.2, "Emden")]
            )
        ],
        "about": {"dataset": "/data/stay.csv", "clients": 4, "score": "accuracy"},
    }
    (diagnosis / "diagnosis.json").write_text(json.dumps(content))
    sources = {
        "one": [one],
        "several": [several],
        "diagnosis": [diagnosis],
        "all": [several, diagnosis],
    }
    return {
        name: report.write_report(folders, folder / f"{name}.html").as_uri()
        for name, folders in sources.items()
    }


def cells(tab: Any, table: str, column: int) -> list[str]:
    """The texts in a column of a table."""
    return [
        text.strip()
        for text in tab.locator(f"#{table} tbody tr > :nth-child({column})").all_inner_texts()
    ]
