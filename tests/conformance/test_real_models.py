"""Models of other libraries train with FedAvg, Clade and SCAFFOLD: like a loop of torch modules,
with the same bytes from the same seed and after a resume, and on nodes as in the simulator.

Every model is built from its configuration, so no test downloads weights.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.result import Result
from fedclade.training.runner import TrainingRun

CLASSES = 3
LR = 0.005
SIZES = (8, 6, 8, 7)
METHODS = {"fedavg": fc.FedAvg, "clade_groups": fc.CladeGroups, "scaffold": fc.SCAFFOLD}
# Operators that a wheel of torchvision describes at import but lacks if it was built for another
# torch. None of these models uses them.
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int ratio,"
    " bool aligned) -> Tensor",
)


def optional(name: str) -> ModuleType:
    """The module of this name, or a skip."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
    except RuntimeError:  # torchvision was built for another torch
        _declare_operators()
        return importlib.import_module(name)


@cache
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        library.define(operator)
    return library


def resnet18() -> nn.Module:
    return optional("torchvision.models").resnet18(weights=None, num_classes=CLASSES)


def mobilenet() -> nn.Module:
    return optional("timm").create_model(
        "mobilenetv3_small_050", pretrained=False, num_classes=CLASSES
    )


def vit() -> nn.Module:
    return optional("timm").create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=32, num_classes=CLASSES, depth=2
    )


def bert() -> nn.Module:
    transformers = optional("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=8,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def bert_lora() -> nn.Module:
    peft = optional("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(bert(), config)


class Branch(nn.Module):
    """A model that chooses a layer by the values of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3 * 32 * 32, 8), nn.Linear(3 * 32 * 32, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        layer = self.first if x.mean() > 0 else self.second
        return self.head(torch.tanh(layer(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "mobilenetv3": mobilenet,
    "vit_tiny": vit,
    "bert": bert,
    "bert_lora": bert_lora,
    "branch": Branch,
}


@cache
def clients_of(kind: str) -> Clients:
    """Images, or sequences of 3 to 8 tokens with their attention masks."""
    generator = torch.Generator().manual_seed(0)
    parts: list[Any] = []
    for size in SIZES:
        x: Any = torch.randn(size, 3, 32, 32, generator=generator)
        if kind == "tokens":
            lengths = torch.randint(3, 9, (size, 1), generator=generator)
            x = {
                "input_ids": torch.randint(1, 50, (size, 8), generator=generator),
                "attention_mask": (torch.arange(8) < lengths).long(),
            }
        y = torch.randint(0, CLASSES, (size,), generator=generator)
        parts.append((x, y, x, y))
    return from_arrays(parts)


def built(model: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[model]()


def run_of(model: str, method: str) -> TrainingRun:
    """Two rounds of all clients, with two steps of each client in a round."""
    return TrainingRun(
        METHODS[method](),
        clients_of("tokens" if model.startswith("bert") else "images"),
        built(model),
        LocalConfig(lr=LR, batch_size=8, epochs=2),
        TrainingConfig(rounds=2, clients_per_round=1.0, eval_every=0, checkpoint_every=0),
        EngineConfig(threads=1),
        "cpu",
    )


@cache
def first_run(model: str, method: str) -> Result:
    return run_of(model, method).run()


def weights(result: Result) -> Tree:
    """The model of the first client."""
    return dict(result.model_of(0).state_dict())


pytestmark = pytest.mark.filterwarnings("ignore:model. it branches")
every_case = pytest.mark.parametrize(
    ("model", "method"), [(model, method) for model in MODELS for method in METHODS]
)


def trained_by_torch(module: nn.Module, x: Any, y: Tensor) -> nn.Module:
    """A client's round with torch alone: two steps on all its examples."""
    module = copy.deepcopy(module).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = module(**x) if isinstance(x, dict) else module(x)
        F.cross_entropy(getattr(outputs, "logits", outputs), y).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("model", MODELS)
def test_fedavg_is_a_loop_of_torch_modules(model: str) -> None:
    actual, run = weights(first_run(model, "fedavg")), run_of(model, "fedavg")
    module, before = built(model), built(model).state_dict()
    assert run.clients is not None
    for _ in range(2):
        states = [
            trained_by_torch(module, *run.clients.arrays(client)[:2]).state_dict()
            for client in range(len(SIZES))
        ]
        shares = [size / sum(SIZES) for size in SIZES]
        module.load_state_dict(
            {
                name: sum(share * state[name] for share, state in zip(shares, states, strict=True))
                for name in before
            }
        )
    expected = module.state_dict()
    moved = max(float((value - before[name]).abs().max()) for name, value in expected.items())
    assert moved > 1e-3
    # BatchNorm divides by small standard deviations of a few examples, so rounding errors grow.
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=min(5e-3 * moved, 1e-3))


@every_case
def test_trained_weights_move_and_frozen_ones_do_not(model: str, method: str) -> None:
    result, before = first_run(model, method), built(model)
    after = weights(result)
    assert math.isfinite(result.summary["train_loss"])
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    moved = {
        name: float((after[name] - value.detach()).abs().max())
        for name, value in before.named_parameters()
    }
    trained = {name for name, value in before.named_parameters() if value.requires_grad}
    assert max(moved[name] for name in trained) > 1e-3
    assert not any(moved[name] for name in moved.keys() - trained)


@every_case
def test_the_same_seed_gives_the_same_bytes(model: str, method: str) -> None:
    expected, actual = weights(first_run(model, method)), weights(run_of(model, method).run())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@every_case
def test_nodes_train_as_the_simulator(model: str, method: str) -> None:
    expected, run = weights(first_run(model, method)), run_of(model, method)
    assert run.clients is not None
    objective = Objective(built(model), x=run.clients.metadata.x)
    fed = InProcessFederation(run.clients, NodeContext(objective), threads=1)
    actual = weights(replace(run, federation=fed).run())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_has_the_same_bytes(method: str, tmp_path: Path) -> None:
    run = run_of("vit_tiny", method)
    half = replace(run, settings=replace(run.settings, rounds=1, checkpoint_every=1))
    whole = replace(run, settings=replace(run.settings, checkpoint_every=1))
    half.run(tmp_path)
    expected, actual = weights(first_run("vit_tiny", method)), weights(whole.run(tmp_path, True))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_case
def test_on_cuda_two_runs_give_the_same_bytes_near_the_loss_of_the_cpu(
    model: str, method: str
) -> None:
    run = replace(run_of(model, method), engine=EngineConfig(precision="float32"), device="cuda")
    first, second = run.run(), run.run()
    for name, value in weights(first).items():
        assert torch.equal(value, weights(second)[name]), name
    on_cpu = first_run(model, method).summary["train_loss"]
    assert first.summary["train_loss"] == pytest.approx(on_cpu, rel=0.02)
