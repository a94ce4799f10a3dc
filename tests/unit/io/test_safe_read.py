"""Files made to fill the memory, to block for ever or to write to other places: each is an error
before it is unpacked.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

import fedclade as fc
from fedclade.analysis import report
from fedclade.data import download, readers
from fedclade.data.dataset_catalog import CATALOGUE, File
from fedclade.errors import InvalidInputError
from fedclade.io import checkpoint, safe_read
from fedclade.io.run_dir import RunDirectory, StoredModels
from fedclade.models.autoencoder import DenseAutoencoder
from fedclade.training import encoders, experiment_file, plot_data

MEGA = 1 << 20
SMALL = 40 * MEGA
CIFAR = ["a.bin", "b.bin"]
EMNIST = [f"gzip/emnist-balanced-{part}.gz" for part in readers.IDX_PARTS]


def peak(call: Callable[[], object]) -> tuple[InvalidInputError, int]:
    """The error of a call, and the most bytes that it allocated."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError) as caught:
            call()
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(call: Callable[[], object], field: object, *values: object) -> None:
    """The call raises an error about this field with these values in its message, and allocates
    little memory.
    """
    error, allocated = peak(call)
    assert error.field == str(field)
    for value in values:
        assert str(value) in str(error)
    assert allocated < SMALL, str(error)


def refused_by_name(call: Callable[[], object], path: Path) -> None:
    """The call raises an error whose message has this path, and allocates little memory."""
    error, allocated = peak(call)
    assert str(path) in str(error)
    assert allocated < SMALL, str(error)


def zeros(pack: Callable[[bytes], bytes], gigabytes: float = 1.01) -> bytes:
    """Packed zeros, by a packer whose results can be concatenated."""
    return pack(bytes(16 * MEGA)) * int(gigabytes * 64 + 1)


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def idx_head(*shape: int) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)


# one file of every kind: its name and its reader

READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "idx": ("images", lambda path: readers.idx("mnist", 10, [path] * 4)),
    "bin": ("a.bin", lambda path: readers.cifar("cifar10", 10, 1, CIFAR, [path, path])),
    "tar.gz": ("c.tar.gz", lambda path: readers.cifar("cifar10", 10, 1, CIFAR, [path])),
    "zip": ("gzip.zip", lambda path: readers.emnist("balanced", 47, [path])),
    "mat": ("train.mat", lambda path: readers.svhn([path, path])),
    "leaf": ("train.json", lambda path: readers.leaf("femnist", 62, [path.parent] * 2)),
    "csv": ("train.csv", lambda path: readers.ag_news([path, path])),
    "npz": ("mine.npz", fc.data.load),
    "experiment": ("mine.toml", experiment_file.read),
    "encoder": ("mine.safetensors", encoders.read),
    "seen": (plot_data.FILE, lambda path: plot_data.read(path.parent)),
    "checkpoint": ("round-000001.safetensors", lambda path: checkpoint.latest(path.parent)),
    "models": ("models/models.safetensors", lambda path: StoredModels(path.parent.parent)),
    "summary": ("summary.json", lambda path: RunDirectory(path.parent).summary()),
    "rounds": ("rounds.jsonl", lambda path: RunDirectory(path.parent).history()),
    "clients": ("clients.csv", lambda path: RunDirectory(path.parent).read_clients(3)),
    "tables": ("experiment.toml", lambda path: RunDirectory(path.parent).tables()),
    "comparison": ("comparison.json", lambda path: RunDirectory(path.parent).comparison()),
    "plan": ("plan.json", lambda path: RunDirectory(path.parent).plan()),
    "diagnosis": ("diagnosis.json", lambda path: report.collect([path.parent])),
    "download": ("a.gz", lambda path: download.wrong(path, File("a.gz", "", 1, ""))),
}


def placed(kind: str, folder: Path) -> tuple[Path, Callable[[], object]]:
    name, read = READ[kind]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path, lambda: read(path)


@pytest.mark.parametrize("kind", READ)
def test_pipes_devices_and_folders_are_errors_and_do_not_block(kind: str, tmp_path: Path) -> None:
    path, read = placed(kind, tmp_path)
    os.mkfifo(path)
    refused_by_name(read, path)
    path.unlink()
    path.symlink_to("/dev/zero")
    refused_by_name(read, path)
    path.unlink()
    path.mkdir()
    refused_by_name(read, path)
    path.rmdir()
    path.symlink_to(path)
    with suppress(InvalidInputError):  # a broken link may also count as a missing file
        assert read() is None


@pytest.mark.parametrize("kind", [kind for kind in READ if kind not in ("download", "models")])
def test_a_file_that_is_too_large_is_not_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_read, "memory", lambda: 1 << 30)
    path, read = placed(kind, tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 31)
    most = safe_read.MOST_TOML if path.suffix == ".toml" else safe_read.MOST
    refused(read, path, "2,147,483,648", f"{most:,}")


