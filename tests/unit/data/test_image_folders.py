"""Clients from folders of images."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedclade as fc
from fedclade.data import image_encoding
from fedclade.errors import FedcladeWarning, InvalidInputError


def save(path: Path, value: int = 0, shape: tuple[int, ...] = (4, 6, 3), **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, value, np.uint8)).save(path, **options)


@pytest.fixture
def wards(tmp_path: Path) -> Path:
    """Two sites; the pixels of an image are 100 · site + 10 · class + its number."""
    folder = tmp_path / "wards"
    for site, name in enumerate(("north", "Öst")):
        for label, kind in enumerate(("cat", "dog")):
            for number in range(5):
                save(folder / name / kind / f"{number}.png", 100 * site + 10 * label + number)
    return folder


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_images(folder, **options)
    return raised.value.field


def test_names_labels_and_pixels_stay(wards: Path) -> None:
    (wards / "north" / ".DS_Store").write_bytes(b"hidden")
    steps: list[tuple[int, int]] = []
    clients = fc.data.from_images(wards, progress=lambda *step: steps.append(step))
    assert clients.names.clients == ("north", "Öst")
    assert clients.names.classes == ("cat", "dog")
    assert clients.dataset == "wards"
    assert clients.classes == 2
    assert clients.shape == (3, 4, 6)
    assert clients.sizes.tolist() == [8, 8]
    assert clients.test_sizes.tolist() == [2, 2]
    assert steps == [(done, 20) for done in range(1, 21)]
    for site in (0, 1):
        x, y, x_test, y_test = clients.arrays(site)  # type: ignore[misc]
        values = torch.cat([x[:, 0, 0, 0], x_test[:, 0, 0, 0]]).int()  # type: ignore[index]
        labels = torch.cat([y, y_test])
        assert sorted(values.tolist()) == [100 * site + n for n in (*range(5), *range(10, 15))]
        assert torch.equal(values % 100 // 10, labels)
        assert y_test.tolist() == [0, 1]  # every class has the same share
    again = fc.data.from_images(wards)
    assert torch.equal(again.x, clients.x)  # type: ignore[arg-type]


def test_the_split_of_the_folders_is_used(tmp_path: Path) -> None:
    save(tmp_path / "north" / "train" / "cat" / "1.png", 1)
    save(tmp_path / "north" / "test" / "dog" / "2.jpg", 2)
    save(tmp_path / "south" / "train" / "dog" / "3.bmp", 3)
    with pytest.warns(FedcladeWarning, match="1 client has no test part"):
        clients = fc.data.from_images(tmp_path, "site/split/class", color="gray")
    assert clients.shape == (1, 4, 6)
    assert clients.sizes.tolist() == [1, 1]
    assert clients.test_sizes.tolist() == [1, 0]
    assert clients.y.tolist() == [0, 1]
    assert clients.y_test.tolist() == [1]


def test_images_are_resized_and_colors_changed(tmp_path: Path) -> None:
    save(tmp_path / "a" / "cat" / "1.png", 50, (4, 6))
    save(tmp_path / "a" / "cat" / "2.png", 50, (8, 2, 4))
    deep = Image.fromarray(np.full((3, 3), 40_000, np.uint16))
    deep.save(tmp_path / "a" / "cat" / "3.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned by 90 degrees
    save(tmp_path / "a" / "dog" / "4.jpg", 50, (4, 6), exif=turned)
    clients = fc.data.from_images(tmp_path, size=(5, 7), test=0)
    assert clients.shape == (3, 5, 7)
    assert isinstance(clients.x, torch.Tensor)
    assert clients.x[:, 0, 0, 0].tolist() == [50, 50, 40_000 >> 8, 50]
    assert clients.test_sizes.tolist() == [0]
    assert refused(tmp_path) == str(tmp_path / "a" / "cat" / "2.png")
    for path in (tmp_path / "a" / "cat").iterdir():
        path.unlink()
    assert fc.data.from_images(tmp_path, test=0).shape == (3, 6, 4)


def test_broken_files_are_named(wards: Path) -> None:
    whole = (wards / "north" / "cat" / "1.png").read_bytes()
    (wards / "north" / "cat" / "1.png").write_bytes(whole[:-30])
    (wards / "north" / "dog" / "2.png").write_bytes(b"no image")
    (wards / "Öst" / "dog" / "3.png").write_bytes(b"")
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_images(wards, size=(4, 6))
    assert raised.value.field == str(wards / "north" / "cat" / "1.png")
    for name in ("cat/1.png", "dog/2.png", "dog/3.png"):
        assert name in str(raised.value)


def test_an_image_that_is_too_large_is_not_decoded(
    wards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", 8_000, 8_000, 8, 2, 0, 0, 0)
    bomb = wards / "north" / "cat" / "9.png"
    bomb.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )
    with pytest.raises(InvalidInputError, match="64,000,000 pixels") as raised:
        fc.data.from_images(wards, size=(4, 6))
    assert raised.value.field == str(bomb)
    bomb.unlink()
    assert refused(wards, size=(2**20, 2**20)) == str(wards)  # more than memory
    monkeypatch.setattr(image_encoding, "MOST_BYTES", 10)
    assert refused(wards, size=(4, 6)) == str(wards / "north" / "cat" / "0.png")


def test_a_wrong_folder_is_named(wards: Path, tmp_path: Path) -> None:
    empty = wards / "west"
    empty.mkdir()
    assert refused(wards) == str(empty)
    (empty / "cat").mkdir()
    assert refused(wards) == str(empty)
    (empty / "cat" / "notes.txt").write_text("no image")
    assert refused(wards) == str(empty / "cat" / "notes.txt")
    (empty / "labels.csv").write_text("")
    assert refused(wards) == str(empty / "labels.csv")
    assert refused(tmp_path / "absent") == str(tmp_path / "absent")
    assert refused(wards, layout="site/split/class") == str(wards / "north" / "cat")


def test_a_site_without_training_images_is_named(tmp_path: Path) -> None:
    save(tmp_path / "north" / "train" / "cat" / "1.png")
    save(tmp_path / "south" / "test" / "cat" / "1.png")
    assert refused(tmp_path, layout="site/split/class") == "client south"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("layout", "class/site"),
        ("color", "cmyk"),
        ("size", 32),
        ("size", (0, 32)),
        ("test", 1),
        ("test", "a fifth"),
        ("seed", -1),
    ],
)
def test_a_wrong_option_is_named(wards: Path, option: str, value: object) -> None:
    assert refused(wards, **{option: value}) == option


def test_a_missing_pillow_is_one_line(wards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert refused(wards) == "Pillow"
