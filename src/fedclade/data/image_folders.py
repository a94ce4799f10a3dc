"""Clients from folders of images: a folder for each site, with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedclade.core.names import Names, checked_client_names, checked_names
from fedclade.data.client_rows import Rows, check_test_share, clients_of_rows, is_test_row
from fedclade.data.federated_dataset import Clients
from fedclade.data.image_encoding import (
    ENDINGS,
    Color,
    ImageEncoding,
    image_size,
    require_pillow,
)
from fedclade.errors import InvalidInputError, is_int, require
from fedclade.io import safe_read

Layout: TypeAlias = Literal["site/class", "site/split/class"]
_SPLITS = ("train", "test")


class _File(NamedTuple):
    path: Path
    site: int
    split: str  # "train" or "test"; "" where the folders do not say it
    label: int


def from_images(
    folder: str | os.PathLike[str],
    layout: Layout = "site/class",
    size: tuple[int, int] | None = None,
    color: Color = "rgb",
    test: float = 0.2,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Clients:
    """Make clients from a folder of images. The names of its folders are the names of the clients
    and of the classes. Images become uint8, which models read as x / 255.

    Args:
        folder: The folder with one folder for each site (client).
        layout: "site/class" for north/cat/1.png, "site/split/class" for north/train/cat/1.png,
            where the split is train or test.
        size: (height, width) to which every image is resized (bilinear); None if all images have
            the same size.
        color: "rgb" for three channels, "gray" for one.
        test: With "site/class", the share of each client's images that is its test part; every
            class has about the same share. 0 for no test part.
        seed: The seed of that split.
        progress: Called with the number of images that are read and their number in all.
    """
    root = Path(folder)
    require(
        layout in ("site/class", "site/split/class"),
        "layout",
        layout,
        "must be 'site/class' or 'site/split/class'",
    )
    require(color in ("rgb", "gray"), "color", color, "must be 'rgb' or 'gray'")
    require(
        size is None
        or (isinstance(size, tuple | list) and len(size) == 2 and all(is_int(n, 1) for n in size)),
        "size",
        size,
        "must be (height, width), two whole numbers of at least 1, or None",
    )
    check_test_share(test, seed)
    require_pillow()  # before the folders are searched
    sites, classes, files = _find(root, layout)
    site, label = (torch.tensor([file[place] for file in files]) for place in (1, 3))
    if layout == "site/class":
        is_test = is_test_row(site, label, test, seed)
    else:
        is_test = torch.tensor([file.split == "test" for file in files])
    height, width = size or image_size(files[0].path)
    encoding = ImageEncoding(height, width, color, resize=size is not None)
    safe_read.fit(root, len(files) * np.prod(encoding.shape, dtype=int), "of images")
    parts = {
        held_out: torch.empty(int((is_test == held_out).sum()), *encoding.shape, dtype=torch.uint8)
        for held_out in (False, True)
    }
    # The place of each image in its part.
    places = torch.where(is_test, is_test.cumsum(0), (~is_test).cumsum(0)) - 1
    targets = [parts[held_out][place] for held_out, place in _pairs(is_test, places)]
    encoding.read_into([file.path for file in files], targets, progress)
    train, held = (
        Rows(parts[held_out], label[is_test == held_out], site[is_test == held_out])
        for held_out in (False, True)
    )
    names = Names(clients=sites, classes=classes)
    clients = clients_of_rows(train, held, names, len(classes), root.resolve().name or "images")
    return replace(clients, encoding=encoding)


def _pairs(is_test: Tensor, places: Tensor) -> Iterable[tuple[bool, int]]:
    return zip(is_test.tolist(), places.tolist(), strict=True)


def _find(root: Path, layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...], list[_File]]:
    """The names of the sites and classes in alphabetical order, and the images sorted by path."""
    found: list[tuple[Path, str, str, str]] = []
    sites = _folders(root, "site")
    for site in sites:
        before = len(found)
        splits = [site] if layout == "site/class" else _folders(site, "split")
        for split in splits:
            if layout == "site/split/class" and split.name not in _SPLITS:
                raise InvalidInputError(
                    f"{split}: a split must be one of the folders {', '.join(_SPLITS)}. Rename it,"
                    " or give another layout.",
                    str(split),
                )
            for label in _folders(split, "class"):
                found += [
                    (path, site.name, split.name, label.name)
                    for path in _entries(label)
                    if _is_image(path)
                ]
        if len(found) == before:
            raise InvalidInputError(
                f"{site}: this site has no images. Expected the layout {layout}; add images or"
                " remove the folder.",
                str(site),
            )
    site_names = checked_client_names([site.name for site in sites], "site")
    class_names = checked_names(sorted({entry[3] for entry in found}), "class")
    site_numbers = {name: number for number, name in enumerate(site_names)}
    labels = {name: number for number, name in enumerate(class_names)}
    files = [
        _File(path, site_numbers[site], split, labels[label]) for path, site, split, label in found
    ]
    return site_names, class_names, files


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, by name, without hidden files such as .DS_Store."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise InvalidInputError(
            f"{folder}: it cannot be read as a folder ({error.strerror}).", str(folder)
        ) from error


def _folders(folder: Path, what: str) -> list[Path]:
    entries = _entries(folder)
    for entry in entries:
        if not entry.is_dir():
            raise InvalidInputError(
                f"{entry}: expected a folder for each {what} here, found a file. Move the file, or"
                " give another layout.",
                str(entry),
            )
    if not entries:
        raise InvalidInputError(f"{folder}: there is no folder of a {what}.", str(folder))
    return entries


def image_files(path: Path) -> list[Path]:
    """The images of a folder and of its folders, by name; or the one image that `path` is."""
    if not path.is_dir():
        safe_read.size(path)  # an error if it is not there
        return [path]
    files = []
    for entry in _entries(path):
        files += image_files(entry) if entry.is_dir() or _is_image(entry) else []
    if not files:
        raise InvalidInputError(f"{path}: there are no images in it.", str(path))
    return files


def _is_image(path: Path) -> bool:
    if path.is_dir() or path.suffix.lower() not in ENDINGS:
        kind = "a folder" if path.is_dir() else "no image"
        raise InvalidInputError(
            f"{path}: {kind}, but a folder of images must have images only"
            f" ({', '.join(ENDINGS)}). Remove it, or give another layout.",
            str(path),
        )
    return True
