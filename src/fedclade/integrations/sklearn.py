"""Estimators of scikit-learn: `fc.sklearn.ClusteredFederatedClassifier` and
`fc.sklearn.ClusteredFederatedRegressor`. The clients are the values of `groups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassifierMixin,
    RegressorMixin,
)
from sklearn.metrics import accuracy_score, r2_score  # type: ignore[import-untyped]
from sklearn.utils import check_random_state  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import nn

from fedclade.data.datasets import from_arrays
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError, nearest
from fedclade.methods.base import Method
from fedclade.models import MLP, ModelSpec
from fedclade.registry import REGISTRY
from fedclade.training.prediction import PredictionKind
from fedclade.training.runner import run

if TYPE_CHECKING:
    from fedclade.training.result import Result

__all__ = ["ClusteredFederatedClassifier", "ClusteredFederatedRegressor"]
Array = NDArray[Any]
MAX_SEED = 10**9  # of a run
HIDDEN = 64  # units of the default model


class _ClusteredFederatedEstimator(BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share."""

    result_: Result
    groups_: Array

    def __init__(
        self,
        method: str | Method = "clade",
        model: ModelSpec | nn.Module | None = None,
        *,
        rounds: int = 50,
        clients_per_round: int | float = 1.0,
        lr: float = 0.1,
        batch_size: int = 32,
        epochs: int = 1,
        standardize: bool = True,
        device: str = "auto",
        random_state: Any = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.clients_per_round = clients_per_round
        self.lr = lr
        self.batch_size = batch_size
        self.epochs = epochs
        self.standardize = standardize
        self.device = device
        self.random_state = random_state
        self.settings = settings

    def _fit(self, X: Array, y: Array, groups: ArrayLike | None, **loss: str) -> None:
        """Train on checked arrays."""
        self._mean, self._scale = X.mean(axis=0), X.std(axis=0)
        self._scale[self._scale == 0] = 1
        clients = self._clients(self._inputs(X), y, groups)
        arguments = {
            "rounds": self.rounds,
            "clients_per_round": self.clients_per_round,
            "lr": self.lr,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "device": self.device,
            "seed": int(check_random_state(self.random_state).randint(MAX_SEED)),
            "eval_every": 0,
            **loss,
            **(self.settings or {}),
        }
        model = MLP(HIDDEN) if self.model is None else self.model
        self.result_ = run(_method(self.method), clients, model, **arguments)

    def _inputs(self, X: Array) -> NDArray[np.float32]:
        """The rows as the models read them."""
        return ((X - self._mean) / self._scale if self.standardize else X).astype(np.float32)

    def _clients(self, X: Array, y: Array, groups: ArrayLike | None) -> Clients:
        if groups is None:
            self.groups_ = np.array([], dtype=object)
            return from_arrays([(X, y)])
        names = column_or_1d(np.asarray(groups))
        check_consistent_length(X, names)
        self.groups_, number = np.unique(names, return_inverse=True)
        parts = [(X[number == client], y[number == client]) for client in range(len(self.groups_))]
        if all(isinstance(name, str) for name in self.groups_):
            return from_arrays(dict(zip(map(str, self.groups_), parts, strict=True)))
        return from_arrays(parts)

    @property
    def clusters_(self) -> dict[Any, int]:
        """The cluster of each value of `groups`; empty without groups."""
        check_is_fitted(self)
        clusters = self.result_.clusters.tolist()
        return dict(zip(self.groups_.tolist(), clusters, strict=False))

    def _predict(
        self, X: ArrayLike, groups: ArrayLike | None, kind: PredictionKind
    ) -> NDArray[np.float64]:
        """The predictions of each row by the model of its client."""
        check_is_fitted(self)
        rows = self._inputs(validate_data(self, X, reset=False, dtype=np.float64))
        number = self._client_numbers(rows, groups)
        predictions: NDArray[np.float64] | None = None
        for client in np.unique(number):
            chosen = number == client
            values = self.result_.predict(rows[chosen], int(client), kind=kind).double().numpy()
            if predictions is None:
                predictions = np.empty((len(rows), *values.shape[1:]))
            predictions[chosen] = values
        assert predictions is not None  # there is a row: `validate_data` has checked it
        return predictions

    def _client_numbers(self, rows: Array, groups: ArrayLike | None) -> NDArray[np.int64]:
        if groups is None:
            if len(self.groups_) > 1:
                raise InvalidInputError(
                    f"groups = None: the model was fitted with {len(self.groups_)} clients; give"
                    " the client of each row.",
                    "groups",
                )
            return np.zeros(len(rows), dtype=np.int64)
        names = column_or_1d(np.asarray(groups))
        check_consistent_length(rows, names)
        numbers = {name: number for number, name in enumerate(self.groups_.tolist())}
        for name in np.unique(names).tolist():
            if name not in numbers:
                hint = nearest(str(name), map(str, numbers))
                raise InvalidInputError(
                    f"groups = {name!r}: there is no such client.{hint}", "groups"
                )
        return np.array([numbers[name] for name in names.tolist()])


class ClusteredFederatedClassifier(ClassifierMixin, _ClusteredFederatedEstimator):  # type: ignore[misc]
    """A classifier with one model per group of similar clients.

    Args:
        method: The name of a method, or a method such as `fc.IFCA(clusters=3)`.
        model: One of `fc.models` or an `nn.Module` with an output per class; None for `MLP(64)`.
        rounds: The number of rounds.
        clients_per_round: The share of the clients in a round (float) or their number (int).
        lr: The learning rate of the clients.
        batch_size: The number of samples in a batch.
        epochs: The number of local epochs in a round.
        standardize: Whether to subtract the mean of each feature over all training rows and to
            divide by its standard deviation. Clients would send sums for it.
        device: "auto", "cpu" or "cuda".
        random_state: The seed.
        settings: More arguments of `fc.run`, such as `{"optimizer": "adam"}`.

    Attributes:
        classes_: The classes.
        groups_: The clients: the different values of `groups`.
        clusters_: The cluster of each client.
        result_: The `fc.Result` of the run.
    """

    classes_: Array

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train.

        Args:
            X: (rows, features) the inputs.
            y: (rows,) the classes.
            groups: (rows,) the client of each row, a name or a number; None for one client.
        """
        rows, targets = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(targets)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        self._fit(rows, labels, groups)
        return self

    def predict(self, X: ArrayLike, groups: ArrayLike | None = None) -> Array:
        """The class of each row.

        Args:
            X: (rows, features) the inputs.
            groups: (rows,) the client of each row; None if there is one client only.
        """
        labels = self._predict(X, groups, "label").astype(np.int64)
        classes: Array = self.classes_[labels]
        return classes

    def predict_proba(self, X: ArrayLike, groups: ArrayLike | None = None) -> NDArray[np.float64]:
        """(rows, classes) the probability of each class.

        Args:
            X: (rows, features) the inputs.
            groups: (rows,) the client of each row; None if there is one client only.
        """
        return self._predict(X, groups, "probability")

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> float:
        """The share of the rows whose class is predicted.

        Args:
            X: (rows, features) the inputs.
            y: (rows,) the classes.
            sample_weight: (rows,) the weight of each row; None for equal weights.
            groups: (rows,) the client of each row; None if there is one client only.
        """
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))


class ClusteredFederatedRegressor(RegressorMixin, _ClusteredFederatedEstimator):  # type: ignore[misc]
    """A regressor with one model per group of similar clients, by the squared error. Targets are
    standardized for the training.

    Args:
        method: The name of a method, or a method such as `fc.IFCA(clusters=3)`.
        model: One of `fc.models` or an `nn.Module` with one output; None for `MLP(64)`.
        rounds: The number of rounds.
        clients_per_round: The share of the clients in a round (float) or their number (int).
        lr: The learning rate of the clients.
        batch_size: The number of samples in a batch.
        epochs: The number of local epochs in a round.
        standardize: Whether to subtract the mean of each feature over all training rows and to
            divide by its standard deviation. Clients would send sums for it.
        device: "auto", "cpu" or "cuda".
        random_state: The seed.
        settings: More arguments of `fc.run`, such as `{"loss": "huber"}`.

    Attributes:
        groups_: The clients: the different values of `groups`.
        clusters_: The cluster of each client.
        result_: The `fc.Result` of the run. Its models predict standardized targets.
    """

    def fit(self, X: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Self:
        """Train.

        Args:
            X: (rows, features) the inputs.
            y: (rows,) the targets.
            groups: (rows,) the client of each row, a name or a number; None for one client.
        """
        rows, targets = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        targets = np.asarray(targets, dtype=np.float64)
        self._target_mean = float(targets.mean())
        self._target_scale = float(targets.std()) or 1.0
        standardized = ((targets - self._target_mean) / self._target_scale).astype(np.float32)
        self._fit(rows, standardized, groups, loss="mse")
        return self

    def predict(self, X: ArrayLike, groups: ArrayLike | None = None) -> NDArray[np.float64]:
        """The predicted number of each row.

        Args:
            X: (rows, features) the inputs.
            groups: (rows,) the client of each row; None if there is one client only.
        """
        values = self._predict(X, groups, "label")
        return self._target_mean + self._target_scale * values

    def score(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> float:
        """R², the share of the targets' variance that the predictions explain.

        Args:
            X: (rows, features) the inputs.
            y: (rows,) the targets.
            sample_weight: (rows,) the weight of each row; None for equal weights.
            groups: (rows,) the client of each row; None if there is one client only.
        """
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))


def _method(method: str | Method) -> Method:
    if not isinstance(method, str):
        return method
    if method not in REGISTRY["method"]:
        raise InvalidInputError(
            f"method = {method!r}: there is no such method.{nearest(method, REGISTRY['method'])}",
            "method",
        )
    made: Method = REGISTRY["method"][method]()
    return made
