"""One run as the page shows it: curves, clients, groups, pictures of who is like whom, costs,
failures, settings.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.analysis.report.load import Row, StoredRun
from fedclade.analysis.report.metric import Metric, evenly, mean, short
from fedclade.analysis.report.similarity_layout import FEWEST, Array, Labels, Points, Related, flat

MOST_FAILURES = 500
MOST_GROUPS = 50  # more are neither listed nor coloured: Local has one for each client
MIX = 5  # classes named of a client or a group


def shown(run: StoredRun, metric: Metric, clients: int, side: int) -> dict[str, Any]:
    """Everything about one run but its headline. At most `clients` clients one by one; matrices of
    at most side × side cells.
    """
    cluster = _clusters(run)
    content = {
        "name": run.name,
        "folder": str(run.folder),
        "method": run.method,
        "seed": run.tables["run"].get("seed"),
        "config": short(run.tables, 12),
        "summary": short(run.summary, 6),
        "rounds": _rounds(run.rounds, metric),
        "byGroup": _by_group(run.rounds),
        "clients": _clients(run, metric, clients),
        "groups": _groups(run, metric),
        "failures": _failures(run.rounds),
        **_pictures(run, metric, cluster, side),
    }
    classes = run.names.classes
    names = {"names": _client_names(run, content), "classNames": classes and list(classes)}
    return content | names


def _client_names(run: StoredRun, content: dict[str, Any]) -> dict[str, str] | None:
    """The names of the clients that the page shows, by number; None: they have numbers only."""
    if run.names.clients is None:
        return None
    shown_ids = {client for _, client, _ in content["failures"]["first"]}
    for part in ("clients", "map"):
        shown_ids |= set(content[part]["id"]) if content[part] is not None else set()
    return {str(client): run.names.client(client) for client in sorted(shown_ids)}


def mix(run: StoredRun) -> dict[str, Any] | None:
    """The labels of each client, the most frequent first: [class, percent] pairs."""
    if run.features is None or run.features.labels is None:
        return None
    return {
        "ids": run.features.ids.tolist(),
        "top": [_top(row) for row in run.features.labels.numpy()],
    }


def _top(counts: NDArray[np.int64]) -> list[list[int]]:
    total = counts.sum()
    order = np.argsort(-counts, kind="stable")[:MIX]
    return [
        [int(label), round(100 * int(counts[label]) / int(total))]
        for label in order
        if counts[label] > 0
    ]


def _clusters(run: StoredRun) -> Labels | None:
    return np.array(run.clients["cluster"], np.int64) if run.clients is not None else None


def _rounds(rows: list[Row], metric: Metric) -> dict[str, Any]:
    """Columns over the rounds; what was not measured in a round is None."""
    columns = short(
        {
            "round": [row["round"] for row in rows],
            "value": [row.get(metric.key) for row in rows],
            "train": [row.get(f"train_{metric.key}") for row in rows],
            "worst": [row.get(f"{metric.key}_worst10") for row in rows],
            "clusters": [row["clusters"] for row in rows],
            "up": list(accumulate(row["bytes_up"] for row in rows)),
            "down": list(accumulate(row["bytes_down"] for row in rows)),
            "seconds": list(accumulate(row["seconds"] for row in rows)),
        },
        6,
    )
    return dict(columns)


def _by_group(rows: list[Row]) -> dict[str, Any] | None:
    """A curve for each group, under the number that it has in each round."""
    series: dict[int, list[list[float]]] = {}
    of = None
    for row in rows:
        of = row.get("by_cluster_of", of)
        for group, _, value in row.get("by_cluster", ()):
            series.setdefault(group, []).append([row["round"], value])
    if of is None or len(series) > MOST_GROUPS:
        return None
    return {
        "of": of,
        "series": [[group, short(points)] for group, points in sorted(series.items())],
    }


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
    }
    chosen = {
        new: [columns[name][i] for i in ids] for name, new in names.items() if name in columns
    }
    if all(group is None for group in chosen["truth"]):
        del chosen["truth"]
    return dict(short({"all": len(columns["client"]), "id": ids, **chosen}))


def _groups(run: StoredRun, metric: Metric) -> list[dict[str, Any]] | None:
    """Of each group: size, examples, mean and worst tenth, the classes that its clients hold."""
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
    if len(numbers) > MOST_GROUPS:
        return None
    classes = _classes(run, cluster)
    rows = []
    for group in numbers:
        who = np.flatnonzero(cluster == group)
        values = [columns[metric.key][i] for i in who] if metric.key in columns else []
        known = [value for value in values if value is not None]
        row = {
            "group": int(group),
            "clients": len(who),
            "examples": sum(columns["examples"][i] for i in who),
            "mean": mean(known),
            "worst": metric.worst_tenth(known),
            "classes": classes.get(int(group)),
        }
        rows.append(short(row))
    return rows


def _classes(run: StoredRun, cluster: Labels) -> dict[int, list[list[int]]]:
    features = run.features
    if features is None or features.labels is None:
        return {}
    labels, mine = features.labels.numpy(), cluster[features.ids.numpy()]
    return {int(group): _top(labels[mine == group].sum(0)) for group in np.unique(mine)}


def _failures(rows: list[Row]) -> dict[str, Any]:
    """Who, when, why; the first of them one by one, all of them counted by reason."""
    every = [(row["round"], failure) for row in rows for failure in row["failures"]]
    reasons = Counter(failure["reason"] for _, failure in every)
    first = [
        [number, failure["client"], failure["reason"]] for number, failure in every[:MOST_FAILURES]
    ]
    return {"count": len(every), "reasons": reasons.most_common(20), "first": first}


def _pictures(run: StoredRun, metric: Metric, cluster: Labels | None, side: int) -> dict[str, Any]:
    """Map, matrix and tree of what the method grouped by; failing that, of the clients' label
    shares.
    """
    nothing: dict[str, Any] = {"map": None, "matrix": None, "tree": None}
    found = _compared(run)
    if found is None:
        return nothing | {"pictured": "Nothing was kept of each client that could be drawn."}
    ids, rows, known, measure, what = found
    mine = cluster[ids] if cluster is not None else np.full(len(ids), -1)
    use = known & np.isfinite(rows).all(1) & ((mine >= 0) | (cluster is None))
    left = int(len(ids) - use.sum())
    if use.sum() < FEWEST:
        return nothing | {"pictured": f"Too few clients are known to draw them: {int(use.sum())}."}
    points = Points(ids[use], rows[use], mine[use], measure)
    related = Related.of(points)
    xy, share = flat(points)
    values = run.clients.get(metric.key) if run.clients is not None else None
    caption = f"What is compared: {what}, by {measure} distance." + (
        f" {left:,} clients are not known and left out." if left else ""
    )
    return {
        "pictured": caption,
        "map": short(
            {
                "id": points.ids.tolist(),
                "x": xy[:, 0].tolist(),
                "y": xy[:, 1].tolist(),
                "cluster": points.cluster.tolist(),
                "value": [values[i] for i in points.ids] if values is not None else None,
                "share": share,
            },
            4,
        ),
        "matrix": short(related.matrix(side), 4),
        "tree": short(related.dendrogram(), 4),
    }


def _compared(
    run: StoredRun,
) -> tuple[Labels, Array, NDArray[np.bool_], Literal["euclidean", "cosine"], str] | None:
    """Clients, a row for each, which rows are known, how they are compared, and what they are."""
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
