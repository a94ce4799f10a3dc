"""Damaged files of any source: each is read or is an error of fedclade, and no other error.
FEDCLADE_FUZZ=20000 sets the number of files of each kind.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.io import savemat

import fedclade as fc
from fedclade.analysis import report
from fedclade.data import readers
from fedclade.data.encoding import encoding_from_json
from fedclade.errors import FedcladeError
from fedclade.io import checkpoint
from fedclade.io.run_dir import RunDirectory
from fedclade.models import ConvAutoencoder
from fedclade.training import encoders, experiment_file, plot_data

CASES = int(os.environ.get("FEDCLADE_FUZZ", "60"))
often = settings(
    max_examples=CASES, deadline=timedelta(seconds=60), suppress_health_check=list(HealthCheck)
)


def damaged(whole: bytes, seed: int) -> bytes:
    """The file with some bytes changed, removed, repeated or overwritten, or truncated."""
    draw, data = random.Random(seed), bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        if not data:
            break
        at, length = draw.randrange(len(data)), draw.choice((1, 2, 4, 16, 200))
        how = draw.randrange(6)
        if how == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            data[at : at + length] = draw.randbytes(length)
        elif how == 2:
            del data[at : at + length]
        elif how == 3:
            data[at:at] = data[at : at + length]
        elif how == 4:
            data[at : at + length] = draw.choice((b"\xff", b"\x00", b"9")) * length
        else:
            del data[at:]
    return bytes(data)


def error_of(call: Callable[[], object]) -> FedcladeError | None:
    """The error of fedclade that a call raises, or None. Other errors are not caught."""
    error = None
    try:
        call()
    except FedcladeError as caught:
        error = caught
    assert error is None or str(error)
    return error


def idx_file(shape: tuple[int, ...]) -> bytes:
    return (
        bytes((0, 0, 8, len(shape)))
        + b"".join(n.to_bytes(4, "big") for n in shape)
        + bytes(i % 10 for i in range(int(np.prod(shape))))
    )


def in_memory(write: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def cifar_archive() -> bytes:
    def write(file: io.BytesIO) -> None:
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name in ("c/a.bin", "c/b.bin"):
                info = tarfile.TarInfo(name)
                info.size = 2 * 3073
                archive.addfile(info, io.BytesIO(bytes(info.size)))

    return in_memory(write)


def emnist_archive() -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for part, shape in zip(
                readers.IDX_PARTS, ((2, 28, 28), (2,), (2, 28, 28), (2,)), strict=True
            ):
                archive.writestr(f"gzip/emnist-balanced-{part}.gz", gzip.compress(idx_file(shape)))

    return in_memory(write)


def leaf_file() -> bytes:
    data = {"x": [[k / 255 for k in range(256)] * 3 + [0.0] * 16] * 2, "y": [1, 2]}
    return json.dumps({"users": ["a"], "num_samples": [2], "user_data": {"a": data}}).encode()


def npz_file() -> bytes:
    rows = {"x": np.zeros((4, 3), np.float32), "y": np.arange(4) % 2, "site": np.arange(4)}
    return in_memory(
        lambda file: np.savez(
            file,
            **{
                f"{name}_{part}": value
                for name, value in rows.items()
                for part in ("train", "test")
            },
        )
    )


def mat_file() -> bytes:
    return in_memory(
        lambda file: savemat(
            file, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [10]])}
        )
    )


def at(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def in_idx(folder: Path, data: bytes) -> object:
    good = [idx_file(shape) for shape in ((2, 4, 4), (2,), (2, 4, 4), (2,))]
    return readers.idx(
        "mnist",
        10,
        [
            at(folder, f"{number}", data if number == 0 else content)
            for number, content in enumerate(good)
        ],
    )


def in_leaf(folder: Path, data: bytes) -> object:
    at(folder, "test/t.json", leaf_file())
    at(folder, "train/t.json", data)
    return readers.leaf("femnist", 62, [folder / "train", folder / "test"])


NEWS = b'"1","A title","Some words here, and some more of them to read."\n' * 40
READERS: dict[str, tuple[bytes, Callable[[Path, bytes], object]]] = {
    "idx": (idx_file((2, 4, 4)), in_idx),
    "idx.gz": (gzip.compress(idx_file((2, 4, 4))), in_idx),
    "emnist": (
        emnist_archive(),
        lambda folder, data: readers.emnist("balanced", 47, [at(folder, "gzip.zip", data)]),
    ),
    "cifar": (
        cifar_archive(),
        lambda folder, data: readers.cifar(
            "cifar10", 10, 1, ["a.bin", "b.bin"], [at(folder, "c.tar.gz", data)]
        ),
    ),
    "svhn": (
        mat_file(),
        lambda folder, data: readers.svhn(
            [at(folder, "train.mat", data), at(folder, "test.mat", mat_file())]
        ),
    ),
    "leaf": (leaf_file(), in_leaf),
    "ag_news": (
        NEWS,
        lambda folder, data: readers.ag_news(
            [at(folder, "train.csv", data), at(folder, "test.csv", NEWS)]
        ),
    ),
    "npz": (npz_file(), lambda folder, data: fc.data.load(at(folder, "mine.npz", data))),
}


@pytest.mark.parametrize("name", READERS)
def test_the_whole_file_is_read(name: str, tmp_path: Path) -> None:
    whole, read = READERS[name]
    read(tmp_path, whole)


# Errors about the content, after the file was read.
FIELDS = ("x_train", "y_train", "x_test", "y_test", "the test part", "train", "test")


@pytest.mark.parametrize("name", READERS)
@given(seed=st.integers(0, 2**32))
@often
def test_a_damaged_data_set_gives_an_error_of_ours_or_data(name: str, seed: int) -> None:
    whole, read = READERS[name]
    with tempfile.TemporaryDirectory() as folder:
        error = error_of(lambda: read(Path(folder), damaged(whole, seed)))
        assert error is None or error.field.startswith(folder) or error.field in FIELDS


ROW = {"round": 3, "clusters": 1, "bytes_up": 0, "bytes_down": 0, "seconds": 0.5, "failures": []}


def checkpoint_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        state = {"models/w": torch.arange(12.0).reshape(3, 4), "cluster": torch.arange(3)}
        checkpoint.save(
            Path(folder),
            checkpoint.Checkpoint(3, state, {"ids": torch.arange(2)}, [ROW], "configuration"),
        )
        (file,) = Path(folder).iterdir()
        return file.read_bytes()


def encoder_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, spec = Path(folder) / "e.safetensors", ConvAutoencoder(4)
        encoders.write(path, spec.build((1, 28, 28), 0), spec, (1, 28, 28), {})
        return path.read_bytes()


CHECKPOINT, ENCODER = checkpoint_file(), encoder_file()


@given(seed=st.integers(0, 2**32))
@often
def test_a_damaged_checkpoint_is_detected(seed: int) -> None:
    data = damaged(CHECKPOINT, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = at(Path(folder), "round-000003.safetensors", data)
        error = error_of(lambda: checkpoint.latest(Path(folder)))
        if error is None:
            newest = checkpoint.latest(Path(folder))
            assert newest is not None
            assert torch.equal(newest.state["models/w"], torch.arange(12.0).reshape(3, 4))
            assert newest.round == 3
        else:
            assert error.field == str(path)


@pytest.mark.parametrize(
    ("name", "whole", "read"),
    [
        ("e", ENCODER, encoders.read),
        (plot_data.FILE, CHECKPOINT, lambda path: plot_data.read(path.parent)),
    ],
)
@given(seed=st.integers(0, 2**32))
@often
def test_damaged_encoders_and_features_are_detected(
    name: str, whole: bytes, read: Callable[[Path], object], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = at(Path(folder), name, damaged(whole, seed))
        error = error_of(lambda: read(path))
        assert error is None or str(path) in str(error)


EXPERIMENT = experiment_file.read("quickstart")
words = st.sampled_from(
    sorted(
        {key for table in EXPERIMENT.values() for key in table}
        | {*EXPERIMENT, "nan", "clade", "cnn", "auto", "é", ""}
    )
)
values = st.recursive(
    st.one_of(
        st.integers(),
        st.floats(),
        st.booleans(),
        words,
        st.text(max_size=8),
        st.dates(),
        st.sampled_from([0, -1, 1e308, 2**63, 1e-320]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(
    changes=st.lists(
        st.tuples(st.sampled_from([*EXPERIMENT, "other"]), words, values), min_size=1, max_size=4
    )
)
@often
def test_an_experiment_of_any_values_is_an_experiment_or_an_error_of_ours(
    changes: list[tuple[str, str, Any]],
) -> None:
    tables: dict[str, Any] = {name: dict(table) for name, table in EXPERIMENT.items()}
    for table, key, value in changes:
        tables.setdefault(table, {})[key] = value
    try:
        text = tomli_w.dumps(tables)
    except (TypeError, ValueError, UnicodeEncodeError):
        return
    with tempfile.TemporaryDirectory() as folder:
        path = at(Path(folder), "mine.toml", text.encode("utf-8", "surrogatepass"))
        error_of(lambda: experiment_file.experiment(experiment_file.read(path)).clients())


@given(seed=st.integers(0, 2**32))
@often
def test_a_damaged_experiment_file_is_an_experiment_or_an_error_of_ours(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = at(Path(folder), "mine.toml", damaged(tomli_w.dumps(EXPERIMENT).encode(), seed))
        error = error_of(lambda: experiment_file.experiment(experiment_file.read(path)))
        assert error is None or error.field


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a diagnosis and a comparison, which the report reads too."""
    draw = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.randn(6, 3, generator=draw),
            torch.arange(6) % 2,
            torch.randn(4, 3, generator=draw),
            torch.arange(4) % 2,
        )
    ] * 4
    out = tmp_path_factory.mktemp("ran") / "run"
    fc.run(
        fc.Clade(),
        fc.data.from_arrays(clients),
        fc.models.MLP(8),
        rounds=2,
        eval_every=1,
        out=out,
        threads=1,
    )
    diagnosis = {
        "headline": "Label skew.",
        "sentences": ["Label skew.", "Use Clade."],
        "sure": 0.5,
        "group": [0, 0, 1, 1],
    }
    (out / "diagnosis.json").write_text(json.dumps(diagnosis))
    compared = {
        "folders": {"clade": ["clade-seed0"]},
        "differences": {"in_words": ["Clade is better."]},
    }
    (out / "comparison.json").write_text(json.dumps(compared))
    planned = [{"name": name, "title": "clade", "rounds": 2} for name in ("run", "clade-seed1")]
    RunDirectory(out).write_plan(planned)
    return out


