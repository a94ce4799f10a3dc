"""Recurrent networks of the papers, an output for each position of a sequence.

torch's own LSTM cannot run under vmap; this one is written in plain operations, few of them a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedclade.errors import InvalidInputError, is_int, require_int
from fedclade.models.base import MAX_UNITS, chain, check_classes, check_dropout, dropout


class Lstm(nn.Module):
    """One LSTM layer, or two that read in opposite directions, side by side in the outputs: (B, T,
    inputs) -> (B, T, ways · hidden).

    Gates come in torch's order: input, forget, cell, output. There is one bias where nn.LSTM has
    two that are only ever added. Weights start as torch's do, uniform within 1/√hidden; biases at
    0, but those of the forget gate at 1 (Jozefowicz et al. 2015), as Keras has them too: a cell
    remembers from the first step on.
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
        # What the inputs give to the gates is one product for all steps and ways: (T, ways, B, 4
        # hidden).
        gates = self._turned(
            self.input(x).unflatten(-1, (self.ways, 4 * self.hidden)).permute(1, 2, 0, 3)
        )
        h = c = gates.new_zeros(*gates.shape[1:3], self.hidden)
        outputs = []
        for given in gates.unbind(0):
            i, f, g, o = (given + h @ self.recurrent).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return self._turned(torch.stack(outputs)).permute(2, 0, 1, 3).flatten(2)

    def _turned(self, steps: Tensor) -> Tensor:
        """Of (T, ways, …) the second way in the opposite order."""
        if self.ways == 1:
            return steps
        ahead, back = steps.unbind(1)
        return torch.stack([ahead, back.flip(0)], 1)


class _Words(nn.Embedding):
    """A vector for each word of (B, T)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            kind = str(x.dtype).removeprefix("torch.")
            raise InvalidInputError(
                "words are to be whole numbers, such as int64 (uint8 is read as pixels), got"
                f" {kind}"
            )
        return super().forward(x)


@dataclass(frozen=True)
class LstmLanguageModel:
    """The two-layer LSTM with which CFL (arXiv 1910.01991) predicts the next word on AG News. (T,)
    int64 -> (T, classes).

    `classes` is the size of the vocabulary: inputs and targets are the same words, so no input may
    be `classes` or above. The widths, `embedding` and `hidden`, are ours. `dropout` is the share
    dropped before each layer, never from one step to the next (Zaremba et al., arXiv 1409.2329). As
    it is, with a vocabulary of V: 229 V + 248,832 parameters.
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
        _check_sequence("LstmLanguageModel", shape, "words (length,), such as (20,)", axes=1)
        check_classes(classes)
        layers: dict[str, nn.Module | None] = {"words": _Words(classes, self.embedding)}
        features = self.embedding
        for number in range(1, self.layers + 1):
            layers[f"dropout{number}"] = dropout(self.dropout)
            layers[f"lstm{number}"] = Lstm(features, self.hidden)
            features = self.hidden
        layers[f"dropout{self.layers + 1}"] = dropout(self.dropout)
        return chain(**layers, fc=nn.Linear(features, classes))


@dataclass(frozen=True)
class BiLstmTagger:
    """FedGMCC's net (arXiv 2204.11017) for genomic reads: a class for each position. (T, features)
    -> (T, classes).

    Bidirectional LSTMs of 64 and of 32 units a way, a dense layer of 64 with ReLU, dropout, a dense
    layer. The authors' last layer has 30 outputs, as many as their reads have positions; ours is
    applied at every position, whatever their number.
    """

    name: ClassVar[str] = "bilstm_tagger"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        _check_sequence(
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


def _check_sequence(model: str, shape: tuple[int, ...], of: str, axes: int) -> None:
    """Refuse what is not a sequence of words (one axis) or of vectors (two)."""
    if len(shape) == axes and all(is_int(side, 1, MAX_UNITS) for side in shape):
        return
    remedy = ""
    if (len(shape), axes) == (1, 2):
        remedy = f"; add the axis of features: {(*shape, 1)}"
    elif (len(shape), axes) == (2, 1):
        remedy = "; give the number of each word, not a vector"
    raise InvalidInputError(f"{model} needs sequences of {of}, got {tuple(shape)}{remedy}.")
