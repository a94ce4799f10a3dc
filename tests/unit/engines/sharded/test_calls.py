"""Calls and answers are the same after they were bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclade.engines.sharded.calls import Answer, Call, decode, encode
from fedclade.errors import InvalidInputError

TENSORS = {
    "matrix": torch.arange(6.0).reshape(3, 2),
    "transposed": torch.arange(12).reshape(3, 4).T,
    "every second": torch.arange(8.0)[::2],
    "expanded": torch.ones(1).expand(5),
    "one number of a column": torch.zeros(6, 1, 6)[:, 0][:1, :1],
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 4, dtype=torch.int64),
    "bfloat16": torch.tensor([1.5, -2.0]).bfloat16(),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_survives_and_can_be_written_to(name: str, read_only: bool) -> None:
    before = TENSORS[name]
    arrays = encode(Call("map", {"x": before}))
    for array in arrays:
        array.flags.writeable = array.flags.writeable and not read_only
    after: Tensor = decode(arrays).arguments["x"]
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    assert torch.equal(after, before)
    after.zero_()


def test_the_numbers_of_tensors_are_not_copied_into_the_pickle() -> None:
    first, *others = encode({"x": torch.zeros(10_000)})
    assert len(first) < 1000
    assert [len(array) for array in others] == [40_000]


def test_an_error_survives() -> None:
    error = InvalidInputError("engine.chunk = 0: must be at least 1.", "engine.chunk")
    after = decode([np.array(array) for array in encode(Answer(error=error))]).error
    assert (type(after), str(after), after.field) == (type(error), str(error), error.field)
