"""Arrays that come from outside, checked and made into tensors. Every message starts with where the
array came from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.errors import InvalidInputError

# A label far beyond any number of classes is an id or a regression target stored as integers;
# tables by class would not fit in memory.
MOST_CLASSES = 1_000_000

_NOT_NUMBERS = {
    "U": (
        "text: turn it into numbers first (np.unique(a, return_inverse=True) numbers labels, a"
        " tokeniser numbers words)"
    ),
    "S": (
        "text: turn it into numbers first (np.unique(a, return_inverse=True) numbers labels, a"
        " tokeniser numbers words)"
    ),
    "O": "Python objects (rows of unequal length?): store a rectangular array of numbers",
    "c": "complex numbers: store real and imaginary part as two features",
}


def inputs(array: object, what: str) -> Tensor:
    """Inputs, one row a sample: uint8 stays (0 … 255 images), other integers become int64, floats
    float32.

    Images come out channels first: uint8 (N, H, W) becomes (N, 1, H, W); (N, H, W, C) with C of 1
    or 3 becomes (N, C, H, W), unless the second axis could be the channels already.
    """
    x = _tensor(array, what)
    if x.ndim < 2:
        raise InvalidInputError(
            f"{what} has shape {tuple(x.shape)}: give one row a sample; a single feature has shape"
            " (samples, 1)."
        )
    if x.numel() == 0:
        raise InvalidInputError(
            f"{what} is empty (shape {tuple(x.shape)}): give at least one sample with at least one"
            " feature."
        )
    if x.dtype == torch.bool:
        x = x.float()
    _finite(x, what)
    if x.dtype == torch.uint8 and x.ndim == 3:
        return x.unsqueeze(1)
    if x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        return x.permute(0, 3, 1, 2).contiguous()
    return x


def targets(array: object, what: str) -> Tensor:
    """Integers (or booleans) are class labels and become int64; floats are regression targets and
    become float32.

    Labels may be sequences, (samples, positions): a word to follow each word, a label for each part
    of a reading.
    """
    y = _tensor(array, what)
    if y.ndim == 0 or y.numel() == 0:
        raise InvalidInputError(
            f"{what} is empty (shape {tuple(y.shape)}): give one target a sample."
        )
    if y.is_floating_point():
        _finite(y, what)
        return y
    if y.ndim > 2 or (y.ndim == 2 and _is_one_hot(y)):
        raise InvalidInputError(
            f"{what} has shape {tuple(y.shape)}: give one class number a sample (one-hot labels:"
            " use y.argmax(1)), or one for each position of a sequence."
        )
    y = y.to(torch.int64)
    each = y if y.ndim == 1 else y.flatten(1).amin(1)
    low = int(each.argmin())
    if each[low] < 0:
        raise InvalidInputError(
            f"{what} has negative labels, the smallest {int(each[low])} in sample {low}: number the"
            " classes from 0."
        )
    each = y if y.ndim == 1 else y.flatten(1).amax(1)
    high = int(each.argmax())
    if each[high] >= MOST_CLASSES:
        raise InvalidInputError(
            f"{what} has the label {int(each[high])} in sample {high}: number the classes 0, 1, 2 …"
            " (np.unique(y, return_inverse=True)), or store regression targets as floats."
        )
    return y


def _is_one_hot(y: Tensor) -> bool:
    """A single 1 in each row of zeros: labels in another form rather than sequences."""
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(1) == 1).all())


def samples(
    x: object, y: object, x_name: str, y_name: str, where: str = ""
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of equal length."""
    checked_x, checked_y = inputs(x, where + x_name), targets(y, where + y_name)
    if len(checked_x) != len(checked_y):
        raise InvalidInputError(
            f"{where}{x_name} has {len(checked_x)} samples and {y_name} has {len(checked_y)}: they"
            " must be equally many."
        )
    return checked_x, checked_y


def alike(x: Tensor, y: Tensor, other_x: Tensor, other_y: Tensor, what: str, other: str) -> None:
    """Two sets of samples that are to go through one model: same shape of a sample, same kind of
    input and target.
    """
    for kind, a, b in (("inputs", x, other_x), ("targets", y, other_y)):
        if (a.shape[1:], a.dtype) != (b.shape[1:], b.dtype):
            raise InvalidInputError(
                f"{what} has {kind} of {_one_sample(a)}, {other} of {_one_sample(b)}: they must be"
                " alike."
            )


class Pool:
    """Tensors for more samples like these, filled part by part: in addition only the part that
    is put in need be there.
    """

    def __init__(self, rows: int, x: Tensor, y: Tensor) -> None:
        self.x, self.y = (like.new_empty(rows, *like.shape[1:]) for like in (x, y))
        self.offsets = [0]  # where each part begins, and where the last ends

    def add(self, x: Tensor, y: Tensor, what: str, other: str) -> None:
        alike(x, y, self.x, self.y, what, other)
        start, end = self.offsets[-1], self.offsets[-1] + len(y)
        self.x[start:end], self.y[start:end] = x, y
        self.offsets.append(end)


def ids(
    train: object, test: object | None, train_samples: int, test_samples: int, what: str
) -> tuple[Tensor, Tensor | None, tuple[str, ...] | None]:
    """The id of each training and test sample as whole numbers; and for text, the text of each
    number. The same text has the same number in both parts.
    """
    arrays = [_ids(train, train_samples, f"{what}_train")]
    if test is not None:
        arrays.append(_ids(test, test_samples, f"{what}_test"))
    if len({a.dtype.kind in "US" for a in arrays}) > 1:
        raise InvalidInputError(
            f"{what}_train and {what}_test: one holds text, the other numbers; store both in the"
            " same way.",
            f"{what}_test",
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
            " text a sample."
        )
    if len(values) != expected:
        raise InvalidInputError(
            f"{what} has {len(values)} entries for {expected} samples: they must be equally many."
        )
    return values


def _tensor(array: object, what: str) -> Tensor:
    if isinstance(array, Tensor):
        tensor = array.detach().cpu()
        if tensor.is_complex():
            raise InvalidInputError(f"{what} holds {_NOT_NUMBERS['c']}.")
        if tensor.is_floating_point():
            return tensor.float()
        return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.to(torch.int64)
    try:
        values = np.asarray(array)
    except ValueError as error:
        raise InvalidInputError(
            f"{what} is not a rectangular array of numbers ({error})."
        ) from error
    kind = values.dtype.kind
    if kind not in "biuf":
        raise InvalidInputError(
            f"{what} holds"
            f" {_NOT_NUMBERS.get(kind, f'values of type {values.dtype}: store plain numbers')}."
        )
    if kind == "f":
        with np.errstate(
            over="ignore"
        ):  # what does not fit becomes infinite and is then reported with its place
            values = values.astype(np.float32, copy=False)
    elif kind in "iu" and values.dtype != np.uint8:
        values = values.astype(np.int64, copy=False)
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _finite(tensor: Tensor, what: str) -> None:
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return
    nan = tensor.isnan()
    kind, bad = (
        ("NaN", nan) if bool(nan.any()) else ("infinite (or too large for float32)", tensor.isinf())
    )
    count, first = int(bad.sum()), int(bad.nonzero()[0, 0])
    values = "value" if count == 1 else "values"
    raise InvalidInputError(
        f"{what} has {count} {kind} {values}, the first in sample {first}: replace them or drop"
        " these samples."
    )


def _one_sample(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape[1:])} and type {type_name(tensor)}"


def type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
