"""On nodes, the evaluation after a round travels with the training of the next one. That changes
the number of messages, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.conformance.in_process_federation import COMPATIBILITY_INFO, InProcessTransport
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import as_inputs
from fedclade.core.program_serialization import NodeContext, factories_of
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.messages import Message, NodeError
from fedclade.engines.remote.node import InMemoryStateStore, Node
from fedclade.errors import FedcladeError
from fedclade.io import checkpoint
from fedclade.io.schemas import RoundRecord
from fedclade.training import loop
from fedclade.training.config import EngineConfig
from fedclade.training.evaluation import Evaluation
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import measured, module_for

MODEL, ROUNDS = fc.models.MLP(8), 4
METHODS = pytest.mark.parametrize(
    "method",
    [
        fc.FedAvg(),
        fc.SCAFFOLD(),
        fc.Local(),
        fc.LGFedAvg(),
        fc.CladeGroups(),
        fc.IFCA(2),
    ],
    ids=lambda method: method.name,
)
OnRound = Callable[[RoundRecord], bool | None]


@pytest.fixture(scope="module")
def clients() -> Clients:
    scheme = fc.data.LabelClusters(clusters=2, classes=5, samples=20)
    return fc.data.partition(fc.data.load("digits"), scheme, 9, seed=0)


class Crash(BaseException):
    """The end of the server's process."""


class CountingTransport(InProcessTransport):
    """A transport that crashes with a message of its choice."""

    crash_at = 0  # with the first answer to the n-th call; 0: never

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        answers = super().send_and_receive(messages)
        if self.crash_at and len(self.sent) == self.crash_at:
            raise Crash
        return answers


@dataclass
class Nodes:
    """Three nodes that outlive the server."""

    clients: Clients
    method: fc.Method

    def __post_init__(self) -> None:
        metadata = self.clients.metadata
        objective = Objective(module_for(MODEL, metadata, 0), x=as_inputs(metadata.x))
        metrics = measured(objective, metadata, None, torch.device("cpu"))
        context = NodeContext(objective, factories=factories_of(type(self.method)))
        self.stores = [InMemoryStateStore() for _ in range(3)]
        self.transport = CountingTransport({})
        for number, store in enumerate(self.stores):
            ids = list(range(number, len(self.clients), 3))
            self.transport.connected[f"node-{number}"] = Node(
                self.clients.only(ids),
                [str(client) for client in ids],
                context,
                metrics,
                COMPATIBILITY_INFO,
                lambda run, store=store: store,
            )

    def run(
        self,
        out: Path,
        resume: bool = False,
        on_round: OnRound | None = None,
        crash_at: int = 0,
        **settings: Any,
    ) -> fc.Result:
        self.transport.sent.clear()
        self.transport.crash_at = crash_at
        training = {
            "rounds": ROUNDS,
            "eval_every": 1,
            "clients_per_round": 0.5,
            "checkpoint_every": 1,
            **settings,
        }
        fed = RemoteFederation(self.transport, COMPATIBILITY_INFO)
        run = TrainingRun(
            self.method,
            None,
            MODEL,
            fc.LocalConfig(),
            fc.TrainingConfig(**training),
            EngineConfig(),
            federation=fed,
        )
        return run.run(out, resume, on_round)

    @property
    def calls(self) -> list[set[str]]:
        """The kinds of messages that the server has sent at once."""
        return [
            {message.header["kind"] for message in messages.values()}
            for messages in self.transport.sent
        ]

    @property
    def saved(self) -> dict[str, dict[str, list[float]]]:
        """The final models of the nodes' clients."""
        return {
            client: {name: value.flatten().tolist() for name, value in model.items()}
            for store in self.stores
            for client, model in store.models.items()
        }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def files(folder: Path) -> dict[str, Any]:
    """What a run leaves on disk, without the times."""

    def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name != "seconds"}

    stored: dict[str, Any] = {
        name: (folder / name).read_bytes() for name in ("models/models.safetensors", "clients.csv")
    }
    stored["rows"] = [timeless(row) for row in rows_of(folder)]
    stored["summary"] = timeless(json.loads((folder / "summary.json").read_text()))
    for path in sorted((folder / "checkpoint").glob("*.safetensors")):
        about, tensors = checkpoint.read_tensors(path)
        about["history"] = [timeless(row) for row in about["history"]]
        # The names of transactions are random.
        stored[path.name] = (
            about,
            {n: v.tolist() for n, v in tensors.items() if "committed" not in n},
        )
    assert any(name.startswith("round-") for name in stored)
    return stored


