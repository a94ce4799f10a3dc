"""Checkpoints: state, client memory and history in one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedclade.client.tree import Tree, prefixed, under
from fedclade.errors import InvalidInput
from fedclade.methods.base import State

FORMAT = "fedclade-checkpoint-1"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """All that is needed to go on after `round`."""

    round: int
    state: Tree
    memory: Tree
    history: list[dict[str, Any]]
    configuration: str  # hash of the configuration and the data: another experiment's checkpoint is recognised


def flatten(state: State) -> Tree:
    """A state as one tree of tensors."""
    flat: Tree = {}
    for field in fields(state):
        value = getattr(state, field.name)
        flat |= prefixed(field.name, value) if isinstance(value, dict) else {field.name: value}
    return flat


def restore(kind: type[State], flat: Tree) -> State:
    """The state that `flatten` took apart."""
    hints = get_type_hints(kind)
    return kind(**{field.name: under(field.name, flat) if hints[field.name] == Tree else flat[field.name] for field in fields(kind)})


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder/round-N.safetensors` and keep the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = prefixed("state", checkpoint.state) | prefixed("memory", checkpoint.memory)
    metadata = {
        "format": FORMAT,
        "round": str(checkpoint.round),
        "configuration": checkpoint.configuration,
        "history": json.dumps(checkpoint.history),
    }
    write_tensors(folder / f"round-{checkpoint.round:06d}.safetensors", tensors, metadata)
    for old in sorted(folder.glob("round-*.safetensors"))[:-_KEPT]:
        old.unlink()


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, or None."""
    files = sorted(folder.glob("round-*.safetensors"))
    return _read(files[-1]) if files else None


def _read(path: Path) -> Checkpoint:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if metadata.get("format") != FORMAT:
            raise InvalidInput(f"{path}: not a checkpoint of this version of fedclade.")
        return Checkpoint(
            round=int(metadata["round"]),
            state=under("state", tensors),
            memory=under("memory", tensors),
            history=json.loads(metadata["history"]),
            configuration=metadata["configuration"],
        )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path}: damaged checkpoint ({error}); delete it to go on from the one before.") from error


def write_tensors(path: Path, tensors: Tree, metadata: dict[str, str]) -> None:
    """A safetensors file that is there whole or not at all."""
    temporary = path.with_suffix(".partial")
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, temporary, metadata)
    os.replace(temporary, path)
