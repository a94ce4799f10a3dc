"""Models for texts: by hand, padding, causality, and checked fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedclade.errors import InvalidInputError
from fedclade.models import BagOfWords, TextTransformer


def test_a_bag_of_words_is_the_mean_of_its_words_by_hand() -> None:
    module = BagOfWords(words=4, embedding=2).build((3,), 2)
    with torch.no_grad():
        module.words.weight.copy_(torch.tensor([[9.0, 9], [1, 2], [3, 4], [5, 0]]))  # type: ignore[union-attr, operator]
        module.fc.weight.copy_(torch.tensor([[1.0, 0], [0, 2]]))  # type: ignore[union-attr, operator]
        module.fc.bias.copy_(torch.tensor([0.5, 0]))  # type: ignore[union-attr, operator]
    x = torch.tensor([[1, 2, 0], [2, 1, 0], [3, 3, 1], [0, 0, 0]])
    expected = torch.tensor([[2.5, 6], [2.5, 6], [11 / 3 + 0.5, 4 / 3], [0.5, 0]])
    torch.testing.assert_close(module(x), expected)
    assert sum(p.numel() for p in module.parameters()) == 4 * 2 + 3 * 2


def module_of(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return TextTransformer(words=10, width=8, heads=2, **options).build((5,), 7).eval()


def test_outputs_by_task() -> None:
    x = torch.randint(1, 7, (3, 5))
    assert module_of()(x).shape == (3, 7)
    assert module_of(task="tagging")(x).shape == (3, 5, 7)
    assert module_of(task="language_model")(x).shape == (3, 5, 7)


@pytest.mark.parametrize("task", ["classification", "tagging"])
def test_padding_is_not_attended_to(task: str) -> None:
    module = module_of(task=task)
    x = torch.tensor([[3, 4, 0, 0, 0]])
    before = module(x)
    with torch.no_grad():
        module.words.weight[0] += 1.0  # type: ignore[union-attr, index]
    after = module(x)
    if task == "tagging":
        before, after = before[:, :2], after[:, :2]
    torch.testing.assert_close(after, before)
    assert module(torch.zeros(1, 5, dtype=torch.int64)).isfinite().all()


def test_a_language_model_sees_no_later_word() -> None:
    x, other = torch.tensor([[3, 4, 5, 6, 1]]), torch.tensor([[3, 4, 5, 1, 2]])
    causal, tagger = module_of(task="language_model"), module_of(task="tagging")
    torch.testing.assert_close(causal(x)[:, :3], causal(other)[:, :3])
    assert not torch.allclose(causal(x)[:, 3], causal(other)[:, 3])
    assert not torch.allclose(tagger(x)[:, 0], tagger(other)[:, 0])
    # The order of words matters, unlike in a bag of words.
    assert not torch.allclose(module_of()(x), module_of()(x.flip(1)))


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        (TextTransformer, "task", "translation"),
        (TextTransformer, "heads", 3),
        (TextTransformer, "layers", 0),
        (TextTransformer, "dropout", 1.0),
        (TextTransformer, "words", 1.5),
        (BagOfWords, "words", 0),
        (BagOfWords, "embedding", "64"),
    ],
)
def test_fields_are_checked(spec: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as raised:
        spec(**{field: value})
    assert raised.value.field == f"model.{field}"


@pytest.mark.parametrize("spec", [BagOfWords(), TextTransformer()])
def test_inputs_must_be_words(spec: BagOfWords | TextTransformer) -> None:
    for shape in ((5, 3), (1, 28, 28)):
        with pytest.raises(InvalidInputError) as raised:
            spec.build(shape, 2)
        assert raised.value.field == "model"
    with pytest.raises(InvalidInputError) as raised:
        spec.build((5,), 2)(torch.rand(2, 5))
    assert raised.value.field == "model"
