"""Small models for texts: sequences of word numbers, where 0 is padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fedclade.errors import require, require_int
from fedclade.models.base import MAX_UNITS, check_classes, check_dropout
from fedclade.models.recurrent import WordVectors, check_sequence

TextTask: TypeAlias = Literal["classification", "tagging", "language_model"]
TEXT_TASKS: tuple[TextTask, ...] = ("classification", "tagging", "language_model")
_MASKED = -1e9  # finite, so that a text of padding alone has no NaN


@dataclass(frozen=True)
class BagOfWords:
    """The mean of the vectors of a text's words, and a linear layer: (T,) int64 -> (classes,).

    The order of words does not matter. Padding (0) is left out. It has words · embedding +
    (embedding + 1) · classes parameters.

    Args:
        words: the size of the vocabulary; that of `fc.data.from_text` by default.
        embedding: the length of a word's vector.
    """

    name: ClassVar[str] = "bag_of_words"
    words: int = 10_000
    embedding: int = 64

    def __post_init__(self) -> None:
        require_int("model.words", self.words, 1, MAX_UNITS)
        require_int("model.embedding", self.embedding, 1, MAX_UNITS)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_sequence("BagOfWords", shape, "words (length,), such as (64,)", axes=1)
        check_classes(classes)
        return _BagOfWords(self.words, self.embedding, classes)


class _BagOfWords(nn.Module):
    def __init__(self, words: int, embedding: int, classes: int) -> None:
        super().__init__()
        self.words = WordVectors(words, embedding)
        self.fc = nn.Linear(embedding, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(_mean_of_words(self.words(x), x))
        return scores


@dataclass(frozen=True)
class TextTransformer:
    """A small transformer encoder with learned positions and layer norms before each layer.

    (T,) int64 -> (classes,) for classification, by the mean over words; (T, classes) for tagging
    and for a language model. Padding (0) is not attended to.

    Args:
        task: "classification", "tagging", or "language_model", where a word sees only the words
            before it, and inputs and targets are of one vocabulary.
        words: the size of the vocabulary; that of `fc.data.from_text` by default. A language model
            takes the number of classes instead.
        width: the length of a word's vector.
        layers: the number of layers.
        heads: the number of attention heads; `width` must be a multiple of it.
        dropout: the share of each layer's output that is dropped in training.
    """

    name: ClassVar[str] = "text_transformer"
    task: TextTask = "classification"
    words: int = 10_000
    width: int = 64
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require(self.task in TEXT_TASKS, "model.task", self.task, f"must be one of {TEXT_TASKS}")
        for field in ("words", "width", "layers", "heads"):
            require_int(f"model.{field}", getattr(self, field), 1, MAX_UNITS)
        require(
            self.width % self.heads == 0,
            "model.heads",
            self.heads,
            f"must divide model.width = {self.width}",
        )
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_sequence("TextTransformer", shape, "words (length,), such as (64,)", axes=1)
        check_classes(classes)
        return _Transformer(self, shape[0], classes)


class _Transformer(nn.Module):
    def __init__(self, spec: TextTransformer, length: int, classes: int) -> None:
        super().__init__()
        self.task = spec.task
        words = classes if spec.task == "language_model" else spec.words
        self.words = WordVectors(words, spec.width)
        self.positions = nn.Parameter(torch.randn(length, spec.width) * 0.02)
        nn.init.normal_(self.words.weight, std=0.02)
        self.layers = nn.Sequential(
            *(_Layer(spec.width, spec.heads, spec.dropout) for _ in range(spec.layers))
        )
        self.norm = nn.LayerNorm(spec.width)
        self.fc = nn.Linear(spec.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.positions
        # (B, 1, 1, keys) or (queries, keys): 0 for words that are seen, else a negative number.
        unseen = (x == 0)[:, None, None, :]
        if self.task == "language_model":
            length = x.shape[1]
            unseen = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mask = unseen.to(hidden.dtype) * _MASKED
        for layer in self.layers:
            hidden = layer(hidden, mask)
        hidden = self.norm(hidden)
        if self.task == "classification":
            hidden = _mean_of_words(hidden, x)
        scores: Tensor = self.fc(hidden)
        return scores


class _Layer(nn.Module):
    """Attention and a feed-forward network of four times the width, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without a bias: a bias of the keys changes no attention weight.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout1(self.out(self._attention(self.norm1(x), mask)))
        after: Tensor = x + self.dropout2(self.fc2(torch.relu(self.fc1(self.norm2(x)))))
        return after

    def _attention(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, width / heads)
        scores = query @ key.mT / query.shape[-1] ** 0.5 + mask
        mixed: Tensor = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return mixed


def _mean_of_words(vectors: Tensor, x: Tensor) -> Tensor:
    """The mean of (B, T, …) over the words of each text, without padding; 0 if there are none."""
    is_word = (x != 0).to(vectors.dtype).unsqueeze(-1)
    return (vectors * is_word).sum(1) / is_word.sum(1).clamp_min(1)
