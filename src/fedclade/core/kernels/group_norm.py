"""GroupNorm of many clients on CUDA, in any layout of memory.

torch's kernel needs its inputs with the channels first in memory, and convolutions are faster with
the channels last. Here a pass over the inputs keeps their layout, so that no layer between two
convolutions copies them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedclade.core.kernels.client_axis import with_client_axis


class GroupNorm(torch.autograd.Function):
    """x (B, channels, places, …) with weight and bias (channels,), as F.group_norm. Under vmap for
    many clients.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        return torch.group_norm(x, groups, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, int]:
        stacked = with_client_axis(info, in_dims[:3], (x, weight, bias))
        return _Stacked.apply(*stacked, groups, eps), 0  # type: ignore[no-untyped-call]


class _Stacked(torch.autograd.Function):
    """The same for K clients, with a leading axis in x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> Tensor:
        var, mean = torch.var_mean(_by_groups(x, groups), tuple(range(3, x.ndim + 1)), correction=0)
        root = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, root)
        factor = _of_channels(root, weight) * weight[:, None]
        offset = bias[:, None] - _of_channels(mean, weight) * factor
        return torch.addcmul(_like(offset, x), x, _like(factor, x))

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        """With s = Σ weight · error · x and e = Σ weight · error over a group of n numbers, and
        c = (e · mean - s) · root³ / n, the error of x is
        weight · root · error + c · x - c · mean - e · root / n.
        """
        x, weight, mean, root = ctx.saved_tensors
        groups, places = mean.shape[2], tuple(range(3, x.ndim))
        size = x[0, 0].numel() / groups
        products, errors = (error * x).sum(places), error.sum(places)  # (K, B, channels)

        def by_group(value: Tensor) -> Tensor:
            return _by_groups(value * weight[:, None], groups).sum(-1)

        of_group = by_group(errors)
        c = (of_group * mean - by_group(products)) * root**3 / size
        offset = -c * mean - of_group * root / size
        channel_root, channel_mean = _of_channels(root, weight), _of_channels(mean, weight)
        of_x = torch.addcmul(
            _like(_of_channels(offset, weight), x), x, _like(_of_channels(c, weight), x)
        )
        of_x = torch.addcmul(of_x, error, _like(channel_root * weight[:, None], x))
        of_weight = ((products - errors * channel_mean) * channel_root).sum(1)
        return of_x, of_weight, errors.sum(1), None, None


def _by_groups(value: Tensor, groups: int) -> Tensor:
    """(K, B, channels, …) as (K, B, groups, channels / groups, …)."""
    return value.view(*value.shape[:2], groups, -1, *value.shape[3:])


def _of_channels(value: Tensor, weight: Tensor) -> Tensor:
    """(K, B, groups) as (K, B, channels)."""
    return value.repeat_interleave(weight.shape[1] // value.shape[2], 2)


def _like(value: Tensor, x: Tensor) -> Tensor:
    return value.view(*value.shape, *[1] * (x.ndim - value.ndim))
