"""Checks of the user's arrays, which become tensors. Every message starts with the array's name,
which is also the error's field: `what` in this file.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.inputs import Inputs, describe_inputs, map_inputs, samples_in, tensors_of
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read

# A larger label is an id, or a regression target stored as an integer. Tables by class would not
# fit in memory.
MOST_CLASSES = 1_000_000
_BLOCK_BYTES = 1 << 26  # of values that are checked at once

_TEXT = (
    "text: convert it to numbers first (labels: np.unique(a, return_inverse=True), words: a"
    " tokenizer)"
)
_NOT_NUMBERS = {
    "U": _TEXT,
    "S": _TEXT,
    "O": "Python objects (rows of unequal length?): store a rectangular array of numbers",
    "c": "complex numbers: store real and imaginary part as two features",
}
_READ_AS_THEY_ARE = (np.uint8, np.float32, np.int64, np.bool_)


def inputs(arrays: object, what: str) -> Inputs:
    """Check inputs: an array with one row per sample, or a tuple or dictionary of such arrays."""
    if isinstance(arrays, Mapping):
        names = [str(name) for name in arrays]
        if not all(name.isidentifier() for name in names) or not names:
            raise InvalidInputError(
                f"{what} has the names {', '.join(names) or 'none'}: give the names of the model's"
                " arguments.",
                what,
            )
        x: Inputs = {
            str(name): _one_input(array, f"{what}[{name!r}]") for name, array in arrays.items()
        }
    elif isinstance(arrays, tuple) and arrays and all(map(_is_array, arrays)):
        x = tuple(_one_input(array, f"{what}[{place}]") for place, array in enumerate(arrays))
    else:
        return _inputs(arrays, what)
    if len({len(value) for value in tensors_of(x)}) > 1:
        lengths = ", ".join(str(len(value)) for value in tensors_of(x))
        raise InvalidInputError(
            f"{what} has tensors of {lengths} samples: the numbers must be equal.", what
        )
    return x


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _one_input(array: object, what: str) -> Tensor:
    """One of the arrays of an input. A mask stays a mask, and a sample may be a single number."""
    x = _tensor(array, what)
    if x.ndim == 1 and len(x):
        _finite(x, what)
        return x
    return (
        x
        if x.dtype == torch.bool and x.ndim > 1 and x.numel()
        else _inputs(array if is_mapped(array) else x, what)
    )


def _inputs(array: object, what: str) -> Tensor:
    """uint8 stays (images of 0 … 255), other integers become int64, floats float32.

    Images become channels first: uint8 (N, H, W) becomes (N, 1, H, W); (N, H, W, C) with C of 1 or
    3 becomes (N, C, H, W), unless the second axis can be the channels.

    The values of a memory-mapped array are neither read nor copied: it may be larger than memory.
    """
    x = _tensor(array, what)
    mapped = is_mapped(array)
    if x.ndim < 2:
        raise InvalidInputError(
            f"{what} has shape {tuple(x.shape)}: give one row per sample; a single feature has"
            " shape (samples, 1).",
            what,
        )
    if x.numel() == 0:
        raise InvalidInputError(
            f"{what} is empty (shape {tuple(x.shape)}): give at least one sample with at least one"
            " feature.",
            what,
        )
    if x.dtype == torch.bool:
        x = x.float()
    if not mapped:
        _finite(x, what)
    if x.dtype == torch.uint8 and x.ndim == 3:
        return x.unsqueeze(1)
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.permute(0, 3, 1, 2)
        return x if mapped else x.contiguous()
    return x


def is_mapped(array: object) -> bool:
    """Whether the values of an array of numpy are in a memory-mapped file."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)


