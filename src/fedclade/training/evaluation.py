"""Evaluation of all clients, and the summary at the end of a run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from fedclade.aggregation.server_optimizer import served_state
from fedclade.core.federation import ModelAssignment
from fedclade.core.losses import cross_entropy
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.output_metric import OutputMetric
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, nbytes
from fedclade.core.rng import fold_in
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.base import Delivery, Engine, EvalRequest, Traffic
from fedclade.errors import FedcladeWarning
from fedclade.io.schemas import RoundRecord, Stopped, Summary
from fedclade.privacy.budget import in_words
from fedclade.training import metrics
from fedclade.training.client_sampling import blocked_clients, cohort_of, exclude_blocked
from fedclade.training.result import FinalModels
from fedclade.training.setup import RunSetup

MOST_PERSONAL_BYTES = 4 << 30
"""The bytes of all clients' personal models up to which a run stores them."""


class Evaluation(NamedTuple):
    """The models of the clients after a round, and the metrics of each client."""

    state: State  # with a cluster for clients that had none before the evaluation
    assignment: ModelAssignment
    ids: Tensor  # the clients that have a model
    values: dict[str, Tensor]  # (clients,) for each metric; NaN for a client without a value
    # How clients make their own models of those, and the randomness of that.
    personalize: AnyProgram | None
    key: int
    traffic: Traffic  # of the choice of the personal layer

    def test_samples(self, clients: ClientMetadata) -> int:
        """The number of distinct test samples of the evaluated clients, at most."""
        return min(clients.test_samples, int(clients.test_sizes[self.ids].sum()))

    def push_final_models(self, engine: Engine) -> None:
        """Send every client its model."""
        engine.push_final_models(self.assignment, self.ids, self.personalize, self.key)


def evaluate(
    setup: RunSetup,
    clients: ClientMetadata,
    state: State,
    round_number: int,
    history: Sequence[RoundRecord],
    is_final: bool = False,
) -> Evaluation:
    """Evaluate every client's model on the client's data.

    Args:
        setup: the setup of the run.
        clients: the clients.
        state: the state after this round.
        round_number: the number of this round.
        history: the rounds before this round.
        is_final: whether these are the final models. A real client then keeps its own.
    """
    begun = _begin(setup, clients, state, round_number, history, is_final)
    is_layered = setup.is_layer_due(round_number, is_final)
    delivers = _delivers(setup, is_final) and not is_layered
    with setup.engine.clock.whole("evaluation"):
        answers = setup.engine.evaluate(
            begun.assignment,
            begun.ids,
            list(begun.requests.values()),
            begun.key,
            Delivery(begun.personalize) if delivers else None,
        )
    shared = begun.finished(setup, clients, answers)
    return _add_layer(setup, clients, shared, round_number, is_final) if is_layered else shared


@runtime_checkable
class JoinsEvaluation(Protocol):
    """An engine whose messages cost time: an evaluation can be a part of the next training's."""

    def evaluate_with_next(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[EvalRequest],
        key: int,
        done: Callable[[list[Tree]], None],
    ) -> None:
        """As `Engine.evaluate`, together with the next `map`.

        Args:
            assignment: the model of each client.
            ids: the clients.
            requests: the evaluations.
            key: the randomness of fine-tuning.
            done: gets the results, before `map` returns.
        """

    def finish_evaluation(self) -> None:
        """Evaluate now if there was no `map`."""


def joins_next_round(setup: RunSetup, round_number: int) -> bool:
    """Whether the evaluation after this round may wait for the next one: nothing that happens until
    then depends on it, and its clients are sent one message in clear.

    Args:
        setup: the setup of the run.
        round_number: the number of the round.
    """
    training = setup.training
    return (
        isinstance(setup.engine, JoinsEvaluation)
        and round_number < training.rounds
        and training.patience == 0
        and training.select == "last"
        and setup.budget is None
        and setup.sums is setup.engine
        and not setup.is_layer_due(round_number, False)
    )


