"""Which method, and what it is likely to gain: from the kind of federation and from the probe
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedclade.analysis.diagnose.pilot_runs import Probe

CLUSTERED = ("clade", "ifca", "cfl")


@dataclass(frozen=True)
class Advice:
    """method and settings as an experiment file has them. gain: expected over FedAvg, in points of
    accuracy (or in loss), as measured in the probe rounds; None where there were none.
    clustering_helps: whether it is a clustered method, and better than FedAvg by more than
    chance.
    """

    method: str
    settings: dict[str, Any]
    gain: float | None
    gain_stderr: float | None
    clustering_helps: bool
    why: str


def advised(differ: bool, groups: int | None, faint: bool, probes: Sequence[Probe]) -> Advice:
    """The method that was best in the probe rounds; of those within a standard error of it the
    simplest.

    Where there are groups Clade is the simplest, because it needs no number of them; where nothing
    differs FedAvg, and then it takes two standard errors to leave it.
    """
    if not probes:
        return _by_kind(differ, groups, faint)
    order = (
        ["clade", "cfl", "ifca", "local", "fedavg"]
        if groups
        else ["fedavg", "local", "clade", "cfl", "ifca"]
    )
    errors = 1 if differ else 2
    chosen = min(
        (probe for probe in probes if probe.behind <= errors * probe.behind_stderr),
        key=lambda probe: order.index(probe.method),
    )
    helps = chosen.method in CLUSTERED and chosen.gain > chosen.gain_stderr
    return Advice(
        chosen.method,
        chosen.settings,
        chosen.gain,
        chosen.gain_stderr,
        helps,
        _why(chosen, differ, groups),
    )


def _by_kind(differ: bool, groups: int | None, faint: bool) -> Advice:
    """Without probe rounds: what the kind alone suggests."""
    if groups or faint:
        settings = {"recluster_every": 5} if faint else {}
        return Advice(
            "clade",
            settings,
            None,
            None,
            True,
            "clients fall into groups; no probe rounds were made, so no gain is estimated",
        )
    why = (
        "there are no groups, so one model for all is the place to start; no probe rounds were"
        " made, so no gain is estimated"
    )
    return Advice("fedavg", {}, None, None, False, why)


def _why(chosen: Probe, differ: bool, groups: int | None) -> str:
    if chosen.method == "fedavg":
        return (
            "one model for all does as well as anything else"
            if differ
            else "the clients are alike: every model learns from all of them"
        )
    if chosen.method == "local":
        apart = "there are groups, but" if groups else "clients differ one by one, and"
        return f"{apart} each client does best with a model of its own"
    if groups:
        return f"clients fall into {groups} groups: one model for each"
    return "sharing with similar clients beats both one model for all and a model each"
