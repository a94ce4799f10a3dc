"""A result: it travels to other processes, holds no simulator, and its table is a data frame."""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.data import Clients
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError
from fedclade.training.result import FinalModels

METHODS = pytest.mark.parametrize(
    "method",
    [fc.FedAvg(), fc.Local(), fc.LGFedAvg(), fc.PerFedAvg(alpha=0.05), fc.IFCA(clusters=2)],
    ids=lambda method: method.name,
)
IN_ANOTHER_PROCESS = """
import pickle, sys
result = pickle.load(open(sys.argv[1], "rb"))
weights = {client: result.model_of(client).state_dict() for client in range(len(result.clusters))}
pickle.dump((result.summary, result.history, weights), open(sys.argv[2], "wb"))
"""


class Net(nn.Module):
    """A user's own model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.flatten(1))))


def small_run(clients: Clients, method: fc.Method, **changes: Any) -> fc.Result:
    settings: dict[str, Any] = {
        "model": fc.models.MLP(8),
        "rounds": 2,
        "clients_per_round": 0.5,
        "device": "cpu",
        **changes,
    }
    return fc.run(method, clients, **settings)


def weights_of(result: fc.Result) -> dict[int, dict[str, Tensor]]:
    return {client: result.model_of(client).state_dict() for client in range(len(result.clusters))}


def assert_equal_weights(
    first: dict[int, dict[str, Tensor]], second: dict[int, dict[str, Tensor]]
) -> None:
    assert first.keys() == second.keys()
    for client, weights in first.items():
        assert weights.keys() == second[client].keys()
        for name, value in weights.items():
            assert torch.equal(value, second[client][name]), (client, name)


@METHODS
@pytest.mark.parametrize("to_disk", [False, True], ids=["in memory", "with a folder"])
def test_a_result_is_the_same_after_pickling(
    digits: Clients, tmp_path: Path, method: fc.Method, to_disk: bool
) -> None:
    result = small_run(digits, method, out=tmp_path / "run" if to_disk else None)
    copy = pickle.loads(pickle.dumps(result))
    assert copy.summary == result.summary
    assert copy.history == result.history
    assert copy.clients == result.clients
    assert torch.equal(copy.clusters, result.clusters)
    assert_equal_weights(weights_of(copy), weights_of(result))
    if to_disk:
        loaded = fc.load(tmp_path / "run")
        assert_equal_weights(weights_of(loaded), weights_of(result))
        assert_equal_weights(weights_of(pickle.loads(pickle.dumps(loaded))), weights_of(result))


def test_another_process_reads_a_pickled_result(digits: Clients, tmp_path: Path) -> None:
    result = small_run(digits, fc.LGFedAvg())
    (tmp_path / "result.pickle").write_bytes(pickle.dumps(result))
    subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, "result.pickle", "answer.pickle"],
        cwd=tmp_path,
        check=True,
    )
    summary, history, weights = pickle.loads((tmp_path / "answer.pickle").read_bytes())
    assert summary == result.summary
    assert history == result.history
    assert_equal_weights(weights, weights_of(result))


def test_a_result_with_a_module_of_the_user_is_pickled(
    digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tests are not importable by name under --import-mode=importlib; a user's module is
    module = ModuleType("a_users_module")
    module.Net = Net  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    monkeypatch.setattr(Net, "__module__", "a_users_module")
    result = small_run(digits, fc.FedAvg(), model=Net())
    copy = pickle.loads(pickle.dumps(result))
    assert isinstance(copy.model_of(0), Net)
    assert_equal_weights(weights_of(copy), weights_of(result))


def test_a_pickled_result_still_writes_its_report(digits: Clients, tmp_path: Path) -> None:
    result = small_run(digits, fc.FedAvg())
    copy = pickle.loads(pickle.dumps(result))
    pages = [each.report(tmp_path / "page.html").read_text() for each in (result, copy)]
    first, second = (re.sub(r'"[^"]*/fedavg"', "the folder", page) for page in pages)
    assert "the folder" in first
    assert first == second


@METHODS
def test_a_result_keeps_no_simulator_alive(digits: Clients, method: fc.Method) -> None:
    result = small_run(digits, method)
    seen: set[int] = set()
    queue: list[Any] = [result]
    while queue:
        value = queue.pop()
        # classes, functions and modules lead to everything that is imported
        if id(value) in seen or isinstance(value, type | FunctionType | ModuleType):
            continue
        seen.add(id(value))
        assert not isinstance(value, Simulator | Clients), type(value)
        queue += gc.get_referents(value)
    assert isinstance(result.models, FinalModels)
    assert len(seen) > 100


def test_memory_of_the_simulator_is_freed(digits: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from fedclade.training import setup

    simulators: list[weakref.ref[Simulator]] = []

    def simulator(run: Any, state_folder: Path | None) -> Simulator:
        made = Simulator(run.clients, device="cpu")
        simulators.append(weakref.ref(made))
        return made

    monkeypatch.setattr(setup, "_simulator", simulator)
    result = small_run(digits, fc.LGFedAvg())
    gc.collect()
    assert len(simulators) == 1
    assert simulators[0]() is None
    assert isinstance(result.model_of(0), nn.Module)


def test_later_rounds_in_the_same_folder_do_not_change_an_earlier_result(
    digits: Clients, tmp_path: Path
) -> None:
    first = small_run(digits, fc.FedAvg(), out=tmp_path)
    before = weights_of(first)
    small_run(digits, fc.FedAvg(), out=tmp_path, rounds=3, resume=True)
    assert_equal_weights(weights_of(first), before)


def test_a_model_that_stays_with_its_client_is_refused_by_name() -> None:
    models = FinalModels({}, torch.tensor([-1, -1]), torch.tensor([True, False]))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        models.weights_of(0)
    assert models.weights_of(1) is None


def test_the_table_of_clients_is_a_data_frame(digits: Clients) -> None:
    pandas = pytest.importorskip("pandas")
    result = small_run(digits, fc.FedAvg())
    frame = result.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(result.clients)
    assert len(frame) == len(digits)
    assert frame["accuracy"].tolist() == result.clients["accuracy"]


def test_the_data_frame_is_made_of_the_columns(
    digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = small_run(digits, fc.FedAvg())
    pandas = ModuleType("pandas")
    pandas.DataFrame = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert result.to_frame() == result.clients


def test_without_pandas_the_message_says_what_to_install(
    digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = small_run(digits, fc.FedAvg())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'fedclade\[frame\]'"):
        result.to_frame()
