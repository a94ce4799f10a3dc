"""Runs with `privacy.epsilon`: the budget in their files, resuming, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.data import Clients
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.io.schemas import RoundRecord
from fedclade.methods import METHODS
from fedclade.privacy.budget import FILE
from fedclade.training.config import EngineConfig, LocalConfig, PrivacyConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

pytest.importorskip("dp_accounting")


def run(
    clients: Clients, method: fc.Method | None = None, rounds: int = 4, **changed: Any
) -> fc.Result:
    settings: dict[str, Any] = {
        "model": fc.models.MLP(8),
        "privacy": PrivacyConfig(epsilon=8.0),
        "rounds": rounds,
        "clients_per_round": 0.5,
        "eval_every": 2,
        "checkpoint_every": 2,
        "seed": 3,
        **changed,
    }
    return fc.run(method or fc.FedAvg(), clients, **settings)


class KilledError(Exception):
    """The process dies."""


def kill_after_three(row: RoundRecord) -> None:
    """Die in round 3, after the checkpoint of round 2."""
    if row["round"] == 3:
        raise KilledError


def models(result: fc.Result) -> list[torch.Tensor]:
    return list(result.model_of(0).state_dict().values())


def test_the_budget_is_spent_and_not_exceeded(small_digits: Clients, tmp_path: Path) -> None:
    result = run(small_digits, out=tmp_path / "run")
    privacy: dict[str, Any] = result.summary["privacy"]
    assert 7.9 < privacy["epsilon_spent"] <= 8.0
    assert privacy["releases"] == 4
    assert privacy["unit"] == "client"
    assert privacy["randomness"] == "seed (simulation)"
    spent = [row["epsilon"] for row in result.history]  # of every round
    assert len(spent) == 4
    assert 0 < spent[0] < spent[1] < spent[2] < spent[3] == privacy["epsilon_spent"]
    # Cohorts differ in size, and the report reads all files.
    assert len({row["clients"] for row in result.history}) > 1
    fc.report(tmp_path / "run", out=tmp_path / "report.html")
    assert "for a whole client" in (tmp_path / "report.html").read_text()


def test_the_same_seed_gives_the_same_bytes(small_digits: Clients) -> None:
    first, second = run(small_digits), run(small_digits)
    assert all(map(torch.equal, models(first), models(second)))
    assert not all(map(torch.equal, models(first), models(run(small_digits, seed=4))))


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.IFCA(clusters=2)], ids=lambda m: m.name)
def test_a_resumed_run_has_the_same_bytes_and_costs_once(
    method: fc.Method, small_digits: Clients, tmp_path: Path
) -> None:
    whole = run(small_digits, method, rounds=5, out=tmp_path / "whole")

    with pytest.raises(KilledError):
        run(small_digits, method, rounds=5, out=tmp_path / "part", on_round=kill_after_three)
    assert len(json.loads((tmp_path / "part" / FILE).read_text())["rounds"]) == 3
    resumed = run(small_digits, method, rounds=5, out=tmp_path / "part", resume=True)
    assert all(map(torch.equal, models(whole), models(resumed)))
    assert resumed.summary["privacy"] == whole.summary["privacy"]
    assert resumed.summary["privacy"]["releases"] == 5  # the sum of round 3 cost nothing again


def test_a_run_ends_before_its_budget_is_exceeded(small_digits: Clients, tmp_path: Path) -> None:
    privacy = PrivacyConfig(epsilon=8.0, noise_multiplier=1.0, clip=0.5)
    result = run(small_digits, rounds=50, privacy=privacy, out=tmp_path / "run")
    assert result.summary["stopped"] == "privacy_budget"
    assert result.summary["rounds"] < 50
    assert result.summary["privacy"]["epsilon_spent"] <= 8.0
    # It does not continue either.
    again = run(small_digits, rounds=50, privacy=privacy, out=tmp_path / "run", resume=True)
    assert again.summary["rounds"] == result.summary["rounds"]
    assert again.summary["privacy"] == result.summary["privacy"]


def test_more_rounds_are_another_experiment(small_digits: Clients, tmp_path: Path) -> None:
    run(small_digits, out=tmp_path / "run")
    with pytest.raises(InvalidInputError, match=r"run\.rounds was 4, now 5"):
        run(small_digits, rounds=5, out=tmp_path / "run", resume=True)


def test_signatures_are_charged_apart_and_once(small_digits: Clients) -> None:
    result = run(small_digits, fc.CladeGroups(signature_epsilon=3.0))
    privacy: dict[str, Any] = result.summary["privacy"]
    assert privacy["signature"] == {"unit": "example", "epsilon": 3.0, "delta": 1e-5}
    assert privacy["epsilon_spent"] <= 8.0
    assert [line.partition(" for ")[2] for line in privacy["in_words"]] == [
        "a whole client in training, simulated",
        "one example in the signature that made the groups",
    ]


def test_groups_cost_no_more_than_one_model(small_digits: Clients) -> None:
    """Groups are disjoint, and a client chooses one of IFCA's models."""
    spent = {
        run(small_digits, method).summary["privacy"]["epsilon_spent"]
        for method in (fc.FedAvg(), fc.Oracle(), fc.IFCA(clusters=3), fc.FedEM(components=2))
    }
    assert len(spent) == 1


