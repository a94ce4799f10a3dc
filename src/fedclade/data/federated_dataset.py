"""The clients of a federation: which rows of the pools of samples each client holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedclade.core.inputs import Inputs, samples_in, select, shape_of
from fedclade.core.names import NO_NAMES, Names, client_number
from fedclade.core.notebook_html import html_table
from fedclade.core.rng import fold_in
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.encoding import Encoding
from fedclade.data.validation_split import validation_positions
from fedclade.errors import InvalidInputError, is_number, require, require_int

SHOWN_CLIENTS = 20
SHOWN_CLASSES = 20  # more would not fit on a line


@dataclass(frozen=True, eq=False)
class RaggedIndex:
    """A ragged list of row numbers: part i is `index[offsets[i]:offsets[i + 1]]`. Parts may share
    rows.
    """

    index: Tensor
    offsets: Tensor

    @staticmethod
    def of(rows: Iterable[Sequence[int] | Tensor]) -> RaggedIndex:
        pieces = [torch.as_tensor(r, dtype=torch.int64) for r in rows]
        sizes = torch.tensor([0, *(len(p) for p in pieces)], dtype=torch.int64)
        return RaggedIndex(torch.cat([*pieces, torch.empty(0, dtype=torch.int64)]), sizes.cumsum(0))

    @property
    def sizes(self) -> Tensor:
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, part: int) -> Tensor:
        return self.index[int(self.offsets[part]) : int(self.offsets[part + 1])]


@dataclass(frozen=True, eq=False)
class LaterData:
    """The data that clients have from a round on: other versions of the same samples.

    Part i of `train` and of `validation` has a row for each row of client i's first data, in the
    same order, so a sample stays training, validation or test data.
    """

    rounds: Tensor  # (clients,) the first round with these data; 0: the client's data never change
    train: RaggedIndex
    test_part_id: Tensor  # (clients,)
    groups: Tensor | None = None  # (clients,) the true group of each, where it is known
    validation: RaggedIndex | None = None

    def have_changed(self, round_number: int) -> Tensor:
        """(clients,) whether each client has these data in this round."""
        return (self.rounds > 0) & (self.rounds <= round_number)


@dataclass(frozen=True, eq=False)
class Clients:
    """The data of all clients. Images stay as they came (uint8 is read as x / 255 when a batch is
    made).

    Samples live in two pools, `x, y` and `x_test, y_test`; a client is a set of rows of each. Test
    parts are stored once even where many clients share one (`test_part_id`), so that a model is
    evaluated on it once.

    Attributes:
        x: The inputs of the training pool.
        y: Its targets.
        train: The rows of `x, y` on which each client trains.
        x_test: The inputs of the test pool.
        y_test: Its targets.
        test: The test parts: rows of `x_test, y_test`.
        test_part_id: (clients,) The part of `test` that is the client's own; -1 where it has none.
        test_sample_id: (rows of x_test,) The original sample a row was made from: what "distinct
            test samples" counts.
        groups: (clients,) The true group of each, where it is known.
        classes: The number of classes; None if the targets are not class labels.
        probe: Inputs set apart before the partition: in no client's train or test part.
        dataset: The name of the data set.
        partition: The name of the partition.
        origin: The partition's fields, seed and probe, as in an experiment file.
        names: The names of the clients, the classes and the input features.
        validation: Rows of `x, y` that no client trains on; see `with_validation`.
        validation_origin: The settings of `validation`, as [data] of an experiment file has them.
        encoding: What was learnt from a table, texts or images.
        data_origin: For clients of `data.path` the other settings of [data]; there is no
            [partition] then.
        later: The data that clients have from a round on; None if no client's data change.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> len(clients), clients.sizes.tolist()
        (4, [360, 360, 359, 359])
        >>> x, y, x_test, y_test = clients.arrays(0)
    """

    x: Inputs
    y: Tensor
    train: RaggedIndex
    x_test: Inputs
    y_test: Tensor
    test: RaggedIndex
    test_part_id: Tensor
    test_sample_id: Tensor
    groups: Tensor | None = None
    classes: int | None = None
    probe: Inputs | None = None
    dataset: str = "arrays"
    partition: str = "arrays"
    origin: dict[str, Any] = field(default_factory=dict)
    names: Names = NO_NAMES
    validation: RaggedIndex | None = None
    validation_origin: dict[str, Any] = field(default_factory=dict)
    encoding: Encoding | None = None
    data_origin: dict[str, Any] = field(default_factory=dict)
    later: LaterData | None = None

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        groups = f", {len(torch.unique(self.groups))} groups" if self.groups is not None else ""
        return (
            f"Clients({len(self)} of {self.dataset}, {self.partition}{groups}; describe() shows"
            " more)"
        )

    def _repr_html_(self) -> str:
        """The federation in a notebook; `describe()` has each client."""
        rows: dict[str, object] = {"data": self.dataset, "partition": self.partition}
        rows["clients"] = f"{len(self):,}"
        if self.groups is not None:
            rows["groups"] = len(torch.unique(self.groups))
        if self.classes is not None:
            rows["classes"] = self.classes
        rows |= {"training samples": _spread(self.sizes), "test samples": _spread(self.test_sizes)}
        if self.validation_sizes is not None:
            rows["validation samples"] = _spread(self.validation_sizes)
        return html_table("Clients", rows, ["Samples are those of a client."])

    @property
    def sizes_in_words(self) -> str:
        """The clients, their training samples and the probe samples, in one line."""
        median = statistics.median(self.sizes.tolist())
        probe = 0 if self.probe is None else samples_in(self.probe)
        apart = f", {probe:,} probe samples set apart" if probe else ""
        return f"{len(self):,} clients, {median:,.0f} training samples per client (median){apart}."

    @property
    def sizes(self) -> Tensor:
        """Training examples of each client."""
        return self.train.sizes

    @property
    def test_sizes(self) -> Tensor:
        """Test examples of each client; 0 where it has no test part."""
        return torch.cat([self.test.sizes, torch.zeros(1, dtype=torch.int64)])[
            self.test_part_id
        ]  # part -1 is the last

    @property
    def validation_sizes(self) -> Tensor | None:
        """Validation examples of each client; None where no client has validation data."""
        return self.validation.sizes if self.validation is not None else None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one input; None if an input is several tensors."""
        return shape_of(self.x)

    @cached_property
    def metadata(self) -> ClientMetadata:
        """What a run may know about the clients without their data."""
        trial = self._trial_rows()
        return ClientMetadata(
            sizes=self.sizes,
            test_sizes=self.test_sizes,
            test_samples=self.distinct_test_samples(set(self.test_part_id.tolist())),
            x=select(self.x, trial),
            y=self.y[trial],
            classes=self.classes,
            groups=self.groups,
            probe=self.probe,
            dataset=self.dataset,
            partition=self.partition,
            origin={"clients": len(self), **self.origin},
            names=self.names,
            validation_sizes=self.validation_sizes,
            validation_origin=self.validation_origin,
            encoding=self.encoding,
            data_origin=self.data_origin,
        )

    def with_validation(self, share: float, seed: int | None = None) -> Clients:
        """The same clients with a share of each client's training data as its validation data.

        No client trains on validation data. It is for early stopping (`run.patience`) and for the
        choice of a round (`run.select`). Where targets are class labels, every class has about the
        same share. A client with fewer than 1 / share training examples keeps all of them for
        training and has no validation data.

        Args:
            share: The share, above 0 and below 1.
            seed: The seed of the split; None for the seed of the partition, or 0 if there is none.
        """
        split_seed = self._split_seed("data.validation", share, "0.1", "data.validation_seed", seed)
        if self.validation is not None:
            raise InvalidInputError(
                "data.validation: these clients have validation data already.", "data.validation"
            )
        train, validation, later, later_validation = self._split_training(float(share), split_seed)
        origin: dict[str, Any] = {"validation": float(share)}
        if seed is not None:
            origin["validation_seed"] = int(seed)
        return replace(
            self,
            train=RaggedIndex.of(train),
            validation=RaggedIndex.of(validation),
            validation_origin=origin,
            later=self.later
            and replace(
                self.later,
                train=RaggedIndex.of(later),
                validation=RaggedIndex.of(later_validation),
            ),
        )

    def with_probe(self, share: float, seed: int | None = None) -> Clients:
        """The same clients with a share of each client's training inputs as probe data, which the
        server has: for `FLISDC`, `FLISHC` and `PCAHC(basis="shared")`.

        No client trains on probe data. Where targets are class labels, every class has about the
        same share. A client with fewer than 1 / share training examples keeps all of them.

        Args:
            share: The share, above 0 and below 1.
            seed: The seed of the split; None for the seed of the partition, or 0 if there is none.
        """
        split_seed = self._split_seed("data.probe", share, "0.05", "data.seed", seed)
        require(self.probe is None, "data.probe", share, "these clients have probe data already")
        train, apart, later, _ = self._split_training(float(share), fold_in(split_seed, "probe"))
        rows = torch.cat(apart)
        require(
            len(rows) > 0,
            "data.probe",
            share,
            f"no client has {math.ceil(1 / share)} training samples; give a larger share",
        )
        return replace(
            self,
            train=RaggedIndex.of(train),
            probe=select(self.x, rows),
            later=self.later and replace(self.later, train=RaggedIndex.of(later)),
        )

    def _split_seed(
        self, field: str, share: float, such_as: str, seed_field: str, seed: int | None
    ) -> int:
        """The seed of a split of the training data, after a check of the share and of the seed."""
        require(
            is_number(share) and 0 < share < 1,
            field,
            share,
            f"must be a share above 0 and below 1, such as {such_as}",
        )
        if seed is not None:
            require_int(seed_field, seed, 0)
        return int(self.origin.get("seed", 0) if seed is None else seed)

    def _split_training(self, share: float, seed: int) -> tuple[list[Tensor], ...]:
        """The training rows that each client keeps, and the share of them that is set apart; then
        the same samples in the later data.
        """
        labels = self.y if self.classes is not None and self.y.ndim == 1 else None
        kept, apart, later_kept, later_apart = [], [], list[Tensor](), list[Tensor]()
        for client in range(len(self)):
            rows = self.train[client]
            classes = torch.zeros_like(rows) if labels is None else labels[rows]
            is_apart = torch.zeros(len(rows), dtype=torch.bool)
            is_apart[validation_positions(classes, share, seed)] = True
            kept.append(rows[~is_apart])
            apart.append(rows[is_apart])
            if self.later is not None:
                later_kept.append(self.later.train[client][~is_apart])
                later_apart.append(self.later.train[client][is_apart])
        return kept, apart, later_kept, later_apart

    def _trial_rows(self) -> Tensor:
        """The first row, and the first one with another target, so that a loss that mixes examples
        is noticed.
        """
        others = (self.y != self.y[:1]).reshape(len(self.y), -1).any(1).nonzero()
        return torch.tensor([0, int(others[0]) if len(others) else len(self.y) - 1])

    def distinct_test_samples(self, parts: Collection[int]) -> int:
        """The number of different samples in some test parts. A rotated or relabeled copy is the
        same sample.

        Args:
            parts: numbers of parts, from `test_part_id`; -1, no part, has no samples.
        """
        rows = [self.test[part] for part in parts if part >= 0]
        return len(torch.unique(self.test_sample_id[torch.cat(rows)])) if rows else 0

    def arrays(
        self, client: int | str
    ) -> tuple[Inputs, Tensor] | tuple[Inputs, Tensor, Inputs, Tensor]:
        """The samples of one client: (x, y), and (x_test, y_test) if it has a test part. Validation
        data is not included.

        Args:
            client: the client's name or number.
        """
        number = client_number(client, self.names.clients or range(len(self)))
        rows, part = self.train[number], int(self.test_part_id[number])
        if part < 0:
            return select(self.x, rows), self.y[rows]
        held = self.test[part]
        return (
            select(self.x, rows),
            self.y[rows],
            select(self.x_test, held),
            self.y_test[held],
        )

    def at_round(self, round_number: int) -> Clients:
        """The clients with the data that they have in this round, which no longer change.

        Args:
            round_number: the round; the first is 1.
        """
        if self.later is None:
            return self
        later, changed = self.later, self.later.have_changed(round_number)

        def chosen(now: RaggedIndex, then: RaggedIndex) -> RaggedIndex:
            return RaggedIndex.of(
                then[i] if is_changed else now[i] for i, is_changed in enumerate(changed.tolist())
            )

        groups, validation = self.groups, self.validation
        if groups is not None and later.groups is not None:
            groups = torch.where(changed, later.groups, groups)
        if validation is not None and later.validation is not None:
            validation = chosen(validation, later.validation)
        return replace(
            self,
            train=chosen(self.train, later.train),
            test_part_id=torch.where(changed, later.test_part_id, self.test_part_id),
            groups=groups,
            validation=validation,
            later=None,
        )

    def only(self, ids: Sequence[int]) -> Clients:
        """Some of the clients, numbered from 0 in this order, with the samples of these clients.

        Args:
            ids: the numbers of the clients.
        """
        keep, later = torch.as_tensor(ids, dtype=torch.int64), self.later
        indexes = [self.train, self.validation]
        indexes += [later.train, later.validation] if later is not None else [None, None]
        parts = [index[i] for index in indexes if index is not None for i in keep.tolist()]
        rows, place = torch.unique(
            torch.cat([*parts, torch.empty(0, dtype=torch.int64)]), return_inverse=True
        )
        places = iter(torch.split(place, [len(part) for part in parts]))
        train, validation, later_train, later_validation = (
            None if index is None else RaggedIndex.of(list(islice(places, len(keep))))
            for index in indexes
        )
        assert train is not None
        if later is not None and later_train is not None:
            later = LaterData(
                later.rounds[keep],
                later_train,
                later.test_part_id[keep],
                None if later.groups is None else later.groups[keep],
                later_validation,
            )
        return replace(
            self,
            x=select(self.x, rows),
            y=self.y[rows],
            train=train,
            validation=validation,
            later=later,
            test_part_id=self.test_part_id[keep],
            groups=self.groups[keep] if self.groups is not None else None,
            probe=None,
            names=self.names.only(keep.tolist()),
        )

    def describe(self) -> Description:
        """The numbers of samples of each client; printed, a table."""
        counts = None
        if self.classes is not None and self.y.ndim == 1:
            client = torch.arange(len(self)).repeat_interleave(self.sizes)
            cell = client * self.classes + self.y[self.train.index]
            counts = cell.bincount(minlength=len(self) * self.classes).reshape(
                len(self), self.classes
            )
        return Description(
            counts, self.sizes, self.test_sizes, self.groups, self.names, self.validation_sizes
        )


