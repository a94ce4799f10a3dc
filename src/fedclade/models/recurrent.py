"""Recurrent networks of the papers, with an output for each position of a sequence.

torch's LSTM cannot run under vmap. The LSTM of this module consists of plain operations, with few
operations per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedclade.errors import InvalidInputError, is_int, require_int
from fedclade.models.base import MAX_UNITS, chain, check_classes, check_dropout, dropout


class Lstm(nn.Module):
    """One LSTM layer, or two in opposite directions whose outputs are concatenated: (B, T, inputs)
    -> (B, T, ways · hidden).

    Gates have torch's order: input, forget, cell, output. There is one bias; nn.LSTM has two and
    adds them. Initial weights are uniform within ±1/√hidden, as in torch. Initial biases are 0, and
    1 for the forget gate (Jozefowicz et al. 2015), as in Keras: a cell keeps its value from the
    first step on.

    Args:
        inputs: the number of features of a position.
        hidden: the number of units per direction.
        ways: the number of directions, 1 or 2.
    """

    def __init__(self, inputs: int, hidden: int, ways: int = 1) -> None:
        super().__init__()
        self.hidden, self.ways = hidden, ways
        self.input = nn.Linear(inputs, ways * 4 * hidden)
        self.recurrent = nn.Parameter(torch.empty(ways, hidden, 4 * hidden))
        bound = hidden**-0.5
        with torch.no_grad():
            self.input.weight.uniform_(-bound, bound)
            self.recurrent.uniform_(-bound, bound)
            self.input.bias.zero_().view(ways, 4, hidden)[:, 1] = 1

    def forward(self, x: Tensor) -> Tensor:
        # One product for all steps and directions gives the inputs' part of the gates:
        # (T, ways, B, 4 hidden).
        gates = self._reverse_second(
            self.input(x).unflatten(-1, (self.ways, 4 * self.hidden)).permute(1, 2, 0, 3)
        )
        h = c = gates.new_zeros(*gates.shape[1:3], self.hidden)
        outputs = []
        for from_inputs in gates.unbind(0):
            i, f, g, o = (from_inputs + h @ self.recurrent).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return self._reverse_second(torch.stack(outputs)).permute(2, 0, 1, 3).flatten(2)

    def _reverse_second(self, steps: Tensor) -> Tensor:
        """(T, ways, …) with the steps of the second direction reversed."""
        if self.ways == 1:
            return steps
        forward, backward = steps.unbind(1)
        return torch.stack([forward, backward.flip(0)], 1)


class WordVectors(nn.Embedding):
    """A vector for each word of (B, T)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            dtype = str(x.dtype).removeprefix("torch.")
            raise InvalidInputError(
                "words must be whole numbers, such as int64 (uint8 is read as pixels), got"
                f" {dtype}",
                "model",
            )
        return super().forward(x)


@dataclass(frozen=True)
class LstmLanguageModel:
    """The LSTM with which CFL (arXiv 1910.01991) predicts the next word on AG News.

    (T,) int64 -> (T, classes). The number of classes is the size of the vocabulary. Inputs and
    targets are words of one vocabulary, so inputs must be below `classes`. With the defaults and a
    vocabulary of V words it has 229 V + 248,832 parameters. The paper does not give the widths.

    Args:
        embedding: the length of a word's vector.
        hidden: the number of units of a layer.
        layers: the number of layers; 2 in the paper.
        dropout: the share that is dropped before each layer, not between steps (Zaremba et al.,
            arXiv 1409.2329).
    """

    name: ClassVar[str] = "lstm_lm"
    embedding: int = 100
    hidden: int = 128
    layers: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_int("model.embedding", self.embedding, 1, MAX_UNITS)
        require_int("model.hidden", self.hidden, 1, MAX_UNITS)
        require_int("model.layers", self.layers, 1, MAX_UNITS)
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_sequence("LstmLanguageModel", shape, "words (length,), such as (20,)", axes=1)
        check_classes(classes)
        layers: dict[str, nn.Module | None] = {"words": WordVectors(classes, self.embedding)}
        features = self.embedding
        for number in range(1, self.layers + 1):
            layers[f"dropout{number}"] = dropout(self.dropout)
            layers[f"lstm{number}"] = Lstm(features, self.hidden)
            features = self.hidden
        layers[f"dropout{self.layers + 1}"] = dropout(self.dropout)
        return chain(**layers, fc=nn.Linear(features, classes))


@dataclass(frozen=True)
class BiLstmTagger:
    """FedGMCC's network (arXiv 2204.11017) for genomic reads: a class for each position.

    (T, features) -> (T, classes). Two bidirectional LSTMs have 64 and 32 units per direction. A
    dense layer of 64 units with ReLU, dropout and a dense layer follow. The authors' last layer has
    30 outputs, one for each position of their reads. Here it is applied at every position, for any
    number of positions.

    Args:
        dropout: the share of units that are dropped before the last layer.
    """

    name: ClassVar[str] = "bilstm_tagger"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_sequence(
            "BiLstmTagger", shape, "vectors (length, features), such as (30, 64)", axes=2
        )
        check_classes(classes)
        return chain(
            lstm1=Lstm(shape[1], 64, ways=2),
            lstm2=Lstm(2 * 64, 32, ways=2),
            fc1=nn.Linear(2 * 32, 64),
            relu=nn.ReLU(),
            dropout=dropout(self.dropout),
            fc2=nn.Linear(64, classes),
        )


def check_sequence(model: str, shape: tuple[int, ...], of: str, axes: int) -> None:
    """Raise `InvalidInputError` unless `shape` is that of a sequence.

    Args:
        model: the name of the model in the message.
        shape: the shape of a sample.
        of: what the sequence consists of, for the message.
        axes: 1 for words, 2 for vectors.
    """
    if len(shape) == axes and all(is_int(side, 1, MAX_UNITS) for side in shape):
        return
    remedy = ""
    if (len(shape), axes) == (1, 2):
        remedy = f"; add the axis of features: {(*shape, 1)}"
    elif (len(shape), axes) == (2, 1):
        remedy = "; give the number of each word, not a vector"
    raise InvalidInputError(
        f"{model} needs sequences of {of}, got {tuple(shape)}{remedy}.", "model"
    )
