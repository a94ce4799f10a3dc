"""The recommended method and its expected gain, from the kind of heterogeneity and the pilot
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedclade.analysis.diagnose.pilot_runs import Probe

CLUSTERED = ("clade", "ifca", "cfl")


@dataclass(frozen=True)
class Advice:
    """A recommended method.

    Attributes:
        method: the method's name in an experiment file.
        settings: the method's settings in an experiment file.
        gain: the gain over FedAvg in the pilot runs, in points of accuracy or in loss; None without
            pilot runs.
        gain_stderr: the standard error of `gain`.
        clustering_helps: whether it is a clustered method that is better than FedAvg by more than
            the standard error.
        why: the reason.
    """

    method: str
    settings: dict[str, Any]
    gain: float | None
    gain_stderr: float | None
    clustering_helps: bool
    why: str


def recommend(differ: bool, groups: int | None, faint: bool, probes: Sequence[Probe]) -> Advice:
    """The simplest of the methods that are within one standard error of the best pilot run.

    With groups, Clade is the simplest, because it needs no number of groups. If clients do not
    differ, FedAvg is the simplest, and the margin is two standard errors.
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
    """The recommendation without pilot runs, from the kind of heterogeneity alone."""
    if groups or faint:
        settings = {"recluster_every": 5} if faint else {}
        found = (
            "the clients form groups"
            if groups
            else "the clients differ, and there may be groups that the diagnosis cannot detect"
        )
        return Advice(
            "clade",
            settings,
            None,
            None,
            True,
            f"{found}; without pilot runs no gain is estimated",
        )
    why = (
        "there are no groups, so start with one model for all; without pilot runs no gain is"
        " estimated"
    )
    return Advice("fedavg", {}, None, None, False, why)


def _why(chosen: Probe, differ: bool, groups: int | None) -> str:
    if chosen.method == "fedavg":
        return (
            "one model for all is as good as any other method"
            if differ
            else "the clients are alike, so one model can use the data of all of them"
        )
    if chosen.method == "local":
        reason = "there are groups, but" if groups else "every client differs, and"
        return f"{reason} no method is clearly better than a separate model for each client"
    if groups:
        return f"the clients form {groups} groups, with one model each"
    return "sharing a model among similar clients is better than one model for all and than local"
