"""Clients from folders of images: a folder for each site, with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.names import Names, checked_client_names, checked_names
from fedclade.data.client_rows import Rows, check_test_share, clients_of_rows, is_test_row
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError, is_int, require
from fedclade.io import safe_read

Layout: TypeAlias = Literal["site/class", "site/split/class"]
Color: TypeAlias = Literal["rgb", "gray"]

MOST_BYTES = 1 << 28  # of an image file
MOST_PIXELS = 50_000_000  # of an image, before it is resized
_MOST_NAMED = 5  # broken files in a message
# Pillow reads other formats too; some of them start programs, as EPS does.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
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
    _pillow()  # before the folders are searched
    sites, classes, files = _find(root, layout)
    site, label = (torch.tensor([file[place] for file in files]) for place in (1, 3))
    if layout == "site/class":
        is_test = is_test_row(site, label, test, seed)
    else:
        is_test = torch.tensor([file.split == "test" for file in files])
    height, width = size or _size(files[0].path)
    channels = 3 if color == "rgb" else 1
    safe_read.fit(root, len(files) * channels * height * width, "of images")
    parts = {
        held_out: torch.empty(
            int((is_test == held_out).sum()), channels, height, width, dtype=torch.uint8
        )
        for held_out in (False, True)
    }
    # The place of each image in its part.
    places = torch.where(is_test, is_test.cumsum(0), (~is_test).cumsum(0)) - 1
    targets = [parts[held_out][place] for held_out, place in _pairs(is_test, places)]

    def read(file: _File, target: Tensor) -> str:
        try:
            target.copy_(torch.from_numpy(_pixels(file.path, (height, width), size, color)))
        except InvalidInputError as error:
            return str(error)
        return ""

    problems = []
    # Pillow decodes without the interpreter's lock.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        for done, problem in enumerate(threads.map(read, files, targets), start=1):
            problems += [(files[done - 1].path, problem)] if problem else []
            if progress is not None:
                progress(done, len(files))
    if problems:
        named = " ".join(problem for _, problem in problems[:_MOST_NAMED])
        more = len(problems) - _MOST_NAMED
        rest = f" And {more} more." if more > 0 else ""
        raise InvalidInputError(
            f"{len(problems)} of {len(files)} images cannot be used: {named}{rest} Repair or remove"
            " them.",
            str(problems[0][0]),
        )
    train, held = (
        Rows(parts[held_out], label[is_test == held_out], site[is_test == held_out])
        for held_out in (False, True)
    )
    names = Names(clients=sites, classes=classes)
    return clients_of_rows(train, held, names, len(classes), root.resolve().name or "images")


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


def _is_image(path: Path) -> bool:
    if path.is_dir() or path.suffix.lower() not in _ENDINGS:
        kind = "a folder" if path.is_dir() else "no image"
        raise InvalidInputError(
            f"{path}: {kind}, but a folder of a class must have images only"
            f" ({', '.join(_ENDINGS)}). Remove it, or give another layout.",
            str(path),
        )
    return True


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise InvalidInputError(
            f"Pillow: it is not installed ({error}); pip install 'fedclade[images]'.", "Pillow"
        ) from error


def _size(path: Path) -> tuple[int, int]:
    """The height and width of an image, as it is shown."""
    height, width = _decoded(path, "gray").shape[-2:]
    return height, width


def _pixels(
    path: Path, shape: tuple[int, int], size: tuple[int, int] | None, color: Color
) -> NDArray[np.uint8]:
    """The pixels (channels, height, width) of an image in `shape`."""
    pixels = _decoded(path, color, size)
    if pixels.shape[-2:] != shape:
        height, width = pixels.shape[-2:]
        raise InvalidInputError(
            f"{path}: it has {height} × {width} pixels, the first image {shape[0]} × {shape[1]}:"
            " give size=(height, width) to resize all images.",
            str(path),
        )
    return pixels


def _decoded(path: Path, color: Color, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    image_module = _pillow()
    safe_read.allow(path, safe_read.size(path), MOST_BYTES)
    try:
        # The header alone is read here.
        with image_module.open(path, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise InvalidInputError(
                    f"{path}: it has {width * height:,} pixels, above the limit of"
                    f" {MOST_PIXELS:,}.",
                    str(path),
                )
            shown = import_module("PIL.ImageOps").exif_transpose(image)
    except InvalidInputError:
        raise
    # Pillow raises many kinds of error for a damaged file.
    except Exception as error:
        reason = "" if type(error).__name__ == "UnidentifiedImageError" else f" ({error})"
        raise InvalidInputError(
            f"{path}: it cannot be read as an image{reason}.", str(path)
        ) from error
    if shown.mode.startswith("I;16"):  # Pillow would cut values above 255
        shown = image_module.fromarray((np.asarray(shown) >> 8).astype(np.uint8))
    elif shown.mode in ("I", "F"):
        raise InvalidInputError(
            f"{path}: its pixels are numbers of 32 bits. Convert it to 8 or 16 bits.", str(path)
        )
    shown = shown.convert("RGB" if color == "rgb" else "L")
    if size is not None:
        shown = shown.resize((size[1], size[0]), image_module.Resampling.BILINEAR)
    pixels = np.array(shown, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()
