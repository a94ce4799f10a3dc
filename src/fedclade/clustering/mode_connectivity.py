"""Mode connectivity (FedGMCC): polygonal chains with one bend between two models, the loss along a
chain, the clusters of well-connected models, and the mean along chains.

Symbols of the FedGMCC paper: the chain γ_θ(u) has two straight parts, from w_k (u = 0) to the bend
θ (u = ½) and from there to w_l (u = 1). The loss of a point on it is
½ (‖f(γ_θ(u)) − f(w_k)‖² + ‖f(γ_θ(u)) − f(w_l)‖²), averaged over outputs f and inputs. With m the
mean of f(w_k) and f(w_l) this is ‖f(γ_θ(u)) − m‖² + ¼ ‖f(w_k) − f(w_l)‖². A bend can change only
the first term. Models are stacked, one per row, and pairs do not affect each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedclade.clustering.graph import components
from fedclade.errors import InvalidInputError, require

Models: TypeAlias = dict[str, Tensor]
Outputs: TypeAlias = Callable[[Models, Tensor], Tensor]
"""(parameters, inputs) -> outputs."""

# The learning rate of Adam on a bend. Adam moves a weight by about this much in a step; larger
# rates overshoot (measured, docs/methods/fedgmcc.md).
LR = 3e-4
BLOCK_BYTES = 64 * 2**20  # the memory of the pairs whose bends are fitted together
CACHE_BYTES = 128 * 2**20  # the memory of cached bends: 200 pairs of a model of 160,000 numbers


def midpoint_rule(points: int) -> list[float]:
    """The centers of equal parts of [0, 1], the midpoint rule for E_u. It is symmetric, and it
    excludes the ends, which no bend can change.
    """
    return [(part + 0.5) / points for part in range(points)]


# Two points would not constrain the bend, which is at ½. More than three do not lower the loss
# further.
LEARNED_AT = midpoint_rule(3)
SCORED_AT = midpoint_rule(8)


def chain(a: Models, bend: Models, b: Models, u: float) -> Models:
    """The models γ_θ(u) of each pair: 2(uθ + (½−u)a) for u < ½, else 2((u−½)b + (1−u)θ).

    Args:
        a: the models w_k.
        bend: the bends θ.
        b: the models w_l.
        u: the position on the chain, from 0 to 1.
    """
    start, end, fraction = (a, bend, 2 * u) if u < 0.5 else (bend, b, 2 * u - 1)
    return {name: torch.lerp(start[name], end[name], fraction) for name in start}


def chain_mean(a: Models, bend: Models, b: Models) -> Models:
    """The mean E_u γ_θ(u) of each pair's chain, exactly, for u uniform on [0, 1]."""
    return {name: (a[name] + 2 * bend[name] + b[name]) / 4 for name in a}


def midpoint(a: Models, b: Models) -> Models:
    """The bend of each pair's straight path."""
    return {name: torch.lerp(a[name], b[name], 0.5) for name in a}


def losses_along(
    outputs: Outputs, a: Models, bend: Models, b: Models, inputs: Tensor, at: Sequence[float]
) -> Tensor:
    """(len(at), pairs) the loss on the chain of each pair.

    Args:
        outputs: f, the outputs of one model: (parameters, inputs) -> outputs.
        a: (pairs, …) the models w_k.
        bend: (pairs, …) the bends θ.
        b: (pairs, …) the models w_l.
        inputs: the inputs of f.
        at: the positions u.
    """
    loss = _Loss(outputs, a, b, inputs)
    with torch.no_grad():
        return torch.stack([loss(chain(a, bend, b, u)) for u in at])


