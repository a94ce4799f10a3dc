"""`fedclade data list`, `get` and `check`."""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fedclade.cli import data
from fedclade.data.dataset_catalog import CATALOGUE, MNIST_FILES, Published
from fedclade.errors import FedcladeError

Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command in an empty folder: what it printed, and the message of its error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDCLADE_DATA", raising=False)
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(variable, "127.0.0.1")
    app = typer.Typer()
    app.add_typer(data.data_app, name="data")

    def run(*arguments: str) -> tuple[str, str]:
        result = CliRunner().invoke(app, ["data", *arguments])
        if result.exception is not None and not isinstance(result.exception, FedcladeError):
            raise result.exception
        return result.stdout, str(result.exception or "")

    return run


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def mnist(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A small MNIST in the catalog, with five training and three test images; the contents of its
    files.
    """
    parts = (
        np.zeros((5, 28, 28)),
        np.array([0, 1, 9, 3, 4]),
        np.zeros((3, 28, 28)),
        np.array([0, 1, 2]),
    )
    contents = {
        f"{name}.gz": gzip.compress(idx(part), mtime=0)
        for name, part in zip(MNIST_FILES, parts, strict=True)
    }
    monkeypatch.setitem(CATALOGUE, "mnist", published(contents, "http://127.0.0.1:1"))
    return contents


def published(contents: dict[str, bytes], base: str) -> Published:
    files = tuple(
        replace(
            file,
            url=f"{base}/{file.name}",
            size=len(contents[file.name]),
            sha256=hashlib.sha256(contents[file.name]).hexdigest(),
        )
        for file in CATALOGUE["mnist"].files
    )
    return replace(CATALOGUE["mnist"], samples=(5, 3), files=files)


def put(folder: Path, contents: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def npz(path: Path, **changes: np.ndarray) -> None:
    x, y = np.zeros((4, 28, 28), np.uint8), np.arange(4)
    np.savez(path, **({"x_train": x, "y_train": y, "x_test": x, "y_test": y} | changes))  # type: ignore[arg-type]


def test_list_shows_all_data_sets_and_local_files(
    call: Call, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    put(tmp_path / "home/.cache/fedclade/mnist", mnist)
    (tmp_path / "data").mkdir()
    npz(tmp_path / "data/cifar10.npz")
    out, error = call("list")
    assert not error
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert set(CATALOGUE) < set(lines)
    assert "data/cifar10.npz" in lines["cifar10"]
    assert "50,000 + 10,000" in lines["cifar10"]
    assert "170" in lines["cifar10"].split()
    assert "not stated" in lines["cifar10"]
    assert "817,851" in lines["femnist"]
    assert lines["femnist"].split()[-4:] == ["–", "not", "stated", "none"]
    assert "120,000 + 7,600 texts" in lines["ag_news"]
    assert "home/.cache/fedclade/mnist" in "".join(part.strip() for part in out.splitlines())


def test_get_checks_existing_files(
    call: Call, mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "home/.cache/fedclade/mnist", mnist)
    out, error = call("get", "mnist")
    assert not error
    assert f"mnist is in {folder}" in out
    assert "CC BY-SA 3.0" in out
    monkeypatch.setenv("FEDCLADE_DATA", str(tmp_path / "variable"))
    error = call("get", "mnist")[1]
    assert f"{tmp_path}/variable/mnist" in error
    assert "http://127.0.0.1:1/train-images-idx3-ubyte.gz" in error
    error = call("get", "mnist", "--data-root", str(tmp_path / "root"))[1]
    assert f"{tmp_path}/root/mnist" in error


def test_get_downloads(
    call: Call, mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    served = put(tmp_path / "served", mnist)
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(served))
    ) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setitem(
            CATALOGUE, "mnist", published(mnist, f"http://127.0.0.1:{server.server_port}")
        )
        out, error = call("get", "mnist", "--data-root", "local")
        server.shutdown()
        thread.join()
    assert not error
    assert "mnist is in local/mnist" in out
    assert {file.name: file.read_bytes() for file in (tmp_path / "local/mnist").iterdir()} == mnist
    out, error = call("check", "mnist", "--data-root", "local")
    assert not error
    assert "mnist: local/mnist: OK, 5 + 3 samples of 1 × 28 × 28, 10 classes; SHA-256" in out


def test_get_of_unavailable_data_sets(call: Call) -> None:
    assert "LEAF" in call("get", "femnist")[1]
    error = call("get", "mnits")[1]
    assert error.startswith("NAME = 'mnits': ")
    assert "'mnist'" in error


def test_without_a_command_the_help_is_shown(call: Call) -> None:
    out, error = call()
    assert not error
    for command in ("list", "get", "check"):
        assert f"\n  {command} " in out


def test_check_reports_all_problems(call: Call, mnist: dict[str, bytes], tmp_path: Path) -> None:
    name = "train-images-idx3-ubyte.gz"
    other = gzip.compress(idx(np.ones((5, 28, 28))), mtime=0)
    put(tmp_path / "data/mnist", mnist | {name: other})
    npz(tmp_path / "data/mnist.npz")
    npz(tmp_path / "data/cifar100.npz", y_train=np.arange(3))
    put(tmp_path / "data/svhn", {"train_32x32.mat": b"x", "test_32x32.mat": b"y"})
    out, error = call("check")

    def line_of(start: str) -> str:
        return next(line for line in out.splitlines() if line.startswith(start))

    assert line_of("mnist: data/mnist.npz: OK, 4 + 4 samples of 1 × 28 × 28, 4 classes").endswith(
        "training samples: expected 5, found 4, test samples: expected 3, found 4, classes:"
        " expected 10, found 4"
    )
    actual, expected = (hashlib.sha256(content).hexdigest() for content in (other, mnist[name]))
    images = line_of(f"mnist: data/mnist: data/mnist/{name}: ")
    assert actual in images
    assert expected in images
    arrays = line_of("cifar100: data/cifar100.npz: ")
    assert re.search(r"x_train.*\b4\b.*y_train.*\b3\b", arrays)
    svhn = line_of("svhn: ")
    assert svhn.count("SHA-256") == 2
    assert "train_32x32.mat" in svhn
    assert "3 of 4" in error
    assert error.endswith("data/mnist, data/cifar100.npz, data/svhn.")


def test_check_of_unpacked_files_compares_their_shapes(
    call: Call, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    plain = {name.removesuffix(".gz"): gzip.decompress(content) for name, content in mnist.items()}
    put(tmp_path / "data/mnist", plain)
    out, error = call("check", "mnist")
    assert not error
    assert "5 + 3 samples of 1 × 28 × 28, 10 classes; no SHA-256" in out
    (tmp_path / "data/mnist" / MNIST_FILES[2]).write_bytes(idx(np.zeros((2, 28, 28))))
    (tmp_path / "data/mnist" / MNIST_FILES[3]).write_bytes(idx(np.zeros(2)))
    out, error = call("check", "mnist")
    assert "mnist: data/mnist: test samples: expected 3, found 2" in out
    assert "1 of 1" in error
    assert "data/mnist" in error


@pytest.mark.usefixtures("mnist")
def test_check_without_files(call: Call, tmp_path: Path) -> None:
    error = call("check")[1]
    assert f"data, {tmp_path}/home/.cache/fedclade" in error
    assert "'fedclade data get NAME'" in error
    put(tmp_path / "data/mnist", {"train-images-idx3-ubyte.gz": b""})
    error = call("check", "mnist")[1]
    missing = "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz"
    assert missing in error
    assert "'fedclade data get mnist'" in error
