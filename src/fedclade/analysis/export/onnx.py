"""Models as ONNX, by torch's own exporter, and compared with torch where onnxruntime is there."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedclade.errors import InvalidInputError

TOLERANCE = 1e-5  # of the largest output
_SAMPLES = 5


def missing_packages() -> list[str]:
    """What torch's exporter needs and is not installed."""
    return [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]


class OnnxWriter:
    """Writes modules of one form: the graph is made once, each module's weights are put into it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._program: Any = None
        self._failure: str | None = None

    def write(self, module: nn.Module, path: Path) -> str:
        """Write it and say how it was checked. What cannot be written is refused with the
        exporter's reason.
        """
        if self._failure is not None:
            raise InvalidInputError(self._failure)
        try:
            with _quietly():
                if self._program is None:
                    self._program = _program(module, samples_for(module, self._shape, 2))
                self._program.apply_weights(module.state_dict())
                self._program.save(str(path))
        # the exporter raises what it likes; whatever it is, this form of model cannot be written
        except Exception as error:
            self._failure = (
                f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            )
            raise InvalidInputError(self._failure) from error
        return _check(module, samples_for(module, self._shape, _SAMPLES), path)


def samples_for(module: nn.Module, shape: tuple[int, ...], count: int) -> Tensor:
    """Inputs that the module takes: numbers from 0 to 1, or whole numbers where it looks them
    up.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = [
        layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)
    ]
    if vocabulary:
        return torch.randint(0, min(vocabulary), (count, *shape), generator=draw)
    return torch.rand((count, *shape), generator=draw)


def _program(module: nn.Module, x: Tensor) -> Any:
    return torch.onnx.export(
        module.eval(),
        (x,),
        dynamo=True,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("samples")},),
        # it may fold weights into constants, which the next model's could not replace; runtimes
        # optimise by themselves
        optimize=False,
        verbose=False,
    )


def _check(module: nn.Module, x: Tensor, path: Path) -> str:
    """Outputs beside torch's, of another number of samples than the graph was made with."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "not compared with torch: onnxruntime is not installed"
    runtime = importlib.import_module("onnxruntime")
    with torch.no_grad():
        ours = module(x).numpy()
    try:
        theirs = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
            None, {"x": x.numpy()}
        )[0]
        off = float(np.abs(ours - theirs).max())
        problem = (
            f"onnxruntime gives other outputs than torch, by up to {off:.1g}"
            if off > TOLERANCE * max(1, np.abs(ours).max())
            else None
        )
    except Exception as error:
        problem = f"onnxruntime cannot run it: {next(iter(str(error).strip().splitlines()), '')}"
    if problem is not None:
        path.unlink()
        raise InvalidInputError(problem)
    return f"outputs of onnxruntime and torch on {_SAMPLES} samples differ by at most {off:.1g}"


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter tells of libraries that it could also support."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
