"""Errors for the user. Each message has the field or client, the value, what is allowed and what to
do.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real

MAX_LISTED = 60  # known names in a message: a federation may have thousands of clients


class FedcladeError(Exception):
    """Base of every error that fedclade raises on purpose. The command line prints it without a
    traceback.

    Args:
        message: what is wrong, what is allowed and what to do.
        field: what the error is about, as the user writes it: a setting ("local.lr"), an argument
            ("model"), a file or a client; "" if no single thing is wrong.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class FedcladeWarning(UserWarning):
    """Something that a user can change; the run continues.

    Args:
        message: what happened and what to do.
        field: what the warning is about, as in `FedcladeError`.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidInputError(FedcladeError, ValueError):
    """A value, file or array that cannot be used."""


class DifferentExperimentError(InvalidInputError):
    """A run directory that holds a run of another experiment."""


class VectorizationError(FedcladeError, RuntimeError):
    """A model or program that cannot run on many clients at once."""


class WriteError(FedcladeError, OSError):
    """A file could not be written: the disk is full, read-only or broken."""


def nearest(given: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` if a known name is close to `given`, else the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean '{close[0]}'?"
    more = f", … ({len(names):,} in all)" if len(names) > MAX_LISTED else ""
    return f" Known: {', '.join(names[:MAX_LISTED])}{more}." if names else ""


def require(condition: bool, field: str, given: object, allowed: str) -> None:
    """Raise `InvalidInputError` in one shape for all fields: name, value, what is allowed."""
    if not condition:
        raise InvalidInputError(f"{field} = {given!r}: {allowed}.", field)


def is_number(value: object) -> bool:
    """Whether `value` is a finite real number: of Python or numpy, not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_int(value: object, min: int, max: int | None = None) -> bool:
    """Whether `value` is an integer from `min` to `max`: a Python or numpy integer, not a bool."""
    return (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and int(value) >= min
        and (max is None or int(value) <= max)
    )


def require_int(
    field: str, value: object, min: int, max: int | None = None, note: str = ""
) -> None:
    """Raise `InvalidInputError` unless `value` is an integer from `min` to `max`.

    Args:
        field: the name of the field in the message.
        value: the value of the field.
        min: the least allowed value.
        max: the largest allowed value; None for no limit.
        note: what a value means, such as "0 for never".
    """
    allowed = f"must be a whole number of at least {min}"
    if max is not None:
        allowed += f" and at most {max:,}"
    require(is_int(value, min, max), field, value, f"{allowed}; {note}" if note else allowed)
