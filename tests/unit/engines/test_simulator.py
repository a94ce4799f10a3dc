"""The simulator: chunks, order and other clients do not change a client's bytes; poisoned and
absent replies are excluded; an evaluation equals that of a plain loop.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedclade.core.batching import Batches, make_plan
from fedclade.core.federation import ClientResults, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.losses import accuracy
from fedclade.core.output_metric import OutputMetric
from fedclade.core.program import Program, chain, without_steps
from fedclade.core.pytree import Tree, add_prefix, nbytes, stack, strip_prefix
from fedclade.core.rng import client_keys, fold_in
from fedclade.data import Clients, from_arrays
from fedclade.engines.base import EvalRequest
from fedclade.engines.device import pick_device
from fedclade.engines.simulator import Faults, Simulator
from fedclade.errors import InvalidInputError, VectorizationError
from fedclade.models import MLP, LeNet5, Logistic, ModelSpec, SmallCNN
from fedclade.programs.evaluation import evaluate_metrics

SIZES = (5, 1, 40, 2, 23, 11)  # of `ragged`; the engine runs them as 2, 4, 5, 0, 3, 1
EVERYONE = torch.arange(6)
CHUNKS = [1, 2, 3, 4, 5, 6, 7, None]


def objective_of(spec: ModelSpec, shape: tuple[int, ...] = (6,), classes: int = 3) -> Objective:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Objective(spec.build(shape, classes))


def local_of(objective: Objective, **settings: float) -> LocalTraining:
    chosen = {
        "lr": 0.1,
        "batch_size": 4,
        "epochs": 2,
        "momentum": 0.9,
        "weight_decay": 0.01,
    } | settings
    return LocalTraining(objective, **chosen)  # type: ignore[arg-type]


def one_for_all(objective: Objective, count: int = 6) -> ModelAssignment:
    return ModelAssignment(stack([objective.params()]), torch.zeros(count, dtype=torch.int64))


def apart(objective: Objective, count: int = 6) -> ModelAssignment:
    """A different model for each client."""
    rows = {
        name: torch.stack([value * (1 + 0.1 * row) for row in range(count)])
        for name, value in objective.params().items()
    }
    return ModelAssignment(rows, torch.arange(count))


def stateful_sgd(local: LocalTraining) -> Program:
    """SGD on the model in the client's state. It replies with the weights before and after
    training.
    """
    train = sgd(local)

    def start(broadcast: Tree, params: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        _, carry = train.start(broadcast, client_state, {})
        return client_state, carry

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        weights, _ = train.finish(broadcast, const, carry)
        return add_prefix("after", weights) | add_prefix("before", const), weights

    return replace(train, start=start, finish=finish, name="stateful_sgd")


def equal(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def rows_of(tree: Tree, rows: Tensor) -> Tree:
    return {name: value[rows] for name, value in tree.items()}


# Chunks, order, other clients

EXACT = [Logistic(), MLP(8), MLP((8, 5), dropout=0.5)]
exact = pytest.mark.parametrize("spec", EXACT, ids=["logistic", "mlp", "mlp-dropout"])


@exact
def test_chunks_change_no_bit_of_replies_and_client_state(ragged: Clients, spec: ModelSpec) -> None:
    objective = objective_of(spec)

    def two_rounds(chunk: int | None) -> Tree:
        fed = Simulator(ragged, chunk=chunk)
        fed.init_client_state(objective.params())
        replies: Tree = {}
        for number, cohort in enumerate(([0, 1, 2, 3, 4, 5], [3, 2, 0, 4]), start=1):
            actual = fed.map(stateful_sgd(local_of(objective)), torch.tensor(cohort), key=number)
            assert actual.ids.tolist() == cohort
            fed.client_state.commit(number)
            replies |= add_prefix(f"replies {number}", actual.outputs)
        return replies | add_prefix("state", fed.client_state.tensors())

    expected = two_rounds(1)
    assert expected["state/ids"].tolist() == EVERYONE.tolist()
    assert all(equal(two_rounds(chunk), expected) for chunk in CHUNKS[1:])


@exact
def test_chunks_change_no_bit_of_the_sums(ragged: Clients, spec: ModelSpec) -> None:
    objective = objective_of(spec)
    reduce = SegmentSum(
        segment_ids=torch.tensor([0, 1, 0, 1, 1, 0]), weights=torch.tensor(SIZES), num_segments=2
    )

    def sums(chunk: int | None) -> Tree:
        actual = Simulator(ragged, chunk=chunk).map(
            sgd(local_of(objective)), EVERYONE, per_client=apart(objective), key=5, reduce=reduce
        )
        assert actual.outputs == {}
        return {"weight": actual.total_weight, **actual.sums}

    expected = sums(1)
    assert all(equal(sums(chunk), expected) for chunk in CHUNKS[1:])


@exact
def test_chunks_change_no_bit_of_an_evaluation(ragged: Clients, spec: ModelSpec) -> None:
    objective = objective_of(spec)
    expected = Simulator(ragged, chunk=1).evaluate(
        apart(objective), EVERYONE, [EvalRequest(objective, {"accuracy": accuracy}, split="train")]
    )[0]
    for chunk in CHUNKS[1:]:
        actual = Simulator(ragged, chunk=chunk).evaluate(
            apart(objective),
            EVERYONE,
            [EvalRequest(objective, {"accuracy": accuracy}, split="train")],
        )[0]
        assert equal(actual, expected)


def test_chunks_change_no_bit_of_a_large_mlp() -> None:
    generator = torch.Generator().manual_seed(0)
    clients = from_arrays(
        [(torch.randn(n, 784, generator=generator), torch.arange(n) % 10) for n in (12, 5, 9)]
    )
    objective = objective_of(MLP(800), (784,), 10)

    def replies(chunk: int) -> Tree:
        fed = Simulator(clients, chunk=chunk)
        return fed.map(
            sgd(local_of(objective, epochs=1)),
            torch.arange(3),
            per_client=one_for_all(objective, 3),
            key=5,
        ).outputs

    expected = replies(1)
    for chunk in (2, 3):
        assert equal(replies(chunk), expected)


@exact
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_the_order_of_ids_changes_no_clients_bytes(
    ragged: Clients, spec: ModelSpec, chunk: int | None
) -> None:
    objective = objective_of(spec)
    order = torch.tensor([3, 0, 5, 2, 1, 4])
    assignment, weight = apart(objective), torch.tensor(SIZES)
    fed = Simulator(ragged, chunk=chunk)
    expected = fed.map(sgd(local_of(objective)), EVERYONE, per_client=assignment, key=5)
    actual = fed.map(sgd(local_of(objective)), order, per_client=assignment[order], key=5)
    assert actual.ids.tolist() == order.tolist()
    assert equal(actual.outputs, rows_of(expected.outputs, order))
    sums, again = (
        fed.map(
            sgd(local_of(objective)),
            ids,
            per_client=assignment[ids],
            key=5,
            reduce=SegmentSum(
                weights=weight[ids], segment_ids=torch.zeros_like(ids), num_segments=1
            ),
        )
        for ids in (EVERYONE, order)
    )
    assert equal(sums.sums, again.sums)


@exact
@pytest.mark.parametrize("some", [[2], [1], [1, 3], [5, 0, 4], [4, 2]])
def test_other_clients_of_a_call_change_no_clients_bytes(
    ragged: Clients, spec: ModelSpec, some: list[int]
) -> None:
    objective, ids = objective_of(spec), torch.tensor(some)
    fed = Simulator(ragged)
    expected = fed.map(sgd(local_of(objective)), EVERYONE, per_client=apart(objective), key=5)
    actual = fed.map(sgd(local_of(objective)), ids, per_client=apart(objective)[ids], key=5)
    assert equal(actual.outputs, rows_of(expected.outputs, ids))


def test_equal_calls_give_equal_bytes_and_another_key_or_name_gives_others(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    program, assignment = sgd(local_of(objective)), one_for_all(objective)
    first = Simulator(ragged).map(program, EVERYONE, per_client=assignment, key=5).outputs
    torch.manual_seed(99)
    assert equal(
        Simulator(ragged).map(program, EVERYONE, per_client=assignment, key=5).outputs, first
    )
    for other in (
        Simulator(ragged).map(program, EVERYONE, per_client=assignment, key=6),
        Simulator(ragged).map(replace(program, name="b"), EVERYONE, per_client=assignment, key=5),
    ):
        assert not torch.equal(other.outputs["fc1.weight"][2], first["fc1.weight"][2])


def test_the_callers_threads_change_no_byte(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    expected = (
        Simulator(ragged)
        .map(sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=5)
        .outputs
    )
    torch.set_num_threads(2)
    try:
        assert equal(
            Simulator(ragged)
            .map(sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=5)
            .outputs,
            expected,
        )
    finally:
        torch.set_num_threads(1)


def trained_by_loop(
    module: nn.Module, clients: Clients, client: int, program: Program, key: int
) -> nn.Module:
    """A client's model after a plain torch loop over the batches of its plan, without padding."""
    module = copy.deepcopy(module)
    local = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    x, y = clients.x[clients.train[client]], clients.y[clients.train[client]]
    plan = make_plan(
        program.batches,
        torch.tensor([len(y)]),
        client_keys(fold_in(key, program.name), torch.tensor([client])),
        len(y),
    )
    for places, valid in zip(plan.position[0, :, 0], plan.valid[0, :, 0], strict=True):
        local.zero_grad()
        F.cross_entropy(module(x[places[:valid]]), y[places[:valid]]).backward()
        local.step()
    return module


