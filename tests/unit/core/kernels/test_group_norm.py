"""GroupNorm of a stack of clients equals torch's, in both layouts of memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedclade.core.kernels.group_norm import GroupNorm


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("places", [(5,), (5, 3)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_outputs_and_gradients_equal_those_of_torch(
    groups: int, places: tuple[int, ...], channels_last: bool
) -> None:
    torch.manual_seed(0)
    x, error = (torch.randn(3, 4, 6, *places, dtype=torch.float64) for _ in range(2))
    if channels_last:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)
    weight, bias = (torch.randn(3, 6, dtype=torch.float64) for _ in range(2))
    leaves = [value.requires_grad_() for value in (x, weight, bias)]

    def by_kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return GroupNorm.apply(x, weight, bias, groups, 1e-3)

    got = vmap(by_kernel)(*leaves)
    expected = torch.stack(
        [F.group_norm(x, groups, w, b, 1e-3) for x, w, b in zip(*leaves, strict=True)]
    )
    torch.testing.assert_close(got, expected)
    assert got.stride() == x.stride()
    for ours, theirs in zip(
        torch.autograd.grad((got * error).sum(), leaves),
        torch.autograd.grad((expected * error).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
