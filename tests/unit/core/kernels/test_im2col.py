"""Convolutions in columns: torch's outputs and gradients, for one client and under vmap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.core.kernels.im2col import Convolution, in_columns, weight_gradient

CLIENTS, BATCH, SIDE, OUT = 3, 2, 6, 5


def inputs(channels: int, height: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs (clients, batch, …, channels) and weights (clients, out, height, width, channels)."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, BATCH, SIDE, SIDE, channels, generator=draw, dtype=dtype)
    weight = torch.randn(CLIENTS, OUT, height, width, channels, generator=draw, dtype=dtype)
    return x, weight


def expected(x: Tensor, weight: Tensor, top: int, left: int) -> Tensor:
    """Of one client, by torch, channels last."""
    outputs = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), padding=(top, left))
    return outputs.permute(0, 2, 3, 1)


# Channels of 16 bytes are copied as one wide number, such as four of float32.
CASES = pytest.mark.parametrize(
    ("channels", "dtype"), [(4, torch.float32), (3, torch.float32), (4, torch.float64)]
)
SHAPES = pytest.mark.parametrize(
    ("height", "width", "top", "left"), [(3, 3, 1, 1), (5, 3, 2, 0), (1, 1, 0, 0), (2, 4, 0, 1)]
)


@CASES
@SHAPES
def test_outputs_are_those_of_torch(
    channels: int, dtype: torch.dtype, height: int, width: int, top: int, left: int
) -> None:
    x, weight = inputs(channels, height, width, dtype)
    batched = torch.func.vmap(lambda x, weight: Convolution.apply(x, weight, top, left))
    outputs, columns = batched(x, weight)
    for client in range(CLIENTS):
        alone, own_columns = Convolution.apply(x[client], weight[client], top, left)
        wanted = expected(x[client], weight[client], top, left)
        torch.testing.assert_close(alone, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outputs[client], wanted, rtol=1e-5, atol=1e-5)
        # A place's columns times the weight are its output.
        product = own_columns @ weight[client].flatten(1).T
        torch.testing.assert_close(product, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(columns[client], own_columns)


@CASES
@SHAPES
def test_the_error_of_the_input_is_that_of_torch(
    channels: int, dtype: torch.dtype, height: int, width: int, top: int, left: int
) -> None:
    x, weight = inputs(channels, height, width, dtype)
    x.requires_grad_()
    batched = torch.func.vmap(lambda x, weight: Convolution.apply(x, weight, top, left)[0])
    outputs = batched(x, weight)
    error = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    (found,) = torch.autograd.grad(outputs, x, error)
    wanted_outputs = torch.stack(
        [expected(x[client], weight[client], top, left) for client in range(CLIENTS)]
    )
    (wanted,) = torch.autograd.grad(wanted_outputs, x, error)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels", [3, 8])
def test_columns_of_bfloat16_are_copies(channels: int) -> None:
    x, weight = (value.bfloat16() for value in inputs(channels, 3, 3, torch.float32))
    columns = Convolution.apply(x[0], weight[0], 1, 1)[1]
    wanted = Convolution.apply(x[0].float(), weight[0].float(), 1, 1)[1]
    assert columns.dtype == torch.bfloat16
    assert torch.equal(columns.float(), wanted)


def test_one_weight_for_all_clients() -> None:
    x, weight = inputs(4, 3, 3, torch.float32)
    batched = torch.func.vmap(
        lambda x, weight: Convolution.apply(x, weight, 1, 1)[0], in_dims=(0, None)
    )
    for client, outputs in enumerate(batched(x, weight[0])):
        torch.testing.assert_close(
            outputs, expected(x[client], weight[0], 1, 1), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("places", [1, 255, 1_000, 4_096, 4_099, 12_288])
@pytest.mark.parametrize("wide", [False, True])
def test_the_gradient_of_a_weight_is_a_product_over_all_places(places: int, wide: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    out, width = (1_600, 320) if wide else (OUT, 27)  # one client's blocks, or too few
    error = torch.randn(2, places, out, generator=draw, dtype=torch.float64)
    columns = torch.randn(2, places, width, generator=draw, dtype=torch.float64)
    found = weight_gradient(error, columns)
    torch.testing.assert_close(found, error.mT @ columns)


def test_columns_are_for_cuda() -> None:
    assert not in_columns(torch.zeros(1))
    assert not in_columns(torch.zeros(1, device="meta"))
