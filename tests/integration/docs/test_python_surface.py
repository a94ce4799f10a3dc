"""The Python lines of the design and of the README, as they stand there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedclade as fc

# "The surface people meet" in the design, with FedAvg until FLT is there, and without the report.
FIRST = """
import fedclade as fc
scheme = fc.data.LabelClusters(clusters=5, classes=2)
clients = fc.data.partition(fc.data.load("digits"), scheme, clients=50, seed=0)
result = fc.run(fc.FedAvg(), clients, model=fc.models.MLP(200), rounds=30)
result.summary; result.history; result.clusters; result.model_of(7)
"""
OWN_DATA = """
clients = fc.data.from_arrays([(x0, y0), (x1, y1)])
clients.groups; clients.sizes; clients.describe()
fc.run(method, clients, model, rounds=rounds, clients_per_round=0.2, lr=0.1, batch_size=10,
       epochs=1, momentum=0.0, loss=None, seed=0, eval_every=10, device="auto", chunk=None,
       out=DIR, resume=False, on_round=None)
model7 = fc.load(DIR).model_of(1)
"""


def test_the_first_lines_of_the_design_work_as_written() -> None:
    names: dict[str, Any] = {}
    exec(FIRST, names)
    clients, result = names["clients"], names["result"]
    assert len(clients) == 50
    assert clients.groups.unique().tolist() == [0, 1, 2, 3, 4]
    assert result.summary["clients"] == 50
    assert result.summary["rounds"] == len(result.history) == 30
    assert result.clusters.shape == (50,)
    assert result.clusters.dtype in (torch.int64, torch.int32)
    model = result.model_of(7)
    assert isinstance(model, nn.Module)
    assert model(clients.x_test[:3]).shape == (3, 10)


def test_the_lines_on_ones_own_data_work_as_written(tmp_path: Path) -> None:
    x, y = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    names = {
        "fc": fc,
        "x0": x[0],
        "y0": y,
        "x1": x[1].numpy(),
        "y1": y.numpy(),
        "method": fc.FedAvg(),
        "rounds": 2,
    }
    names |= {"model": fc.models.MLP(5), "DIR": tmp_path / "run"}
    exec(OWN_DATA, names)
    clients: Any = names["clients"]
    assert clients.groups is None
    assert clients.sizes.tolist() == [9, 9]
    assert "9" in str(clients.describe())
    loaded: Any = names["model7"]
    assert not loaded.training
    assert loaded(x[1]).shape == (9, 3)


def test_groups_are_none_where_unknown_and_zeros_for_iid() -> None:
    data = fc.data.load("digits")
    assert fc.data.partition(data, fc.data.Iid(), clients=4).groups.tolist() == [0, 0, 0, 0]  # type: ignore[union-attr]
    assert fc.data.partition(data, fc.data.Dirichlet(0.5), clients=4).groups is None


def test_everything_that_is_exported_is_there_and_documented() -> None:
    for name in fc.__all__:
        assert getattr(fc, name) is not None
        if name not in ("data", "models"):
            assert (getattr(fc, name).__doc__ or "").strip(), f"fc.{name} has no docstring"
    assert fc.__version__


@pytest.mark.parametrize(
    "error", [fc.InvalidInputError("x"), fc.VectorizationError("x"), fc.WriteError("x")]
)
def test_every_error_of_ours_can_be_caught_under_one_name_and_as_pythons_own(
    error: Exception,
) -> None:
    assert isinstance(error, fc.FedcladeError)
    assert isinstance(error, ValueError | RuntimeError | OSError)


def test_a_result_is_shown_in_a_few_lines_without_its_models(digits: fc.data.Clients) -> None:
    result = fc.run(fc.FedAvg(), digits, fc.models.MLP(4), rounds=1)
    assert "Linear" not in repr(result)
    assert len(repr(result)) < 5000


def test_readme_lines_on_ones_own_module_work_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)

    class MyNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 4, generator=generator), torch.arange(count) % 2

    (x0, y0), (x0_test, y0_test), (x1, y1), (x1_test, y1_test) = draw(8), draw(4), draw(6), draw(4)
    clients = fc.data.from_arrays([(x0, y0, x0_test, y0_test), (x1, y1, x1_test, y1_test)])
    result = fc.run(fc.FedAvg(), clients, model=MyNet(), rounds=30, lr=0.05, out="runs/mine")
    loaded = fc.load("runs/mine", model=MyNet()).model_of(0)
    assert torch.equal(loaded(x0_test), result.model_of(0)(x0_test))
