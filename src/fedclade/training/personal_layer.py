"""The personal layer of a run: its settings, and what a client makes of its model before it uses
it. `programs.personal_layer` has the computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn

from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import Inputs
from fedclade.core.local_sgd import chain_training, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.losses import bce
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree
from fedclade.data.client_metadata import ClientMetadata
from fedclade.errors import require, require_int
from fedclade.methods.base import LayerName, Method, is_classification
from fedclade.programs.client_slots import SLOTS, empty_slots
from fedclade.programs.nearest_neighbors import NEIGHBORS, SCALE, NearestNeighbors
from fedclade.programs.personal_layer import (
    PRIOR_SAMPLES,
    SCORE,
    Layer,
    Measure,
    candidates,
    personal_model,
    sample_scores,
    score_candidates,
)

FEWEST_POOLED = 5  # models with fewer clients share one sum


@dataclass(frozen=True)
class PersonalConfig:
    """What each client makes of its model before it uses it.

    Args:
        layer: "none"; "finetune": the client trains the model w for F epochs on its own data, to
            w_i; "interpolate": it takes (1 - α) w + α w_i; "knn": it mixes the model's
            probabilities with those of its nearest training samples, by a weight λ; "auto": one of
            the last two, or neither. α and λ are chosen on held-out training samples. None for the
            method's own: "interpolate" for Clade, else "none".
        epochs: F.
        every: The layer is measured in evaluated rounds that are multiples of this number, and in
            the last; 0 for the last only.

    Example:
        >>> import fedclade as fc
        >>> personal = fc.PersonalConfig("interpolate", epochs=2)
    """

    layer: LayerName | None = None
    epochs: int = 5
    every: int = 0

    def __post_init__(self) -> None:
        names = get_args(LayerName)
        require(
            self.layer is None or self.layer in names,
            "personal.layer",
            self.layer,
            f"must be one of {', '.join(names)}",
        )
        require_int("personal.epochs", self.epochs, 1, 10**9)
        require_int("personal.every", self.every, 0, 10**9, "0 for the last round only")


@dataclass(frozen=True)
class PersonalLayer:
    """The layer of a run.

    Args:
        config: the settings.
        guarded: the layer whose strength is chosen; None for fine-tuning alone.
        measure: how held-out samples are scored.
    """

    config: PersonalConfig
    guarded: Layer | None
    measure: Measure

    @property
    def has_neighbors(self) -> bool:
        return self.guarded in ("knn", "auto")

    def served_objective(
        self, module: nn.Module, objective: Objective, x: Inputs | None = None
    ) -> Objective:
        """The objective of what clients predict with, see `Method.served_objective`."""
        if not self.has_neighbors:
            return objective
        return Objective(with_neighbors(module), objective.example_loss, x, bf16=objective.bf16)

    def program(self, method: Method) -> AnyProgram:
        """The program that makes the client's own model, after the method's own personalization."""
        local, first = self._local(method), method.personalization_program()
        if self.guarded is None:
            tune = sgd(local)
            return tune if first is None else chain_training(first, tune)
        return personal_model(local, self.guarded, self.measure, first)

    def assignment(
        self, fed: Federation, method: Method, shared: ModelAssignment, ids: Tensor, key: int
    ) -> ModelAssignment:
        """The models of the clients, and what else they need to make their own: for each model the
        mean score of each candidate over its clients' held-out samples.

        Args:
            fed: the clients; an engine, so that no program changes their state.
            method: the method.
            shared: the models before the layer.
            ids: the clients.
            key: the randomness of fine-tuning.
        """
        if self.guarded is None or not len(ids):
            return shared
        extra: Tree = {}
        if self.has_neighbors:
            extra[SLOTS] = empty_slots(fed.sizes.max())
        rows = len(next(iter(shared.models.values())))
        extra = {name: value.expand(rows, *value.shape[1:]) for name, value in extra.items()}
        received = replace(shared, models=shared.models | extra)
        group, groups = _pools(shared.model_ids.cpu(), rows)
        local = self._local(method)
        results = fed.map(
            score_candidates(local, self.guarded, self.measure, method.personalization_program()),
            ids,
            per_client=received,
            key=key,
            reduce=SegmentSum(
                segment_ids=group[shared.model_ids.cpu()],
                weights=torch.ones(len(ids)),
                num_segments=groups,
            ),
        )
        score = torch.zeros(groups, len(candidates(self.guarded)))
        if results.sums:
            score = pooled_scores(results.sums, self.measure).float()
        score = score[group].to(next(iter(received.models.values())).device)
        return replace(received, models=received.models | {SCORE: score})

    def _local(self, method: Method) -> LocalTraining:
        return replace(method.local, epochs=self.config.epochs, steps=0)


def pooled_scores(sums: Tree, measure: Measure) -> Tensor:
    """(pools, candidates) the mean score of a held-out sample of each pool. The mean over everybody
    counts as `PRIOR_SAMPLES` samples of each.

    Args:
        sums: the sums of `score_candidates` over the clients of each pool.
        measure: how samples are scored.
    """
    examples = sums["examples"].cpu()[:, None]
    score = sample_scores(sums["right"].cpu(), sums["loss"].cpu(), measure)
    everybody = score.sum(0) / examples.sum().clamp_min(1)
    return (score + PRIOR_SAMPLES * everybody) / (examples + PRIOR_SAMPLES)


def _pools(model_ids: Tensor, rows: int) -> tuple[Tensor, int]:
    """The pool of each model, and the number of pools. A pool has the clients of a model, or of all
    models with few clients; if these are few too, they are in the first pool.
    """
    clients = model_ids.bincount(minlength=rows)
    is_large = clients >= FEWEST_POOLED
    large = int(is_large.sum())
    others = large if clients[~is_large].sum() >= FEWEST_POOLED else 0
    return torch.where(is_large, is_large.cumsum(0) - 1, others), max(large, others + 1)


def with_neighbors(module: nn.Module, weights: Tree | None = None) -> NearestNeighbors:
    """What clients predict with if the layer has neighbors.

    Args:
        module: the model of the run.
        weights: the parameters of a client, which give the number of slots.
    """
    slots = len(weights["labels"]) if weights and "labels" in weights else 1
    return NearestNeighbors(module, slots, NEIGHBORS, SCALE)


def needs_neighbors(module: nn.Module, weights: Tree) -> bool:
    """Whether these weights of a client are of `with_neighbors(module)`."""
    return "knn_weight" in weights and "knn_weight" not in module.state_dict()


def layer_of(
    config: PersonalConfig,
    method: Method,
    module: nn.Module,
    objective: Objective,
    clients: ClientMetadata,
) -> PersonalLayer | None:
    """The layer of a run; None without one. Raises `InvalidInputError` if the method or the task
    cannot have it.

    Args:
        config: the settings.
        method: the method.
        module: the model.
        objective: the objective of the model.
        clients: the clients.
    """
    config = replace(config, layer=config.layer or method.personal_layer)
    if config.layer == "none":
        return None
    reason = "" if config.layer == "finetune" else method.no_guarded_layer
    if method.served_module(module) is not module:
        reason = "makes predictions with more than one model"
    require(
        not reason,
        "personal.layer",
        config.layer,
        f"method {method.name} {reason}; leave it at 'none'",
    )
    if config.layer == "finetune":
        return PersonalLayer(config, None, "loss")
    measure = _measure(objective, clients)
    if config.layer != "auto" or measure == "classes":
        require(
            config.layer != "knn" or measure == "classes",
            "personal.layer",
            config.layer,
            "it mixes the probabilities of classes, so samples must have one class each and"
            " local.loss must be 'cross_entropy'; use 'interpolate'",
        )
        return PersonalLayer(config, config.layer, measure)
    return PersonalLayer(config, "interpolate", measure)


def _measure(objective: Objective, clients: ClientMetadata) -> Measure:
    """How samples are scored in this task."""
    if clients.classes is not None and is_classification(objective):
        return "classes" if clients.y.ndim == 1 else "accuracy"
    return "label_accuracy" if objective.example_loss is bce else "loss"