def fit_bends(
    outputs: Outputs,
    a: Models,
    b: Models,
    inputs: Tensor,
    steps: int,
    lr: float = LR,
    straight: tuple[str, ...] = (),
) -> Models:
    """(pairs, …) the bends θ after some steps of Adam from the midpoint, on the mean loss along
    each chain.

    Args:
        outputs: f, the outputs of one model: (parameters, inputs) -> outputs.
        a: (pairs, …) the models w_k.
        b: (pairs, …) the models w_l.
        inputs: the inputs of f.
        steps: the number of steps; 0 gives the straight path.
        lr: the learning rate of Adam.
        straight: the names of what stays at the midpoint, such as running statistics.
    """
    middle = midpoint(a, b)
    if not steps:
        return middle
    loss = _Loss(outputs, a, b, inputs)
    fitted = {
        name: value.clone().requires_grad_()
        for name, value in middle.items()
        if name not in straight
    }
    bend = middle | fitted
    optimizer = torch.optim.Adam(fitted.values(), lr=lr)
    with torch.enable_grad(), _deterministic():
        for _ in range(steps):
            optimizer.zero_grad()
            # One point at a time: only its activations are held for the backward pass.
            for u in LEARNED_AT:
                torch.autograd.backward(loss(chain(a, bend, b, u)).sum() / len(LEARNED_AT))
            optimizer.step()
    # If outputs are not finite, a bend cannot be fitted: the path stays straight.
    return {
        name: torch.where(value.isfinite(), value, middle[name]).detach()
        for name, value in bend.items()
    }


def _deterministic() -> AbstractContextManager[None]:
    """Use deterministic kernels for convolutions on CUDA."""
    cudnn = torch.backends.cudnn
    flags: AbstractContextManager[None] = cudnn.flags(
        enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=cudnn.allow_tf32
    )
    return flags


class _Loss:
    """The loss (pairs,) of one point per pair: the distance of its outputs from those of both ends
    of the pair.
    """

    def __init__(self, outputs: Outputs, a: Models, b: Models, inputs: Tensor) -> None:
        self.outputs, self.inputs = vmap(outputs, (0, None)), inputs
        with torch.no_grad():
            self.ends = self.outputs(a, inputs), self.outputs(b, inputs)

    def __call__(self, models: Models) -> Tensor:
        outputs = self.outputs(models, self.inputs)
        first, second = ((outputs - end).square().flatten(1).mean(1) for end in self.ends)
        return (first + second) / 2


class Paths:
    """The fitted chains between all pairs k < l of a stack of models.

    Bends are fitted in blocks of pairs, so that the memory is bounded for any number of pairs. As
    many bends as fit into CACHE_BYTES are cached. The others are fitted again when they are needed.
    Neither changes a result beyond rounding.

    Args:
        outputs: f, the outputs of one model: (parameters, inputs) -> outputs.
        models: (models, …) the models w_k.
        inputs: the server's inputs.
        steps: the number of steps of Adam for each bend; 0 for straight paths.
        lr: the learning rate of Adam.
    """

    def __init__(
        self,
        outputs: Outputs,
        models: Models,
        inputs: Tensor,
        steps: int,
        lr: float = LR,
        straight: tuple[str, ...] = (),
    ) -> None:
        self.straight = straight
        self.outputs, self.models, self.inputs, self.steps, self.lr = (
            outputs,
            models,
            inputs,
            steps,
            lr,
        )
        self.count = len(next(iter(models.values())))
        self.pairs = torch.combinations(torch.arange(self.count))
        self.bytes_of_a_pair = _bytes_of_a_pair(outputs, models, inputs, straight)
        self._block = max(1, BLOCK_BYTES // self.bytes_of_a_pair)
        self._cached = {name: value[:0] for name, value in models.items()}  # of the first pairs

    def scores(self) -> Tensor:
        """(pairs,) the mean loss along the chain of each pair, in float64."""
        scores, cached = [], []
        for which in self._blocks(torch.arange(len(self.pairs))):
            a, bend, b = self._fitted(which)
            scores.append(
                losses_along(self.outputs, a, bend, b, self.inputs, SCORED_AT)
                .double()
                .mean(0)
                .cpu()
            )
            if (int(which[-1]) + 1) * _bytes(self.models) <= CACHE_BYTES * self.count:
                cached.append(bend)
        if cached:
            self._cached = {
                name: torch.cat([block[name] for block in cached]) for name in self.models
            }
        return torch.cat([torch.zeros(0, dtype=torch.float64), *scores])

    def cluster(self, percentile: float) -> Tensor:
        """(models,) the cluster of each model, numbered by first appearance. Clusters are the
        connected components of the well-connected pairs.

        Args:
            percentile: a pair is well connected if its score is at most this percentile of all
                scores.
        """
        from scipy.sparse import csr_array

        scores = self.scores()
        finite = scores[scores.isfinite()].numpy()  # a model with infinite outputs stays alone
        close = (
            self.pairs[scores <= np.percentile(finite, percentile)]
            if len(finite)
            else self.pairs[:0]
        )
        links = csr_array(
            (np.ones(len(close), bool), tuple(close.T.numpy())), shape=(self.count, self.count)
        )
        return torch.from_numpy(components(links))

    def mean(self, members: Tensor) -> Models:
        """The mean along the chains of all pairs of these models; for a single model, that model.

        Args:
            members: the rows of the models.
        """
        if len(members) == 1:
            return {name: value[members[0]] for name, value in self.models.items()}
        inside = torch.isin(self.pairs, members).all(1).nonzero().flatten()
        sums = {
            name: torch.zeros_like(value[0], dtype=torch.float64)
            for name, value in self.models.items()
        }
        for which in self._blocks(inside):
            for name, value in chain_mean(*self._fitted(which)).items():
                sums[name] += value.sum(0, dtype=torch.float64)
        return {
            name: (value / len(inside)).to(self.models[name].dtype) for name, value in sums.items()
        }

    def _blocks(self, which: Tensor) -> Iterator[Tensor]:
        return (which[start : start + self._block] for start in range(0, len(which), self._block))

    def _fitted(self, which: Tensor) -> tuple[Models, Models, Models]:
        """The start, the bend and the end of the pairs with these indices, in ascending order."""
        a, b = (
            {name: value[end] for name, value in self.models.items()} for end in self.pairs[which].T
        )
        if which[-1] < len(next(iter(self._cached.values()))):
            return a, {name: value[which] for name, value in self._cached.items()}, b
        return a, fit_bends(self.outputs, a, b, self.inputs, self.steps, self.lr, self.straight), b


def _bytes(models: Models) -> int:
    return sum(value.numel() * value.element_size() for value in models.values())


def _bytes_of_a_pair(
    outputs: Outputs, models: Models, inputs: Tensor, straight: tuple[str, ...]
) -> int:
    """The bytes of one pair while its bend is fitted: eight models (both ends, the bend, a point of
    the chain, their gradients, Adam's two means) and the activations saved for the backward pass.
    """
    model = {
        name: value[0].detach().requires_grad_(name not in straight)
        for name, value in models.items()
    }
    saved = 0

    def count(value: Tensor) -> Tensor:
        nonlocal saved
        saved += value.numel() * value.element_size()
        return value

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda value: value):
        outputs(model, inputs)
    return 8 * _bytes(model) + saved


