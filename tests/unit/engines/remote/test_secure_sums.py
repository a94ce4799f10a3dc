"""Secure sums on nodes in this process: the models of the simulator, drop-outs, and attacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation, InProcessTransport
from fedclade.conformance.method_run import MethodRun
from fedclade.core.federation import ClientResults, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.pytree import Tree, stack
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.membership import Membership
from fedclade.engines.remote.messages import Message
from fedclade.engines.remote.node import Node
from fedclade.engines.remote.node_policy import NodePolicy
from fedclade.engines.remote.secure_messages import COUNTS
from fedclade.engines.remote.secure_node import SecureNode
from fedclade.engines.remote.secure_sums import SecureCall
from fedclade.methods.base import Method
from fedclade.privacy.secure_sum.fixed_point import Words, decode
from fedclade.privacy.secure_sum_federation import SecureSumFederation

METHODS: dict[str, Method] = {
    "fedavg": fc.FedAvg(),
    "scaffold": fc.SCAFFOLD(),
    "ifca": fc.IFCA(clusters=2),
    "fedem": fc.FedEM(components=2),
    "clade_groups": fc.CladeGroups(),
    "clade": fc.Clade(),
    "lg_fedavg": fc.LGFedAvg(),
}
EVERYONE = torch.arange(20)


def secure_run(method: Method, clients: Clients, engine: str, **options: Any) -> MethodRun:
    run = MethodRun(method, engine, clients, **options)  # type: ignore[arg-type]
    run.view = SecureSumFederation(run.fed)
    return run


def transport(run: MethodRun) -> InProcessTransport:
    assert isinstance(run.fed, InProcessFederation)
    return run.fed.in_process


def kinds(run: MethodRun, kind: str) -> list[Message]:
    sent = transport(run).sent
    return [m for messages in sent for m in messages.values() if m.header["kind"] == kind]


def same_models(first: State, second: State) -> bool:
    return all(torch.equal(value, second.models[name]) for name, value in first.models.items())


@pytest.mark.parametrize("name", METHODS)
def test_the_models_are_those_of_the_simulator(name: str, small_digits: Clients) -> None:
    """To the byte: the simulator omits the masks, and nothing else."""
    states = []
    for engine, options in (("simulator", {}), ("remote", {"nodes": 4})):
        run = secure_run(METHODS[name], small_digits, engine, **options)
        states.append(run.rounds(run.init(), EVERYONE, EVERYONE[3:], EVERYONE[::2]))
    assert same_models(*states)
    assert torch.equal(states[0].cluster_ids, states[1].cluster_ids)


@pytest.mark.parametrize("name", ["scaffold", "lg_fedavg"])
def test_a_node_that_only_took_part_in_the_masks_keeps_the_state_of_its_clients(
    name: str, small_digits: Clients
) -> None:
    """Its clients are not in the cohort of four rounds."""
    cohort = EVERYONE[EVERYONE % 4 != 3]
    states = []
    for engine, options in (("simulator", {}), ("remote", {"nodes": 4})):
        run = secure_run(METHODS[name], small_digits, engine, **options)
        states.append(run.rounds(run.init(), EVERYONE, cohort, cohort, cohort, cohort, EVERYONE))
    assert same_models(*states)


def test_keys_are_agreed_once_and_a_round_has_two_exchanges(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4)
    state = run.init()
    transport(run).sent.clear()
    for number in (1, 2, 3):
        state = run.round(state, number, EVERYONE)
    kinds_sent = [{m.header["kind"] for m in messages.values()} for messages in transport(run).sent]
    assert kinds_sent == [{"secure_keys"}, {"secure_deal"}] + 3 * [
        {"secure_map"},
        {"secure_reveal"},
    ]


def test_no_answer_has_a_model_in_clear(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4)
    answers: list[Message] = []
    node = transport(run).connected["node-0"]
    answer = node.answer
    node.answer = lambda message: answers.append(answer(message)) or answers[-1]  # type: ignore
    run.round(run.init(), 1, EVERYONE)
    masked = [value for m in answers for name, value in m.tensors.items() if "masked" in name]
    assert len(masked) == 1
    assert not any(name.startswith("outputs") for m in answers for name in m.tensors)
    # The top byte of a number in fixed point is 0 or 255; that of a masked one is anything.
    assert len((masked[0].view(torch.uint8)[7::8]).unique()) > 100


def test_the_sizes_are_read_once_in_a_call(
    small_digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a tensor of all clients, which is made each time."""
    run, reads = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4), list[int]()
    sizes = Membership.sizes.fget
    assert sizes is not None
    counted = property(lambda membership: reads.append(0) or sizes(membership))
    monkeypatch.setattr(Membership, "sizes", counted)
    a_map(run)
    assert len(reads) == 1