@dataclass(frozen=True, eq=False)
class Description:
    """What `Clients.describe` returns. `counts` has a row for each client and a column for each
    class; None where samples have no class.
    """

    counts: Tensor | None
    sizes: Tensor
    test_sizes: Tensor
    groups: Tensor | None
    names: Names = NO_NAMES
    validation_sizes: Tensor | None = None

    def __str__(self) -> str:
        shown = min(len(self.sizes), SHOWN_CLIENTS)
        columns = {"client": [self.names.client(i) for i in range(shown)]}
        if self.groups is not None:
            columns["group"] = [str(g) for g in self.groups[:shown].tolist()]
        columns["train"] = [str(n) for n in self.sizes[:shown].tolist()]
        if self.validation_sizes is not None:
            columns["validation"] = [str(n) for n in self.validation_sizes[:shown].tolist()]
        columns["test"] = [str(n) for n in self.test_sizes[:shown].tolist()]
        if self.counts is not None and self.counts.shape[1] <= SHOWN_CLASSES:
            for label, column in enumerate(self.counts[:shown].T.tolist()):
                columns[f"y={self.names.class_name(label)}"] = [
                    str(n) if n else "." for n in column
                ]
        elif self.counts is not None:
            columns["classes"] = [str(n) for n in (self.counts[:shown] > 0).sum(1).tolist()]
        widths = [max(map(len, (head, *cells))) for head, cells in columns.items()]
        rows = [tuple(columns), *zip(*columns.values(), strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        if shown < len(self.sizes):
            lines.append(f"… and {len(self.sizes) - shown} more")
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        number = 0 if self.groups is None else len(set(self.groups.tolist()))
        known = f"{number} group{'s' * (number > 1)}" if number else "groups not known"
        parts = {"train": self.sizes, "validation": self.validation_sizes, "test": self.test_sizes}
        spreads = [f"{part} {_spread(sizes)}" for part, sizes in parts.items() if sizes is not None]
        return "; ".join([f"{len(self.sizes)} clients, {known}", *spreads])


def _spread(sizes: Tensor) -> str:
    median = float(sizes.double().quantile(0.5))
    return f"min {int(sizes.min())}, median {median:g}, max {int(sizes.max())}"
