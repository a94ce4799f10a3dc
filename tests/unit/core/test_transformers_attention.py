"""Models of Hugging Face on token ids and an attention mask, made from their configurations."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.inputs import select
from fedclade.data import Clients, from_arrays

try:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        BertModel,
        GPT2Config,
        GPT2LMHeadModel,
    )
except ImportError as error:
    pytest.skip(f"transformers cannot be imported ({error})", allow_module_level=True)

WORDS, LENGTH = 40, 8
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
    "num_labels": 3,
}


def bert(dropout: float = 0.1) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(**SMALL, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


def tokens(samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (samples, 1), generator=generator)
    ids = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.fixture
def clients() -> Clients:
    parts = []
    for client in range(4):
        x = tokens(12 - client, client)
        y = (x["input_ids"][:, 0] + client % 2) % 3
        parts.append((x, y, x, y))
    return from_arrays(parts)


@pytest.mark.parametrize("method", [fc.FedAvg(), fc.Clade(), fc.SCAFFOLD()])
def test_bert_trains_on_many_clients_at_once(method: fc.Method, clients: Clients) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model that is not vectorized gives a warning
        result = fc.run(
            method, clients, bert(), rounds=3, clients_per_round=1.0, lr=0.1, device="cpu"
        )
    losses = [row["train_loss"] for row in result.history if "train_loss" in row]
    assert result.summary["accuracy"] is not None
    assert torch.isfinite(torch.tensor(losses)).all()
    served = result.model_of(0)
    x = tokens(2)
    assert served(**x).logits.shape == (2, 3)


def test_a_step_of_bert_is_that_of_plain_torch() -> None:
    module, x, y = bert(dropout=0.0), tokens(6), torch.arange(6) % 3
    objective = Objective(module, x=x)
    assert objective.vectorized
    gradient = objective.gradient(objective.params(), Batch(x, y, torch.ones(6), torch.tensor(0)))
    torch.nn.functional.cross_entropy(module.train()(**x).logits, y).backward()
    for name, value in module.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(gradient[name], value.grad, atol=1e-6, rtol=1e-4)


def test_a_causal_model_has_the_outputs_of_the_library() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
    )
    module, x = GPT2LMHeadModel(config).eval(), tokens(3)
    objective = Objective(copy.deepcopy(module), x=x)
    assert objective.vectorized
    with torch.no_grad():
        expected = module(**x).logits
    torch.testing.assert_close(objective.outputs(objective.params(), x), expected)
    assert objective.outputs(objective.params(), select(x, slice(1))).shape == (1, LENGTH, WORDS)


def test_a_model_without_a_head_is_refused() -> None:
    torch.manual_seed(0)
    clients = from_arrays([(tokens(4), torch.arange(4) % 3)])
    with pytest.raises(fc.FedcladeError, check=lambda error: error.field == "model"):
        fc.run(fc.FedAvg(), clients, BertModel(BertConfig(**SMALL)), rounds=1, device="cpu")
