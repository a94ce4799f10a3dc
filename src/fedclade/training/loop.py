"""The rounds of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from fedclade.aggregation.server_optimizer import require_updated
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.encoding import encoding_to_json
from fedclade.engines.oom import is_out_of_memory
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.io import checkpoint
from fedclade.io.checkpoint import Checkpoint
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord, Stopped
from fedclade.training import metrics
from fedclade.training.callbacks import Callback
from fedclade.training.client_sampling import cohort_of, exclude_blocked
from fedclade.training.early_stopping import is_better, is_exhausted
from fedclade.training.evaluation import (
    Evaluation,
    JoinsEvaluation,
    evaluate,
    evaluate_with_next,
    joins_next_round,
)
from fedclade.training.round_costs import Counters, failures
from fedclade.training.setup import RunSetup


@dataclass(frozen=True)
class BestState:
    """The state after the round with the lowest mean loss on validation data."""

    round: int
    loss: float
    state: State
    memory: Tree  # the clients' state, as a checkpoint stores it


@dataclass
class Progress:
    """The progress of a run: the method's state, the finished rounds and the present clients."""

    state: State
    history: list[RoundRecord]
    clients: ClientMetadata
    best: BestState | None = None  # with run.select = "best"
    stopped: Stopped | None = None

    @property
    def round(self) -> int:
        """The last finished round; 0 before the first."""
        return self.history[-1]["round"] if self.history else 0


def start(setup: RunSetup, store: RunDirectory | None, last: Checkpoint | None) -> Progress:
    """Start a run, from a checkpoint or before its first round.

    Args:
        setup: the setup of the run.
        store: the run directory; None to write nothing.
        last: the last checkpoint; None for a new run.
    """
    whole, method, own = setup.objective.params(), setup.method_for(1), setup.own_batch_norm
    params = own.shared(whole)
    setup.engine.init_client_state(method.initial_client_state(params) | own.client_state(whole))
    if setup.budget is not None and store is not None and last is not None:
        setup.budget.clip = last.history[-1].get("next_clip", setup.budget.clip)
    if store is not None:
        store.begin(setup.tables, last.history if last is not None else [])
        store.write_names(setup.metadata.names)  # a report of a running run reads them
        encoding = setup.metadata.encoding
        store.write_encoding(None if encoding is None else encoding_to_json(encoding))
        if setup.budget is not None:
            setup.budget.open(store.folder, is_resumed=last is not None)
    if last is not None:
        setup.engine.begin_round(last.round)
        return _restore(setup, last)
    with setup.engine.clock.phase("round"):  # clients may work before the first round
        state = method.init(setup.federation, params, fold_in(setup.training.seed, "init"))
    setup.engine.client_state.commit(0)
    return Progress(state, [], setup.metadata)


def _restore(setup: RunSetup, last: Checkpoint) -> Progress:
    clients = setup.engine.client_metadata()  # of the last round
    progress = Progress(_restored_state(setup, last, last.state), last.history, clients)
    if last.best is not None:
        best = last.best
        state = _restored_state(setup, last, best.state)
        progress.best = BestState(best.round, best.loss, state, best.memory)
        setup.engine.client_state.retain(best.memory)
    return progress


def _restored_state(setup: RunSetup, last: Checkpoint, stored: Tree) -> State:
    device = setup.engine.device
    try:
        state = checkpoint.restore(setup.method.state, stored)
        # A file has its names in alphabetical order, and CFL's secret order depends on theirs.
        names = dict.fromkeys((*setup.objective.names, *state.models))
        models = {name: state.models[name].to(device) for name in names if name in state.models}
        server_state = {name: value.to(device) for name, value in state.server_state.items()}
        state = replace(state, models=models, server_state=server_state)
        setup.engine.client_state.restore(last.memory, last.round)
    except (KeyError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"checkpoint of round {last.round}: it does not fit the method {setup.method.name}"
            f" ({error}). Start a new run in another folder.",
            "checkpoint",
        ) from error
    return state.with_num_clients(len(setup.metadata))


def train(
    setup: RunSetup,
    progress: Progress,
    callbacks: Sequence[Callback],
    counters: Counters | None,
) -> Evaluation | None:
    """Run the remaining rounds.

    Args:
        setup: the setup of the run.
        progress: the progress of the run, which is updated.
        callbacks: called after each round.
        counters: for a new run, counters that include the work before the first round; None for a
            resumed run.

    Returns:
        The last evaluation; None if no round remained.
    """
    evaluation: Evaluation | None = None
    patience = setup.training.patience
    if progress.round < setup.training.rounds and is_exhausted(progress.history, patience):
        progress.stopped = "patience"
        return None
    if progress.history and _is_budget_spent(setup, progress):
        progress.stopped = "privacy_budget"
        return None
    for number in range(progress.round + 1, setup.training.rounds + 1):
        counters = counters or Counters(setup.engine)
        try:
            with setup.engine.clock.phase("round"):
                cohort_size = _train_round(setup, progress, number)
        except FedcladeError:
            _finish_evaluation(setup)  # so that the row of the last round is complete
            raise
        row: dict[str, Any] = {
            "round": number,
            "clients": cohort_size,
            "clusters": metrics.clusters(progress.state.cluster_ids),
            **counters.row(setup.engine),
        }
        if setup.budget is not None:
            row |= {"next_clip": setup.budget.clip, "epsilon": setup.budget.spent()}
        is_evaluated = setup.is_due(number, setup.training.eval_every)
        if is_evaluated and progress.stopped is None and joins_next_round(setup, number):
            row["seconds"] = counters.seconds()
            _evaluate_later(setup, progress, row, callbacks)
            counters = None
            continue
        if is_evaluated:
            is_last = number == setup.training.rounds
            evaluation = _evaluate_round(setup, progress, row, is_last)
        row["seconds"] = counters.seconds()
        record = cast(RoundRecord, row)
        progress.history.append(record)
        for callback in callbacks:
            callback.after_round(record)
        if progress.stopped is None and is_evaluated and is_exhausted(progress.history, patience):
            progress.stopped = "patience"
        if progress.stopped is None and _is_budget_spent(setup, progress):
            progress.stopped = "privacy_budget"
        if number == setup.training.rounds:
            progress.stopped = None  # nothing was left to stop
        elif progress.stopped is not None:
            is_partial = setup.layer is not None or setup.training.samples_evaluation
            if not is_evaluated or is_partial:
                evaluation = _evaluate_round(setup, progress, row, is_last=True)
                row["seconds"] = counters.seconds()
            break
        counters = None
    return evaluation