@pytest.mark.parametrize("lost", ["secure_map", "secure_reveal"])
@pytest.mark.parametrize("name", ["fedavg", "clade_groups", "ifca", "scaffold"])
def test_with_two_of_ten_nodes_lost_it_is_the_sum_of_the_others(
    name: str, lost: str, small_digits: Clients
) -> None:
    gone = {"node-1", "node-7"}
    run = secure_run(METHODS[name], small_digits, "remote", nodes=10)
    state = run.init()
    before = state
    transport(run).is_lost = lambda node, m: node in gone and m.header["kind"] == lost
    state = run.round(state, 1, EVERYONE)
    absent = {1, 11, 7, 17} if lost == "secure_map" else set()

    def fault(key: int, client: int, reply: Tree) -> Tree | None:
        return None if client in absent and active[0] else reply

    active = [False]
    other = MethodRun(METHODS[name], "simulator", small_digits, faults=fault)
    other.view = SecureSumFederation(other.fed)
    expected = other.init()
    active[0] = True
    expected = other.round(expected, 1, EVERYONE)
    assert same_models(state, expected)
    assert not same_models(state, before)
    # The next round has everybody again.
    transport(run).is_lost = lambda node, m: False
    active[0] = False
    # A client without an answer has lost what it computed; client state differs there.
    if name != "scaffold":
        assert same_models(run.round(state, 2, EVERYONE), other.round(expected, 2, EVERYONE))


def a_map(run: MethodRun, **changed: Any) -> ClientResults:
    """A call with two groups."""
    reduce = SegmentSum(
        torch.ones(20), 2, torch.arange(20) % 2, robust_ok=True, fixed_point=True, min_clients=3
    )
    return run.fed.map(
        sgd(run.method.local),
        EVERYONE,
        per_client=ModelAssignment.all_same(stack([run.params]), 20),
        key=1,
        reduce=replace(reduce, **changed),
    )


