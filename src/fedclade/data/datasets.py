"""Data sets: the embedded digits, `.npz` files, published files, the user's arrays."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.inputs import Inputs, describe_inputs, join_inputs, select
from fedclade.core.names import NO_NAMES, Names, checked_client_names, checked_names
from fedclade.data import array_checks
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import safe_read

NEEDED = ("x_train", "y_train", "x_test", "y_test")
NAMES = ("class_names", "feature_names")  # optional arrays of text
CACHE = "~/.cache/fedclade"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test part, before they are partitioned among clients.

    Attributes:
        name: The name of the data set.
        x_train: The training inputs, one row per sample.
        y_train: The training targets: class labels as int64, regression targets as float32.
        x_test: The test inputs.
        y_test: The test targets.
        keys: The ids of samples, such as their writers, by name: an id per training sample, and an
            id per test sample or None.
        key_names: For a key whose ids are text, the text of each id.
    """

    name: str
    x_train: Inputs
    y_train: Tensor
    x_test: Inputs
    y_test: Tensor
    keys: dict[str, tuple[Tensor, Tensor | None]]
    key_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: Names = NO_NAMES  # of the classes and the input features

    @property
    def classes(self) -> int | None:
        """The largest label plus 1; None if the targets are floats."""
        return _classes([self.y_train, self.y_test])

    def merged(self) -> Dataset:
        """The data set whose training part has the test samples too, after its own."""
        keys: dict[str, tuple[Tensor, Tensor | None]] = {
            name: (torch.cat([train, test]), None)
            for name, (train, test) in self.keys.items()
            if test is not None
        }
        return replace(
            self,
            x_train=join_inputs(torch.cat, [self.x_train, self.x_test]),
            y_train=torch.cat([self.y_train, self.y_test]),
            x_test=select(self.x_test, slice(0)),
            y_test=self.y_test[:0],
            keys=keys,
        )


def dataset(
    x_train: object,
    y_train: object,
    x_test: object | None = None,
    y_test: object | None = None,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    **keys: object,
) -> Dataset:
    """Make a data set from arrays or tensors. Arrays that already have the right type are not
    copied. Those of numpy may be memory-mapped, and then larger than memory.

    Args:
        x_train: The training inputs, one row per sample: an array, or a tuple or dictionary of
            arrays, which are the arguments of the model. uint8 inputs are images, which models read
            as x / 255; floats become float32, other integers int64.
        y_train: The training targets. Integers are class labels, floats are regression targets.
        x_test: The test inputs; None for no test part. Clients then have no test part either,
            unless the partition makes one from training samples (`NaturalId`).
        y_test: The test targets.
        name: The name of the data set in results.
        **keys: Ids of the samples for partitions by id, as `writer=(ids_train, ids_test)` or
            `writer=ids_train`. Ids may be text.
        class_names: The name of each class; reports and model cards show it instead of its number.
        feature_names: The name of each input feature.
    """
    if (x_test is None) != (y_test is None):
        missing = "x_test" if x_test is None else "y_test"
        raise InvalidInputError(
            f"{missing} is missing: give both x_test and y_test, or neither.", missing
        )
    arrays = {"x_train": x_train, "y_train": y_train}
    if x_test is not None:
        arrays |= {"x_test": x_test, "y_test": y_test}
    pairs = {
        key: value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        for key, value in keys.items()
    }
    return _build(name, arrays, pairs, class_names=class_names, feature_names=feature_names)


