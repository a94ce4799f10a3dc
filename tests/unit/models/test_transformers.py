"""LoRA and models of transformers: which weights are trained, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.errors import InvalidInputError
from fedclade.models.transformers import adapter_description

transformers = pytest.importorskip("transformers", reason="pip install 'fedclade[transformers]'")
peft = pytest.importorskip("peft", reason="pip install 'fedclade[transformers]'")
transformers.utils.logging.disable_progress_bar()


def bert(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 8,
        "num_labels": 3,
    }
    config = transformers.BertConfig(**(sizes | settings))
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def trained(model: nn.Module) -> list[str]:
    return [name for name, value in model.named_parameters() if value.requires_grad]


def test_an_adapter_trains_its_two_matrices_and_the_classifier() -> None:
    model = fc.models.from_transformers(bert(), fc.LoRA(r=2, targets=("query",)))
    query = "base_model.model.bert.encoder.layer.0.attention.self.query"
    head = "base_model.model.classifier.modules_to_save.default"
    assert trained(model) == [
        f"{query}.lora_A.default.weight",
        f"{query}.lora_B.default.weight",
        f"{head}.weight",
        f"{head}.bias",
    ]
    assert model.get_parameter(f"{query}.lora_A.default.weight").shape == (2, 16)


def test_a_frozen_head_and_a_language_model_have_an_adapter_only() -> None:
    without = fc.models.from_transformers(bert(), fc.LoRA(train_head=False))
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    language = fc.models.from_transformers(transformers.GPT2LMHeadModel(config), fc.LoRA())
    for model in (without, language):
        assert trained(model)
        assert all("lora_" in name for name in trained(model))


def test_without_an_adapter_the_model_is_trained_as_it_is() -> None:
    model = bert()
    assert fc.models.from_transformers(model) is model
    assert len(trained(model)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"r": 0}, "lora.r"),
        ({"r": 1.5}, "lora.r"),
        ({"alpha": 0}, "lora.alpha"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"targets": ()}, "lora.targets"),
        ({"targets": "query"}, "lora.targets"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        fc.LoRA(**settings)


@pytest.mark.parametrize("targets", [("nothing",), ("query", "nothing"), ("LayerNorm",)])
def test_a_target_without_a_layer_is_named(targets: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "lora.targets"):
        fc.models.from_transformers(bert(), fc.LoRA(targets=targets))


def test_a_model_without_default_targets_needs_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "lora.targets"):
        fc.models.from_transformers(model, fc.LoRA())


def test_a_second_adapter_is_refused() -> None:
    model = fc.models.from_transformers(bert(), fc.LoRA())
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "lora"):
        fc.models.from_transformers(model, fc.LoRA())


@pytest.mark.parametrize("extra", ["transformers", "peft"])
def test_a_missing_extra_is_named(extra: str, monkeypatch: Any, tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == extra):
        fc.models.from_transformers(tmp_path if extra == "transformers" else model, fc.LoRA())


def test_a_folder_has_the_saved_model(tmp_path: Path) -> None:
    model = bert().eval()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = fc.models.from_transformers(tmp_path)
    x = torch.arange(6).view(1, 6)
    torch.testing.assert_close(model(x).logits, again(x).logits)
    assert fc.models.from_transformers(tmp_path, classes=5)(x).logits.shape == (1, 5)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    def refused(folder: Path, **settings: Any) -> None:
        with pytest.raises(InvalidInputError):
            fc.models.from_transformers(folder, **settings)

    refused(tmp_path / "none")
    refused(tmp_path)  # empty
    bert().save_pretrained(tmp_path)  # type: ignore[operator]
    refused(tmp_path, classes=0)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"hidden_size": 10**7}))  # 100 TB
    refused(tmp_path)
    config.write_text(json.dumps(settings | {"architectures": ["Linear"]}))
    refused(tmp_path)
    config.write_text(json.dumps(settings))
    weights.write_bytes(weights.read_bytes()[:100])
    refused(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        fc.models.from_transformers(tmp_path)


def test_classes_belong_to_a_folder() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "classes"):
        fc.models.from_transformers(bert(), classes=3)


def test_an_adapter_is_described_with_pefts_names() -> None:
    model = fc.models.from_transformers(bert(), fc.LoRA(r=2, targets=("value", "query")))
    description = adapter_description(nn.Sequential(model))
    assert description is not None
    assert description["config"]["target_modules"] == ["query", "value"]
    query = "base_model.model.bert.encoder.layer.0.attention.self.query"
    assert description["keys"][f"0.{query}.lora_A.default.weight"] == f"{query}.lora_A.weight"
    head = "base_model.model.classifier"
    assert description["keys"][f"0.{head}.modules_to_save.default.bias"] == f"{head}.bias"
    assert len(description["keys"]) == 6


def test_a_model_that_trains_more_than_an_adapter_has_no_description() -> None:
    model = fc.models.from_transformers(bert(), fc.LoRA())
    model.get_parameter("base_model.model.bert.pooler.dense.bias").requires_grad_()
    assert adapter_description(model) is None
    assert adapter_description(nn.Linear(2, 2)) is None
