"""Export: weights, model cards, the code that loads them, ONNX compared with torch, and errors."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fedclade as fc
from fedclade.analysis.export import export, onnx
from fedclade.analysis.export.onnx import OnnxWriter, samples_for
from fedclade.cli import main
from fedclade.data.federated_dataset import RaggedIndex
from fedclade.errors import InvalidInputError

has_onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(
    not has_onnx, reason="onnx, onnxscript or onnxruntime is not installed (extra: onnx)"
)
Images = fc.data.load("digits").x_test[:7].float()


def federation(**more: Any) -> fc.data.Clients:
    return fc.data.partition(
        fc.data.load("digits"),
        fc.data.LabelClusters(clusters=2, classes=2),
        clients=6,
        seed=0,
        **more,
    )


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    fc.run(
        fc.CladeGroups(),
        federation(),
        model=fc.models.MLP(16),
        rounds=3,
        lr=0.1,
        clients_per_round=1.0,
        out=folder,
    )
    return folder


def test_each_group_has_exactly_the_weights_of_its_clients(grouped: Path, tmp_path: Path) -> None:
    done = export(grouped, tmp_path / "out", ["safetensors"])
    result = fc.load(grouped)
    assert done.problems == []
    assert sorted(card["name"] for card in done.cards) == ["group-0", "group-1"]
    for card in done.cards:
        assert (
            card["clients"]
            == (result.clusters == int(card["name"].removeprefix("group-")))
            .nonzero()
            .flatten()
            .tolist()
        )
        weights = load_file(tmp_path / "out" / card["name"] / "model.safetensors")
        for client in card["clients"]:
            expected = result.model_of(client).state_dict()
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
    models = json.loads((tmp_path / "out" / "models.json").read_text())
    assert {int(client) for client in models["model_of_client"]} == set(range(6))
    assert models["model_of_client"]["0"] == f"group-{int(result.clusters[0])}"


def test_the_card_has_clients_data_and_accuracy(grouped: Path, tmp_path: Path) -> None:
    done = export(grouped, tmp_path / "out", ["safetensors"])
    result, clients = fc.load(grouped), federation()
    for card in done.cards:
        assert json.loads((tmp_path / "out" / card["name"] / "card.json").read_text()) == card
        ids = card["clients"]
        assert (card["method"], card["dataset"], card["seed"], card["rounds"]) == (
            "clade_groups",
            "digits",
            0,
            3,
        )
        assert card["training_examples"] == int(clients.sizes[ids].sum())
        accuracy = [result.clients["accuracy"][client] for client in ids]
        assert card["test"]["accuracy"] == {
            "mean": pytest.approx(np.mean(accuracy)),
            "worst_client": min(accuracy),
            "clients": len(ids),
        }
        labels = torch.cat([clients.y[clients.train[client]] for client in ids])
        counts = labels.bincount(minlength=10).tolist()
        assert card["labels"]["counts"] == counts
        assert card["labels"]["shares"] == [
            pytest.approx(count / len(labels), abs=1e-4) for count in counts
        ]
        assert card["settings"]["local"]["lr"] == 0.1
        assert card["model"] == {
            "name": "mlp",
            "input_shape": [1, 8, 8],
            "input_dtype": "float32",
            "classes": 10,
            "parameters": 1210,
        }
        text = (tmp_path / "out" / card["name"] / "card.md").read_text()
        assert f"# {card['name']}: the model of {len(ids)} of 6 clients" in text
        assert (
            f"| accuracy | mean {np.mean(accuracy):.2f} %, worst client {min(accuracy):.2f} %,"
            f" {len(ids)} clients" in text
        )
        assert f"| clients | {', '.join(map(str, ids))} |" in text
        first = int(np.argmax(counts))
        assert f"| label distribution | class {first}: {counts[first] / len(labels):.1%}, " in text


@pytest.mark.parametrize("method", [fc.CladeGroups(), fc.Local(), fc.FedAvg()])
def test_the_card_counts_a_test_sample_once_however_many_clients_share_it(
    method: fc.Method, tmp_path: Path
) -> None:
    parts = [[0, 1, 2, 3], [2, 3, 4]]  # two samples are in both
    clients = dataclasses.replace(
        federation(),
        test=RaggedIndex.of(parts),
        test_part_id=torch.tensor([0, 0, 0, 1, 1, -1]),
        test_sample_id=torch.arange(len(federation().y_test)),
    )
    fc.run(method, clients, fc.models.MLP(4), rounds=1, out=tmp_path / "run")
    for card in export(tmp_path / "run", tmp_path / "out", ["safetensors"]).cards:
        used = [parts[clients.test_part_id[i]] for i in card["clients"] if i != 5]
        assert card["test"].get("samples", 0) == len(set[int]().union(*used))


def test_the_card_has_the_test_sizes_of_clients_that_were_not_in_this_process(
    grouped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedclade.analysis.export.finished_run import FinishedRun

    run = FinishedRun(grouped, None)
    assert run.features is not None
    run.features = dataclasses.replace(run.features, test_samples=None)
    run.columns["test_examples"] = [10 * client for client in range(6)]
    monkeypatch.setattr("fedclade.analysis.export.FinishedRun", lambda folder, model: run)
    for card in export(grouped, tmp_path / "out", ["safetensors"]).cards:
        assert card["test"]["samples"] == 10 * sum(card["clients"])
        assert (
            f"{card['test']['samples']} test samples"
            in (tmp_path / "out" / card["name"] / "card.md").read_text()
        )


def snippets(card: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card.read_text(), re.DOTALL)


def test_the_snippet_on_the_card_loads_the_model(
    grouped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, _ = export(grouped, tmp_path / "out", ["safetensors"]).cards
    monkeypatch.chdir(tmp_path / "out" / card["name"])
    (snippet,) = snippets(Path("card.md"))
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert torch.equal(
        names["model"](Images), fc.load(grouped).model_of(card["clients"][0])(Images)
    )


@needs_onnx
def test_onnx_equals_torch_and_its_snippet_runs(
    grouped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    done = export(grouped, tmp_path / "out")
    assert done.problems == []
    for card in done.cards:
        assert card["files"] == {"safetensors": "model.safetensors", "onnx": "model.onnx"}
        assert "5 samples" in card["onnx"]
        monkeypatch.chdir(tmp_path / "out" / card["name"])
        (outputs,) = onnxruntime.InferenceSession("model.onnx").run(None, {"x": Images.numpy()})
        expected = fc.load(grouped).model_of(card["clients"][0])(Images).detach().numpy()
        assert np.abs(expected - outputs).max() < 1e-5
        names: dict[str, Any] = {}
        exec(snippets(Path("card.md"))[1], names)
        assert names["outputs"].shape == (1, 10)


@needs_onnx
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (fc.models.SmallCNN(), (1, 28, 28)),
        (fc.models.Logistic(), (12,)),
        pytest.param(fc.models.LstmLanguageModel(8, 16), (12,), marks=pytest.mark.slow),
        pytest.param(fc.models.ResNet9(), (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_one_graph_is_used_for_the_weights_of_every_model(
    spec: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    import onnxruntime

    modules = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        modules.append(spec.build(shape, 10).eval())
    writer = OnnxWriter(shape)
    x = samples_for(modules[0], shape, 3)
    for number, module in enumerate(modules):
        writer.write(module, tmp_path / f"{number}.onnx")
        (outputs,) = onnxruntime.InferenceSession(tmp_path / f"{number}.onnx").run(
            None, {"x": x.numpy()}
        )
        assert np.abs(module(x).detach().numpy() - outputs).max() < 1e-5


@needs_onnx
def test_a_model_that_onnx_does_not_support_is_written_as_safetensors(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x.flatten(1))
            return torch.special.i0e(y)  # ONNX has no such operator

    fc.run(fc.FedAvg(), federation(), model=Odd(), rounds=1, out=tmp_path / "run")
    done = export(tmp_path / "run", model=Odd())
    (card,) = done.cards
    assert card["files"] == {"safetensors": "model.safetensors"}
    (problem,) = done.problems
    assert problem.startswith("group-0: no ONNX (")


def test_a_file_with_different_outputs_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def run(self, _: None, inputs: dict[str, Any]) -> list[Any]:
            return [np.full((5, 2), 7.0)]

    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        onnx.importlib,
        "import_module",
        lambda name: type("runtime", (), {"InferenceSession": Session}),
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    with pytest.raises(InvalidInputError, match=r"onnxruntime.*torch.*by up to \d") as caught:
        onnx._check(nn.Linear(3, 2), torch.zeros(5, 3), path)
    assert caught.value.field == "model"
    assert not path.exists()


def test_without_the_onnx_packages_safetensors_are_written(
    grouped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedclade.analysis.export.missing_packages", lambda: ["onnx", "onnxscript"])
    done = export(grouped, tmp_path / "both")
    (problem,) = done.problems
    assert "onnx and onnxscript" in problem
    assert "pip install 'fedclade[onnx]'" in problem
    assert (tmp_path / "both" / "group-0" / "model.safetensors").exists()
    with pytest.raises(InvalidInputError, match=r"pip install 'fedclade\[onnx\]'") as caught:
        export(grouped, tmp_path / "only", ["onnx"])
    assert caught.value.field == "format"
    assert not (tmp_path / "only").exists()


class Tied(nn.Module):
    """Two names for one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(64, 64), nn.Linear(64, 64)
        self.again.weight = self.inner.weight
        self.last = nn.Linear(64, 10)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.again(self.inner(x.flatten(1)).relu()) * self.scale)
        return y


