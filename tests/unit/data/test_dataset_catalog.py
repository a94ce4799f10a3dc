"""The published data sets: which folders are searched, and how files are downloaded (from a server
on this machine).
"""

from __future__ import annotations

import gzip
import hashlib
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedclade.data import dataset, download, load
from fedclade.data.dataset_catalog import CATALOGUE, MNIST_FILES, File, Published
from fedclade.errors import FedcladeError, InvalidInputError


def refused(
    field: object, *values: object, kind: type[FedcladeError] = InvalidInputError
) -> pytest.RaisesExc:
    """An error about this field, with these values in its message."""
    return pytest.raises(
        kind,
        check=lambda error: (
            error.field == str(field) and all(str(value) in str(error) for value in values)
        ),
    )


# the catalog


def test_every_entry_is_complete() -> None:
    images = {
        "mnist",
        "fashion_mnist",
        "emnist_balanced",
        "emnist_byclass",
        "cifar10",
        "cifar100",
        "svhn",
        "femnist",
    }
    assert set(CATALOGUE) == images | {"ag_news", "shakespeare"}
    for name, published in CATALOGUE.items():
        assert published.name == name
        assert published.licence
        assert bool(published.files) != bool(published.made_by)
        for file in published.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert file.url.endswith(file.name)
            assert file.size > 1000
    sums = {file.sha256: file.url for published in CATALOGUE.values() for file in published.files}
    assert len(sums) == 4 + 4 + 1 + 1 + 1 + 2 + 2  # both splits of EMNIST are in one archive


# the folders that are searched


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def put_mnist(place: Path, label: int, pack: bool = True) -> None:
    folder = place / "mnist"
    folder.mkdir(parents=True, exist_ok=True)
    for name in MNIST_FILES:
        content = idx(np.zeros((2, 28, 28)) if "images" in name else np.full(2, label))
        (folder / (f"{name}.gz" if pack else name)).write_bytes(
            gzip.compress(content) if pack else content
        )


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    home, here, by_variable, root = (
        tmp_path / name for name in ("home", "here", "variable", "root")
    )
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FEDCLADE_DATA", str(by_variable))
    return [root, by_variable, here / "data", home / ".cache/fedclade"]


def test_published_files_are_searched_in_every_place_after_npz(places: list[Path]) -> None:
    for number, place in enumerate(places):
        put_mnist(place, number, pack=number % 2 == 0)
    for number, place in enumerate(places):
        assert load("mnist", root=places[0]).y_train.tolist() == [number] * 2
        for file in (place / "mnist").iterdir():
            file.unlink()
    put_mnist(places[0], 1)
    x, y = np.zeros((3, 4, 4), np.uint8), np.full(3, 9)
    np.savez(places[-1] / "mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert (
        load("mnist", root=places[0]).y_train.tolist() == [9] * 3
    )  # an .npz in the last place comes before files in the first


def test_a_known_data_set_that_is_not_downloaded(places: list[Path]) -> None:
    put_mnist(places[0], 0)
    (places[0] / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InvalidInputError) as caught:
        load("mnist", root=places[0])
    message = str(caught.value)
    for place in (*places[:2], Path("data"), places[3]):
        assert f"{place}/mnist.npz" in message
        assert f"{place}/mnist" in message
    assert caught.value.field == "mnist"
    assert f"{places[0]}/mnist lacks train-labels-idx1-ubyte.gz." in message
    assert "'fedclade data get mnist'" in message
    assert "fashion_mnist" not in message  # no suggestion


def test_a_name_close_to_a_published_one() -> None:
    with refused("cifar_100", "'cifar100'"):
        load("cifar_100")


# downloads


CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT with ranges. The server closes the connection after `breaks` bytes."""

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)  # type: ignore[attr-defined]
        if self.path == "/gone":
            self.send_error(404)
            return
        content, status = (
            (b"<html>sign in</html>", 200) if self.path == "/portal" else (CONTENT, 200)
        )
        if wanted is not None and self.path != "/no-ranges":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            content, status = content[start:], 206
        self.send_response(status)
        if self.path != "/no-length":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        breaks = self.server.breaks  # type: ignore[attr-defined]
        self.wfile.write(content[:breaks])

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.breaks: int | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(variable, "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def file_at(url: str, content: bytes = CONTENT) -> File:
    return File("data.bin", url, len(content), hashlib.sha256(content).hexdigest())


def toy(*files: File) -> Published:
    made = dataset(np.zeros((1, 1)), [0])
    return Published("toy", "A toy", (1, 1), (1,), 1, "MIT", files, lambda _: made, "toy")


class Reported(list[int]):
    """The reported progress."""

    def __call__(self, file: File, done: int) -> None:
        self.append(done)


@pytest.mark.parametrize("path", ["/data.bin", "/no-length"])
def test_a_download(tmp_path: Path, server: Server, path: str) -> None:
    reported = Reported()
    folder = download.get(toy(file_at(server.url + path)), tmp_path, reported)
    assert folder == tmp_path / "toy"
    assert [file.name for file in folder.iterdir()] == ["data.bin"]
    assert (folder / "data.bin").read_bytes() == CONTENT
    assert reported == sorted(reported)
    assert reported[-1] == len(CONTENT)
    download.get(toy(file_at(server.url + path)), tmp_path, Reported())
    assert server.ranges == [None]  # a file on the disk is not requested again


@pytest.mark.parametrize("path", ["/data.bin", "/no-length"])
def test_a_transfer_that_broke_off_is_resumed(tmp_path: Path, server: Server, path: str) -> None:
    published, part = toy(file_at(server.url + path)), tmp_path / "toy" / "data.bin.part"
    server.breaks = 100_000
    with refused(server.url + path, "100000 of 300000", kind=download.DownloadError):
        download.get(published, tmp_path, Reported())
    assert part.read_bytes() == CONTENT[:100_000]
    assert not (tmp_path / "toy" / "data.bin").exists()
    server.breaks = None
    reported = Reported()
    download.get(published, tmp_path, reported)
    assert server.ranges == [None, "bytes=100000-"]
    assert reported[0] > 100_000
    assert (tmp_path / "toy" / "data.bin").read_bytes() == CONTENT
    assert not part.exists()


def test_a_server_without_ranges_sends_everything_again(tmp_path: Path, server: Server) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "data.bin.part").write_bytes(b"x" * 50)
    download.get(toy(file_at(f"{server.url}/no-ranges")), tmp_path, Reported())
    assert (tmp_path / "toy" / "data.bin").read_bytes() == CONTENT


def test_a_complete_part_is_not_requested(tmp_path: Path, server: Server) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "data.bin.part").write_bytes(CONTENT)
    download.get(toy(file_at(f"{server.url}/data.bin")), tmp_path, Reported())
    assert (tmp_path / "toy" / "data.bin").read_bytes() == CONTENT
    assert server.ranges == []


def test_the_error_of_a_wrong_checksum_has_both_sums_and_the_part_is_removed(
    tmp_path: Path, server: Server
) -> None:
    file = replace(file_at(f"{server.url}/data.bin"), sha256="0" * 64)
    found = hashlib.sha256(CONTENT).hexdigest()
    part = tmp_path / "toy" / "data.bin.part"
    with refused(file.url, part, "0" * 64, found, kind=download.DownloadError):
        download.get(toy(file), tmp_path, Reported())
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_wrong_file_on_the_disk_stays_unchanged(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    target = tmp_path / "toy" / "data.bin"
    target.write_bytes(b"mine")
    with refused(target, file_at("x").sha256, hashlib.sha256(b"mine").hexdigest()):
        download.get(toy(file_at("http://127.0.0.1:1/data.bin")), tmp_path, Reported())
    assert target.read_bytes() == b"mine"


def test_an_html_page_in_place_of_the_file_is_not_stored(tmp_path: Path, server: Server) -> None:
    with refused(f"{server.url}/portal", "20", "300000", kind=download.DownloadError):
        download.get(toy(file_at(f"{server.url}/portal")), tmp_path, Reported())
    assert list((tmp_path / "toy").iterdir()) == []


def test_without_a_server_the_error_lists_the_files_to_install(
    tmp_path: Path, server: Server
) -> None:
    present, gone = (
        file_at(f"{server.url}/data.bin"),
        replace(file_at(f"{server.url}/gone"), name="gone.bin"),
    )
    unreachable = replace(file_at("http://127.0.0.1:1/far"), name="far.bin", sha256="1" * 64)
    with pytest.raises(download.DownloadError) as caught:
        download.get(toy(present, gone, unreachable), tmp_path, Reported())
    assert caught.value.field == gone.url
    message = str(caught.value)
    assert "HTTP 404 Not Found" in message
    assert (
        f"{tmp_path / 'toy'}: {gone.url} (SHA-256 {gone.sha256}); {unreachable.url}"
        f" (SHA-256 {'1' * 64})."
    ) in message
    assert present.url not in message
    with refused(unreachable.url, "Connection refused", kind=download.DownloadError):
        download.get(toy(unreachable), tmp_path, Reported())


def test_femnist_is_made_not_downloaded(tmp_path: Path) -> None:
    with refused("femnist", "preprocess.sh", tmp_path / "femnist"):
        download.get(CATALOGUE["femnist"], tmp_path, Reported())