def targets(array: object, what: str) -> Tensor:
    """Check targets. Integers and booleans are class labels and become int64; floats are regression
    targets and become float32.

    Labels may be sequences of shape (samples, positions), such as the next word of each word.
    """
    y = _tensor(array, what)
    if y.ndim == 0 or y.numel() == 0:
        raise InvalidInputError(
            f"{what} is empty (shape {tuple(y.shape)}): give one target per sample.", what
        )
    if y.is_floating_point():
        _finite(y, what)
        return y
    if y.ndim > 2 or (y.ndim == 2 and _is_one_hot(y)):
        raise InvalidInputError(
            f"{what} has shape {tuple(y.shape)}: give one class number per sample (one-hot labels:"
            " use y.argmax(1)), one for each position of a sequence, or floats for several labels.",
            what,
        )
    y = y.to(torch.int64)
    lowest = y if y.ndim == 1 else y.flatten(1).amin(1)
    low = int(lowest.argmin())
    if lowest[low] < 0:
        raise InvalidInputError(
            f"{what} has negative labels, the smallest is {int(lowest[low])} in sample {low}:"
            " number the classes from 0.",
            what,
        )
    highest = y if y.ndim == 1 else y.flatten(1).amax(1)
    high = int(highest.argmax())
    if highest[high] >= MOST_CLASSES:
        raise InvalidInputError(
            f"{what} has the label {int(highest[high])} in sample {high}: number the classes"
            " 0, 1, 2 … (np.unique(y, return_inverse=True)), or store regression targets as"
            " floats.",
            what,
        )
    return y


def _is_one_hot(y: Tensor) -> bool:
    """Whether each row has a single 1 and zeros: one-hot labels, not sequences."""
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def samples(
    x: object, y: object, x_name: str, y_name: str, where: str = ""
) -> tuple[Inputs, Tensor]:
    """Check inputs and targets, which must have the same length.

    Args:
        x: the inputs.
        y: the targets.
        x_name: the name of the inputs in messages.
        y_name: the name of the targets in messages.
        where: what messages start with, such as "client 3: ".
    """
    checked_x, checked_y = inputs(x, where + x_name), targets(y, where + y_name)
    inputs_count, targets_count = samples_in(checked_x), len(checked_y)
    if inputs_count != targets_count:
        raise InvalidInputError(
            f"{where}{x_name} has {inputs_count} samples and {y_name} has {targets_count}: the"
            " numbers must be equal.",
            where + x_name,
        )
    return checked_x, checked_y


def require_same_kind(
    x: Inputs, y: Tensor, other_x: Inputs, other_y: Tensor, what: str, other: str
) -> None:
    """Check that one model can read both sets of samples: same shape and type of inputs and
    targets. `what` and `other` are their names in messages.
    """
    for kind, a, b in (("inputs", x, other_x), ("targets", y, other_y)):
        if _one_sample(a) != _one_sample(b):
            raise InvalidInputError(
                f"{what} has {kind} of {_one_sample(a)}, {other} of {_one_sample(b)}: shape and"
                " type must be equal.",
                what,
            )


class Pool:
    """Tensors for all samples, filled part by part, so that memory need not hold the samples twice.

    Args:
        rows: the number of samples.
        x: inputs of the same kind.
        y: targets of the same kind.
    """

    def __init__(self, rows: int, x: Inputs, y: Tensor) -> None:
        def empty(like: Tensor) -> Tensor:
            return like.new_empty(rows, *like.shape[1:])

        self.x, self.y = map_inputs(empty, x), empty(y)
        self.offsets = [0]  # the start of each part, and the end of the last

    def add(self, x: Inputs, y: Tensor, what: str, other: str) -> None:
        """Append a part. `what` is its name in messages, `other` that of the first part."""
        require_same_kind(x, y, self.x, self.y, what, other)
        start, end = self.offsets[-1], self.offsets[-1] + len(y)
        pairs = zip(tensors_of(self.x), tensors_of(x), strict=True)
        for into, values in (*pairs, (self.y, y)):
            into[start:end] = values
        self.offsets.append(end)


