"""Images as the numbers that a model reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict
from torch import Tensor

from fedclade.errors import InvalidInputError
from fedclade.io import safe_read

Color: TypeAlias = Literal["rgb", "gray"]

MOST_BYTES = 1 << 28  # of an image file
MOST_PIXELS = 50_000_000  # of an image, before it is resized
_MOST_NAMED = 5  # broken files in a message
# Pillow reads other formats too; some of them start programs, as EPS does.
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
"""The endings of files that are images, in lower case."""


@dataclass(frozen=True)
class ImageEncoding:
    """How image files become inputs. A run saves it in encoding.json.

    Args:
        height: the height of an input.
        width: the width of an input.
        color: "rgb" for three channels, "gray" for one.
        resize: whether images of another size are resized; else they are an error.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    height: int
    width: int
    color: Color
    resize: bool
    kind: Literal["images"] = "images"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an input."""
        return 3 if self.color == "rgb" else 1, self.height, self.width

    def check(self) -> None:
        """Raise `ValueError` for a size that no images have."""
        if min(self.height, self.width) < 1 or self.height * self.width > MOST_PIXELS:
            raise ValueError(f"height and width: {self.height} x {self.width}")

    def encode(self, files: Sequence[str | os.PathLike[str]]) -> Tensor:
        """The inputs of a model for image files: uint8 of shape (files, channels, height, width).

        Args:
            files: the paths of the images.
        """
        paths = [Path(file) for file in files]
        safe_read.fit("images", len(paths) * np.prod(self.shape, dtype=int), "of images")
        x = torch.empty(len(paths), *self.shape, dtype=torch.uint8)
        self.read_into(paths, list(x))
        return x

    def read_into(
        self,
        files: Sequence[Path],
        targets: Sequence[Tensor],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read images in parallel. The files that cannot be used are one error.

        Args:
            files: the paths of the images.
            targets: for each image the tensor, of this shape, that gets its pixels.
            progress: called with the number of images that are read and their number in all.
        """

        def read(file: Path, target: Tensor) -> str:
            try:
                target.copy_(torch.from_numpy(self._pixels(file)))
            except InvalidInputError as error:
                return str(error)
            return ""

        problems = []
        # Pillow decodes without the interpreter's lock.
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
            for done, problem in enumerate(threads.map(read, files, targets), start=1):
                problems += [(files[done - 1], problem)] if problem else []
                if progress is not None:
                    progress(done, len(files))
        if problems:
            named = " ".join(problem for _, problem in problems[:_MOST_NAMED])
            more = len(problems) - _MOST_NAMED
            rest = f" And {more} more." if more > 0 else ""
            raise InvalidInputError(
                f"{len(problems)} of {len(files)} images cannot be used: {named}{rest} Repair or"
                " remove them.",
                str(problems[0][0]),
            )

    def _pixels(self, path: Path) -> NDArray[np.uint8]:
        """The pixels (channels, height, width) of an image."""
        pixels = _decoded(path, self.color, (self.height, self.width) if self.resize else None)
        if pixels.shape != self.shape:
            height, width = pixels.shape[-2:]
            raise InvalidInputError(
                f"{path}: it has {height} × {width} pixels, the other images {self.height} ×"
                f" {self.width}: give size=(height, width) to resize all images.",
                str(path),
            )
        return pixels


def require_pillow() -> Any:
    """Pillow's module `Image`, or one clear line if it is not installed."""
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise InvalidInputError(
            f"Pillow: it is not installed ({error}); pip install 'fedclade[images]'.", "Pillow"
        ) from error


def image_size(path: Path) -> tuple[int, int]:
    """The height and width of an image, as it is shown."""
    height, width = _decoded(path, "gray").shape[-2:]
    return height, width


def _decoded(path: Path, color: Color, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    image_module = require_pillow()
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
