"""Heart disease in four hospitals by the protocol of FLamby's Fed-Heart-Disease.

Ogier du Terrail et al., FLamby, NeurIPS 2022 (arXiv 2210.04620). Rows, features, split and scaling
follow its repository, owkin/FLamby at edacf54: `flamby/datasets/fed_heart_disease/`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedclade.data.datasets import from_arrays
from fedclade.data.federated_dataset import Clients
from fedclade.registry import find
from fedclade.reproduce.panels import StudyResult
from fedclade.training import experiment_file
from fedclade.training.config import EngineConfig, LocalConfig, ServerConfig, TrainingConfig
from fedclade.training.prediction import outputs_of
from fedclade.training.result import Result
from fedclade.training.runner import TrainingRun

Tables: TypeAlias = dict[str, dict[str, Any]]
Floats: TypeAlias = NDArray[np.float32]
Trained: TypeAlias = Literal["methods", "pooled", "cleveland", "hungarian", "switzerland", "va"]

HOSPITALS = {
    "cleveland": "Cleveland",
    "hungarian": "Hungary",
    "switzerland": "Switzerland",
    "va": "Long Beach",
}
# The published accuracies of one hospital's model in another suggest these groups.
EXPECTED_PAIRS = (("Cleveland", "Hungary"), ("Switzerland", "Long Beach"))
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
CATEGORIES = {"cp": (2, 3, 4), "restecg": (1, 2)}  # a column each; the first category has none
TRAIN_SHARE = 0.66
SPLIT_SEED = 43
FIRST_SEED = 42  # FLamby's seeds are 42 to 46
_LEAST_STRATIFIED = 3  # patients of each class
_SMALL = 1e-9  # is added to a standard deviation


@dataclass(frozen=True)
class Hospitals:
    """Who trains.

    Args:
        train: "methods" for the method of the experiment on the four hospitals; "pooled" for one
            model on the training rows of all hospitals; a hospital for one model on its rows.
    """

    train: Trained = "methods"


@dataclass(frozen=True)
class Hospital:
    """The rows of a hospital: features as they are in the file, and whether there is a disease."""

    x: Floats
    y: Floats  # (rows, 1)
    x_test: Floats
    y_test: Floats

    def scaled(self, scale: Scale) -> tuple[Floats, Floats, Floats, Floats]:
        return scale.apply(self.x), self.y, scale.apply(self.x_test), self.y_test


@dataclass(frozen=True)
class Scale:
    """The mean and the standard deviation of each feature."""

    mean: Floats
    std: Floats

    @staticmethod
    def of(x: Floats) -> Scale:
        return Scale(x.mean(0), x.std(0, ddof=1))

    def apply(self, x: Floats) -> Floats:
        return np.asarray((x - self.mean) / (self.std + np.float32(_SMALL)), np.float32)


@cache
def read_hospitals() -> dict[str, Hospital]:
    """The 740 patients without a missing value in 10 columns, with FLamby's split."""
    from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]  # half a second to import, and rarely needed

    text = resources.files("fedclade.data").joinpath("bundled", "heart.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    hospitals = {}
    for name in HOSPITALS:
        own = [row for row in rows if row["hospital"] == name and _is_complete(row)]
        x = np.array([_features(row) for row in own], np.float32)
        y = np.array([[float(row["num"]) > 0] for row in own], np.float32)
        counts = np.bincount(y[:, 0].astype(np.int64), minlength=2)
        train, test = train_test_split(
            np.arange(len(own)),
            test_size=1.0 - TRAIN_SHARE,
            train_size=TRAIN_SHARE,
            random_state=SPLIT_SEED,
            stratify=y if counts.min() >= _LEAST_STRATIFIED else None,
        )
        train, test = np.sort(train), np.sort(test)
        hospitals[name] = Hospital(x[train], y[train], x[test], y[test])
    return hospitals


def _is_complete(row: Mapping[str, str]) -> bool:
    return all(row[name] for name in (*NUMBERS, *CATEGORIES))


def _features(row: Mapping[str, str]) -> list[float]:
    numbers = [float(row[name]) for name in NUMBERS]
    flags = [
        float(float(row[name]) == code) for name, codes in CATEGORIES.items() for code in codes
    ]
    return numbers + flags


def initial_model(seed: int) -> nn.Module:
    """Logistic regression with the initial weights of FLamby's run number `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(FIRST_SEED + seed)
        return nn.Linear(len(NUMBERS) + sum(map(len, CATEGORIES.values())), 1)


def hospitals(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """The accuracy in each hospital, with the hospital's own scaling, their mean, the accuracy over
    the test rows of all hospitals, with a common scaling, and which hospitals share a model.
    """
    setting = experiment_file.build(Hospitals, tables["study"], "study")
    training = experiment_file.build(TrainingConfig, tables["run"], "run")
    method = dict(tables["method"])
    method_class = find("method", method.pop("name"), "method.name")
    result = TrainingRun(
        experiment_file.build(method_class, method, "method"),
        _clients(setting.train),
        initial_model(training.seed),
        experiment_file.build(LocalConfig, tables["local"], "local"),
        training,
        EngineConfig(),
        device,
        server=experiment_file.build(ServerConfig, tables.get("server", {}), "server"),
    ).run()
    one_model = setting.train != "methods"
    numbers = accuracies(
        {name: result.model_of(0 if one_model else HOSPITALS[name]) for name in HOSPITALS}
    )
    return StudyResult(
        [{"round": training.rounds, **numbers, **({} if one_model else together(result))}]
    )


def _clients(train: Trained) -> Clients:
    """Those who train, with the features scaled as FLamby scales them for training."""
    data, (own, common) = read_hospitals(), scales()
    if train == "pooled":
        parts = [hospital.scaled(common) for hospital in data.values()]
        x, y, x_test, y_test = map(np.concatenate, zip(*parts, strict=True))
        return from_arrays([(x, y, x_test, y_test)])
    return from_arrays(
        {
            HOSPITALS[name]: hospital.scaled(own[name])
            for name, hospital in data.items()
            if train in ("methods", name)
        }
    )


@cache
def scales() -> tuple[dict[str, Scale], Scale]:
    """The scale of each hospital and that of all, from training rows."""
    data = read_hospitals()
    own = {name: Scale.of(hospital.x) for name, hospital in data.items()}
    return own, Scale.of(np.concatenate([hospital.x for hospital in data.values()]))


def accuracies(models: Mapping[str, nn.Module]) -> dict[str, float]:
    """The accuracies of the models that the hospitals use, in percent.

    Args:
        models: the model of each hospital.
    """
    own, common = scales()
    is_right, is_right_in_common = {}, []
    for name, hospital in read_hospitals().items():
        is_right[HOSPITALS[name]] = _is_right(models[name], own[name], hospital)
        is_right_in_common.append(_is_right(models[name], common, hospital))
    values = {f"accuracy {name}": 100.0 * right.mean() for name, right in is_right.items()}
    return {
        **values,
        "accuracy mean": sum(values.values()) / len(values),
        "accuracy all": 100.0 * np.concatenate(is_right_in_common).mean(),
    }


def _is_right(model: nn.Module, scale: Scale, hospital: Hospital) -> NDArray[np.bool_]:
    """(test rows,) whether the model predicts the disease."""
    outputs = outputs_of(model, torch.from_numpy(scale.apply(hospital.x_test))).numpy()
    return np.asarray((outputs > 0) == (hospital.y_test > 0))[:, 0]


def together(result: Result) -> dict[str, float]:
    """The number of groups, and which pairs of hospitals are in one group: 100 for yes."""
    pairs = {
        frozenset(pair): result.cluster_of(pair[0]) == result.cluster_of(pair[1])
        for pair in combinations(HOSPITALS.values(), 2)
    }
    expected = {
        f"{first} with {second}, % of seeds": pairs.pop(frozenset((first, second)))
        for first, second in EXPECTED_PAIRS
    }
    found = expected | {"another pair, % of seeds": any(pairs.values())}
    return {"groups": len(result.groups), **{name: 100.0 * same for name, same in found.items()}}
