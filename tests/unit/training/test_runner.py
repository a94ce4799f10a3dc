"""A run: evaluation does not change it, models, losses and metrics of the user, and errors before
any training.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.core.rng import fold_in
from fedclade.data import Clients
from fedclade.training.client_sampling import cohort_of
from fedclade.training.config import EngineConfig
from fedclade.training.runner import TrainingRun

METHODS = pytest.mark.parametrize(
    "method",
    [
        fc.FedAvg(),
        fc.Local(),
        fc.SCAFFOLD(),
        fc.LGFedAvg(),
        fc.PerFedAvg(alpha=0.05),
        fc.IFCA(clusters=2),
    ],
    ids=lambda method: method.name,
)


class Net(nn.Module):
    """A user's own model."""

    def __init__(self, outputs: int = 10, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


def weights_of(result: fc.Result) -> list[Tensor]:
    return [
        weight
        for client in range(len(result.clusters))
        for weight in result.model_of(client).state_dict().values()
    ]


def same_models(first: fc.Result, second: fc.Result) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(weights_of(first), weights_of(second), strict=True)
    )


def small_run(clients: Clients, method: fc.Method | None = None, **settings: Any) -> fc.Result:
    defaults = {"model": fc.models.MLP(8), "rounds": 4, "clients_per_round": 0.3, "lr": 0.1}
    return fc.run(method or fc.FedAvg(), clients, **{**defaults, **settings})


def tuned(epochs: int, every: int = 0) -> fc.PersonalConfig:
    return fc.PersonalConfig("finetune", epochs, every)


# --- rounds, steps, evaluation, fine-tuning


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.FedNova(), fc.SCAFFOLD()])
def test_steps_take_the_place_of_epochs(method: fc.Method, digits: Clients) -> None:
    # With one batch per epoch, three steps are three epochs.
    settings: dict[str, Any] = {"batch_size": 200, "personal": tuned(1)}
    by_steps = small_run(digits, method, steps=3, **settings)
    by_epochs = small_run(digits, method, epochs=3, **settings)
    assert same_models(by_steps, by_epochs)
    assert by_steps.summary["accuracy"] == by_epochs.summary["accuracy"]


def test_steps_and_epochs_exclude_each_other() -> None:
    with pytest.raises(fc.InvalidInputError) as error:
        fc.LocalConfig(epochs=2, steps=10)
    assert error.value.field == "local.epochs"


@METHODS
def test_evaluation_and_fine_tuning_do_not_change_the_models(
    method: fc.Method, digits: Clients
) -> None:
    plain = small_run(digits, method, eval_every=0)
    for changed in (
        {"eval_every": 1},
        {"eval_every": 3},
        {"eval_every": 10},
    ):
        other = small_run(digits, method, **changed)
        assert same_models(plain, other), changed
        assert other.summary["accuracy"] == plain.summary["accuracy"]
    layered = small_run(digits, method, eval_every=1, personal=tuned(2, every=1))
    assert layered.summary["accuracy_shared"] == pytest.approx(plain.summary["accuracy"])


@pytest.mark.parametrize(
    ("every", "evaluated"), [(0, [4]), (1, [1, 2, 3, 4]), (3, [3, 4]), (10, [4])]
)
def test_evaluation_is_every_n_rounds_and_always_at_the_end(
    every: int, evaluated: list[int], digits: Clients
) -> None:
    result = small_run(digits, eval_every=every)
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    assert [row["round"] for row in result.history if "accuracy" in row] == evaluated
    last = result.history[-1]
    assert {name: result.summary[name] for name in ("accuracy", "loss", "train_accuracy")} == {
        name: last[name] for name in ("accuracy", "loss", "train_accuracy")
    }


