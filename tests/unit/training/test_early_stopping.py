"""Validation data in a run: early stopping, the choice of the best round, and a run that the
user's function stops.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.conformance.in_process_federation import COMPATIBILITY_INFO, InProcessTransport
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import as_inputs
from fedclade.core.program_serialization import NodeContext
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.node import InMemoryStateStore, Node
from fedclade.errors import DifferentExperimentError, InvalidInputError
from fedclade.io.run_dir import StoredModels
from fedclade.io.schemas import RoundRecord
from fedclade.training import loop
from fedclade.training.config import EngineConfig
from fedclade.training.early_stopping import is_exhausted
from fedclade.training.evaluation import Evaluation
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import measured, module_for

Losses = Callable[[list[float]], None]
MODEL = fc.models.MLP(8)


@pytest.fixture(scope="module")
def clients() -> Clients:
    scheme = fc.data.LabelClusters(clusters=5, classes=2, samples=20)
    return fc.data.partition(fc.data.load("digits"), scheme, 10, seed=0).with_validation(0.2)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    """Sets the loss on validation data of each round: every client has this loss."""

    def set_losses(values: list[float]) -> None:
        evaluate = loop.evaluate

        def with_losses(
            setup: Any, clients: Any, state: Any, number: int, *rest: Any, **last: Any
        ) -> Evaluation:
            evaluation = evaluate(setup, clients, state, number, *rest, **last)
            known = evaluation.values["validation_loss"]
            fake = torch.full_like(known, values[number - 1])
            return evaluation._replace(values=evaluation.values | {"validation_loss": fake})

        monkeypatch.setattr(loop, "evaluate", with_losses)

    return set_losses


def do(clients: Clients, method: fc.Method | None = None, **changed: Any) -> fc.Result:
    settings: dict[str, Any] = {
        "model": MODEL,
        "rounds": 6,
        "eval_every": 1,
        "clients_per_round": 0.5,
    }
    return fc.run(method or fc.FedAvg(), clients, **settings | changed)


def history(losses: list[float | None]) -> list[RoundRecord]:
    rows: list[Any] = [
        {"round": number, "validation_loss": loss} for number, loss in enumerate(losses, 1)
    ]
    # Rounds without an evaluation count for nothing.
    return [row for each in rows for row in (each, {"round": each["round"]})]


@pytest.mark.parametrize(
    ("values", "patience", "exhausted"),
    [
        ([], 1, False),
        ([3.0, 2.0], 1, False),
        ([3.0, 2.0, 2.5], 1, True),
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.5, 2.1], 2, True),
        ([3.0, 2.0, 2.5, 1.9], 1, False),
        ([3.0, 2.0, 2.0], 1, True),  # an equal loss is not lower
        ([3.0, 2.0, None], 1, True),  # nor is one that is not finite
        ([None, 3.0], 1, False),
        ([3.0, 4.0, 5.0], 0, False),
    ],
)
def test_patience_counts_evaluations_without_a_lower_loss(
    values: list[float | None], patience: int, exhausted: bool
) -> None:
    assert is_exhausted(history(values), patience) == exhausted


def test_a_run_stops_when_the_loss_on_validation_data_no_longer_falls(
    clients: Clients, losses: Losses
) -> None:
    # The lowest loss is that of round 2; rounds 3 and 4 exhaust a patience of 2.
    losses([1.0, 0.7, 0.9, 0.8, 0.1, 0.0])
    last, best = (do(clients, patience=2, select=select) for select in ("last", "best"))
    for result, selected in ((last, 4), (best, 2)):
        assert [row["round"] for row in result.history] == [1, 2, 3, 4]
        assert (result.summary["rounds"], result.summary["stopped"]) == (4, "patience")
        assert result.summary["selected_round"] == selected
        row = result.history[selected - 1]
        for name in ("accuracy", "loss", "validation_loss", "validation_accuracy"):
            assert result.summary[name] == row[name]  # type: ignore[literal-required]
    assert best.summary["validation_loss"] == pytest.approx(0.7)
    expected = do(clients, rounds=2)
    for got, wanted in zip(
        best.model_of(3).parameters(), expected.model_of(3).parameters(), strict=True
    ):
        assert torch.equal(got, wanted)


def test_only_evaluated_rounds_count(clients: Clients, losses: Losses) -> None:
    losses([9.0, 1.0, 0.0, 2.0, 0.0, 3.0])
    result = do(clients, eval_every=2, patience=2)
    assert result.summary["rounds"] == 6
    losses([9.0, 1.0, 0.0, 2.0, 0.0, 3.0])
    assert do(clients, eval_every=2, patience=1).summary["rounds"] == 4


def test_validation_numbers_are_those_of_the_models(clients: Clients) -> None:
    result = do(clients, fc.Local(), rounds=2)
    assert clients.validation is not None
    for client in range(len(clients)):
        own = clients.validation[client]
        outputs = result.model_of(client)(as_inputs(clients.x[own])).detach()
        loss = torch.nn.functional.cross_entropy(outputs, clients.y[own])
        assert result.clients["validation_loss"][client] == pytest.approx(float(loss), abs=1e-5)
        right = 100 * float((outputs.argmax(1) == clients.y[own]).double().mean())
        assert result.clients["validation_accuracy"][client] == pytest.approx(right)
    assert result.clients["validation_examples"] == clients.validation.sizes.tolist()
    values = result.clients["validation_loss"]
    assert result.summary["validation_loss"] == pytest.approx(sum(values) / len(values))
    assert result.summary["clients_without_validation"] == 0


def test_validation_data_are_not_trained_on(clients: Clients) -> None:
    assert clients.validation is not None
    y = clients.y.clone()
    y[clients.validation.index] = 0  # other labels change no model
    from dataclasses import replace

    changed = do(replace(clients, y=y), rounds=2)
    plain = do(clients, rounds=2)
    assert changed.summary["validation_loss"] != plain.summary["validation_loss"]
    assert changed.summary["loss"] == plain.summary["loss"]


def test_clients_without_validation_data_are_counted(ragged: Clients) -> None:
    parted = ragged.with_validation(0.25)
    result = do(parted, model=fc.models.MLP(4), rounds=1)
    without = int((ragged.sizes < 4).sum())
    assert result.summary["clients_without_validation"] == without
    assert [value is None for value in result.clients["validation_loss"]].count(True) == without
    assert "clients_without_validation" not in do(ragged, rounds=1).summary


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"patience": 1}, "run.patience"), ({"select": "best"}, "run.select")],
)
def test_without_validation_data_nothing_can_be_compared(
    settings: dict[str, Any], field: str, clients: Clients, ragged: Clients
) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        do(ragged, **settings)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        do(clients, eval_every=0, **settings)


def test_a_run_may_stop_itself(clients: Clients, tmp_path: Path) -> None:
    rows: list[int] = []

    def on_round(row: RoundRecord) -> bool:
        rows.append(row["round"])
        return row["round"] == 3

    settings: dict[str, Any] = {"eval_every": 0, "out": tmp_path / "run", "on_round": on_round}
    result = do(clients, **settings)
    assert rows == [1, 2, 3]
    assert (result.summary["rounds"], result.summary["stopped"]) == (3, "on_round")
    assert result.history[-1]["accuracy"] == result.summary["accuracy"]
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[-1]) == result.history[-1]
    shorter = do(clients, eval_every=0, rounds=3)
    assert shorter.summary["accuracy"] == result.summary["accuracy"]
    assert shorter.summary["stopped"] is None

    # It has ended, unless more rounds are wanted.
    again = do(clients, resume=True, **settings)
    assert again.already_finished
    longer = do(clients, resume=True, rounds=8, **settings)
    assert rows == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (longer.summary["rounds"], longer.summary["stopped"]) == (8, None)
    assert longer.summary["accuracy"] == do(clients, rounds=8).summary["accuracy"]


def test_nothing_stops_in_the_last_round(clients: Clients, losses: Losses) -> None:
    losses([1.0, 2.0, 0.0])
    result = do(clients, rounds=2, patience=1, on_round=lambda row: row["round"] == 2)
    assert (result.summary["rounds"], result.summary["stopped"]) == (2, None)


@pytest.mark.parametrize("answer", [None, False, 1, "stop"])
def test_only_true_stops_a_run(answer: Any, clients: Clients) -> None:
    result = do(clients, rounds=2, on_round=lambda row: answer)
    assert (result.summary["rounds"], result.summary["stopped"]) == (2, None)


METHODS = pytest.mark.parametrize(
    "method",
    [fc.FedAvg(), fc.Local(), fc.SCAFFOLD(), fc.LGFedAvg(), fc.Clade()],
    ids=lambda method: method.name,
)
LOSSES = [0.9, 0.5, 0.8, 0.7, 0.6, 0.8]


def files(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return {
        "models": (folder / "models" / "models.safetensors").read_bytes(),
        "clients": (folder / "clients.csv").read_text(),
        "numbers": [
            {name: value for name, value in row.items() if name != "seconds"}
            for row in (summary, *rows)
        ],
    }


@METHODS
@pytest.mark.parametrize(("last", "patience"), [(1, 3), (2, 3), (4, 3), (6, 4)])
def test_a_resumed_run_selects_the_same_round_and_bytes(
    method: fc.Method,
    last: int,
    patience: int,
    clients: Clients,
    losses: Losses,
    tmp_path: Path,
) -> None:
    losses(LOSSES)
    settings: dict[str, Any] = {"select": "best", "patience": patience, "checkpoint_every": 2}

    def interrupt(row: RoundRecord) -> None:
        if row["round"] == last:
            raise KeyboardInterrupt

    whole = do(clients, method, out=tmp_path / "whole", **settings)
    assert whole.summary["selected_round"] == 2
    assert whole.summary["stopped"] == ("patience" if patience == 3 else None)
    with pytest.raises(KeyboardInterrupt):
        do(clients, method, out=tmp_path / "parts", on_round=interrupt, **settings)
    do(clients, method, out=tmp_path / "parts", resume=True, **settings)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    expected = do(clients, method, rounds=2)
    for client in range(len(clients)):
        for got, wanted in zip(
            whole.model_of(client).parameters(),
            expected.model_of(client).parameters(),
            strict=True,
        ):
            assert torch.equal(got, wanted)


def test_the_best_round_has_the_state_of_the_server(
    clients: Clients, losses: Losses, tmp_path: Path
) -> None:
    losses(LOSSES)
    server: dict[str, Any] = {"server_optimizer": "fedadam", "serve": "mean"}

    def interrupt(row: RoundRecord) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        do(clients, select="best", out=tmp_path, on_round=interrupt, **server)
    result = do(clients, select="best", out=tmp_path, resume=True, **server)
    assert result.summary["selected_round"] == 2
    expected = do(clients, rounds=2, **server)
    for got, wanted in zip(
        result.model_of(0).parameters(), expected.model_of(0).parameters(), strict=True
    ):
        assert torch.equal(got, wanted)


def test_a_run_that_patience_stopped_does_not_continue(
    clients: Clients, losses: Losses, tmp_path: Path
) -> None:
    losses([0.5, 0.6, 0.7, 0.8, 0.9, 0.4])
    settings: dict[str, Any] = {"patience": 2, "out": tmp_path, "resume": True}
    rows: list[int] = []

    def on_round(row: RoundRecord) -> None:
        rows.append(row["round"])

    do(clients, on_round=on_round, **settings)
    assert rows == [1, 2, 3]
    assert do(clients, on_round=on_round, **settings).already_finished
    assert do(clients, on_round=on_round, rounds=9, **settings).already_finished
    (tmp_path / "summary.json").unlink()  # as if the run was killed before its end
    again = do(clients, on_round=on_round, **settings)
    assert (again.summary["rounds"], again.summary["stopped"]) == (3, "patience")
    assert rows == [1, 2, 3]
    # More patience is another end of the same run.
    longer = do(clients, on_round=on_round, **settings | {"patience": 4})
    assert rows == [1, 2, 3, 4, 5]
    assert longer.summary["stopped"] == "patience"


def test_a_run_with_another_split_is_another_experiment(clients: Clients, tmp_path: Path) -> None:
    def interrupt(row: RoundRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        do(clients, out=tmp_path, on_round=interrupt)
    from dataclasses import replace

    assert clients.validation is not None
    unused = replace(clients, validation=None, validation_origin={})
    with pytest.raises(DifferentExperimentError):
        do(unused, out=tmp_path, resume=True)


def remote(
    clients: Clients, method: fc.Method, settings: fc.TrainingConfig, out: Path
) -> tuple[fc.Result, dict[str, InMemoryStateStore]]:
    """The run of `do` with clients on three nodes, and what the nodes have stored."""
    objective = Objective(
        module_for(MODEL, clients.metadata, settings.seed), x=as_inputs(clients.metadata.x)
    )
    metrics = measured(objective, clients.metadata, None, torch.device("cpu"))
    stores: dict[str, InMemoryStateStore] = {}
    nodes = {}
    for number in range(3):
        store = stores[f"node-{number}"] = InMemoryStateStore()
        ids = list(range(number, len(clients), 3))
        nodes[f"node-{number}"] = Node(
            clients.only(ids),
            [f"{client:02d}" for client in ids],
            NodeContext(objective),
            metrics,
            COMPATIBILITY_INFO,
            lambda run, store=store: store,
        )
    run = TrainingRun(
        method,
        None,
        MODEL,
        fc.LocalConfig(),
        settings,
        EngineConfig(),
        federation=RemoteFederation(InProcessTransport(nodes), COMPATIBILITY_INFO),
    )
    return run.run(out), stores


@METHODS
def test_clients_on_other_machines_select_the_same_round(
    method: fc.Method, clients: Clients, losses: Losses, tmp_path: Path
) -> None:
    losses(LOSSES)
    settings: dict[str, Any] = {"select": "best"}
    expected = do(clients, method, out=tmp_path / "simulator", **settings)
    training = fc.TrainingConfig(rounds=6, eval_every=1, clients_per_round=0.5, **settings)
    result, stores = remote(clients, method, training, tmp_path / "remote")
    assert result.summary["selected_round"] == expected.summary["selected_round"] == 2
    for one, other in zip(result.history, expected.history, strict=True):
        for name in ("validation_accuracy", "accuracy", "loss"):
            got: Any = one
            wanted: Any = other
            assert math.isclose(got[name], wanted[name], abs_tol=1e-6), name
    for name in ("validation_loss", "accuracy", "validation_examples"):
        assert result.clients[name] == pytest.approx(expected.clients[name], abs=1e-6)
    # Every node has stored the models of the selected round.
    saved = {name: model for store in stores.values() for name, model in store.models.items()}
    models = StoredModels(tmp_path / "simulator")
    for client in range(len(clients)):
        weights = models.weights_of(client)
        assert weights is not None
        for name, value in saved[f"{client:02d}"].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)
