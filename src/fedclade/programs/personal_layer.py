"""The personal layer: what a client makes of the model that it gets, and the guard that chooses how
much.

A candidate is a pair (α, λ). α: the client fine-tunes the model w to w_i and takes (1 - α) w +
α w_i. λ: it mixes the model's probabilities with those of its nearest training samples. The first
candidate, (0, 0), is the model as it is.

To choose, a client fine-tunes on four fifths of its training samples and counts for each candidate
how many samples of the last fifth are right, and their loss. The server receives sums over clients
only. The client keeps its own, adds the mean over clients to them, as if it were of `PRIOR_SAMPLES`
samples, and takes the best candidate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedclade.core.batching import HELD_OUT, WHOLE_BLOCK, Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.losses import accuracy, label_accuracy
from fedclade.core.program import (
    TEMPORARY,
    AnyProgram,
    ChainedProgram,
    Program,
    chain,
    is_natively_batched,
    natively_batched,
    without_steps,
)
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.programs.client_slots import SLOTS
from fedclade.programs.fine_tune import ALPHAS, interpolate, tune_on_part
from fedclade.programs.nearest_neighbors import (
    LEAST_PROBABILITY,
    NEIGHBORS,
    PREFIX,
    SCALE,
    add_samples,
    empty_store,
    neighbor_probabilities,
    scaled_distance,
)

Layer: TypeAlias = Literal["interpolate", "knn", "auto"]
"""The layers with a guard."""
Measure: TypeAlias = Literal["classes", "accuracy", "label_accuracy", "loss"]
"""How samples are scored. "classes": one class for each, by accuracy and the logarithm of its
probability; "accuracy" (sequences) and "label_accuracy": by that and the loss; "loss": by the loss
alone.
"""

WEIGHTS = tuple(number / 10 for number in range(11))
"""The values of λ to choose from."""
PRIOR_SAMPLES = 100.0
"""κ: the weight of the mean over clients in a client's choice, in held-out samples."""
LOSS_WEIGHT = 0.25
"""The score of a sample is 1 if it is right, minus its loss times this."""
SCORE = "layer/score"
"""The name of the mean score of each candidate among the tensors that a client receives."""
_OWN_RIGHT, _OWN_LOSS = f"{TEMPORARY}/right", f"{TEMPORARY}/loss"
_MOST_LOSS = 30.0  # of a sample; also that of a model whose training diverged
_FIRST = 1e-9  # of equal candidates the first is chosen


LAYER_FACTORIES = frozenset(
    {"programs.personal_layer.personal_model", "programs.personal_layer.score_candidates"}
)
"""The names of the functions that make the programs of a layer."""


def candidates(layer: Layer) -> tuple[tuple[float, float], ...]:
    """(α, λ) of each candidate; the first is the model as it is."""
    tuned = [(alpha, 0.0) for alpha in ALPHAS[1:] if layer != "knn"]
    near = [(0.0, weight) for weight in WEIGHTS[1:] if layer != "interpolate"]
    return ((0.0, 0.0), *tuned, *near)


def sample_scores(right: Tensor, loss: Tensor, measure: Measure) -> Tensor:
    """The score of each candidate, from sums over samples."""
    return -loss if measure == "loss" else right - LOSS_WEIGHT * loss


@serializable_program
def score_candidates(
    local: LocalTraining, layer: Layer, measure: Measure, personalize: AnyProgram | None
) -> AnyProgram:
    """The reply has the number of held-out samples, `examples`, and for each candidate the number
    that are right, `right`, and the sum of their losses, `loss`. The client keeps the last two for
    `personal_model`.

    Args:
        local: the objective and the settings of fine-tuning.
        layer: the layer.
        measure: how samples are scored.
        personalize: the method's own personalization, which runs first.
    """
    return _after(personalize, _scores_of(local, layer, measure), local)


