"""Clients from texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedclade as fc
from fedclade.data.text_encoding import (
    END,
    FIRST_WORD,
    PADDING,
    UNKNOWN,
    TextEncoding,
    federated_vocabulary,
)
from fedclade.data.texts import window_starts
from fedclade.errors import FedcladeWarning, InvalidInputError

REVIEWS = {
    "shop": ["south", "north", "north", "south"],
    "review": ["Good, good tea", "bad tea", "", "GOOD coffee and more coffee"],
    "stars": ["up", "down", "down", "up"],
}


def refused(data: Any = REVIEWS, **options: Any) -> str:
    given = {"text": "review", "client": "shop", "target": "stars"} | options
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_text(data, **given)
    return raised.value.field


def csv_file(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding)
    return path


def test_a_vocabulary_is_made_of_sums_by_hand() -> None:
    counts = [{"tea": 2, "milk": 1}, {"coffee": 3, "tea": 1}, {"ale": 1}]
    assert federated_vocabulary(counts, 6) == ("coffee", "tea", "ale")
    assert federated_vocabulary(counts, 100) == ("coffee", "tea", "ale", "milk")


def test_texts_with_classes_by_hand() -> None:
    clients = fc.data.from_text(
        REVIEWS, text="review", client="shop", target="stars", length=4, words=6, test=0
    )
    assert clients.names.clients == ("north", "south")
    assert clients.names.classes == ("down", "up")
    assert isinstance(clients.encoding, TextEncoding)
    # good 3, coffee 2, tea 2; the rest are unknown
    assert clients.encoding.vocabulary == ("good", "coffee", "tea")
    x, y = clients.arrays("south")  # type: ignore[misc]
    assert x.tolist() == [[3, 3, 5, 0], [3, 4, 1, 1]]  # type: ignore[union-attr]
    assert y.tolist() == [1, 1]
    x, y = clients.arrays("north")  # type: ignore[misc]
    assert x.tolist() == [[1, 5, 0, 0], [1, 0, 0, 0]]  # type: ignore[union-attr]
    assert clients.encoding.encode(["tea, please"]).tolist() == [[5, UNKNOWN, PADDING, PADDING]]


def test_test_texts_do_not_change_the_vocabulary() -> None:
    texts = [f"word{number}" for number in range(20)]
    table = {"review": texts, "shop": ["a"] * 20, "stars": ["up", "down"] * 10}
    clients = fc.data.from_text(table, text="review", client="shop", target="stars", test=0.5)
    assert isinstance(clients.encoding, TextEncoding)
    assert len(clients.encoding.vocabulary) == 10
    assert clients.test_sizes.tolist() == [10]
    assert isinstance(clients.x_test, torch.Tensor)
    assert clients.x_test[:, 0].tolist() == [UNKNOWN] * 10


def test_tags_by_hand() -> None:
    table = {
        "site": ["a", "a", "b"],
        "note": [["Fever", "since", "May"], ["no", "fever"], ["cough", "fever", "cough"]],
        "tags": [["S", "O", "T"], ["O", "S"], ["S", "S", "S"]],
    }
    clients = fc.data.from_text(table, text="note", client="site", target="tags", length=3, test=0)
    assert clients.names.classes == ("O", "S", "T")
    assert isinstance(clients.encoding, TextEncoding)
    assert clients.encoding.vocabulary == ("fever", "cough", "may", "no", "since")
    x, y = clients.arrays("a")  # type: ignore[misc]
    # five words: the second window overlaps the first
    assert x.tolist() == [[3, 7, 5], [5, 6, 3]]  # type: ignore[union-attr]
    assert y.tolist() == [[1, 0, 2], [2, 0, 1]]
    spaced = {name: [" ".join(v) for v in table[name]] for name in ("note", "tags")}
    again = fc.data.from_text(
        table | spaced, text="note", client="site", target="tags", task="tagging", length=3, test=0
    )
    assert torch.equal(again.x, clients.x)  # type: ignore[arg-type]
    assert torch.equal(again.y, clients.y)


def test_the_next_word_by_hand() -> None:
    table = {"site": ["a", "a", "b"], "note": ["x y", "x z", "y"]}
    with pytest.warns(FedcladeWarning, match="1 of 2 clients") as warned:
        clients = fc.data.from_text(table, text="note", client="site", length=2, test=0)
    assert warned[0].message.field == "length"  # type: ignore[union-attr]
    x_, y_, z_ = FIRST_WORD, FIRST_WORD + 1, FIRST_WORD + 2
    assert clients.names.clients == ("a",)
    assert clients.classes == 6
    # x y END x z END
    assert clients.x.tolist() == [[x_, y_], [END, x_], [x_, z_]]  # type: ignore[union-attr]
    assert clients.y.tolist() == [[y_, END], [x_, z_], [z_, END]]


@given(st.integers(0, 200), st.integers(1, 40))
def test_windows_cover_every_token(tokens: int, length: int) -> None:
    starts = window_starts(tokens, length)
    covered = {place for start in starts for place in range(start, start + length)}
    assert covered == (set(range(tokens)) if tokens >= length else set())
    assert len(starts) == (-(-tokens // length) if tokens >= length else 0)


def test_a_csv_file_and_a_data_set(tmp_path: Path) -> None:
    path = csv_file(
        tmp_path / "reviews.csv",
        'shop,review,stars\nsouth,"Good, good\ntea",up\nnorth,bad tea,down\n',
        "utf-8-sig",
    )
    clients = fc.data.from_text(path, text="review", client="shop", target="stars", test=0)
    assert clients.names.clients == ("north", "south")
    assert isinstance(clients.encoding, TextEncoding)
    assert clients.encoding.vocabulary == ("good", "tea", "bad")
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    rows = datasets.Dataset.from_dict(REVIEWS)
    from_rows = fc.data.from_text(rows, text="review", client="shop", target="stars")
    from_dict = fc.data.from_text(REVIEWS, text="review", client="shop", target="stars")
    assert torch.equal(from_rows.x, from_dict.x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model",
    [fc.models.BagOfWords(50, 8), fc.models.TextTransformer(words=50, width=8, heads=2)],
    ids=lambda model: model.name,
)
def test_models_learn_classes_of_texts(model: Any) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    texts = [
        " ".join(f"{'even' if label == 0 else 'odd'}{n}" for n in rng.integers(5, size=4))
        for label in labels
    ]
    table = {"t": texts, "c": [f"site {n // 20}" for n in range(80)], "y": labels}
    clients = fc.data.from_text(table, text="t", client="c", target="y", length=8, words=50)
    result = fc.run(
        fc.FedAvg(), clients, model=model, rounds=15, clients_per_round=1.0, lr=0.5, batch_size=8
    )
    assert result.summary["accuracy"] == 100


def test_wrong_tables_are_named(tmp_path: Path) -> None:
    assert refused(client="shp") == "shp"
    assert refused(7) == "data"
    assert refused({name: [] for name in REVIEWS}) == "data"
    assert refused(REVIEWS | {"shop": ["a"]}) == "data"
    assert refused(REVIEWS | {"review": ["a", "b", 7, "c"]}) == "text"
    assert refused(REVIEWS | {"shop": [None] * 4}) == "data"
    assert refused(REVIEWS | {"stars": ["up"] * 4}) == "target"
    assert refused(REVIEWS | {"review": [["a"], "b", "c", 7]}, task="tagging") == "text"
    assert refused(task="tagging") == "target"
    absent = tmp_path / "absent.csv"
    assert refused(absent) == str(absent)
    for name, text in {
        "short": "shop,review,stars\na,b\n",
        "twice": "shop,shop\na,b\n",
        "empty": "",
        "quote": 'shop,review,stars\na,"b,c\n',
    }.items():
        path = csv_file(tmp_path / f"{name}.csv", text)
        assert refused(path) == str(path)
    latin = csv_file(tmp_path / "latin.csv", "shop,review,stars\nÖst,b,c\n", "latin-1")
    assert refused(latin) == str(latin)


def test_rows_with_gaps_are_left_out_and_counted() -> None:
    gaps = {
        "shop": ["n", None, "s", "s", "n", "s", 1.0, 1.0],
        "review": ["tea", "x", None, "cake", "tea", "tea", "tea", "cake"],
        "stars": ["up", "up", "up", "down", float("nan"), "up", "up", "down"],
    }
    with pytest.warns(FedcladeWarning) as caught:
        clients = fc.data.from_text(gaps, text="review", client="shop", target="stars", test=0)
    (message,) = (str(record.message) for record in caught)
    for part in ("3 of 8 rows", "1 with no value in 'shop'", "1 with no value in 'stars'"):
        assert part in message
    assert clients.names.clients == ("1", "n", "s")
    assert clients.sizes.tolist() == [2, 1, 2]
    clients = fc.data.from_text(REVIEWS, text="review", client="shop", test=0, length=2)
    assert len(clients) == 2  # an empty text is a text


@pytest.mark.parametrize(
    ("option", "value"),
    [("length", 0), ("words", 3), ("test", 1.5), ("task", "translation"), ("target", None)],
)
def test_wrong_options_are_named(option: str, value: Any) -> None:
    more = {"task": "classification"} if option == "target" else {}
    assert refused(**{option: value}, **more) == option


def test_a_length_that_no_client_has_is_refused() -> None:
    assert refused(target=None, length=50) == "length"
