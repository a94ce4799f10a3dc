"""An evaluation of clients on their nodes: its message, and what the answers say.

It is a message of its own, or a part of the message of the next training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedclade.core.federation import Failure, ModelAssignment
from fedclade.core.losses import LOSSES, accuracy, label_accuracy
from fedclade.core.output_metric import OutputMetric
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import to_spec
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.engines.base import Delivery, EvalRequest
from fedclade.engines.remote.messages import Message, pack_assignment
from fedclade.engines.reply_validation import LARGEST

PART = "evaluation"
"""The key of an evaluation in the header of another message, and the prefix of its tensors."""


@dataclass(frozen=True)
class RemoteEvaluation:
    """The evaluation of the models of some clients.

    Args:
        assignment: the model of each client.
        ids: the clients.
        requests: the evaluations.
        key: the randomness of fine-tuning.
        deliver: whether the nodes keep the models, as the final ones.
    """

    assignment: ModelAssignment
    ids: Tensor
    requests: Sequence[EvalRequest]
    key: int = 0
    deliver: Delivery | None = None

    def message(self, places: Tensor) -> Message:
        """The message to the node of the clients at these places of `ids`."""
        deliver = self.deliver
        header = {
            "kind": "evaluate",
            "requests": [
                {
                    "split": request.split,
                    "metrics": list(request.metrics),
                    "finetune": spec_or_none(request.finetune),
                    "is_served": request.is_served,
                }
                for request in self.requests
            ],
            "key": self.key,
            "deliver": deliver and {"finetune": spec_or_none(deliver.finetune), "key": deliver.key},
        }
        return with_models(header, self.assignment[places])

    def results(
        self, answers: Sequence[tuple[Tensor, Message]]
    ) -> tuple[list[Tree], list[Failure]]:
        """The values of each request, NaN for clients without an answer, and the failures.

        Args:
            answers: the answers of nodes, each with the places of its clients in `ids`.
        """
        failures: list[Failure] = []
        empty = torch.full((len(self.ids),), torch.nan, dtype=torch.float64)
        results: list[Tree] = [
            {name: empty.clone() for name in ("loss", *request.metrics)}
            for request in self.requests
        ]
        for places, answer in answers:
            values = [
                strip_prefix(f"value{number}", answer.tensors)
                for number in range(len(self.requests))
            ]
            if not all(
                _is_complete(value, request, len(places))
                for value, request in zip(values, self.requests, strict=True)
            ):
                failures += [
                    Failure(client, "its node's evaluation does not match the request")
                    for client in self.ids[places].tolist()
                ]
                continue
            reasons = _impossible_values(values, self.requests)
            failures += [
                Failure(int(self.ids[places[row]]), reason, rejected=True)
                for row, reason in reasons.items()
            ]
            valid = [row for row in range(len(places)) if row not in reasons]
            for result, value in zip(results, values, strict=True):
                for name, measured in value.items():
                    result[name][places[valid]] = measured[valid]
        return results, failures


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation that travels with the next training.

    Args:
        evaluation: the evaluation.
        round: the round whose data it uses.
        done: gets the results, before those of the training.
    """

    evaluation: RemoteEvaluation
    round: int
    done: Callable[[list[Tree]], None]


def join(training: Message, evaluation: Message) -> Message:
    """One message for both. A model that both have is in it once."""
    common = [
        name
        for name, value in evaluation.tensors.items()
        if name in training.tensors and torch.equal(value, training.tensors[name])
    ]
    own = {name: value for name, value in evaluation.tensors.items() if name not in common}
    return Message(
        {**training.header, PART: {**evaluation.header, "common": common}},
        {**training.tensors, **add_prefix(PART, own)},
    )


def evaluation_part(message: Message) -> Message | None:
    """The message of the evaluation in one that `join` made; None if it has none."""
    part = message.header.get(PART)
    if part is None:
        return None
    common = {name: message.tensors[name] for name in part["common"]}
    header = {name: value for name, value in message.header.items() if name != PART}
    # Without the initial client state, which the training has stored.
    return Message({**header, **part}, common | strip_prefix(PART, message.tensors))


def join_answers(training: Message, evaluation: Message) -> Message:
    """One answer for both."""
    return Message(
        {**training.header, PART: evaluation.header},
        {**training.tensors, **add_prefix(PART, evaluation.tensors)},
    )


def split_answers(answer: Message) -> tuple[Message, Message]:
    """The answer to the training, and the one to the evaluation."""
    part = answer.header.get(PART)
    if not isinstance(part, dict):
        part = {"rejected": "its node's answer has no evaluation"}
    own = {name: v for name, v in answer.tensors.items() if not name.startswith(f"{PART}/")}
    return replace(answer, tensors=own), Message(part, strip_prefix(PART, answer.tensors))


def with_models(header: dict[str, Any], assignment: ModelAssignment) -> Message:
    """A message with the models of its clients."""
    per_client, models = pack_assignment(assignment)
    return Message({**header, "per_client": per_client}, models)


def spec_or_none(program: AnyProgram | None) -> dict[str, Any] | None:
    """The description of a program; None for none."""
    return to_spec(program) if program is not None else None


def _is_complete(values: Tree, request: EvalRequest, clients: int) -> bool:
    return values.keys() == {"loss", *request.metrics} and all(
        value.dtype == torch.float64 and tuple(value.shape) == (clients,)
        for value in values.values()
    )


def _impossible_values(values: Sequence[Tree], requests: Sequence[EvalRequest]) -> dict[int, str]:
    """The rows of a node's evaluation with a value that its metric cannot have, and why."""
    reasons: dict[int, str] = {}
    for measured, request in zip(values, requests, strict=True):
        for name, value in measured.items():
            lowest, highest = _range_of(name, request)
            # NaN is a metric that is not defined, for example without test data.
            impossible = (value < lowest) | (value > highest)
            for row in impossible.nonzero().flatten().tolist():
                reasons[row] = (
                    f"its {name} of {float(value[row]):.3g} is not from {lowest:g} to {highest:g}"
                )
    return reasons


def _range_of(name: str, request: EvalRequest) -> tuple[float, float]:
    """The least and the largest value that a client may report."""
    if name == "loss":
        return (0.0 if request.model.example_loss in LOSSES.values() else -LARGEST), LARGEST
    metric = request.metrics[name]
    if isinstance(metric, OutputMetric):
        return metric.lowest, metric.highest
    return (0.0, 1.0) if metric in (accuracy, label_accuracy) else (-LARGEST, LARGEST)
