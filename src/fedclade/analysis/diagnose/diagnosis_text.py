"""A diagnosis in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fedclade.analysis.diagnose import members

if TYPE_CHECKING:
    from fedclade.analysis.diagnose.api import Diagnosis

ABOUT = {
    "iid": "The clients are alike (IID): labels and inputs differ by no more than chance gives.",
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
        "The inputs are alike and the targets, or what they have to do with the inputs, differ"
        " between groups."
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
    "The targets are not class labels, so only the inputs and the loss were compared: label skew"
    " and concept shift cannot be told apart."
)
NAMES = {
    "fedavg": "FedAvg",
    "local": "Local (every client by itself)",
    "clade": "Clade",
    "ifca": "IFCA",
    "cfl": "CFL",
}
FEW_SIZES = 8


def sentences(found: Diagnosis) -> list[str]:
    about = ABOUT[", ".join(found.kinds)]
    if found.evidence.classes == 1 and "feature shift" in found.kinds:
        about = "Feature shift: the inputs differ from client to client."
    lines = [f"{about} {_sure(found)}"]
    if found.evidence.classes == 1:
        lines.append(NO_CLASSES)
    if found.evidence.sizes_differ and "quantity skew" not in found.kinds:
        lines.append(
            f"Sizes differ too, from {found.about['smallest']} to {found.about['largest']}"
            " examples."
        )
    return [*lines, _groups(found), *members.sentences(found.members), _advice(found)]


def _sure(found: Diagnosis) -> str:
    how = "Very sure" if found.sure >= 0.9 else "Fairly sure" if found.sure >= 0.7 else "Not sure"
    blind = (
        " There are too few examples to see a difference, if there is one."
        if found.evidence.power() < 0.5
        else ""
    )
    return f"{how} ({100 * found.sure:.0f} %).{blind}"


def _groups(found: Diagnosis) -> str:
    if found.group is None:
        if not set(found.kinds) - {"iid", "quantity skew"}:
            return "There are no groups."
        return (
            "No groups: clients differ one by one, or groups are too faint to see with so few"
            " examples."
        )
    sizes = sorted(Counter(found.group).values(), reverse=True)
    shown = ", ".join(map(str, sizes[:FEW_SIZES])) + (", …" if len(sizes) > FEW_SIZES else "")
    return (
        f"{len(sizes)} groups, of {shown} clients ({100 * found.groups_agree:.0f} % of the looks"
        " found as many)."
    )


def _advice(found: Diagnosis) -> str:
    advice = found.advice
    settings = "".join(f", {name} = {value}" for name, value in advice.settings.items())
    text = f"Use {NAMES[advice.method]}{settings}: {advice.why}."
    if advice.gain is not None and advice.method != "fedavg":
        unit = "points of accuracy" if found.about["score"] == "accuracy" else "in the loss"
        text += (
            f" Expected gain over FedAvg: {advice.gain:.1f} ± {advice.gain_stderr:.1f} {unit},"
            f" measured after {found.about['probe_rounds']} rounds on held-out training data; it"
            " may shrink as FedAvg trains on."
        )
    if advice.clustering_helps:
        return text
    faint = found.group is None and found.evidence.given_labels_differ
    return (
        f"{text} Clustering did not help in the probe rounds."
        if faint or found.group
        else f"{text} Clustering will not help here."
    )
