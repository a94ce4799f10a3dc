"""Export to ONNX with torch's exporter, compared with torch if onnxruntime is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
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

TOLERANCE = 1e-5  # relative to the largest output
_SAMPLES = 5


def missing_packages() -> list[str]:
    """The packages that torch's exporter needs and that are not installed."""
    return [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]


class OnnxWriter:
    """Writes modules of one architecture: builds the graph once, then replaces the weights."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._program: Any = None
        self._failure: str | None = None

    def write(self, module: nn.Module, path: Path) -> str:
        """Write the module and return how it was checked. Raises `InvalidInputError` with the
        exporter's reason if it cannot be written.
        """
        if self._failure is not None:
            raise InvalidInputError(self._failure, "model")
        try:
            with _quietly():
                if self._program is None:
                    self._program = _program(module, samples_for(module, self._shape, 2))
                self._program.apply_weights(module.state_dict())
                self._program.save(str(path))
        # The exporter raises many classes of errors; each means that it cannot write this model.
        except Exception as error:
            self._failure = (
                f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            )
            raise InvalidInputError(self._failure, "model") from error
        return _check(module, samples_for(module, self._shape, _SAMPLES), path)


def samples_for(module: nn.Module, shape: tuple[int, ...], count: int) -> Tensor:
    """Inputs for the module: numbers from 0 to 1, or whole numbers for an embedding."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = [
        layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)
    ]
    if vocabulary:
        return torch.randint(0, min(vocabulary), (count, *shape), generator=generator)
    return torch.rand((count, *shape), generator=generator)


def _program(module: nn.Module, x: Tensor) -> Any:
    rows: Any = {0: torch.export.Dim("samples")}
    first = next(iter(inspect.signature(module.forward).parameters.values()))
    if first.kind is inspect.Parameter.VAR_POSITIONAL:  # all inputs are one argument, a tuple
        rows = (rows,)
    return torch.onnx.export(
        module.eval(),
        (x,),
        dynamo=True,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=(rows,),
        # The optimizer may fold weights into constants, which the next model's weights could not
        # replace. Runtimes optimize automatically.
        optimize=False,
        verbose=False,
    )


def _check(module: nn.Module, x: Tensor, path: Path) -> str:
    """Compare the outputs with torch's, on another number of samples than the graph was built
    with.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return "not compared with torch: onnxruntime is not installed"
    runtime = importlib.import_module("onnxruntime")
    with torch.no_grad():
        expected = module(x).numpy()
    try:
        outputs = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(
            None, {"x": x.numpy()}
        )[0]
        error_size = float(np.abs(expected - outputs).max())
        problem = (
            f"outputs of onnxruntime and torch differ by up to {error_size:.1g}"
            if error_size > TOLERANCE * max(1, np.abs(expected).max())
            else None
        )
    except Exception as error:
        problem = f"onnxruntime cannot run it: {next(iter(str(error).strip().splitlines()), '')}"
    if problem is not None:
        path.unlink()
        raise InvalidInputError(problem, "model")
    return (
        f"outputs of onnxruntime and torch on {_SAMPLES} samples differ by at most {error_size:.1g}"
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the exporter's messages about optional libraries."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
