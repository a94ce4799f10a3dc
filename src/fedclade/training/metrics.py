"""Numbers over all clients: what a summary says, and how."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fedclade.data.client_metadata import ClientMetadata

# Names of our own numbers, in summaries, histories and client tables, which a user's metric may not
# take.
RESERVED = frozenset(
    {
        "loss",
        "accuracy",
        "accuracy_stderr",
        "accuracy_variance",
        "accuracy_worst10",
        "ari",
        "examples",
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
    }
)

MOST_CLUSTERS = 50  # of which a history tells each one's accuracy


def mean_over_clients(values: Tensor) -> float | None:
    """Unweighted mean over the clients that have a value."""
    known = values[~values.isnan()]
    mean = float(known.mean()) if len(known) else math.nan
    return mean if math.isfinite(mean) else None


def accuracy_summary(accuracy: Tensor, test_samples: int) -> dict[str, float | None]:
    """Mean, binomial standard error, population variance over clients and mean of the worst tenth,
    of accuracies in percent.

    accuracy_stderr is 100 sqrt(p (1 - p) / N), N the distinct test samples; accuracy_variance is in
    percent squared.
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
    """What is said of per-client values, by name: of accuracies more than their mean."""
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
    """For pictures: [cluster, clients, mean accuracy, or mean loss where there is none] for each
    cluster, where they are not too many.
    """
    name = "accuracy" if "accuracy" in values else "loss"
    found = torch.unique(cluster[cluster >= 0]).tolist()
    if len(found) > MOST_CLUSTERS:
        return {}
    members = {each: cluster == each for each in found}
    return {
        "by_cluster_of": name,
        "by_cluster": [
            [each, int(here.sum()), mean_over_clients(values[name][here])]
            for each, here in members.items()
        ],
    }


def columns(
    population: ClientMetadata, cluster: Tensor, values: dict[str, Tensor]
) -> dict[str, list[Any]]:
    """The table of clients, column by column."""
    groups, clients = population.groups, len(population)
    found: dict[str, list[Any]] = {
        "client": list(population.names.clients or range(clients)),
        "cluster": cluster.tolist(),
        "true_group": groups.tolist() if groups is not None else [None] * clients,
        "examples": population.sizes.tolist(),
        "test_examples": population.test_sizes.tolist(),
    }
    for name, value in values.items():
        found[name] = [number if math.isfinite(number) else None for number in value.tolist()]
    return found


def clusters(cluster: Tensor) -> int:
    """How many clusters have a client."""
    return int((cluster[cluster >= 0].bincount() > 0).sum())


def adjusted_rand(groups: Tensor | None, cluster: Tensor) -> float | None:
    """Agreement of the clusters found with the true groups (1: the same partition, 0: chance),
    where the truth is known.
    """
    if groups is None:
        return None
    from sklearn.metrics import adjusted_rand_score  # type: ignore[import-untyped]  # a node of a federation starts faster without it

    return float(adjusted_rand_score(groups.numpy(), cluster.numpy()))
