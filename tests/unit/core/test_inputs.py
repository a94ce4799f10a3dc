"""Inputs of several tensors, and the outputs that models return."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.inputs import (
    Inputs,
    describe_inputs,
    from_tensors,
    from_tree,
    join_inputs,
    one_tensor,
    outputs_tensor,
    select,
    tensors_of,
    to_tree,
)
from fedclade.errors import InvalidInputError

A, B = torch.arange(6.0).view(3, 2), torch.arange(3)
KINDS: list[Inputs] = [A, (A, B), {"a": A, "b": B}]


@pytest.mark.parametrize("x", KINDS)
def test_trees_and_tensors_give_the_same_inputs_back(x: Inputs) -> None:
    for again in (from_tree(*to_tree(x)), from_tensors(tensors_of(x), x)):
        assert type(again) is type(x)
        assert all(map(torch.equal, tensors_of(again), tensors_of(x)))


def test_rows_are_taken_from_every_tensor() -> None:
    rows = select({"a": A, "b": B}, torch.tensor([2, 0]))
    assert isinstance(rows, dict)
    assert rows["a"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert rows["b"].tolist() == [2, 0]
    joined = join_inputs(torch.cat, [(A, B), (A[:1], B[:1])])
    assert [len(value) for value in tensors_of(joined)] == [4, 4]


def test_the_shapes_are_described_with_the_names_of_the_tensors() -> None:
    assert describe_inputs(A) == "(2,)"
    assert describe_inputs({"a": A, "b": B}) == "a: (2,), b: ()"


def test_what_needs_one_tensor_refuses_several() -> None:
    assert one_tensor(A, "method flt", "method.name") is A
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "method.name"):
        one_tensor((A, B), "method flt", "method.name")


@pytest.mark.parametrize(
    "returned", [A, (A, B), [None, A], {"logits": A}, SimpleNamespace(logits=A, loss=B)]
)
def test_outputs_are_found_in_what_a_model_returns(returned: object) -> None:
    assert outputs_tensor(returned, nn.Identity()) is A


@pytest.mark.parametrize("returned", [None, {"hidden": A}, (), SimpleNamespace(loss=A)])
def test_a_model_without_outputs_is_refused(returned: object) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        outputs_tensor(returned, nn.Identity())


class TwoInputs(nn.Module):
    """A layer for numbers and an embedding of tokens, with dropout and BatchNorm.

    Args:
        wrap: what it returns, from its outputs.
        branch: whether it branches on values, so that clients run one by one.
    """

    def __init__(self, wrap: Callable[[Tensor], object] = lambda z: z, branch: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.words = nn.Linear(2, 4), nn.Embedding(5, 4)
        self.norm, self.head, self.drop = nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Dropout(0.2)
        self.wrap, self.branch = wrap, branch

    def forward(self, a: Tensor, b: Tensor) -> object:
        h = self.drop(self.norm(self.layer(a) + self.words(b)))
        if self.branch and h.isnan().any():
            h = -h
        return self.wrap(self.head(h))


@pytest.mark.parametrize("branch", [False, True])
def test_a_step_is_the_same_for_a_tuple_a_dictionary_and_several_clients(branch: bool) -> None:
    x = {"a": torch.randn(2, 5, 2), "b": torch.randint(0, 5, (2, 5))}
    y, weight = torch.arange(10).view(2, 5) % 3, torch.ones(2, 5)
    weight[1, 3:] = 0
    key = torch.arange(2)
    objective = Objective(TwoInputs(lambda z: (z, z), branch), x=select(x, 0))
    assert objective.vectorized is not branch
    params = {name: torch.stack([v, v + 0.1]) for name, v in objective.params().items()}
    by_name = objective.gradient(params, ClientStackedBatch(x, y, weight, key))
    in_order = objective.gradient(params, ClientStackedBatch((x["a"], x["b"]), y, weight, key))
    for name, gradient in by_name.items():
        assert torch.equal(in_order[name], gradient)
    for row in range(2):
        own = Batch(select(x, row), y[row], weight[row], key[row])
        alone = objective.gradient({name: v[row] for name, v in params.items()}, own)
        for name, gradient in alone.items():
            torch.testing.assert_close(by_name[name][row], gradient, atol=1e-5, rtol=1e-4)


def test_the_gradient_is_that_of_plain_torch() -> None:
    x = {"a": torch.randn(6, 2), "b": torch.randint(0, 5, (6,))}
    y = torch.arange(6) % 3
    module = TwoInputs()
    module.drop.p = 0.0
    objective = Objective(module, x=x)
    batch = Batch(x, y, torch.ones(6), torch.tensor(0))
    gradient = objective.gradient(objective.params(), batch)
    nn.functional.cross_entropy(module.train()(**x), y).backward()
    for name, value in module.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(gradient[name], value.grad, atol=1e-6, rtol=1e-4)
