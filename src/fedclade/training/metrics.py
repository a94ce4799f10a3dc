"""Metrics over all clients, for summaries, histories and client tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedclade.data.client_metadata import ClientMetadata

# Names of the numbers in summaries, histories and client tables. The user's metrics need others.
RESERVED = frozenset(
    {
        "loss",
        "accuracy",
        "accuracy_stderr",
        "accuracy_variance",
        "accuracy_worst10",
        "ari",
        "epsilon",
        "examples",
        "next_clip",
        "privacy",
        "perplexity",
        "client",
        "cluster",
        "true_group",
        "round",
        "clients",
        "clusters",
        "failures",
        "bytes_up",
        "bytes_down",
        "seconds",
        "method",
        "dataset",
        "partition",
        "model",
        "engine",
        "device",
        "seed",
        "rounds",
        "clients_without_test",
        "clients_without_model",
        "by_cluster",
        "by_cluster_of",
        "blocked_clients",
        "test_examples",
        "validation_examples",
        "selected_round",
        "seeds",
        "accuracy_std",
        "stopped",
        "chosen_lr",
    }
)
# A name with one of these prefixes or with the suffix is the number of another split, or a count.
_PREFIXES, _SUFFIX = ("train_", "validation_", "clients_without_", "hurt_against_"), "_shared"
MOST_CLUSTERS = 50  # with more clusters, a history has no accuracy per cluster


def is_reserved(name: str) -> bool:
    """Whether the user's metrics need another name."""
    return name in RESERVED or name.startswith(_PREFIXES) or name.endswith(_SUFFIX)


def own_names(table: Mapping[str, Any]) -> list[str]:
    """The names of the user's metrics in a summary, a round of the history or the columns of a
    client table. What is no number is not a metric: a file may come from any source.
    """
    return [name for name, value in table.items() if not is_reserved(name) and _is_measured(value)]


def _is_measured(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_measured, value))
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def mean_over_clients(values: Tensor) -> float | None:
    """The unweighted mean over the clients that have a value; None if none has."""
    known = values[~values.isnan()]
    mean = float(known.mean()) if len(known) else math.nan
    return mean if math.isfinite(mean) else None


def accuracy_summary(accuracy: Tensor, test_samples: int) -> dict[str, float | None]:
    """The mean of the accuracies, its binomial standard error, their population variance, and the
    mean of the worst tenth of the clients.

    accuracy_stderr is 100 sqrt(p (1 - p) / N); accuracy_variance is in percent squared.

    Args:
        accuracy: (clients,) in percent; NaN for a client without a value.
        test_samples: the number N of distinct test samples.
    """
    known = accuracy[~accuracy.isnan()]
    if not len(known):
        return dict.fromkeys(
            ("accuracy", "accuracy_stderr", "accuracy_variance", "accuracy_worst10")
        )
    p = float(known.mean()) / 100
    tenth = max(1, math.ceil(len(known) / 10))
    return {
        "accuracy": 100 * p,
        "accuracy_stderr": 100 * math.sqrt(max(0.0, p * (1 - p)) / max(1, test_samples)),
        "accuracy_variance": float(known.var(correction=0)),
        "accuracy_worst10": float(known.sort().values[:tenth].mean()),
    }


def summary_of(values: dict[str, Tensor], test_samples: int) -> dict[str, float | None]:
    """The summary of each metric: its mean over the clients, and more for accuracies.

    Args:
        values: (clients,) for each metric.
        test_samples: the number of distinct test samples.
    """
    numbers: dict[str, float | None] = {}
    for name, value in values.items():
        if name == "accuracy":
            numbers |= accuracy_summary(value, test_samples)
        else:
            numbers[name] = mean_over_clients(value)
        if name == "train_accuracy":
            numbers["train_accuracy_variance"] = accuracy_summary(value, 0)["accuracy_variance"]
    return numbers


def by_cluster(values: dict[str, Tensor], cluster: Tensor) -> dict[str, Any]:
    """For figures: [cluster, number of clients, mean accuracy] for each cluster; the mean loss if
    there is no accuracy. Empty if there are more than MOST_CLUSTERS clusters.
    """
    name = "accuracy" if "accuracy" in values else "loss"
    ids = torch.unique(cluster[cluster >= 0]).tolist()
    if len(ids) > MOST_CLUSTERS:
        return {}
    members = {cluster_id: cluster == cluster_id for cluster_id in ids}
    return {
        "by_cluster_of": name,
        "by_cluster": [
            [cluster_id, int(is_member.sum()), mean_over_clients(values[name][is_member])]
            for cluster_id, is_member in members.items()
        ],
    }


def columns(
    population: ClientMetadata, cluster: Tensor, values: dict[str, Tensor]
) -> dict[str, list[Any]]:
    """The columns of clients.csv."""
    groups, clients = population.groups, len(population)
    by_name: dict[str, list[Any]] = {
        "client": list(population.names.clients or range(clients)),
        "cluster": cluster.tolist(),
        "true_group": groups.tolist() if groups is not None else [None] * clients,
        "examples": population.sizes.tolist(),
        "test_examples": population.test_sizes.tolist(),
    }
    if population.has_validation and population.validation_sizes is not None:
        by_name["validation_examples"] = population.validation_sizes.tolist()
    for name, value in values.items():
        by_name[name] = [number if math.isfinite(number) else None for number in value.tolist()]
    return by_name


def clusters(cluster: Tensor) -> int:
    """The number of clusters that have a client."""
    return int((cluster[cluster >= 0].bincount() > 0).sum())


def adjusted_rand(groups: Tensor | None, cluster: Tensor) -> float | None:
    """The adjusted Rand index of the clusters and the true groups (1: the same partition, 0:
    chance) over the clients that have a model; None if the true groups are not known, or no client
    has a model.
    """
    if groups is None:
        return None
    from sklearn.metrics import adjusted_rand_score  # type: ignore[import-untyped]  # a node of a federation starts faster without it

    known = cluster >= 0
    if not known.any():
        return None
    return float(adjusted_rand_score(groups[known].numpy(), cluster[known].numpy()))