def _evaluate_later(
    setup: RunSetup, progress: Progress, row: dict[str, Any], callbacks: Sequence[Callback]
) -> None:
    """Evaluate a round together with the training of the next one. Its row is in the history now,
    and complete before the state of the next round replaces this one; then the callbacks get it.
    """
    record, clients, state = cast(RoundRecord, row), progress.clients, progress.state
    earlier = list(progress.history)
    progress.history.append(record)

    def finish(evaluation: Evaluation) -> None:
        _add_metrics(setup, clients, state, row, evaluation)
        for callback in callbacks:
            callback.after_round(record)

    evaluate_with_next(setup, clients, state, row["round"], earlier, finish)


def _finish_evaluation(setup: RunSetup) -> None:
    """Evaluate the last round now, if there was no training with which it could travel."""
    if isinstance(setup.engine, JoinsEvaluation):
        setup.engine.finish_evaluation()


def _add_metrics(
    setup: RunSetup,
    clients: ClientMetadata,
    state: State,
    row: dict[str, Any],
    evaluation: Evaluation,
) -> None:
    """Add the numbers of an evaluation to the row of its round."""
    row["failures"] += failures(setup.engine)
    row["bytes_up"] += evaluation.traffic.up
    row["bytes_down"] += evaluation.traffic.down
    row |= metrics.summary_of(evaluation.values, evaluation.test_samples(clients))
    row |= metrics.by_cluster(evaluation.values, state.cluster_ids)


def _evaluate_round(
    setup: RunSetup, progress: Progress, row: dict[str, Any], is_last: bool
) -> Evaluation:
    """Evaluate a round and add the numbers to its row. Keeps the state if it is the best so far."""
    number, state = row["round"], progress.state
    earlier = [each for each in progress.history if each["round"] < number]
    evaluation = evaluate(setup, progress.clients, state, number, earlier, is_last)
    _add_metrics(setup, progress.clients, state, row, evaluation)
    loss = row.get("validation_loss")
    best = progress.best.loss if progress.best is not None else None
    if setup.training.select == "best" and loss is not None and is_better(loss, best):
        progress.best = BestState(number, loss, state, setup.engine.client_state.tensors())
        setup.engine.client_state.retain(progress.best.memory)
    return evaluation


def _is_budget_spent(setup: RunSetup, progress: Progress) -> bool:
    """Whether the next round would cost more than the privacy budget."""
    if setup.budget is None or progress.round == setup.training.rounds:
        return False
    clients = len(progress.clients)
    size = setup.training.cohort_size(clients)
    return not setup.budget.allows(progress.round + 1, clients, size)


def select_best(setup: RunSetup, progress: Progress, best: BestState) -> Evaluation:
    """Return to the state of the best round, and evaluate it again."""
    progress.state = best.state.with_num_clients(len(progress.clients))
    setup.engine.client_state.restore(best.memory, best.round)
    earlier = [row for row in progress.history if row["round"] < best.round]
    return evaluate(setup, progress.clients, progress.state, best.round, earlier, is_final=True)


def _train_round(setup: RunSetup, progress: Progress, number: int) -> int:
    """Run a round, which updates `progress`. Returns the number of clients in the cohort."""
    setup.engine.refresh_membership()
    setup.engine.begin_round(number)
    progress.clients = setup.engine.client_metadata()
    num_clients, state = len(progress.clients), progress.state
    # Only if clients have joined: with_num_clients may copy the state.
    if num_clients > len(state.cluster_ids):
        state = state.with_num_clients(num_clients)
    key = fold_in(setup.training.seed, "round", number)
    size = setup.training.cohort_size(num_clients)
    if setup.budget is not None:
        drawn = setup.budget.draw(number, num_clients, size)
    else:
        drawn = cohort_of(fold_in(key, "cohort"), num_clients, size)
    drawn = exclude_blocked(drawn, num_clients, progress.history, setup.training.max_rejections)
    method = setup.method_for(number)
    state, cohort = method.prepare_cohort(setup.federation, state, drawn, fold_in(key, "admit"))
    if setup.budget is not None:
        known = state.cluster_ids[state.cluster_ids != UNKNOWN]
        setup.budget.group_sizes = torch.bincount(known, minlength=len(state))
    before, state = state, method.round(setup.federation, state, cohort, key)
    require_updated(setup.federation, before, state)
    _finish_evaluation(setup)
    setup.engine.client_state.commit(number)
    progress.state = state
    return len(drawn)
