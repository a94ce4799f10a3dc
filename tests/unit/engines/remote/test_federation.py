"""A federation of sites: what counts when letters are lost, sites come and go, and answers do not
fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from tests.unit.engines.remote.in_process_transport import (
    ABOUT,
    InProcessTransport,
    Remote,
    nodes_of,
)

from fedclade import SCAFFOLD, FedAvg, Local, LocalTraining
from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.engines.remote.federation import NOT_CONNECTED, RemoteFederation
from fedclade.engines.remote.messages import Message
from fedclade.engines.remote.node import InMemoryStateStore, Node
from fedclade.errors import InvalidInputError
from fedclade.models import MLP
from fedclade.programs.sgd import sgd


@pytest.fixture
def here(ragged: Clients) -> NodeContext:
    torch.manual_seed(0)
    return NodeContext(Objective(MLP(8).build(ragged.shape, 3)))


@pytest.fixture
def local(here: NodeContext) -> LocalTraining:
    return LocalTraining(here.objective, lr=0.05, batch_size=4)


def everyone(clients: Clients) -> torch.Tensor:
    return torch.arange(len(clients))


def train(fed: RemoteFederation, local: LocalTraining, ids: torch.Tensor, key: int = 0) -> object:
    params = {name: value[None] for name, value in local.objective.params().items()}
    return fed.map(
        sgd(local), ids, per_client=ModelAssignment(params, torch.zeros_like(ids)), key=key
    )


def test_a_site_has_one_letter_with_each_model_once(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, here)
    fed.box.carried.clear()
    train(fed, local, everyone(ragged))
    (messages,) = fed.box.carried
    assert sorted(messages) == ["site-0", "site-1"]
    size = sum(value.numel() * 4 for value in local.objective.params().values())
    assert [message.nbytes for message in messages.values()] == [size, size]
    assert fed.traffic.down == 2 * size
    assert fed.traffic.up == len(ragged) * size


def test_who_is_not_connected_is_a_failure_and_nothing_waits(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, here)
    gone = fed.box.here.pop("site-1")
    fed.refresh_membership()
    got = train(fed, local, everyone(ragged))
    assert got.ids.tolist() == [0, 2, 4]
    assert [(failure.client, failure.reason) for failure in got.failures] == [
        (client, NOT_CONNECTED) for client in (1, 3, 5)
    ]
    fed.box.here["site-1"] = gone
    fed.refresh_membership()
    assert len(train(fed, local, everyone(ragged)).ids) == len(ragged)


def test_a_late_site_gets_new_numbers_and_keeps_them(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    nodes = nodes_of(ragged, 3, lambda data, names: Node(data, names, here, {}, ABOUT))
    late = nodes.pop("site-0")
    box = InProcessTransport(nodes)
    fed = RemoteFederation(box, ABOUT)
    fed.refresh_membership()
    assert [client_record.name for client_record in fed.client_records] == ["1", "4", "2", "5"]
    box.here["site-0"] = late
    fed.refresh_membership()
    assert [client_record.name for client_record in fed.client_records] == [
        "1",
        "4",
        "2",
        "5",
        "0",
        "3",
    ]
    assert fed.sizes.tolist() == [
        int(ragged.sizes[int(client_record.name)]) for client_record in fed.client_records
    ]
    assert len(train(fed, local, torch.arange(6)).ids) == 6


def test_a_client_that_moves_to_another_site_keeps_its_number(
    ragged: Clients, here: NodeContext
) -> None:
    nodes = nodes_of(ragged, 2, lambda data, names: Node(data, names, here, {}, ABOUT))
    box = InProcessTransport(nodes)
    fed = RemoteFederation(box, ABOUT)
    fed.refresh_membership()
    before = [client_record.name for client_record in fed.client_records]
    box.here["new place"] = box.here.pop("site-1")
    fed.refresh_membership()
    assert [client_record.name for client_record in fed.client_records] == before
    assert {client_record.node for client_record in fed.client_records} == {"site-0", "new place"}


def test_a_second_site_with_the_same_clients_is_refused(ragged: Clients, here: NodeContext) -> None:
    nodes = nodes_of(ragged, 2, lambda data, names: Node(data, names, here, {}, ABOUT))
    said: list[str] = []
    box = InProcessTransport(nodes)
    fed = RemoteFederation(box, ABOUT, note=said.append)
    fed.refresh_membership()
    box.here["twin"] = nodes["site-1"]
    fed.refresh_membership()
    assert {client_record.node for client_record in fed.client_records} == {"site-0", "site-1"}
    assert said[-1] == "twin: not used: its client '1' is already there, at site-1"


def test_another_version_is_refused_with_both_sides_named(
    ragged: Clients, here: NodeContext
) -> None:
    said: list[str] = []
    other = {**ABOUT, "fedclade": "0.9"}
    nodes = nodes_of(ragged, 1, lambda data, names: Node(data, names, here, {}, other))
    fed = RemoteFederation(InProcessTransport(nodes), ABOUT, note=said.append)
    fed.refresh_membership()
    assert "fedclade: the server has test, this site 0.9" in said[0]
    with pytest.raises(InvalidInputError, match="no site has answered"):
        fed.client_metadata()


def test_a_letter_for_another_configuration_is_refused_at_the_site(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, here)
    fed.about = {**ABOUT, "configuration": "two"}
    got = train(fed, local, everyone(ragged))
    assert len(got.ids) == 0
    assert "configuration: the server has two, this site one" in got.failures[0].reason


def test_samples_of_another_kind_are_refused(ragged: Clients, here: NodeContext) -> None:
    said: list[str] = []
    nodes = nodes_of(ragged, 2, lambda data, names: Node(data, names, here, {}, ABOUT))
    odd = replace(nodes["site-1"].clients, x=torch.zeros(len(ragged.x), 7))
    nodes["site-1"] = Node(odd, nodes["site-1"].names, here, {}, ABOUT)
    fed = RemoteFederation(InProcessTransport(nodes), ABOUT, note=said.append)
    fed.refresh_membership()
    assert "its samples are of another kind: (7,)" in said[-1]
    assert len(fed.client_records) == 3


def tampered(fed: Remote, node: str, change: Callable[[Message], Message]) -> None:
    honest = fed.box.here[node].answer
    fed.box.here[node].answer = lambda message: change(honest(message))  # type: ignore[method-assign]


def out(message: Message, name: str, value: torch.Tensor) -> Message:
    return Message(message.header, {**message.tensors, f"out/{name}": value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda a: out(a, "fc2.bias", a.tensors["out/fc2.bias"][:, :2]),
            "shape of 'fc2.bias': expected (3,), got (2,)",
        ),
        (lambda a: out(a, "fc2.bias", a.tensors["out/fc2.bias"].double()), "dtype of 'fc2.bias'"),
        (
            lambda a: out(a, "fc2.bias", a.tensors["out/fc2.bias"] * torch.nan),
            "'fc2.bias' is not finite",
        ),
        (lambda a: out(a, "more", a.tensors["out/fc2.bias"]), "names: expected"),
        (
            lambda a: Message({**a.header, "clients": [0, 0]}, a.tensors),
            "does not fit what was asked",
        ),
        (
            lambda a: Message({**a.header, "clients": [0, 9]}, a.tensors),
            "does not fit what was asked",
        ),
        (lambda a: Message({"clients": [], "failures": []}), "did not answer for it"),
        (lambda a: Message({"refused": "RuntimeError: boom"}), "RuntimeError: boom"),
    ],
)
def test_what_does_not_fit_costs_only_its_own_site(
    ragged: Clients,
    here: NodeContext,
    local: LocalTraining,
    change: Callable[[Message], Message],
    reason: str,
) -> None:
    fed = Remote(ragged, here, nodes=3)
    tampered(fed, "site-1", change)
    got = train(fed, local, everyone(ragged))
    assert got.ids.tolist() == [0, 2, 3, 5]
    assert all(reason in failure.reason for failure in got.failures)
    assert [failure.client for failure in got.failures] == [1, 4]


def test_a_client_whose_own_data_break_the_program_costs_only_itself(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    """Client 4 has a label that no output stands for."""
    y = ragged.y.clone()
    y[ragged.train[4]] = 77
    fed = Remote(replace(ragged, y=y), here)
    got = train(fed, local, everyone(ragged))
    assert got.ids.tolist() == [0, 1, 2, 3, 5]
    assert [failure.client for failure in got.failures] == [4]


def committed(fed: Remote, ids: torch.Tensor) -> Tree:
    return fed.read(ids)


def test_memory_of_a_turn_that_was_not_answered_in_time_does_not_count(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    method = SCAFFOLD().with_local_config(local)
    late, never = Remote(ragged, here), Remote(ragged, here)
    for fed in (late, never):
        fed.init_client_state(method.initial_client_state(here.objective.params()))
    state = method.init(late, here.objective.params(), key=0)
    late.client_state.commit(0)
    never.client_state.commit(0)
    late.box.lost = lambda node, message: node == "site-1"
    one = method.round(late, state, everyone(ragged), key=1)
    late.client_state.commit(1)
    late.box.lost = lambda node, message: False
    other = method.round(never, state, torch.tensor([0, 2, 4]), key=1)
    never.client_state.commit(1)
    ends = [
        method.round(fed, state, everyone(ragged), key=2)
        for fed, state in ((late, one), (never, other))
    ]
    for name, value in ends[0].models.items():
        torch.testing.assert_close(value, ends[1].models[name])


def test_a_server_that_died_in_a_round_finds_the_memory_of_the_round_before(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    method = SCAFFOLD().with_local_config(local)
    undisturbed, first = Remote(ragged, here), Remote(ragged, here)
    states = []
    for fed in (undisturbed, first):
        fed.init_client_state(method.initial_client_state(here.objective.params()))
        state = method.init(fed, here.objective.params(), key=0)
        fed.client_state.commit(0)
        states.append(method.round(fed, state, everyone(ragged), key=1))
        fed.client_state.commit(1)
    method.round(
        first, states[1], everyone(ragged), key=2
    )  # and the server dies before it has committed
    second = Remote(ragged, here)
    for name, node in second.box.here.items():
        node.state_store = first.box.here[name].state_store
    second.init_client_state(method.initial_client_state(here.objective.params()))
    second.client_state.restore(first.client_state.tensors(), 1)
    expected = method.round(undisturbed, states[0], everyone(ragged), key=2)
    got = method.round(second, states[1], everyone(ragged), key=2)
    for name, value in expected.models.items():
        assert torch.equal(value, got.models[name])


def test_a_site_that_has_lost_its_disk_begins_anew(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    method = SCAFFOLD().with_local_config(local)
    fed = Remote(ragged, here)
    fed.init_client_state(method.initial_client_state(here.objective.params()))
    state = method.init(fed, here.objective.params(), key=0)
    state = method.round(fed, state, everyone(ragged), key=1)
    fed.client_state.commit(1)
    fed.box.here["site-1"].state_store = InMemoryStateStore()
    method.round(fed, state, everyone(ragged), key=2)
    assert {failure.client for failure in fed.pop_failures()} == {1, 3, 5}
    fed.client_state.commit(2)
    method.round(fed, state, everyone(ragged), key=3)
    assert fed.pop_failures() == []


def test_each_site_keeps_its_clients_own_models(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    method = Local().with_local_config(local)
    fed = Remote(ragged, here)
    fed.init_client_state(method.initial_client_state(here.objective.params()))
    state = method.init(fed, here.objective.params(), key=0)
    state = method.round(fed, state, everyone(ragged), key=1)
    fed.client_state.commit(1)
    rows = method.assign_models(state, everyone(ragged))
    fed.push_final_models(rows, everyone(ragged))
    state_store = fed.box.here["site-1"].state_store
    assert isinstance(state_store, InMemoryStateStore)
    assert sorted(state_store.models) == ["1", "3", "5"]
    expected = rows.gather(fed.read(everyone(ragged)))
    for client in (1, 3, 5):
        for name, value in state_store.models[str(client)].items():
            assert torch.equal(value, expected[name][client])
    with pytest.raises(InvalidInputError, match="stay with them"):
        fed.models_of(rows, everyone(ragged))


def test_a_model_that_is_served_is_no_secret(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    method = FedAvg().with_local_config(local)
    fed = Remote(ragged, here)
    state = method.init(fed, here.objective.params(), key=0)
    got = fed.models_of(method.assign_models(state, everyone(ragged)), everyone(ragged))
    assert all(len(value) == len(ragged) for value in got.values())


def test_of_two_sites_the_one_that_answers_in_the_form_of_the_model_is_believed(
    ragged: Clients, here: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, here)
    honest = fed.box.send_and_receive

    def send_and_receive(messages: Mapping[str, Message]) -> dict[str, Message | str]:
        answers = honest(messages)
        for node, answer in answers.items():
            assert isinstance(answer, Message)
            if node == "site-0":
                answers[node] = replace(
                    answer, tensors={name: value.double() for name, value in answer.tensors.items()}
                )
        return answers

    fed.box.send_and_receive = send_and_receive  # type: ignore[method-assign]
    ids = everyone(ragged)[:2]  # one at each site
    got = fed.map(
        sgd(local),
        ids,
        per_client=ModelAssignment(
            {name: value[None] for name, value in local.objective.params().items()}, ids * 0
        ),
        key=0,
    )
    assert got.ids.tolist() == [1]
    assert [(failure.client, failure.rejected) for failure in got.failures] == [(0, True)]


def test_a_site_that_says_nonsense_of_itself_is_not_used(
    ragged: Clients, here: NodeContext
) -> None:
    fed = Remote(ragged, here)
    honest, told = fed.box.send_and_receive, []
    fed.box.here["site-9"] = fed.box.here["site-0"]

    def send_and_receive(messages: Mapping[str, Message]) -> dict[str, Message | str]:
        answers = honest(messages)
        hello = answers["site-9"]
        assert isinstance(hello, Message)
        return {
            "site-9": replace(
                hello, header={**hello.header, "names": ["x"], "sizes": [-1], "test_sizes": "no"}
            )
        }

    fed.box.send_and_receive = send_and_receive  # type: ignore[method-assign]
    fed.note = told.append
    before = len(fed.sizes)
    fed.refresh_membership()
    assert len(fed.sizes) == before
    assert len(told) == 1
    assert told[0].startswith("site-9: not used: what it says of itself makes no sense (")