def load(
    name_or_path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None
) -> Dataset:
    """Load a data set by its name, from an `.npz` file, or from a folder of `.npy` files.

    `load` looks for a name in `DATASETS`, then for NAME.npz and for a folder NAME with x_train.npy
    in `root`, $FEDCLADE_DATA, ./data and ~/.cache/fedclade, then for the files of the published
    data set NAME in the folder NAME of these places. An .npz file holds x_train, y_train, x_test
    and y_test. Other pairs of arrays of whole numbers or text, such as writer_train and
    writer_test, are keys. class_names and feature_names, arrays of text, are optional.

    A folder has the same arrays as .npy files, of which x_test and y_test are optional. They are
    memory-mapped: only the samples that a run needs are read, so they may be larger than memory.

    Args:
        name_or_path: The name of the data set, or the path of an .npz file or of a folder.
        root: The folder to search first; None for the others only.
    """
    # Not at the top: the readers of the catalog import this module.
    from fedclade.data.dataset_catalog import CATALOGUE

    name = os.fspath(name_or_path)
    if name in DATASETS:
        return DATASETS[name]()
    candidates = _candidates(name, root)
    if Path(name).suffix.lower() in TABLE_SUFFIXES:
        raise InvalidInputError(
            f"data set '{name}': a table has no arrays such as {NEEDED[0]}. In an experiment file"
            f" set data.path = '{name}' with data.client and data.target, in place of data.name and"
            " [partition]; in Python use fc.data.from_csv or from_parquet.",
            name,
        )
    for path in candidates:
        if path.is_file():
            return _read(path)
        if (folder := _array_folder(path)) is not None:
            return _from_arrays_of(folder, map_arrays(folder))
    published = CATALOGUE.get(name)
    if published is None:
        raise InvalidInputError(_not_found(name, candidates, {*DATASETS, *CATALOGUE}), name)
    searched = places(root)
    if (files := published.find_files(searched)) is not None:
        return published.read(files)
    raise InvalidInputError(
        f"data set '{name}' was not found. Looked for"
        f" {', '.join(str(path) for path in candidates)}, and for the published files in"
        f" {', '.join(str(place / published.folder) for place in searched)}."
        f"{published.missing_files(searched)}"
        f" Run 'fedclade data get {name}', which downloads them or describes how to get them, or"
        " give another folder by --data-root or $FEDCLADE_DATA.",
        name,
    )