def ids(
    train: object, test: object | None, train_samples: int, test_samples: int, what: str
) -> tuple[Tensor, Tensor | None, tuple[str, ...] | None]:
    """Check the ids of samples, such as their writers, which become whole numbers; text ids are
    returned too, the text of each number. The same text gets the same number in the training and
    the test part.

    Args:
        train: one id per training sample.
        test: one id per test sample; None if these have no ids.
        train_samples: the number of training samples.
        test_samples: the number of test samples.
        what: the name of the key in messages.
    """
    arrays = [_ids(train, train_samples, f"{what}_train")]
    if test is not None:
        arrays.append(_ids(test, test_samples, f"{what}_test"))
    if len({a.dtype.kind in "US" for a in arrays}) > 1:
        raise InvalidInputError(
            f"{what}_train and {what}_test: one holds text, the other numbers. Store both in the"
            " same way.",
            what,
        )
    numbers, names = np.concatenate(arrays), None
    if numbers.dtype.kind in "US":
        texts, numbers = np.unique(numbers, return_inverse=True)
        names = tuple(as_texts(texts))
    tensor = torch.from_numpy(numbers.astype(np.int64))
    return tensor[:train_samples], None if test is None else tensor[train_samples:], names


def as_texts(array: NDArray[np.generic]) -> list[str]:
    """An array of text or of bytes as Python's text."""
    return [
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
        for value in array.tolist()
    ]


def _ids(array: object, expected: int, what: str) -> NDArray[np.generic]:
    values = np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
    if values.ndim != 1 or values.dtype.kind not in "iuUS":
        raise InvalidInputError(
            f"{what} has type {values.dtype} and shape {values.shape}: give one whole number or"
            " text per sample.",
            what,
        )
    if len(values) != expected:
        raise InvalidInputError(
            f"{what} has {len(values)} entries for {expected} samples: the numbers must be equal.",
            what,
        )
    return values


def _tensor(array: object, what: str) -> Tensor:
    if isinstance(array, Tensor):
        tensor = array.detach().cpu()
        if tensor.is_complex():
            raise InvalidInputError(f"{what} holds {_NOT_NUMBERS['c']}.", what)
        if tensor.is_floating_point():
            return tensor.float()
        return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.to(torch.int64)
    try:
        values = np.asarray(array)
    except ValueError as error:
        raise InvalidInputError(
            f"{what} is not a rectangular array of numbers ({error}).", what
        ) from error
    kind = values.dtype.kind
    if kind not in "biuf":
        raise InvalidInputError(
            f"{what} holds"
            f" {_NOT_NUMBERS.get(kind, f'values of type {values.dtype}: store plain numbers')}.",
            what,
        )
    if is_mapped(values) and values.dtype not in _READ_AS_THEY_ARE:
        safe_read.fit(what, 4 * values.size, f"in memory, since its type is {values.dtype}")
    if kind == "f":
        # Too large values become infinite; `_finite` then reports their position.
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
    elif kind in "iu" and values.dtype != np.uint8:
        values = values.astype(np.int64, copy=False)
    if is_mapped(values) and min(values.strides, default=0) >= 0:
        with warnings.catch_warnings():
            # torch warns if the file is mapped read-only. Nothing writes to the clients' samples.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            return torch.from_numpy(np.asarray(values))
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _finite(tensor: Tensor, what: str) -> None:
    if not tensor.is_floating_point():
        return
    rows = max(1, _BLOCK_BYTES * len(tensor) // max(1, tensor.nbytes))
    blocks = (tensor[first : first + rows] for first in range(0, len(tensor), rows))
    if all(bool(block.isfinite().all()) for block in blocks):
        return
    nan = tensor.isnan()
    kind, bad = (
        ("NaN", nan) if bool(nan.any()) else ("infinite (or too large for float32)", tensor.isinf())
    )
    count, first = int(bad.sum()), int(bad.nonzero()[0, 0])
    values = "value" if count == 1 else "values"
    raise InvalidInputError(
        f"{what} has {count} {kind} {values}, the first in sample {first}: replace them or drop"
        " these samples.",
        what,
    )


def _one_sample(x: Inputs) -> str:
    types = ", ".join(map(type_name, tensors_of(x)))
    return f"shape {describe_inputs(x)} and type {types}"


def type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