def test_models_are_read_one_at_a_time_and_may_be_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_arrays = fc.data.from_arrays([(torch.randn(6, 3), torch.arange(6) % 2)] * 3)
    fc.run(fc.Local(), from_arrays, fc.models.MLP(8), rounds=1, out=tmp_path / "run", device="cpu")
    monkeypatch.setattr(safe_read, "memory", lambda: 1000)
    monkeypatch.setattr(
        safe_read,
        "fit",
        lambda *arguments: pytest.fail("the size of the whole file was checked"),
    )
    assert StoredModels(tmp_path / "run").row(0)


def test_a_file_may_be_as_large_as_the_memory_or_the_limit(tmp_path: Path) -> None:
    assert safe_read.memory() > 1 << 28
    safe_read.fit("a file", safe_read.memory())
    assert safe_read.read(put(tmp_path / "a", b"four"), most=4) == b"four"
    refused(lambda: safe_read.read(tmp_path / "a", most=3), tmp_path / "a", "4 bytes", "3")
    missing = tmp_path / "missing"
    refused(lambda: safe_read.read(missing), missing, "no such file")


# bombs


def test_idx_unpacks_no_more_than_its_header_declares(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    read = READ["idx"][1]
    put(path, gzip.compress(idx_head(60_000, 1 << 16, 1 << 16)))
    refused(lambda: read(path), path, "257,698,037,760,016", "1,073,741,824")
    put(path, gzip.compress(idx_head(2, 4, 4)) + zeros(gzip.compress))
    refused(lambda: read(path), path, "more than 48")
    put(path, idx_head(2, 4, 4) + bytes(33))
    refused(lambda: read(path), path, "more than 48")


def tar(
    members: dict[str, bytes], also: Callable[[tarfile.TarFile], None] = lambda archive: None
) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        also(archive)
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def sized(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A member's header alone."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def test_tar_unpacks_no_more_than_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "c.tar.gz"
    read = READ["tar.gz"][1]
    put(path, gzip.compress(sized("c/a.bin", 1 << 40)))
    refused(lambda: read(path), f"{path}: a.bin", "1,099,511,627,776", "1,073,741,824")
    put(
        path,
        gzip.compress(tar({"a.bin": bytes(3073), "b.bin": bytes(3073)})) + zeros(gzip.compress),
    )
    refused(lambda: read(path), path, "1,073,741,825", "1,073,741,824")


def test_a_sparse_member_is_not_read(tmp_path: Path) -> None:
    """It may have any size without bytes in the archive."""
    info = tarfile.TarInfo("a.bin")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "a.bin",
        "GNU.sparse.realsize": str(900 * MEGA),
    }
    content = b"1\n%d\n0\n" % (900 * MEGA)
    info.size = 512
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(content.ljust(512, b"\0")))
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as archive:
        assert [(member.size, member.issparse()) for member in archive] == [(900 * MEGA, True)]
    path = put(tmp_path / "c.tar.gz", file.getvalue())
    refused(lambda: READ["tar.gz"][1](path), path, "a.bin, b.bin")


def zipped(contents: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return file.getvalue()


def declaring(archive: bytes, size: int) -> bytes:
    """The archive with this unpacked size of its first member in both of its headers."""
    entry = archive.index(b"PK\x01\x02")
    data = bytearray(archive)
    data[22:26] = data[entry + 24 : entry + 28] = struct.pack("<I", size)
    return bytes(data)


def test_zip_unpacks_no_more_than_is_declared_and_allowed(tmp_path: Path) -> None:
    path = tmp_path / "gzip.zip"
    read = READ["zip"][1]
    small = dict.fromkeys(EMNIST[1:], gzip.compress(idx_head(2) + b"\0\1"))
    put(path, declaring(zipped({EMNIST[0]: bytes(1000), **small}), 3 << 30))
    refused(lambda: read(path), f"{path}: {EMNIST[0]}", "3,221,225,472", "1,073,741,824")
    bomb = zipped({EMNIST[0]: bytes(256 * MEGA), **small})
    assert len(bomb) < MEGA
    put(path, declaring(bomb, 1000))
    refused(lambda: read(path), path, "Bad CRC-32")
    put(path, zipped({EMNIST[0]: bytes(64 * MEGA), **small}, zipfile.ZIP_BZIP2))
    refused(lambda: read(path), path, EMNIST[0], "deflate")


def npy(shape: str, content: bytes = b"") -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + content


def test_npz_is_bounded_by_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.npz"
    other = {f"{name}.npy": npy("(2,)", b"\0\1") for name in ("y_train", "x_test", "y_test")}
    put(path, zipped({"x_train.npy": npy("(1099511627776,)"), **other}))
    refused(lambda: fc.data.load(path), path, "x_train", "128 bytes", "1099511627904")
    put(path, zipped({"x_train.npy": npy("(2,)", b"\0\1\2"), **other}))
    refused(lambda: fc.data.load(path), path, "131 bytes", "130")
    bomb = zipped({"x_train.npy": npy("(2,)", bytes(256 * MEGA)), **other})
    put(path, declaring(bomb, 130))
    refused(lambda: fc.data.load(path), path, "x_train", "Bad CRC-32")
    put(path, bomb)
    monkeypatch.setattr(safe_read, "memory", lambda: 255 * MEGA)
    refused(lambda: fc.data.load(path), path, "268,435,974", "267,386,880")
    put(path, zipped({"x_train.npy": npy("(2,)", b"\0\1"), **other}, zipfile.ZIP_LZMA))
    refused(lambda: fc.data.load(path), path, "x_train.npy", "deflate")


MAT = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"


def flushed(data: bytes) -> bytes:
    """A block of a zlib stream that does not depend on earlier blocks."""
    packer = zlib.compressobj()
    return (packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH))[2:]


