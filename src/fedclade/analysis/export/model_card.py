"""The model card: the group's clients, their data, the model's accuracy, and how to load it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import fedclade
from fedclade.analysis.export.finished_run import FinishedRun
from fedclade.core.names import Names
from fedclade.core.pytree import Tree
from fedclade.methods.base import Method
from fedclade.methods.knn_per import KNNPer
from fedclade.registry import REGISTRY
from fedclade.training.metrics import own_names
from fedclade.training.plot_data import ClientFeatures

_SHOWN_CLIENTS = 30  # in card.md; card.json lists all
_SHOWN_CLASSES = 12
_SHOWN_FEATURES = 30
# Characters that Markdown or HTML would read as more than text.
_SPECIAL = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {mark: f"\\{mark}" for mark in "\\|`*[]"}
)


def card_of(
    run: FinishedRun,
    name: str,
    row: int,
    ids: Sequence[int],
    state: Tree,
    files: Mapping[str, str],
    onnx_checked: str | None,
) -> dict[str, Any]:
    """The card of one group, as JSON.

    Args:
        run: the finished run.
        name: the name of the group.
        row: the number of its model.
        ids: its clients.
        state: the weights of its model.
        files: the file of each format.
        onnx_checked: how the ONNX file was checked; None without such a file.
    """
    summary, tables, models = run.summary, run.tables, run.models
    about: dict[str, Any] = {
        "input_shape": None if models.shape is None else list(models.shape),
        "input_dtype": run.input_dtype,
        "classes": models.classes,
        "parameters": sum(value.numel() for value in state.values()),
    }
    for key, names in (("class_names", run.names.classes), ("feature_names", run.names.features)):
        if names is not None:
            about[key] = list(names)
    return {
        "name": name,
        "fedclade": fedclade.__version__,
        "method": summary["method"],
        "dataset": summary["dataset"],
        "seed": summary["seed"],
        "rounds": summary["rounds"],
        "clients": [run.columns["client"][client] for client in ids],
        "training_examples": sum(run.columns["examples"][client] for client in ids),
        "labels": _labels(run.features, ids),
        "test": _measured(run.columns, ids, _test_samples(run, row, ids)),
        "all_clients": {
            key: summary.get(key)
            for key in (
                *("clients", "clusters", "accuracy", "accuracy_worst10", "loss"),
                *own_names(summary),
            )
        },
        "model": {"name": tables["model"]["name"], **about},
        "files": dict(files),
        "onnx": onnx_checked,
        "load": _snippets(run, files),
        "settings": {table: dict(values) for table, values in tables.items()},
    }


def _labels(features: ClientFeatures | None, ids: Sequence[int]) -> dict[str, Any] | None:
    """The distribution of the group's training labels. In a large federation only some clients are
    counted.
    """
    if features is None or features.labels is None:
        return None
    members = set(ids)
    rows = [row for row, client in enumerate(features.ids.tolist()) if client in members]
    counts = features.labels[rows].sum(0).tolist()
    if not sum(counts):
        return None
    return {
        "clients_counted": len(rows),
        "counts": counts,
        "shares": [round(count / sum(counts), 4) for count in counts],
    }


def _test_samples(run: FinishedRun, row: int, ids: Sequence[int]) -> int | None:
    """The distinct test samples of the group's clients. Where the run does not know which of them
    are the same (real clients), all count. None if no number is known.
    """
    counts = None if run.features is None else run.features.test_samples
    if counts is not None and row < len(counts):
        return int(counts[row])
    sizes = run.columns.get("test_examples")
    return None if sizes is None else sum(sizes[client] for client in ids)


def _measured(
    columns: Mapping[str, Sequence[Any]], ids: Sequence[int], samples: int | None
) -> dict[str, Any]:
    """Accuracy in percent, loss, and the user's metrics, on the test parts of the group's
    clients.
    """
    measures: dict[str, Any] = {}
    for measure in ("accuracy", "loss", *own_names(columns)):
        values = [
            value
            for client in ids
            if (value := columns.get(measure, [None] * (client + 1))[client]) is not None
        ]
        if values:
            measures[measure] = {"mean": statistics.fmean(values), "clients": len(values)}
            # Whether a high value of the user's metric is good is not known.
            if measure in ("accuracy", "loss"):
                worst = min(values) if measure == "accuracy" else max(values)
                measures[measure]["worst_client"] = worst
    if measures and samples is not None:
        measures["samples"] = samples
    return measures


def _snippets(run: FinishedRun, files: Mapping[str, str]) -> dict[str, str]:
    """Python code that loads each file from the group's folder."""
    snippets = {}
    if "safetensors" in files:
        snippets["safetensors"] = (
            f"from safetensors.torch import load_file\n\n{_build_code(run)}\n"
            + _load_code(run, f'load_file("{files["safetensors"]}")')
            + "\nmodel.eval()"
        )
    if "adapter" in files:
        snippets["adapter"] = (
            "from peft import PeftModel\n\n"
            "# base: the frozen model of the run, without an adapter\n"
            'model = PeftModel.from_pretrained(base, ".").eval()'
        )
    if "onnx" in files:
        shape = (1, *(run.models.shape or ()))
        snippets["onnx"] = (
            "import numpy as np\nimport onnxruntime\n\nsession ="
            f' onnxruntime.InferenceSession("{files["onnx"]}")\nx ='
            f" np.zeros({shape}, np.{run.input_dtype})  # your samples\n(outputs,)"
            ' = session.run(None, {"x": x})'
        )
    return snippets


