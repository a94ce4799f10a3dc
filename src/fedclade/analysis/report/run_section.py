"""One run as the page shows it: curves, clients, groups, similarity plots, costs, failures,
settings.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.analysis.report.figure_descriptions import NAMED_CLIENTS, colors_of
from fedclade.analysis.report.load import Row, StoredRun
from fedclade.analysis.report.metric import Metric, evenly, mean, short
from fedclade.analysis.report.run_figures import MAX_GROUPS, costs, curves, distribution
from fedclade.analysis.report.similarity_layout import (
    MIN_CLIENTS,
    Array,
    Labels,
    Points,
    Related,
    client_map,
)
from fedclade.training.metrics import own_names

MAX_FAILURES = 500
MAX_MEMBERS = 30  # listed for a group; the table of clients has all
MAX_CLASSES = 5  # listed for a client or a group


def section(run: StoredRun, metric: Metric, clients: int, side: int) -> dict[str, Any]:
    """All data of one run except its headline.

    Args:
        run: the run.
        metric: the page's metric.
        clients: the largest number of clients to list.
        side: the largest number of rows of a matrix.
    """
    cluster = _clusters(run)
    colors = _colors(run, cluster)
    own = _own_metrics(run)
    listed = _clients(run, metric, clients)
    similarity = _similarity_plots(run, metric, cluster, side)
    figures = {
        **curves(run, metric, colors, own),
        **similarity["figures"],
        "distribution": distribution(run, metric, listed, colors),
        **costs(run.rounds),
    }
    content = {
        "name": run.name,
        "title": run.title,
        "folder": str(run.folder),
        "method": run.method,
        "seed": run.tables["run"].get("seed"),
        "config": short(run.tables, 12),
        "summary": short(run.summary, 6),
        "rounds": _rounds(run.rounds, metric),
        "ownMetrics": own,
        "clients": listed,
        "groups": _groups(run, metric),
        "colors": colors,
        "failures": _failures(run.rounds),
        "caption": similarity["caption"],
        "figures": {name: figure for name, figure in figures.items() if figure is not None},
    }
    classes = run.names.classes
    names = {"names": _client_names(run, content), "classNames": classes and list(classes)}
    return content | names


def _colors(run: StoredRun, cluster: Labels | None) -> dict[int, int]:
    """The color of each group, by its clients at the end or in the last evaluated round."""
    if cluster is not None:
        return colors_of({int(group): int(size) for group, size in Counter(cluster).items()})
    last = next((row for row in reversed(run.rounds) if "by_cluster" in row), None)
    return colors_of({group: size for group, size, _ in last["by_cluster"]}) if last else {}


def _client_names(run: StoredRun, content: dict[str, Any]) -> dict[str, str] | None:
    """The names of the clients that the page shows, by number; None: they have numbers only."""
    if run.names.clients is None:
        return None
    shown_ids = {client for _, client, _ in content["failures"]["first"]}
    for part in (content["clients"], content["figures"].get("map")):
        shown_ids |= set(part["id"]) if part is not None else set()
    return {str(client): run.names.client(client) for client in sorted(shown_ids)}


def mix(run: StoredRun) -> dict[str, Any] | None:
    """The labels of each client as pairs [class, percent], the most frequent first."""
    if run.features is None or run.features.labels is None:
        return None
    return {
        "ids": run.features.ids.tolist(),
        "top": [_top(row) for row in run.features.labels.numpy()],
    }


def _top(counts: NDArray[np.int64]) -> list[list[int]]:
    total = counts.sum()
    order = np.argsort(-counts, kind="stable")[:MAX_CLASSES]
    return [
        [int(label), round(100 * int(counts[label]) / int(total))]
        for label in order
        if counts[label] > 0
    ]


def _clusters(run: StoredRun) -> Labels | None:
    return np.array(run.clients["cluster"], np.int64) if run.clients is not None else None


def _rounds(rows: list[Row], metric: Metric) -> dict[str, Any]:
    """Columns over the rounds; None for values that were not measured in a round."""
    columns = short(
        {
            "round": [row["round"] for row in rows],
            "value": [row.get(metric.key) for row in rows],
            "train": [row.get(f"train_{metric.key}") for row in rows],
            "validation": [row.get(f"validation_{metric.key}") for row in rows],
            "worst": [row.get(f"{metric.key}_worst10") for row in rows],
            "clusters": [row["clusters"] for row in rows],
            "up": list(accumulate(row["bytes_up"] for row in rows)),
            "down": list(accumulate(row["bytes_down"] for row in rows)),
            "seconds": list(accumulate(row["seconds"] for row in rows)),
        },
        6,
    )
    return dict(columns)


def _own_metrics(run: StoredRun) -> list[dict[str, Any]]:
    """For each of the user's metrics its newest value, and [round, value] where it was measured."""
    metrics = [
        {
            "name": name,
            "value": run.last[name],
            "points": [
                [row["round"], row[name]] for row in run.rounds if row.get(name) is not None
            ],
        }
        for name in own_names(run.last)
    ]
    return list(short(metrics, 6))


