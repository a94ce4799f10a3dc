"""Texts with topics as a language-model data set: the task is to predict the next word.

Sattler et al., "Clustered Federated Learning" (2020), train such a model on AG News with one topic
per client. The perplexity is exp(loss).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fedclade.data.datasets import Dataset
from fedclade.data.text_encoding import words
from fedclade.errors import InvalidInputError, require

UNKNOWN, END = 0, 1
"""The tokens of a word that is not in the vocabulary, and of the end of a text."""

Texts: TypeAlias = tuple[Sequence[str], Sequence[int]]
"""Texts, and the topic of each text."""


def vocabulary(texts: Iterable[str], size: int = 2_000) -> list[str]:
    """The most frequent words, whose tokens are 2, 3, …. Words of equal frequency are in
    alphabetical order.

    Args:
        texts: the texts.
        size: the number of tokens, including UNKNOWN and END.
    """
    require(size > 2, "size", size, "must be at least 3: two tokens are UNKNOWN and END")
    counts = Counter(word for text in texts for word in words(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[: size - 2]


def language_model(
    train: Texts, test: Texts, name: str = "texts", size: int = 2_000, length: int = 30
) -> Dataset:
    """Make a data set of windows of `length` + 1 tokens: x has the first `length` tokens, y the
    last, so that y is the word after each word of x. The key is "topic".

    The texts of a topic are joined in their order, each followed by END, and cut into windows. The
    remainder is dropped, so that there is no padding. The vocabulary comes from the training part
    only.

    Args:
        train: the training texts and their topics.
        test: the test texts and their topics.
        name: the name of the data set.
        size: the size of the vocabulary, including UNKNOWN and END.
        length: the length T of a sequence.
    """
    require(length > 0, "length", length, "must be at least 1")
    token = {word: number for number, word in enumerate(vocabulary(train[0], size), start=END + 1)}
    (first, topics), (second, test_topics) = (
        _windows(*texts, token, length, part) for texts, part in ((train, "train"), (test, "test"))
    )
    x_train, y_train, x_test, y_test = (
        first[:, :-1].clone(),
        first[:, 1:].clone(),
        second[:, :-1].clone(),
        second[:, 1:].clone(),
    )
    # A model has one embedding per class, and the largest target is the last class. Rarer words of
    # the inputs therefore become UNKNOWN.
    last = max(int(y_train.max()), int(y_test.max()))
    for x in (x_train, x_test):
        x[x > last] = UNKNOWN
    return Dataset(name, x_train, y_train, x_test, y_test, {"topic": (topics, test_topics)})


def _windows(
    texts: Sequence[str], topics: Sequence[int], token: Mapping[str, int], length: int, part: str
) -> tuple[Tensor, Tensor]:
    if len(texts) != len(topics):
        raise InvalidInputError(
            f"{part} has {len(texts)} texts and {len(topics)} topics. Give one topic per text.",
            part,
        )
    joined: dict[int, list[int]] = {topic: [] for topic in sorted(set(topics))}
    for text, topic in zip(texts, topics, strict=True):
        joined[topic] += [token.get(word, UNKNOWN) for word in words(text)] + [END]
    counts = [len(tokens) // (length + 1) for tokens in joined.values()]
    if not sum(counts):
        longest = max(map(len, joined.values()), default=0)
        raise InvalidInputError(
            f"{part} has at most {longest} tokens per topic, but a window needs {length + 1}. Give"
            " more text or a smaller length.",
            part,
        )
    cut = [
        torch.tensor(tokens[: count * (length + 1)])
        for tokens, count in zip(joined.values(), counts, strict=True)
        if count
    ]
    return torch.cat(cut).reshape(-1, length + 1), torch.tensor(list(joined)).repeat_interleave(
        torch.tensor(counts)
    )
