"""The recommended method and its expected gain, from the pilot runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, sqrt
from typing import Any

from fedclade.analysis.diagnose.pilot_runs import Probe
from fedclade.methods import METHODS
from fedclade.methods.base import LayerName

# The simplest first: the least work for clients, and the fewest settings. Others come last.
ORDER = ("fedavg", "local", "scaffold", "clade_groups", "clade", "cfl", "ifca")
NEGLIGIBLE = 0.5  # standard errors behind the best, within which the simplest method is chosen
IF_ALIKE = 2.0  # the same, if clients do not differ
CLEAR = 2.0  # standard errors of a gain that counts as shown


@dataclass(frozen=True)
class Advice:
    """A recommended method.

    Attributes:
        method: the method's name in an experiment file.
        settings: the method's settings in an experiment file.
        gain: the gain over FedAvg in the pilot runs, in points of accuracy or in loss; None without
            pilot runs.
        gain_stderr: the standard error of `gain`.
        clustering_helps: whether it is a clustered method with more than one model that is clearly
            better than FedAvg.
        why: the reason.
        layer: `personal.layer` in an experiment file; None for the method's own.
        sure: the probability that no simpler or better method of the pilot runs is better, from
            paired differences over clients; None without pilot runs.
        rivals: the methods that are not clearly worse.
    """

    method: str
    settings: dict[str, Any]
    gain: float | None
    gain_stderr: float | None
    clustering_helps: bool
    why: str
    layer: LayerName | None = None
    sure: float | None = None
    rivals: tuple[str, ...] = ()


def recommend(differ: bool, groups: int | None, faint: bool, probes: Sequence[Probe]) -> Advice:
    """The best of the pilot runs, or a simpler method that is level with it.

    If clients do not differ, simpler methods may be two standard errors behind.
    """
    if not probes:
        return _by_kind(differ, groups, faint)
    errors = NEGLIGIBLE if differ else IF_ALIKE
    most = max(probe.seeds for probe in probes)
    level = [
        probe
        for probe in probes
        if probe.seeds == most and probe.behind <= errors * probe.behind_stderr
    ]
    chosen = min(level, key=_complexity)
    others = [probe for probe in probes if probe is not chosen]
    rivals = [
        probe for probe in others if probe.behind - chosen.behind <= CLEAR * probe.behind_stderr
    ]
    is_clear = chosen.gain > CLEAR * chosen.gain_stderr
    return Advice(
        chosen.method,
        chosen.settings,
        chosen.gain,
        chosen.gain_stderr,
        has_groups(chosen.method) and chosen.clusters > 1 and is_clear,
        _why(chosen, is_clear, differ),
        chosen.layer,
        _sure(chosen, others),
        tuple(label(probe.method, probe.layer) for probe in rivals),
    )


def label(method: str, layer: LayerName | None) -> str:
    """The name of a method and its personal layer."""
    return method if layer is None else f"{method}, personal.layer = {layer}"


def has_groups(method: str) -> bool:
    """Whether the method trains a model for each group; False if it is not registered."""
    return method in METHODS and METHODS[method].groups in ("given", "found")


def _complexity(probe: Probe) -> tuple[int, bool]:
    place = ORDER.index(probe.method) if probe.method in ORDER else len(ORDER)
    return place, probe.layer is not None


def _sure(chosen: Probe, others: Sequence[Probe]) -> float | None:
    """The probability that the runner-up is not better, if errors are normal."""
    if not others:
        return None
    second = min(others, key=lambda probe: probe.behind)
    error = max(second.behind_stderr, chosen.behind_stderr)
    ahead = second.behind - chosen.behind
    if error == 0:
        return 1.0 if ahead > 0 else 0.5
    return 0.5 * (1 + erf(ahead / error / sqrt(2)))


def _by_kind(differ: bool, groups: int | None, faint: bool) -> Advice:
    """The recommendation without pilot runs, from the kind of heterogeneity alone."""
    unknown = "without pilot runs no gain is estimated"
    if groups:
        why = f"the clients form groups; {unknown}"
        return Advice("clade", {}, None, None, True, why)
    if faint:
        why = (
            "the clients differ, and there may be groups that the diagnosis cannot detect;"
            f" {unknown}"
        )
        return Advice("clade", {"recluster_every": 5}, None, None, True, why)
    if differ:
        why = f"the clients differ, and there are no groups; {unknown}"
        return Advice("fedavg", {}, None, None, False, why, "auto")
    why = f"the clients are alike, so start with one model for all; {unknown}"
    return Advice("fedavg", {}, None, None, False, why)


def _why(chosen: Probe, is_clear: bool, differ: bool) -> str:
    if chosen.method == "fedavg" and chosen.layer is None:
        return (
            "no other method was better in the pilot runs"
            if differ
            else "the clients are alike, and no other method was clearly better in the pilot runs"
        )
    if chosen.method == "local":
        return "a separate model for each client was level with the best in the pilot runs"
    models = "one model" if chosen.clusters == 1 else f"{chosen.clusters} models"
    if is_clear:
        return f"with {models} it was the best in the pilot runs, or level with the best"
    return f"with {models} it was slightly better in the pilot runs, which may be chance"