def _clients(run: StoredRun, metric: Metric, most: int) -> dict[str, Any] | None:
    columns = run.clients
    if columns is None:
        return None
    ids = evenly(len(columns["client"]), most)
    names = {
        "cluster": "cluster",
        "true_group": "truth",
        "examples": "examples",
        metric.key: "value",
        f"validation_{metric.key}": "validation",
    }
    chosen: dict[str, Any] = {
        new: [columns[name][i] for i in ids] for name, new in names.items() if name in columns
    }
    if all(group is None for group in chosen["truth"]):
        del chosen["truth"]
    chosen["own"] = {name: [columns[name][i] for i in ids] for name in own_names(columns)}
    return dict(short({"all": len(columns["client"]), "id": ids, **chosen}))


def _groups(run: StoredRun, metric: Metric) -> list[dict[str, Any]] | None:
    """For each group: size, examples, mean, worst tenth, and the classes of its clients."""
    columns = run.clients
    if columns is None:
        last = next((row for row in reversed(run.rounds) if "by_cluster" in row), None)
        if last is None or last["by_cluster_of"] != metric.key:
            return None
        return [
            {"group": group, "clients": clients, "mean": short(value)}
            for group, clients, value in last["by_cluster"]
        ]
    cluster = np.array(columns["cluster"], np.int64)
    numbers = np.unique(cluster)
    if len(numbers) > MAX_GROUPS:
        return None
    classes = _classes(run, cluster)
    rows = []
    for group in numbers:
        members = np.flatnonzero(cluster == group)
        values = [columns[metric.key][i] for i in members] if metric.key in columns else []
        known = [value for value in values if value is not None]
        row = {
            "group": int(group),
            "clients": len(members),
            "examples": sum(columns["examples"][i] for i in members),
            "mean": mean(known),
            "worst": metric.worst_tenth(known),
            "classes": classes.get(int(group)),
        }
        if run.names.clients is not None:
            row["members"] = [run.names.client(client) for client in members[:MAX_MEMBERS]]
        rows.append(short(row))
    return rows


def _classes(run: StoredRun, cluster: Labels) -> dict[int, list[list[int]]]:
    features = run.features
    if features is None or features.labels is None:
        return {}
    labels, groups = features.labels.numpy(), cluster[features.ids.numpy()]
    return {int(group): _top(labels[groups == group].sum(0)) for group in np.unique(groups)}


def _failures(rows: list[Row]) -> dict[str, Any]:
    """Round, client and reason of the first failures; and the number of all by reason."""
    failures = [(row["round"], failure) for row in rows for failure in row["failures"]]
    reasons = Counter(failure["reason"] for _, failure in failures)
    first = [
        [number, failure["client"], failure["reason"]]
        for number, failure in failures[:MAX_FAILURES]
    ]
    return {"count": len(failures), "reasons": reasons.most_common(20), "first": first}


def _similarity_plots(
    run: StoredRun, metric: Metric, cluster: Labels | None, side: int
) -> dict[str, Any]:
    """Map, matrix and tree of the features that the method clustered; without features, of the
    clients' label shares. With the caption that names what is compared.
    """
    compared = _compared(run)
    if compared is None:
        return {"figures": {}, "caption": "The run has no features of its clients to plot."}
    ids, rows, known, measure, description = compared
    groups = cluster[ids] if cluster is not None else np.full(len(ids), -1)
    use = known & np.isfinite(rows).all(1) & ((groups >= 0) | (cluster is None))
    omitted = int(len(ids) - use.sum())
    if use.sum() < MIN_CLIENTS:
        text = f"Too few clients with features to plot: {int(use.sum())}."
        return {"figures": {}, "caption": text}
    points = Points(ids[use], rows[use], groups[use], measure)
    related = Related.of(points)
    values = run.clients.get(metric.key) if run.clients is not None else None
    caption = f"Compared: {description}, by {measure} distance." + (
        f" {omitted:,} clients without features are omitted." if omitted else ""
    )
    names = _shown_names(run, points.ids)
    figures = {
        "map": {
            **client_map(points, names),
            "value": [values[i] for i in points.ids] if values is not None else None,
        },
        "matrix": related.matrix(side, names),
        "dendrogram": related.dendrogram(names),
    }
    return {"caption": caption, "figures": short(figures, 4)}


def _shown_names(run: StoredRun, ids: Labels) -> list[str] | None:
    """The name of each client, if they have names and are few."""
    if run.names.clients is None or len(ids) > NAMED_CLIENTS:
        return None
    return [run.names.client(int(client)) for client in ids]


def _compared(
    run: StoredRun,
) -> tuple[Labels, Array, NDArray[np.bool_], Literal["euclidean", "cosine"], str] | None:
    """Clients, a row of features for each, which rows are known, the distance, and a
    description.
    """
    features = run.features
    if features is None:
        return None
    ids = features.ids.numpy()
    if features.features is not None:
        known = features.known.numpy() if features.known is not None else np.ones(len(ids), bool)
        return (
            ids,
            features.features.numpy().astype(np.float64),
            known,
            "cosine" if features.measure == "cosine" else "euclidean",
            features.what,
        )
    if features.labels is None:
        return None
    counts = features.labels.numpy().astype(np.float64)
    total = counts.sum(1, keepdims=True)
    return (
        ids,
        counts / np.maximum(total, 1),
        total[:, 0] > 0,
        "euclidean",
        "the shares of each client's labels",
    )
