"""The loss along FedGMCC's straight and bent paths from one client's model to another's.

Lucchetti et al., arXiv 2204.11017. w_k, w_l: the models of two clients after local training from
the same model; γ_θ(u): the polygonal chain between them with the bend θ; X_MC: inputs ~ U(0, 1).
See `clustering.mode_connectivity` for the loss.
"""

from __future__ import annotations

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
from fedclade.reproduce.panels import Panel, Series, StudyResult
from fedclade.training import experiment_file
from fedclade.training.setup import module_for

POINTS = 21  # of a curve over u, with both ends


def curves(tables: dict[str, dict[str, Any]], clients: Clients | None, device: str) -> StudyResult:
    """The loss along the straight path and along the path with a learned bend: its mean over u, its
    value at u = ½, and its curve over u, averaged over pairs of clients.

    The pairs are clients 0 and 1, 2 and 3, …; if groups are known, each pair has one client of the
    first and one of the second group.

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
    fed = Simulator(clients, device=device, **experiment.engine.simulator_options())
    module = module_for(experiment.model, clients.metadata, seed, experiment.local.loss)
    objective = Objective(module.to(fed.device), experiment.local.loss_for(None))
    pairs = _pairs(clients)
    ids = pairs.flatten().sort().values
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
    losses = []
    # One pair at a time, because the backward pass of a pair needs much memory.
    for first, second in pairs.tolist():
        a, b = (tree_index(trained, (ids == end).nonzero()[0]) for end in (first, second))
        bent = fit_bends(objective.outputs, a, b, inputs, method.curve_steps, method.curve_lr)
        losses.append(_in_percent(objective, a, b, inputs, [midpoint(a, b), bent]))
    by_pair = torch.stack(losses)  # (pairs, bends, positions)
    numbers, series = {}, []
    for name, values in (("straight", by_pair[:, 0]), ("bent", by_pair[:, 1])):
        numbers[name] = float(values[:, : len(SCORED_AT)].mean())
        curve = values[:, len(SCORED_AT) :]
        numbers[f"{name} middle"] = float(curve[:, POINTS // 2].mean())
        mean, std = curve.mean(0), curve.std(0, correction=0)
        series.append(
            Series(
                name,
                tuple(torch.linspace(0, 1, POINTS).tolist()),
                tuple(mean.tolist()),
                tuple((mean - std).tolist()),
                tuple((mean + std).tolist()),
            )
        )
    panel = Panel("loss along the path", "lines", "u", "difference of outputs, %", tuple(series))
    return StudyResult([{"round": 1, **numbers}], (panel,))


def _pairs(clients: Clients) -> Tensor:
    """(pairs, 2) the clients of each pair."""
    if clients.groups is None or not bool((clients.groups == 1).any()):
        return torch.arange(len(clients) // 2 * 2).view(-1, 2)
    first, second = (torch.nonzero(clients.groups == group).flatten() for group in (0, 1))
    number = min(len(first), len(second))
    return torch.stack([first[:number], second[:number]], 1)


def _in_percent(
    objective: Objective, a: Tree, b: Tree, inputs: Tensor, bends: list[Tree]
) -> Tensor:
    """(bends, positions): for each bend the losses at SCORED_AT, then those of the curve."""
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
    at = [*SCORED_AT, *torch.linspace(0, 1, POINTS).tolist()]
    losses = [
        losses_along(objective.outputs, a, bend, b, inputs, at)[:, 0] / scale for bend in bends
    ]
    return torch.stack(losses).double().cpu()
