"""Texts as numbers: the words of a text, a vocabulary from federated counts, and its tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """How words become the numbers that a model reads.

    Args:
        vocabulary: the words with the tokens 3, 4, …, by falling frequency.
        length: the number of words that a model reads at once.
    """

    vocabulary: tuple[str, ...]
    length: int

    def tokens(self, text_words: Iterable[str]) -> list[int]:
        """The token of each word."""
        known = self._tokens
        return [known.get(word, UNKNOWN) for word in text_words]

    def encode(self, texts: Iterable[str]) -> Tensor:
        """(texts, length): the first words of each text, filled up with padding. A text without
        words is one unknown word.
        """
        rows = []
        for text in texts:
            tokens = self.tokens(words(text)[: self.length]) or [UNKNOWN]
            rows.append(tokens + [PADDING] * (self.length - len(tokens)))
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.length)

    @property
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
