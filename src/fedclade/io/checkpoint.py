"""Checkpoints: state, client memory and history in one safetensors file, written whole or not at
all, and checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedclade.core.method_state import State
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read, schemas
from fedclade.io.atomic import atomic_write, translate_os_errors
from fedclade.io.schemas import RoundRecord

FORMAT = "fedclade-checkpoint-2"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """All that is needed to continue after `round`."""

    round: int
    state: Tree
    memory: Tree
    history: list[RoundRecord]
    # hash of the configuration and the data: another experiment's checkpoint is recognised
    configuration: str


def flatten(state: State) -> Tree:
    """A state as one tree of tensors."""
    flat: Tree = {}
    for field in fields(state):
        value = getattr(state, field.name)
        flat |= add_prefix(field.name, value) if isinstance(value, dict) else {field.name: value}
    return flat


def restore(kind: type[State], flat: Tree) -> State:
    """The state that `flatten` took apart."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):
        values[field.name] = (
            strip_prefix(field.name, flat) if hints[field.name] == Tree else flat[field.name]
        )
    return kind(**values)


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder/round-N.safetensors` and keep the last two."""
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = add_prefix("state", checkpoint.state) | add_prefix("memory", checkpoint.memory)
    metadata = {
        "format": FORMAT,
        "round": checkpoint.round,
        "configuration": checkpoint.configuration,
        "history": checkpoint.history,
    }
    write_tensors(folder / f"round-{checkpoint.round:06d}.safetensors", tensors, metadata)
    for old in sorted(folder.glob("round-*.safetensors"))[:-_KEPT]:
        old.unlink()


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run that is not damaged, or None where there is none at all. A
    warning names each damaged one.
    """
    damaged: list[InvalidInputError] = []
    for path in sorted(folder.glob("round-*.safetensors"), reverse=True):
        try:
            found = _read(path)
        except InvalidInputError as error:
            damaged.append(error)
            continue
        for problem in damaged:
            warnings.warn(f"{problem} The run goes on from round {found.round}.", stacklevel=2)
        return found
    if damaged:
        raise InvalidInputError(
            f"{damaged[0]} There is no other checkpoint: restart the run in another folder."
        )
    return None


def _read(path: Path) -> Checkpoint:
    try:
        metadata, tensors = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise InvalidInputError(
                f"{path}: not a checkpoint of this version of fedclade ({FORMAT})."
            )
        number, history = metadata["round"], schemas.history(metadata["history"])
        if (history[-1]["round"] if history else 0) != number:
            raise ValueError("its history does not end with its round")
        return Checkpoint(
            number,
            strip_prefix("state", tensors),
            strip_prefix("memory", tensors),
            history,
            metadata["configuration"],
        )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path}: damaged checkpoint ({error}).") from error


def write_tensors(path: Path, tensors: Tree, metadata: dict[str, Any]) -> None:
    """A safetensors file that is there whole or not at all, even after a power cut."""
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(metadata)
    # One entry for everything: safetensors writes several in an order that changes from run to run.
    entry = json.dumps({"about": text, "digest": _digest(text, on_cpu)})
    size = len(entry) + sum(value.nbytes for value in on_cpu.values())
    with atomic_write(path, size) as temporary:
        # with the permissions that files of this user have; safetensors would make it private
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(on_cpu, temporary, {"fedclade": entry})
        temporary.chmod(mode)


def _digest(metadata: str, tensors: Tree) -> str:
    digest = hashlib.blake2b(metadata.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_tensors(path: Path) -> tuple[dict[str, Any], Tree]:
    """All of a file that `write_tensors` wrote, if it is as it was written."""
    safe_read.fit(path, safe_read.size(path))
    with safe_open(path, framework="pt") as file:
        entry, tensors = _entry(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if entry["digest"] != _digest(entry["about"], tensors):
        raise ValueError("checksum mismatch")
    return _metadata(entry), tensors


def read_metadata(file: Any) -> dict[str, Any]:
    """The metadata that `write_tensors` wrote."""
    return _metadata(_entry(file))


def _metadata(entry: dict[str, str]) -> dict[str, Any]:
    metadata = safe_read.parse_json(entry["about"])
    if not isinstance(metadata, dict):
        raise ValueError("its metadata are not a table")
    return metadata


def _entry(file: Any) -> dict[str, str]:
    entry = safe_read.parse_json((file.metadata() or {}).get("fedclade", "{}"))
    if (
        not isinstance(entry, dict)
        or entry.keys() != {"about", "digest"}
        or not all(isinstance(value, str) for value in entry.values())
    ):
        raise ValueError("not written by this version of fedclade")
    return entry
