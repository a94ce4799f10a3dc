"""Functions of torch that differ for clients of a federation, and the context that replaces them.

- BatchNorm takes its statistics from the real examples of a batch, not from its padding.
- Dropout takes its randomness from the step's key. Masks of torch's generator would depend on which
  clients run together.
- Attention is written as two matrix products and a softmax. The fused kernels of torch have no
  batching rule for their backward pass: under vmap they run in a loop, draw their own randomness or
  fail on CUDA.
- GroupNorm on CUDA keeps the layout of its inputs (kernels/group_norm.py).
- Average pooling to one number is a mean. torch's function sets the strides of its result, which
  vmap does in a loop.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedclade.core.inputs import Inputs, call
from fedclade.core.kernels.activation_taps import in_stacked_pass
from fedclade.core.kernels.group_norm import GroupNorm
from fedclade.core.rng import bernoulli, dropout_factors, hash_bits

_BATCH_NORM = inspect.signature(F.batch_norm)
_DROPOUTS: dict[Any, bool] = {  # function: whether a mask drops whole channels
    F.dropout: False,
    F.dropout1d: True,
    F.dropout2d: True,
    F.dropout3d: True,
}
_ATTENTION = F.scaled_dot_product_attention
# This function of Python calls attention and dropout. In a copy without the check for modes they
# are replaced too.
_MULTI_HEAD = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda _: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)
_POOLING = F.adaptive_avg_pool2d
REPLACED = (
    F.batch_norm,
    F.group_norm,
    _ATTENTION,
    F.multi_head_attention_forward,
    _POOLING,
    *_DROPOUTS,
)


def uses_replaced_functions(module: nn.Module, x: Inputs | None) -> bool:
    """Whether a forward pass calls one of the functions that are replaced here.

    Args:
        module: the model.
        x: a few inputs; None to look at the types of its layers.
    """
    if x is None:
        dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
        kinds = (nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention, *dropouts)
        return any(isinstance(layer, kinds) for layer in module.modules())
    called: set[Any] = set()

    class Record(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.add(func)
            return func(*args, **(kwargs or {}))

    try:
        with torch.random.fork_rng(), torch.no_grad(), Record():
            call(module, x)
    except Exception:  # a model that cannot take these inputs is refused later, with the reason
        return True
    return not called.isdisjoint(REPLACED)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if weight is None or bias is None or input.ndim < 3:
        return F.group_norm(input, num_groups, weight, bias, eps)
    outputs: Tensor = GroupNorm.apply(input, weight, bias, num_groups, eps)  # type: ignore[no-untyped-call]
    return outputs


def _adaptive_pooling(input: Tensor, output_size: Any) -> Tensor:
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return _POOLING(input, output_size)


class ClientFunctions(TorchFunctionMode):
    """In this context the functions above are those of one client.

    It also replaces them in layers of other libraries, which call torch's functions themselves.

    Args:
        key: the randomness of the step; None in evaluation.
        weight: (B,) the weight of each example, 0 for padding; None if all are real.
        alone: whether the client runs outside of vmap.
    """

    def __init__(
        self, key: Tensor | None = None, weight: Tensor | None = None, alone: bool = False
    ) -> None:
        super().__init__()
        self.key, self.weight, self.alone = key, weight, alone
        self.calls = count()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and self.weight is not None:
            given = _BATCH_NORM.bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments.pop("training") and not len(given.arguments["input"]) % len(
                self.weight
            ):
                return self._batch_norm(**given.arguments)
        elif func is _ATTENTION:
            return self._attention(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        elif func is F.group_norm and args[0].device.type == "cuda" and in_stacked_pass():
            return _group_norm(*args, **kwargs)
        elif func is _POOLING and not self.alone:
            return _adaptive_pooling(*args, **kwargs)
        elif func in _DROPOUTS:
            return self._dropout(_DROPOUTS[func], *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        whole_channels: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """Each call in a forward pass has its own mask."""
        x = input
        if not training or self.key is None or p == 0.0:
            return x
        if p >= 1:
            return torch.zeros_like(x)
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if whole_channels else tuple(x.shape)
        if self.alone and x.device.type == "cpu" and x.dtype == torch.float32:
            return x * dropout_factors(hash_bits(int(self.key), next(self.calls)), p, shape)
        dropped = bernoulli(hash_bits(self.key, next(self.calls)), p, shape)
        return x.masked_fill(dropped, 0.0) / (1.0 - p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if self.alone and (dropout_p == 0.0 or self.key is None):
            return _ATTENTION(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (
                each.repeat_interleave(query.shape[-3] // each.shape[-3], -3)
                for each in (key, value)
            )
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * factor) @ key.mT
        if is_causal:
            attn_mask = scores.new_ones(scores.shape[-2:]).tril().bool()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        if attn_mask is not None:  # a query that sees no key gets zeros, as in torch
            weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
        return self._dropout(False, weights, dropout_p) @ value

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """BatchNorm in training. A batch with one value per channel has no variance: then the
        running statistics are used and stay as they are.
        """
        assert self.weight is not None
        x = input
        axes, channels = (0, *range(2, x.ndim)), (1, -1, *[1] * (x.ndim - 2))
        # A model may have merged the axes of examples and of positions in a sequence.
        real = (self.weight > 0).to(self.weight.dtype)
        mask = real.repeat_interleave(len(x) // len(self.weight))
        count = mask.sum() * math.prod(x.shape[2:])
        share = (mask / count.clamp_min(1)).view(-1, *[1] * (x.ndim - 1))
        mean = (x * share).sum(axes)
        var = ((x - mean.view(channels)).square() * share).sum(axes)
        if running_mean is not None and running_var is not None:
            has_variance = count > 1
            unbiased = var * (count / (count - 1).clamp_min(1))
            for running, new in ((running_mean, mean), (running_var, unbiased)):
                after = running + momentum * (new.detach() - running)
                running.copy_(torch.where(has_variance, after, running))
            mean = torch.where(has_variance, mean, running_mean)
            var = torch.where(has_variance, var, running_var)
        factor = (var + eps).rsqrt()
        if weight is not None:
            factor = factor * weight
        result = (x - mean.view(channels)) * factor.view(channels)
        return result if bias is None else result + bias.view(channels)
