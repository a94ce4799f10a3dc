"""Programs: local SGD is torch's SGD on the same batches, scores are plain sums, and a chain takes
its own choice into the next program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedclade.core.batching import Batches, make_plan
from fedclade.core.federation import ModelAssignment, SegmentSum
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd, sgd_step
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.losses import accuracy
from fedclade.core.program import Program, chain
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays
from fedclade.engines.base import EvalRequest
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError
from fedclade.programs.evaluation import evaluate_metrics

FIRST = torch.Generator().manual_seed(0)
X, Y = torch.randn(23, 6, generator=FIRST), torch.randint(0, 3, (23,), generator=FIRST)


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches_of(how: Batches, key: int = 4) -> Iterator[Batch]:
    """The padded batches of one client that holds X and Y, as an engine makes them."""
    plan = make_plan(how, torch.tensor([len(Y)]), torch.tensor([key]), len(Y))
    for step in range(plan.position.shape[1]):
        rows = plan.position[0, step, 0]
        weight = (torch.arange(how.size) < plan.valid[0, step, 0]).float()
        yield Batch(X[rows], Y[rows], weight, plan.key[0, step])


def fold_over(program: Program, params: Tree) -> tuple[Tree, Tree | None]:
    """What an engine does for a single client."""
    broadcast = {name: torch.tensor(value) for name, value in program.hyperparams.items()}
    const, carry = program.start(broadcast, params, {})
    for batch in batches_of(program.batches):
        carry = program.step(broadcast, const, carry, batch)
    return program.finish(broadcast, const, carry)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_sgd_on_the_same_batches(momentum: float, weight_decay: float) -> None:
    """23 samples in batches of 5: each of the four epochs ends in a partial one."""
    module = mlp()
    objective = Objective(module)
    program = sgd(
        LocalTraining(
            objective, lr=0.1, batch_size=5, epochs=4, momentum=momentum, weight_decay=weight_decay
        )
    )
    got, memory = fold_over(program, objective.params())
    assert memory is None

    plain = torch.optim.SGD(
        module.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay
    )
    for batch in batches_of(program.batches):
        real = batch.weight > 0
        plain.zero_grad()
        F.cross_entropy(module(batch.x[real]), batch.y[real]).backward()
        plain.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(got[name], value.detach(), rtol=0, atol=1e-6)
        assert float((value.detach() - objective.params()[name]).abs().max()) > 0.01  # it did train


def test_sgd_step_by_hand() -> None:
    """w = 2, v = 1, g = 4, lr = 0.5, momentum = 0.5, decay = 0.25: v = 0.5 + 4 + 0.5 = 5, w = 2 -
    2.5.
    """
    objective = Objective(
        nn.Linear(1, 1, bias=False), lambda outputs, y: outputs[:, 0]
    )  # its gradient is x
    batch = Batch(torch.tensor([[4.0]]), torch.zeros(1), torch.ones(1), torch.tensor(0))

    def tree(value: float) -> Tree:
        return {"weight": torch.tensor([[value]])}

    lr = torch.tensor(0.5)
    w, v = sgd_step(objective, tree(2.0), tree(1.0), batch, lr, momentum=0.5, weight_decay=0.25)
    assert (float(w["weight"]), float(v["weight"])) == (-0.5, 5.0)
    # With 1 more on the gradient and no momentum: 2 - 0.5 (4 + 1 + 0.25 * 2)
    w, v = sgd_step(objective, tree(2.0), {}, batch, lr, weight_decay=0.25, plus=tree(1.0))
    assert (float(w["weight"]), v) == (-0.75, {})


def test_without_momentum_no_velocity_is_carried() -> None:
    objective = Objective(mlp())
    _, carry = sgd(LocalTraining(objective)).start({}, objective.params(), {})
    assert all(name.startswith("w/") for name in carry)


def test_sgd_changes_neither_the_model_it_got_nor_the_objective() -> None:
    objective = Objective(mlp())
    params, before = objective.params(), objective.params()
    fold_over(sgd(LocalTraining(objective, momentum=0.9)), params)
    for name, value in before.items():
        assert torch.equal(params[name], value)
        assert torch.equal(objective.params()[name], value)


def test_a_new_learning_rate_changes_hyperparams_and_not_the_functions() -> None:
    """Engines may compile or capture a step: it must not change from round to round."""
    objective = Objective(mlp())
    one, other = sgd(LocalTraining(objective, lr=0.1)), sgd(LocalTraining(objective, lr=0.05))
    assert (one.start, one.step, one.finish) == (other.start, other.step, other.finish)
    assert (one.hyperparams["lr"], other.hyperparams["lr"]) == (0.1, 0.05)
    assert sgd(LocalTraining(objective, lr=0.1, momentum=0.5)).step is not one.step


def test_score_adds_up_what_a_plain_evaluation_finds() -> None:
    module = mlp()
    objective = Objective(module)

    def margin(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.gather(1, y[:, None])[:, 0]

    got, memory = fold_over(
        evaluate_metrics(objective, (("accuracy", accuracy), ("margin", margin))),
        objective.params(),
    )
    assert memory is None
    outputs = module(X).detach()
    expected = {
        "loss": float(F.cross_entropy(outputs, Y, reduction="sum")),
        "accuracy": float((outputs.argmax(1) == Y).sum()),
        "margin": float(outputs[torch.arange(23), Y].sum()),
        "examples": 23.0,
    }
    assert {name: float(value) for name, value in got.items()} == pytest.approx(expected, rel=1e-6)
    assert {value.dtype for value in got.values()} == {torch.float64}


def test_score_reads_more_than_one_block() -> None:
    objective = Objective(mlp())
    x, y = (
        torch.randn(150, 6, generator=torch.Generator().manual_seed(1)),
        torch.zeros(150, dtype=torch.int64),
    )
    each = ModelAssignment(
        {name: value[None] for name, value in objective.params().items()}, torch.tensor([0])
    )
    got = Simulator(from_arrays([(x, y)])).evaluate(
        each, torch.tensor([0]), [EvalRequest(objective, {"accuracy": accuracy}, split="train")]
    )[0]
    outputs = objective.outputs(objective.params(), x)
    assert float(got["loss"]) == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-6)
    assert float(got["accuracy"]) == float((outputs.argmax(1) == y).sum()) / 150


def test_score_has_dropout_off() -> None:
    objective = Objective(nn.Sequential(mlp(), nn.Dropout(0.9)))
    got, _ = fold_over(evaluate_metrics(objective, ()), objective.params())
    assert float(got["loss"]) == pytest.approx(
        float(F.cross_entropy(mlp()(X).detach(), Y, reduction="sum")), rel=1e-6
    )


# then: IFCA in small. The model is one number w, the loss (x - w)^2, the shared models are 0 and
# 10.


def distances() -> Program:
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, {"losses": torch.zeros_like(broadcast["models"][:, 0])}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        squared = (batch.x - broadcast["models"][:, 0]) ** 2  # (batch, models)
        return {"losses": carry["losses"] + (squared * batch.weight[:, None]).sum(0)}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(2), "distances")


def halfway() -> Program:
    """One step over all samples: half of the way to their mean."""

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return params, {"w": params["w"]}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        mean = (batch.x * batch.weight[:, None]).sum(0) / batch.weight.sum()
        return {"w": carry["w"] + broadcast["rate"] * (mean - carry["w"])}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"w": carry["w"], "moved": carry["w"] - const["w"]}, None

    return Program(start, step, finish, Batches(8), "halfway", hyperparams={"rate": 0.5})


def nearest(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    choice = reply["losses"].argmin()
    return {"w": broadcast["models"][choice]}, {"choice": choice, "losses": reply["losses"]}


def four_clients() -> Clients:
    """Means 1, 12, 8 and 2; the middle ones are nearer to 10."""
    samples = [[0.0, 1.0, 2.0], [12.0], [7.0, 8.0, 9.0, 8.0, 8.0], [2.0, 2.0]]
    return from_arrays([(torch.tensor(x)[:, None], torch.zeros(len(x))) for x in samples])


SHARED = {"models": torch.tensor([[0.0], [10.0]])}


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_connect_selects_a_row_of_broadcast_by_the_first_reply(chunk: int | None) -> None:
    fed = Simulator(four_clients(), chunk=chunk)
    got = fed.map(chain(distances(), halfway(), nearest), torch.arange(4), broadcast=SHARED, key=0)
    assert got.outputs["choice"].tolist() == [0, 1, 1, 0]
    assert got.outputs["losses"].tolist() == [
        [5.0, 245.0],
        [144.0, 4.0],
        [322.0, 22.0],
        [8.0, 128.0],
    ]
    assert got.outputs["w"].flatten().tolist() == [0.5, 11.0, 9.0, 1.0]
    assert got.outputs["moved"].flatten().tolist() == [0.5, 1.0, -1.0, 1.0]
    assert got.outputs.keys() == {"choice", "losses", "w", "moved"}


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_a_reply_can_name_its_segment_of_the_sum(chunk: int | None) -> None:
    """Row 0: clients 0 and 3, 3 · 0.5 + 2 · 1 = 3.5 of weight 5; row 1: clients 1 and 2, 1 · 11 + 5
    · 9 = 56 of weight 6; row 2: no client.
    """
    fed = Simulator(four_clients(), chunk=chunk)
    reduce = SegmentSum(segment_ids="choice", weights=fed.sizes, num_segments=3, keys=("w",))
    got = fed.map(
        chain(distances(), halfway(), nearest),
        torch.arange(4),
        broadcast=SHARED,
        key=0,
        reduce=reduce,
    )
    assert got.sums["w"].flatten().tolist() == [3.5, 56.0, 0.0]
    assert got.total_weight.tolist() == [5.0, 6.0, 0.0]
    assert got.outputs.keys() == {"choice", "losses", "moved"}
    assert got.outputs["choice"].tolist() == [0, 1, 1, 0]


def test_a_chain_is_one_message_each_way() -> None:
    fed = Simulator(four_clients())
    fed.map(chain(distances(), halfway(), nearest), torch.arange(4), broadcast=SHARED, key=0)
    assert fed.traffic.down == 4 * 2 * 4
    assert fed.traffic.up == 4 * (8 + 2 * 4 + 4 + 4)  # choice, losses, w, moved


def test_the_second_program_gets_only_what_connect_returns() -> None:
    seen = []

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        seen.append(sorted(broadcast))
        return params, {"w": params["w"]}

    chained = chain(distances(), replace(halfway(), start=start), nearest)
    Simulator(four_clients()).map(chained, torch.arange(4), broadcast=SHARED, key=0)
    assert seen
    assert all(names == ["rate"] for names in seen)


def counting(name: str, by: float) -> Program:
    """Adds to the client's memory, and replies what it found there."""

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, {"found": memory["count"]}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return carry

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        return {name: carry["found"]}, {"count": carry["found"] + by}

    return Program(start, step, finish, Batches(8), name)