def test_too_few_nodes_give_no_sum(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    transport(run).is_lost = lambda node, m: (
        node in ("node-1", "node-2") and m.header["kind"] == "secure_map"
    )
    results = a_map(run)
    assert not len(results.ids)
    assert not results.sums
    assert len(results.failures) == 20
    assert "3 parties answered" in results.failures[0].reason
    transport(run).is_lost = lambda node, m: False
    assert len(a_map(run).ids) == 20


def test_a_node_that_restarts_gets_new_keys(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    key = b"the key on its disk".ljust(32)
    transport(run).connected["node-3"].secure = SecureNode(key)
    first = a_map(run)
    transport(run).connected["node-3"].secure = SecureNode(key)
    second = a_map(run)  # its deal is unknown to it
    assert len(second.ids) == 16
    third = a_map(run)
    assert len(third.ids) == 20
    assert torch.equal(first.sums["fc1.weight"], third.sums["fc1.weight"])


@pytest.mark.parametrize("is_away", [False, True])
def test_nodes_that_die_in_a_sum_and_restart_do_not_spoil_the_next(
    is_away: bool, small_digits: Clients
) -> None:
    """One dies before its vector is sent, and one before it reveals; then the server has its next
    deal.
    """
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=10)
    keys = {name: name.encode().ljust(32) for name in ("node-1", "node-7")}

    def restart() -> None:
        for name, key in keys.items():
            transport(run).connected[name].secure = SecureNode(key)

    restart()
    whole = a_map(run)
    dies_at = {"node-1": "secure_map", "node-7": "secure_reveal"}
    transport(run).is_lost = lambda node, m: dies_at.get(node) == m.header["kind"]
    assert len(a_map(run).ids) == 18
    restart()
    transport(run).is_lost = lambda node, m: (
        is_away and node == "node-1" and m.header["kind"] in ("secure_keys", "secure_map")
    )
    less = a_map(run)
    assert len(less.ids) == (18 if is_away else 20)
    transport(run).is_lost = lambda node, m: False
    again = a_map(run)
    assert torch.equal(again.sums["fc1.weight"], whole.sums["fc1.weight"])


def test_a_node_with_another_key_is_not_accepted(small_digits: Clients) -> None:
    """The server could have invented it."""
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    a_map(run)
    transport(run).connected["node-3"].secure = SecureNode()
    a_map(run)
    results = a_map(run)
    assert not len(results.ids)
    assert "1 of 5 nodes are ready" in results.failures[0].reason


def test_nodes_confirm_who_dropped_out_before_they_reveal_keys(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    whole = a_map(run)
    assert not kinds(run, "secure_confirm")
    transport(run).is_lost = lambda node, m: (node, m.header["kind"]) == ("node-4", "secure_map")
    transport(run).sent.clear()
    less = a_map(run)
    assert len(less.ids) == 16 < len(whole.ids)
    assert len(kinds(run, "secure_confirm")) == 4
    # Without the signatures of four of five nodes there is no sum.
    transport(run).is_lost = lambda node, m: (
        (node, m.header["kind"]) in (("node-4", "secure_map"), ("node-2", "secure_confirm"))
    )
    results = a_map(run)
    assert not len(results.ids)
    assert "0 revealed their shares" in results.failures[0].reason


def test_a_small_group_is_never_unmasked(small_digits: Clients) -> None:
    """Group 1 has clients 1, 3 and 5; client 5's node is lost."""
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=10)
    segments = torch.zeros(20, dtype=torch.int64)
    segments[torch.tensor([1, 3, 5])] = 1
    whole = a_map(run, segment_ids=segments)
    assert whole.total_weight.tolist() == [17.0, 3.0]
    transport(run).is_lost = lambda node, m: node == "node-5"
    transport(run).sent.clear()
    less = a_map(run, segment_ids=segments)
    assert less.total_weight.tolist() == [16.0, 0.0]
    assert not less.sums["fc1.weight"][1].any()
    assert all(m.header["groups"] == ["0"] for m in kinds(run, "secure_reveal"))


def test_of_a_group_that_few_chose_only_their_number_is_unmasked(
    small_digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its total weight would show who they are, because the server has the clients' sizes."""
    unmasked: dict[str, Words] = {}
    unmask = SecureCall.unmask

    def note(call: SecureCall, groups: Any, send: Any) -> dict[str, Words]:
        sums = unmask(call, groups, send)
        unmasked.update(sums)
        return sums

    monkeypatch.setattr(SecureCall, "unmask", note)
    run = secure_run(fc.IFCA(clusters=15), small_digits, "remote", nodes=4)
    run.round(run.init(), 1, EVERYONE)
    counts = decode(unmasked.pop(COUNTS))
    assert len(counts) == 15
    assert counts.sum() == 20
    assert unmasked.keys() == {str(group) for group in range(15) if counts[group] >= 3}
    assert (counts[counts < 3] > 0).any()


def test_a_number_that_is_too_large_costs_its_client_only(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4)
    weights = torch.ones(20, dtype=torch.float64)
    weights[6] = 1e12
    results = a_map(run, weights=weights)
    assert [failure.client for failure in results.failures] == [6]
    assert "too large for a secure sum" in results.failures[0].reason
    assert results.total_weight.sum() == 19


Change = Callable[[Message], Message]


def _longer(answer: Message) -> Message:
    tensors = {
        name: torch.cat([value, value[:1]]) if name.startswith("masked/") else value
        for name, value in answer.tensors.items()
    }
    return replace(answer, tensors=tensors)


def _floats(answer: Message) -> Message:
    tensors = {
        name: value.double() if name.startswith("masked/") else value
        for name, value in answer.tensors.items()
    }
    return replace(answer, tensors=tensors)


def _no_vector(answer: Message) -> Message:
    return replace(answer, tensors={})


def _other_outputs(answer: Message) -> Message:
    return replace(answer, header=answer.header | {"summed": [["x", [3]]]})


@pytest.mark.parametrize("change", [_longer, _floats, _no_vector, _other_outputs])
def test_a_node_that_lies_costs_itself_only(change: Change, small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    honest = a_map(run)
    node = transport(run).connected["node-2"]
    answer = node.answer

    def lie(message: Message) -> Message:
        reply = answer(message)
        return change(reply) if message.header["kind"] == "secure_map" else reply

    node.answer = lie  # type: ignore[method-assign]
    results = a_map(run)
    assert set(results.ids.tolist()) == {c for c in range(20) if c % 5 != 2}
    assert {failure.client for failure in results.failures} == {2, 7, 12, 17}
    assert results.total_weight.tolist() == [8.0, 8.0]
    assert not torch.equal(honest.sums["fc1.weight"], results.sums["fc1.weight"])
    node.answer = answer  # type: ignore[method-assign]
    assert torch.equal(a_map(run).sums["fc1.weight"], honest.sums["fc1.weight"])


def _tampered(run: MethodRun, name: str, kind: str, change: Change) -> None:
    """The server changes what it sends to a node."""
    node = transport(run).connected[name]
    answer = node.answer

    def receive(message: Message) -> Message:
        return answer(change(message) if message.header["kind"] == kind else message)

    node.answer = receive  # type: ignore[method-assign]


def _with_lists(answered: list[str], dropped: list[str]) -> Change:
    return lambda message: replace(
        message, header=message.header | {"answered": answered, "dropped": dropped}
    )


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("secure_reveal", _with_lists([f"node-{i}" for i in range(5)], ["node-4"])),
        ("secure_reveal", _with_lists(["node-0"], [f"node-{i}" for i in range(1, 5)])),
        ("secure_reveal", _with_lists([], [])),
    ],
)
def test_a_node_refuses_false_lists(kind: str, change: Change, small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    refusals: list[str] = []
    _tampered(run, "node-0", kind, change)
    node = transport(run).connected["node-0"]
    answer = node.answer

    def note(message: Message) -> Message:
        reply = answer(message)
        refusals.extend([reply.header["rejected"]] if "rejected" in reply.header else [])
        return reply

    node.answer = note  # type: ignore[method-assign]
    assert len(a_map(run).ids) == 20  # four of five nodes are enough
    assert len(refusals) == 1
    assert refusals[0].startswith("secure sum: ")


def test_a_node_refuses_keys_that_it_does_not_trust(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4)
    node = transport(run).connected["node-0"]
    node.secure = SecureNode(trusted=[b"another"])
    results = a_map(run)
    assert {c % 4 for c in results.ids.tolist()} <= {1, 2, 3}


def _first_refusal(run: MethodRun, policy: NodePolicy) -> str:
    """What node-0 with this policy answers to a sum that other nodes take part in."""
    node, refusals = transport(run).connected["node-0"], [""]
    node.policy, answer = policy, node.answer

    def note(message: Message) -> Message:
        reply = answer(message)
        refusals.extend([reply.header["rejected"]] if "rejected" in reply.header else [])
        return reply

    node.answer = note  # type: ignore[method-assign]
    a_map(run)
    return refusals[-1]


def test_a_node_refuses_sums_of_fewer_clients_than_its_policy_wants(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    assert _first_refusal(run, NodePolicy(min_group=3)) == ""
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    assert "privacy.min_group = 3: this node wants" in _first_refusal(run, NodePolicy(min_group=4))


def _seeming_larger(message: Message) -> Message:
    """The server says that node-0 has ten clients in each group."""
    secure = message.header["secure"]
    session = secure["session"]
    groups = {name: {**each, "node-0": 10} for name, each in session["groups"].items()}
    secure = secure | {"session": session | {"groups": groups}}
    return replace(message, header=message.header | {"secure": secure})


def test_a_node_refuses_a_group_that_seems_larger_than_it_is(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=5)
    _tampered(run, "node-0", "secure_map", _seeming_larger)
    assert "other numbers of this node's clients" in _first_refusal(run, NodePolicy())


@pytest.mark.parametrize("keys", [(), ("fc1.weight",)])
def test_a_node_sends_no_model_in_clear_against_its_policy(
    keys: tuple[str, ...], small_digits: Clients
) -> None:
    """By an ordinary message, or by a secure sum of one layer only."""
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4)
    for node in transport(run).connected.values():
        node.policy = NodePolicy(min_group=3)
    results = a_map(run, keys=keys) if keys else a_map(run, min_clients=0)
    assert not len(results.ids)
    assert {"policy.min_group" in failure.reason for failure in results.failures} == {True}


@pytest.mark.parametrize("name", ["fedavg", "ifca", "clade_groups", "clade"])
def test_methods_work_with_a_policy_for_secure_sums(name: str, small_digits: Clients) -> None:
    states = []
    for policy in (NodePolicy(), NodePolicy(min_group=3)):
        run = secure_run(METHODS[name], small_digits, "remote", nodes=4)
        for node in transport(run).connected.values():
            node.policy = policy
        states.append(run.rounds(run.init(), EVERYONE, EVERYONE[3:]))
    assert same_models(*states)


def test_a_malformed_message_is_refused(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=4)
    a_map(run)
    for kind in ("secure_keys", "secure_deal", "secure_map", "secure_reveal"):
        message = kinds(run, kind)[0]
        node: Node = transport(run).connected["node-0"]
        for name in message.header:
            if name != "kind":
                broken: dict[str, Any] = message.header | {name: {"x": None}}
                reply = node.answer(replace(message, header=broken))
                assert "rejected" in reply.header or name in _NOT_READ, (kind, name)
        assert "rejected" in node.answer(replace(message, tensors={})).header or kind in (
            "secure_keys",
            "secure_deal",
            "secure_reveal",
        )


# Fields that every message has, and that these do not use.
_NOT_READ = {"state_lost", "has_client_state", "party", "confirmations"}


def test_a_simulation_on_nodes_has_no_secure_sums(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=2)
    assert run.fed.has_secure_sums
    simulated = RemoteFederation(transport(run), {}, metadata=small_digits.metadata)
    assert not simulated.has_secure_sums


def test_a_cohort_may_be_any_clients_of_the_nodes(small_digits: Clients) -> None:
    run = secure_run(fc.FedAvg(), small_digits, "remote", nodes=3)
    simulated = secure_run(fc.FedAvg(), small_digits, "simulator")
    cohort: Tensor = torch.tensor([0, 4, 5, 9, 13, 19])
    first, second = (r.round(r.init(), 1, cohort) for r in (run, simulated))
    assert same_models(first, second)
