"""The numbers of remote clients: they depend on sites and names, not on the ids of nodes or on the
order of their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import fedclade as fc
from fedclade.conformance.in_process_federation import COMPATIBILITY_INFO, InProcessTransport
from fedclade.core import LocalTraining
from fedclade.core.federation import ClientResults, ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.losses import accuracy
from fedclade.core.program_serialization import NodeContext
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.membership import ClientRecord, Membership
from fedclade.engines.remote.messages import Message, NodeError
from fedclade.engines.remote.node import Node
from fedclade.models import MLP
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.result import Result
from fedclade.training.runner import TrainingRun

SITES = {"east": [0, 1], "north": [2, 3], "west": [4, 5]}
NAMES = ["ward-a", "ward-b"]
FULL_NAMES = [f"{site}/{name}" for site in SITES for name in NAMES]
MakeNode = Callable[..., Node]


class AnyOrder(InProcessTransport):
    """A transport that lists nodes and answers in the order of their random ids."""

    def nodes(self) -> list[str]:
        return list(self.connected)

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        answers = super().send_and_receive(messages)
        return {node: answers[node] for node in self.connected if node in answers}


@pytest.fixture
def make_node(ragged: Clients) -> MakeNode:
    torch.manual_seed(0)
    context = NodeContext(Objective(MLP(8).build(ragged.shape, 3)))

    def make(site: str, names: list[str] | None = None, ids: list[int] | None = None) -> Node:
        clients = ragged.only(ids if ids is not None else SITES[site])
        return Node(
            clients,
            names if names is not None else NAMES,
            context,
            {"accuracy": accuracy},
            COMPATIBILITY_INFO,
            site=site,
        )

    return make


def membership(transport: InProcessTransport, **options: object) -> Membership:
    return Membership(transport, COMPATIBILITY_INFO, **options)  # type: ignore[arg-type]


def full_names(found: Membership) -> list[str]:
    return [record.full_name for record in found.client_records]


def run(ids: list[str], make_node: MakeNode, method: fc.Method, out: Path) -> Result:
    """Train on the three sites, whose nodes have these ids and answer in this order."""
    nodes = {node: make_node(site) for node, site in ids_of_sites(ids)}
    fed = RemoteFederation(AnyOrder(nodes), COMPATIBILITY_INFO)
    return TrainingRun(
        method,
        None,
        MLP(8),
        LocalConfig(lr=0.1, batch_size=4),
        TrainingConfig(rounds=3, clients_per_round=0.5, seed=1),
        EngineConfig(),
        federation=fed,
    ).run(out)


def ids_of_sites(ids: list[str]) -> list[tuple[str, str]]:
    """Id and site of each node, in the order of ids; ids[i] is the id of the i-th site."""
    return sorted(zip(ids, SITES, strict=True))


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.SCAFFOLD(), fc.Clade()])
def test_other_node_ids_give_the_same_bytes(
    method: fc.Method, make_node: MakeNode, tmp_path: Path
) -> None:
    outcomes = [
        run(ids, make_node, method, tmp_path / str(number))
        for number, ids in enumerate((["10", "20", "30"], ["93", "57", "8"]))
    ]
    one, other = (
        (tmp_path / str(number) / "models" / "models.safetensors").read_bytes()
        for number in range(2)
    )
    assert one == other
    for outcome in outcomes:
        assert outcome.clients["client"] == FULL_NAMES
    text = (tmp_path / "0" / "clients.csv").read_text()
    assert text == (tmp_path / "1" / "clients.csv").read_text()
    assert [line.split(",")[0] for line in text.splitlines()[1:]] == FULL_NAMES


def test_nodes_that_register_one_by_one_are_numbered_together(make_node: MakeNode) -> None:
    transport = AnyOrder({"1": make_node("west")})
    found = membership(transport)
    found.register_nodes()
    transport.connected["2"] = make_node("east")
    found.register_nodes()
    assert found.client_records == []
    transport.connected = {"3": make_node("north"), **transport.connected}
    found.register_nodes()
    found.number_clients()
    assert full_names(found) == FULL_NAMES
    assert found.client_numbers("1") == [4, 5]


def test_clients_that_join_later_get_the_next_numbers_sorted(make_node: MakeNode) -> None:
    transport = AnyOrder({"5": make_node("north")})
    found = membership(transport)
    found.refresh()
    transport.connected |= {"1": make_node("west"), "2": make_node("east")}
    found.refresh()
    assert full_names(found) == [
        f"{site}/{name}" for site in ("north", "east", "west") for name in NAMES
    ]


def test_a_restarted_server_and_restarted_nodes_keep_the_numbers(make_node: MakeNode) -> None:
    transport = AnyOrder({"5": make_node("north")})
    first = membership(transport)
    first.refresh()
    transport.connected |= {"1": make_node("east")}
    first.refresh()
    stored = [
        ClientRecord("", -1, record.name, record.size, record.test_size, record.site)
        for record in first.client_records
    ]
    again = AnyOrder({"77": make_node("east"), "78": make_node("west"), "79": make_node("north")})
    second = membership(again, client_records=stored)
    second.refresh()
    assert full_names(second) == [
        f"{site}/{name}" for site in ("north", "east", "west") for name in NAMES
    ]
    assert second.client_numbers("79") == [0, 1]
    assert second.state_key("79") == first.state_key("5") == "north"


def test_two_nodes_with_one_site_name_are_in_conflict(make_node: MakeNode) -> None:
    notes: list[str] = []
    transport = AnyOrder({"1": make_node("east"), "2": make_node("west")})
    found = membership(transport, note=notes.append)
    found.refresh()
    transport.connected["9"] = make_node("east", ["ward-c", "ward-d"])
    found.refresh()
    found.refresh()
    assert list(found.conflicts) == ["9"]
    assert "'east'" in found.conflicts["9"]
    assert "node 1 " in found.conflicts["9"]
    assert [note for note in notes if "not used" in note] == [
        f"east (node 9): not used: {found.conflicts['9']}"
    ]
    assert len(found.client_records) == 4
    del transport.connected["1"]  # the node restarted under another id, and the old one has left
    found.refresh()
    assert found.conflicts == {}
    assert found.client_numbers("9") == [4, 5]


def test_a_node_whose_site_moved_registers_again_when_it_returns(make_node: MakeNode) -> None:
    transport = AnyOrder({"1": make_node("east")})
    found = membership(transport)
    found.refresh()
    transport.connected = {"2": make_node("east")}
    found.refresh()
    assert found.client_numbers("2") == [0, 1]
    transport.connected = {"1": make_node("east")}
    found.refresh()
    assert found.client_numbers("1") == [0, 1]


def test_a_bound_client_cannot_be_taken_over(make_node: MakeNode) -> None:
    transport = AnyOrder({"1": make_node("east")})
    found = membership(transport, bind_clients_to_nodes=True)
    found.refresh()
    transport.connected = {"2": make_node("east")}
    found.refresh()
    assert "'east/ward-a'" in found.conflicts["2"]
    assert found.client_records[0].owner == "1"
    assert not found.is_connected("2")
    # A node with other clients cannot take the site either: the owner must be able to return.
    transport.connected = {"3": make_node("east", ["ward-c", "ward-d"])}
    found.refresh()
    assert list(found.conflicts) == ["2", "3"]
    transport.connected |= {"1": make_node("east")}
    found.refresh()
    assert found.is_connected("1")
    assert full_names(found) == FULL_NAMES[:2]


def test_a_node_that_comes_back_with_other_data_registers_again(make_node: MakeNode) -> None:
    """Under its old id, as a node with a key does. A new client is admitted, a client that is gone
    keeps its number.
    """
    transport = AnyOrder({"1": make_node("east"), "2": make_node("west")})
    fed = RemoteFederation(transport, COMPATIBILITY_INFO)
    fed.refresh_membership()
    transport.connected["1"] = make_node("east", ["ward-b", "ward-c"], [0, 5])
    fed.refresh_membership()
    objective = transport.connected["1"].context.objective
    program = sgd(LocalTraining(objective, lr=0.05, batch_size=4))
    models = {name: value[None] for name, value in objective.params().items()}

    def train(clients: int) -> ClientResults:
        given = ModelAssignment(models, torch.zeros(clients, dtype=torch.int64))
        return fed.map(program, torch.arange(clients), per_client=given, key=0)

    first = train(4)
    assert first.ids.tolist() == [2, 3]
    assert {"have changed" in failure.reason for failure in first.failures} == {True}
    fed.refresh_membership()
    names = fed.client_metadata().names
    assert [names.client(number) for number in range(5)] == [
        *(*FULL_NAMES[:2], *FULL_NAMES[4:]),
        "east/ward-c",
    ]
    second = train(5)
    assert second.ids.tolist() == [1, 2, 3, 4]
    assert [failure.client for failure in second.failures] == [0]


def test_a_refused_node_is_asked_again_with_growing_pauses(make_node: MakeNode) -> None:
    transport = AnyOrder({"1": make_node("east"), "2": make_node("west")})
    broken = make_node("north")
    transport.connected["3"] = broken
    transport.is_lost = lambda node, message: node == "3"
    found = membership(transport)
    asked = []
    for update in range(20):
        transport.sent.clear()
        found.refresh()
        asked += [update for messages in transport.sent if "3" in messages]
    assert asked == [0, 1, 3, 6, 11]
    # A node that leaves may have been the reason.
    del transport.connected["2"]
    transport.is_lost = lambda node, message: False
    found.refresh()
    assert found.is_connected("3")


@pytest.mark.parametrize(
    ("site", "names"),
    [
        ("a/b", NAMES),
        ("=east", NAMES),
        ("x" * 201, NAMES),
        ("east", ["ward", "ward"]),
        ("east", ["ward", "two\nlines"]),
        ("east", ["ward", ""]),
        ("east", ["ward", "y" * 200]),
        ("east", ["ward", 3]),
    ],
)
def test_bad_names_of_a_node_are_rejected(site: str, names: list[str], make_node: MakeNode) -> None:
    notes: list[str] = []
    node = make_node("east", names)
    node.site = site
    found = membership(AnyOrder({"1": node}), note=notes.append)
    found.refresh()
    assert found.client_records == []
    assert "not used: its registration is malformed (InvalidInputError" in notes[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("site", None),
        ("site", ["east"]),
        ("site", 3),
        ("names", {"ward-a": 1, "ward-b": 2}),
        ("names", "ab"),
        ("classes", "many"),
        ("classes", 0),
    ],
)
def test_a_malformed_registration_ends_no_run(key: str, value: object, make_node: MakeNode) -> None:
    transport = AnyOrder({"1": make_node("east"), "2": make_node("west")})
    honest = transport.send_and_receive

    def send_and_receive(messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        answers = honest(messages)
        answer = answers["1"]
        assert isinstance(answer, Message)
        return {**answers, "1": Message({**answer.header, key: value}, answer.tensors)}

    transport.send_and_receive = send_and_receive  # type: ignore[method-assign]
    notes: list[str] = []
    found = membership(transport, note=notes.append)
    found.refresh()
    assert full_names(found) == ["west/ward-a", "west/ward-b"]
    assert found.metadata(None).classes == 3
    assert [note for note in notes if "node 1" in note and "its registration is malformed" in note]