def test_a_custom_module(tmp_path: Path) -> None:
    result = fc.run(fc.FedAvg(), federation(), model=Tied(), rounds=1, out=tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "given", ["safetensors"], model=Tied())
    module = Tied()
    module.load_state_dict(load_file(tmp_path / "given" / "group-0" / "model.safetensors"))
    assert torch.equal(module(Images), result.model_of(0)(Images))
    assert "model = Tied()  # your own class" in done.cards[0]["load"]["safetensors"]
    # Without the module the file has the trained weights only.
    done = export(tmp_path / "run", tmp_path / "not given")
    if has_onnx:
        (problem,) = done.problems
        assert "'Tied'" in problem
        assert "--import" in problem
    weights = load_file(tmp_path / "not given" / "group-0" / "model.safetensors")
    assert weights.keys() == {
        "inner.weight",
        "inner.bias",
        "again.bias",
        "last.weight",
        "last.bias",
        "scale",
    }
    assert done.cards[0]["model"]["input_dtype"] is None


@pytest.mark.parametrize(("method", "names"), [(fc.Local(), "group"), (fc.LGFedAvg(), "model")])
def test_clients_with_separate_models_are_groups_of_one(
    method: fc.Method, names: str, tmp_path: Path
) -> None:
    result = fc.run(method, federation(), model=fc.models.MLP(8), rounds=1, out=tmp_path / "run")
    done = export(tmp_path / "run", formats=["safetensors"])
    assert [card["clients"] for card in done.cards] == [[client] for client in range(6)]
    assert [card["name"] for card in done.cards] == [f"{names}-{number}" for number in range(6)]
    weights = load_file(tmp_path / "run" / "export" / done.cards[4]["name"] / "model.safetensors")
    assert all(
        torch.equal(weights[name], value) for name, value in result.model_of(4).state_dict().items()
    )