def packed_element(start: bytes, rest: bytes = b"") -> bytes:
    content = b"\x78\x9c" + flushed(start) + rest
    return MAT + struct.pack("<II", 15, len(content)) + content


def test_mat_unpacks_no_more_than_an_element_declares(tmp_path: Path) -> None:
    path = tmp_path / "train.mat"
    read = READ["mat"][1]
    put(path, packed_element(struct.pack("<II", 14, 0xFFFFFFF0)))
    refused(lambda: read(path), path, "4,294,967,288", "1,073,741,824")
    put(path, packed_element(struct.pack("<II", 14, 1000), zeros(flushed)))
    refused(lambda: read(path), path, "1000 bytes")


def test_cells_of_a_mat_are_left_out(tmp_path: Path) -> None:
    """scipy allocates all the cells that the header declares."""
    path = tmp_path / "train.mat"
    empty = np.empty((1, 1), object)
    empty[0, 0] = np.zeros((1, 1))
    for name in ("X", "y"):
        file = io.BytesIO()
        savemat(file, {name: empty})
        cell = bytearray(file.getvalue())
        at = cell.index(struct.pack("<IIII", 5, 8, 1, 1))
        cell[at + 8 : at + 16] = struct.pack("<II", 1 << 14, 1 << 14)  # 2 GiB of pointers
        good = io.BytesIO()
        savemat(good, {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [10]])})
        put(path, bytes(cell) + good.getvalue()[128:])
        assert len(READ["mat"][1](path).y_train) == 2
        put(path, bytes(cell))
        refused(lambda: READ["mat"][1](path), path, "'X'")


