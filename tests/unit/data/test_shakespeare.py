"""Shakespeare by role, from small files and from the real one."""

from __future__ import annotations

import lzma
import warnings
from pathlib import Path

import pytest
import torch

import fedclade as fc
from fedclade.data import NaturalId, load, partition, shakespeare
from fedclade.errors import FedcladeWarning, InvalidInputError

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
A, B = "a" * 30, "b" * 30
# HAL: 9 lines of 30 characters, of which 7 are for training; POINS says a line.
LINES = [("1h", "HAL", A if n < 7 else B) for n in range(9)] + [("1h", "POINS", "Well.")]


def write(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    text = "".join(",".join(row) + "\n" for row in [("play", "role", "line"), *rows])
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["shakespeare.csv", "shakespeare.csv.xz"])
def test_a_small_play_by_hand(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, [*LINES, *(("2h", "HAL", A) for _ in range(10))])
    with pytest.warns(FedcladeWarning, match="1 of 3 roles") as warned:
        data = load("shakespeare", root=tmp_path)
    assert warned[0].message.field == "shakespeare"  # type: ignore[union-attr]
    assert data.key_names["role"] == ("HAL (1h)", "HAL (2h)")
    # 7 lines and 6 line breaks are 216 characters: windows at 0, 80 and 135, of 215 targets
    train, test = data.keys["role"]
    assert test is not None
    assert train.tolist() == [0] * 3 + [1] * 4
    assert test.tolist() == []  # two lines of 30 characters are no window
    # tokens: a line break is 1, a is 2; b is in no training line
    first = [2] * 30 + [1] + [2] * 30 + [1] + [2] * 19
    assert isinstance(data.x_train, torch.Tensor)
    assert data.x_train[0].tolist() == first[:80]
    assert data.y_train[0].tolist() == first[1:81]
    assert data.classes == 3


def test_every_character_is_used_and_test_lines_follow(tmp_path: Path) -> None:
    lines = [f"{n:02d} " + "x" * 37 for n in range(20)]
    path = write(tmp_path / "shakespeare.csv", [("h", "HAL", line) for line in lines])
    data = shakespeare.read([path])
    assert isinstance(data.x_train, torch.Tensor)
    assert isinstance(data.x_test, torch.Tensor)
    # 16 and 4 lines of 40 characters with line breaks: 655 and 163 characters
    assert (len(data.y_train), len(data.y_test)) == (9, 3)
    known = ["?", *sorted(set("\n".join(lines[:16])))]
    text = "".join(known[token] for token in [*data.x_train[0].tolist(), int(data.y_train[0, -1])])
    assert text == "\n".join(lines)[:81]
    assert (data.x_train[1:, 0] == data.y_train[:-1, -1])[:-1].all()


def test_roles_are_named_clients_that_train(tmp_path: Path) -> None:
    rows = [("h", role, f"{role} says this line {n} times") for role in "AB" for n in range(30)]
    write(tmp_path / "shakespeare.csv", rows)
    data = load("shakespeare", root=tmp_path)
    clients = partition(data, NaturalId("role"), clients=2)
    assert clients.names.clients == ("A (h)", "B (h)")
    model = fc.models.LstmLanguageModel(4, 8, layers=1)
    result = fc.run(fc.FedAvg(), clients, model=model, rounds=1, clients_per_round=1.0, lr=0.1)
    assert result.clients["client"] == ["A (h)", "B (h)"]
    assert 0 <= result.summary["accuracy"] <= 100


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("shakespeare.csv", b"play,role\nh,HAL\n"),
        ("shakespeare.csv", b"play,role,line\nh,HAL\n"),
        ("shakespeare.csv", b"play,role,line\nh,HAL,short\n"),
        ("shakespeare.csv", b"play,role,line\nh,HAL,\xff\n"),
        ("shakespeare.csv.xz", b"no xz"),
        ("shakespeare.csv.xz", lzma.compress(b"play,role,line\n" * 100)[:-20]),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidInputError) as raised:
        load("shakespeare", root=tmp_path)
    assert raised.value.field == str(path)


def test_a_packed_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "shakespeare.csv.xz", LINES)
    monkeypatch.setattr(shakespeare, "_MOST_BYTES", 300)
    with pytest.raises(InvalidInputError) as raised:
        shakespeare.read([path])
    assert raised.value.field == str(path)


def test_the_real_plays() -> None:
    if not (SHARED / "shakespeare.csv.xz").is_file():
        pytest.skip(f"real data: no shakespeare.csv.xz in {SHARED}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedcladeWarning)
        data = load("shakespeare", root=SHARED)
    assert data.classes == 77
    assert "HAMLET (hamlet)" in data.key_names["role"]
    assert len(data.key_names["role"]) == len(data.keys["role"][0].unique())
