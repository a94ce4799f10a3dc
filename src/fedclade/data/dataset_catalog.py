"""The catalog of published data sets: description, source and checksums of their files.

The SHA-256 sums and sizes come from tensorflow/datasets (checksums.tsv), those of AG News from
huggingface/datasets (dataset_infos.json).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedclade.data import readers, shakespeare
from fedclade.data.datasets import Dataset

NOT_STATED = "not stated"


@dataclass(frozen=True)
class File:
    """A file as it is downloaded; `size` in bytes."""

    name: str
    url: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Published:
    """A data set whose files are in PLACE/`folder`: those of `files`, or one of the sets of names
    in `unpacked`.
    """

    name: str
    title: str
    # Of the training and the test part; one number if the script that makes the files splits them.
    samples: tuple[int, ...]
    shape: tuple[int, ...]  # of one sample, as it is read
    classes: int
    licence: str
    files: tuple[File, ...]  # empty: no download; `made_by` describes how to make the files
    read: Callable[[Sequence[Path]], Dataset]
    folder: str  # "" for PLACE itself
    unpacked: tuple[tuple[str, ...], ...] = ()
    made_by: str = ""
    # Samples are texts, which the reader cuts into windows; classes are their topics.
    texts: bool = False

    @property
    def megabytes(self) -> float | None:
        return sum(file.size for file in self.files) / 1e6 if self.files else None

    def description(self) -> str:
        """The text that `fedclade describe` prints."""
        samples = " + ".join(f"{count:,}" for count in self.samples)
        kind = "texts" if self.texts else f"samples of {' × '.join(map(str, self.shape))}"
        urls = "".join(f"\n  {file.url}" for file in self.files)
        source = (
            f"`fedclade data get {self.name}` downloads it:{urls}"
            if urls
            else f"{self.made_by} Put them into {_folder_text(self.folder)}."
        )
        return (
            f"{self.title}: {samples} {kind}, {self.classes} classes. Licence:"
            f" {self.licence}.\n\n{source}"
        )

    def find_files(self, places: Iterable[Path]) -> list[Path] | None:
        """The files in the first place that has all of them; None if no place has."""
        for place in places:
            for names in self._layouts():
                if all((place / self.folder / name).exists() for name in names):
                    return [place / self.folder / name for name in names]
        return None

    def missing_files(self, places: Iterable[Path]) -> str:
        """A sentence for each place that has only some of the files, with the missing ones."""
        sentences = []
        for place in places:
            for names in self._layouts():
                missing = [name for name in names if not (place / self.folder / name).exists()]
                if 0 < len(missing) < len(names):
                    sentences.append(f" {place / self.folder} lacks {', '.join(missing)}.")
        return "".join(sentences)

    def by_hand(self, place: Path, files: Iterable[File] | None = None) -> str:
        """How to install the files on a machine without a network."""
        folder = place / self.folder
        if not self.files:
            return f"{self.made_by} Put them into {folder}."
        urls = "; ".join(f"{file.url} (SHA-256 {file.sha256})" for file in files or self.files)
        return f"Put into {folder}: {urls}."

    def _layouts(self) -> tuple[tuple[str, ...], ...]:
        downloaded = (tuple(file.name for file in self.files),) if self.files else ()
        return downloaded + self.unpacked


def _folder_text(folder: str) -> str:
    return f"a folder {folder}" if folder else "the data folder"


MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR100_FILES = ("train.bin", "test.bin")


def _gz(base: str, sums: Sequence[tuple[int, str]]) -> tuple[File, ...]:
    return tuple(
        File(f"{name}.gz", f"{base}/{name}.gz", size, sha256)
        for name, (size, sha256) in zip(MNIST_FILES, sums, strict=True)
    )


def _in_folder(folder: str, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Unpacked with the archive's folder, or without."""
    return tuple(f"{folder}/{name}" for name in names), tuple(names)


_CIFAR10_SUM = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR100_SUM = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"


def _cifar(
    classes: int,
    content: str,
    label_bytes: int,
    members: tuple[str, ...],
    folder: str,
    size: int,
    sha256: str,
) -> Published:
    archive = f"cifar-{classes}-binary.tar.gz"
    return Published(
        name=f"cifar{classes}",
        title=f"CIFAR-{classes}: {content} (binary version)",
        samples=(50_000, 10_000),
        shape=(3, 32, 32),
        classes=classes,
        licence=NOT_STATED,
        files=(File(archive, f"https://www.cs.toronto.edu/~kriz/{archive}", size, sha256),),
        read=partial(readers.cifar, f"cifar{classes}", classes, label_bytes, members),
        folder=f"cifar{classes}",
        unpacked=_in_folder(folder, members),
    )


