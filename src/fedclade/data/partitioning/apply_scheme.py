"""From a data set to clients: the probe samples are removed, a scheme assigns the rows, and the
result is `Clients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core.inputs import Inputs, join_inputs, select, tensors_of
from fedclade.core.names import checked_client_names
from fedclade.data.array_checks import Pool
from fedclade.data.datasets import Dataset
from fedclade.data.federated_dataset import Clients, LaterData, RaggedIndex
from fedclade.data.partitioning.base import (
    Index,
    Scheme,
    Split,
    Transform,
    follow_labels,
)
from fedclade.data.partitioning.drift import Drift
from fedclade.data.partitioning.feature_clusters import FeatureClusters
from fedclade.data.partitioning.grouped import (
    LabelClusters,
    LabelPermutation,
    LabelSwap,
    PowerLawClusters,
    Rotation,
)
from fedclade.data.partitioning.pfllib import PFLlib
from fedclade.data.partitioning.skewed import Dirichlet, Iid, NaturalId, Pathological, QuantitySkew
from fedclade.data.synthetic_genomics import FlippedId
from fedclade.errors import InvalidInputError, require, require_int

PARTITIONS: dict[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (
        Iid,
        Dirichlet,
        Pathological,
        NaturalId,
        LabelClusters,
        PowerLawClusters,
        LabelSwap,
        LabelPermutation,
        Rotation,
        QuantitySkew,
        FeatureClusters,
        FlippedId,
        Drift,
        PFLlib,
    )
}

MOST_PROBE = 2500
MOST_COPIED = 1 << 30  # bytes of test samples that become a pool of their own
STREAM = 0xDA7A  # separates these random numbers from other uses of the same seed


def partition(
    dataset: Dataset, scheme: Scheme, clients: int, seed: int = 0, probe: int | None = 0
) -> Clients:
    """Partition a data set among clients. The same seed gives the same bytes.

    Args:
        dataset: The data set, from `load` or `dataset`.
        scheme: How to divide it, such as `Dirichlet(alpha=0.5)`.
        clients: The number of clients M.
        seed: The seed of all random numbers.
        probe: The number of training samples that become the server's probe data, which FLIS and
            PCA+kM+HC with a shared basis need; None for a tenth, at most 2,500. They are drawn
            first, are the same for every scheme, and no client has them.
    """
    _check_call(dataset, scheme, clients, seed)
    if getattr(scheme, "merges_test", False):
        dataset = dataset.merged()
    draw_probe, draw_split, draw_test, draw_order = map(
        np.random.default_rng, np.random.SeedSequence([seed, STREAM]).spawn(4)
    )
    apart, keep = _probe_rows(dataset, clients, probe, draw_probe)
    split = _split_without_probe(dataset, keep, scheme, clients, draw_split, draw_test)

    # Schemes assign samples class by class; a batch of consecutive rows must mix the classes.
    train = [draw_order.permutation(rows) for rows in split.train]
    groups = None if split.groups is None else torch.from_numpy(split.groups)
    split = _with_later_clients(replace(split, train=train))
    x, y, train_parts = _train(dataset, split.train, split)
    x_test, y_test, test_parts, test_part_id, source = _test(dataset, split)
    end = int(train_parts.offsets[clients])
    return Clients(
        x,
        y,
        RaggedIndex(train_parts.index[:end], train_parts.offsets[: clients + 1]),
        x_test,
        y_test,
        test_parts,
        test_part_id[:clients],
        test_sample_id=source,
        groups=groups,
        classes=dataset.classes,
        probe=select(dataset.x_train, apart) if len(apart) else None,
        dataset=dataset.name,
        partition=scheme.name,
        origin={**_fields(scheme), "seed": int(seed), "probe": len(apart)},
        names=replace(dataset.names, clients=_client_names(split, scheme)),
        later=_later_data(split, train_parts, test_part_id),
    )


def _with_later_clients(split: Split) -> Split:
    """The split with the later data of the clients that change as further clients."""
    if split.changes_at is None or split.later_groups is None or split.groups is None:
        return split
    changing = np.flatnonzero(split.changes_at)
    part = np.arange(len(split.train)) if split.test_part_id is None else split.test_part_id
    return replace(
        split,
        train=[*split.train, *(split.train[client] for client in changing.tolist())],
        test_part_id=np.concatenate([part, part[changing]]),
        groups=np.concatenate([split.groups, split.later_groups[changing]]),
    )


def _later_data(split: Split, train: RaggedIndex, test_part_id: Tensor) -> LaterData | None:
    """The later data of all clients, from a split `_with_later_clients`."""
    if split.changes_at is None or split.groups is None:
        return None
    rounds = torch.from_numpy(split.changes_at)
    part = torch.arange(len(rounds))
    part[rounds > 0] = torch.arange(len(rounds), len(train))
    return LaterData(
        rounds,
        RaggedIndex.of(train[i] for i in part.tolist()),
        test_part_id[part],
        torch.from_numpy(split.groups)[part],
    )


def _client_names(split: Split, scheme: Scheme) -> tuple[str, ...] | None:
    """The names that the scheme gave. Those of `NaturalId` are the text of its key."""
    field = "partition.key" if isinstance(scheme, NaturalId) else f"{type(scheme).__name__}.names"
    return None if split.names is None else checked_client_names(split.names, field)


def _check_call(dataset: Dataset, scheme: Scheme, clients: int, seed: int) -> None:
    if not isinstance(dataset, Dataset):
        raise InvalidInputError(
            f"dataset: must be a Dataset (from load or dataset), not {type(dataset).__name__}.",
            "dataset",
        )
    if isinstance(scheme, type | str) or not hasattr(scheme, "split"):  # a str has a split too
        kind = f"the class {scheme.__name__}" if isinstance(scheme, type) else repr(scheme)
        raise InvalidInputError(
            f"scheme: must be an object such as Iid() or Dirichlet(alpha=0.5), not {kind}.",
            "scheme",
        )
    require_int("partition.clients", clients, 1)
    require_int("partition.seed", seed, 0)


def _fields(scheme: Scheme) -> dict[str, Any]:
    """The scheme's settings as an experiment file has them, without those that are None."""
    if not is_dataclass(scheme):
        return {}
    settings = {field.name: getattr(scheme, field.name) for field in fields(scheme)}
    return {name: value for name, value in settings.items() if value is not None}