@pytest.mark.parametrize("spec", [Logistic(), MLP(8)], ids=["logistic", "mlp"])
@pytest.mark.parametrize("chunk", [1, 4, None])
def test_replies_are_those_of_a_plain_loop_client_by_client(
    ragged: Clients, spec: ModelSpec, chunk: int | None
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = spec.build((6,), 3)
    objective = Objective(module)
    program = sgd(local_of(objective))
    actual = Simulator(ragged, chunk=chunk).map(
        program, EVERYONE, per_client=one_for_all(objective), key=5
    )
    for client in range(6):
        for name, value in trained_by_loop(
            module, ragged, client, program, key=5
        ).named_parameters():
            torch.testing.assert_close(
                actual.outputs[name][client], value.detach(), rtol=0, atol=1e-5
            )


def images(sizes: tuple[int, ...] = (9, 3, 14, 1, 6)) -> Clients:
    generator = torch.Generator().manual_seed(0)
    return from_arrays(
        [
            (
                torch.randn(n, 1, 28, 28, generator=generator),
                torch.randint(0, 10, (n,), generator=generator),
            )
            for n in sizes
        ]
    )


@pytest.mark.parametrize("spec", [SmallCNN(), LeNet5()], ids=["small_cnn", "lenet5"])
def test_chunks_of_a_cnn_agree_within_1e_5(spec: ModelSpec) -> None:
    objective = objective_of(spec, (1, 28, 28), 10)
    program = sgd(local_of(objective, lr=0.05, epochs=1))
    sequential, chunked = (
        Simulator(images(), chunk=chunk).map(
            program, torch.arange(5), per_client=one_for_all(objective, 5), key=5
        )
        for chunk in (1, 4)
    )
    for name, value in sequential.outputs.items():
        torch.testing.assert_close(chunked.outputs[name], value, rtol=0, atol=1e-5)
        assert float((value - objective.params()[name]).abs().max()) > 1e-3


def count_samples() -> Program:
    """Counts real examples and steps, and sums a number that identifies the sample."""

    def start(broadcast: Tree, params: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        return {}, {"count": torch.zeros(3)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return {
            "count": (
                carry["count"]
                + torch.stack(
                    [batch.weight.sum(), torch.ones(()), (batch.x[..., 0] * batch.weight).sum()]
                )
            )
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches(4, epochs=2), "count_samples")


def numbered(sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> Clients:
    """Each sample is its number, from 0 in every client."""
    return from_arrays(
        [(torch.arange(n)[:, None].to(dtype), torch.zeros(n, dtype=torch.int64)) for n in sizes]
    )


@pytest.mark.parametrize("chunk", [1, 3, None])
def test_every_sample_counts_once_per_epoch_and_padding_never(chunk: int | None) -> None:
    actual = (
        Simulator(numbered(), chunk=chunk).map(count_samples(), EVERYONE, key=0).outputs["count"]
    )
    assert actual.tolist() == [[2.0 * n, 2.0 * -(-n // 4), n * (n - 1.0)] for n in SIZES]


def test_batches_in_groups_have_an_axis_for_the_group() -> None:
    """Sizes 1, 4 and 9 in batches of 4 and groups of 2: one, one and two steps per epoch. The last
    group repeats the epoch's first batch.
    """

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        assert batch.x.shape == (2, 4, 1)
        assert batch.weight.shape == batch.y.shape == (2, 4)
        return {
            "count": (
                carry["count"]
                + torch.stack([batch.weight[0].sum(), batch.weight[1].sum(), torch.ones(())])
            )
        }

    program = replace(count_samples(), step=step, batches=Batches(4, group=2))
    actual = Simulator(numbered((1, 4, 9))).map(program, torch.arange(3), key=0).outputs["count"]
    assert actual.tolist() == [[1.0, 1.0, 1.0], [4.0, 4.0, 1.0], [5.0, 8.0, 2.0]]


def test_bytes_are_divided_by_255() -> None:
    """Images stay uint8 in memory."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (7, 1, 4, 4), generator=generator, dtype=torch.uint8)
    y = torch.arange(7) % 3
    objective = objective_of(MLP(5), (1, 4, 4), 3)
    program = sgd(local_of(objective))
    from_bytes, from_floats = (
        Simulator(from_arrays([(x, y)])).map(
            program, torch.tensor([0]), per_client=one_for_all(objective, 1), key=5
        )
        for x in (raw, raw.float() / 255)
    )
    assert equal(from_bytes.outputs, from_floats.outputs)


def test_a_call_without_clients_has_empty_results() -> None:
    objective = objective_of(MLP(8))
    no_ids = torch.empty(0, dtype=torch.int64)
    fed = Simulator(numbered())
    actual = fed.map(
        sgd(local_of(objective)),
        no_ids,
        per_client=one_for_all(objective, 0),
        key=0,
        reduce=SegmentSum(weights=torch.ones(0), segment_ids=no_ids, num_segments=2),
    )
    assert (
        len(actual.ids),
        actual.outputs,
        actual.sums,
        actual.total_weight.tolist(),
        list(actual.failures),
    ) == (
        0,
        {},
        {},
        [0.0, 0.0],
        [],
    )
    assert (fed.traffic.up, fed.traffic.down) == (0, 0)


def test_metrics_can_be_mapped(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    actual = Simulator(ragged).map(
        evaluate_metrics(objective, (("accuracy", accuracy),)),
        EVERYONE,
        per_client=one_for_all(objective),
        key=0,
    )
    assert actual.outputs["examples"].tolist() == list(SIZES)


# Absent and poisoned replies


def only(client: int, fault: Callable[[Tree], Tree | None]) -> Faults:
    """This fault for this client, and unchanged replies from all others."""
    return lambda key, sender, reply: fault(reply) if sender == client else reply


def with_nan(reply: Tree) -> Tree:
    poisoned = reply["fc1.weight"].clone()
    poisoned[0, 0] = math.nan
    return reply | {"fc1.weight": poisoned}


FAULTS: dict[str, tuple[Callable[[Tree], Tree | None], str]] = {
    "absent": (lambda reply: None, "no answer"),
    "nan": (with_nan, "'fc1.weight' is not finite"),
    "inf": (
        lambda reply: reply | {"fc1.bias": torch.full((8,), math.inf)},
        "'fc1.bias' is not finite",
    ),
    "shape": (
        lambda reply: reply | {"fc1.bias": torch.zeros(7)},
        "shape of 'fc1.bias': expected (8,), got (7,)",
    ),
    "dtype": (
        lambda reply: reply | {"fc1.bias": torch.zeros(8).double()},
        "dtype of 'fc1.bias': expected torch.float32, got torch.float64",
    ),
    "extra name": (
        lambda reply: reply | {"more": torch.zeros(1)},
        "got ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight', 'more']",
    ),
    "missing name": (
        lambda reply: {name: value for name, value in reply.items() if name != "fc2.bias"},
        "got ['fc1.bias', 'fc1.weight', 'fc2.weight']",
    ),
}
every_fault = pytest.mark.parametrize("fault", FAULTS)


@every_fault
@pytest.mark.parametrize(("client", "chunk"), [(2, 2), (5, None), (1, 2)])
def test_a_rejected_reply_is_only_in_the_failures_with_its_reason(
    ragged: Clients, fault: str, chunk: int | None, client: int
) -> None:
    objective = objective_of(MLP(8))
    function, reason = FAULTS[fault]
    fed = Simulator(ragged, chunk=chunk, faults=only(client, function))
    honest = Simulator(ragged, chunk=chunk)
    others = EVERYONE[client != EVERYONE]
    program, assignment, sizes = sgd(local_of(objective)), apart(objective), torch.tensor(SIZES)

    actual, expected = (
        fed.map(program, EVERYONE, per_client=assignment, key=5),
        honest.map(program, others, per_client=assignment[others], key=5),
    )
    assert actual.ids.tolist() == others.tolist()
    assert equal(actual.outputs, expected.outputs)
    (failure,) = actual.failures
    assert failure.client == client
    assert reason in failure.reason

    actual = fed.map(
        program,
        EVERYONE,
        per_client=assignment,
        key=5,
        reduce=SegmentSum(weights=sizes, segment_ids=EVERYONE % 2, num_segments=2),
    )
    expected = honest.map(
        program,
        others,
        per_client=assignment[others],
        key=5,
        reduce=SegmentSum(weights=sizes[others], segment_ids=others % 2, num_segments=2),
    )
    assert equal(actual.sums, expected.sums)
    assert torch.equal(actual.total_weight, expected.total_weight)
    assert actual.total_weight.sum() == sum(SIZES) - SIZES[client]
    assert [failure.client for failure in fed.pop_failures()] == [client, client]
    assert fed.pop_failures() == []


@pytest.mark.parametrize("fault", ["absent", "nan"])
def test_a_rejected_reply_does_not_advance_client_state(ragged: Clients, fault: str) -> None:
    objective = objective_of(MLP(8))
    poison = {
        "absent": lambda reply: None,
        "nan": lambda reply: reply | {"after/fc1.bias": torch.full((8,), math.nan)},
    }[fault]
    fed, honest = Simulator(ragged, faults=only(4, poison)), Simulator(ragged)
    for federation in (fed, honest):
        federation.init_client_state(objective.params())
        federation.map(stateful_sgd(local_of(objective)), EVERYONE, key=5)
        federation.client_state.commit(1)
    others = EVERYONE[EVERYONE != 4]
    assert equal(rows_of(fed.client_state.read(EVERYONE), torch.tensor(4)), objective.params())
    assert equal(fed.client_state.read(others), honest.client_state.read(others))
    assert fed.client_state.tensors()["ids"].tolist() == others.tolist()


def test_a_client_that_diverges_without_a_fault_is_rejected(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    assignment = apart(objective)
    assignment.models["fc2.bias"][3] = math.nan
    fed = Simulator(ragged)
    actual = fed.map(
        sgd(local_of(objective)),
        EVERYONE,
        per_client=assignment,
        key=5,
        reduce=SegmentSum(weights=torch.ones(6), segment_ids=torch.zeros(6).long(), num_segments=1),
    )
    assert [(failure.client, failure.reason) for failure in actual.failures] == [
        (3, "'fc1.weight' is not finite")
    ]
    assert actual.ids.tolist() == [0, 1, 2, 4, 5]
    assert actual.total_weight.tolist() == [5.0]
    assert all(bool(value.isfinite().all()) for value in actual.sums.values())


def test_client_state_that_is_not_finite_is_rejected_and_not_stored(ragged: Clients) -> None:
    """Also if the reply of the program is empty."""
    objective = objective_of(MLP(8))
    train = stateful_sgd(local_of(objective))

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        return {}, train.finish(broadcast, const, carry)[1]

    fed = Simulator(ragged)
    fed.init_client_state(objective.params())
    poisoned = rows_of(stack([objective.params()]), torch.tensor([0]))
    poisoned["fc1.bias"][0, 0] = math.inf
    fed.client_state.write(torch.tensor([4]), poisoned)
    actual = fed.map(replace(train, finish=finish), EVERYONE, key=5)
    (failure,) = actual.failures
    assert (failure.client, failure.rejected) == (4, True)
    assert "client state" in failure.reason
    assert equal(rows_of(fed.client_state.read(torch.tensor([4])), torch.tensor([0])), poisoned)


def test_failures_are_sorted_by_client(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    fed = Simulator(
        ragged, faults=lambda key, client, reply: None if client in (5, 0, 3) else reply
    )
    actual = fed.map(
        sgd(local_of(objective)),
        torch.tensor([5, 4, 3, 2, 1, 0]),
        per_client=one_for_all(objective),
        key=5,
    )
    assert [failure.client for failure in actual.failures] == [0, 3, 5]
    assert actual.ids.tolist() == [4, 2, 1]


def test_a_changed_reply_of_the_right_form_is_accepted(ragged: Clients) -> None:
    """A poisoned reply that is finite and has the right shapes cannot be detected."""
    objective = objective_of(MLP(8))
    fed = Simulator(
        ragged,
        faults=only(
            4, lambda reply: {name: torch.zeros_like(value) for name, value in reply.items()}
        ),
    )
    actual = fed.map(sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=5)
    assert float(actual.outputs["fc1.weight"][4].abs().sum()) == 0
    assert float(actual.outputs["fc1.weight"][3].abs().sum()) > 0


def test_faults_receive_the_key_the_client_and_its_reply(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    replies: dict[int, Tree] = {}

    def record(key: int, client: int, reply: Tree) -> Tree:
        assert key == 5
        replies[client] = {name: value.clone() for name, value in reply.items()}
        return reply

    actual = Simulator(ragged, faults=record).map(
        sgd(local_of(objective)), torch.tensor([4, 1]), per_client=one_for_all(objective, 2), key=5
    )
    assert replies.keys() == {1, 4}
    assert equal(rows_of(actual.outputs, torch.tensor(0)), replies[4])


def test_an_impossible_number_of_examples_is_rejected() -> None:
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"examples": carry["count"][0]}, None

    program = replace(count_samples(), finish=finish, batches=Batches(4))
    fed = Simulator(numbered(), faults=only(3, lambda reply: {"examples": reply["examples"] * 10}))
    actual = fed.map(program, EVERYONE, key=0)
    assert [(failure.client, failure.reason) for failure in actual.failures] == [
        (3, "claims 20 examples, holds 2")
    ]
    assert actual.outputs["examples"].tolist() == [5.0, 1.0, 40.0, 23.0, 11.0]


def test_a_chunk_without_replies_adds_nothing(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    fed = Simulator(ragged, chunk=1, faults=only(2, lambda reply: None))
    reduce = SegmentSum(weights=torch.ones(6), segment_ids=torch.zeros(6).long(), num_segments=1)
    actual = fed.map(
        sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=5, reduce=reduce
    )
    assert actual.outputs == {}
    assert actual.total_weight.tolist() == [5.0]


def test_outputs_without_replies_have_no_summed_keys(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    reduce = SegmentSum(weights=torch.ones(6), segment_ids=torch.zeros(6).long(), num_segments=1)
    actual = Simulator(ragged, faults=lambda *_: None).map(
        sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=5, reduce=reduce
    )
    assert len(actual.failures) == 6
    assert actual.total_weight.tolist() == [0.0]
    assert actual.outputs == {}


def test_a_client_with_an_empty_reply_can_be_absent(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    train = stateful_sgd(local_of(objective))

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        return {}, train.finish(broadcast, const, carry)[1]

    fed = Simulator(ragged, faults=only(4, lambda reply: None))
    fed.init_client_state(objective.params())
    actual = fed.map(replace(train, finish=finish), EVERYONE, key=5)
    assert actual.ids.tolist() == [0, 1, 2, 3, 5]


def choose_segment() -> Program:
    """Replies with the segment of the sum to which it is added: segment 0."""

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"row": torch.zeros((), dtype=torch.int64), "count": carry["count"]}, None

    return replace(count_samples(), finish=finish, name="choose_segment")


def test_a_reply_that_chooses_a_missing_segment_is_rejected() -> None:
    fed = Simulator(numbered(), faults=only(3, lambda reply: reply | {"row": torch.tensor(7)}))
    actual = fed.map(
        choose_segment(),
        EVERYONE,
        key=0,
        reduce=SegmentSum(segment_ids="row", weights=torch.ones(6), num_segments=2),
    )
    assert [failure.client for failure in actual.failures] == [3]
    assert actual.total_weight.tolist() == [5.0, 0.0]


# Invalid arguments


@pytest.mark.parametrize(
    ("ids", "values"),
    [([1, 2, 1], "client 1 "), ([0, 6], "0 to 6"), ([-1, 2], "-1 to 2")],
)
def test_ids_must_be_those_of_distinct_clients(
    ragged: Clients, ids: list[int], values: str
) -> None:
    objective = objective_of(MLP(8))
    fed, assignment = Simulator(ragged), one_for_all(objective, len(ids))
    with pytest.raises(InvalidInputError, match=values) as caught:
        fed.map(sgd(local_of(objective)), torch.tensor(ids), per_client=assignment, key=0)
    assert caught.value.field == "ids"
    with pytest.raises(InvalidInputError, match=values) as caught:
        fed.evaluate(assignment, torch.tensor(ids), [EvalRequest(objective, {}, split="train")])
    assert caught.value.field == "ids"
    assert fed.traffic.down == 0


@pytest.mark.parametrize(
    ("model_ids", "values"),
    [([0, -1], ["= -1:", "add_clients"]), ([0, 1], ["= 1:"]), ([0], ["1 rows", "2 clients"])],
)
def test_model_ids_must_be_rows_of_the_models(
    ragged: Clients, model_ids: list[int], values: list[str]
) -> None:
    objective = objective_of(MLP(8))
    assignment = ModelAssignment(stack([objective.params()]), torch.tensor(model_ids))
    with pytest.raises(InvalidInputError) as caught:
        Simulator(ragged).map(
            sgd(local_of(objective)), torch.arange(2), per_client=assignment, key=0
        )
    assert caught.value.field == "per_client.model_ids"
    assert all(value in str(caught.value) for value in values)


@pytest.mark.parametrize(
    ("weights", "segment_ids", "field", "values"),
    [
        (torch.ones(2), torch.tensor([0, -1]), "reduce.segment_ids", "-1 to 0"),
        (torch.ones(2), torch.tensor([0, 1]), "reduce.segment_ids", "0 to 1"),
        (torch.ones(6), torch.tensor([0, 0]), "reduce.weights", "(6,)"),
        (torch.ones(2), torch.zeros(6).long(), "reduce.segment_ids", "6 segments"),
    ],
    ids=["segment -1", "segment 1 of 1", "six weights for two", "six segments for two"],
)
def test_sums_must_match_the_clients_of_the_call(
    ragged: Clients, weights: Tensor, segment_ids: Tensor, field: str, values: str
) -> None:
    objective = objective_of(MLP(8))
    with pytest.raises(InvalidInputError) as caught:
        Simulator(ragged).map(
            sgd(local_of(objective)),
            torch.arange(2),
            per_client=one_for_all(objective, 2),
            key=0,
            reduce=SegmentSum(weights=weights, segment_ids=segment_ids, num_segments=1),
        )
    assert caught.value.field == field
    assert values in str(caught.value)


@pytest.mark.parametrize("chunk", [0, -3, 1.5, "2"])
def test_a_chunk_must_be_a_positive_whole_number(ragged: Clients, chunk: object) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "engine.chunk"):
        Simulator(ragged, chunk=chunk)  # type: ignore[arg-type]


def test_an_unknown_precision_is_refused_with_the_known_ones(ragged: Clients) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Simulator(ragged, precision="half")  # type: ignore[arg-type]
    assert caught.value.field == "engine.precision"
    assert all(name in str(caught.value) for name in ("'half'", "'tf32'", "'float32'"))


@pytest.mark.parametrize("device", ["tpu", "cudas", "", "cuda:x", "cuda:", "cpu:0"])
def test_an_unknown_device_is_refused_with_the_known_ones(ragged: Clients, device: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Simulator(ragged, device=device)
    assert caught.value.field == "device"
    assert all(name in str(caught.value) for name in (repr(device), "'auto'", "'cpu'", "'cuda'"))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_a_device_is_refused_with_the_alternatives(
    ragged: Clients, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidInputError) as caught:
        Simulator(ragged, device=device)
    assert caught.value.field == "device"
    assert all(name in str(caught.value) for name in (repr(device), "'cpu'", "'auto'"))
    assert Simulator(ragged, device="auto").device == torch.device("cpu")


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InvalidInputError) as caught:
        pick_device("cuda:2")
    assert caught.value.field == "device"
    assert all(name in str(caught.value) for name in ("'cuda:2'", "'cuda:0'", "'cuda:1'"))


# Programs that cannot share a step


def branching(step: Callable[[Tree, Batch], Tree]) -> Program:
    return replace(
        count_samples(),
        step=lambda broadcast, const, carry, batch: step(carry, batch),
        name="branching",
    )


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize(
    "step",
    [
        lambda carry, batch: carry if batch.x.sum() > 3 else {"count": -carry["count"]},
        lambda carry, batch: {"count": carry["count"] * batch.x.max().item()},
        lambda carry, batch: {"count": carry["count"][: int(batch.weight.sum())]},
    ],
    ids=["if", "item", "int"],
)
def test_the_error_of_a_program_that_branches_has_its_name_and_the_alternatives(
    step: Callable[[Tree, Batch], Tree], chunk: int | None
) -> None:
    with pytest.raises(VectorizationError) as caught:
        Simulator(numbered(), chunk=chunk).map(branching(step), EVERYONE, key=0)
    assert caught.value.field == "program"
    assert all(
        name in str(caught.value) for name in ("'branching'", "torch.where", "vectorized=False")
    )


def test_a_connection_that_branches_on_a_tensor_is_refused() -> None:
    def connect(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
        return {}, reply if reply["count"].sum() > 0 else {"count": -reply["count"]}

    program = chain(count_samples(), replace(count_samples(), name="again"), connect)
    with pytest.raises(VectorizationError, match=r"torch\.where") as caught:
        Simulator(numbered()).map(program, EVERYONE, key=0)
    assert caught.value.field == "program"


def test_a_program_that_uses_torchs_generator_is_refused() -> None:
    program = branching(lambda carry, batch: {"count": carry["count"] + torch.rand(3)})
    with pytest.raises(VectorizationError, match=r"'branching'.*batch\.key") as caught:
        Simulator(numbered()).map(program, EVERYONE, key=0)
    assert caught.value.field == "program"


def test_other_errors_of_a_program_are_not_changed() -> None:
    program = branching(lambda carry, batch: {"count": carry["count"] + torch.zeros(5)})
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        Simulator(numbered()).map(program, EVERYONE, key=0)
    assert not isinstance(caught.value, VectorizationError)


def medians() -> Program:
    """The median of all samples and the sizes of the batches, with numpy. The client state counts
    the runs.
    """

    def start(broadcast: Tree, params: Tree, client_state: Tree) -> tuple[Tree, Tree]:
        return {}, {"x": torch.zeros(0), "sizes": torch.zeros(0), "runs": client_state["runs"]}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        assert batch.weight.tolist() == [1.0] * len(batch.x)
        assert batch.y.shape == batch.weight.shape
        x = np.concatenate([carry["x"].numpy(), batch.x.numpy()[:, 0]])
        return {
            "x": torch.from_numpy(x),
            "sizes": torch.cat([carry["sizes"], torch.tensor([len(batch.x)])]),
            "runs": carry["runs"],
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        if carry["x"].max() > 30:  # a program that runs client by client may branch
            assert carry["sizes"].tolist() == [4.0] * 10
        extremes = torch.tensor([carry["sizes"].min(), carry["sizes"].max()])
        return {
            "median": torch.tensor([float(np.median(carry["x"].numpy()))]),
            "extremes": extremes,
        }, {"runs": carry["runs"] + 1}

    return Program(start, step, finish, Batches(4), "medians", vectorized=False)


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_a_numpy_program_has_batches_without_padding_and_client_state(
    chunk: int | None,
) -> None:
    fed = Simulator(numbered(), chunk=chunk)
    fed.init_client_state({"runs": torch.tensor([0])})
    fed.map(medians(), torch.tensor([2, 3]), key=0)
    actual = fed.map(medians(), EVERYONE, key=1)
    assert actual.outputs["median"].flatten().tolist() == [(n - 1) / 2 for n in SIZES]
    assert actual.outputs["extremes"].tolist() == [[1, 4], [1, 1], [4, 4], [2, 2], [3, 4], [3, 4]]
    assert fed.client_state.read(EVERYONE)["runs"].flatten().tolist() == [1, 1, 2, 2, 1, 1]


def test_a_program_gives_the_same_result_client_by_client(ragged: Clients) -> None:
    objective = objective_of(MLP((8, 5), dropout=0.5))
    program = sgd(local_of(objective))
    together = Simulator(ragged).map(program, EVERYONE, per_client=apart(objective), key=5)
    alone = Simulator(ragged).map(
        replace(program, vectorized=False), EVERYONE, per_client=apart(objective), key=5
    )
    for name, value in together.outputs.items():
        torch.testing.assert_close(alone.outputs[name], value, rtol=0, atol=1e-5)


def test_a_numpy_program_may_leave_some_client_state_unchanged() -> None:
    program = medians()

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        reply, client_state = program.finish(broadcast, const, carry)
        return reply, client_state if len(carry["x"]) > 4 else None

    fed = Simulator(numbered((3, 9, 2)))
    fed.init_client_state({"runs": torch.tensor([0])})
    fed.map(replace(program, finish=finish), torch.arange(3), key=0)
    assert fed.client_state.read(torch.arange(3))["runs"].flatten().tolist() == [0, 1, 0]


# Client state, traffic, threads


def test_a_client_continues_from_its_state_and_a_rollback_discards_a_round(
    ragged: Clients,
) -> None:
    objective = objective_of(MLP(8))
    program = stateful_sgd(local_of(objective))
    fed = Simulator(ragged)
    fed.init_client_state(objective.params())
    first = fed.map(program, EVERYONE, key=1)
    fed.client_state.rollback()
    again = fed.map(program, EVERYONE, key=1)
    assert equal(first.outputs, again.outputs)
    fed.client_state.commit(1)
    second = fed.map(program, EVERYONE, key=2)
    assert equal(strip_prefix("before", second.outputs), strip_prefix("after", first.outputs))


def test_local_parameters_are_read_from_client_state(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    local = ("fc2.weight", "fc2.bias")
    fed = Simulator(ragged)
    head = {name: value for name, value in objective.params().items() if name in local}
    fed.init_client_state(head)
    heads = {
        name: torch.stack([value + client for client in range(6)]) for name, value in head.items()
    }
    fed.client_state.write(EVERYONE, heads)
    body = {name: value for name, value in stack([objective.params()]).items() if name not in local}
    actual = fed.map(
        sgd(local_of(objective)),
        EVERYONE,
        per_client=ModelAssignment(body, torch.zeros(6).long(), local),
        key=5,
    )

    whole = {name: value.expand(6, *value.shape[1:]) for name, value in body.items()} | heads
    expected = Simulator(ragged).map(
        sgd(local_of(objective)), EVERYONE, per_client=ModelAssignment(whole, EVERYONE), key=5
    )
    assert equal(actual.outputs, expected.outputs)
    assert fed.traffic.down == 6 * (8 * 6 + 8) * 4
    # If the rows have these parameters too, they are neither used nor sent.
    again = fed.map(
        sgd(local_of(objective)),
        EVERYONE,
        per_client=ModelAssignment(one_for_all(objective).models, torch.zeros(6).long(), local),
        key=5,
    )
    assert equal(again.outputs, expected.outputs)
    assert fed.traffic.down == 2 * 6 * (8 * 6 + 8) * 4


def test_all_parameters_may_be_local(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    fed = Simulator(ragged)
    fed.init_client_state(objective.params())
    assignment = ModelAssignment({}, torch.zeros(6).long(), local_params=tuple(objective.params()))
    assert len(fed.map(sgd(local_of(objective)), EVERYONE, per_client=assignment, key=5).ids) == 6


def test_bytes_are_counted_exactly(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    model = (6 * 8 + 8 + 8 * 3 + 3) * 4
    assert nbytes(objective.params()) == model
    fed = Simulator(ragged, chunk=2)
    fed.map(
        sgd(local_of(objective)),
        torch.tensor([4, 1, 2]),
        per_client=one_for_all(objective, 3),
        key=0,
    )
    assert (fed.traffic.down, fed.traffic.up) == (3 * model, 3 * model)
    broadcast = {"c": torch.zeros(10, dtype=torch.float64), "n": torch.zeros(3, dtype=torch.int32)}
    fed.map(count_samples(), torch.tensor([0, 5]), broadcast=broadcast, key=0)
    assert fed.traffic.down == 3 * model + 2 * (80 + 12)
    assert fed.traffic.up == 3 * model + 2 * 3 * 4


def test_summed_outputs_count_as_sent(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    reduce = SegmentSum(weights=torch.ones(6), segment_ids=torch.zeros(6).long(), num_segments=1)
    fed = Simulator(ragged)
    fed.map(
        sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=0, reduce=reduce
    )
    assert fed.traffic.up == 6 * nbytes(objective.params())


def test_an_absent_client_sends_nothing(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    fed = Simulator(ragged, faults=only(2, lambda reply: None))
    fed.map(sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=0)
    assert fed.traffic.up == 5 * nbytes(objective.params())
    assert fed.traffic.down == 6 * nbytes(objective.params())


def test_an_evaluation_sends_nothing(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    fed = Simulator(ragged)
    fed.evaluate(one_for_all(objective), EVERYONE, [EvalRequest(objective, {}, split="train")])[0]
    assert (fed.traffic.up, fed.traffic.down) == (0, 0)


@pytest.fixture
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("three_threads")
def test_calls_use_one_torch_thread_and_restore_the_callers_number(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    threads: list[int] = []

    def metric(outputs: Tensor, y: Tensor) -> Tensor:
        threads.append(torch.get_num_threads())
        return accuracy(outputs, y)

    fed = Simulator(ragged)
    fed.evaluate(
        one_for_all(objective), EVERYONE, [EvalRequest(objective, {"m": metric}, split="train")]
    )[0]
    assert set(threads) == {1}
    assert torch.get_num_threads() == 3
    fed.map(sgd(local_of(objective)), EVERYONE, per_client=one_for_all(objective), key=0)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_the_callers_threads_are_restored_after_an_error() -> None:
    with pytest.raises(VectorizationError):
        Simulator(numbered()).map(
            branching(lambda carry, batch: carry if batch.x.sum() > 3 else {}), EVERYONE, key=0
        )
    assert torch.get_num_threads() == 3


# Evaluation


def with_tests(
    sizes: tuple[tuple[int, int], ...] = ((3, 20), (30, 2), (10, 70), (1, 9)),
) -> Clients:
    """Clients with train and test parts of these sizes. 70 is larger than a block. With a test size
    of 0 there is no test part.
    """
    generator = torch.Generator().manual_seed(1)

    def part(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 6, generator=generator), torch.randint(
            0, 3, (size,), generator=generator
        )

    return from_arrays([(*part(train), *(part(test) if test else ())) for train, test in sizes])


def by_hand(
    objective: Objective, params: Tree, clients: Clients, client: int
) -> tuple[float, float]:
    rows = clients.test[int(clients.test_part_id[client])]
    outputs = objective.outputs(params, clients.x_test[rows])
    y = clients.y_test[rows]
    return float(F.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


def assert_by_hand(
    actual: Tree,
    objective: Objective,
    models: Tree,
    index: list[int],
    clients: Clients,
    ids: list[int],
) -> None:
    for place, (row, client) in enumerate(zip(index, ids, strict=True)):
        loss, share = by_hand(objective, rows_of(models, torch.tensor(row)), clients, client)
        assert float(actual["loss"][place]) == pytest.approx(loss, rel=1e-5)
        assert float(actual["accuracy"][place]) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_an_evaluation_equals_that_of_each_client_alone(chunk: int | None) -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    models, ids, index = apart(objective, 3).models, [2, 0, 3, 1], [2, 0, 1, 2]
    actual = Simulator(clients, chunk=chunk).evaluate(
        ModelAssignment(models, torch.tensor(index)),
        torch.tensor(ids),
        [EvalRequest(objective, {"accuracy": accuracy})],
    )[0]
    assert_by_hand(actual, objective, models, index, clients, ids)
    assert actual.keys() == {"loss", "accuracy"}


def test_each_pair_of_model_and_test_part_is_evaluated_once() -> None:
    """Six clients, three test parts and two models give five pairs. With chunk 1 each pair is one
    call of a metric.
    """
    objective = objective_of(MLP(8))
    clients = replace(
        with_tests(((4, 20), (5, 12), (6, 9), (7, 5), (8, 5), (9, 5))),
        test_part_id=torch.tensor([0, 1, 0, 1, 2, 0]),
    )
    models, index = apart(objective, 2).models, [0, 1, 0, 0, 1, 1]
    calls: list[int] = []

    def metric(outputs: Tensor, y: Tensor) -> Tensor:
        calls.append(len(y))
        return accuracy(outputs, y)

    fed = Simulator(clients, chunk=1)
    actual = fed.evaluate(
        ModelAssignment(models, torch.tensor(index)),
        EVERYONE,
        [EvalRequest(objective, {"accuracy": metric})],
    )[0]
    assert len(calls) == 5
    assert_by_hand(actual, objective, models, index, clients, list(range(6)))
    assert actual["loss"][0] == actual["loss"][2]
    assert actual["loss"][0] != actual["loss"][5]


def test_a_client_without_a_test_part_has_nan() -> None:
    objective, clients = objective_of(MLP(8)), with_tests(((3, 20), (30, 0), (10, 7), (1, 0)))
    ids = [3, 2, 1, 0]
    actual = Simulator(clients).evaluate(
        apart(objective, 4), torch.tensor(ids), [EvalRequest(objective, {"accuracy": accuracy})]
    )[0]
    assert (
        actual["loss"].isnan().tolist()
        == actual["accuracy"].isnan().tolist()
        == [True, False, True, False]
    )
    assert_by_hand(
        {name: value[[1, 3]] for name, value in actual.items()},
        objective,
        apart(objective, 4).models,
        [1, 3],
        clients,
        [2, 0],
    )


def test_without_test_parts_all_clients_have_nan(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    actual = Simulator(ragged).evaluate(
        one_for_all(objective), EVERYONE, [EvalRequest(objective, {"accuracy": accuracy})]
    )[0]
    assert bool(actual["loss"].isnan().all())
    assert bool(actual["accuracy"].isnan().all())


def test_the_train_part_can_be_evaluated(ragged: Clients) -> None:
    objective = objective_of(MLP(8))
    actual = Simulator(ragged).evaluate(
        one_for_all(objective),
        EVERYONE,
        [EvalRequest(objective, {"accuracy": accuracy}, split="train")],
    )[0]
    for client in range(6):
        rows = ragged.train[client]
        outputs = objective.outputs(objective.params(), ragged.x[rows])
        assert float(actual["loss"][client]) == pytest.approx(
            float(F.cross_entropy(outputs, ragged.y[rows])), rel=1e-5
        )
        assert float(actual["accuracy"][client]) == pytest.approx(
            float((outputs.argmax(1) == ragged.y[rows]).double().mean())
        )


def test_custom_metrics_are_averaged_over_examples() -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    actual = Simulator(clients).evaluate(
        one_for_all(objective, 4),
        torch.arange(4),
        [EvalRequest(objective, {"label": lambda outputs, y: y.float()})],
    )[0]
    for client in range(4):
        y = clients.y_test[clients.test[client]]
        assert float(actual["label"][client]) == pytest.approx(float(y.double().mean()))


def tuned_by_hand(clients: Clients, objective: Objective, program: Program, key: int) -> Tree:
    """The evaluation of each client's model after fine-tuning by `map`, one client at a time."""
    tuned = Simulator(clients, chunk=1).map(
        program, torch.arange(4), per_client=apart(objective, 4), key=key
    )
    return Simulator(clients, chunk=1).evaluate(
        ModelAssignment(tuned.outputs, torch.arange(4)),
        torch.arange(4),
        [EvalRequest(objective, {"accuracy": accuracy})],
    )[0]


def test_fine_tuning_trains_a_copy_on_the_clients_training_part() -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    program = sgd(local_of(objective))
    plain = Simulator(clients).evaluate(
        apart(objective, 4), torch.arange(4), [EvalRequest(objective, {"accuracy": accuracy})]
    )[0]
    actual = Simulator(clients, chunk=1).evaluate(
        apart(objective, 4),
        torch.arange(4),
        [EvalRequest(objective, {"accuracy": accuracy}, finetune=program)],
        key=3,
    )[0]
    assert equal(actual, tuned_by_hand(clients, objective, program, key=3))
    assert bool((actual["loss"] != plain["loss"]).all())


@pytest.mark.parametrize("chunk", [2, None])
def test_fine_tuning_does_not_depend_on_the_chunk(chunk: int | None) -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    program = sgd(local_of(objective))
    fed = Simulator(clients, chunk=chunk)
    actual = fed.evaluate(
        apart(objective, 4),
        torch.arange(4),
        [EvalRequest(objective, {"accuracy": accuracy}, finetune=program)],
        key=3,
    )[0]
    assert equal(actual, tuned_by_hand(clients, objective, program, key=3))


def test_clients_that_share_a_model_and_a_test_part_are_fine_tuned_separately() -> None:
    objective = objective_of(MLP(8))
    clients = replace(with_tests(((9, 20), (9, 5))), test_part_id=torch.tensor([0, 0]))
    actual = Simulator(clients).evaluate(
        one_for_all(objective, 2),
        torch.arange(2),
        [EvalRequest(objective, {}, finetune=sgd(local_of(objective)))],
    )[0]
    assert actual["loss"][0] != actual["loss"][1]


def test_clients_with_the_same_model_and_state_share_an_evaluation_without_fine_tuning() -> None:
    """Their own part of the model depends on their state, as the class offsets of Clade."""
    objective = objective_of(MLP(8))
    clients = replace(with_tests(((9, 20),) * 4), test_part_id=torch.zeros(4, dtype=torch.int64))
    fed = Simulator(clients)
    fed.init_client_state({"scale": torch.tensor(1.0)})
    fed.client_state.write(torch.tensor([2]), {"scale": torch.tensor([3.0])})
    scaled = without_steps(
        lambda params, memory: {
            name: value * memory["scale"].reshape(-1, *[1] * (value.ndim - 1))
            for name, value in params.items()
        },
        "scaled",
    )
    models = one_for_all(objective, 2).models
    other = {name: torch.cat([value, 2 * value]) for name, value in models.items()}
    assignment = ModelAssignment(other, torch.tensor([0, 0, 0, 1]))

    def losses(of: Tensor) -> list[float]:
        request = EvalRequest(objective, {}, finetune=scaled)
        value: list[float] = fed.evaluate(assignment[of], of, [request])[0]["loss"].tolist()
        return value

    alone = [losses(torch.tensor([client]))[0] for client in range(4)]
    before = fed.clock.asked
    assert losses(torch.arange(4)) == alone
    assert len(set(alone)) == 3
    steps = fed.clock.asked - before
    losses(torch.tensor([0, 2, 3]))
    assert fed.clock.asked - before == 2 * steps  # client 1 has shared the evaluation of client 0


@pytest.mark.parametrize("where", ["metric", "finetune"])
def test_code_that_is_not_safe_for_threads_runs_in_the_calling_thread(
    ragged: Clients, where: str
) -> None:
    objective = objective_of(MLP(8))
    seen: list[bool] = []

    def note() -> None:
        seen.append(threading.current_thread() is threading.main_thread())

    def metric(outputs: Tensor, y: Tensor) -> float:
        note()
        return 0.0

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        note()
        return const, None

    one = {"metric": OutputMetric(metric, is_thread_safe=False)}
    finetune = Program(
        lambda broadcast, params, state: (params, {}),
        lambda broadcast, const, carry, batch: carry,
        finish,
        Batches.whole(),
        "finetune",
        vectorized=False,
    )
    request = EvalRequest(
        objective,
        one if where == "metric" else {},
        "train",
        finetune if where == "finetune" else None,
    )
    Simulator(ragged, threads=2, chunk=1).evaluate(apart(objective), EVERYONE, [request])
    assert seen == [True] * 6


def test_an_evaluation_changes_neither_client_state_nor_models() -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    fed = Simulator(clients, chunk=1)
    fed.init_client_state(objective.params())
    fed.map(stateful_sgd(local_of(objective)), torch.tensor([1, 2]), key=0)
    fed.client_state.commit(1)
    assignment = apart(objective, 4)
    client_state, models = (
        copy.deepcopy(fed.client_state.tensors()),
        copy.deepcopy(assignment.models),
    )
    fed.evaluate(
        assignment, torch.arange(4), [EvalRequest(objective, {}, finetune=sgd(local_of(objective)))]
    )[0]
    all_local = ModelAssignment(
        assignment.models, assignment.model_ids, local_params=tuple(assignment.models)
    )
    fed.evaluate(
        all_local,
        torch.arange(4),
        [EvalRequest(objective, {}, finetune=sgd_that_writes_state(local_of(objective)))],
    )[0]
    assert equal(fed.client_state.tensors(), client_state)
    assert equal(assignment.models, models)
    fed.client_state.commit(2)
    assert equal(fed.client_state.tensors(), client_state)  # nothing was pending


def sgd_that_writes_state(local: LocalTraining) -> Program:
    """A fine-tuning program that tries to write client state."""
    train = sgd(local)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        weights, _ = train.finish(broadcast, const, carry)
        return weights, weights

    return replace(train, finish=finish)


def test_an_evaluation_reads_local_parameters_from_client_state() -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    fed = Simulator(clients)
    fed.init_client_state(objective.params())
    client_state = apart(objective, 4).models
    fed.client_state.write(
        torch.tensor([0, 2, 3]), rows_of(client_state, torch.tensor([0, 2, 3]))
    )  # client 1 never wrote
    client_state = {
        name: value.index_copy(0, torch.tensor([1]), objective.params()[name][None])
        for name, value in client_state.items()
    }
    other = stack(
        [{name: torch.full_like(value, 0.1) for name, value in objective.params().items()}]
    )
    ids = [3, 1, 0, 2]

    whole = ModelAssignment(other, torch.zeros(4).long(), local_params=tuple(other))
    actual = fed.evaluate(
        whole, torch.tensor(ids), [EvalRequest(objective, {"accuracy": accuracy})]
    )[0]
    assert_by_hand(actual, objective, client_state, ids, clients, ids)

    head = ModelAssignment(other, torch.zeros(4).long(), local_params=("fc2.weight", "fc2.bias"))
    actual = fed.evaluate(
        head, torch.tensor(ids), [EvalRequest(objective, {"accuracy": accuracy})]
    )[0]
    mixed = {
        name: value if name in head.local_params else other[name].expand_as(value)
        for name, value in client_state.items()
    }
    assert_by_hand(actual, objective, mixed, ids, clients, ids)


def test_clients_with_local_parameters_and_one_test_part_are_evaluated_separately() -> None:
    objective = objective_of(MLP(8))
    clients = replace(with_tests(((9, 20), (9, 5))), test_part_id=torch.tensor([0, 0]))
    fed = Simulator(clients)
    fed.init_client_state(objective.params())
    client_state = apart(objective, 2).models
    fed.client_state.write(torch.arange(2), client_state)
    rows = one_for_all(objective, 2)
    actual = fed.evaluate(
        ModelAssignment(rows.models, rows.model_ids, local_params=tuple(rows.models)),
        torch.arange(2),
        [EvalRequest(objective, {"accuracy": accuracy})],
    )[0]
    assert_by_hand(actual, objective, client_state, [0, 1], clients, [0, 1])
    assert actual["loss"][0] != actual["loss"][1]


def test_map_never_reads_test_data() -> None:
    objective, clients = objective_of(MLP(8)), with_tests()
    blind = replace(
        clients,
        x_test=torch.full_like(clients.x_test, math.nan),
        y_test=torch.full_like(clients.y_test, -1),
    )

    def results_and_state(data: Clients) -> tuple[ClientResults, Tree]:
        fed = Simulator(data)
        fed.init_client_state(objective.params())
        results = fed.map(stateful_sgd(local_of(objective)), torch.arange(4), key=0)
        return results, fed.client_state.read(torch.arange(4))

    results, state = results_and_state(clients)
    blind_results, blind_state = results_and_state(blind)
    assert equal(results.outputs, blind_results.outputs)
    assert equal(state, blind_state)
    assert list(results.failures) == list(blind_results.failures) == []
