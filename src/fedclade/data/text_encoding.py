"""Texts as numbers: the words of a text, a vocabulary from federated counts, and its tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from pydantic import ConfigDict
from torch import Tensor

from fedclade.io import safe_read

TextTask: TypeAlias = Literal["classification", "tagging", "language_model"]

PADDING, UNKNOWN, END = 0, 1, 2
"""The tokens of padding, of a word that is not in the vocabulary, and of the end of a text."""
FIRST_WORD = 3

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters, digits and inner apostrophes. "It's 7.30!" gives
    it's, 7, 30.
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class TextEncoding:
    """How words become the numbers that a model reads. A run saves it in encoding.json.

    Args:
        vocabulary: the words with the tokens 3, 4, …, by falling frequency.
        length: the number of words that a model reads at once.
        text: the column of the texts.
        client: the column with the client of each text.
        target: the column of the targets; None for a language model.
        task: what a model predicts: a class of the text, a tag of each word, or the next word.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    vocabulary: tuple[str, ...]
    length: int
    text: str
    client: str
    target: str | None
    task: TextTask
    kind: Literal["text"] = "text"

    def check(self) -> None:
        """Raise `ValueError` for values that do not fit together."""
        if self.length < 1:
            raise ValueError(f"length: {self.length}")
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError("vocabulary: a word occurs twice")
        if (self.target is None) != (self.task == "language_model"):
            raise ValueError("target: only a language model has none")

    def tokens(self, text_words: Iterable[str]) -> list[int]:
        """The token of each word."""
        known = self._tokens
        return [known.get(word, UNKNOWN) for word in text_words]

    def encode(self, texts: Iterable[str]) -> Tensor:
        """(texts, length): the first words of each text, filled up with padding. A text without
        words is one unknown word.
        """
        texts = list(texts)
        safe_read.fit("texts", 8 * len(texts) * self.length, "as inputs")
        rows = []
        for text in texts:
            tokens = self.tokens(words(text)[: self.length]) or [UNKNOWN]
            rows.append(tokens + [PADDING] * (self.length - len(tokens)))
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.length)

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.vocabulary, start=FIRST_WORD)}


def federated_vocabulary(counts: Iterable[Mapping[str, int]], size: int) -> tuple[str, ...]:
    """The most frequent words of all clients; those of equal frequency in alphabetical order.

    Args:
        counts: for each client, how often each word occurs in its training rows.
        size: the number of tokens, including padding, unknown and end.
    """
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return tuple(sorted(total, key=lambda word: (-total[word], word))[: size - FIRST_WORD])
