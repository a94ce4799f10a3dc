"""Texts with topics as a language-model data set: a word is to be told from the words before it.

Sattler et al., "Clustered Federated Learning" (2020), train such a model on AG News with one topic
a client; perplexity is exp(loss).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fedclade.data.datasets import Dataset
from fedclade.errors import InvalidInputError, require

UNKNOWN, END = 0, 1
"""Tokens that are no words: one that the vocabulary lacks, and the end of a text."""

Texts: TypeAlias = tuple[Sequence[str], Sequence[int]]
"""Texts, and the topic of each."""

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def words(text: str) -> list[str]:
    """Letters and digits in lower case, with the apostrophe inside a word: "It's 7.30!" is it's, 7,
    30.
    """
    return _WORD.findall(text.lower())


def vocabulary(texts: Iterable[str], size: int = 2_000) -> list[str]:
    """The most frequent words, which have the tokens 2, 3, …; `size` counts UNKNOWN and END.
    Equally frequent words go by the alphabet.
    """
    require(
        size > 2, "vocabulary size", size, "it must be at least 3, since two tokens are no words"
    )
    counts = Counter(word for text in texts for word in words(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]


def language_model(
    train: Texts, test: Texts, name: str = "texts", size: int = 2_000, length: int = 30
) -> Dataset:
    """Windows of `length` + 1 tokens: x has the first `length` (T), y the last, so y is the word
    after each of x; the key is "topic".

    The texts of a topic are joined in their order, each followed by END, and cut; what is left over
    at the end is dropped, so that nothing is padded. The vocabulary comes from the training part
    alone.
    """
    require(length > 0, "length", length, "it must be at least 1")
    token = {word: number for number, word in enumerate(vocabulary(train[0], size), start=END + 1)}
    (first, topics), (second, test_topics) = (
        _windows(*part, token, length, what) for part, what in ((train, "training"), (test, "test"))
    )
    x_train, y_train, x_test, y_test = (
        first[:, :-1].clone(),
        first[:, 1:].clone(),
        second[:, :-1].clone(),
        second[:, 1:].clone(),
    )
    # A model has one embedding for each class, and the classes end with the largest target: a rarer
    # word is one it does not know.
    last = max(int(y_train.max()), int(y_test.max()))
    for x in (x_train, x_test):
        x[x > last] = UNKNOWN
    return Dataset(name, x_train, y_train, x_test, y_test, {"topic": (topics, test_topics)})


def _windows(
    texts: Sequence[str], topics: Sequence[int], token: Mapping[str, int], length: int, what: str
) -> tuple[Tensor, Tensor]:
    if len(texts) != len(topics):
        raise InvalidInputError(
            f"the {what} part has {len(texts)} texts and {len(topics)} topics: give one topic a"
            " text."
        )
    joined: dict[int, list[int]] = {topic: [] for topic in sorted(set(topics))}
    for text, topic in zip(texts, topics, strict=True):
        joined[topic] += [token.get(word, UNKNOWN) for word in words(text)] + [END]
    counts = [len(tokens) // (length + 1) for tokens in joined.values()]
    if not sum(counts):
        longest = max(map(len, joined.values()), default=0)
        raise InvalidInputError(
            f"the {what} part has at most {longest} tokens a topic, fewer than the {length + 1} of"
            " a window."
        )
    cut = [
        torch.tensor(tokens[: count * (length + 1)])
        for tokens, count in zip(joined.values(), counts, strict=True)
        if count
    ]
    return torch.cat(cut).reshape(-1, length + 1), torch.tensor(list(joined)).repeat_interleave(
        torch.tensor(counts)
    )
