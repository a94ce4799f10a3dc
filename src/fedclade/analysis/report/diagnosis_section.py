"""A diagnosis as the page shows it, in the words of the terminal."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

from fedclade.analysis.diagnose.diagnosis_text import DIFFERENCES, NAMES, by_chance
from fedclade.analysis.diagnose.recommendation import CLEAR, label
from fedclade.analysis.report.figure_descriptions import (
    NAMED_CLIENTS,
    OTHER,
    Figure,
    bars,
    colors_of,
    dots,
)
from fedclade.analysis.report.load import Row
from fedclade.analysis.report.metric import short

_LISTED = 30  # clients of a group without names
_UNKNOWN = "EXPERIMENT"  # in a command, if the diagnosis was not made from a file


def diagnosis_section(name: str, content: Row) -> dict[str, Any]:
    """Sentences, figures, groups and commands of a diagnosis.

    Args:
        name: the name of its folder.
        content: the content of diagnosis.json.
    """
    group = content.get("group")
    sizes: Counter[int] = Counter(group or ())
    figures = {
        "chance": _chance(content),
        "pilots": _pilots(content),
        "map": _map(content),
    }
    return {
        "name": name,
        "headline": content.get("headline"),
        "sentences": list(content.get("sentences", ())),
        "groups": _groups(content),
        "colors": colors_of(sizes),
        "commands": _commands(content),
        "leaves": content.get("leaves_a_client"),
        "evidence": _evidence(content),
        "pilots": _pilot_rows(content),
        "figures": {key: figure for key, figure in figures.items() if figure is not None},
    }


def _evidence(content: Row) -> list[dict[str, Any]]:
    """A row for each difference, as the terminal has it."""
    evidence = content.get("evidence")
    if evidence is None:
        return []
    return [
        {
            "name": words,
            "share": short(100 * evidence[key]["share"], 3),
            "times": short(evidence[key]["times_chance"], 3),
            "chance": by_chance(key, evidence[key]["p"]),
        }
        for key, words in DIFFERENCES.items()
    ]


def _chance(content: Row) -> Figure | None:
    rows = [
        {
            "name": row["name"],
            "color": 0,
            "value": row["times"],
            "note": f"{row['share']} % of the variance; by chance alone {row['chance']}",
        }
        for row in _evidence(content)
        if row["times"] is not None
    ]
    if not rows:
        return None
    axis = {"label": "Difference, in multiples of chance", "unit": ""}
    return bars("Each difference between clients against chance", axis, rows, [(1.0, "chance")])


def _pilot_rows(content: Row) -> list[dict[str, Any]]:
    """A row for each pilot run, the best first."""
    advice = content.get("advice") or {}
    best = (advice.get("method"), advice.get("layer"))
    rows = [
        {
            "name": label(probe["method"], probe.get("layer")),
            "score": short(probe["score"], 4),
            "gain": short(probe["gain"], 3),
            "half": short(CLEAR * probe["gain_stderr"], 3),
            "models": probe.get("clusters", 1),
            "rounds": probe.get("rounds", 0),
            "seeds": probe.get("seeds", 1),
            "recommended": (probe["method"], probe.get("layer")) == best,
        }
        for probe in content.get("probes", ())
    ]
    return sorted(rows, key=lambda row: -(row["gain"] or 0.0))


def _pilots(content: Row) -> Figure | None:
    unit = "points" if content.get("about", {}).get("score", "accuracy") == "accuracy" else "loss"
    rows = [
        {
            "name": row["name"],
            "color": 0 if row["recommended"] else OTHER,
            "value": row["gain"],
            "low": row["gain"] - row["half"],
            "high": row["gain"] + row["half"],
            **({"note": "recommended"} if row["recommended"] else {}),
        }
        for row in _pilot_rows(content)
        if row["gain"] is not None and row["half"] is not None and row["name"] != "fedavg"
    ]
    axis = {"label": f"Gain over FedAvg in the pilot runs ({unit})", "unit": ""}
    return dots("Gain of each pilot run, with two standard errors", axis, rows, [(0.0, "FedAvg")])


def _map(content: Row) -> Figure | None:
    places, group = content.get("map", ()), content.get("group")
    if not places:
        return None
    named = len(places) <= NAMED_CLIENTS and all(place.get("name") for place in places)
    known = group is not None and all(0 <= place["client"] < len(group) for place in places)
    groups = [group[place["client"]] for place in places] if group and known else [-1] * len(places)
    figure = {
        "kind": "map",
        "label": f"Map of {len(places):,} clients: similar clients are close",
        "x": {"label": "First component"},
        "y": {"label": "Second component"},
        "id": [place["client"] for place in places],
        "px": [place["x"] for place in places],
        "py": [place["y"] for place in places],
        "groups": groups,
        "names": [place["name"] for place in places] if named else None,
        "clients": [str(place.get("name") or place["client"]) for place in places],
    }
    return dict(short(figure))


def _groups(content: Row) -> list[dict[str, Any]]:
    """A row for each group: its number, its size, its clients and its most frequent classes."""
    group = content.get("group")
    if group is None:
        return []
    named: dict[Any, Row] = {row.get("group"): row for row in content.get("members", ())}
    rows = []
    sizes: Counter[int] = Counter(group)
    for number, size in sorted(sizes.items()):
        ids = [client for client, of in enumerate(group) if of == number]
        listed = ", ".join(map(str, ids[:_LISTED])) + (", …" if len(ids) > _LISTED else "")
        row = named.get(number, {})
        rows.append(
            {
                "group": number,
                "clients": size,
                "members": str(row.get("names") or listed),
                "classes": row.get("classes"),
            }
        )
    return rows


def _commands(content: Row) -> list[dict[str, str]]:
    """What to do next: train the recommended method, and compare it with its rivals."""
    advice = content.get("advice")
    if advice is None or advice["method"] not in NAMES:
        return []
    experiment = content.get("experiment") or _UNKNOWN
    settings = [f"method.{name}={value}" for name, value in advice.get("settings", {}).items()]
    layer = [f"personal.layer={advice['layer']}"] if advice.get("layer") else []
    chosen = [f"method.name={advice['method']}", *settings, *layer]
    run = ["fedclade", "run", experiment]
    for setting in chosen:
        run += ["--set", setting]
    rivals = [rival for rival in advice.get("rivals", ()) if rival in NAMES]
    methods = dict.fromkeys(["fedavg", "local", advice["method"], *rivals])
    compare = ["fedclade", "compare", experiment, "--methods", ",".join(methods), "--seeds", "5"]
    return [
        {"why": "Train the recommended method", "command": shlex.join(run)},
        {
            "why": "Check it against its rivals, on test data and five seeds",
            "command": shlex.join(compare),
        },
    ]
