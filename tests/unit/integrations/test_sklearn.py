"""The estimators of scikit-learn: its own checks, and clients as groups."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

import fedclade as fc
from fedclade.errors import InvalidInputError
from fedclade.integrations.sklearn import (
    ClusteredFederatedClassifier,
    ClusteredFederatedRegressor,
)

SITES = np.array(["east", "north", "south", "west"])
# Checks of scikit-learn that an estimator does not pass, each with its reason: none.
EXPECTED_FAILED_CHECKS: dict[str, str] = {}


@parametrize_with_checks(
    [
        ClusteredFederatedClassifier(rounds=20, device="cpu"),
        ClusteredFederatedRegressor(rounds=20, device="cpu"),
    ],
    expected_failed_checks=lambda _: EXPECTED_FAILED_CHECKS,
)
def test_the_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


def two_laws(rows: int = 240) -> tuple[Any, Any, Any]:
    """Sites with y = sign(x₀) and, for every second site, y = -sign(x₀)."""
    rng = np.random.default_rng(0)
    X, site = rng.normal(5, 3, size=(rows, 2)), np.arange(rows) % len(SITES)
    y = np.where((X[:, 0] > 5) ^ (site % 2 == 1), "up", "down")
    return X, y, SITES[site]


def fitted(**changes: Any) -> ClusteredFederatedClassifier:
    settings: dict[str, Any] = {"method": "clade", "rounds": 20, "device": "cpu", **changes}
    return ClusteredFederatedClassifier(**settings).fit(*two_laws())


def test_each_row_is_predicted_by_the_model_of_its_client() -> None:
    X, y, groups = two_laws()
    model = fitted()
    assert model.clusters_["east"] == model.clusters_["south"] != model.clusters_["north"]
    assert model.clusters_["north"] == model.clusters_["west"]
    assert (model.predict(X, groups=groups) == y).mean() > 0.95
    assert model.score(X, y, groups=groups) == (model.predict(X, groups=groups) == y).mean()
    swapped = np.where(groups == "east", "north", "east")
    same_rows = (groups == "east") | (groups == "north")
    wrong = model.predict(X[same_rows], groups=swapped[same_rows])
    assert (wrong == y[same_rows]).mean() < 0.05


def test_probabilities_have_a_column_for_each_class() -> None:
    X, _, groups = two_laws()
    model = fitted()
    probability = model.predict_proba(X, groups=groups)
    assert model.classes_.tolist() == ["down", "up"]
    assert probability.sum(axis=1) == pytest.approx(np.ones(len(X)))
    assert (model.classes_[probability.argmax(1)] == model.predict(X, groups=groups)).all()


def test_the_result_has_the_names_of_the_clients() -> None:
    model = fitted()
    assert model.result_.clients["client"] == SITES.tolist()
    assert model.groups_.tolist() == SITES.tolist()


def test_groups_may_be_numbers_of_any_sign() -> None:
    X, y, groups = two_laws()
    numbers = np.array([-2, 7, 0, 100])[np.searchsorted(SITES, groups)]
    model = ClusteredFederatedClassifier(rounds=20, device="cpu").fit(X, y, groups=numbers)
    assert set(model.clusters_) == {-2, 0, 7, 100}
    assert (model.predict(X, groups=numbers) == y).mean() > 0.95


def test_a_regressor_predicts_in_the_units_of_the_targets() -> None:
    X, _, groups = two_laws()
    sign = np.where(np.searchsorted(SITES, groups) % 2 == 1, -1, 1)
    y = 1000 + 200 * sign * (X[:, 0] - 5)
    model = ClusteredFederatedRegressor(rounds=40, device="cpu").fit(X, y, groups=groups)
    error = np.abs(model.predict(X, groups=groups) - y).mean()
    assert error < 0.1 * np.abs(y - y.mean()).mean()
    assert model.score(X, y, groups=groups) > 0.9


def test_methods_models_and_settings_of_the_user() -> None:
    X, y, groups = two_laws()
    model = fitted(
        method=fc.IFCA(clusters=2), model=fc.models.Logistic(), settings={"optimizer": "adam"}
    )
    assert model.result_.summary["method"] == "ifca"
    assert model.result_.summary["model"] == "logistic"
    copy = clone(model).fit(X, y, groups=groups)
    assert (copy.predict(X, groups=groups) == model.predict(X, groups=groups)).all()
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict(X, groups=groups) == model.predict(X, groups=groups)).all()


def test_a_search_over_parameters_with_one_client() -> None:
    X, y, groups = two_laws()
    search = GridSearchCV(
        ClusteredFederatedClassifier("fedavg", device="cpu"), {"rounds": [1, 10]}, cv=2
    )
    search.fit(X[groups == "east"], y[groups == "east"])
    assert search.best_params_ == {"rounds": 10}


def test_a_client_that_was_not_fitted_is_refused_with_the_nearest_name() -> None:
    model = fitted(rounds=1)
    with pytest.raises(InvalidInputError, match="'north'") as caught:
        model.predict([[1.0, 2.0]], groups=["nort"])
    assert caught.value.field == "groups"


def test_rows_need_their_clients_if_there_are_several() -> None:
    model = fitted(rounds=1)
    with pytest.raises(InvalidInputError) as caught:
        model.predict([[1.0, 2.0]])
    assert caught.value.field == "groups"
    for groups in (["north"], [["north", "north"]]):
        with pytest.raises(ValueError, match=r"[Ss]hape|inconsistent"):
            model.predict([[1.0, 2.0], [3.0, 4.0]], groups=groups)


def test_clusters_before_fit_are_an_error() -> None:
    with pytest.raises(NotFittedError):
        _ = ClusteredFederatedClassifier().clusters_


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidInputError, match="'clade'") as caught:
        fitted(method="clad")
    assert caught.value.field == "method"


def test_without_standardize_the_models_read_the_features_as_they_are() -> None:
    X, _, _ = two_laws()
    model = fitted(standardize=False, rounds=2)
    direct = model.result_.predict(X.astype("float32"), "east", kind="probability")
    ours = model.predict_proba(X, groups=np.full(len(X), "east"))
    assert ours == pytest.approx(direct.numpy(), abs=1e-6)
