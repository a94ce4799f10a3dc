"""A federation of nodes: what counts when messages are lost, nodes come and go, and answers are
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from fedclade import SCAFFOLD, FedAvg, Local
from fedclade.conformance.in_process_federation import (
    COMPATIBILITY_INFO,
    InProcessTransport,
    nodes_of,
)
from fedclade.conformance.in_process_federation import InProcessFederation as Remote
from fedclade.core import LocalTraining
from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.engines.base import Delivery, EvalRequest
from fedclade.engines.remote.evaluation import PART
from fedclade.engines.remote.federation import NOT_CONNECTED, RemoteFederation
from fedclade.engines.remote.messages import Message, NodeError
from fedclade.engines.remote.node import InMemoryStateStore, Node
from fedclade.errors import InvalidInputError
from fedclade.models import MLP


@pytest.fixture
def context(ragged: Clients) -> NodeContext:
    torch.manual_seed(0)
    return NodeContext(Objective(MLP(8).build(ragged.shape, 3)))


@pytest.fixture
def local(context: NodeContext) -> LocalTraining:
    return LocalTraining(context.objective, lr=0.05, batch_size=4)


def everyone(clients: Clients) -> torch.Tensor:
    return torch.arange(len(clients))


def train(fed: RemoteFederation, local: LocalTraining, ids: torch.Tensor, key: int = 0) -> object:
    params = {name: value[None] for name, value in local.objective.params().items()}
    return fed.map(
        sgd(local), ids, per_client=ModelAssignment(params, torch.zeros_like(ids)), key=key
    )


def test_a_node_gets_one_message_with_each_model_once(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, context)
    fed.in_process.sent.clear()
    train(fed, local, everyone(ragged))
    (messages,) = fed.in_process.sent
    assert sorted(messages) == ["node-0", "node-1"]
    size = sum(value.numel() * 4 for value in local.objective.params().values())
    assert [message.nbytes for message in messages.values()] == [size, size]
    assert fed.traffic.down == 2 * size
    assert fed.traffic.up == len(ragged) * size


@pytest.mark.parametrize("ids", [[1, 2, 1], [0, 6], [-1, 2]])
def test_ids_must_be_those_of_distinct_clients(
    ragged: Clients, context: NodeContext, local: LocalTraining, ids: list[int]
) -> None:
    """A number below 0 would be another client."""
    fed, clients = Remote(ragged, context), torch.tensor(ids)
    params = {name: value[None] for name, value in local.objective.params().items()}
    assignment = ModelAssignment(params, torch.zeros_like(clients))
    fed.in_process.sent.clear()
    for call in (
        lambda: train(fed, local, clients),
        lambda: fed.evaluate(assignment, clients, [EvalRequest(local.objective, {}, "train")]),
    ):
        with pytest.raises(InvalidInputError, check=lambda error: error.field == "ids"):
            call()
    assert not fed.in_process.sent


def test_a_client_that_is_not_connected_is_a_failure(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, context)
    gone = fed.in_process.connected.pop("node-1")
    fed.refresh_membership()
    results = train(fed, local, everyone(ragged))
    assert results.ids.tolist() == [0, 2, 4]
    assert [(failure.client, failure.reason) for failure in results.failures] == [
        (client, NOT_CONNECTED.reason) for client in (1, 3, 5)
    ]
    fed.in_process.connected["node-1"] = gone
    fed.refresh_membership()
    assert len(train(fed, local, everyone(ragged)).ids) == len(ragged)


def test_a_late_node_gets_new_numbers_and_keeps_them(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    nodes = nodes_of(
        ragged, 3, lambda data, names: Node(data, names, context, {}, COMPATIBILITY_INFO)
    )
    late = nodes.pop("node-0")
    transport = InProcessTransport(nodes)
    fed = RemoteFederation(transport, COMPATIBILITY_INFO)
    fed.refresh_membership()
    assert [record.name for record in fed.membership.client_records] == ["1", "2", "4", "5"]
    transport.connected["node-0"] = late
    fed.refresh_membership()
    names = [record.name for record in fed.membership.client_records]
    assert names == ["1", "2", "4", "5", "0", "3"]
    assert fed.sizes.tolist() == [int(ragged.sizes[int(name)]) for name in names]
    assert len(train(fed, local, torch.arange(6)).ids) == 6


def test_a_client_that_moves_to_another_node_keeps_its_number(
    ragged: Clients, context: NodeContext
) -> None:
    nodes = nodes_of(
        ragged, 2, lambda data, names: Node(data, names, context, {}, COMPATIBILITY_INFO)
    )
    transport = InProcessTransport(nodes)
    fed = RemoteFederation(transport, COMPATIBILITY_INFO)
    fed.refresh_membership()
    before = [record.name for record in fed.membership.client_records]
    transport.connected["new-node"] = transport.connected.pop("node-1")
    fed.refresh_membership()
    assert [record.name for record in fed.membership.client_records] == before
    assert {record.node for record in fed.membership.client_records} == {"node-0", "new-node"}


def test_a_second_node_with_the_same_clients_is_rejected(
    ragged: Clients, context: NodeContext
) -> None:
    nodes = nodes_of(
        ragged, 2, lambda data, names: Node(data, names, context, {}, COMPATIBILITY_INFO)
    )
    notes: list[str] = []
    transport = InProcessTransport(nodes)
    fed = RemoteFederation(transport, COMPATIBILITY_INFO, note=notes.append)
    fed.refresh_membership()
    transport.connected["twin"] = nodes["node-1"]
    fed.refresh_membership()
    assert {record.node for record in fed.membership.client_records} == {"node-0", "node-1"}
    assert notes[-1] == "node twin: not used: its client '1' is already registered by node-1"


def test_another_version_is_rejected_with_both_values(
    ragged: Clients, context: NodeContext
) -> None:
    notes: list[str] = []
    other = {**COMPATIBILITY_INFO, "fedclade": "0.9"}
    nodes = nodes_of(ragged, 1, lambda data, names: Node(data, names, context, {}, other))
    fed = RemoteFederation(InProcessTransport(nodes), COMPATIBILITY_INFO, note=notes.append)
    fed.refresh_membership()
    assert "fedclade: the server has test, this node 0.9" in notes[0]
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "federation"):
        fed.client_metadata()


def test_a_message_for_another_configuration_is_rejected_by_the_node(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, context)
    fed.membership.compatibility_info = {**COMPATIBILITY_INFO, "configuration": "two"}
    results = train(fed, local, everyone(ragged))
    assert len(results.ids) == 0
    assert "configuration: the server has two, this node one" in results.failures[0].reason


def test_samples_of_another_shape_are_rejected(ragged: Clients, context: NodeContext) -> None:
    notes: list[str] = []
    nodes = nodes_of(
        ragged, 2, lambda data, names: Node(data, names, context, {}, COMPATIBILITY_INFO)
    )
    odd = replace(nodes["node-1"].clients, x=torch.zeros(len(ragged.x), 7))
    nodes["node-1"] = Node(odd, nodes["node-1"].names, context, {}, COMPATIBILITY_INFO)
    fed = RemoteFederation(InProcessTransport(nodes), COMPATIBILITY_INFO, note=notes.append)
    fed.refresh_membership()
    assert "its samples differ from the others': (7,)" in notes[-1]
    assert len(fed.membership.client_records) == 3


def tampered(fed: Remote, node: str, change: Callable[[Message], Message]) -> None:
    honest = fed.in_process.connected[node].answer
    fed.in_process.connected[node].answer = lambda message: change(honest(message))  # type: ignore[method-assign]


def with_output(message: Message, name: str, value: torch.Tensor) -> Message:
    return Message(message.header, {**message.tensors, f"outputs/{name}": value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda a: with_output(a, "fc2.bias", a.tensors["outputs/fc2.bias"][:, :2]),
            "shape of 'fc2.bias': expected (3,), got (2,)",
        ),
        (
            lambda a: with_output(a, "fc2.bias", a.tensors["outputs/fc2.bias"].double()),
            "dtype of 'fc2.bias'",
        ),
        (
            lambda a: with_output(a, "fc2.bias", a.tensors["outputs/fc2.bias"] * torch.nan),
            "'fc2.bias' is not finite",
        ),
        (lambda a: with_output(a, "more", a.tensors["outputs/fc2.bias"]), "names: expected"),
        (
            lambda a: Message({**a.header, "clients": [0, 0]}, a.tensors),
            "does not match the request",
        ),
        (
            lambda a: Message({**a.header, "clients": [0, 9]}, a.tensors),
            "does not match the request",
        ),
        (lambda a: Message({"clients": [], "failures": []}), "did not answer for it"),
        (lambda a: Message({"rejected": "RuntimeError: boom"}), "RuntimeError: boom"),
    ],
)
def test_a_wrong_answer_affects_only_its_own_node(
    ragged: Clients,
    context: NodeContext,
    local: LocalTraining,
    change: Callable[[Message], Message],
    reason: str,
) -> None:
    fed = Remote(ragged, context, nodes=3)
    tampered(fed, "node-1", change)
    results = train(fed, local, everyone(ragged))
    assert results.ids.tolist() == [0, 2, 3, 5]
    assert all(reason in failure.reason for failure in results.failures)
    assert [failure.client for failure in results.failures] == [1, 4]


def test_a_client_whose_data_break_the_program_fails_alone(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    """Client 4 has a label without an output of the model."""
    y = ragged.y.clone()
    y[ragged.train[4]] = 77
    fed = Remote(replace(ragged, y=y), context)
    results = train(fed, local, everyone(ragged))
    assert results.ids.tolist() == [0, 1, 2, 3, 5]
    assert [failure.client for failure in results.failures] == [4]


def test_a_client_that_fails_does_not_train_the_others_twice(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    """Local: the model of a client is its state. Client 4 has a label without an output."""
    method, y = Local().with_local_config(local), ragged.y.clone()
    y[ragged.train[4]] = 77
    broken, clean = (Remote(data, context, chunk=1) for data in (replace(ragged, y=y), ragged))
    others = torch.tensor([0, 1, 2, 3, 5])
    for fed, ids in ((broken, everyone(ragged)), (clean, others)):
        fed.init_client_state(method.initial_client_state(local.objective.params()))
        state = method.init(fed, local.objective.params(), 0)
        fed.client_state.commit(0)
        for number in (1, 2):
            state = method.round(fed, state, ids, key=number)
            fed.client_state.commit(number)
    expected = clean.read(others)
    for name, value in broken.read(others).items():
        assert torch.equal(value, expected[name])


def test_state_of_a_transaction_without_answer_does_not_count(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    method = SCAFFOLD().with_local_config(local)
    late, never = Remote(ragged, context), Remote(ragged, context)
    for fed in (late, never):
        fed.init_client_state(method.initial_client_state(context.objective.params()))
    state = method.init(late, context.objective.params(), key=0)
    late.client_state.commit(0)
    never.client_state.commit(0)
    late.in_process.is_lost = lambda node, message: node == "node-1"
    one = method.round(late, state, everyone(ragged), key=1)
    late.client_state.commit(1)
    late.in_process.is_lost = lambda node, message: False
    other = method.round(never, state, torch.tensor([0, 2, 4]), key=1)
    never.client_state.commit(1)
    ends = [
        method.round(fed, state, everyone(ragged), key=2)
        for fed, state in ((late, one), (never, other))
    ]
    for name, value in ends[0].models.items():
        torch.testing.assert_close(value, ends[1].models[name])


def test_a_server_that_crashed_in_a_round_resumes_from_the_state_before_it(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    method = SCAFFOLD().with_local_config(local)
    undisturbed, first = Remote(ragged, context), Remote(ragged, context)
    states = []
    for fed in (undisturbed, first):
        fed.init_client_state(method.initial_client_state(context.objective.params()))
        state = method.init(fed, context.objective.params(), key=0)
        fed.client_state.commit(0)
        states.append(method.round(fed, state, everyone(ragged), key=1))
        fed.client_state.commit(1)
    method.round(
        first, states[1], everyone(ragged), key=2
    )  # and the server crashes before it has committed
    second = Remote(ragged, context)
    for name, node in second.in_process.connected.items():
        node.state_store = first.in_process.connected[name].state_store
    second.init_client_state(method.initial_client_state(context.objective.params()))
    second.client_state.restore(first.client_state.tensors(), 1)
    expected = method.round(undisturbed, states[0], everyone(ragged), key=2)
    results = method.round(second, states[1], everyone(ragged), key=2)
    for name, value in expected.models.items():
        assert torch.equal(value, results.models[name])


def test_messages_and_checkpoints_name_only_the_transactions_to_which_the_server_may_return(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    """After ten rounds it returns to the third, which was the best one."""
    method, ids = Local().with_local_config(local), everyone(ragged)
    fed, short = Remote(ragged, context), Remote(ragged, context)
    for each, rounds in ((short, 3), (fed, 10)):
        each.init_client_state(method.initial_client_state(context.objective.params()))
        state = method.init(each, context.objective.params(), key=0)
        each.client_state.commit(0)
        for number in range(1, rounds + 1):
            state = method.round(each, state, ids, key=number)
            each.client_state.commit(number)
            if number == 3:
                best = each.client_state.tensors()
                each.client_state.retain(best)
    committed = [
        m.header["committed"]
        for sent in fed.in_process.sent
        for m in sent.values()
        if "committed" in m.header
    ]
    assert max(len(names) for names in committed) == 3
    assert len(fed.client_state.tensors()["committed"]) < 1.6 * len(best["committed"])
    resumed = Remote(ragged, context)
    for name, node in resumed.in_process.connected.items():
        node.state_store = fed.in_process.connected[name].state_store
    resumed.init_client_state(method.initial_client_state(context.objective.params()))
    resumed.client_state.restore(fed.client_state.tensors(), 10)
    resumed.client_state.retain(best)
    method.round(resumed, state, ids, key=11)
    resumed.client_state.commit(11)
    expected = short.read(ids)
    resumed.client_state.restore(best, 3)
    for name, value in resumed.read(ids).items():
        assert torch.equal(value, expected[name])


def test_a_message_that_a_node_gets_again_starts_from_the_state_before_it(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    """The process of node-1 ends after it has saved its state and before it has answered."""
    method = SCAFFOLD().with_local_config(local)
    once, twice = Remote(ragged, context), Remote(ragged, context)
    node = twice.in_process.connected["node-1"]
    honest = node.answer
    node.answer = lambda message: (honest(message), honest(message))[1]  # type: ignore[method-assign]
    ends = []
    for fed in (once, twice):
        fed.init_client_state(method.initial_client_state(context.objective.params()))
        state = method.init(fed, context.objective.params(), key=0)
        fed.client_state.commit(0)
        for number in (1, 2):
            state = method.round(fed, state, everyone(ragged), key=number)
            # A second message in the same transaction starts from the state after the first.
            state = method.round(fed, state, everyone(ragged), key=number + 10)
            fed.client_state.commit(number)
        ends.append((state, fed.read(everyone(ragged))))
    (one, one_kept), (other, other_kept) = ends
    for name, value in one.models.items():
        assert torch.equal(value, other.models[name])
    for name, value in one_kept.items():
        assert torch.equal(value, other_kept[name])


def test_the_last_evaluation_delivers_the_models(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed, ids = Remote(ragged, context), everyone(ragged)
    params = {name: value[None] for name, value in local.objective.params().items()}
    assignment = ModelAssignment(params, torch.zeros_like(ids))
    broken = fed.in_process.connected["node-1"].state_store
    save, failing = broken.save_models, [True]

    def save_models(names: list[str], models: Tree) -> None:
        if failing.pop() if failing else False:
            raise OSError("disk full")
        save(names, models)

    broken.save_models = save_models  # type: ignore[method-assign]
    request = EvalRequest(local.objective, {}, "train")
    (values,) = fed.evaluate(assignment, ids, [request], deliver=Delivery())
    assert not values["loss"].isnan().any()  # a full disk costs no evaluation
    fed.in_process.sent.clear()
    fed.push_final_models(assignment, ids)
    # Only the node that could not save the models gets them again.
    assert [sorted(messages) for messages in fed.in_process.sent] == [["node-1"]]
    for node in fed.in_process.connected.values():
        assert isinstance(node.state_store, InMemoryStateStore)
        assert sorted(node.state_store.models) == sorted(node.names)
    fed.evaluate(assignment, ids, [request])
    fed.in_process.sent.clear()
    fed.push_final_models(assignment, ids)  # of an evaluation that was not the last
    assert [sorted(messages) for messages in fed.in_process.sent] == [["node-0", "node-1"]]


def evaluate_with_next(fed: Remote, local: LocalTraining, ids: torch.Tensor) -> list[Tree]:
    """The list to which the values are added."""
    params = {name: value[None] for name, value in local.objective.params().items()}
    done: list[Tree] = []
    fed.evaluate_with_next(
        ModelAssignment(params, torch.zeros_like(ids)),
        ids,
        [EvalRequest(local.objective, {}, "train")],
        0,
        lambda values: done.extend(values),
    )
    return done


def test_an_evaluation_travels_with_the_next_training(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    """Node 1 has no client in the cohort: its message is the evaluation alone."""
    alone, joined = Remote(ragged, context), Remote(ragged, context)
    ids, cohort = everyone(ragged), torch.tensor([0, 2])
    params = {name: value[None] for name, value in local.objective.params().items()}
    request = EvalRequest(local.objective, {}, "train")
    (expected,) = alone.evaluate(ModelAssignment(params, torch.zeros_like(ids)), ids, [request])
    results = train(alone, local, cohort)
    traffic = replace(alone.traffic)
    done = evaluate_with_next(joined, local, ids)
    joined.in_process.sent.clear()
    both = train(joined, local, cohort)
    (messages,) = joined.in_process.sent
    kinds = {node: message.header["kind"] for node, message in messages.items()}
    assert kinds == {"node-0": "map", "node-1": "evaluate"}
    size = sum(value.numel() * 4 for value in local.objective.params().values())
    assert [message.nbytes for message in messages.values()] == [size, size]  # the model once
    assert torch.equal(done[0]["loss"], expected["loss"])
    assert not done[0]["loss"].isnan().any()
    for name, value in results.outputs.items():
        assert torch.equal(both.outputs[name], value)
    assert joined.traffic.down == size  # of the training only
    assert (traffic.down - joined.traffic.down, joined.traffic.up) == (2 * size, 2 * size)


def test_an_evaluation_after_which_nothing_is_trained_is_sent_alone(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, context)
    done = evaluate_with_next(fed, local, everyone(ragged))
    fed.in_process.sent.clear()
    fed.finish_evaluation()
    fed.finish_evaluation()  # nothing is left
    assert [
        [message.header["kind"] for message in messages.values()]
        for messages in fed.in_process.sent
    ] == [["evaluate", "evaluate"]]
    assert not done[0]["loss"].isnan().any()


def test_an_evaluation_uses_the_state_from_before_the_training_in_its_message(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    """Local: the model of a client is its state."""
    fed, ids = Remote(ragged, context), everyone(ragged)
    method = Local().with_local_config(local)
    fed.init_client_state(method.initial_client_state(local.objective.params()))
    state = method.init(fed, local.objective.params(), 0)
    before = [
        fed.evaluate(
            method.assign_models(state, ids),
            ids,
            [request := EvalRequest(local.objective, {}, "train")],
        )[0]["loss"]
    ]
    done: list[Tree] = []
    for round_number in (1, 2):
        fed.evaluate_with_next(
            method.assign_models(state, ids), ids, [request], 0, lambda values: done.extend(values)
        )
        state = method.round(fed, state, ids, round_number)
        fed.client_state.commit(round_number)
        before += [fed.evaluate(method.assign_models(state, ids), ids, [request])[0]["loss"]]
    assert [value["loss"].tolist() for value in done] == [value.tolist() for value in before[:2]]
    assert not torch.equal(before[0], before[1])
    assert not torch.equal(before[1], before[2])


@pytest.mark.parametrize("part", [None, [1], {"rejected": "no"}, {}])
def test_a_wrong_evaluation_costs_no_training(
    ragged: Clients, context: NodeContext, local: LocalTraining, part: object
) -> None:
    fed, ids = Remote(ragged, context), everyone(ragged)

    def change(message: Message) -> Message:
        tensors = {n: v for n, v in message.tensors.items() if not n.startswith(f"{PART}/")}
        return Message({**message.header, PART: part}, tensors)

    done = evaluate_with_next(fed, local, ids)
    tampered(fed, "node-1", change)
    assert train(fed, local, ids).ids.tolist() == ids.tolist()
    assert done[0]["loss"].isnan().tolist() == [False, True] * 3
    assert [failure.client for failure in fed.pop_failures()] == [1, 3, 5]


def test_an_evaluation_that_fails_costs_no_training(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed, ids = Remote(ragged, context), everyone(ragged)

    def evaluate(*given: object) -> None:
        raise RuntimeError("out of memory")

    node = fed.in_process.connected["node-1"]
    node.simulator.evaluate = evaluate  # type: ignore[assignment]
    done = evaluate_with_next(fed, local, ids)
    assert train(fed, local, ids).ids.tolist() == ids.tolist()
    assert done[0]["loss"].isnan().tolist() == [False, True] * 3
    reasons = {failure.reason for failure in fed.pop_failures()}
    assert reasons == {"RuntimeError (its text is in the log of the node)"}


def test_an_evaluation_without_answer_leaves_the_state_of_its_clients(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed, ids = Remote(ragged, context), everyone(ragged)
    method = SCAFFOLD().with_local_config(local)
    fed.init_client_state(method.initial_client_state(local.objective.params()))
    state = method.init(fed, local.objective.params(), 0)
    fed.in_process.is_lost = lambda node, message: message.header["kind"] == "evaluate"
    fed.evaluate(method.assign_models(state, ids), ids, [EvalRequest(local.objective, {}, "train")])
    method.round(fed, state, ids, 1)
    fed.client_state.commit(1)
    assert fed.client_state.committed_at(fed.membership.state_key("node-0"))


def test_a_node_that_has_lost_its_disk_is_reinitialized(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    method = SCAFFOLD().with_local_config(local)
    fed = Remote(ragged, context)
    fed.init_client_state(method.initial_client_state(context.objective.params()))
    state = method.init(fed, context.objective.params(), key=0)
    state = method.round(fed, state, everyone(ragged), key=1)
    fed.client_state.commit(1)
    fed.in_process.connected["node-1"].state_store = InMemoryStateStore()
    method.round(fed, state, everyone(ragged), key=2)
    assert {failure.client for failure in fed.pop_failures()} == {1, 3, 5}
    fed.client_state.commit(2)
    method.round(fed, state, everyone(ragged), key=3)
    assert fed.pop_failures() == []


def test_each_node_saves_its_clients_models(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    method = Local().with_local_config(local)
    fed = Remote(ragged, context)
    fed.init_client_state(method.initial_client_state(context.objective.params()))
    state = method.init(fed, context.objective.params(), key=0)
    state = method.round(fed, state, everyone(ragged), key=1)
    fed.client_state.commit(1)
    rows = method.assign_models(state, everyone(ragged))
    fed.push_final_models(rows, everyone(ragged))
    state_store = fed.in_process.connected["node-1"].state_store
    assert isinstance(state_store, InMemoryStateStore)
    assert sorted(state_store.models) == ["1", "3", "5"]
    expected = rows.gather(fed.read(everyone(ragged)))
    for client in (1, 3, 5):
        for name, value in state_store.models[str(client)].items():
            assert torch.equal(value, expected[name][client])
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "client"):
        fed.models_of(rows, everyone(ragged))


def test_the_server_has_the_models_that_are_not_personal(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    method = FedAvg().with_local_config(local)
    fed = Remote(ragged, context)
    state = method.init(fed, context.objective.params(), key=0)
    results = fed.models_of(method.assign_models(state, everyone(ragged)), everyone(ragged))
    assert all(len(value) == len(ragged) for value in results.values())


def test_of_two_nodes_the_one_whose_answer_has_the_form_of_the_model_is_accepted(
    ragged: Clients, context: NodeContext, local: LocalTraining
) -> None:
    fed = Remote(ragged, context)
    honest = fed.in_process.send_and_receive

    def send_and_receive(messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        answers = honest(messages)
        for node, answer in answers.items():
            assert isinstance(answer, Message)
            if node == "node-0":
                answers[node] = replace(
                    answer, tensors={name: value.double() for name, value in answer.tensors.items()}
                )
        return answers

    fed.in_process.send_and_receive = send_and_receive  # type: ignore[method-assign]
    ids = everyone(ragged)[:2]  # one on each node
    results = fed.map(
        sgd(local),
        ids,
        per_client=ModelAssignment(
            {name: value[None] for name, value in local.objective.params().items()}, ids * 0
        ),
        key=0,
    )
    assert results.ids.tolist() == [1]
    assert [(failure.client, failure.rejected) for failure in results.failures] == [(0, True)]


def test_a_node_with_a_malformed_registration_is_not_used(
    ragged: Clients, context: NodeContext
) -> None:
    fed = Remote(ragged, context)
    honest, notes = fed.in_process.send_and_receive, []
    fed.in_process.connected["node-9"] = fed.in_process.connected["node-0"]

    def send_and_receive(messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        answers = honest(messages)
        hello = answers["node-9"]
        assert isinstance(hello, Message)
        return {
            "node-9": replace(
                hello, header={**hello.header, "names": ["x"], "sizes": [-1], "test_sizes": "no"}
            )
        }

    fed.in_process.send_and_receive = send_and_receive  # type: ignore[method-assign]
    fed.membership.note = notes.append
    before = len(fed.sizes)
    fed.refresh_membership()
    assert len(fed.sizes) == before
    assert len(notes) == 1
    assert notes[0].startswith("node node-9: not used: its registration is malformed (")
