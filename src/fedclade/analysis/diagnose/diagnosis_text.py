"""A diagnosis as sentences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedclade.analysis.diagnose import members

if TYPE_CHECKING:
    from fedclade.analysis.diagnose.api import Diagnosis

ABOUT = {
    "iid": "The clients are alike (IID): labels and inputs do not differ more than by chance.",
    "quantity skew": (
        "Quantity skew: the clients hold the same kind of data, but very different amounts of it."
    ),
    "label skew": "Label skew: the clients have different labels; inputs of one label are alike.",
    "feature shift": (
        "Feature shift: inputs of one label differ from client to client, and no renaming of labels"
        " explains it."
    ),
    "concept shift": (
        "Concept shift: the clients see the same inputs and give them different labels."
    ),
    "target shift": (
        "Target shift: the inputs are alike, but the targets, or their relation to the inputs,"
        " differ between groups."
    ),
    "feature shift, label skew": (
        "A mixture of feature shift and label skew: labels differ, and inputs of one label differ"
        " too."
    ),
    "concept shift, label skew": (
        "A mixture of concept shift and label skew: labels differ, and the same inputs have"
        " different labels."
    ),
}
NO_CLASSES = (
    "The targets are not class labels, so only the inputs and the loss were compared: the diagnosis"
    " cannot distinguish label skew from concept shift."
)
NAMES = {
    "fedavg": "FedAvg",
    "local": "Local (a separate model for each client)",
    "clade": "Clade",
    "ifca": "IFCA",
    "cfl": "CFL",
}
FEW_SIZES = 8


def sentences(diagnosis: Diagnosis) -> list[str]:
    about = ABOUT[", ".join(diagnosis.kinds)]
    if diagnosis.evidence.classes == 1 and "feature shift" in diagnosis.kinds:
        about = "Feature shift: the inputs differ from client to client."
    lines = [f"{about} {_sure(diagnosis)}"]
    if diagnosis.evidence.classes == 1:
        lines.append(NO_CLASSES)
    if diagnosis.evidence.sizes_differ and "quantity skew" not in diagnosis.kinds:
        lines.append(
            f"Sizes differ too, from {diagnosis.about['smallest']} to {diagnosis.about['largest']}"
            " examples."
        )
    return [*lines, _groups(diagnosis), *members.sentences(diagnosis.members), _advice(diagnosis)]


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


def _advice(diagnosis: Diagnosis) -> str:
    advice = diagnosis.advice
    settings = "".join(f", {name} = {value}" for name, value in advice.settings.items())
    text = f"Use {NAMES[advice.method]}{settings}: {advice.why}."
    if advice.gain is not None and advice.method != "fedavg":
        unit = "points of accuracy" if diagnosis.about["score"] == "accuracy" else "in the loss"
        text += (
            f" Expected gain over FedAvg: {advice.gain:.1f} ± {advice.gain_stderr:.1f} {unit},"
            f" measured after {diagnosis.about['probe_rounds']} rounds on held-out training data."
            " With more rounds it may become smaller."
        )
    if advice.clustering_helps:
        return text
    faint = diagnosis.group is None and diagnosis.evidence.given_labels_differ
    return (
        f"{text} Clustering was not clearly better in the pilot runs."
        if faint or diagnosis.group
        else f"{text} Clustering will not help."
    )