@serializable_program
def personal_model(
    local: LocalTraining, layer: Layer, measure: Measure, personalize: AnyProgram | None
) -> AnyProgram:
    """The model that the client uses. With neighbors it is a `NearestNeighbors`. The client
    receives `SCORE` with its model; without own scores of `score_candidates` that alone decides.
    The arguments are those of `score_candidates`.
    """
    pairs = torch.tensor(candidates(layer))
    names = local.objective.names

    def choice(params: Tree, memory: Tree) -> Tree:
        score = PRIOR_SAMPLES * params[SCORE]
        if _OWN_RIGHT in memory:
            score = score + sample_scores(memory[_OWN_RIGHT], memory[_OWN_LOSS], measure)
        order = torch.arange(len(pairs), device=score.device)
        best = pairs.to(score.device)[(score - _FIRST * order).argmax(-1)]
        return {"alpha": best[:, 0], "knn_weight": best[:, 1]}

    def choose(broadcast: Tree, params: Tree, chosen: Tree) -> tuple[Tree, Tree]:
        model = {name: params[name] for name in names}
        if layer != "knn":
            model["alpha"] = chosen["alpha"]
        if layer != "interpolate":
            model |= {"knn_weight": chosen["knn_weight"], SLOTS: params[SLOTS]}
        return model, {}

    def with_neighbors(broadcast: Tree, params: Tree, model: Tree) -> tuple[Tree, Tree]:
        return model | {name: params[name] for name in ("knn_weight", SLOTS)}, {}

    make: AnyProgram
    if layer == "interpolate":
        make = interpolate(local, None)
    elif layer == "knn":
        make = _store(local.objective)
    else:
        make = chain(interpolate(local, None), _store(local.objective), with_neighbors)
    return _after(personalize, chain(without_steps(choice, "choose"), make, choose), local)


def _after(first: AnyProgram | None, second: AnyProgram, local: LocalTraining) -> AnyProgram:
    """`second` on the model that `first` makes. `first` does not see what is no part of a model."""
    if first is None:
        return second
    names = local.objective.names
    return chain(_on_model(first, names), second, lambda _, params, reply: (params | reply, {}))


def _on_model(program: AnyProgram, names: tuple[str, ...]) -> AnyProgram:
    """The program, which gets only these parameters."""

    def model_of(params: Tree) -> Tree:
        return {name: value for name, value in params.items() if name in names}

    if isinstance(program, ChainedProgram):
        return ChainedProgram(
            _on_model(program.first, names),
            program.second,
            lambda broadcast, params, reply: program.connect(broadcast, model_of(params), reply),
        )

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return program.start(broadcast, model_of(params), memory)

    if is_natively_batched(program.start):
        natively_batched(start)
    return replace(program, start=start, spec=None)


def _scores_of(local: LocalTraining, layer: Layer, measure: Measure) -> AnyProgram:
    score = _score(local.objective, layer, measure)
    if layer == "knn":
        return score

    def connect(broadcast: Tree, params: Tree, tuned: Tree) -> tuple[Tree, Tree]:
        return params | add_prefix("tuned", tuned), {}

    return chain(_on_model(tune_on_part(local), local.objective.names), score, connect)


