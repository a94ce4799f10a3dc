"""Checkpoints: the method's state, the clients' state and the history in one safetensors file,
which is written atomically and verified when it is read.
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
from fedclade.errors import FedcladeWarning, InvalidInputError
from fedclade.io import safe_read, schemas
from fedclade.io.atomic import atomic_write, translate_os_errors
from fedclade.io.schemas import RoundRecord

FORMAT = "fedclade-checkpoint-2"
_KEPT = 2


@dataclass(frozen=True)
class BestRound:
    """The state after the round with the lowest loss on validation data."""

    round: int
    loss: float
    state: Tree
    memory: Tree


@dataclass(frozen=True)
class Checkpoint:
    """All that is needed to continue after `round`."""

    round: int
    state: Tree
    memory: Tree
    history: list[RoundRecord]
    configuration: str  # the run's fingerprint: a checkpoint of another experiment is refused
    best: BestRound | None = None  # for a run that serves the models of its best round


def flatten(state: State) -> Tree:
    """A state as one tree of tensors."""
    flat: Tree = {}
    for field in fields(state):
        value = getattr(state, field.name)
        flat |= add_prefix(field.name, value) if isinstance(value, dict) else {field.name: value}
    return flat


def restore(kind: type[State], flat: Tree) -> State:
    """The state of which `flatten` made `flat`."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in fields(kind):
        values[field.name] = (
            strip_prefix(field.name, flat) if hints[field.name] == Tree else flat[field.name]
        )
    return kind(**values)


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder/round-N.safetensors`, and remove all but the last two."""
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = add_prefix("state", checkpoint.state) | add_prefix("memory", checkpoint.memory)
    metadata = {
        "format": FORMAT,
        "round": checkpoint.round,
        "configuration": checkpoint.configuration,
        "history": checkpoint.history,
    }
    if (best := checkpoint.best) is not None:
        kept = add_prefix("best_state", best.state) | add_prefix("best_memory", best.memory)
        # In memory both states may share tensors; safetensors refuses such a file.
        tensors |= {name: value.clone() for name, value in kept.items()}
        metadata["best"] = {"round": best.round, "loss": best.loss}
    write_tensors(folder / f"round-{checkpoint.round:06d}.safetensors", tensors, metadata)
    for old in sorted(folder.glob("round-*.safetensors"))[:-_KEPT]:
        old.unlink()


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged; None if the folder has no checkpoints.

    A warning names each damaged one. If all are damaged, that is an error.
    """
    errors: list[InvalidInputError] = []
    for path in sorted(folder.glob("round-*.safetensors"), reverse=True):
        try:
            checkpoint = _read(path)
        except InvalidInputError as error:
            errors.append(error)
            continue
        for skipped in errors:
            message = f"{skipped} The run continues from round {checkpoint.round}."
            warnings.warn(FedcladeWarning(message, skipped.field), stacklevel=2)
        return checkpoint
    if errors:
        raise InvalidInputError(
            f"{errors[0]} There is no other checkpoint: restart the run in another folder.",
            errors[0].field,
        )
    return None


def _read(path: Path) -> Checkpoint:
    try:
        metadata, tensors = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise InvalidInputError(
                f"{path}: not a checkpoint of this version of fedclade ({FORMAT}).", str(path)
            )
        number, history = metadata["round"], schemas.history(metadata["history"])
        last = history[-1]["round"] if history else 0
        if last != number:
            raise ValueError(f"the checkpoint is of round {number}, its history ends with {last}")
        return Checkpoint(
            number,
            strip_prefix("state", tensors),
            strip_prefix("memory", tensors),
            history,
            metadata["configuration"],
            _best(metadata["best"], tensors) if "best" in metadata else None,
        )
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path}: damaged checkpoint ({error}).", str(path)) from error


def _best(metadata: dict[str, Any], tensors: Tree) -> BestRound:
    return BestRound(
        metadata["round"],
        metadata["loss"],
        strip_prefix("best_state", tensors),
        strip_prefix("best_memory", tensors),
    )


def write_tensors(path: Path, tensors: Tree, metadata: dict[str, Any]) -> None:
    """Write a safetensors file atomically, with a checksum.

    Args:
        path: the file to write.
        tensors: the tensors by name.
        metadata: anything that JSON can hold.
    """
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    text = json.dumps(metadata)
    # Only one entry: safetensors writes several in an order that changes from run to run.
    entry = json.dumps({"about": text, "digest": _digest(text, on_cpu)})
    size = len(entry) + sum(value.nbytes for value in on_cpu.values())
    with atomic_write(path, size) as temporary:
        # The user's default permissions: safetensors would make the file private.
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
    """The metadata and the tensors of a file that `write_tensors` wrote; a `ValueError` if its
    checksum is wrong.
    """
    safe_read.fit(path, safe_read.size(path))
    with safe_open(path, framework="pt") as file:
        entry, tensors = _entry(file), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if entry["digest"] != _digest(entry["about"], tensors):
        raise ValueError("checksum mismatch")
    return _metadata(entry), tensors


def read_metadata(file: Any) -> dict[str, Any]:
    """The metadata that `write_tensors` wrote. `file` is an open safetensors file."""
    return _metadata(_entry(file))


def _metadata(entry: dict[str, str]) -> dict[str, Any]:
    metadata = safe_read.parse_json(entry["about"])
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not a table")
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