def test_an_adaptive_clip_is_in_the_history(small_digits: Clients) -> None:
    clips = [row["next_clip"] for row in run(small_digits).history]
    assert len(set(clips)) == 4
    fixed = run(small_digits, privacy=PrivacyConfig(epsilon=8.0, clip=0.3))
    assert {row["next_clip"] for row in fixed.history} == {0.3}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"method": fc.CFL()}, "method cfl needs the model of each client; use clade_groups"),
        ({"method": fc.FedSEM(clusters=2)}, "method fedsem needs the model of each client"),
        ({"method": fc.FLISHC()}, "method flis_hc needs the model of each client"),
        ({"method": fc.FedGMCC()}, "method fedgmcc needs the model of each client"),
        ({"method": fc.FLT()}, "method flt sends what it groups clients by without noise"),
        ({"method": fc.Clade()}, "method clade sends what it groups clients by without noise"),
        ({"method": fc.CladeGroups()}, "use clade_groups with method.signature_epsilon"),
        ({"method": fc.CladeGroups(recluster_every=2)}, "by without noise"),
        ({"method": fc.Local()}, "method local sends nothing"),
        ({"method": fc.FedNova()}, "use scaffold or fedavg"),
        ({"method": METHODS["feddbe"](kappa=1.0)}, "set method.kappa = 0"),
        ({"method": METHODS["pfedgraph"]()}, "method pfedgraph needs the model of each client"),
        ({"method": fc.SCAFFOLD()}, "method.weights = 'clients'"),
        ({"method": fc.IFCA(num_restarts=2)}, "method.num_restarts = 1"),
        ({"method": fc.FedEM(fedrc=True)}, "method.fedrc = false"),
        ({"aggregator": "median"}, "server.aggregator = 'median'"),
        ({"personal": fc.PersonalConfig("auto")}, "personal.layer = 'auto'"),
        ({"privacy": PrivacyConfig(epsilon=1.0, delta=0.05)}, r"below 1 / 20"),
        ({"privacy": PrivacyConfig(epsilon=0.1, noise_multiplier=0.5)}, "one round costs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_have_no_noise_is_refused(
    changed: dict[str, Any], text: str, small_digits: Clients
) -> None:
    with pytest.raises(InvalidInputError) as error:
        run(small_digits, **changed)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0),
        ("epsilon", 101),
        ("delta", 0.0),
        ("delta", 1.0),
        ("clip", 0.0),
        ("clip", "median"),
        ("noise_multiplier", 0.0),
        ("max_examples", 0),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"privacy.{field}"):
        PrivacyConfig(**{field: value})  # type: ignore[arg-type]


def on_nodes(clients: Clients, out: Path, secure_sum: bool = False) -> fc.Result:
    """A run on two nodes in this process, whose randomness is secret."""
    torch.manual_seed(0)
    module = fc.models.MLP(8).build(clients.shape or (), clients.classes)
    fed = InProcessFederation(clients, NodeContext(Objective(module)))
    return TrainingRun(
        fc.FedAvg(),
        None,
        module,
        LocalConfig(),
        TrainingConfig(rounds=2, clients_per_round=1.0, eval_every=0),
        EngineConfig(),
        "cpu",
        federation=fed,
        privacy=PrivacyConfig(epsilon=8.0, clip=0.5, secure_sum=secure_sum),
    ).run(out)


def test_noise_and_secure_sums_work_together_on_nodes(
    small_digits: Clients, tmp_path: Path
) -> None:
    result = on_nodes(small_digits, tmp_path / "run", secure_sum=True)
    assert result.history[0]["failures"] == []  # the nodes of this test cannot evaluate
    assert result.summary["privacy"]["releases"] == 2
    plain = on_nodes(small_digits, tmp_path / "plain")
    # Nodes send a sum instead of ten models, in twice the bytes for each number.
    assert result.history[0]["bytes_up"] < plain.history[0]["bytes_up"] / 2


def test_real_clients_get_secret_noise(small_digits: Clients, tmp_path: Path) -> None:
    first, second = (on_nodes(small_digits, tmp_path / name) for name in ("a", "b"))
    assert first.summary["privacy"]["randomness"] == "secret of the server"
    assert "simulated" not in first.summary["privacy"]["in_words"][0]
    assert not torch.equal(models(first)[0], models(second)[0])
    secrets = [json.loads((tmp_path / n / FILE).read_text())["secret"] for n in ("a", "b")]
    assert len(set(secrets)) == 2
    assert all(len(secret) > 56 for secret in secrets)


def test_a_missing_budget_file_ends_a_resumed_run(small_digits: Clients, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        run(small_digits, out=tmp_path / "run", on_round=kill_after_three)
    (tmp_path / "run" / FILE).unlink()
    with pytest.raises(FedcladeError, match="the budget that was spent is not known"):
        run(small_digits, out=tmp_path / "run", resume=True)
