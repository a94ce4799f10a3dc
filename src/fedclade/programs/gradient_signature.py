"""Signatures by sketches: a client's signature is the mean of a vector per sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.inputs import Inputs, select, tensors_of
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, tree_map
from fedclade.core.rng import fold_in, hash_bits
from fedclade.errors import require
from fedclade.programs.gaussian_mechanism import MOMENT, SUM, after, clipped, noise_for, trace_of

SignatureKind: TypeAlias = Literal["gradient", "features", "joint"]
Sketch: TypeAlias = Callable[[Tree, Batch], Tensor]
"""(params, batch) -> (samples, e): a vector per sample."""

_FEATURES_PER_CLASS = 4
LARGEST_PROJECTION = 2**26
"""The largest number of entries of one projection matrix. A language model with 50 000 words would
need a matrix of many gigabytes.
"""


def projection(key: int, inputs: int, outputs: int, device: torch.device) -> Tensor:
    """A random projection with signs from the key, scaled to preserve norms on average. Clients and
    server compute it from the key; it is never sent.
    """
    start = torch.tensor(key & 0xFFFFFFFF, device=device)
    signs = (
        hash_bits(hash_bits(start, key >> 32), torch.arange(inputs * outputs, device=device)) & 1
    )
    return (signs.to(torch.float32) * 2 - 1).view(inputs, outputs) / math.sqrt(outputs)


def sketch_of(objective: Objective, kind: SignatureKind, size: int, key: int) -> Sketch:
    """The sketch of one kind.

    "gradient": the gradient of the sample's loss with respect to the last layer, (d loss / d
    outputs) x [h(x), 1], projected to `size` numbers. It depends on p(x), p(y) and p(y | x). The
    signs of the projection of a very large layer are products of a sign for each output and one
    for each input.
    "features": u(x), a projection of h(x), and its squares. It depends on p(x) only and needs no
    labels. "joint": for each class an indicator and a few numbers of u(x), so that the means are
    class counts and class-conditional means.

    Args:
        objective: the model and its loss.
        kind: the kind of the sketch.
        size: the dimension; see `dimensions`.
        key: the randomness of the projection.
    """
    head = objective.head_layer()
    inputs, outputs, device = head.in_features, head.out_features, head.weight.device
    if kind == "gradient":
        is_large = outputs * (inputs + 1) * size > LARGEST_PROJECTION
        onto = projection(key, outputs if is_large else outputs * (inputs + 1), size, device)
        onto_h = math.sqrt(size) * projection(fold_in(key, "inputs"), inputs + 1, size, device)

        def gradient(params: Tree, batch: Batch) -> Tensor:
            h, z = objective.features(params, batch.x)
            if z.shape == (*h.shape[:-1], outputs):
                error = grad(lambda z: objective.example_loss(z, batch.y).sum())(z)
            else:  # such as a classifier of all positions, of which the last one counts
                error = objective.head_error(params, batch)
            h = torch.cat([h, torch.ones_like(h[..., :1])], -1)
            if is_large:
                products: Tensor = (error @ onto) * (h @ onto_h)
                return products.flatten(1, -2).sum(1) if h.ndim > 2 else products
            return torch.einsum("b...c,b...u->bcu", error, h).flatten(1) @ onto

        return gradient

    onto = projection(key, inputs, size // 2 if kind == "features" else _FEATURES_PER_CLASS, device)

    def u(params: Tree, batch: Batch) -> Tensor:
        h, _ = objective.features(params, batch.x)
        return h.flatten(1, -2).mean(1) @ onto if h.ndim > 2 else h @ onto

    def features(params: Tree, batch: Batch) -> Tensor:
        return torch.cat([u(params, batch), u(params, batch) ** 2], -1)

    def joint(params: Tree, batch: Batch) -> Tensor:
        require(
            batch.y.ndim == 1,
            "method.signature",
            kind,
            "needs one label for each sample, and these are sequences; use 'gradient'",
        )
        values = torch.cat([torch.ones_like(batch.weight[:, None]), u(params, batch)], -1)
        classes = F.one_hot(batch.y, outputs).to(values.dtype)
        return torch.einsum("bc,bu->bcu", classes, values).flatten(1)

    return features if kind == "features" else joint


@serializable_program
def signature(objective: Objective, kind: SignatureKind, size: int, key: int) -> Program:
    """The mean of the sketch over a client's samples and the scatter about it (the upper triangle),
    under the client's model.

    Args:
        objective: the model and its loss.
        kind: the kind of the sketch.
        size: the dimension of the sketch.
        key: the randomness of the projection.
    """
    sketch = sketch_of(objective, kind, size, key)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        device = next(iter(params.values())).device
        width = dimensions(objective, kind, size)
        zero = torch.zeros(width, dtype=torch.float64, device=device)
        return params, {"sum": zero, "outer": zero[:, None] * zero, "count": zero.sum()}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        g = sketch(const, batch).double()
        weighted = g * batch.weight[:, None]
        return tree_map(
            torch.add,
            carry,
            {
                "sum": weighted.sum(0),
                "outer": weighted.T @ g,
                "count": batch.weight.sum(dtype=torch.float64),
            },
        )

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        mean = carry["sum"] / carry["count"]
        scatter = carry["outer"] - carry["count"] * mean[:, None] * mean
        row, column = torch.triu_indices(len(mean), len(mean), device=mean.device)
        # One index takes a third of the time of two.
        triangle = scatter.flatten().index_select(0, len(mean) * row + column)
        return {"mean": mean.float(), "scatter": triangle.float()}, None

    return Program(start, step, finish, Batches.whole(), "signature")


@serializable_program
def private_signature(
    objective: Objective,
    kind: SignatureKind,
    size: int,
    key: int,
    clip: float,
    noise: float,
    secret: int,
) -> Program:
    """`signature` of sketches clipped to the norm `clip`, with Gaussian noise
    (`gaussian_mechanism`) of `noise` times the sensitivity.

    The scatter is corrected for the noise of the mean: its expectation is the scatter of the
    clipped sketches.

    Args:
        objective: the model and its loss.
        kind: the kind of the sketch.
        size: the dimension of the sketch.
        key: the randomness of the projection.
        clip: the largest norm of an example's sketch.
        noise: the standard deviation of the noise, in units of the sensitivity.
        secret: the client's secret, from which the noise is made.
    """
    sketch = sketch_of(objective, kind, size, key)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return params, {"trace": trace_of(kind, size, key, clip, noise, *params.values())}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        def alone(x: Inputs, y: Tensor, weight: Tensor) -> Tensor:
            return sketch(const, Batch(select(x, None), y[None], weight[None], batch.key))[0]

        # Each example alone: if examples could affect each other, the sensitivity would differ.
        g = clipped(vmap(alone)(batch.x, batch.y, batch.weight).double(), clip)
        block = {"sum": g.sum(0), "moment": g.T @ g, "count": g.new_tensor(len(g))}
        sums = tree_map(torch.add, block, carry) if "sum" in carry else block
        return sums | {"trace": after(carry["trace"], *tensors_of(batch.x), batch.y)}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        count, e = carry["count"], len(carry["sum"])
        row, column = torch.triu_indices(e, e, device=carry["sum"].device)
        error = noise * noise_for(
            carry["trace"], secret, like=torch.cat([carry["sum"], carry["moment"][row, column]])
        )
        mean = (carry["sum"] + SUM * clip * error[:e]) / count
        moment = carry["moment"][row, column] + MOMENT * clip**2 * error[e:]
        scatter = (
            moment
            - count * mean[row] * mean[column]
            + (SUM * clip * noise) ** 2 / count * (row == column)
        )
        return {"mean": mean.float(), "scatter": scatter.float()}, None

    return Program(start, step, finish, Batches.whole(), "signature", vectorized=False)


def dimensions(objective: Objective, kind: SignatureKind, size: int) -> int:
    """The dimension of a sketch."""
    if kind == "joint":
        return objective.head_layer().out_features * (1 + _FEATURES_PER_CLASS)
    return size // 2 * 2 if kind == "features" else size


def symmetric(triangle: Tensor, size: int) -> Tensor:
    """The symmetric matrices with these upper triangles."""
    row, column = torch.triu_indices(size, size)
    full = triangle.new_zeros((*triangle.shape[:-1], size, size))
    full[..., row, column] = triangle
    full[..., column, row] = triangle
    return full
