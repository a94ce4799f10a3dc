"""Absent clients, malformed replies and flipped labels on digits; benchmarks/faulty_clients.py
measures the same on MNIST.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fedclade as fc
from fedclade.data import Clients
from fedclade.methods import METHODS

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
import faulty_clients


@pytest.fixture(autouse=True)
def longer_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits have only about fifty samples per client."""
    monkeypatch.setattr(faulty_clients, "LOCAL", replace(faulty_clients.LOCAL, epochs=5))


def digits(groups: int) -> Clients:
    return fc.data.partition(
        fc.data.load("digits"), fc.data.Rotation(clusters=groups), clients=20, seed=0, probe=100
    )


@pytest.mark.filterwarnings("ignore:manifold")
@pytest.mark.parametrize("name", sorted(set(METHODS) - {"fedbn"}))  # the model has no BatchNorm
def test_absences_and_malformed_replies_cost_less_than_two_points(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        faulty_clients.METHODS, "flt", lambda: fc.FLT(manifold="pca")
    )  # UMAP compiles for long
    row = faulty_clients.malformed(
        digits(2), name, 2, seed=0, rounds=6 if name == "fedgmcc" else 20
    )
    assert row["rejected"] == row["sent"]
    assert row["rejected_honest"] == 0
    if name != "local":  # where nothing is sent
        assert row["sent"] >= 6
        assert row["blocked"] == 2
    assert abs(row["faulty"] - row["clean"]) < 2


def test_every_kind_of_malformed_reply_is_reported_with_its_reason() -> None:
    bad = list(range(len(faulty_clients.KINDS)))
    result = faulty_clients.run(fc.FedAvg(), digits(1), 0, 8, faulty_clients.InjectedFaults(bad))
    reasons = {
        (failure["client"], failure["reason"].split(":")[0])
        for row in result.history
        for failure in row["failures"]
        if failure["rejected"]
    }
    assert reasons == {
        (0, "'fc1.weight' is not finite"),
        (1, "'fc1.weight' is not finite"),
        (2, "shape of 'fc1.weight'"),
        (3, "'fc1.weight' has a number of size 1e+30, more than 1e+12"),
        (4, "names"),  # FedAvg needs no counts
    }


@pytest.mark.parametrize("name", ["cfl", "clade"])
def test_label_flippers_form_a_separate_group(name: str) -> None:
    row = faulty_clients.flippers(digits(1), name, seed=0, rounds=20)
    assert row["mixed"] == 0
    assert row["clusters"] == 2
    assert abs(row["with"] - row["without"]) < 1


def test_without_clustering_flippers_share_the_model() -> None:
    assert faulty_clients.flippers(digits(1), "fedavg", seed=0, rounds=2)["mixed"] == 4
