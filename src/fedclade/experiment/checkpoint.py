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
    values: dict[str, Any] = {}
    for field in fields(kind):
        values[field.name] = under(field.name, flat) if hints[field.name] == Tree else flat[field.name]
    return kind(**values)


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder/round-N.safetensors` and keep the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = prefixed("state", checkpoint.state) | prefixed("memory", checkpoint.memory)
    about = {
        "format": FORMAT,
        "round": checkpoint.round,
        "configuration": checkpoint.configuration,
        "history": checkpoint.history,
    }
    write_tensors(folder / f"round-{checkpoint.round:06d}.safetensors", tensors, about)
    for old in sorted(folder.glob("round-*.safetensors"))[:-_KEPT]:
        old.unlink()


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, or None."""
    files = sorted(folder.glob("round-*.safetensors"))
    return _read(files[-1]) if files else None


def _read(path: Path) -> Checkpoint:
    try:
        about, tensors = read_tensors(path)
        if about.get("format") != FORMAT:
            raise InvalidInput(f"{path}: not a checkpoint of this version of fedclade.")
        return Checkpoint(
            round=about["round"],
            state=under("state", tensors),
            memory=under("memory", tensors),
            history=about["history"],
            configuration=about["configuration"],
        )
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path}: damaged checkpoint ({error}); delete it to go on from the one before.") from error


def write_tensors(path: Path, tensors: Tree, about: dict[str, Any]) -> None:
    """A safetensors file that is there whole or not at all."""
    temporary = path.with_suffix(".partial")
    # One entry for everything: safetensors writes several in an order that changes from run to run.
    metadata = {"fedclade": json.dumps(about)}
    temporary.touch()  # with the permissions that files of this user have; safetensors would make it private
    mode = temporary.stat().st_mode
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, temporary, metadata)
    temporary.chmod(mode)
    os.replace(temporary, path)


def read_tensors(path: Path) -> tuple[dict[str, Any], Tree]:
    """All of a file that `write_tensors` wrote."""
    with safe_open(path, framework="pt") as file:
        return read_about(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def read_about(file: Any) -> dict[str, Any]:
    """What `write_tensors` wrote beside the tensors."""
    about: dict[str, Any] = json.loads((file.metadata() or {}).get("fedclade", "{}"))
    return about
