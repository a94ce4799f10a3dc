"""Means of models: the dense formula, rows without weight, absent clients, and properties of every
mixing matrix.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from fedclade.aggregation.mean import add_weighted_models, mix_models, unique_rows, weighted_mean
from fedclade.errors import InvalidInputError

numbers = st.floats(-1e3, 1e3, width=32)
weights = st.floats(0, 100, width=32).map(lambda weight: 0.0 if weight < 1e-3 else weight)
many = settings(max_examples=50, deadline=None)


@st.composite
def models(draw: st.DrawFn, count: int | None = None) -> dict[str, Tensor]:
    """A matrix and a vector for each of some models."""
    m = count if count is not None else draw(st.integers(1, 5))
    return {
        "a": torch.from_numpy(draw(hnp.arrays("float32", (m, 2, 3), elements=numbers))),
        "b": torch.from_numpy(draw(hnp.arrays("float32", (m, 4), elements=numbers))),
    }


@st.composite
def matrices(draw: st.DrawFn, columns: int) -> Tensor:
    """Rows of weights, at least one of which is positive."""
    rows = draw(st.integers(1, 5))
    matrix = torch.from_numpy(draw(hnp.arrays("float32", (rows, columns), elements=weights)))
    matrix[
        torch.arange(rows),
        torch.tensor(draw(st.lists(st.integers(0, columns - 1), min_size=rows, max_size=rows))),
    ] += 1
    return matrix


@st.composite
def mixings(draw: st.DrawFn) -> tuple[Tensor, dict[str, Tensor]]:
    given_models = draw(models())
    return draw(matrices(len(given_models["a"]))), given_models


# mean


def test_mean_divides_each_row_by_its_weight_in_the_dtype_of_the_fallback() -> None:
    sums = {"w": torch.tensor([[2.0, 4.0], [9.0, 3.0]], dtype=torch.float64)}
    mean = weighted_mean(
        sums, torch.tensor([2.0, 3.0], dtype=torch.float64), fallback={"w": torch.zeros(2, 2)}
    )
    assert mean["w"].tolist() == [[1.0, 2.0], [3.0, 1.0]]
    assert mean["w"].dtype == torch.float32


def test_a_row_without_weight_takes_the_fallback() -> None:
    fallback = {"w": torch.tensor([[1.0, 2.0], [3.1, 4.1]]), "b": torch.tensor([5.1, 6.1])}
    sums = {
        "w": torch.tensor([[8.0, 8.0], [0.0, 0.0]], dtype=torch.float64),
        "b": torch.tensor([4.0, 0.0], dtype=torch.float64),
    }
    mean = weighted_mean(sums, torch.tensor([4.0, 0.0], dtype=torch.float64), fallback)
    assert torch.equal(mean["w"], torch.tensor([[2.0, 2.0], [3.1, 4.1]]))
    assert torch.equal(mean["b"], torch.tensor([1.0, 6.1]))


def test_without_replies_the_fallback_is_returned() -> None:
    fallback = {"w": torch.tensor([[1.5]])}
    assert torch.equal(weighted_mean({}, torch.zeros(1), fallback)["w"], fallback["w"])


def test_mean_changes_neither_the_sums_nor_the_fallback() -> None:
    sums, fallback = (
        {"w": torch.tensor([[8.0], [0.0]], dtype=torch.float64)},
        {"w": torch.tensor([[1.0], [2.0]])},
    )
    weighted_mean(sums, torch.tensor([4.0, 0.0]), fallback)
    assert sums["w"].tolist() == [[8.0], [0.0]]
    assert fallback["w"].tolist() == [[1.0], [2.0]]


# mix


def test_mix_by_hand() -> None:
    matrix = torch.tensor([[1.0, 1.0], [3.0, 1.0], [0.0, 2.0]])
    mixed = mix_models(matrix, {"w": torch.tensor([[0.0, 4.0], [8.0, 12.0]])})
    assert mixed["w"].tolist() == [[4.0, 8.0], [2.0, 6.0], [8.0, 12.0]]


@given(mixings())
@many
def test_mix_is_the_dense_formula(given_mixing: tuple[Tensor, dict[str, Tensor]]) -> None:
    matrix, given_models = given_mixing
    share = matrix.double() / matrix.double().sum(1, keepdim=True)
    for name, value in mix_models(matrix, given_models).items():
        expected = torch.einsum("ij,j...->i...", share, given_models[name].double()).float()
        assert value.dtype == given_models[name].dtype
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


@given(mixings())
@many
def test_a_mixed_model_lies_within_those_it_is_mixed_from(
    given_mixing: tuple[Tensor, dict[str, Tensor]],
) -> None:
    matrix, given_models = given_mixing
    mixed = mix_models(matrix, given_models)
    for row, weight in enumerate(matrix):
        for name, value in given_models.items():
            parts = value[weight > 0]
            assert bool((mixed[name][row] >= parts.amin(0)).all())
            assert bool((mixed[name][row] <= parts.amax(0)).all())


@given(models())
@many
def test_mixing_with_the_identity_is_the_identity(given_models: dict[str, Tensor]) -> None:
    for name, value in mix_models(torch.eye(len(given_models["a"])), given_models).items():
        assert torch.equal(value, given_models[name])


@given(models(), st.floats(1e-3, 1e3))
@many
def test_equal_weights_give_the_mean(given_models: dict[str, Tensor], weight: float) -> None:
    count = len(given_models["a"])
    for name, value in mix_models(torch.full((2, count), weight), given_models).items():
        expected = given_models[name].double().mean(0).float()
        torch.testing.assert_close(value, expected.expand_as(value), rtol=1e-6, atol=1e-6)


@given(mixings(), st.sampled_from([0.125, 0.5, 2.0, 64.0]))
@many
def test_only_the_proportions_of_a_row_count(
    given_mixing: tuple[Tensor, dict[str, Tensor]], factor: float
) -> None:
    matrix, given_models = given_mixing
    for name, value in mix_models(matrix * factor, given_models).items():
        assert torch.equal(value, mix_models(matrix, given_models)[name])


@given(models(count=3), matrices(3))
@many
def test_mixing_equal_models_changes_nothing(
    given_models: dict[str, Tensor], matrix: Tensor
) -> None:
    same = {name: value[:1].expand_as(value).contiguous() for name, value in given_models.items()}
    for name, value in mix_models(matrix, same).items():
        assert torch.equal(value, same[name][:1].expand_as(value))


def test_a_parameter_of_one_number_is_mixed_too() -> None:
    """torch models may have scalar parameters (a temperature)."""
    assert mix_models(torch.tensor([[1.0, 3.0]]), {"t": torch.tensor([0.0, 4.0])})[
        "t"
    ].tolist() == [3.0]


@pytest.mark.parametrize("second", [[0.0, 0.0], [-3.0, 1.0], [3.0, -1.0]])
def test_a_row_without_weight_or_with_a_negative_weight_is_refused_by_number(
    second: list[float],
) -> None:
    with pytest.raises(InvalidInputError, match="row 1") as caught:
        mix_models(torch.tensor([[1.0, 1.0], second]), {"w": torch.ones(2, 1)})
    assert caught.value.field == "matrix"


# distinct rows


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 4))
@many
def test_distinct_rows_and_index_give_the_matrix_back(groups: list[int], columns: int) -> None:
    kinds = torch.rand(4, columns, generator=torch.Generator().manual_seed(0))
    matrix = kinds[torch.tensor(groups)]
    rows, index = unique_rows(matrix)
    assert torch.equal(rows[index], matrix)
    assert len(rows) == len(set(groups))
    assert index.shape == (len(groups),)


def test_mixing_the_distinct_rows_is_mixing_them_all() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.rand(3, 6, generator=generator)[torch.tensor([0, 1, 0, 2, 1, 0])]
    given_models = {"w": torch.randn(6, 5, generator=generator)}
    rows, index = unique_rows(matrix)
    torch.testing.assert_close(
        mix_models(rows, given_models)["w"][index], mix_models(matrix, given_models)["w"]
    )


# FLT, case I: an absent client contributes its old model


def test_an_absent_client_contributes_its_old_model() -> None:
    """Three clients, mixing rows (2, 1, 1), (1, 1, 0) and (0, 1, 3); client 2 is absent.

    Trained: client 0 -> 4, client 1 -> 8; the old model of client 2 is 12.
    Row 0: (2·4 + 8 + 12) / 4 = 7; row 1: (4 + 8) / 2 = 6; row 2: (8 + 3·12) / 4 = 11.
    """
    matrix = torch.tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    old = {"w": torch.tensor([[1.0], [2.0], [12.0]])}
    answered, absent = torch.tensor([0, 1]), torch.tensor([2])
    trained = {"w": torch.tensor([[4.0], [8.0]])}
    # The result of an engine for reduce=SegmentSum(weights=matrix[:, cohort].T, num_segments=3).
    sums = {"w": matrix[:, answered] @ trained["w"].double()}
    weight = matrix[:, answered].sum(1)
    assert sums["w"].flatten().tolist() == [16.0, 12.0, 8.0]
    sums, weight = add_weighted_models(sums, weight, matrix[:, absent], {"w": old["w"][absent]})
    assert weight.tolist() == [4.0, 2.0, 4.0]
    assert weighted_mean(sums, weight, fallback=old)["w"].flatten().tolist() == [7.0, 6.0, 11.0]


@given(mixings(), st.data())
@many
def test_sums_of_present_clients_and_old_models_of_absent_ones_are_the_mix_of_all(
    given_mixing: tuple[Tensor, dict[str, Tensor]], data: st.DataObject
) -> None:
    matrix, given_models = given_mixing
    present = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=matrix.shape[1], max_size=matrix.shape[1]))
    )
    nothing = {
        name: value.new_zeros((len(matrix), *value.shape[1:]))
        for name, value in given_models.items()
    }
    sums, weight = add_weighted_models(
        {},
        torch.zeros(len(matrix), dtype=torch.float64),
        matrix[:, present],
        {n: v[present] for n, v in given_models.items()},
    )
    sums, weight = add_weighted_models(
        sums, weight, matrix[:, ~present], {n: v[~present] for n, v in given_models.items()}
    )
    for name, value in weighted_mean(sums, weight, fallback=nothing).items():
        torch.testing.assert_close(
            value, mix_models(matrix, given_models)[name], rtol=1e-6, atol=1e-5
        )


def test_add_does_not_change_its_arguments() -> None:
    sums, weight = {"w": torch.ones(1, 1, dtype=torch.float64)}, torch.ones(1, dtype=torch.float64)
    add_weighted_models(sums, weight, torch.tensor([[2.0]]), {"w": torch.tensor([[3.0]])})
    assert sums["w"].tolist() == [[1.0]]
    assert weight.tolist() == [1.0]
