"""Texts as a language-model data set: words, vocabulary, windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade.data import load
from fedclade.data.text_dataset import END, UNKNOWN, language_model, vocabulary, words
from fedclade.errors import InvalidInputError


def refused(field: object, *values: object) -> pytest.RaisesExc:
    """An `InvalidInputError` about this field, with these values in its message."""
    return pytest.raises(
        InvalidInputError,
        check=lambda error: (
            error.field == str(field) and all(str(value) in str(error) for value in values)
        ),
    )


def test_words_are_lower_case_letters_and_digits() -> None:
    assert words("It's 7.30 – the Café's  'half_open'!") == [
        "it's",
        "7",
        "30",
        "the",
        "café's",
        "half",
        "open",
    ]
    assert words("\\$ -- …") == []


def test_the_vocabulary_is_in_order_of_frequency_then_alphabet() -> None:
    texts = ["b b a", "c a B", "d"]
    assert vocabulary(texts) == ["b", "a", "c", "d"]
    assert vocabulary(texts, size=4) == ["b", "a"]  # in addition to UNKNOWN and END
    with refused("size", "2", "3"):
        vocabulary(texts, size=2)


def test_windows_by_hand() -> None:
    """b is in the training texts five times, a and c twice. Topic 0 is b b a END a b END, topic 7
    is c END b b c END.
    """
    train = (["b b a", "c", "a b", "b b c"], [0, 7, 0, 7])
    test = (["b x", "A b c"], [7, 0])
    data = language_model(train, test, name="by_hand", length=2)
    assert vocabulary(train[0]) == ["b", "a", "c"]
    b, a, c = 2, 3, 4
    assert data.name == "by_hand"
    assert data.x_train.tolist() == [
        [b, b],
        [END, a],
        [c, END],
        [b, c],
    ]  # the END of topic 0 is left over
    assert data.y_train.tolist() == [[b, a], [a, b], [END, b], [c, END]]
    assert data.x_test.tolist() == [[a, b], [b, UNKNOWN]]
    assert data.y_test.tolist() == [[b, c], [UNKNOWN, END]]
    assert data.keys["topic"][0].tolist() == [0, 0, 7, 7]
    assert torch.equal(data.keys["topic"][1], torch.tensor([0, 7]))
    assert data.classes == 5


def test_a_word_beyond_the_largest_target_is_unknown() -> None:
    """z is the rarest word and always the first of a window: as an input it would be outside of the
    model's `classes` embeddings.
    """
    data = language_model((["z a a a"], [0]), (["z a a a"], [0]), length=3)
    assert data.classes == 3
    assert data.x_train.tolist() == [[UNKNOWN, 2, 2]]


@given(
    texts=st.lists(
        st.tuples(st.lists(st.sampled_from("abcdefgh"), max_size=12), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    length=st.integers(1, 5),
    size=st.integers(3, 12),
)
def test_windows_are_the_joined_texts_cut(
    texts: list[tuple[list[str], int]], length: int, size: int
) -> None:
    part = ([" ".join(messages) for messages, _ in texts], [topic for _, topic in texts])
    tokens = {
        topic: sum(len(messages) + 1 for messages, params in texts if params == topic)
        for topic in set(part[1])
    }
    windows = {topic: count // (length + 1) for topic, count in tokens.items()}
    if not sum(windows.values()):
        with refused("train", max(tokens.values()), length + 1):
            language_model(part, part, size=size, length=length)
        return
    data = language_model(part, part, size=size, length=length)
    assert torch.equal(data.x_train, data.x_test)
    assert data.x_train.dtype == data.y_train.dtype == torch.int64
    assert {topic: int((data.keys["topic"][0] == topic).sum()) for topic in windows} == windows
    assert torch.equal(
        data.x_train[:, 1:][data.x_train[:, 1:] > 0], data.y_train[:, :-1][data.x_train[:, 1:] > 0]
    )
    assert data.classes is not None
    assert int(data.x_train.max()) < data.classes <= size
    number = {word: token for token, word in enumerate(vocabulary(part[0], size), start=2)}
    for topic in windows:
        joined = [
            token
            for messages, params in texts
            if params == topic
            for token in [*(number.get(w, UNKNOWN) for w in messages), END]
        ]
        expected = [
            joined[at + 1 : at + length + 1]
            for at in range(0, windows[topic] * (length + 1), length + 1)
        ]
        assert data.y_train[data.keys["topic"][0] == topic].tolist() == expected


def test_bad_texts() -> None:
    good = (["a b c"] * 20, [0] * 20)
    with refused("test", "2 texts", "1 topics"):
        language_model(good, (["a", "b"], [0]))
    with refused("test", "4 tokens", "31"):
        language_model(good, (["a b c"], [0]))
    with refused("length", "0", "1"):
        language_model(good, good, length=0)


# ag_news.npz


def saved(folder: Path, name: str = "ag_news", **changes: np.ndarray) -> Path:
    texts = np.array(["The quick brown fox jumps over the lazy dog."] * 8)
    arrays = {
        "x_train": texts,
        "y_train": np.arange(8, dtype=np.uint8) % 2,
        "x_test": texts,
        "y_test": np.arange(8, dtype=np.uint8) % 2,
    }
    np.savez(folder / f"{name}.npz", **(arrays | changes))  # type: ignore[arg-type]
    return folder / f"{name}.npz"


def test_ag_news_npz_of_texts(tmp_path: Path) -> None:
    saved(tmp_path)
    data = load("ag_news", root=tmp_path)
    assert data.name == "ag_news"
    assert data.x_train.shape == (2, 30)
    assert data.keys["topic"][0].tolist() == [0, 1]
    assert data.x_train[0, :11].tolist() == [
        2,
        9,
        3,
        5,
        6,
        8,
        2,
        7,
        4,
        END,
        2,
    ]  # the; then alphabetically


def test_ag_news_npz_of_tokens_is_not_changed(tmp_path: Path) -> None:
    tokens = np.arange(24).reshape(8, 3)
    data = load(saved(tmp_path, x_train=tokens, x_test=tokens, topic_train=np.zeros(8, int)))
    assert data.x_train.tolist() == tokens.tolist()
    assert set(data.keys) == {"topic"}


def test_other_texts_and_bad_topics_are_errors(tmp_path: Path) -> None:
    with refused(f"{tmp_path / 'mine.npz'}: x_train", "text", "np.unique"):
        load(saved(tmp_path, "mine"))
    path = saved(tmp_path, y_train=np.zeros(8))
    with refused(f"{path}: x_train", "y_train", "float64"):
        load(path)
    with refused(f"{path}: x_test", (8,), "y_test", (7,), "int64"):
        load(saved(tmp_path, y_test=np.zeros(7, int)))


def test_the_real_ag_news(real_data: Callable[[str], Path]) -> None:
    data = load("ag_news", root=real_data("ag_news").parent)
    assert data.x_train.shape[1:] == data.y_train.shape[1:] == (30,)
    assert data.classes == 2_000
    train, test = data.keys["topic"]
    assert test is not None
    assert train.unique().tolist() == test.unique().tolist() == [0, 1, 2, 3]
    assert (data.x_train == UNKNOWN).float().mean() < 0.25
    assert torch.equal(data.x_train[:, 1:], data.y_train[:, :-1])