IN_RUNS = [
    "summary.json",
    "rounds.jsonl",
    "clients.csv",
    "experiment.toml",
    "comparison.json",
    "plan.json",
    "diagnosis.json",
    plot_data.FILE,
]


def test_the_whole_run_is_read(ran: Path) -> None:
    report.page(report.collect([ran]))
    fc.load(ran)


@pytest.mark.parametrize("name", [*IN_RUNS, "models/models.safetensors"])
@given(seed=st.integers(0, 2**32))
@often
def test_a_damaged_run_is_reported_and_loaded_or_an_error_of_ours(
    ran: Path, name: str, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(
            shutil.copytree(ran, Path(folder) / "run", ignore=shutil.ignore_patterns("checkpoint"))
        )
        (run / name).write_bytes(damaged((ran / name).read_bytes(), seed))
        if name in IN_RUNS:
            error_of(lambda: report.page(report.collect([run])))
        error_of(lambda: fc.load(run))


@pytest.fixture(scope="module")
def encodings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of texts, and the content of encoding.json of each kind."""
    folder = tmp_path_factory.mktemp("encodings")
    texts = {"shop": ["a", "b"] * 4, "review": ["tea", "bad ale"] * 4, "stars": ["u", "d"] * 4}
    clients = fc.data.from_text(texts, text="review", client="shop", target="stars", length=4)
    model = fc.models.BagOfWords(words=10_000)
    fc.run(fc.FedAvg(), clients, model, rounds=1, out=folder / "run", threads=1, device="cpu")
    shutil.copy(folder / "run" / "encoding.json", folder / "text")
    images = {"height": 8, "width": 9, "color": "gray", "resize": True, "kind": "images"}
    (folder / "images").write_text(json.dumps(images))
    columns = [{"name": "age", "mean": 1.0, "scale": 2.0, "flag": True, "kind": "number"}]
    columns += [{"name": "ward", "categories": ["x"], "flag": False, "kind": "category"}]  # type: ignore[dict-item]
    table = {"client": "s", "target": "y", "task": "regression", "columns": columns}
    (folder / "columns").write_text(json.dumps(table | {"kind": "columns"}))
    return folder


@pytest.mark.parametrize("name", ["text", "images", "columns"])
def test_every_kind_of_encoding_is_read(encodings: Path, name: str) -> None:
    assert encoding_from_json(json.loads((encodings / name).read_text())).kind == name


@pytest.mark.parametrize("name", ["text", "images", "columns"])
@given(seed=st.integers(0, 2**32))
@often
def test_a_damaged_encoding_predicts_or_is_an_error_of_ours(
    encodings: Path, name: str, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(encodings / "run", Path(folder) / "run"))
        (run / "encoding.json").write_bytes(damaged((encodings / name).read_bytes(), seed))
        error_of(lambda: fc.load(run).predict(["good tea"], client="a"))