def _build_code(run: FinishedRun) -> str:
    table, own = run.tables["model"], "  # your own class: import it first"
    spec = REGISTRY["model"].get(table["name"])
    if spec is None:
        return f"model = {table['name']}(){own}"
    settings = ", ".join(f"{key}={value!r}" for key, value in table.items() if key != "name")
    call = f"({settings}).build({run.models.shape}, {run.models.outputs})"
    if spec.__module__.startswith("fedclade."):
        return f"import fedclade as fc\n\nmodel = fc.models.{spec.__name__}{call}"
    return f"model = {spec.__name__}{call}{own}"


def _load_code(run: FinishedRun, weights: str) -> str:
    """Code that loads weights into `model`, or into what the method makes of it."""
    table = run.tables["method"]
    method = REGISTRY["method"].get(table["name"])
    if "knn_weight" in run.models.fixed | run.models.row(0) and table["name"] != KNNPer.name:
        method, table = KNNPer, {"name": KNNPer.name}  # the personal layer has its defaults
    if method is None or method.served_module is Method.served_module:
        return f"model.load_state_dict({weights})"
    settings = ", ".join(f"{key}={value!r}" for key, value in table.items() if key != "name")
    name = method.__name__
    name = f"fc.methods.{name}" if method.__module__.startswith("fedclade.") else name
    return (
        f"weights = {weights}\nmodel = {name}({settings}).served_module(model, weights)\n"
        "model.load_state_dict(weights)"
    )


def markdown(card: Mapping[str, Any]) -> str:
    """The card as Markdown."""
    clients, model, everyone = card["clients"], card["model"], card["all_clients"]
    shown = _listed(clients, _SHOWN_CLIENTS)
    size, kind = (
        ", ".join(map(str, model["input_shape"] or ["several tensors"])),
        f"{model['input_dtype']} " if model["input_dtype"] else "",
    )
    pixels = "; divide pixels from 0 to 255 by 255" if model["input_dtype"] == "float32" else ""
    lines = [
        f"# {card['name']}: the model of {len(clients):,} of {everyone['clients']:,} clients",
        "",
        (
            f"Trained with {card['method']} (fedclade {card['fedclade']}) on {card['dataset']},"
            f" {card['rounds']} rounds, seed {card['seed']}."
        ),
        "",
        "| | |",
        "| --- | --- |",
        f"| clients | {shown} |",
        f"| training examples | {card['training_examples']:,} |",
        f"| label distribution | {_distribution(card['labels'], model.get('class_names'))} |",
        *_measures(card["test"], everyone),
        f"| model | {model['name']}, {model['parameters']:,} parameters |",
        f"| input | {kind}(samples, {size}){pixels} |",
        *([f"| outputs | {_outputs(model)} |"] if model["classes"] is not None else []),
        *(
            [f"| features | {_listed(model['feature_names'], _SHOWN_FEATURES)} |"]
            if "feature_names" in model
            else []
        ),
        *([f"| ONNX | {card['onnx']} |"] if card["onnx"] else []),
        "",
        (
            "The model was evaluated on the test data of its own clients. Its accuracy for other"
            " clients is unknown."
        ),
        "This card lists clients and label shares: share it only with people who may see them.",
        "",
    ]
    for file_format, snippet in card["load"].items():
        lines += [f"## Load the model ({file_format})", "", "```python", snippet, "```", ""]
    lines += ["## Settings", ""]
    for table, values in card["settings"].items():
        lines.append(f"- {table}: {', '.join(f'{key} = {value}' for key, value in values.items())}")
    return "\n".join(lines) + "\n"


def _distribution(labels: Mapping[str, Any] | None, class_names: Sequence[str] | None) -> str:
    if labels is None:
        return "unknown"
    order = sorted(range(len(labels["shares"])), key=lambda label: -labels["shares"][label])
    present = [label for label in order if labels["counts"][label]]
    names = Names(classes=None if class_names is None else tuple(class_names))
    shares = ", ".join(
        f"class {names.class_name(label).translate(_SPECIAL)}: {labels['shares'][label]:.1%}"
        for label in present[:_SHOWN_CLASSES]
    )
    return shares + (
        f" and {len(present) - _SHOWN_CLASSES} more" if len(present) > _SHOWN_CLASSES else ""
    )


def _measures(test: Mapping[str, Any], everyone: Mapping[str, Any]) -> list[str]:
    if not test:
        return ["| accuracy | not measured: no client of the group has test data |"]
    samples = f", {test['samples']:,} test samples" if "samples" in test else ""
    lines = []
    for measure in (name for name in test if name != "samples"):
        unit, digits = (" %", 2) if measure == "accuracy" else ("", 4)
        group, overall = test[measure], everyone.get(measure)
        comparison = (
            f" (all clients of the run: {overall:.{digits}f}{unit})" if overall is not None else ""
        )
        worst = (
            f", worst client {group['worst_client']:.{digits}f}{unit}"
            if "worst_client" in group
            else ""
        )
        lines.append(
            f"| {measure.translate(_SPECIAL)} | mean {group['mean']:.{digits}f}{unit}{worst},"
            f" {group['clients']:,} clients{samples}{comparison} |"
        )
    return lines


def _listed(names: Sequence[object], most: int) -> str:
    """Names as text of a Markdown table, the first of many."""
    shown = ", ".join(str(name).translate(_SPECIAL) for name in names[:most])
    return shown + (", … (card.json lists all)" if len(names) > most else "")


def _outputs(model: Mapping[str, Any]) -> str:
    names = model.get("class_names")
    listed = f": {_listed(names, _SHOWN_CLASSES)}" if names else ""
    return f"{model['classes']} classes, as logits{listed}"
