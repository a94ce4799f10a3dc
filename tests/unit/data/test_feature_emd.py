"""Earth mover's distance of clients: small cases by hand, properties and errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from fedclade.data import (
    Clients,
    Dirichlet,
    Iid,
    LabelClusters,
    LabelPermutation,
    Scheme,
    dataset,
    earth_movers_distance,
    from_arrays,
    load,
    partition,
)
from fedclade.data.feature_emd import transport_cost
from fedclade.errors import InvalidInputError

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=8)


def column(values: list[float]) -> np.ndarray:
    return np.array(values, np.float64)[:, None]


def at(*places: list[float]) -> Clients:
    """Clients whose inputs are these numbers."""
    return from_arrays([(column(own), np.zeros(len(own), np.int64)) for own in places])


def digits_as(scheme: Scheme) -> Clients:
    return partition(load("digits"), scheme, 10)


def test_cost_by_hand() -> None:
    assert transport_cost(column([0, 2]), column([5, 1])) == pytest.approx(2)  # 0 to 1 and 2 to 5
    assert transport_cost(column([0]), column([0, 4])) == pytest.approx(2)  # half of it moves 4
    assert transport_cost(np.array([[0.0, 0.0]]), np.array([[3.0, 4.0]])) == pytest.approx(5)


@given(numbers, numbers)
@settings(max_examples=100, deadline=None)
def test_cost_on_a_line_is_known(a: list[float], b: list[float]) -> None:
    cost = transport_cost(column(a), column(b))
    assert cost == pytest.approx(wasserstein_distance(a, b), abs=1e-6)
    assert cost == pytest.approx(transport_cost(column(b), column(a)), abs=1e-6)


def test_two_clients_at_two_points_by_hand() -> None:
    """Half of each client has to be moved by 3. Of the 90 pairs of different samples 50 are 3
    apart, so that 1.5 is 90 percent of 5/3.
    """
    measured = earth_movers_distance(at([0] * 5, [3] * 5))
    assert measured.percent + measured.floor == pytest.approx(90)
    assert measured.floor >= 0


def test_a_client_counts_by_its_samples() -> None:
    measured = earth_movers_distance(at([0] * 2, [3] * 6))
    assert measured.percent == pytest.approx(
        (2 * measured.clients[0] + 6 * measured.clients[1]) / 8
    )
    assert measured.clients.shape == (2,)
    assert (
        measured.clients[0] > measured.clients[1]
    )  # six of the eight samples are the second client's


def test_nothing_has_to_be_moved() -> None:
    alone = earth_movers_distance(at([1, 2, 3]))
    assert (alone.percent, alone.floor) == pytest.approx((0, 0))
    same = earth_movers_distance(at([7] * 4, [7] * 9))
    assert (same.percent, same.floor) == (0, 0)


def test_partitions_in_order() -> None:
    iid, some, far = (
        earth_movers_distance(digits_as(scheme)).percent
        for scheme in (Iid(), Dirichlet(0.5), LabelClusters(5, 2))
    )
    assert abs(iid) < 1
    assert iid + 2 < some < far - 2
    assert far < 100


def test_labels_are_not_used() -> None:
    iid, permuted = (
        earth_movers_distance(digits_as(scheme)) for scheme in (Iid(), LabelPermutation(2))
    )
    assert abs(iid.percent - permuted.percent) < 1


@given(st.floats(0.01, 100), st.floats(-10, 10))
@settings(max_examples=10, deadline=None)
def test_scale_and_origin_do_not_matter(scale: float, shift: float) -> None:
    first, second = [0.0, 1, 2, 3], [2.0, 5, 6, 8]
    expected = earth_movers_distance(at(first, second)).clients
    changed = [[scale * (value + shift) for value in own] for own in (first, second)]
    assert earth_movers_distance(at(*changed)).clients == pytest.approx(
        expected, rel=1e-3, abs=1e-2
    )


def test_the_seed_decides() -> None:
    clients = digits_as(Dirichlet(0.3))
    first, again, other = (
        earth_movers_distance(clients, samples=50, seed=seed) for seed in (3, 3, 4)
    )
    assert first.clients.tobytes() == again.clients.tobytes()
    assert (first.percent, first.floor) == (again.percent, again.floor)
    assert first.percent != other.percent


def test_clients_of_any_size(ragged: Clients) -> None:
    measured = earth_movers_distance(ragged)
    assert np.isfinite(measured.clients).all()
    assert measured.floor > 0


def test_features_get_inputs_as_a_model_does() -> None:
    """The first pixel differs between the clients, the second does not."""
    images = np.zeros((8, 1, 1, 2), np.uint8)
    images[:4, 0, 0, 0] = 255
    images[::2, 0, 0, 1] = 51
    clients = from_arrays(
        [(images[:4], np.zeros(4, np.int64)), (images[4:], np.zeros(4, np.int64))]
    )
    inputs = []

    def pixel(number: int, x: torch.Tensor) -> torch.Tensor:
        inputs.extend(x.unique().tolist())
        return x.flatten(1)[:, number : number + 1]

    first, second = (
        earth_movers_distance(clients, lambda x, n=number: pixel(n, x)) for number in (0, 1)
    )  # type: ignore[misc]
    assert first.percent + first.floor == pytest.approx(100 * 7 / 8)
    assert second.percent + second.floor == pytest.approx(0)
    assert sorted(set(inputs)) == pytest.approx([0, 0.2, 1])


def refused(field: str, *values: object) -> pytest.RaisesExc:
    """An `InvalidInputError` about this field, with these values in its message."""
    return pytest.raises(
        InvalidInputError,
        check=lambda error: (
            error.field == field and all(str(value) in str(error) for value in values)
        ),
    )


@pytest.mark.parametrize(
    ("arguments", "field", "values"),
    [
        ({"samples": 1}, "earth_movers_distance.samples", ["1", "2"]),
        ({"samples": 2.5}, "earth_movers_distance.samples", ["2.5", "2"]),
        ({"seed": -1}, "earth_movers_distance.seed", ["-1", "0"]),
        ({"features": lambda x: x[:, 0]}, "features", [(4,), "4 samples"]),
        ({"features": lambda x: x[:1]}, "features", [(1, 1), "4 samples"]),
        ({"features": lambda x: x.numpy()}, "features", ["ndarray", "4 samples"]),
        ({"features": lambda x: x / 0}, "features", ["NaN"]),
    ],
)
def test_invalid_arguments(arguments: dict[str, object], field: str, values: list[object]) -> None:
    with refused(field, *values):
        earth_movers_distance(at([0, 1], [2, 3]), **arguments)  # type: ignore[arg-type]


def test_words_have_no_distance() -> None:
    words = dataset(np.arange(40).reshape(10, 4), np.arange(10) % 2)
    with refused("features", "int64", "features=…", "encoder"):
        earth_movers_distance(partition(words, Iid(), 2))
    assert earth_movers_distance(partition(words, Iid(), 2), lambda x: x.double()).floor > 0


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ot", None)
    with refused("ot", "POT", "pip install fedclade[ot]"):
        earth_movers_distance(at([0, 1], [2, 3]))
