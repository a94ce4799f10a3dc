"""What a method needs in addition to the clients' replies. A method declares a need by its base
class, and the runner tests for it with `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, dataclass, field
from typing import Any

from torch import Tensor, nn

from fedclade.core.inputs import Inputs

INJECTED = {"injected": True}
"""Metadata of a field that is not a hyper-parameter: the runner sets it, and no experiment file
names it.
"""


def is_injected(field: Field[Any]) -> bool:
    """Whether the runner sets this field."""
    return "injected" in field.metadata


@dataclass(frozen=True)
class NeedsProbe:
    """The server needs unlabeled inputs. By default they are the samples that `partition` sets
    apart.
    """

    probe: Inputs | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=INJECTED
    )

    @property
    def needs_probe_samples(self) -> bool:
        """Whether the partition must set samples apart: not if the inputs are given."""
        return self.probe is None


def need_probe_samples(methods: Iterable[object]) -> bool:
    """Whether one of these methods needs samples that the partition sets apart. Then all methods
    of a comparison do without them, so that all have the same training data.
    """
    return any(isinstance(method, NeedsProbe) and method.needs_probe_samples for method in methods)


@dataclass(frozen=True)
class NeedsEncoder:
    """Server and clients need an encoder of the inputs. By default it is made from
    `encoder_source`.
    """

    encoder_module: nn.Module | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=INJECTED
    )

    @property
    def encoder_source(self) -> str:
        """ "default", or the path of a file that `fedclade pretrain` wrote."""
        return "default"


@dataclass(frozen=True)
class NeedsInputShape:
    """The server needs the shape of an input. It stays None where inputs are integers (tokens)."""

    input_shape: tuple[int, ...] | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=INJECTED
    )


@dataclass(frozen=True)
class NeedsTrueGroups:
    """The server needs the true group of each client, which only some partitions have."""

    truth: Tensor | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=INJECTED
    )


@dataclass(frozen=True)
class NeedsSecret:
    """Clients need a number that the server does not have. On Flower each node has its own secret;
    this field is for simulations only.
    """

    secret: int | None = field(default=None, kw_only=True, repr=False, metadata=INJECTED)

    @property
    def one_secret_for_all(self) -> bool:
        """Whether all clients need the same secret."""
        return False
