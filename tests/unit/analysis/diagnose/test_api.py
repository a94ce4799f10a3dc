"""The whole diagnosis on planted federations of the built-in digits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]

import fedclade as fc
from fedclade.analysis.diagnose import Diagnosis, diagnose
from fedclade.analysis.diagnose.pilot_runs import held_out, without_test
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

DIGITS = fc.data.load("digits")


def planted(scheme: Scheme, clients: int = 20, seed: int = 1) -> Clients:
    return partition(DIGITS, scheme, clients, seed, probe=0)


def turned_halves() -> Clients:
    """Two halves of the classes, upright and turned: four groups of five clients."""
    x, y = DIGITS.x_train, DIGITS.y_train
    parts = []
    for half in (y < 5, y >= 5):
        rows = torch.nonzero(half).flatten()
        for client, own in enumerate(
            torch.chunk(
                rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))], 10
            )
        ):
            parts.append((torch.rot90(x[own], client % 2, (-2, -1)), y[own]))
    return from_arrays(parts)


def backwards() -> Clients:
    """Twenty sites of the digits in their order; every second one numbers the classes backwards.
    Their labels differ a little besides.
    """
    x, y = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    node = torch.where(
        torch.arange(len(y)) % 100 < 20, -1, torch.arange(len(y)) % 20
    )  # a fifth is left out, as in the README
    x = (x / 16).float()
    return from_arrays(
        [(x[node == one], 9 - y[node == one] if one % 2 else y[node == one]) for one in range(20)]
    )


def test_small_differences_do_not_hide_the_groups_of_a_large_one() -> None:
    found = diagnose(backwards(), probe_rounds=0)
    assert found.evidence.labels_differ
    assert (found.kind, found.groups) == ("concept shift", 2)
    assert found.group == (0, 1) * 10


@pytest.mark.parametrize(
    ("clients", "kind", "groups"),
    [
        (planted(Iid()), "iid", None),
        (planted(QuantitySkew(0.5)), "quantity skew", None),
        (planted(LabelClusters(5, 2)), "label skew", 5),
        (planted(Dirichlet(0.1)), "label skew", None),
        (planted(LabelSwap(4)), "concept shift", 4),
        (planted(LabelPermutation(4)), "concept shift", 4),
        (planted(Rotation(4)), "feature shift", 4),
        (turned_halves(), "feature shift and label skew", 4),
    ],
    ids=lambda value: value.partition if isinstance(value, Clients) else None,
)
def test_the_kind_and_the_number_of_groups(clients: Clients, kind: str, groups: int | None) -> None:
    found = diagnose(clients, probe_rounds=0, device="cpu")
    assert found.kind == kind
    assert found.groups == groups
    assert found.sure > 0.9
    if clients.groups is not None and groups is not None:
        assert found.group is not None
        assert (
            len(set(zip(found.group, clients.groups.tolist(), strict=True))) == groups
        )  # who is with whom


@pytest.fixture(scope="module")
def swapped() -> Clients:
    return planted(LabelPermutation(2), clients=10)


@pytest.fixture(scope="module")
def found(swapped: Clients) -> Diagnosis:
    return diagnose(swapped, fc.models.MLP(16), seed=3, device="cpu", probe_rounds=4)


def test_the_advice_comes_from_probe_rounds(found: Diagnosis) -> None:
    assert [probe.method for probe in found.probes] == ["fedavg", "local", "clade", "ifca", "cfl"]
    assert found.advice.method == "clade"
    assert found.advice.clustering_helps
    assert found.advice.gain is not None
    assert found.advice.gain > 10
    text = str(found)
    assert text.startswith(
        "Concept shift: the clients see the same inputs and give them different labels."
    )
    assert "2 groups, of 5, 5 clients" in text
    assert "Use Clade: clients fall into 2 groups" in text


def test_the_same_seed_gives_the_same_diagnosis_and_it_never_looks_at_test_data(
    swapped: Clients, found: Diagnosis
) -> None:
    rubbish = replace(
        swapped,
        x_test=torch.full_like(swapped.x_test, 7),
        y_test=swapped.y_test.flip(0),
        test_part_id=torch.zeros_like(swapped.test_part_id),
        groups=torch.arange(len(swapped)),  # nor at groups that are known
        probe=swapped.x[:3],
    )
    again = diagnose(rubbish, fc.models.MLP(16), seed=3, device="cpu", probe_rounds=4)
    assert again == found
    nothing = without_test(swapped)
    assert len(nothing.x_test) == 0
    assert nothing.groups is None
    assert diagnose(nothing, fc.models.MLP(16), seed=3, device="cpu", probe_rounds=4) == found


def test_json_and_back(found: Diagnosis) -> None:
    text = json.dumps(found.to_json())
    assert Diagnosis.from_json(json.loads(text)) == found
    told = json.loads(text)
    assert told["kind"] == "concept shift"
    assert told["groups"] == 2
    assert told["sentences"] == found.sentences()
    assert "how many it has of each class" in told["leaves_a_client"]


def test_a_fifth_is_held_out_and_nobody_loses_all() -> None:
    clients = from_arrays([(np.zeros((n, 2), np.float32), np.arange(n) % 2) for n in (10, 1, 2, 3)])
    kept = held_out(clients, seed=0)
    assert kept.sizes.tolist() == [8, 1, 2, 2]
    assert kept.test_sizes.tolist() == [2, 0, 0, 1]
    assert sorted([*kept.train[0].tolist(), *kept.test[0].tolist()]) == clients.train[0].tolist()


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
    ("shift", "turn", "kind"), [(0, 1, "iid"), (2, 1, "feature shift"), (0, -1, "target shift")]
)
def test_without_class_labels_it_says_what_cannot_be_told(
    shift: float, turn: float, kind: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    found = diagnose(
        regression(shift, turn), model, device="cpu", loss=squared, probe_rounds=1, lr=0.005
    )
    assert found.kind == kind
    assert "label skew and concept shift cannot be told apart" in str(found)
    assert found.about["score"] == "loss"


def test_clients_who_differ_one_by_one_have_no_groups() -> None:
    found = diagnose(planted(Dirichlet(0.1)), fc.models.MLP(16), device="cpu", probe_rounds=2)
    assert found.group is None
    assert "No groups: clients differ one by one" in str(found)


ONE = (np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1]))


@pytest.mark.parametrize(
    ("clients", "settings", "message"),
    [
        (
            from_arrays([ONE]),
            {},
            "clients = 1: a diagnosis compares clients, so there must be at least 2",
        ),
        ([ONE, ONE], {}, "clients: make them with fc.data.partition"),
        (
            from_arrays([ONE, ONE]),
            {"probe_rounds": -1},
            "probe_rounds = -1: must be a whole number of at least 0; 0 for no probe rounds",
        ),
        (from_arrays([ONE, ONE]), {"seed": -1}, "seed = -1: must be a whole number"),
        (from_arrays([ONE, ONE]), {"lr": 0}, "local.lr = 0: must be a number above 0"),
        (regression(0, 1), {}, "model: the targets are not class labels"),
        (
            regression(0, 1),
            {"model": torch.nn.Linear(4, 1)},
            "loss: cross-entropy needs class labels",
        ),
        (
            from_arrays([ONE, ONE]),
            {"model": torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3))},
            "model",
        ),
    ],
)
def test_bad_input_is_named(clients: Clients, settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        diagnose(clients, device="cpu", **settings)  # type: ignore[arg-type]


def test_training_that_diverges_is_named() -> None:
    with pytest.raises(
        InvalidInputError,
        match=r"local.lr = 1e\+38: fedavg diverged in the probe rounds; take a smaller one",
    ):
        diagnose(planted(Iid(), clients=3), fc.models.MLP(8), device="cpu", lr=1e38, probe_rounds=3)


def test_inputs_that_are_not_finite_are_reported() -> None:
    x = torch.tensor([[1e38, 1e38, 1e38]] * 4)
    with pytest.raises(InvalidInputError, match=r"^client 0: "):
        diagnose(from_arrays([(x, ONE[1]), ONE]), fc.models.MLP(8), device="cpu")


def test_nobody_is_judged_where_nobody_has_three_samples() -> None:
    two = (ONE[0][:2], ONE[1][:2])
    assert diagnose(from_arrays([two] * 4), device="cpu").probes == ()


def test_a_client_without_training_data_is_named() -> None:
    clients = from_arrays([ONE, ONE, ONE])
    empty = replace(clients, train=fc.data.RaggedIndex.of([clients.train[0], clients.train[1], []]))
    with pytest.raises(InvalidInputError, match=r"client 2: it has no training data; leave it out"):
        diagnose(empty, device="cpu")


def test_a_few_samples_of_two_clients_are_no_reason_to_fail() -> None:
    found = diagnose(from_arrays([ONE, ONE]), device="cpu", probe_rounds=1)
    assert found.kind == "iid"
    assert found.group is None
    assert found.sure < 0.5
    assert "too few examples to see a difference" in str(found)
