"""The complete diagnosis on federations of the built-in digits with known groups."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import fedclade as fc
from fedclade.analysis.diagnose import Diagnosis, diagnose
from fedclade.analysis.diagnose.diagnosis_text import NO_CLASSES
from fedclade.analysis.diagnose.pilot_runs import (
    Candidate,
    Probe,
    held_out,
    run_pilots,
    until_flat,
    without_test,
)
from fedclade.analysis.diagnose.recommendation import recommend
from fedclade.core.federation import Federation
from fedclade.core.method_state import State
from fedclade.core.pytree import Tree
from fedclade.data import (
    Clients,
    Dirichlet,
    Iid,
    LabelClusters,
    LabelPermutation,
    LabelSwap,
    QuantitySkew,
    Rotation,
    from_arrays,
    partition,
)
from fedclade.data.partitioning.base import Scheme
from fedclade.errors import InvalidInputError
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

DIGITS = fc.data.load("digits")


def planted(scheme: Scheme, clients: int = 20, seed: int = 1) -> Clients:
    return partition(DIGITS, scheme, clients, seed, probe=0)


def turned_halves() -> Clients:
    """Two halves of the classes, upright and rotated: four groups of five clients."""
    x, y = DIGITS.x_train, DIGITS.y_train
    parts = []
    for half in (y < 5, y >= 5):
        rows = torch.nonzero(half).flatten()
        for client, part in enumerate(
            torch.chunk(
                rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))], 10
            )
        ):
            parts.append((torch.rot90(x[part], client % 2, (-2, -1)), y[part]))
    return from_arrays(parts)


def backwards() -> Clients:
    """Twenty clients with digits; every second client numbers the classes in reverse order. Their
    label distributions also differ a little.
    """
    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    # A fifth is left out, as in the README.
    client = torch.where(torch.arange(len(y)) % 100 < 20, -1, torch.arange(len(y)) % 20)
    x = (x / 16).float()
    return from_arrays(
        [
            (x[client == number], 9 - y[client == number] if number % 2 else y[client == number])
            for number in range(20)
        ]
    )


def test_small_differences_do_not_hide_the_groups_of_a_large_one() -> None:
    diagnosis = diagnose(backwards(), probe_rounds=0)
    assert diagnosis.evidence.labels_differ
    assert (diagnosis.kind, diagnosis.groups) == ("concept shift", 2)
    assert diagnosis.group == (0, 1) * 10


@pytest.mark.parametrize(
    ("clients", "kind", "groups"),
    [
        (planted(Iid()), "iid", None),
        (planted(QuantitySkew(0.5)), "quantity skew", None),
        (planted(LabelClusters(5, 2)), "label skew", 5),
        (planted(Dirichlet(0.1)), "label skew", None),
        (planted(LabelSwap(4)), "concept shift", 4),
        (planted(LabelPermutation(4)), "concept shift", 4),
        (planted(Rotation(4)), "feature shift in groups", 4),
        (turned_halves(), "feature shift in groups and label skew", 4),
    ],
    ids=lambda value: value.partition if isinstance(value, Clients) else None,
)
def test_the_kind_and_the_number_of_groups(clients: Clients, kind: str, groups: int | None) -> None:
    diagnosis = diagnose(clients, probe_rounds=0, device="cpu")
    assert diagnosis.kind == kind
    assert diagnosis.groups == groups
    assert diagnosis.sure > 0.9
    if clients.groups is not None and groups is not None:
        assert diagnosis.group is not None
        # Every found group is one true group.
        assert len(set(zip(diagnosis.group, clients.groups.tolist(), strict=True))) == groups


@pytest.fixture(scope="module")
def swapped() -> Clients:
    return planted(LabelPermutation(2), clients=10)


@pytest.fixture(scope="module")
def diagnosis(swapped: Clients) -> Diagnosis:
    return diagnose(swapped, fc.models.MLP(16), seed=3, device="cpu", probe_rounds=4)


def test_the_recommendation_comes_from_pilot_runs(diagnosis: Diagnosis) -> None:
    methods = [probe.method for probe in diagnosis.probes]
    assert methods == [
        "fedavg", "fedavg", "scaffold", "local", "clade_groups", "clade", "ifca", "cfl",
    ]  # fmt: skip
    assert [probe.layer for probe in diagnosis.probes] == [None, "auto", *[None] * 6]
    assert diagnosis.advice.method in ("clade_groups", "clade", "ifca")
    assert diagnosis.advice.clustering_helps
    assert diagnosis.advice.gain is not None
    assert diagnosis.advice.gain > 10
    text = str(diagnosis)
    assert text.startswith("Concept shift: ")
    assert "2 groups of 5, 5 clients" in text
    assert "Expected gain over FedAvg: " in text


def test_further_methods_join_the_pilot_runs(swapped: Clients, diagnosis: Diagnosis) -> None:
    further = diagnose(
        swapped,
        fc.models.MLP(16),
        seed=3,
        device="cpu",
        probe_rounds=4,
        also=["fedsem", fc.FedRep(), fc.IFCA(clusters=3)],
    )
    usual, settings = [probe.method for probe in diagnosis.probes], dict[str, object]()
    for probe in further.probes:
        settings[probe.method] = probe.settings
    assert [probe.method for probe in further.probes] == [*usual, "fedsem", "fedrep"]
    assert settings["fedsem"] == {"clusters": 2}  # the number of groups that was found
    assert settings["ifca"] == {"clusters": 3}  # instead of the usual one
    assert Diagnosis.from_json(further.to_json()) == further


def test_a_further_method_may_be_recommended() -> None:
    """Ditto is better than all others here, by the scores of three invented pilot runs."""
    probes = [
        Probe("fedavg", {}, 1, 50.0, 0.0, 0.0, 30.0, 1.0, seeds=2),
        Probe("local", {}, 10, 70.0, 20.0, 1.0, 10.0, 1.0, seeds=2),
        Probe("ditto", {}, 1, 80.0, 30.0, 1.0, 0.0, 0.0, seeds=2),
        Probe("mine", {}, 4, 80.0, 30.0, 1.0, 0.0, 0.0, seeds=2),
    ]
    advice = recommend(True, None, False, probes)
    assert advice.method == "ditto"
    assert not advice.clustering_helps


def test_it_says_when_noise_hides_the_groups() -> None:
    """Clients with fewer samples need a larger ε."""
    few, many = (
        diagnose(planted(LabelClusters(4, 2), clients=clients), probe_rounds=0, device="cpu")
        for clients in (24, 8)
    )
    assert few.noise is not None
    assert many.noise is not None
    assert few.noise.least_epsilon is not None
    assert many.noise.least_epsilon is not None
    assert few.noise.least_epsilon > many.noise.least_epsilon
    assert few.noise.hidden_at is not None
    assert f"{few.noise.least_epsilon:g}; with {few.noise.hidden_at:g} they are hidden" in str(few)
    assert "the smallest, 6 of 24 clients, gets 4 times the noise" in str(few)
    assert Diagnosis.from_json(json.loads(json.dumps(few.to_json()))).noise == few.noise
    assert diagnose(planted(Iid()), probe_rounds=0, device="cpu").noise is None


def test_those_that_may_be_best_are_trained_with_a_second_seed(diagnosis: Diagnosis) -> None:
    seeds = {probe.method: probe.seeds for probe in diagnosis.probes if probe.layer is None}
    assert seeds["fedavg"] == 2
    assert seeds[diagnosis.advice.method] == 2
    assert seeds["local"] == 1
    assert sum(seeds.values()) < 2 * len(seeds)
    assert {probe.rounds for probe in diagnosis.probes} == {4}


def test_sizes_of_a_mixture(diagnosis: Diagnosis) -> None:
    assert list(diagnosis.sizes) == ["concept shift"]
    mixture = diagnose(turned_halves(), device="cpu", probe_rounds=0)
    assert list(mixture.sizes) == ["feature shift in groups", "label skew"]
    assert all(0.1 < size < 1 for size in mixture.sizes.values())
    assert mixture.to_json()["size_of_kind"] == mixture.sizes
    assert "Share of the variance between clients: feature shift in groups" in str(mixture)


def test_a_run_ends_when_its_score_is_flat() -> None:
    stop = until_flat()
    rounds = {10: 50.0, 20: 50.1, 25: 50.1, 30: 70.0, 40: 70.6, 50: 71.0}
    rows = [{"round": number, "accuracy": score} for number, score in rounds.items()]
    assert [stop(row) for row in rows] == [False, False, False, False, False, True]  # type: ignore[arg-type]
    stop = until_flat()
    losses = {20: 1.0, 30: 0.9, 40: 0.895}
    rows = [{"round": number, "loss": loss} for number, loss in losses.items()]
    assert [stop(row) for row in rows] == [False, False, True]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Refuses(fc.FedAvg):
    name: ClassVar[str] = "refuses"

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        raise InvalidInputError("method.never: it fits no federation.", "method.never")


def test_a_method_that_does_not_fit_is_left_out() -> None:
    clients = without_test(planted(Iid(), clients=4))
    run = TrainingRun(
        fc.FedAvg(),
        clients,
        fc.models.MLP(8),
        LocalConfig(),
        TrainingConfig(),
        EngineConfig(),
        "cpu",
    )
    reports: list[tuple[str, float, int]] = []
    pilots = run_pilots(
        [Candidate(fc.FedAvg()), Candidate(Refuses())],
        clients,
        run,
        2,
        lambda label, done, total: reports.append((label, done, total)),
    )
    assert reports == [
        ("pilot run 1 of 2, fedavg", 0.5, 2),
        ("pilot run 1 of 2, fedavg", 1.0, 2),
    ]
    assert [probe.method for probe in pilots.probes] == ["fedavg"]
    assert pilots.failed == ("refuses (method.never)",)
    with pytest.raises(InvalidInputError) as caught:
        run_pilots([Candidate(Refuses())], clients, run, rounds=1)
    assert caught.value.field == "method.never"


def test_the_same_seed_gives_the_same_diagnosis_without_using_test_data(
    swapped: Clients, diagnosis: Diagnosis
) -> None:
    other_test_data = replace(
        swapped,
        x_test=torch.full_like(swapped.x_test, 7),
        y_test=swapped.y_test.flip(0),
        test_part_id=torch.zeros_like(swapped.test_part_id),
        groups=torch.arange(len(swapped)),  # true groups are not used either
        probe=swapped.x[:3],
    )
    settings = {"model": fc.models.MLP(16), "seed": 3, "device": "cpu", "probe_rounds": 4}
    assert diagnose(other_test_data, **settings) == diagnosis
    stripped = without_test(swapped)
    assert len(stripped.x_test) == 0
    assert stripped.groups is None
    assert diagnose(stripped, **settings) == diagnosis


def test_json_round_trip(diagnosis: Diagnosis) -> None:
    content = json.loads(json.dumps(diagnosis.to_json()))
    assert Diagnosis.from_json(content) == diagnosis
    assert content["kind"] == "concept shift"
    assert content["groups"] == 2
    assert content["sentences"] == diagnosis.sentences()
    assert "32 features" in content["leaves_a_client"]


def test_a_fifth_is_held_out_and_every_client_keeps_data() -> None:
    clients = from_arrays([(np.zeros((n, 2), np.float32), np.arange(n) % 2) for n in (10, 1, 2, 3)])
    split = held_out(clients, seed=0)
    assert split.sizes.tolist() == [8, 1, 2, 2]
    assert split.test_sizes.tolist() == [2, 0, 0, 1]
    assert sorted([*split.train[0].tolist(), *split.test[0].tolist()]) == clients.train[0].tolist()


def squared(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - y) ** 2


def regression(shift: float, turn: float) -> Clients:
    draw, weights = np.random.default_rng(0), np.arange(1, 5)
    parts = []
    for client in range(12):
        x = draw.normal(size=(60, 4)) + (shift if client % 2 else 0)
        y = x @ weights * (turn if client % 2 else 1) + draw.normal(size=60)
        parts.append((x.astype(np.float32), y.astype(np.float32)))
    return from_arrays(parts)


@pytest.mark.parametrize(
    ("shift", "turn", "kind"),
    [(0, 1, "iid"), (2, 1, "feature shift in groups"), (0, -1, "target shift")],
)
def test_without_class_labels_the_text_states_the_limits(
    shift: float, turn: float, kind: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    diagnosis = diagnose(
        regression(shift, turn), model, device="cpu", loss=squared, probe_rounds=1, lr=0.005
    )
    assert diagnosis.kind == kind
    assert NO_CLASSES in diagnosis.sentences()
    assert diagnosis.about["score"] == "loss"


def test_dirichlet_clients_have_no_groups() -> None:
    diagnosis = diagnose(planted(Dirichlet(0.1)), fc.models.MLP(16), device="cpu", probe_rounds=2)
    assert diagnosis.group is None
    assert "No groups" in str(diagnosis)


ONE = (np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("clients", "settings", "field", "value"),
    [
        (from_arrays([ONE]), {}, "clients", "clients = 1"),
        ([ONE, ONE], {}, "clients", "fc.data.partition"),
        (from_arrays([ONE, ONE]), {"probe_rounds": -1}, "probe_rounds", "-1"),
        (from_arrays([ONE, ONE]), {"seed": -1}, "seed", "-1"),
        (from_arrays([ONE, ONE]), {"lr": 0}, "local.lr", "local.lr = 0"),
        (from_arrays([ONE, ONE]), {"also": ["dito"]}, "also", "ditto"),
        (from_arrays([ONE, ONE]), {"also": "ditto"}, "also", "list"),
        (from_arrays([ONE, ONE]), {"also": [fc.Oracle()]}, "also", "true groups"),
    ],
)
def test_invalid_arguments(
    clients: Clients, settings: dict[str, object], field: str, value: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        diagnose(clients, device="cpu", **settings)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("clients", "settings", "name"),
    [
        (regression(0, 1), {}, "model"),
        (regression(0, 1), {"model": torch.nn.Linear(4, 1)}, "loss"),
        (
            from_arrays([ONE, ONE]),
            {"model": torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3))},
            "model",
        ),
    ],
)
def test_models_that_do_not_fit_the_data(
    clients: Clients, settings: dict[str, object], name: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}"):
        diagnose(clients, device="cpu", **settings)  # type: ignore[arg-type]


def test_a_diverging_pilot_run_is_reported() -> None:
    with pytest.raises(InvalidInputError, match=r"local.lr = 1e\+38: fedavg") as caught:
        diagnose(planted(Iid(), clients=3), fc.models.MLP(8), device="cpu", lr=1e38, probe_rounds=3)
    assert caught.value.field == "local.lr"


def test_inputs_that_are_not_finite_are_reported() -> None:
    x = torch.tensor([[1e38, 1e38, 1e38]] * 4)
    with pytest.raises(InvalidInputError, match=r"^client 0: "):
        diagnose(from_arrays([(x, ONE[1]), ONE]), fc.models.MLP(8), device="cpu")


def test_there_are_no_pilot_runs_if_no_client_has_three_samples() -> None:
    two = (ONE[0][:2], ONE[1][:2])
    assert diagnose(from_arrays([two] * 4), device="cpu").probes == ()


def test_a_client_without_training_data_is_reported() -> None:
    clients = from_arrays([ONE, ONE, ONE])
    empty = replace(clients, train=fc.data.RaggedIndex.of([clients.train[0], clients.train[1], []]))
    with pytest.raises(InvalidInputError, match=r"^client 2: .*clients\.only"):
        diagnose(empty, device="cpu")


def test_two_clients_with_a_few_samples() -> None:
    diagnosis = diagnose(from_arrays([ONE, ONE]), device="cpu", probe_rounds=1)
    assert diagnosis.kind == "iid"
    assert diagnosis.group is None
    assert diagnosis.sure < 0.5
    assert "few examples" in str(diagnosis)


def test_the_map_separates_the_groups(swapped: Clients, diagnosis: Diagnosis) -> None:
    assert diagnosis.group is not None
    places = np.array([[place["x"], place["y"]] for place in diagnosis.map])
    assert len(places) == len(swapped)
    groups = np.array(diagnosis.group)
    centers = np.stack([places[groups == group].mean(0) for group in range(2)])
    nearest = np.linalg.norm(places[:, None] - centers, axis=2).argmin(1)
    assert (nearest == groups).mean() > 0.9
