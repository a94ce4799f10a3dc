"""The figures of one run: curves over the rounds, costs, and the result of each client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fedclade.analysis.report.figure_descriptions import (
    NAMED_CLIENTS,
    OTHER,
    Figure,
    axis,
    color_of_rank,
    dots,
    histogram,
    lines,
    series,
)
from fedclade.analysis.report.load import Row, StoredRun
from fedclade.analysis.report.metric import Metric, mean

MAX_GROUPS = 50  # more are neither listed nor drawn: Local has one for each client


def curves(
    run: StoredRun, metric: Metric, colors: dict[int, int], own: Sequence[dict[str, Any]]
) -> dict[str, Figure | None]:
    """Curves over the rounds: all clients, the user's metrics, and each group.

    Args:
        run: the run.
        metric: the page's metric.
        colors: the color of each group.
        own: the user's metrics, with their points.
    """
    shown = (
        ("mean client", 0, metric.key, False),
        ("worst tenth", 1, f"{metric.key}_worst10", False),
        ("mean client, training data", 7, f"train_{metric.key}", True),
        ("mean client, validation data", 2, f"validation_{metric.key}", True),
    )
    return {
        "curves": lines(
            f"{metric.label} of all clients by round",
            axis(metric),
            [
                series(name, color, _points(run.rounds, key), dashed=dashed)
                for name, color, key, dashed in shown
            ],
        ),
        "metrics": lines(
            "Other metrics of the mean client by round",
            {"label": "Value", "unit": ""},
            [
                series(entry["name"], color_of_rank(at, len(own)), entry["points"])
                for at, entry in enumerate(own)
            ],
        ),
        "groups": _group_curves(run.rounds, colors),
    }


def _points(rows: list[Row], key: str) -> list[list[float]]:
    return [[row["round"], row[key]] for row in rows if row.get(key) is not None]


def _group_curves(rows: list[Row], colors: dict[int, int]) -> Figure | None:
    """A curve for each group. A group is identified by its number in each round."""
    points: dict[int, list[list[float]]] = {}
    metric_key = None
    for row in rows:
        metric_key = row.get("by_cluster_of", metric_key)
        for group, _, value in row.get("by_cluster", ()):
            if value is not None:
                points.setdefault(group, []).append([row["round"], value])
    if metric_key is None or not 1 < len(points) <= MAX_GROUPS:
        return None
    name, unit = metric_key.capitalize(), "%" if metric_key == "accuracy" else ""
    return lines(
        f"{name} by group and round",
        {"label": f"{name} (%)" if unit else name, "unit": unit},
        [
            series(f"group {group}", colors.get(group, OTHER), curve, group=group)
            for group, curve in sorted(points.items())
        ],
    )


def costs(rows: list[Row]) -> dict[str, Figure | None]:
    """Total traffic and time by round. No figure of the traffic if nothing was sent."""
    number = [row["round"] for row in rows]
    sent = {
        "sent by clients": list(accumulate(row["bytes_up"] for row in rows)),
        "sent to clients": list(accumulate(row["bytes_down"] for row in rows)),
    }
    most = max((total[-1] for total in sent.values() if total), default=0)
    unit, size = ("MB", 1e6) if most >= 1e6 else ("kB", 1e3)
    seconds = accumulate(row["seconds"] for row in rows)
    return {
        "traffic": lines(
            f"Total traffic by round ({unit})",
            {"label": unit, "unit": unit},
            [
                series(
                    name,
                    color,
                    [[at, value / size] for at, value in zip(number, total, strict=True)],
                )
                for color, (name, total) in enumerate(sent.items())
            ],
            from_zero=True,
        )
        if most
        else None,
        "seconds": lines(
            "Total seconds by round",
            {"label": "Seconds", "unit": "s"},
            [
                series(
                    "seconds", 0, [[at, value] for at, value in zip(number, seconds, strict=True)]
                )
            ],
            from_zero=True,
        ),
    }


def distribution(
    run: StoredRun, metric: Metric, listed: dict[str, Any] | None, colors: dict[int, int]
) -> Figure | None:
    """The value of each client: by name where there are few clients, else how many have which."""
    if listed is None or not any(value is not None for value in listed.get("value", ())):
        return None
    known = [
        (client, group, value)
        for client, group, value in zip(
            listed["id"], listed["cluster"], listed["value"], strict=True
        )
        if value is not None
    ]
    average = mean([value for _, _, value in known])
    assert average is not None
    rules = [(average, f"mean {metric.text(average)}")]
    if len(known) <= NAMED_CLIENTS:
        known.sort(key=lambda entry: entry[2], reverse=metric.higher_is_better)
        rows = [
            {
                "name": run.names.client(client),
                "color": colors.get(group, OTHER),
                "group": group,
                "value": value,
            }
            for client, group, value in known
        ]
        return dots(f"{metric.label} of each client", axis(metric), rows, rules)
    worst = (run.summary or {}).get(f"{metric.key}_worst10")
    if worst is not None:
        rules.append((worst, f"worst tenth {metric.text(worst)}"))
    part = "" if len(listed["id"]) == listed["all"] else f" of {listed['all']:,}, evenly spaced"
    return histogram(
        f"{metric.label} of {len(known):,} clients{part}",
        axis(metric),
        listed["value"],
        listed["cluster"],
        rules,
    )
