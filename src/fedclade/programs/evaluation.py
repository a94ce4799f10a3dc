"""Losses and metrics of models on the clients' examples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.losses import ExampleLoss
from fedclade.core.output_metric import OutputMetric
from fedclade.core.program import Program
from fedclade.core.program_cache import cached_program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, tree_map


@cached_program
def evaluate_metrics(objective: Objective, metrics: tuple[tuple[str, ExampleLoss], ...]) -> Program:
    """Sums of the loss and of each metric over a client's examples, and the number of examples."""

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return params, {
            name: zero.clone() for name in ("loss", *(name for name, _ in metrics), "examples")
        }

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        outputs = objective.outputs(const, batch.x)
        values = {
            "loss": objective.example_loss(outputs, batch.y),
            **{name: metric(outputs, batch.y) for name, metric in metrics},
        }
        sums = {
            name: (value * batch.weight).sum(dtype=torch.float64) for name, value in values.items()
        }
        sums["examples"] = batch.weight.sum(dtype=torch.float64)
        return tree_map(torch.add, carry, sums)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(), "score")


@cached_program
def evaluate_outputs(
    objective: Objective, metrics: tuple[tuple[str, OutputMetric], ...]
) -> Program:
    """Each metric over all outputs of a client. It runs client by client, so that there is no
    padding and only the outputs of one client are in memory.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return params, {}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        block = {"outputs": objective.outputs(const, batch.x), "y": batch.y}
        return tree_map(lambda *parts: torch.cat(parts), carry, block) if carry else block

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        # On the CPU: the same numbers on every device, and no kernel that adds in any order.
        outputs, y = carry["outputs"].cpu(), carry["y"].cpu()
        defined = not bool(outputs.isnan().any())
        return {
            name: torch.tensor(
                metric.function(outputs, y) if defined else torch.nan, dtype=torch.float64
            )
            for name, metric in metrics
        }, None

    return Program(start, step, finish, Batches.whole(256), "outputs", vectorized=False)


@serializable_program
def evaluate_losses(objective: Objective) -> Program:
    """The sum of the losses of a client's examples under each model of a stack, which is in
    `broadcast` or, per client, in `params`.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        first = next(iter((params or broadcast).values()))
        return params, {"loss": torch.zeros(len(first), dtype=torch.float64, device=first.device)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        def total(params: Tree, y: Tensor) -> Tensor:
            losses = objective.example_loss(objective.outputs(params, batch.x), y)
            return (losses * batch.weight).sum(dtype=torch.float64)

        if batch.y.is_floating_point():
            # torch's losses of numbers have a wrong batching rule where only the outputs have an
            # axis of models.
            y = batch.y.expand(len(carry["loss"]), *batch.y.shape)
            return {"loss": carry["loss"] + vmap(total)(const or broadcast, y)}
        sums = vmap(total, in_dims=(0, None))(const or broadcast, batch.y)
        return {"loss": carry["loss"] + sums}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(), "losses")