def _emnist(split: str, samples: tuple[int, int], classes: int) -> Published:
    names = [f"emnist-{split}-{part}" for part in readers.IDX_PARTS]
    return Published(
        name=f"emnist_{split}",
        title=f"EMNIST {split}: handwritten digits and letters",
        samples=samples,
        shape=(1, 28, 28),
        classes=classes,
        licence=NOT_STATED,
        files=(
            File(
                "gzip.zip",
                "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                561_753_746,
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
            ),
        ),
        read=partial(readers.emnist, split, classes),
        folder="emnist",  # one archive holds both splits
        unpacked=_in_folder("gzip", [f"{name}.gz" for name in names]) + _in_folder("gzip", names),
    )


_KNOWN = (
    Published(
        name="mnist",
        title="MNIST: handwritten digits",
        samples=(60_000, 10_000),
        shape=(1, 28, 28),
        classes=10,
        licence="CC BY-SA 3.0",
        files=_gz(
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            [
                (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            ],
        ),
        read=partial(readers.idx, "mnist", 10),
        folder="mnist",
        unpacked=(MNIST_FILES,),
    ),
    Published(
        name="fashion_mnist",
        title="Fashion-MNIST: articles of clothing",
        samples=(60_000, 10_000),
        shape=(1, 28, 28),
        classes=10,
        licence="MIT",
        files=_gz(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            [
                (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
                (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
                (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
                (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
            ],
        ),
        read=partial(readers.idx, "fashion_mnist", 10),
        folder="fashion_mnist",
        unpacked=(MNIST_FILES,),
    ),
    _emnist("balanced", (112_800, 18_800), 47),
    _emnist("byclass", (697_932, 116_323), 62),
    _cifar(10, "photographs", 1, CIFAR10_FILES, "cifar-10-batches-bin", 170_052_171, _CIFAR10_SUM),
    _cifar(
        100,
        "photographs, fine labels",
        2,
        CIFAR100_FILES,
        "cifar-100-binary",
        168_513_733,
        _CIFAR100_SUM,
    ),
    Published(
        name="svhn",
        title="Street View House Numbers, cropped digits",
        samples=(73_257, 26_032),
        shape=(3, 32, 32),
        classes=10,
        licence="non-commercial",
        files=(
            File(
                "train_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                182_040_794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            File(
                "test_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                64_275_384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
        read=readers.svhn,
        folder="svhn",
    ),
    Published(
        name="femnist",
        title="FEMNIST (LEAF): EMNIST by class with its writers",
        samples=(817_851,),
        shape=(1, 28, 28),
        classes=62,
        licence=NOT_STATED,
        files=(),
        read=partial(readers.leaf, "femnist", 62),
        folder="femnist",
        unpacked=(("train", "test"),),
        made_by=(
            "FEMNIST is made by LEAF's own script: in github.com/TalwalkarLab/leaf, data/femnist,"
            " run ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample. The JSON files are then in its"
            " folders data/train and data/test."
        ),
    ),
    Published(
        name="ag_news",
        title="AG News: a language model of news by topic",
        samples=(120_000, 7_600),
        shape=(30,),
        classes=4,
        licence="non-commercial",
        files=tuple(
            File(
                name,
                "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/555590db4219b1243abb1918effd6a7425a2d75f/data/ag_news_csv/"
                + name,
                size,
                sha256,
            )
            for name, size, sha256 in (
                (
                    "train.csv",
                    29_470_338,
                    "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
                ),
                (
                    "test.csv",
                    1_857_427,
                    "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
                ),
            )
        ),
        read=readers.ag_news,
        folder="ag_news",
        texts=True,
    ),
    Published(
        name="shakespeare",
        title="Shakespeare by role: predict the next character",
        samples=(108_118,),
        shape=(shakespeare.LENGTH,),
        classes=77,
        licence="public domain",
        files=(),
        read=shakespeare.read,
        folder="",
        unpacked=(("shakespeare.csv.xz",), ("shakespeare.csv",)),
        made_by=(
            "shakespeare.csv.xz or shakespeare.csv has the columns play, role and line, with a row"
            " for each line of the plays in their order."
        ),
        texts=True,
    ),
)

CATALOGUE: dict[str, Published] = {published.name: published for published in _KNOWN}
