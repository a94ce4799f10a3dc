"""PACFL's signature: the subspace of a client's samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch
from fedclade.core.inputs import flat_numbers
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree

_BLOCK = 256  # samples read at a time


@serializable_program
def data_subspace(p: int) -> Program:
    """The first p left singular vectors of the matrix whose columns are the client's samples. The
    reply is `basis` (p, d): a vector in each row; rows of zeros if the samples span fewer
    dimensions.

    Args:
        p: the number of vectors.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {}, {}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        x = flat_numbers(batch.x, "pacfl").cpu().double()
        return {"x": torch.cat([carry["x"], x]) if carry else x}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        x = carry["x"]
        _, values, vectors = torch.linalg.svd(x, full_matrices=False)
        # A direction without any sample is rounding noise: its vector would be arbitrary.
        spanned = values > values.max() * max(x.shape) * torch.finfo(torch.float32).eps
        basis = torch.where(spanned[:, None], vectors, 0.0)[:p]
        return {"basis": F.pad(basis, (0, 0, 0, p - len(basis))).float()}, None

    return Program(start, step, finish, Batches.whole(_BLOCK), "data_subspace", vectorized=False)
