"""What the server has of each client without the client's data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedclade.core.inputs import Inputs, shape_of
from fedclade.core.names import NO_NAMES, Names
from fedclade.data.encoding import Encoding


@dataclass(frozen=True, eq=False)
class ClientMetadata:
    """How much data each client holds, and of what kind: all that a run needs of the clients in
    addition to their replies.
    """

    sizes: Tensor  # (clients,) training examples
    test_sizes: Tensor  # (clients,) test examples
    test_samples: int  # distinct test samples: several clients may be tested on one
    x: Inputs  # a few inputs of this kind
    y: Tensor  # a few targets
    classes: int | None = None  # None: the targets are not class labels
    groups: Tensor | None = None  # (clients,) the true group of each, where it is known
    probe: Inputs | None = None  # inputs that the server has
    dataset: str = "arrays"
    partition: str = "arrays"
    # the partition's fields as an experiment file has them
    origin: dict[str, Any] = field(default_factory=dict)
    names: Names = NO_NAMES  # of the clients, the classes and the input features
    # (clients,) validation examples; None: no client has validation data
    validation_sizes: Tensor | None = None
    # the settings of the validation data as [data] of an experiment file has them
    validation_origin: dict[str, Any] = field(default_factory=dict)
    encoding: Encoding | None = None  # what was learnt from a table, texts or images
    # for clients of `data.path`: the other settings of [data]; there is no [partition] then
    data_origin: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def has_validation(self) -> bool:
        """Whether a client has validation data."""
        return self.validation_sizes is not None and bool((self.validation_sizes > 0).any())

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one input; None if an input is several tensors."""
        return shape_of(self.x)