def evaluate_with_next(
    setup: RunSetup,
    clients: ClientMetadata,
    state: State,
    round_number: int,
    history: Sequence[RoundRecord],
    done: Callable[[Evaluation], None],
) -> None:
    """As `evaluate`, together with the next training; see `joins_next_round`.

    Args:
        setup: the setup of the run.
        clients: the clients.
        state: the state after this round.
        round_number: the number of this round.
        history: the rounds before this round.
        done: gets the evaluation.
    """
    assert isinstance(setup.engine, JoinsEvaluation)
    begun = _begin(setup, clients, state, round_number, history, False)
    setup.engine.evaluate_with_next(
        begun.assignment,
        begun.ids,
        list(begun.requests.values()),
        begun.key,
        lambda answers: done(begun.finished(setup, clients, answers)),
    )


class _Begun(NamedTuple):
    """An evaluation without its answers."""

    state: State
    assignment: ModelAssignment
    ids: Tensor
    requests: dict[str, EvalRequest]  # by the affix of the metrics' names
    personalize: AnyProgram | None
    key: int

    def finished(
        self, setup: RunSetup, clients: ClientMetadata, answers: Sequence[Tree]
    ) -> Evaluation:
        values = _columns(setup, clients, self.ids, dict(zip(self.requests, answers, strict=True)))
        return Evaluation(
            self.state, self.assignment, self.ids, values, self.personalize, 0, Traffic()
        )


def _begin(
    setup: RunSetup,
    clients: ClientMetadata,
    state: State,
    round_number: int,
    history: Sequence[RoundRecord],
    is_final: bool,
) -> _Begun:
    method = setup.method_for(round_number)
    chosen = evaluated_clients(setup, len(clients), is_final)
    state, ids = _with_clusters(setup, clients, chosen, state, round_number, history)
    key = _key(setup, round_number)
    assignment = method.assign_models(served_state(state), ids)
    assignment = setup.own_batch_norm.assignment(assignment)
    personalize = method.personalization_program()
    is_layered = setup.is_layer_due(round_number, is_final)

    has_layer = setup.layer is not None
    test = EvalRequest(
        setup.objective if has_layer else setup.served,
        setup.metrics,
        "test",
        personalize,
        is_served=not has_layer,
    )
    requests = {"_shared" if is_layered else "": test, "train_": replace(test, split="train")}
    if clients.has_validation:
        requests["validation_"] = replace(test, split="validation")
    return _Begun(state, assignment, ids, requests, personalize, key)


def _key(setup: RunSetup, round_number: int) -> int:
    """The randomness of the evaluation of a round."""
    return fold_in(setup.training.seed, "evaluate", round_number)


def _add_layer(
    setup: RunSetup, clients: ClientMetadata, shared: Evaluation, round_number: int, is_final: bool
) -> Evaluation:
    """The evaluation with the personal layer: clients make their own models of those of `shared`.

    Args:
        setup: the setup of the run.
        clients: the clients.
        shared: the evaluation without the layer.
        round_number: the number of this round.
        is_final: whether these are the final models.
    """
    assert setup.layer is not None
    method, engine, ids = setup.method_for(round_number), setup.engine, shared.ids
    key = _key(setup, round_number)
    before = replace(engine.traffic)
    with engine.clock.whole("personal layer"):
        assignment = setup.layer.assignment(setup.sums, method, shared.assignment, ids, key)
        traffic = Traffic(engine.traffic.up - before.up, engine.traffic.down - before.down)
        personalize: AnyProgram | None = setup.layer.program(method)
        if len(ids) and _fit_in_memory(setup, ids):  # once, for evaluation and result
            models = engine.models_of(assignment, ids, personalize, key)
            assignment, personalize = ModelAssignment(models, torch.arange(len(ids))), None
    layered = EvalRequest(setup.served, setup.metrics, "test", personalize)
    deliver = Delivery(personalize, key) if _delivers(setup, is_final) else None
    with engine.clock.whole("evaluation"):
        (answer,) = engine.evaluate(assignment, ids, [layered], key, deliver)
    if not is_final:
        engine.client_state.rollback()  # the clients' own scores; the final models need them
    values = _columns(setup, clients, ids, {"": answer}) | shared.values
    return Evaluation(shared.state, assignment, ids, values, personalize, key, traffic)