def test_fine_tuning_may_be_rarer_than_evaluation(digits: Clients) -> None:
    always, rarely, last = (
        small_run(digits, fc.FedAvg(), rounds=5, eval_every=1, personal=tuned(1, every=every))
        for every in (1, 2, 0)
    )
    assert [row["round"] for row in rarely.history if "accuracy_shared" in row] == [2, 4, 5]
    assert [row["round"] for row in last.history if "accuracy_shared" in row] == [5]
    assert rarely.summary["accuracy"] == always.summary["accuracy"] == last.summary["accuracy"]
    for rare, full in zip(rarely.history, always.history, strict=True):
        is_measured = "accuracy_shared" in rare
        assert rare["accuracy"] == full["accuracy" if is_measured else "accuracy_shared"]


@METHODS
def test_fine_tuning_is_local_sgd_from_the_clients_model_and_has_its_own_keys(
    method: fc.Method, digits: Clients
) -> None:
    # A batch holds all of a client's data, so that the order of samples is of no account.
    settings: dict[str, Any] = {"batch_size": 200, "momentum": 0.5}
    settings |= {"schedule": "exponential", "decay": 0.5}
    plain = small_run(digits, method, **settings)
    result = small_run(digits, method, **settings, personal=tuned(3))
    assert "accuracy_shared" not in plain.summary
    for name in ("accuracy", "loss"):
        assert result.clients[f"{name}_shared"] == plain.clients[name]

    losses, accuracies = [], []
    for client in range(len(digits)):
        model, rows = plain.model_of(client), digits.train[client]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * 0.5**3, momentum=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(digits.x[rows]), digits.y[rows]).backward()
            optimizer.step()
        rows = digits.test[int(digits.test_part_id[client])]
        with torch.no_grad():
            outputs = model(digits.x_test[rows])
        losses.append(float(F.cross_entropy(outputs, digits.y_test[rows])))
        served = result.model_of(client).state_dict()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(served[name], value, atol=1e-5, rtol=0)
        accuracies.append(100 * float((outputs.argmax(1) == digits.y_test[rows]).double().mean()))
    assert result.clients["loss"] == pytest.approx(losses, abs=1e-4)
    assert result.clients["accuracy"] == pytest.approx(accuracies, abs=1e-4)
    assert result.summary["accuracy"] == pytest.approx(sum(accuracies) / len(accuracies), abs=1e-4)


def test_a_client_of_per_fedavg_takes_a_step_from_the_shared_model(
    digits: Clients, tmp_path: Path
) -> None:
    result = small_run(digits, fc.PerFedAvg(alpha=0.3), out=tmp_path / "run")
    broadcast = small_run(
        digits, fc.PerFedAvg(alpha=0.0)
    )  # not the same training, but the same form
    assert len(
        {tuple(result.model_of(client).fc2.bias.tolist()) for client in range(len(digits))}
    ) == len(digits)
    assert (
        len({tuple(broadcast.model_of(client).fc2.bias.tolist()) for client in range(len(digits))})
        == 1
    )
    stored = fc.load(tmp_path / "run")
    for client in (0, 7):
        model, rows = result.model_of(client), digits.test[int(digits.test_part_id[client])]
        right = (model(digits.x_test[rows]).argmax(1) == digits.y_test[rows]).double().mean()
        assert result.clients["accuracy"][client] == pytest.approx(100 * float(right))
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.parameters(), stored.model_of(client).parameters(), strict=True)
        )


def test_a_client_that_was_never_drawn_has_a_cluster_in_the_result(digits: Clients) -> None:
    result = small_run(digits, fc.IFCA(clusters=3), rounds=1, clients_per_round=2)
    assert bool((result.clusters >= 0).all())
    assert result.summary["clients_without_model"] == 0


def test_probe_data_of_another_shape_are_refused(digits: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match=r"\(3,\).*1, 8, 8") as caught:
        small_run(digits, fc.FLISDC(probe=torch.zeros(5, 3)))
    assert caught.value.field == "probe"


