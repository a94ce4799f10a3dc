"""Malformed messages: a node answers every message; a server accepts or rejects every answer."""

from __future__ import annotations

import os
import random
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation as Remote
from fedclade.conformance.in_process_federation import copied
from fedclade.core import LocalTraining
from fedclade.core.federation import ClientResults, ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.program_serialization import NodeContext
from fedclade.engines.remote.messages import Message, NodeError
from fedclade.errors import FedcladeError

CASES = int(os.environ.get("FEDCLADE_FUZZ", "40"))
often = settings(
    max_examples=CASES, deadline=timedelta(seconds=60), suppress_health_check=list(HealthCheck)
)
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    7,
    2**70,
    1e308,
    "",
    "map",
    [],
    [0],
    [99],
    [[0, "a"]],
    {},
    {"a": 1},
    [None],
    "x" * 1000,
]


@pytest.fixture(scope="module")
def remote() -> Remote:
    clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4, seed=0)
    return Remote(clients, NodeContext(Objective(fc.models.Logistic().build(clients.shape, 10))))


def train(fed: Remote) -> ClientResults:
    objective = next(iter(fed.in_process.connected.values())).context.objective
    ids = torch.arange(4)
    models = {name: value[None] for name, value in objective.params().items()}
    return fed.map(
        sgd(LocalTraining(objective)),
        ids,
        per_client=ModelAssignment(models, torch.zeros_like(ids)),
        key=1,
    )


def mangled(message: Message, seed: int) -> Message:
    """The message with something in its header or its tensors changed, removed or added."""
    draw, message = random.Random(seed), copied(message)
    header, tensors = message.header, dict(message.tensors)
    for _ in range(draw.choice((1, 1, 2, 4))):
        inside = header
        while (
            inside
            and draw.random() < 0.5
            and (deeper := [value for value in inside.values() if isinstance(value, dict)])
        ):
            inside = draw.choice(deeper)
        how = draw.randrange(6)
        if how == 0 and inside:
            del inside[draw.choice(list(inside))]
        elif how == 1 and inside:
            inside[draw.choice(list(inside))] = deepcopy(draw.choice(STRANGE))
        elif how == 2:
            inside[draw.choice(("kind", "clients", "more"))] = deepcopy(draw.choice(STRANGE))
        elif how == 3 and tensors:
            del tensors[draw.choice(list(tensors))]
        elif how == 4 and tensors:
            name = draw.choice(list(tensors))
            value = tensors[name]
            strange = [
                value.flatten()[:0],
                value[None],
                value.double(),
                value.long(),
                value * torch.nan,
                value.flatten()[:1],
                torch.tensor(3),
                value + 1e30,
            ]
            tensors[name] = draw.choice(strange)
        else:
            tensors[draw.choice(("outputs/more", "per_client/more", "broadcast/x", "x"))] = (
                torch.zeros(draw.choice(((), (2,), (0, 3))))
            )
    return Message(header, tensors)


@given(seed=st.integers(0, 2**32))
@often
def test_a_node_answers_every_message_and_raises_nothing(remote: Remote, seed: int) -> None:
    remote.in_process.sent.clear()
    train(remote)
    node, message = next(iter(remote.in_process.sent[0].items()))
    answer = remote.in_process.connected[node].answer(mangled(message, seed))
    assert isinstance(answer, Message)
    assert "rejected" in answer.header or "clients" in answer.header or "names" in answer.header


@given(seed=st.integers(0, 2**32))
@often
def test_no_answer_ends_a_round_on_the_server(remote: Remote, seed: int) -> None:
    honest = remote.in_process.send_and_receive

    def send_and_receive(messages: Any) -> dict[str, Message | NodeError]:
        answers = dict(honest(messages))
        bad = answers["node-0"]
        assert isinstance(bad, Message)
        return answers | {"node-0": mangled(bad, seed)}

    remote.in_process.send_and_receive = send_and_receive  # type: ignore[method-assign]
    try:
        results = train(remote)
    except FedcladeError as error:
        pytest.fail(f"one bad node ended the round: {error}")
    finally:
        remote.in_process.send_and_receive = honest  # type: ignore[method-assign]
    on_honest_node = {
        number
        for number, record in enumerate(remote.membership.client_records)
        if record.node == "node-1"
    }
    answered = set(results.ids.tolist())
    assert on_honest_node <= answered
    assert answered | {failure.client for failure in results.failures} == {0, 1, 2, 3}
    assert all(bool(value.isfinite().all()) for value in results.outputs.values())