@METHODS
def test_one_message_a_round_and_the_same_bytes(
    method: fc.Method, clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, separate = Nodes(clients, method), Nodes(clients, method)
    shown: list[int] = []
    joined.run(tmp_path / "joined", on_round=lambda row: shown.append(row["round"]))
    assert shown == [1, 2, 3, 4]
    assert [kinds for kinds in joined.calls if kinds == {"evaluate"}] == [{"evaluate"}]
    assert "evaluate" in joined.calls[-1]
    monkeypatch.setattr(loop, "joins_next_round", lambda setup, number: False)
    separate.run(tmp_path / "separate")
    assert len(separate.calls) - len(joined.calls) == ROUNDS - 1
    assert files(tmp_path / "joined") == files(tmp_path / "separate")
    assert joined.saved == separate.saved


@METHODS
@pytest.mark.parametrize("every", [1, 2])
def test_a_server_that_crashes_at_any_message_gives_the_same_bytes(
    method: fc.Method, every: int, clients: Clients, tmp_path: Path
) -> None:
    whole = Nodes(clients, method)
    whole.run(tmp_path / "whole", eval_every=every)
    calls = len(whole.calls)
    for crash_at in range(2, calls + 1):
        out, nodes = tmp_path / str(crash_at), Nodes(clients, method)
        with pytest.raises(Crash):
            nodes.run(out, crash_at=crash_at, eval_every=every)
        nodes.run(out, resume=True, eval_every=every)
        assert files(out) == files(tmp_path / "whole"), crash_at
        assert nodes.saved == whole.saved


def test_a_server_that_crashes_at_any_message_returns_to_the_best_round(
    clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local: the second of five rounds is the best one. Nodes keep its state and two others."""
    evaluate = loop.evaluate

    def best_in_round_2(
        setup: Any, clients: Any, state: Any, number: int, *rest: Any, **last: Any
    ) -> Evaluation:
        evaluation = evaluate(setup, clients, state, number, *rest, **last)
        losses = torch.full_like(evaluation.values["validation_loss"], abs(number - 2))
        return evaluation._replace(values=evaluation.values | {"validation_loss": losses})

    monkeypatch.setattr(loop, "evaluate", best_in_round_2)
    settings: dict[str, Any] = {"rounds": 5, "select": "best"}
    held_out = clients.with_validation(0.2)
    whole = Nodes(held_out, fc.Local())
    result = whole.run(tmp_path / "whole", **settings)
    assert result.summary["selected_round"] == 2
    short = Nodes(held_out, fc.Local())
    short.run(tmp_path / "short", rounds=2)
    assert whole.saved == short.saved
    for crash_at in range(2, len(whole.calls) + 1):
        out, nodes = tmp_path / str(crash_at), Nodes(held_out, fc.Local())
        with pytest.raises(Crash):
            nodes.run(out, crash_at=crash_at, **settings)
        nodes.run(out, resume=True, **settings)
        assert files(out) == files(tmp_path / "whole"), crash_at
        assert nodes.saved == whole.saved


@pytest.mark.parametrize("last", [1, 2, 3])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    last: int, clients: Clients, tmp_path: Path
) -> None:
    """The row of a round is complete in the middle of the next one, which does not count then."""
    whole, parts = (Nodes(clients, fc.SCAFFOLD()) for _ in range(2))
    whole.run(tmp_path / "whole", checkpoint_every=3)

    def interrupt(row: RoundRecord) -> None:
        if row["round"] == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parts.run(tmp_path / "parts", on_round=interrupt, checkpoint_every=3)
    assert [row["round"] for row in rows_of(tmp_path / "parts")] == list(range(1, last + 1))
    parts.run(tmp_path / "parts", resume=True, checkpoint_every=3)
    assert files(tmp_path / "parts")["rows"] == files(tmp_path / "whole")["rows"]
    assert (
        files(tmp_path / "parts")["models/models.safetensors"]
        == (tmp_path / "whole" / "models" / "models.safetensors").read_bytes()
    )


def test_a_user_who_stops_the_run_stops_it_one_round_later(
    clients: Clients, tmp_path: Path
) -> None:
    nodes = Nodes(clients, fc.FedAvg())
    result = nodes.run(tmp_path, on_round=lambda row: row["round"] == 2)
    assert result.summary["stopped"] == "on_round"
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert all("accuracy" in row for row in result.history)


class Idle(fc.FedAvg):
    """A method whose rounds send nothing."""

    def round(self, fed: Any, state: Any, cohort: Any, key: int) -> Any:
        return state


def test_the_round_before_one_without_training_is_evaluated(
    clients: Clients, tmp_path: Path
) -> None:
    nodes = Nodes(clients, Idle())
    result = nodes.run(tmp_path)
    assert [kinds for kinds in nodes.calls if "evaluate" in kinds] == [{"evaluate"}] * ROUNDS
    assert all("accuracy" in row for row in result.history)


def test_the_round_before_an_error_is_complete(clients: Clients, tmp_path: Path) -> None:
    nodes = Nodes(clients, fc.FedAvg())
    for node in nodes.transport.connected.values():
        node.simulator.faults = lambda key, client, reply: {
            name: value * torch.nan for name, value in reply.items()
        }
    with pytest.raises(FedcladeError) as caught:
        nodes.run(tmp_path, max_rejections=1, clients_per_round=1.0)
    assert caught.value.field == "run.max_rejections"
    (row,) = rows_of(tmp_path)
    assert "accuracy" in row
    assert len(row["failures"]) == 9
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [
        "round-000001.safetensors"
    ]


@pytest.mark.parametrize("settings", [{"patience": 9}, {"select": "best"}])
def test_what_depends_on_the_evaluation_waits_for_it(
    settings: dict[str, Any], clients: Clients, tmp_path: Path
) -> None:
    nodes = Nodes(clients.with_validation(0.2), fc.FedAvg())
    nodes.run(tmp_path, **settings)
    assert sum(kinds == {"evaluate"} for kinds in nodes.calls) >= ROUNDS