def test_one_client_with_full_batches_is_plain_sgd_with_momentum_decay_and_a_falling_rate() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 5, generator=generator), torch.arange(12) % 3
    own = nn.Linear(5, 3)
    expected = copy.deepcopy(own)
    for number in range(4):
        # Momentum restarts every round: a client keeps no optimizer between rounds.
        optimizer = torch.optim.SGD(
            expected.parameters(), lr=0.3 * 0.5**number, momentum=0.9, weight_decay=0.02
        )
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(expected(x), y).backward()
            optimizer.step()
    result = fc.run(
        *(fc.FedAvg(), fc.data.from_arrays([(x, y)]), own),
        rounds=4,
        clients_per_round=1,
        lr=0.3,
        batch_size=12,
        epochs=2,
        momentum=0.9,
        weight_decay=0.02,
        schedule="exponential",
        decay=0.5,
    )
    got = result.model_of(0)
    assert torch.allclose(got.weight, expected.weight, atol=1e-6)
    assert torch.allclose(got.bias, expected.bias, atol=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"momentum": 0.9},
        {"schedule": "exponential", "decay": 0.5},
        {"weight_decay": 0.1},
        {"epochs": 2},
        {"batch_size": 3},
    ],
)
def test_each_local_setting_changes_the_models(changed: dict[str, Any], digits: Clients) -> None:
    assert not same_models(small_run(digits), small_run(digits, **changed))


@METHODS
def test_one_seed_gives_the_same_models_and_another_seed_others(
    method: fc.Method, digits: Clients
) -> None:
    first = small_run(digits, method, seed=3)
    assert same_models(first, small_run(digits, method, seed=3, chunk=1))
    assert same_models(first, small_run(digits, method, seed=3, chunk=7))
    assert not same_models(first, small_run(digits, method, seed=4))


def test_a_run_does_not_change_the_random_state_and_threads_of_torch(digits: Clients) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    small_run(digits, model=fc.models.MLP(8, dropout=0.5))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_on_round_is_called_with_each_row_of_the_history_in_turn(digits: Clients) -> None:
    rows: list[dict[str, Any]] = []
    result = small_run(digits, on_round=rows.append)
    assert rows == result.history
    assert [row["round"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("clients", "size"),
    [(20, 5), (20, 20), (10_001, 1), (10_001, 100), (30_000, 15_000), (30_000, 15_001)],
)
def test_a_cohort_has_its_size_and_no_client_twice(clients: int, size: int) -> None:
    for key in range(5):
        ids = cohort_of(fold_in(key, "cohort"), clients, size)
        assert ids.shape == (size,)
        assert bool((ids.diff() > 0).all())
        assert 0 <= int(ids[0]) <= int(ids[-1]) < clients


def test_all_of_many_clients_are_drawn_equally_often() -> None:
    counts = torch.zeros(12_000)
    for key in range(300):
        counts[cohort_of(fold_in(key, "cohort"), 12_000, 1_200)] += 1
    assert float(counts.var()) == pytest.approx(
        300 * 0.1 * 0.9, rel=0.1
    )  # as of 300 draws with one in ten


def test_the_cohorts_of_different_rounds_differ_and_together_contain_all_clients() -> None:
    cohorts = [cohort_of(key, clients=20, size=5) for key in range(60)]
    for cohort in cohorts:
        assert len(cohort.unique()) == 5
        assert cohort.tolist() == cohort.sort().values.tolist()
    assert len({tuple(cohort.tolist()) for cohort in cohorts}) > 50
    assert len(torch.cat(cohorts).unique()) == 20


# --- evaluation


def test_clients_without_a_test_part_are_trained_and_counted_but_not_evaluated(
    ragged: Clients, tmp_path: Path
) -> None:
    result = fc.run(
        fc.FedAvg(), ragged, fc.models.MLP(4), rounds=2, clients_per_round=1.0, out=tmp_path / "run"
    )
    summary = result.summary
    assert {
        summary[name]
        for name in ("accuracy", "accuracy_stderr", "accuracy_variance", "accuracy_worst10", "loss")
    } == {None}
    assert summary["clients_without_test"] == len(ragged)
    assert summary["train_accuracy"] > 0
    assert result.clients["accuracy"] == [None] * len(ragged)
    assert fc.load(tmp_path / "run").clients == result.clients
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_the_mean_is_over_the_clients_with_a_test_part() -> None:
    x, y = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
    clients = fc.data.from_arrays([(x, y), (x, y, x[:4], y[:4]), (x, y)])
    result = fc.run(fc.FedAvg(), clients, fc.models.MLP(4), rounds=1, clients_per_round=1.0)
    assert [value is None for value in result.clients["accuracy"]] == [True, False, True]
    assert result.summary["accuracy"] == result.clients["accuracy"][1]
    assert result.summary["clients_without_test"] == 2


@pytest.fixture
def regression() -> Clients:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 30, 6, generator=generator)
    y = x.sum(-1) + 0.1 * torch.randn(4, 30, generator=generator)
    return fc.data.from_arrays([(x[i, :20], y[i, :20], x[i, 20:], y[i, 20:]) for i in range(4)])


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y).abs()


