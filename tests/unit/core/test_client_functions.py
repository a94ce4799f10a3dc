"""Functions of torch that are replaced for clients: attention, dropout and BatchNorm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import fedclade as fc
from fedclade.core.client_functions import ClientFunctions, uses_replaced_functions
from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.pytree import stack
from fedclade.data import from_arrays


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


HIDDEN = torch.tensor([[True, True, False, False], [True, True, True, False], [False] * 4])
CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "hidden": {"attn_mask": HIDDEN},
    "added": {"attn_mask": randn(3, 4)},
    "scaled": {"scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("case", CASES)
def test_attention_is_that_of_torch(case: str) -> None:
    heads = 2 if case == "grouped" else 4
    q, k, v = randn(2, 4, 3, 8), randn(2, heads, 4, 8), randn(2, heads, 4, 6)
    expected = F.scaled_dot_product_attention(q, k, v, **CASES[case])  # type: ignore[arg-type]
    with ClientFunctions():
        replaced = F.scaled_dot_product_attention(q, k, v, **CASES[case])  # type: ignore[arg-type]
    torch.testing.assert_close(replaced, expected)


class Encoder(nn.Module):
    """A transformer encoder with dropout in its attention."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.abs().sum(-1) < 1e-6  # padding tokens
        outputs: Tensor = self.head(self.encoder(x, src_key_padding_mask=hidden).mean(1))
        return outputs


X, Y = randn(3, 6, 5, 8), torch.arange(18).view(3, 6) % 3
X[:, :, 4] = 0.0


def test_an_encoder_is_vectorized_and_equals_torch() -> None:
    objective = Objective(Encoder(), x=X[0])
    assert objective.vectorized
    expected = copy.deepcopy(Encoder()).eval()
    params = stack([objective.params()] * 3)
    torch.testing.assert_close(
        vmap(objective.outputs)(params, X), torch.stack([expected(x) for x in X])
    )


def test_the_gradient_of_an_encoder_is_that_of_autograd() -> None:
    module = Encoder(dropout=0.0)
    objective = Objective(module, x=X[0])
    params, weight = stack([objective.params()] * 3), torch.ones(3, 6)
    gradient = objective.gradient(params, ClientStackedBatch(X, Y, weight, torch.arange(3)))
    for client in range(3):
        module.zero_grad()
        F.cross_entropy(module(X[client]), Y[client]).backward()  # type: ignore[no-untyped-call]
        for name, value in module.named_parameters():
            assert value.grad is not None
            torch.testing.assert_close(gradient[name][client], value.grad, rtol=1e-4, atol=1e-6)


def test_dropout_in_attention_comes_from_the_key() -> None:
    objective = Objective(Encoder(0.5), x=X[0])
    params = objective.params()
    weight = torch.ones(6)
    first, again, other = (
        objective.training_outputs(params, X[0], torch.tensor(key), weight)[0] for key in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    together, _ = vmap(objective.training_outputs)(
        stack([params] * 3), torch.stack([X[0]] * 3), torch.tensor([2, 1, 0]), torch.ones(3, 6)
    )
    torch.testing.assert_close(together[1], first)


def test_the_functions_of_models_are_found() -> None:
    class OwnDropout(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    x = randn(3, 5)
    assert uses_replaced_functions(OwnDropout(), x)
    assert uses_replaced_functions(nn.Sequential(nn.Linear(5, 2), nn.Dropout()), x)
    assert uses_replaced_functions(nn.BatchNorm1d(5), None)
    assert not uses_replaced_functions(nn.Linear(5, 2), x)
    assert not uses_replaced_functions(nn.Linear(5, 2), None)


def test_dropout_called_as_a_function_is_vectorized() -> None:
    class OwnDropout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(F.dropout(x.mean(1), 0.5, self.training))

    class Layer(OwnDropout):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.dropout(x.mean(1)))

    clients = from_arrays([(X[i], Y[i]) for i in range(3)])
    results = [
        fc.run(fc.FedAvg(), clients, module, rounds=2, clients_per_round=1.0, batch_size=2)
        for module in (OwnDropout(), Layer())
    ]
    first, second = (result.model_of(0).state_dict() for result in results)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_padding_does_not_change_the_statistics_of_a_batch() -> None:
    objective = Objective(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    params, x = objective.params(), randn(5, 4)
    padded = torch.cat([x, 100 * torch.ones(3, 4)])
    weight = torch.tensor([1.0] * 5 + [0.0] * 3)
    y = torch.zeros(8, dtype=torch.int64)
    key = torch.tensor(0)
    expected = objective.gradient(params, Batch(x, y[:5], weight[:5], key))
    gradient = objective.gradient(params, Batch(padded, y, weight, key))
    for name, value in expected.items():
        torch.testing.assert_close(gradient[name], value)
    _, statistics = objective.training_outputs(params, padded, key, weight)
    torch.testing.assert_close(statistics["0.running_mean"], 0.1 * x.mean(0))
    torch.testing.assert_close(statistics["0.running_var"], 0.9 + 0.1 * x.var(0))
