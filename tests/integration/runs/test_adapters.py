"""Runs with adapters: what is trained, sent, stored and exported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import fedclade as fc
from fedclade.cli.main import app
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.data import Clients
from fedclade.errors import InvalidInputError
from fedclade.programs import gradient_signature
from fedclade.training.config import EngineConfig
from fedclade.training.runner import TrainingRun

transformers = pytest.importorskip("transformers", reason="pip install 'fedclade[transformers]'")
peft = pytest.importorskip("peft", reason="pip install 'fedclade[transformers]'")

CLIENTS, SAMPLES, LENGTH = 4, 12, 9
METHODS = [fc.FedAvg(), fc.Clade(), fc.SCAFFOLD()]
RUN: dict[str, Any] = {
    "rounds": 2,
    "clients_per_round": 1.0,
    "batch_size": 6,
    "lr": 0.1,
    "device": "cpu",
}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def adapted(base: nn.Module | None = None, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return fc.models.from_transformers(base or bert(), fc.LoRA(r=2, **settings))


def texts(seed: int) -> dict[str, Tensor]:
    """Sentences of different lengths, with a mask."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 40, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": words * mask, "attention_mask": mask}


def classification() -> Clients:
    parts = []
    for client in range(CLIENTS):
        x = texts(client)
        y = (x["input_ids"][:, 0] + client % 2) % 4
        parts.append((x, y, x, y))
    return fc.data.from_arrays(parts)


def next_words() -> Clients:
    parts = []
    for client in range(CLIENTS):
        x = texts(client)
        y = x["input_ids"].roll(-1, 1)
        parts.append((x, y, x, y))
    return fc.data.from_arrays(parts)


def trained_bytes(model: nn.Module) -> int:
    return sum(value.nbytes for value in model.parameters() if value.requires_grad)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for left, right in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("chunk", [1, CLIENTS])
def test_masked_attention_trains_as_a_plain_loop(chunk: int) -> None:
    """One step of all clients by hand, with the masks of transformers' own attention."""
    model, clients = adapted(), classification()
    settings = RUN | {"rounds": 1, "batch_size": SAMPLES, "chunk": chunk}
    result = fc.run(fc.FedAvg(), clients, model, **settings)
    own = model.eval()
    parameters = {name: value for name, value in own.named_parameters() if value.requires_grad}
    mean = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for client in range(CLIENTS):
        x, y = clients.arrays(client)[:2]
        assert isinstance(x, dict)
        loss = F.cross_entropy(own(**x).logits, y)
        for name, gradient in zip(
            parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True
        ):
            mean[name] += gradient / CLIENTS
    trained = result.model_of(0)
    for name, value in parameters.items():
        torch.testing.assert_close(
            trained.get_parameter(name), value - 0.1 * mean[name], atol=1e-6, rtol=1e-4
        )


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("kind", ["classifier", "language model"])
def test_the_same_seed_gives_the_same_bytes(method: fc.Method, kind: str) -> None:
    base, clients = (bert, classification) if kind == "classifier" else (gpt2, next_words)
    one, two = (fc.run(method, clients(), adapted(base(), dropout=0.1), **RUN) for _ in range(2))
    assert_equal(one.model_of(0), two.model_of(0))
    assert one.history[-1].get("loss") == two.history[-1].get("loss")


