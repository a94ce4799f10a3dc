"""Export of the models of a finished run: for each group a folder with its model and a model
card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from fedclade.analysis.export.finished_run import FinishedRun
from fedclade.analysis.export.model_card import card_of, markdown
from fedclade.analysis.export.onnx import OnnxWriter, missing_packages
from fedclade.errors import InvalidInputError, nearest
from fedclade.training.result import Result, with_weights

__all__ = ["FORMATS", "Exported", "export"]

FORMATS = ("safetensors", "onnx")


@dataclass
class Exported:
    """What `export` wrote.

    Attributes:
        folder: the folder with one subfolder per group.
        cards: the model card of each group.
        problems: what could not be written, with the reason.
    """

    folder: Path
    cards: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def export(
    run: Result | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    formats: Sequence[str] = FORMATS,
    model: nn.Module | None = None,
    on_group: Callable[[dict[str, Any]], None] | None = None,
) -> Exported:
    """Write every model of a finished run, each with a model card in its own subfolder.

    Args:
        run: a `Result` whose run wrote a folder, or the path of the folder.
        out: the folder to write, new or empty; default: export/ in the run's folder.
        formats: any of "safetensors" and "onnx". Of an adapter of peft, "safetensors" writes
            adapter_model.safetensors and adapter_config.json, and there is no ONNX.
        model: an `nn.Module` of the same architecture, for a folder whose run used your own module;
            without it, such a run has no ONNX files.
        on_group: called with each model card when its group is written.

    Returns:
        The folder, the model cards, and what could not be written.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> result = fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1, out="runs/exported")
        >>> len(fc.export(result, formats=["safetensors"]).cards)
        1
    """
    for name in formats:
        if name not in FORMATS:
            raise InvalidInputError(
                f"format = '{name}': unknown.{nearest(name, FORMATS)}", "format"
            )
    if not formats:
        raise InvalidInputError(f"format: give at least one of {', '.join(FORMATS)}.", "format")
    path = _run_folder(run)
    if model is None and isinstance(run, Result):
        model = run.module
    source = FinishedRun(path, model)
    result = Exported(Path(out) if out is not None else path / "export")
    if result.folder.exists() and (not result.folder.is_dir() or any(result.folder.iterdir())):
        raise InvalidInputError(
            f"out = '{result.folder}': already exists and is not an empty folder. Choose another"
            " folder.",
            "out",
        )
    onnx = _onnx_writer(source, formats, result.problems)
    if (without := int((source.models.model_ids < 0).sum())) > 0:
        result.problems.append(
            f"{without} of {source.clients} clients have no model in this run, so they are in no"
            " group."
        )
    for name, row, ids in source.groups():
        card = _write_group(source, result, formats, onnx, name, row, ids)
        result.cards.append(card)
        if on_group is not None:
            on_group(card)
    model_of = {str(client): card["name"] for card in result.cards for client in card["clients"]}
    _write(
        result.folder / "models.json",
        {"groups": [card["name"] for card in result.cards], "model_of_client": model_of},
    )
    return result


def _run_folder(run: Result | str | os.PathLike[str]) -> Path:
    if not isinstance(run, Result):
        return Path(run)
    if run.folder is None:
        raise InvalidInputError(
            "run: this result has no run folder, so there is nothing to export. Run it again with"
            " fc.run(…, out=…).",
            "run",
        )
    return run.folder


def _onnx_writer(
    run: FinishedRun, formats: Sequence[str], problems: list[str]
) -> OnnxWriter | None:
    """The ONNX writer, or None with the reason appended to the problems."""
    if "onnx" not in formats:
        return None
    if missing := missing_packages():
        problem = (
            f"no ONNX: {' and '.join(missing)} not installed. Install with: pip install"
            " 'fedclade[onnx]'"
        )
    elif run.adapter is not None:
        problem = "no ONNX: the run trained an adapter, which is exported without its base model."
    elif run.module is None:
        problem = (
            f"no ONNX: the model '{run.tables['model']['name']}' is not registered. Use --import"
            " with the file that registers it."
        )
    elif run.models.shape is None:
        problem = "no ONNX: the model takes several tensors. Export safetensors."
    else:
        return OnnxWriter(run.models.shape)
    if "safetensors" not in formats:
        raise InvalidInputError(f"format = 'onnx': {problem}", "format")
    problems.append(problem)
    return None


def _write_group(
    run: FinishedRun,
    result: Exported,
    formats: Sequence[str],
    onnx: OnnxWriter | None,
    name: str,
    row: int,
    ids: list[int],
) -> dict[str, Any]:
    folder, state, files = result.folder / name, run.state(row), {}
    folder.mkdir(parents=True)
    if "safetensors" in formats:
        file = "model.safetensors" if run.adapter is None else "adapter_model.safetensors"
        # Copies, because tied weights share memory, which the format does not allow.
        save_file(
            {key: value.clone().contiguous() for key, value in state.items()},
            folder / file,
        )
        files["safetensors" if run.adapter is None else "adapter"] = file
    if run.adapter is not None:
        _write(folder / "adapter_config.json", run.adapter["config"])
    checked = None
    if onnx is not None and run.module is not None:
        try:
            checked = onnx.write(with_weights(run.module, state), folder / "model.onnx")
            files["onnx"] = "model.onnx"
        except InvalidInputError as error:
            result.problems.append(f"{name}: no ONNX ({error}).")
    card = card_of(run, name, row, ids, state, files, checked)
    _write(folder / "card.json", card)
    (folder / "card.md").write_text(markdown(card), encoding="utf-8")
    return card


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