def _score(objective: Objective, layer: Layer, measure: Measure) -> Program:
    """The scores of all candidates on the held-out samples. The tuned model is in the parameters,
    under "tuned/". Neighbors are looked for among the other samples.
    """
    has_neighbors, names = layer != "interpolate", objective.names
    alphas = [alpha for alpha, weight in candidates(layer) if weight == 0]
    width = objective.head_layer().in_features if has_neighbors else 0

    def losses(outputs: Tensor, y: Tensor) -> Tensor:
        if measure == "classes":
            return -outputs.log_softmax(-1).gather(-1, y[:, None])[:, 0]
        return objective.example_loss(outputs, y)

    is_right = label_accuracy if measure == "label_accuracy" else accuracy

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        like = next(iter(params[name] for name in names))
        carry = {name: like.new_zeros(len(alphas)) for name in ("right", "loss")}
        if has_neighbors:
            carry |= empty_store(like, len(params[SLOTS]), width)
            classes = objective.head_layer().out_features
            carry["p"] = like.new_zeros(len(params[SLOTS]), classes)
        return params, carry | {"examples": like.new_zeros(())}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        w, tuned = {name: const[name] for name in names}, strip_prefix("tuned", const)
        counted = (batch.weight > 0).to(batch.weight.dtype)
        if has_neighbors:
            features, first = objective.features(w, batch.x)
            new = {"features": features, "labels": batch.y.to(features.dtype)}
            place = carry["count"] + torch.arange(len(batch.weight), device=batch.weight.device)
            carry = add_samples(carry, batch.weight, new | {"p": first.softmax(-1)})
            counted = counted * (place % HELD_OUT == HELD_OUT - 1)
        else:
            first = objective.outputs(w, batch.x)
        outputs = [
            first,
            *(
                objective.outputs({n: w[n] + a * (tuned[n] - w[n]) for n in names}, batch.x)
                for a in alphas[1:]
            ),
        ]
        loss = torch.stack([_bounded(losses(each, batch.y)) for each in outputs])
        right = torch.zeros_like(loss)
        if measure != "loss":
            right = torch.stack([is_right(each, batch.y) for each in outputs]) * (loss < _MOST_LOSS)
        return carry | {
            "examples": carry["examples"] + counted.sum(),
            "right": carry["right"] + (right * counted).sum(-1),
            "loss": carry["loss"] + (loss * counted).sum(-1),
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        right, loss = carry["right"], carry["loss"]
        if has_neighbors:
            more_right, more_loss = _neighbor_scores(carry)
            right, loss = torch.cat([right, more_right]), torch.cat([loss, more_loss])
        reply = {"examples": carry["examples"], "right": right, "loss": loss}
        return reply, {_OWN_RIGHT: right, _OWN_LOSS: loss}

    part = (
        Batches.whole() if has_neighbors else Batches(WHOLE_BLOCK, shuffle=False, part="held_out")
    )
    return Program(start, step, finish, part, "score_candidates")


def _bounded(loss: Tensor) -> Tensor:
    return loss.nan_to_num(nan=_MOST_LOSS, posinf=_MOST_LOSS).clamp_max(_MOST_LOSS)


def _neighbor_scores(store: Tree) -> tuple[Tensor, Tensor]:
    """For each λ above 0 the number of held-out samples that are right, and the sum of their
    losses. The neighbors are the samples of the store that are not held out.
    """
    labels, place = store["labels"], torch.arange(len(store["labels"]), device=store["p"].device)
    others = torch.where(place % HELD_OUT == HELD_OUT - 1, -1.0, labels)
    rows = place[HELD_OUT - 1 :: HELD_OUT]
    if not len(rows):
        zeros = store["p"].new_zeros(len(WEIGHTS) - 1)
        return zeros, zeros
    counted, y = (rows < store["count"]).to(store["p"].dtype), labels[rows].clamp_min(0).long()
    distance = scaled_distance(store["features"][rows], store["features"], others, SCALE)
    p = store["p"][rows]
    p_knn = neighbor_probabilities(distance, others, NEIGHBORS, p.shape[-1])
    grid = torch.tensor(WEIGHTS[1:], dtype=p.dtype, device=p.device)[:, None, None]
    mixed = (grid * p_knn + (1 - grid) * p).nan_to_num().clamp_min(LEAST_PROBABILITY)
    of_label = mixed.gather(-1, y[:, None].expand(len(grid), -1, 1))[..., 0]
    right = (mixed.argmax(-1) == y).to(p.dtype)
    return (right * counted).sum(-1), (_bounded(-of_label.log()) * counted).sum(-1)


def _store(objective: Objective) -> Program:
    """The parameters of a client's `NearestNeighbors`, from its model and λ. With λ = 0 the store
    is empty.
    """
    names, width = objective.names, objective.head_layer().in_features

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return params, empty_store(params[names[0]], len(params[SLOTS]), width)

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        features, _ = objective.features({name: const[name] for name in names}, batch.x)
        new = {"features": features, "labels": batch.y.to(features.dtype)}
        return add_samples(carry, batch.weight, new)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        is_used = const["knn_weight"] > 0
        return {
            **{f"{PREFIX}{name}": const[name] for name in names},
            "features": torch.where(is_used, carry["features"], 0.0),
            "labels": torch.where(is_used, carry["labels"], -1.0),
            "knn_weight": const["knn_weight"],
        }, None

    return Program(start, step, finish, Batches.whole(), "store")