def within_one(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs[:, 0] - y).abs() < 1).float()


@METHODS
def test_regression_with_a_loss_and_a_metric_of_the_user(
    method: fc.Method, regression: Clients, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    settings: dict[str, Any] = {
        "clients_per_round": 1.0,
        "lr": 0.05,
        "loss": absolute,
        "metrics": {"within_one": within_one},
    }
    before = fc.run(method, regression, model, rounds=1, **{**settings, "lr": 1e-9})
    result = fc.run(method, regression, model, rounds=60, out=tmp_path / "run", **settings)
    assert result.summary["loss"] < before.summary["loss"] / 2
    assert result.summary["accuracy"] is None
    for client in range(4):
        own = result.model_of(client)
        rows, test_rows = regression.train[client], regression.test[client]
        with torch.no_grad():
            train, test = own(regression.x[rows]), own(regression.x_test[test_rows])
        hand = {
            "loss": absolute(test, regression.y_test[test_rows]),
            "train_loss": absolute(train, regression.y[rows]),
            "within_one": within_one(test, regression.y_test[test_rows]),
            "train_within_one": within_one(train, regression.y[rows]),
        }
        for name, values in hand.items():
            assert result.clients[name][client] == pytest.approx(float(values.mean()), abs=1e-5), (
                name
            )
    for name in ("loss", "train_loss", "within_one", "train_within_one"):
        assert result.summary[name] == pytest.approx(sum(result.clients[name]) / 4)
        assert result.history[-1][name] == result.summary[name]
    assert fc.load(tmp_path / "run", model=model).clients == result.clients


def test_a_loss_of_the_user_is_minimized(digits: Clients) -> None:
    def doubled(outputs: Tensor, y: Tensor) -> Tensor:
        return 2 * F.cross_entropy(outputs, y, reduction="none")

    default = small_run(digits, lr=0.2)
    assert same_models(default, small_run(digits, lr=0.2, loss=fc.cross_entropy))
    own = small_run(digits, lr=0.1, loss=doubled)
    for params, theirs in zip(weights_of(own), weights_of(default), strict=True):
        assert torch.allclose(params, theirs, atol=1e-5)
    assert own.summary["loss"] == pytest.approx(2 * default.summary["loss"], rel=1e-4)
    assert own.summary["accuracy"] == default.summary["accuracy"]


# --- models


@METHODS
def test_a_returned_model_is_a_plain_module_in_evaluation_mode(
    method: fc.Method, digits: Clients
) -> None:
    spec = fc.models.MLP(8, dropout=0.5)
    model = small_run(digits, method, model=spec).model_of(3)
    built = spec.build(digits.shape, 10)
    assert type(model) is type(built)
    assert [type(layer) for layer in model.modules()] == [type(layer) for layer in built.modules()]
    assert not model.training
    assert all(
        weight.device.type == "cpu" and weight.requires_grad for weight in model.parameters()
    )
    assert torch.equal(model(digits.x_test[:5]), model(digits.x_test[:5]))  # dropout is off
    F.cross_entropy(model(digits.x_test[:5]), digits.y_test[:5]).backward()  # it can be trained on


def test_two_clients_models_are_two_objects(digits: Clients) -> None:
    result = small_run(digits)
    first, second = result.model_of(0), result.model_of(0)
    with torch.no_grad():
        for weight in first.parameters():
            weight.zero_()
    assert all(float(weight.detach().abs().sum()) > 0 for weight in second.parameters())
    assert not same_models(small_run(digits, rounds=1), result)


def test_training_starts_from_the_weights_of_a_module_and_does_not_change_it(
    digits: Clients,
) -> None:
    own = Net()
    before = copy.deepcopy(own.state_dict())
    result = small_run(digits, fc.Local(), model=own, rounds=1, clients_per_round=1)
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    assert own.training
    assert result.summary["model"] == "Net"
    models = [result.model_of(client) for client in range(20)]
    assert all(isinstance(model, Net) for model in models)
    unchanged = [
        all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for model in models
    ]
    assert unchanged.count(False) == 1  # one client trained; the others have the first weights


def test_the_initial_weights_of_a_spec_depend_only_on_the_seed(digits: Clients) -> None:
    torch.manual_seed(1)
    first = small_run(digits, fc.Local(), clients_per_round=1, rounds=1, seed=5)
    torch.manual_seed(2)
    assert same_models(first, small_run(digits, fc.Local(), clients_per_round=1, rounds=1, seed=5))


# --- errors before any training


def refuse(*_: object) -> NoReturn:
    raise AssertionError("a round was run")


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"model": Net(outputs=5)}, ["model", "5", "9", "10"]),
        ({"model": nn.Linear(64, 10)}, ["model", "(1, 8, 8)"]),
        ({"model": Net}, ["model", "fc.models.MLP(200)", "nn.Module"]),
        ({"model": "mlp"}, ["model = 'mlp'", "fc.models.MLP(200)"]),
        ({"model": nn.Flatten()}, ["model", "trainable"]),
        ({"model": fc.models.LeNet5()}, ["", "LeNet5", "(1, 8, 8)", "MLP"]),
        ({"method": fc.FedAvg}, ["method", "fc.FedAvg()"]),
        ({"method": "fedavg"}, ["method", "fc.FedAvg()"]),
        (
            {"loss": lambda outputs, y: nn.functional.cross_entropy(outputs, y)},
            ["loss", "one value for each example", "reduction='none'"],
        ),
        ({"clients_per_round": 21}, ["run.clients_per_round = 21", "20 clients"]),
        ({"clients_per_round": 0.0}, ["run.clients_per_round = 0.0"]),
        ({"rounds": 0}, ["run.rounds = 0"]),
        ({"rounds": 2.0}, ["run.rounds = 2.0"]),
        ({"lr": 0}, ["local.lr = 0"]),
        ({"lr": math.nan}, ["local.lr = nan"]),
        ({"lr": "0.1"}, ["local.lr = '0.1'"]),
        ({"seed": -1}, ["run.seed = -1"]),
        ({"batch_size": 0}, ["local.batch_size = 0"]),
        ({"momentum": 1.0}, ["local.momentum = 1.0"]),
        ({"chunk": 0}, ["engine.chunk = 0"]),
        ({"precision": "half"}, ["engine.precision = 'half'", "tf32"]),
        ({"device": "gpu"}, ["device = 'gpu'", "'cpu'"]),
    ],
)
def test_an_invalid_run_is_an_error_before_any_training(
    changed: dict[str, Any], parts: list[str], digits: Clients
) -> None:
    settings = {"method": fc.FedAvg(), "model": fc.models.MLP(8), "on_round": refuse, **changed}
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.run(clients=digits, rounds=settings.pop("rounds", 1), **settings)
    assert str(caught.value).startswith(parts[0])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(digits: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match=r"'cuda'.*'cpu' or 'auto'"):
        small_run(digits, device="cuda")


