"""The models of a finished run, to be used elsewhere: for each group a folder with its model and a
card that says what it is.
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
from fedclade.training.result import with_weights

__all__ = ["FORMATS", "Exported", "export"]

FORMATS = ("safetensors", "onnx")


@dataclass
class Exported:
    """What was written. cards: of each group; problems: what could not be written, and why."""

    folder: Path
    cards: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    formats: Sequence[str] = FORMATS,
    model: nn.Module | None = None,
    on_group: Callable[[dict[str, Any]], None] | None = None,
) -> Exported:
    """Write every model of the run in `folder` to a folder of its own below `out` (default: export/
    in the run's folder).

    model: a module of the same form, where the run was made with a module of your own; without it
    there is no ONNX of such a run. on_group: called with each card as it is written.
    """
    path = Path(folder)
    for name in formats:
        if name not in FORMATS:
            raise InvalidInputError(f"--format {name}: unknown.{nearest(name, FORMATS)}")
    if not formats:
        raise InvalidInputError(f"--format: name at least one of {', '.join(FORMATS)}.")
    run = FinishedRun(path, model)
    result = Exported(Path(out) if out is not None else path / "export")
    if result.folder.exists() and (not result.folder.is_dir() or any(result.folder.iterdir())):
        raise InvalidInputError(
            f"--out {result.folder}: it is there already and not an empty folder; give another."
        )
    onnx = _onnx_writer(run, formats, result.problems)
    if (without := int((run.models.assignment < 0).sum())) > 0:
        result.problems.append(
            f"{without} of {run.clients} clients have no model in this run, so they are in no"
            " group."
        )
    for name, row, ids in run.groups():
        card = _write_group(run, result, formats, onnx, name, row, ids)
        result.cards.append(card)
        if on_group is not None:
            on_group(card)
    model_of = {str(client): card["name"] for card in result.cards for client in card["clients"]}
    _write(
        result.folder / "models.json",
        {"groups": [card["name"] for card in result.cards], "model_of_client": model_of},
    )
    return result


def _onnx_writer(
    run: FinishedRun, formats: Sequence[str], problems: list[str]
) -> OnnxWriter | None:
    """What writes ONNX, or None and the reason among the problems."""
    if "onnx" not in formats:
        return None
    if missing := missing_packages():
        problem = f"no ONNX: {' and '.join(missing)} not installed; pip install 'fedclade[onnx]'."
    elif run.module is None:
        problem = (
            f"no ONNX: the model '{run.tables['model']['name']}' is your own; --import the file"
            " that registers it."
        )
    else:
        return OnnxWriter(run.models.shape)
    if "safetensors" not in formats:
        raise InvalidInputError(f"--format onnx: {problem}")
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
        # Copies, since tied weights share memory, which the format does not know.
        save_file(
            {key: value.clone().contiguous() for key, value in state.items()},
            folder / "model.safetensors",
        )
        files["safetensors"] = "model.safetensors"
    checked = None
    if onnx is not None and run.module is not None:
        try:
            checked = onnx.write(with_weights(run.module, state), folder / "model.onnx")
            files["onnx"] = "model.onnx"
        except InvalidInputError as error:
            result.problems.append(f"{name}: no ONNX ({error}).")
    card = card_of(run, name, ids, state, files, checked)
    _write(folder / "card.json", card)
    (folder / "card.md").write_text(markdown(card), encoding="utf-8")
    return card


def _write(path: Path, what: dict[str, Any]) -> None:
    path.write_text(json.dumps(what, indent=1) + "\n")