def test_a_result_is_exported_with_its_module(tmp_path: Path) -> None:
    result = fc.run(fc.FedAvg(), federation(), model=Tied(), rounds=1, out=tmp_path / "run")
    done = fc.export(result, formats=["safetensors"])
    assert done.folder == tmp_path / "run" / "export"
    weights = load_file(done.folder / "group-0" / "model.safetensors")
    assert weights.keys() == result.module.state_dict().keys()  # tied weights have both names


def test_a_result_without_a_folder_cannot_be_exported(tmp_path: Path) -> None:
    result = fc.run(fc.FedAvg(), federation(), model=fc.models.Logistic(), rounds=1)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "run"):
        fc.export(result, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_test_data_the_card_has_no_accuracy(tmp_path: Path) -> None:
    x, y = torch.rand(20, 4), torch.arange(20) % 2
    fc.run(
        fc.FedAvg(),
        fc.data.from_arrays([(x, y)]),
        model=fc.models.Logistic(),
        rounds=1,
        out=tmp_path / "run",
    )
    (card,) = export(tmp_path / "run", formats=["safetensors"]).cards
    assert card["test"] == {}
    text = (tmp_path / "run" / "export" / "group-0" / "card.md").read_text()
    assert "| accuracy | not measured" in text


def call(*arguments: str) -> str:
    """What the command printed."""
    outcome = CliRunner().invoke(main.app, ["export", *arguments])
    if outcome.exception is not None:
        raise outcome.exception
    return outcome.stdout


def test_the_command(grouped: Path, tmp_path: Path) -> None:
    out = call(str(grouped), "--out", str(tmp_path / "out"), "--format", "safetensors")
    assert re.match(r"group-0: 3 clients, accuracy \d+\.\d\d %  \(model\.safetensors\)\n", out)
    assert out.splitlines()[-1].endswith(str(tmp_path / "out"))
    quiet = call(str(grouped), "--out", str(tmp_path / "quiet"), "--format", "safetensors", "-q")
    assert quiet == ""


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Folders without a finished run."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a file").write_text("")
    (tmp_path / "compared" / "clade-seed0").mkdir(parents=True)
    (tmp_path / "compared" / "comparison.json").write_text("{}")
    (tmp_path / "compared" / "clade-seed0" / "summary.json").write_text("{}")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "rounds.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("nowhere", "no folder"),
        ("full", "'fedclade run'"),
        ("compared", "compared/clade-seed0"),
        ("unfinished", "--resume"),
    ],
)
def test_folders_that_cannot_be_exported(folders: Path, name: str, hint: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call(str(folders / name))
    assert caught.value.field == str(folders / name)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "field", "hint"),
    [
        ("--out", "full", "out", "full"),
        ("--format", "onxx", "format", "'onnx'"),
        ("--format", ",", "format", "safetensors, onnx"),
    ],
)
def test_options_that_export_rejects(
    grouped: Path,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    value: str,
    field: str,
    hint: str,
) -> None:
    monkeypatch.chdir(folders)
    with pytest.raises(InvalidInputError) as caught:
        call(str(grouped), option, value)
    assert caught.value.field == field
    assert hint in str(caught.value)
