"""A diagnosis as sentences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedclade.analysis.diagnose import members
from fedclade.analysis.diagnose.hypothesis_tests import DRAWS
from fedclade.analysis.diagnose.recommendation import CLEAR, has_groups

if TYPE_CHECKING:
    from fedclade.analysis.diagnose.api import Diagnosis
    from fedclade.analysis.diagnose.group_noise import GroupNoise
    from fedclade.analysis.diagnose.spread import Spread

ABOUT = {
    "iid": "The clients are alike (IID): labels and inputs do not differ more than by chance.",
    "quantity skew": (
        "Quantity skew: the clients hold the same kind of data, but very different amounts of it."
    ),
    "label skew": "Label skew: the clients have different labels; inputs of one label are alike.",
    "feature shift in groups": (
        "Feature shift in groups: inputs of one label differ between groups of clients, and no"
        " renaming of labels explains it."
    ),
    "feature shift of individuals": (
        "Feature shift of individuals: inputs of one label differ from client to client, each in"
        " its own way, and no renaming of labels explains it."
    ),
    "concept shift": (
        "Concept shift: the clients see the same inputs and give them different labels."
    ),
    "target shift": (
        "Target shift: the inputs are alike, but the targets, or their relation to the inputs,"
        " differ between groups."
    ),
    "feature shift in groups, label skew": (
        "A mixture of feature shift in groups and label skew: labels differ, and inputs of one"
        " label differ between groups of clients."
    ),
    "feature shift of individuals, label skew": (
        "A mixture of feature shift of individuals and label skew: labels differ, and inputs of one"
        " label differ from client to client, each in its own way."
    ),
    "concept shift, label skew": (
        "A mixture of concept shift and label skew: labels differ, and the same inputs have"
        " different labels."
    ),
}
DIFFERENCES = {
    "labels": "labels, p(y)",
    "inputs": "inputs, p(x)",
    "given_labels": "inputs of one label, p(x | y)",
}
NO_CLASSES = (
    "The targets are not class labels, so only the inputs and the loss were compared: the diagnosis"
    " cannot distinguish label skew from concept shift."
)
NAMES = {
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "local": "Local (a separate model for each client)",
    "clade": "Clade",
    "clade_groups": "CladeGroups",
    "ifca": "IFCA",
    "cfl": "CFL",
}
FEW_SIZES = 8


def sentences(diagnosis: Diagnosis) -> list[str]:
    about = ABOUT[", ".join(diagnosis.kinds)]
    kind = diagnosis.kinds[0]
    if diagnosis.evidence.classes == 1 and kind.startswith("feature shift"):
        about = f"{kind.capitalize()}: the inputs differ from client to client."
    lines = [f"{about} {_sure(diagnosis)}"]
    if diagnosis.evidence.classes == 1:
        lines.append(NO_CLASSES)
    if diagnosis.evidence.sizes_differ and "quantity skew" not in diagnosis.kinds:
        lines.append(
            f"Sizes differ too, from {diagnosis.about['smallest']} to {diagnosis.about['largest']}"
            " examples."
        )
    if len(diagnosis.sizes) > 1:
        lines.append(_sizes(diagnosis))
    mixture = diagnosis.evidence.is_mixture
    if "feature shift" in diagnosis.kind and diagnosis.spread is not None and not mixture:
        lines.append(_spread(diagnosis.spread))
    if (renamed := diagnosis.evidence.renamed) is not None and "concept shift" in diagnosis.kinds:
        between = "in groups" if diagnosis.group is not None else "between clients"
        lines.append(f"Labels renamed {between}: {renamed:.2f} of the difference.")
    lines += [_groups(diagnosis), *members.sentences(diagnosis.members)]
    if diagnosis.noise is not None and diagnosis.group is not None:
        lines.append(_noise(diagnosis.noise, len(diagnosis.group)))
    return [*lines, _advice(diagnosis)]


def by_chance(name: str, p: float) -> str:
    """The probability that chance alone gives a difference, as text.

    Args:
        name: the difference, a key of `DIFFERENCES`.
        p: its p-value.
    """
    if p < 0.001:
        return "less than 0.1 %"
    # A permutation test cannot resolve less than one in DRAWS.
    if name == "labels" and p <= 1 / DRAWS:
        return f"{100 / DRAWS:.1f} % at most"
    return f"{100 * p:.1f} %"


def _sizes(diagnosis: Diagnosis) -> str:
    """How large each part of a mixture is."""
    parts = [
        f"{kind} {100 * size:.0f} %"
        for kind, size in diagnosis.sizes.items()
        if kind != "quantity skew"
    ]
    text = f"Share of the variance between clients: {', '.join(parts)}." if parts else ""
    if "quantity skew" in diagnosis.sizes:
        spread = diagnosis.sizes["quantity skew"]
        text += f" The standard deviation of the clients' sizes is {spread:.1f} of their mean."
    return text.strip()


def _spread(spread: Spread) -> str:
    among = f"among individuals {spread.typical:.1f} is usual, and {spread.largest:.1f} the most"
    return f"The widest step in the tree of clients is {spread.step:.1f}; {among}."


def _sure(diagnosis: Diagnosis) -> str:
    sure = diagnosis.sure
    confidence = "Very sure" if sure >= 0.9 else "Fairly sure" if sure >= 0.7 else "Not sure"
    low_power = (
        " With this few examples a difference may go undetected."
        if diagnosis.evidence.power() < 0.5
        else ""
    )
    return f"{confidence} ({100 * sure:.0f} %).{low_power}"


def _groups(diagnosis: Diagnosis) -> str:
    if diagnosis.group is None:
        if not set(diagnosis.kinds) - {"iid", "quantity skew"}:
            return "There are no groups."
        return (
            "No groups: every client differs, or there are too few examples to detect the groups."
        )
    sizes = sorted(Counter(diagnosis.group).values(), reverse=True)
    listed = ", ".join(map(str, sizes[:FEW_SIZES])) + (", …" if len(sizes) > FEW_SIZES else "")
    return (
        f"{len(sizes)} groups of {listed} clients ({100 * diagnosis.groups_agree:.0f} % of the"
        " clusterings found this number)."
    )


def _noise(noise: GroupNoise, clients: int) -> str:
    """When the noise of differential privacy hides the groups, and how large it is in them."""
    least, hidden = noise.least_epsilon, noise.hidden_at
    if least is None:
        text = (
            f"CladeGroups does not find them with noise, not even of signature_epsilon = {hidden:g}"
        )
    else:
        text = f"CladeGroups finds them with noise down to signature_epsilon = {least:g}"
        if hidden is not None:
            text += f"; with {hidden:g} they are hidden"
    return (
        f"{text}. With privacy.epsilon the model of the smallest, {noise.fewest} of {clients}"
        f" clients, gets {clients / noise.fewest:.3g} times the noise of one model for all."
    )


def _advice(diagnosis: Diagnosis) -> str:
    advice = diagnosis.advice
    settings = "".join(f", {name} = {value}" for name, value in advice.settings.items())
    if advice.layer is not None:
        settings += f", with a personal layer (personal.layer = {advice.layer!r})"
    text = f"Use {NAMES.get(advice.method, advice.method)}{settings}: {advice.why}."
    if advice.gain is None or advice.gain_stderr is None:
        return text
    if (advice.method, advice.layer) != ("fedavg", None):
        text += f" {_gain(diagnosis, advice.gain, advice.gain_stderr)}"
    if advice.sure is not None and advice.sure >= 0.5:
        text += f" The next best is behind with a probability of {100 * advice.sure:.0f} %."
    elif advice.sure is not None:
        text += " It is simpler than the best, and not clearly worse."
    if advice.rivals:
        text += f" Not clearly worse: {'; '.join(advice.rivals)}."
    tried = any(has_groups(probe.method) for probe in diagnosis.probes)
    if tried and not advice.clustering_helps:
        text += " Groups with a model each were not clearly better in the pilot runs."
    return text


def _gain(diagnosis: Diagnosis, gain: float, error: float) -> str:
    """The gain over FedAvg as an interval of 95 %. Nothing is promised that was not shown."""
    unit = "points of accuracy" if diagnosis.about["score"] == "accuracy" else "in the loss"
    digits = 1 if diagnosis.about["score"] == "accuracy" else 3
    low, high = gain - CLEAR * error, gain + CLEAR * error
    seeds = max(probe.seeds for probe in diagnosis.probes)
    rounds = max(probe.rounds for probe in diagnosis.probes)
    measured = (
        f"measured on held-out training data after up to {rounds} rounds"
        f"{' with two seeds' if seeds > 1 else ''}"
    )
    if low <= 0:
        return (
            f"No gain over FedAvg is certain: {gain:+.{digits}f} {unit}, between"
            f" {low:+.{digits}f} and {high:+.{digits}f} (95 %), {measured}."
        )
    return (
        f"Expected gain over FedAvg: {gain:.{digits}f} {unit}, between {low:.{digits}f} and"
        f" {high:.{digits}f} (95 %), {measured}."
    )