def test_float_targets_need_a_module_and_a_loss(regression: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match=r"^model: .*nn\.Module"):
        fc.run(fc.FedAvg(), regression, fc.models.MLP(4), rounds=1)
    with pytest.raises(fc.InvalidInputError, match=r"^loss: "):
        fc.run(fc.FedAvg(), regression, nn.Linear(6, 1), rounds=1)


def test_the_class_of_a_model_is_an_error(digits: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match=r"^model = "):
        small_run(digits, model=fc.models.MLP)


def test_the_error_of_a_list_of_pairs_in_place_of_clients_names_from_arrays(
    digits: Clients,
) -> None:
    with pytest.raises(fc.InvalidInputError, match="from_arrays"):
        small_run([(digits.x, digits.y)])  # type: ignore[arg-type]


def test_a_torch_device_is_accepted(digits: Clients) -> None:
    small_run(digits, device=torch.device("cpu"))


def test_numbers_of_numpy_are_numbers(digits: Clients) -> None:
    small_run(digits, rounds=np.int64(1), seed=np.int64(3), lr=np.float32(0.1))


def test_a_metric_that_returns_a_mean_is_an_error(digits: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match="mean_loss"):
        small_run(digits, metrics={"mean_loss": lambda outputs, y: F.cross_entropy(outputs, y)})