def _probe_rows(
    dataset: Dataset, clients: int, probe: int | None, rng: np.random.Generator
) -> tuple[Index, Index]:
    """The training rows of the probe, and the others in ascending order."""
    total = len(dataset.y_train)
    if probe is None:
        probe = min(MOST_PROBE, total // 10)
    require_int("partition.probe", probe, 0)
    require(
        probe < total,
        "partition.probe",
        probe,
        f"there are {total} training samples; ask for at most {max(0, total - clients)}",
    )
    available = total - probe
    without = f" ({total} without {probe} probe samples)" if probe else ""
    require(
        clients <= available,
        "partition.clients",
        clients,
        f"there are {available} training samples{without}; ask for at most {available} clients",
    )
    order = rng.permutation(total)
    return order[:probe], np.sort(order[probe:])


def _split_without_probe(
    dataset: Dataset,
    keep: Index,
    scheme: Scheme,
    clients: int,
    draw_split: np.random.Generator,
    draw_test: np.random.Generator,
) -> Split:
    """The scheme's split of the rows `keep`, with test parts, as rows of `dataset`, whose samples
    are not copied.
    """
    data = _WithoutProbe.of(dataset, torch.from_numpy(keep))
    split = _as_arrays(scheme.split(data, clients, draw_split))
    _check_split(split, data, clients, type(scheme).__name__)
    return replace(
        split,
        train=[keep[rows] for rows in split.train],
        test=_test_parts(data, split, draw_test),
        held_out=None if split.held_out is None else [keep[rows] for rows in split.held_out],
    )


class _WithoutProbe(Dataset):
    """A data set without its probe samples. Inputs are copied only for schemes that read them."""

    pool: Inputs
    keep: Tensor

    @staticmethod
    def of(dataset: Dataset, keep: Tensor) -> Dataset:
        if len(keep) == len(dataset.y_train):
            return dataset
        keys = {key: (train[keep], test) for key, (train, test) in dataset.keys.items()}
        rest = _WithoutProbe(
            dataset.name,
            dataset.x_train,
            dataset.y_train[keep],
            dataset.x_test,
            dataset.y_test,
            keys,
            dataset.key_names,
            dataset.names,
        )
        vars(rest).update(pool=vars(rest).pop("x_train"), keep=keep)
        return rest

    @cached_property
    def x_train(self) -> Inputs:
        return select(self.pool, self.keep)


def _train(
    data: Dataset, train: Sequence[Index], split: Split
) -> tuple[Inputs, Tensor, RaggedIndex]:
    parts = RaggedIndex.of([torch.from_numpy(rows) for rows in train])
    if split.transform is None:
        return data.x_train, data.y_train, parts
    # The pool has a block for each group; a client's rows are in the block of its group.
    group = torch.from_numpy(_transform_groups(split)).repeat_interleave(parts.sizes)
    order = group.argsort(stable=True)
    blocks = [(g, parts.index[order[group[order] == g]]) for g in sorted(set(group.tolist()))]
    pool = None
    for g, rows in blocks:
        x, y = split.transform(select(data.x_train, rows), data.y_train[rows], g)
        pool = pool or Pool(len(order), x, y)
        pool.add(x, y, f"group {g}", f"group {blocks[0][0]}")
    assert pool is not None  # every client has samples
    return pool.x, pool.y, RaggedIndex(order.argsort(), parts.offsets)


def _test(data: Dataset, split: Split) -> tuple[Inputs, Tensor, RaggedIndex, Tensor, Tensor]:
    """The inputs and targets of the test pool, its parts, the part of each client (-1 for none) and
    the original sample of each row.

    Original samples have their row in the test data; training samples that are held out for
    testing have their row in the training data plus the number of test samples.
    """
    parts = split.test or []
    held_out = split.held_out or [np.empty(0, np.int64)] * len(parts)
    test_part_id = np.arange(len(split.train)) if split.test_part_id is None else split.test_part_id
    # A part that two groups transform differently becomes two parts. Parts without clients and
    # empty parts are dropped.
    keys = list(zip(test_part_id.tolist(), _transform_groups(split).tolist(), strict=True))
    used = [key for key in dict.fromkeys(keys) if len(parts[key[0]]) + len(held_out[key[0]])]
    number = {key: i for i, key in enumerate(used)}
    of_client = torch.tensor([number.get(key, -1) for key in keys])
    samples = sum(len(parts[part]) + len(held_out[part]) for part, _ in used)
    # Test samples that may be larger than memory are not copied.
    if split.transform is None and (
        split.held_out is None or samples * _sample_bytes(data.x_train) > MOST_COPIED
    ):
        one_pool = _one_test_pool(
            data, [parts[part] for part, _ in used], [held_out[part] for part, _ in used]
        )
        if one_pool is not None:
            x, y, rows, source = one_pool
            return x, y, rows, of_client, source

    blocks = [
        _block(data, parts[part], held_out[part], group, split.transform) for part, group in used
    ]
    if not blocks:
        return (
            select(data.x_test, slice(0)),
            data.y_test[:0],
            RaggedIndex.of([]),
            of_client,
            torch.empty(0, dtype=torch.int64),
        )
    xs, ys, sources = zip(*blocks, strict=True)
    x, y, source = join_inputs(torch.cat, xs), torch.cat(ys), torch.cat(sources)
    offsets = torch.tensor([0, *(len(block[1]) for block in blocks)]).cumsum(0)
    return x, y, RaggedIndex(torch.arange(len(y)), offsets), of_client, source


def _one_test_pool(
    data: Dataset, test: Sequence[Index], held_out: Sequence[Index]
) -> tuple[Inputs, Tensor, RaggedIndex, Tensor] | None:
    """The pool of all test samples, the rows of each part, and the original sample of each row;
    None if some parts are rows of the test data and some of the training data.
    """
    if not any(map(len, held_out)):
        rows, source = test, torch.arange(len(data.y_test))
        x, y = data.x_test, data.y_test
    elif not any(map(len, test)):
        rows, source = held_out, torch.arange(len(data.y_train)) + len(data.y_test)
        x, y = data.x_train, data.y_train
    else:
        return None
    return x, y, RaggedIndex.of(map(torch.from_numpy, rows)), source


def _sample_bytes(x: Inputs) -> int:
    return sum(value[:1].nbytes for value in tensors_of(x))


def _block(
    data: Dataset, test: Index, held_out: Index, group: int, transform: Transform | None
) -> tuple[Inputs, Tensor, Tensor]:
    rows, held = torch.from_numpy(test), torch.from_numpy(held_out)
    x = join_inputs(torch.cat, [select(data.x_test, rows), select(data.x_train, held)])
    y = torch.cat([data.y_test[rows], data.y_train[held]])
    if transform is not None:
        x, y = transform(x, y, group)
    return x, y, torch.cat([rows, held + len(data.y_test)])


def _test_parts(data: Dataset, split: Split, rng: np.random.Generator) -> Sequence[Index]:
    if split.test is not None:
        return split.test
    if split.held_out is not None:
        return [np.empty(0, np.int64)] * len(split.held_out)
    if data.classes is None or data.y_train.ndim > 1:  # no labels: all samples are of one class
        return follow_labels(
            split.train,
            np.zeros(len(data.y_train), np.int64),
            np.zeros(len(data.y_test), np.int64),
            rng,
        )
    return follow_labels(split.train, data.y_train.numpy(), data.y_test.numpy(), rng)


def _transform_groups(split: Split) -> Index:
    """The group by which each client's samples are transformed; 0 for all without a transform."""
    return (
        np.zeros(len(split.train), np.int64)
        if split.transform is None or split.groups is None
        else split.groups
    )


def _as_arrays(split: Split) -> Split:
    """The split with arrays: a user's scheme may return lists or tensors."""

    def rows(parts: Sequence[Index] | None) -> list[Index] | None:
        return None if parts is None else [np.asarray(part, np.int64) for part in parts]

    def array(numbers: Index | None) -> Index | None:
        return None if numbers is None else np.asarray(numbers, np.int64)

    return replace(
        split,
        train=rows(split.train) or [],
        test=rows(split.test),
        held_out=rows(split.held_out),
        test_part_id=array(split.test_part_id),
        groups=array(split.groups),
        changes_at=array(split.changes_at),
        later_groups=array(split.later_groups),
    )


def _check_split(split: Split, data: Dataset, clients: int, scheme: str) -> None:
    """Check that the split of a user's scheme is valid."""
    entries = clients if split.test is None else len(split.test)
    wrong = None
    if len(split.train) != clients:
        wrong = f"{len(split.train)} train parts for {clients} clients"
    elif empty := [i for i, rows in enumerate(split.train) if len(rows) == 0]:
        wrong = f"no training samples for client {empty[0]}"
    elif not _rows_fit(split.train, len(data.y_train)) or not _rows_fit(
        split.held_out or [], len(data.y_train)
    ):
        wrong = (
            f"training rows outside 0 … {len(data.y_train) - 1}, or the same row twice in one part"
        )
    elif not _rows_fit(split.test or [], len(data.y_test)):
        wrong = f"test rows outside 0 … {len(data.y_test) - 1}, or the same row twice in one part"
    elif split.held_out is not None and len(split.held_out) != entries:
        wrong = f"{len(split.held_out)} held_out parts for {entries} test parts"
    elif (
        split.held_out is not None
        and np.isin(np.concatenate(split.held_out), np.concatenate(split.train)).any()
    ):
        wrong = "training samples that are also held_out for testing"
    elif split.test_part_id is None and entries != clients:
        wrong = f"{entries} test parts for {clients} clients and no test_part_id"
    elif split.test_part_id is not None and (
        len(split.test_part_id) != clients
        or not np.isin(split.test_part_id, np.arange(entries)).all()
    ):
        wrong = (
            f"a test_part_id that does not give one of {entries} test parts for each of {clients}"
            " clients"
        )
    elif split.groups is not None and len(split.groups) != clients:
        wrong = f"{len(split.groups)} groups for {clients} clients"
    elif split.transform is not None and split.groups is None:
        wrong = "a transform but no groups to apply it to"
    elif split.changes_at is not None and (
        split.transform is None
        or split.later_groups is None
        or not len(split.changes_at) == len(split.later_groups) == clients
        or (split.changes_at < 0).any()
    ):
        wrong = (
            f"changes_at that needs a transform, later_groups, and a round of at least 0 for each"
            f" of {clients} clients"
        )
    elif split.names is not None and len(split.names) != clients:
        wrong = f"{len(split.names)} names for {clients} clients"
    if wrong:
        raise InvalidInputError(f"{scheme}.split returned {wrong}.", f"{scheme}.split")


def _rows_fit(parts: Sequence[Index], available: int) -> bool:
    return all(
        len(np.unique(rows)) == len(rows)
        and (len(rows) == 0 or (rows.min() >= 0 and rows.max() < available))
        for rows in parts
    )
