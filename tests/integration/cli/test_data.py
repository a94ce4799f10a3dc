"""`fedclade data list|get|check`, called in this process."""

from __future__ import annotations

import gzip
import hashlib
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
    """The command in an empty folder: what it printed, and what the command line's `main` would
    print as one line.
    """
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
    """A small MNIST in the catalogue: five training and three test images, and its files'
    contents.
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


def test_list_names_all_with_what_is_here(
    call: Call, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    put(tmp_path / "home/.cache/fedclade/mnist", mnist)
    (tmp_path / "data").mkdir()
    npz(tmp_path / "data/cifar10.npz")
    shown, error = call("list")
    assert not error
    lines = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert set(CATALOGUE) < set(lines)
    assert "data/cifar10.npz" in lines["cifar10"]
    assert "50,000 + 10,000" in lines["cifar10"]
    assert "170" in lines["cifar10"].split()
    assert "not stated" in lines["cifar10"]
    assert "817,851" in lines["femnist"]
    assert lines["femnist"].split()[-4:] == ["–", "not", "stated", "no"]
    assert "120,000 + 7,600 texts" in lines["ag_news"]
    assert "home/.cache/fedclade/mnist" in "".join(part.strip() for part in shown.splitlines())


def test_get_what_is_here_already_checks_it(
    call: Call, mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "home/.cache/fedclade/mnist", mnist)
    shown, error = call("get", "mnist")
    assert not error
    assert f"mnist is in {folder}, SHA-256 as expected. Licence: CC BY-SA 3.0." in shown
    monkeypatch.setenv("FEDCLADE_DATA", str(tmp_path / "variable"))
    assert (
        f"Put into {tmp_path}/variable/mnist: http://127.0.0.1:1/train-images-idx3-ubyte.gz"
        " (SHA-256 " in call("get", "mnist")[1]
    )
    assert (
        f"Put into {tmp_path}/root/mnist: "
        in call("get", "mnist", "--data-root", str(tmp_path / "root"))[1]
    )


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
        shown, error = call("get", "mnist", "--data-root", "here")
        server.shutdown()
        thread.join()
    assert not error
    assert "mnist is in here/mnist, SHA-256 as expected." in shown
    assert {file.name: file.read_bytes() for file in (tmp_path / "here/mnist").iterdir()} == mnist
    shown, error = call("check", "mnist", "--data-root", "here")
    assert not error
    assert (
        "mnist: here/mnist: OK, 5 + 3 samples of 1 × 28 × 28, 10 classes; SHA-256 as expected"
        in shown
    )


def test_get_of_what_cannot_be_had(call: Call) -> None:
    assert "is made by LEAF's own script" in call("get", "femnist")[1]
    assert (
        call("get", "mnits")[1]
        == "data set 'mnits': there is no published data set of that name. Did you mean 'mnist'?"
    )


def test_without_a_command_the_help_is_shown(call: Call) -> None:
    shown, error = call()
    assert not error
    assert "list" in shown
    assert "Download a data set" in shown


def test_check_finds_what_is_wrong_and_goes_on(
    call: Call, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    name = "train-images-idx3-ubyte.gz"
    other = gzip.compress(idx(np.ones((5, 28, 28))), mtime=0)
    put(tmp_path / "data/mnist", mnist | {name: other})
    npz(tmp_path / "data/mnist.npz")
    npz(tmp_path / "data/cifar100.npz", y_train=np.arange(3))
    put(tmp_path / "data/svhn", {"train_32x32.mat": b"x", "test_32x32.mat": b"y"})
    shown, error = call("check")
    unlike = (
        "training samples: expected 5, found 4, test samples: expected 3, found 4, classes:"
        " expected 10, found 4"
    )
    start = (
        "mnist: data/mnist.npz: OK, 4 + 4 samples of 1 × 28 × 28, 4 classes; no SHA-256 is known of"
        " such files"
    )
    assert f"{start}; unlike the published data: {unlike}\n" in shown
    found, expected = (hashlib.sha256(content).hexdigest() for content in (other, mnist[name]))
    assert (
        f"mnist: data/mnist: data/mnist/{name}: expected SHA-256 {expected}, found {found}" in shown
    )
    assert (
        "cifar100: data/cifar100.npz: data/cifar100.npz: x_train has 4 samples and y_train has 3"
        in shown
    )
    svhn = next(line for line in shown.splitlines() if line.startswith("svhn: "))
    assert svhn.count("expected SHA-256") == 2
    assert "train_32x32.mat: no MATLAB file" in svhn
    assert error == "data check: 3 of 4 wrong: data/mnist, data/cifar100.npz, data/svhn."


def test_check_of_unpacked_files_compares_their_shapes(
    call: Call, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    plain = {name.removesuffix(".gz"): gzip.decompress(content) for name, content in mnist.items()}
    put(tmp_path / "data/mnist", plain)
    shown, error = call("check", "mnist")
    assert not error
    assert "5 + 3 samples of 1 × 28 × 28, 10 classes; no SHA-256 is known of such files" in shown
    (tmp_path / "data/mnist" / MNIST_FILES[2]).write_bytes(idx(np.zeros((2, 28, 28))))
    (tmp_path / "data/mnist" / MNIST_FILES[3]).write_bytes(idx(np.zeros(2)))
    shown, error = call("check", "mnist")
    assert "mnist: data/mnist: test samples: expected 3, found 2" in shown
    assert error == "data check: 1 of 1 wrong: data/mnist."


def test_check_where_nothing_is(call: Call, mnist: dict[str, bytes], tmp_path: Path) -> None:
    assert call("check")[1].startswith(
        f"data check: no known data set is in data, {tmp_path}/home/.cache/fedclade."
    )
    put(tmp_path / "data/mnist", {"train-images-idx3-ubyte.gz": b""})
    missing = "train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz"
    assert (
        f"data check: mnist is not in data, {tmp_path}/home/.cache/fedclade. data/mnist lacks"
        f" {missing}." in call("check", "mnist")[1]
    )