@pytest.mark.parametrize("name", ["examples", "loss", "clusters", "seconds", "client"])
def test_a_metric_with_a_reserved_name_is_an_error(name: str, digits: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match=name):
        small_run(digits, metrics={name: lambda outputs, y: outputs[:, 0]})


# --- runs that diverge or fail


def strict_json(text: str) -> Any:
    def no_constant(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=no_constant)


def test_diverged_weights_are_rejected_and_counted_and_do_not_change_the_model(
    digits: Clients, tmp_path: Path
) -> None:
    result = small_run(digits, lr=1e38, clients_per_round=5, rounds=2, out=tmp_path / "run")
    assert result.summary["failures"] == 10
    assert len(result.history[0]["failures"]) == 5
    assert result.history[0]["failures"][0].keys() == {"client", "reason", "rejected"}
    assert "not finite" in result.history[0]["failures"][0]["reason"]
    first = small_run(digits, lr=1e-30, rounds=1)
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(weights_of(result), weights_of(first), strict=True)
    )
    for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines():
        strict_json(line)


def test_a_client_that_trains_alone_keeps_its_last_finite_model(digits: Clients) -> None:
    result = small_run(digits, fc.Local(), lr=1e38, clients_per_round=5, rounds=1)
    assert all(bool(weight.isfinite().all()) for weight in weights_of(result))
    assert result.summary["failures"] == 5


def test_files_are_valid_json_even_if_a_number_is_infinite(digits: Clients, tmp_path: Path) -> None:
    small_run(
        digits,
        metrics={"endless": lambda outputs, y: outputs[:, 0].abs() + math.inf},
        out=tmp_path / "run",
    )
    strict_json((tmp_path / "run" / "summary.json").read_text())


def test_a_refused_run_leaves_the_client_state_of_the_run_in_its_folder(
    digits: Clients, tmp_path: Path
) -> None:
    """The other run has begun, and its clients' state is on disk while it lasts."""
    (tmp_path / "client_state").mkdir()
    rows = tmp_path / "client_state" / "rows"
    for path in (tmp_path / "experiment.toml", rows):
        path.write_text("live")
    engine = EngineConfig(client_state="disk")
    run = TrainingRun(
        fc.SCAFFOLD(), digits, fc.models.MLP(8), fc.LocalConfig(), fc.TrainingConfig(), engine
    )
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "out"):
        run.run(tmp_path)
    assert rows.read_text() == "live"


def test_without_out_nothing_is_written(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert small_run(digits).folder is None
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_on_round_reaches_the_caller(digits: Clients) -> None:
    def fail(row: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        small_run(digits, on_round=fail)