class Curves(NamedTuple):
    """The losses between two models, for plots.

    Args:
        u: (points,) the positions, from 0 to 1.
        linear: (points,) the losses on the straight path.
        bent: (points,) the losses on the chain with a fitted bend.
    """

    u: Tensor
    linear: Tensor
    bent: Tensor


def curve_losses(
    model_a: nn.Module, model_b: nn.Module, inputs: Tensor, steps: int = 100, points: int = 21
) -> Curves:
    """The loss along the path from one module to another: how much the outputs differ from those of
    both ends.

    Args:
        model_a: the module at u = 0. Its buffers are used on the whole path.
        model_b: the module at u = 1, of the same architecture.
        inputs: the inputs on which outputs are compared, and on which the bend is fitted.
        steps: the number of steps of Adam that fit the bend, from the midpoint.
        points: the number of points on the path, with both ends.
    """
    require(steps >= 0, "steps", steps, "must be at least 0")
    require(points >= 2, "points", points, "must be at least 2, for both ends")
    a, b = (
        {name: value.detach()[None] for name, value in model.named_parameters()}
        for model in (model_a, model_b)
    )
    shapes_a, shapes_b = (
        {name: tuple(value.shape[1:]) for name, value in model.items()} for model in (a, b)
    )
    if shapes_a != shapes_b:
        raise InvalidInputError(
            f"model_b: its parameters are {shapes_b}, those of model_a are {shapes_a}. Use two"
            " modules of the same architecture.",
            "model_b",
        )
    module = copy.deepcopy(model_a).eval()

    def outputs(params: Models, x: Tensor) -> Tensor:
        result: Tensor = functional_call(module, params, (x,))
        return result

    u = torch.linspace(0, 1, points)
    bends = midpoint(a, b), fit_bends(outputs, a, b, inputs, steps)
    return Curves(
        u, *(losses_along(outputs, a, bend, b, inputs, u.tolist())[:, 0] for bend in bends)
    )