def _delivers(setup: RunSetup, is_final: bool) -> bool:
    """Whether clients get the models that are evaluated."""
    return is_final and setup.training.select == "last"


def _columns(
    setup: RunSetup, clients: ClientMetadata, ids: Tensor, answers: Mapping[str, Tree]
) -> dict[str, Tensor]:
    """(clients,) for each metric. `answers` are the values of the clients `ids`, by the affix of
    the metrics' names.
    """
    values: dict[str, Tensor] = {}
    # Of sequences the perplexity is reported too, as for language models.
    is_sequence_model = setup.objective.example_loss is cross_entropy and clients.y.ndim > 1
    for affix, answer in answers.items():
        for name, value in answer.items():
            column = torch.full((len(clients),), math.nan, dtype=torch.float64)
            column[ids] = 100 * value if name == "accuracy" else value
            values[_with_affix(name, affix)] = column
            if name == "loss" and is_sequence_model:
                values[_with_affix("perplexity", affix)] = column.exp()
    return values


def evaluated_clients(setup: RunSetup, clients: int, is_final: bool) -> Tensor:
    """The clients that an evaluation measures. The sample is the same in every round, so that
    rounds can be compared.

    Args:
        setup: the setup of the run.
        clients: the number of all clients.
        is_final: whether these are the final models; then all clients are measured.
    """
    if is_final or not setup.training.samples_evaluation:
        return torch.arange(clients)
    size = setup.training.evaluation_size(clients)
    return cohort_of(fold_in(setup.training.seed, "evaluated"), clients, size)


def _with_clusters(
    setup: RunSetup,
    clients: ClientMetadata,
    chosen: Tensor,
    state: State,
    round_number: int,
    history: Sequence[RoundRecord],
) -> tuple[State, Tensor]:
    """The state, and those of the chosen clients that have a model. Clients without a cluster get
    one for this evaluation only.
    """
    method = setup.method_for(round_number)
    unknown = chosen[state.cluster_ids[chosen] == UNKNOWN]
    unknown = exclude_blocked(unknown, len(clients), history, setup.training.max_rejections)
    if len(unknown):
        key = fold_in(setup.training.seed, "serve", round_number)
        state = method.add_clients(setup.federation, state, unknown, key)
        setup.engine.client_state.rollback()
    return state, chosen[state.cluster_ids[chosen] != UNKNOWN]


def _with_affix(metric: str, affix: str) -> str:
    """A metric's name in histories and summaries."""
    return f"{metric}{affix}" if affix.startswith("_") else f"{affix}{metric}"


def final_models(setup: RunSetup, evaluation: Evaluation) -> FinalModels:
    """The models at the end of a run. A model that is wholly or partly with its client, outside
    this process, has no row.
    """
    assignment, ids, personalize = evaluation.assignment, evaluation.ids, evaluation.personalize
    models, rows = assignment.models, assignment.model_ids.cpu()
    are_personal = bool(assignment.local_params) or personalize is not None
    can_collect = _fit_in_memory(setup, ids)
    if are_personal and can_collect:
        models = setup.engine.models_of(assignment, ids, personalize, evaluation.key)
        rows = torch.arange(len(ids))
    elif are_personal:
        rows = torch.full_like(ids, -1)
    clients = len(evaluation.state.cluster_ids)
    model_ids = torch.full((clients,), -1, dtype=torch.int64)
    model_ids[ids] = rows
    kept_by_client = torch.zeros(clients, dtype=torch.bool)
    kept_by_client[ids] = are_personal and not can_collect
    if are_personal and setup.engine.holds_clients and not can_collect:
        _warn_of_missing_models(setup, len(ids))
    # What a client needs to make its model, but not to use it, stays out.
    on_cpu = {
        name: value.detach().cpu() for name, value in models.items() if name in setup.served.names
    }
    shared: Tree = {}
    is_personal = are_personal or setup.layer is not None
    if setup.served is not setup.objective and is_personal and can_collect:
        on_cpu, shared = _split_shared(on_cpu)
    return FinalModels(on_cpu, model_ids, kept_by_client, shared)


