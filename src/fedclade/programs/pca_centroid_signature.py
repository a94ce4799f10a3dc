"""PCA signatures: a client projects its samples on a few principal axes and replies with the
k-means centers of the projections.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Batch
from fedclade.core.inputs import flat_numbers
from fedclade.core.pca import principal_axes
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree
from fedclade.programs.encoder_signature import signature


def pca_basis(x: Tensor, components: int) -> Tree:
    """`mean` (d,) and `axes` (components, d) of the samples x (n, d): principal axes in float32.

    If the samples vary in fewer directions, the remaining axes are zeros.
    """
    mean, axes, values = principal_axes(x, components)
    # A direction without variance is rounding noise: its axis would be arbitrary.
    varies = values > values.max() * max(x.shape) * torch.finfo(torch.float32).eps
    return {"mean": mean.float(), "axes": torch.where(varies[:, None], axes, 0.0).float()}


@serializable_program
def pca_signature(k: int, components: int) -> Program:
    """Project all samples and cluster the projections. The reply is `centres` (k, components), of
    which the first `count` are real.

    The basis is the one in `broadcast`, as `pca_basis` returns it. If `broadcast` has none, the
    client fits a basis to its samples.

    Args:
        k: the number of centers.
        components: the number of principal components.
    """
    # The centers of the samples themselves.
    plain = cast(Program, signature(Encoder(nn.Flatten()), k))

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return plain.step(
            broadcast, const, carry, batch._replace(x=flat_numbers(batch.x, "pca_hc"))
        )

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        x = carry["codes"].float()
        basis = broadcast if "axes" in broadcast else pca_basis(x, components)
        codes = (x - basis["mean"].to(x)) @ basis["axes"].to(x).T
        return plain.finish(broadcast, const, {**carry, "codes": codes})

    return replace(plain, step=step, finish=finish, name="pca_signature")
