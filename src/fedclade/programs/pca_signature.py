"""Signatures by principal components: a client projects its samples on a few axes and replies with
the centres of the projections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Batch
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree
from fedclade.errors import InvalidInputError
from fedclade.programs.encoder_signature import signature


def principal_axes(x: Tensor, components: int) -> Tree:
    """`mean` (d,) and `axes` (components, d) of the samples x (n, d): unit vectors by falling
    variance.

    Samples that vary in fewer directions have fewer axes; the rest are zeros. Of the two signs of
    an axis the one is taken that makes its largest loading positive.
    """
    x = x.cpu().double()
    mean = x.mean(0)
    lengths, found = torch.linalg.svd(x - mean, full_matrices=False)[1:]
    # What is left of a direction in which nothing varies is rounding: its axis would be arbitrary.
    real = found[lengths > lengths.max() * max(x.shape) * torch.finfo(torch.float32).eps][
        :components
    ]
    largest = real.gather(1, real.abs().argmax(1, keepdim=True))
    axes = x.new_zeros(components, x.shape[1])
    axes[: len(real)] = real * largest.sign()
    return {"mean": mean.float(), "axes": axes.float()}


def flat(x: Tensor) -> Tensor:
    """Inputs as vectors of numbers: (n, d)."""
    if not x.is_floating_point():
        raise InvalidInputError(
            "pca_hc: inputs that are whole numbers (tokens) have no principal components; use"
            " another method."
        )
    return x.flatten(1)


@serializable_program
def pca_signature(k: int, components: int) -> Program:
    """Project all samples and cluster the projections: replies with `centres` (k, components), of
    which the first `count` are real.

    The axes are those sent to all in `shared`, as `principal_axes` gives them, or the client's own
    where nothing was sent.
    """
    plain = cast(
        Program, signature(Encoder(nn.Flatten()), k)
    )  # the centres of the samples themselves

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return plain.step(broadcast, const, carry, batch._replace(x=flat(batch.x)))

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        x = carry["codes"].float()
        basis = broadcast if "axes" in broadcast else principal_axes(x, components)
        codes = (x - basis["mean"].to(x)) @ basis["axes"].to(x).T
        return plain.finish(broadcast, const, {**carry, "codes": codes})

    return replace(plain, step=step, finish=finish, name="pca_signature")