def test_the_second_program_finds_the_memory_of_the_first() -> None:
    fed = Simulator(four_clients())
    fed.init_client_state({"count": torch.tensor([1.0])})
    chained = chain(
        counting("a", 10.0), counting("b", 100.0), lambda broadcast, params, reply: ({}, reply)
    )
    got = fed.map(chained, torch.arange(4), key=0)
    assert got.outputs["a"].flatten().tolist() == [1.0] * 4
    assert got.outputs["b"].flatten().tolist() == [11.0] * 4
    assert fed.client_state.read(torch.arange(4))["count"].flatten().tolist() == [111.0] * 4


def test_the_state_of_the_first_program_stays_if_the_second_writes_none() -> None:
    fed = Simulator(four_clients())
    fed.init_client_state({"count": torch.tensor([1.0])})
    chained = chain(
        counting("a", 10.0),
        halfway(),
        lambda broadcast, params, reply: ({"w": broadcast["models"][0]}, reply),
    )
    fed.map(chained, torch.arange(2), broadcast=SHARED, key=0)
    assert fed.client_state.read(torch.arange(4))["count"].flatten().tolist() == [
        11.0,
        11.0,
        1.0,
        1.0,
    ]


def first_sample(name: str) -> Program:
    """Replies which sample came first: the one thing that the order decides."""

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, {"seen": torch.zeros(1), "first": torch.zeros(1)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        new = torch.where(carry["seen"] == 0, batch.x[0], carry["first"])
        return {"seen": carry["seen"] + 1, "first": new}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {name: carry["first"]}, None

    return Program(start, step, finish, Batches(1), "same")


def test_each_program_of_a_chain_draws_what_it_would_draw_alone() -> None:
    x = torch.arange(50.0)[:, None]
    fed = Simulator(from_arrays([(x, torch.zeros(50))] * 40))
    one, other = first_sample("a"), replace(first_sample("b"), rng_stream="other")
    together = fed.map(
        chain(one, other, lambda broadcast, params, reply: ({}, reply)), torch.arange(40), key=0
    )
    for name, program in (("a", one), ("b", other)):
        assert torch.equal(
            together.outputs[name], fed.map(program, torch.arange(40), key=0).outputs[name]
        )
    assert int((together.outputs["a"] == together.outputs["b"]).sum()) < 10


def test_a_program_can_use_the_random_stream_of_another() -> None:
    x = torch.arange(50.0)[:, None]
    fed = Simulator(from_arrays([(x, torch.zeros(50))] * 40))
    alias = replace(first_sample("b"), name="alias", rng_stream="same")
    assert torch.equal(
        fed.map(first_sample("a"), torch.arange(40), key=0).outputs["a"],
        fed.map(alias, torch.arange(40), key=0).outputs["b"],
    )


def test_a_chain_of_programs_with_the_same_random_stream_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'same' and 'same'.*rng_stream"):
        chain(first_sample("a"), first_sample("b"), lambda broadcast, params, reply: ({}, reply))


def test_a_parameter_named_like_a_setting_is_refused() -> None:
    program = replace(first_sample("a"), hyperparams={"lr": 0.1})
    with pytest.raises(InvalidInputError, match="'lr'"):
        Simulator(from_arrays([(torch.zeros(2, 1), torch.zeros(2))])).map(
            program, torch.arange(1), broadcast={"lr": torch.ones(1)}, key=0
        )