def is_available(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Whether `load` would find the files of this data set. They are not read."""
    # Not at the top: the readers of the catalog import this module.
    from fedclade.data.dataset_catalog import CATALOGUE

    if name in DATASETS or any(
        path.is_file() or _array_folder(path) is not None for path in _candidates(name, root)
    ):
        return True
    published = CATALOGUE.get(name)
    return published is not None and published.find_files(places(root)) is not None


def places(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders that `load` searches, in this order."""
    folders = [root, os.environ.get("FEDCLADE_DATA") or None, "data", CACHE]
    return [Path(folder).expanduser() for folder in folders if folder is not None]


def from_arrays(
    clients: Sequence[Sequence[object]] | Mapping[str, Sequence[object]],
    groups: Sequence[int] | Tensor | None = None,
    *,
    client: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
) -> Clients:
    """Make clients from arrays that are already divided among them.

    Args:
        clients: For each client (x, y), or (x, y, x_test, y_test); a list, or a dictionary with the
            names of the clients. A client with (x, y) has no test part and is not evaluated on
            test data. The arrays are as in `dataset`.
        groups: The true group of each client; None if it is not known.
        client: The name of each client, if `clients` is a list.
        class_names: The name of each class; reports and model cards show it instead of its number.
        feature_names: The name of each feature of inputs of shape (samples, features).
    """
    client_names: tuple[str, ...] | None = None
    if isinstance(clients, Mapping):
        if client is not None:
            raise InvalidInputError(
                "client: the dictionary has the names of the clients already; leave client out.",
                "client",
            )
        client_names = checked_client_names(list(clients), "client")
        clients = list(clients.values())
    elif client is not None:
        client_names = checked_client_names(client, "client")
        if len(client_names) != len(clients):
            raise InvalidInputError(
                f"client has {len(client_names)} names for {len(clients)} clients: give one name a"
                " client.",
                "client",
            )
    if len(clients) == 0:
        raise InvalidInputError("clients: there are none. Give at least one (x, y).", "clients")
    called = Names(client_names)
    for number, given in enumerate(clients):
        if not isinstance(given, tuple | list) or len(given) not in (2, 4):
            raise InvalidInputError(
                f"client {called.client(number)}: give (x, y) or (x, y, x_test, y_test), not"
                f" {_kind_of(given)}.",
                f"client {called.client(number)}",
            )
    first = f"client {called.client(0)}"
    rows = sum(_length(given[1]) for given in clients)
    train = array_checks.Pool(
        rows, *array_checks.samples(clients[0][0], clients[0][1], "x", "y", f"{first}: ")
    )
    test = array_checks.Pool(
        sum(_length(given[3]) for given in clients if len(given) == 4), train.x, train.y
    )
    test_part_id: list[int] = []
    for number, given in enumerate(clients):
        where = f"client {called.client(number)}: "
        train.add(
            *array_checks.samples(given[0], given[1], "x", "y", where),
            where.removesuffix(": "),
            first,
        )
        test_part_id.append(len(test.offsets) - 1 if len(given) == 4 else -1)
        if len(given) == 4:
            test.add(
                *array_checks.samples(given[2], given[3], "x_test", "y_test", where),
                f"{where}its test part",
                first,
            )
    classes = _classes([train.y, test.y])
    return Clients(
        train.x,
        train.y,
        _consecutive(train.offsets),
        test.x,
        test.y,
        _consecutive(test.offsets),
        test_part_id=torch.tensor(test_part_id),
        test_sample_id=torch.arange(len(test.y)),
        groups=_groups(groups, len(clients)),
        classes=classes,
        names=replace(_names(class_names, feature_names, classes, train.x), clients=client_names),
    )


def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels.

    Values are in [0, 1]. The last fifth of each class is the test part.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # half a second to import, and rarely needed

    raw = load_digits()
    x = torch.from_numpy(raw.images.astype(np.float32) / 16).unsqueeze(1)
    y = torch.from_numpy(raw.target.astype(np.int64))
    test = torch.zeros(len(y), dtype=torch.bool)
    for label in range(10):
        rows = (y == label).nonzero().flatten()
        test[rows[len(rows) - round(len(rows) / 5) :]] = True
    return Dataset("digits", x[~test], y[~test], x[test], y[test], {})


DATASETS: dict[str, Callable[[], Dataset]] = {"digits": digits}
"""Data sets by name that need no file. Add a function: `DATASETS["mine"] = my_loader`."""


def _build(
    name: str,
    arrays: Mapping[str, object],
    keys: Mapping[str, tuple[object, object]],
    where: str = "",
    class_names: object = None,
    feature_names: object = None,
) -> Dataset:
    x_train, y_train = array_checks.samples(
        arrays["x_train"], arrays["y_train"], "x_train", "y_train", where
    )
    x_test, y_test = select(x_train, slice(0)), y_train[:0]
    if "x_test" in arrays:
        x_test, y_test = array_checks.samples(
            arrays["x_test"], arrays["y_test"], "x_test", "y_test", where
        )
        array_checks.require_same_kind(
            x_test, y_test, x_train, y_train, f"{where}the test part", "the training part"
        )
    checked = {
        key: array_checks.ids(train, test, len(y_train), len(y_test), where + key)
        for key, (train, test) in keys.items()
    }
    names = _names(class_names, feature_names, _classes([y_train, y_test]), x_train, where)
    return Dataset(
        name,
        x_train,
        y_train,
        x_test,
        y_test,
        {key: (train, test) for key, (train, test, _) in checked.items()},
        {key: texts for key, (_, _, texts) in checked.items() if texts is not None},
        names,
    )


def _names(
    class_names: object,
    feature_names: object,
    classes: int | None,
    x: Inputs,
    where: str = "",
) -> Names:
    """The names of classes and features, if there are enough of them."""
    labels = features = None
    if class_names is not None:
        labels = checked_names(class_names, f"{where}class_names")
        if classes is None or len(labels) < classes:
            needed = (
                "the targets are floats" if classes is None else f"labels go up to {classes - 1}"
            )
            raise InvalidInputError(
                f"{where}class_names has {len(labels)} names, but {needed}: give one name for each"
                " class, for integer labels only.",
                f"{where}class_names",
            )
    if feature_names is not None:
        features = checked_names(feature_names, f"{where}feature_names")
        if not isinstance(x, Tensor) or x.ndim != 2 or len(features) != x.shape[1]:
            raise InvalidInputError(
                f"{where}feature_names has {len(features)} names for inputs of shape"
                f" {describe_inputs(x)}: give one name for each feature of inputs of shape"
                " (samples, features).",
                f"{where}feature_names",
            )
    return Names(classes=labels[:classes] if labels is not None else None, features=features)


TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
"""The ends of the names of tables, which `load` does not read."""


def _candidates(name: str, root: str | os.PathLike[str] | None) -> list[Path]:
    if Path(name).name != name:
        return [Path(name).expanduser()]
    file = name if name.endswith(".npz") else f"{name}.npz"
    in_places = [place / file for place in places(root)]
    return [Path(file), *in_places] if name.endswith(".npz") else in_places


def _not_found(name: str, candidates: Sequence[Path], known: Collection[str]) -> str:
    if len(candidates) == 1:
        problem = safe_read.not_a_file(candidates[0]) or "there is no such file"
        return (
            f"data set '{name}': {problem}. Give the path of an .npz file with the arrays"
            f" {', '.join(NEEDED)}, or of a folder with them as .npy files."
        )
    searched = ", ".join(
        str(path) + (f" ({kind})" if (kind := safe_read.not_a_file(path)) else "")
        for path in candidates
    )
    file = candidates[-1].name
    return (
        f"data set '{name}' was not found. Looked for: {searched}.{nearest(name, known)} "
        f"Put {file}, with the arrays {', '.join(NEEDED)}, in one of these places, give its path, "
        "or give its folder by --data-root or $FEDCLADE_DATA."
    )


def _read(path: Path) -> Dataset:
    arrays = read_npz(path)
    if path.stem == "ag_news" and all(
        arrays[part].dtype.kind == "U" for part in ("x_train", "x_test")
    ):
        return _language_model(path, arrays)
    return _from_arrays_of(path, arrays)


def _from_arrays_of(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> Dataset:
    """The data set of the arrays of a file or folder."""
    keys = {
        name.removesuffix("_train"): (array, arrays.get(name.removesuffix("_train") + "_test"))
        for name, array in arrays.items()
        # A file may hold other arrays too, such as sample weights: only possible keys are read.
        if name.endswith("_train")
        and name not in NEEDED
        and array.ndim == 1
        and array.dtype.kind in "iuUS"
    }
    names = {name: _texts(path, name, arrays[name]) for name in NAMES if name in arrays}
    name = path.name if path.is_dir() else path.stem
    return _build(name, arrays, keys, f"{path}: ", **names)


def _texts(path: Path, name: str, array: NDArray[np.generic]) -> list[str]:
    if array.ndim != 1 or array.dtype.kind not in "US":
        raise InvalidInputError(
            f"{path}: {name} has type {array.dtype} and shape {array.shape}: store a list of text.",
            name,
        )
    return array_checks.as_texts(array)


def _language_model(path: Path, arrays: Mapping[str, NDArray[np.generic]]) -> Dataset:
    # Not at the top: it imports this module.
    from fedclade.data.text_dataset import language_model

    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if y.dtype.kind not in "iu" or x.ndim != 1 or x.shape != y.shape:
            raise InvalidInputError(
                f"{path}: x_{part} has shape {x.shape}, y_{part} has shape {y.shape} and type"
                f" {y.dtype}. Give one text and one topic (a whole number) per sample.",
                f"{path}: x_{part}",
            )
    train, test = (
        (arrays[f"x_{part}"].tolist(), arrays[f"y_{part}"].tolist()) for part in ("train", "test")
    )
    return language_model(train, test, name=path.stem)


def read_npz(path: Path, needed: Sequence[str] = NEEDED) -> dict[str, NDArray[np.generic]]:
    """The arrays of an .npz file: those of a data set, and the needed ones.

    Args:
        path: the file.
        needed: arrays that it must have.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    safe_read.fit(path, safe_read.size(path))
    name = "the file"
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                raise InvalidInputError(
                    f"{path}: this is not an .npz file. Write one with np.savez(path,"
                    f" {', '.join(f'{name}=…' for name in needed)}).",
                    str(path),
                )
            with zipfile.ZipFile(file) as archive:
                members = {member.removesuffix(".npy"): member for member in archive.namelist()}
                if missing := [name for name in needed if name not in members]:
                    present = ", ".join(members) or "no arrays"
                    raise InvalidInputError(
                        f"{path}: {', '.join(missing)} missing, the file has {present}. It must"
                        f" have {', '.join(needed)}.",
                        str(path),
                    )
                relevant = {
                    name: member
                    for name, member in members.items()
                    if name.endswith(("_train", "_test")) or name in (*needed, *NAMES)
                }
                unpacked = sum(archive.getinfo(member).file_size for member in relevant.values())
                safe_read.fit(path, unpacked, "of arrays")
                for name, member in relevant.items():
                    if (array := _array(path, archive, member)) is not None:
                        arrays[name] = array
                    elif name in (*needed, *NAMES):
                        raise InvalidInputError(
                            f"{path}: {name} is not an array. Write it with np.savez.",
                            f"{path}: {name}",
                        )
    except InvalidInputError:
        raise
    # zipfile and numpy raise a dozen kinds of error for a damaged file.
    except Exception as error:
        if "allow_pickle" in str(error):
            raise InvalidInputError(
                f"{path}: {name} holds Python objects, which are never loaded. Store an array of"
                " numbers.",
                f"{path}: {name}",
            ) from error
        reason = str(error).split("\n", 1)[0] or type(error).__name__
        raise InvalidInputError(
            f"{path}: {name} cannot be read, damaged or cut short ({reason}). Copy or make the file"
            " again.",
            str(path),
        ) from error
    return arrays


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[np.generic] | None:
    """A member of the archive; None if it is not an array of numbers or strings."""
    with safe_read.member(path, archive, name) as file:
        if not file.peek(6).startswith(b"\x93NUMPY"):
            return None
        header = _HEADERS.get(np.lib.format.read_magic(file))
        if header is None:  # the third version is only for structured arrays
            return None
        shape, _, dtype = header(file)
        expected = file.tell() + math.prod(shape) * dtype.itemsize
        size = archive.getinfo(name).file_size
        if expected != size and not dtype.hasobject:  # numpy refuses objects
            raise ValueError(f"it has {size} bytes, its header requires {expected}")
        file.seek(0)
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _array_folder(path: Path) -> Path | None:
    """The folder of .npy files of a candidate: the path itself, or NAME for NAME.npz."""
    folder = path.with_suffix("") if path.suffix == ".npz" else path
    return folder if (folder / "x_train.npy").is_file() else None


def map_arrays(folder: Path) -> dict[str, NDArray[np.generic]]:
    """The arrays of a folder of .npy files, memory-mapped: their values are not read. What is
    written to them stays in memory.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    for path in sorted(folder.glob("*.npy")):
        name = path.stem
        if not name.endswith(("_train", "_test")) and name not in NAMES:
            continue
        safe_read.size(path)  # not a pipe
        try:
            arrays[name] = np.lib.format.open_memmap(path, mode="c")
        except (ValueError, OSError) as error:
            reason = str(error).split("\n", 1)[0] or type(error).__name__
            raise InvalidInputError(
                f"{path}: not an .npy file of numbers or text, damaged or cut short ({reason})."
                " Write it with np.save.",
                str(path),
            ) from error
    for name, other in (("y_train", "x_train"), ("y_test", "x_test"), ("x_test", "y_test")):
        if name not in arrays and other in arrays:
            raise InvalidInputError(
                f"{folder}: {name}.npy is missing, and there is {other}.npy. Add it.",
                str(folder / f"{name}.npy"),
            )
    return arrays


def _kind_of(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, tuple | list) else type(value).__name__


def _classes(labels: Sequence[Tensor]) -> int | None:
    if labels[0].is_floating_point():
        return None
    return max(int(y.max()) + 1 for y in labels if len(y))


def _length(targets: object) -> int:
    """The number of targets; 0 if they have no length, which `array_checks` reports later."""
    try:
        return len(targets)  # type: ignore[arg-type]
    except TypeError:
        return 0


def _consecutive(offsets: Sequence[int]) -> RaggedIndex:
    return RaggedIndex(torch.arange(offsets[-1]), torch.tensor(offsets))


def _groups(groups: Sequence[int] | Tensor | None, clients: int) -> Tensor | None:
    if groups is None:
        return None
    checked = array_checks.targets(groups, "groups")
    if checked.is_floating_point() or len(checked) != clients:
        kind = array_checks.type_name(checked)
        raise InvalidInputError(
            f"groups has {len(checked)} entries of type {kind} for {clients} clients: give one"
            " whole number per client.",
            "groups",
        )
    return checked
