"""The loss along FedGMCC's straight and bent paths from one client's model to another's.

Lucchetti et al., arXiv 2204.11017. w_k, w_l: the models of two clients after local training from
the same model; γ_θ(u): the polygonal chain between them with the bend θ; X_MC: inputs ~ U(0, 1).
See `clustering.mode_connectivity` for the loss.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fedclade.clustering.mode_connectivity import SCORED_AT, fit_bends, losses_along, midpoint
from fedclade.core.federation import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.core.rng import client_keys, fold_in, uniform
from fedclade.data.federated_dataset import Clients
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError, require
from fedclade.methods.fedgmcc import FedGMCC
from fedclade.reproduce.panels import StudyResult
from fedclade.training import experiment_file
from fedclade.training.setup import module_for


def curves(tables: dict[str, dict[str, Any]], clients: Clients | None, device: str) -> StudyResult:
    """The loss along the straight path and along the path with a learned bend: its mean over u and
    its value at u = ½, averaged over the pairs of clients 0 and 1, 2 and 3, …

    All values are in percent of the mean square of the outputs at both ends, because outputs grow
    with training. `method.mc_samples` inputs are used; Adam learns the bend on them in
    `method.curve_steps` steps with the rate `method.curve_lr`.
    """
    assert clients is not None
    experiment = experiment_file.experiment(tables)
    if not isinstance(method := experiment.method, FedGMCC):
        raise InvalidInputError(
            f"method.name = '{method.name}': this study needs fedgmcc.", "method.name"
        )
    require(len(clients) >= 2, "partition.clients", len(clients), "must be at least 2")
    seed = experiment.run.seed
    fed = Simulator(clients, device=device, **asdict(experiment.engine))
    module = module_for(experiment.model, clients.metadata, seed, experiment.local.loss)
    objective = Objective(module.to(fed.device), experiment.local.loss_for(None))
    ids = torch.arange(len(clients) // 2 * 2)
    assignment = ModelAssignment.all_same(stack([objective.params()]), len(ids))
    trained = fed.map(
        sgd(experiment.local.training(objective)),
        ids,
        per_client=assignment,
        key=fold_in(seed, "round", 1),
    ).outputs
    inputs = uniform(
        client_keys(fold_in(seed, "inputs"), torch.tensor(0)),
        (method.mc_samples, *(clients.shape or ())),
    ).to(fed.device)
    pairs = []
    # One pair at a time, because the backward pass of a pair needs much memory.
    for first in range(0, len(ids), 2):
        a, b = (tree_index(trained, torch.tensor([end])) for end in (first, first + 1))
        bent = fit_bends(objective.outputs, a, b, inputs, method.curve_steps, method.curve_lr)
        pairs.append(_in_percent(objective, a, b, inputs, [midpoint(a, b), bent]))
    straight, bent_losses = torch.stack(pairs).mean(0).tolist()
    numbers = dict(
        zip(
            ("straight", "straight middle", "bent", "bent middle"),
            (*straight, *bent_losses),
            strict=True,
        )
    )
    return StudyResult([{"round": 1, **numbers}])


def _in_percent(
    objective: Objective, a: Tree, b: Tree, inputs: Tensor, bends: list[Tree]
) -> Tensor:
    """(bends, 2): for each bend the mean loss along the chain, and the loss at its midpoint."""
    with torch.no_grad():
        scale = (
            torch.stack(
                [
                    objective.outputs(tree_index(end, torch.tensor(0)), inputs).square().mean()
                    for end in (a, b)
                ]
            ).mean()
            / 100
        )
    losses = [
        losses_along(objective.outputs, a, bend, b, inputs, [0.5, *SCORED_AT])[:, 0] / scale
        for bend in bends
    ]
    return (
        torch.stack([torch.stack([along[1:].mean(), along[0]]) for along in losses]).double().cpu()
    )