def _fit_in_memory(setup: RunSetup, ids: Tensor) -> bool:
    """Whether this process can have a model of its own for each of these clients."""
    size = len(ids) * nbytes(setup.served.params())
    return setup.engine.holds_clients and size <= MOST_PERSONAL_BYTES


def _warn_of_missing_models(setup: RunSetup, clients: int) -> None:
    size = clients * nbytes(setup.served.params()) / 1e9
    message = (
        f"model: the personal models of {clients:,} clients have {size:,.0f} GB, so they are not"
        " stored. They were evaluated; the models of the groups are stored."
    )
    warnings.warn(FedcladeWarning(message, "model"), stacklevel=2)


def _split_shared(models: Tree) -> tuple[Tree, Tree]:
    """The parameters that differ between models, and those that do not, without the axis of
    models. A mixture of K models would else be stored once for each client.
    """
    shared = {
        name: value[0]
        for name, value in models.items()
        if torch.equal(value, value[:1].expand_as(value))
    }
    own = {name: value for name, value in models.items() if name not in shared}
    if not own:  # a file has a row for each model
        name, _ = shared.popitem()
        own = {name: models[name]}
    return own, shared


def summarize(
    setup: RunSetup,
    clients: ClientMetadata,
    evaluation: Evaluation,
    history: Sequence[RoundRecord],
    selected_round: int,
    stopped: Stopped | None,
) -> Summary:
    """The numbers over all clients, for summary.json.

    Args:
        setup: the setup of the run.
        clients: the clients.
        evaluation: the evaluation of the selected round.
        history: all rounds.
        selected_round: the round whose models are served.
        stopped: why the run ended before its last round; None if it did not.
    """
    cluster_ids = evaluation.state.cluster_ids
    # The rows of the history have the traffic of their own evaluations.
    extra = evaluation.traffic if selected_round != history[-1]["round"] else Traffic()
    numbers = {
        "method": setup.method.name,
        "dataset": clients.dataset,
        "partition": clients.partition,
        "model": setup.tables["model"]["name"],
        "engine": setup.engine.name,
        "device": str(setup.engine.device),
        "seed": setup.training.seed,
        "rounds": history[-1]["round"],
        "selected_round": selected_round,
        "stopped": stopped,
        "clients": len(clients),
        "clusters": metrics.clusters(cluster_ids),
        "accuracy": None,
        "accuracy_stderr": None,
        "accuracy_variance": None,
        "accuracy_worst10": None,
        **metrics.summary_of(evaluation.values, clients.test_samples),
        "ari": metrics.adjusted_rand(clients.groups, cluster_ids),
        "bytes_up": sum(row["bytes_up"] for row in history) + extra.up,
        "bytes_down": sum(row["bytes_down"] for row in history) + extra.down,
        "seconds": round(sum(row["seconds"] for row in history), 3),
        "failures": sum(len(row["failures"]) for row in history),
        "blocked_clients": len(blocked_clients(history, setup.training.max_rejections)),
        "clients_without_test": int((clients.test_sizes == 0).sum()),
        "clients_without_model": int((cluster_ids == UNKNOWN).sum()),
        **_clients_without(setup, clients, evaluation),
    }
    if setup.budget is not None:
        privacy = setup.budget.summary() | setup.method.signature_privacy()
        numbers["privacy"] = privacy | {"in_words": in_words(privacy)}
    return cast(Summary, numbers)


def _clients_without(
    setup: RunSetup, clients: ClientMetadata, evaluation: Evaluation
) -> dict[str, int]:
    """The number of clients without validation data, and for each metric over all outputs of a
    client the number of clients with test data for which it is not defined.
    """
    numbers = {}
    if clients.has_validation and clients.validation_sizes is not None:
        numbers["clients_without_validation"] = int((clients.validation_sizes == 0).sum())
    tested = ~evaluation.values["loss"].isnan()
    for name, metric in setup.metrics.items():
        if isinstance(metric, OutputMetric):
            undefined = tested & evaluation.values[name].isnan()
            numbers[f"clients_without_{name}"] = int(undefined.sum())
    return numbers