# The personal models of Clade stay with the nodes.
@pytest.mark.parametrize(
    "method", [fc.FedAvg(), fc.CladeGroups(), fc.SCAFFOLD()], ids=lambda method: method.name
)
def test_nodes_train_as_the_simulator(method: fc.Method) -> None:
    clients = classification()
    fed = InProcessFederation(clients, NodeContext(Objective(adapted(), x=clients.metadata.x)))
    run = TrainingRun(
        method,
        clients,
        adapted(),
        fc.LocalConfig(lr=0.1, batch_size=6),
        fc.TrainingConfig(rounds=2, clients_per_round=1.0),
        EngineConfig(),
        "cpu",
    )
    here, there = run.run(), replace(run, federation=fed).run()
    for a, b in zip(here.model_of(0).parameters(), there.model_of(0).parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_client_sends_and_receives_the_adapter_only() -> None:
    model = adapted()
    result = fc.run(fc.FedAvg(), classification(), model, **RUN)
    for row in result.history:
        assert row["bytes_up"] == row["bytes_down"] == CLIENTS * trained_bytes(model)
    assert trained_bytes(model) < sum(value.nbytes for value in model.parameters()) / 10


def test_the_frozen_weights_stay_as_they_are_and_are_stored_once(tmp_path: Path) -> None:
    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = fc.run(fc.Local(), classification(), model, out=tmp_path, **RUN)
    for name, value in model.state_dict().items():  # the user's model
        assert torch.equal(value, before[name])
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    for client in range(CLIENTS):
        after = result.model_of(client)
        assert all(torch.equal(after.get_parameter(name), before[name]) for name in frozen)
    stored = load_file(tmp_path / "models" / "models.safetensors")
    for name in frozen:
        assert stored[f"fixed/{name}"].shape == before[name].shape
        assert f"models/{name}" not in stored
    for path in (tmp_path / "checkpoint").iterdir():
        with safe_open(path, "pt") as file:
            assert not [name for name in file.keys() if any(one in name for one in frozen)]  # noqa: SIM118


def test_a_resumed_run_has_the_same_bytes(tmp_path: Path) -> None:
    settings = RUN | {"checkpoint_every": 1}
    whole = fc.run(fc.Clade(), classification(), adapted(), **(settings | {"rounds": 4}))
    fc.run(fc.Clade(), classification(), adapted(), out=tmp_path, **settings)
    again = fc.run(
        fc.Clade(),
        classification(),
        adapted(),
        out=tmp_path,
        resume=True,
        **(settings | {"rounds": 4}),
    )
    assert_equal(whole.model_of(1), again.model_of(1))


_MEMORY = """
import re, sys
from pathlib import Path

import torch, transformers
import fedclade as fc

def memory(key):
    return int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def run(vocabulary):
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=8, num_labels=4,
    )
    base = transformers.BertForSequenceClassification(config)
    model = fc.models.from_transformers(base, fc.LoRA(r=2))
    frozen = sum(value.nbytes for value in model.parameters() if not value.requires_grad)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = memory("VmRSS")
    fc.run(fc.Clade(), clients, model, rounds=3, clients_per_round=1.0, device="cpu", threads=2)
    return (memory("VmHWM") - before) / frozen, frozen

x = torch.randint(0, 100, (8, 20, 6))
y = torch.randint(0, 4, (8, 20))
clients = fc.data.from_arrays([(x[i], y[i], x[i], y[i]) for i in range(8)])
run(100)
print(*run(250_000))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_run_holds_the_frozen_weights_once() -> None:
    """The peak of a run of 8 clients and 2 threads, in copies of 61 MiB of frozen weights. The
    user's own model is not counted. A copy for each thread and mode would be more than 5.
    """
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True
    )
    copies, frozen = map(float, done.stdout.split())
    assert frozen > 60 * 2**20
    assert copies < 1.5


@pytest.mark.parametrize("kind", ["classifier", "language model"])
def test_an_exported_adapter_is_loaded_by_peft(kind: str, tmp_path: Path) -> None:
    base, clients = (bert, classification) if kind == "classifier" else (gpt2, next_words)
    result = fc.run(fc.Local(), clients(), adapted(base()), out=tmp_path / "run", **RUN)
    done = fc.export(result, tmp_path / "export", ["safetensors"])
    assert [card["name"] for card in done.cards] == [f"group-{client}" for client in range(CLIENTS)]
    x = texts(9)
    for client in (0, 3):
        folder = tmp_path / "export" / f"group-{client}"
        assert {path.name for path in folder.iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
            "card.json",
            "card.md",
        }
        loaded = peft.PeftModel.from_pretrained(base(), folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(
                loaded(**x).logits, result.model_of(client)(**x).logits, atol=1e-6, rtol=0
            )


def test_a_run_on_disk_exports_its_adapters_without_the_base_model(tmp_path: Path) -> None:
    result = fc.run(fc.FedAvg(), classification(), adapted(), out=tmp_path / "run", **RUN)
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "export")]
    )
    assert done.exit_code == 0, done.output
    loaded = peft.PeftModel.from_pretrained(bert(), tmp_path / "export" / "group-0").eval()
    x = texts(9)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(**x).logits, result.model_of(0)(**x).logits, atol=1e-6, rtol=0
        )


def test_a_run_on_disk_needs_the_base_model_to_predict(tmp_path: Path) -> None:
    result = fc.run(fc.FedAvg(), classification(), adapted(), out=tmp_path, **RUN)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        fc.load(tmp_path)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        fc.load(tmp_path, model=adapted(targets=("key",)))
    assert_equal(fc.load(tmp_path, model=adapted()).model_of(0), result.model_of(0))


def test_peft_models_train_as_they_are() -> None:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=16, task_type="SEQ_CLS")
    own = fc.run(fc.FedAvg(), classification(), peft.get_peft_model(bert(), config), **RUN)
    ours = fc.run(fc.FedAvg(), classification(), adapted(), **RUN)
    assert_equal(own.model_of(0), ours.model_of(0))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("targets", [("c_attn",), ("lm_head",)])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_clade_has_signatures_of_frozen_and_of_adapted_heads(
    targets: tuple[str, ...], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(gradient_signature, "LARGEST_PROJECTION", 100)
    result = fc.run(fc.Clade(), next_words(), adapted(gpt2(), targets=targets), **RUN)
    assert len(result.clusters) == CLIENTS
    assert int(result.clusters.min()) >= 0


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (fc.Clade(signature="joint"), "method.signature"),  # sequences have no one label
        (fc.LGFedAvg(), "base_model.model.lm_head"),  # a frozen head cannot be shared
    ],
    ids=["joint", "lg_fedavg"],
)
def test_what_a_frozen_language_model_cannot_do_is_named(method: fc.Method, field: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        fc.run(method, next_words(), adapted(gpt2()), **RUN)