def safetensors(header: dict[str, Any], content: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


@pytest.mark.parametrize("kind", ["encoder", "seen", "checkpoint", "models"])
def test_tensors_beyond_the_end_of_the_file_are_errors(kind: str, tmp_path: Path) -> None:
    path, read = placed(kind, tmp_path)
    field = "method.encoder" if kind == "encoder" else path
    put(
        path,
        safetensors(
            {"ids": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}, bytes(8)
        ),
    )
    refused(read, field, path)
    put(path, struct.pack("<Q", 1 << 62) + b"{}")
    refused(read, field, path)


def test_an_encoder_is_not_built_larger_than_its_weights(tmp_path: Path) -> None:
    spec = DenseAutoencoder(hidden=2, code=2)
    module = spec.build((3,))
    for declared, shape in (
        (DenseAutoencoder(hidden=50_000, code=50_000), (3,)),
        (spec, (10_000, 100_000)),
    ):
        encoders.write(tmp_path / "e", module, declared, shape, {})
        # tracemalloc does not count the memory of torch
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(lambda: encoders.read(tmp_path / "e"), "method.encoder", tmp_path / "e", "weights")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": torch.arange(3_001)},
        {"ids": torch.tensor([-1])},
        {"ids": torch.tensor(1)},
        {"ids": torch.tensor([1.0])},
        {"ids": torch.arange(2), "labels": torch.tensor([[1, 2]])},
        {"ids": torch.arange(1), "labels": torch.tensor([[1, -1]])},
        {"ids": torch.arange(1), "labels": torch.zeros(1, 257, dtype=torch.int64)},
        {"ids": torch.arange(1), "features": torch.zeros(1, 2, dtype=torch.float64)},
    ],
)
def test_the_features_of_clients_have_a_size_that_can_be_drawn(
    wrong: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    checkpoint.write_tensors(tmp_path / plot_data.FILE, wrong, {"what": "", "measure": ""})
    refused(lambda: plot_data.read(tmp_path), tmp_path / plot_data.FILE)


@pytest.mark.parametrize("about", ["[]", "[" * 100_000, '{"what": 1, "measure": ""}', "{"])
def test_the_metadata_of_tensors_is_checked_too(
    about: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            checkpoint.json,
            "dumps",
            lambda value: about if value == "about" else json.JSONEncoder().encode(value),
        )
        checkpoint.write_tensors(tmp_path / plot_data.FILE, {"ids": torch.arange(2)}, "about")  # type: ignore[arg-type]
    refused(lambda: plot_data.read(tmp_path), tmp_path / plot_data.FILE)


# nesting


DEEP = {
    "json": ["[" * 100_000, '{"a":' * 100_000, "[" * 400 + "]" * 400, '"\\ud800"', "9" * 5_000],
    "toml": [
        "a=" + "[" * 100_000,
        "a" + ".a" * 500_000 + "=1",
        "a=" + "{b=" * 60 + "1" + "}" * 60,
        "[" + "a." * 60 + "a]",
    ],
}


@pytest.mark.parametrize("text", DEEP["json"])
@pytest.mark.parametrize(
    "kind", ["leaf", "summary", "rounds", "comparison", "diagnosis", "clients"]
)
def test_json_that_is_nested_deeply(kind: str, text: str, tmp_path: Path) -> None:
    path, read = placed(kind, tmp_path)
    path.write_text(f"client\n{text}\n0\n0\n" if kind == "clients" else text + "\n")
    refused_by_name(read, path)


@pytest.mark.parametrize("text", DEEP["toml"])
@pytest.mark.parametrize("kind", ["experiment", "tables"])
def test_toml_that_is_nested_deeply(kind: str, text: str, tmp_path: Path) -> None:
    path, read = placed(kind, tmp_path)
    path.write_text(text)
    refused_by_name(read, path)


def test_normal_content_is_read_unchanged() -> None:
    content = {"a": [1, 2.5, None, {"b": ["é", True]}]}
    assert safe_read.parse_json(json.dumps(content)) == content
    assert safe_read.parse_toml("[a]\nb = [0.1, 0.2]\nc.d = 1\n") == {
        "a": {"b": [0.1, 0.2], "c": {"d": 1}}
    }
    assert experiment_file.value_of("[" * 100_000) == "[" * 100_000


# archives with paths outside the folder


def everything(folder: Path) -> dict[str, bytes | str]:
    paths = sorted(folder.rglob("*"))
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


def test_archives_write_nothing_for_any_names_of_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)

    def links(archive: tarfile.TarFile) -> None:
        for name, kind, target in (
            ("out", tarfile.SYMTYPE, str(tmp_path)),
            ("hard", tarfile.LNKTYPE, "/etc/hostname"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
        device = tarfile.TarInfo("a.bin")
        device.type = tarfile.CHRTYPE
        archive.addfile(device)

    record = bytes(3073)
    members = {
        "../../a.bin": record,
        f"{tmp_path}/b.bin": record,
        "out/x": b"x",
        "../../x": b"x",
        f"{tmp_path}/y": b"y",
    }
    path = put(work / "c.tar.gz", gzip.compress(tar(members, links)))
    before = everything(tmp_path)
    assert len(readers.cifar("cifar10", 10, 1, CIFAR, [path]).y_train) == 1

    parts = (idx_head(1, 28, 28) + bytes(784), idx_head(1) + b"\0") * 2
    outside = {"../../x": b"x", f"{tmp_path}/y": b"y"}
    archive = put(
        work / "gzip.zip",
        zipped(
            {name: gzip.compress(part) for name, part in zip(EMNIST, parts, strict=True)} | outside
        ),
    )
    arrays = {
        f"{name}.npy": npy("(1,)", b"\0")
        for name in (
            "x_train",
            "y_train",
            "x_test",
            "y_test",
            "../../z_train",
            f"{tmp_path}/w_train",
        )
    }
    params = put(work / "mine.npz", zipped(arrays))
    before |= everything(work)
    assert len(readers.emnist("balanced", 47, [archive]).y_train) == 1
    with suppress(InvalidInputError):
        fc.data.load(params)
    assert everything(tmp_path) == before


# downloads


def test_an_endless_download_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.BytesIO):
        status, length, total = 200, None, 0

        def read(self, count: int | None = -1) -> bytes:
            self.total += count or 0
            assert self.total < 10 * MEGA
            return bytes(count or 0)

    monkeypatch.setattr(download, "_opened", lambda file, have: Endless())
    file = CATALOGUE["mnist"].files[1]
    with pytest.raises(download.DownloadError) as caught:
        download.fetch(file, tmp_path, lambda file, have: None)
    assert caught.value.field == file.url
    assert file.sha256 in str(caught.value)
    assert list(tmp_path.iterdir()) == []
