"""Sweeps: `--set table.key=1,2,3` means one experiment for each value, and several such settings
every combination.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fedclade.errors import InvalidInputError
from fedclade.training import experiment_file
from fedclade.training.experiment_file import Experiment, Table

# A title begins with the method, and the seeds of one setting have one title.
_NOT_IN_TITLE = ("method.name", "run.seed")


def is_sweep(sets: Sequence[str]) -> bool:
    """Whether a setting has several values."""
    return any(len(values_of(given)) > 1 for given in _last(sets).values())


def expand(tables: dict[str, Table], sets: Sequence[str]) -> list[Experiment]:
    """An experiment for each combination of the values listed."""
    choices = [[(key, value) for value in values_of(given)] for key, given in _last(sets).items()]
    experiments = []
    for combination in product(*choices):
        assignments = [f"{key}={value}" for key, value in combination]
        experiment = experiment_file.experiment(experiment_file.apply(tables, assignments))
        listed = [
            pair for pair, values in zip(combination, choices, strict=True) if len(values) > 1
        ]
        chosen = {key: _bare(value) for key, value in listed if key not in _NOT_IN_TITLE}
        experiments.append(replace(experiment, chosen=chosen))
    return experiments


def values_of(given: str) -> list[str]:
    """The values of `table.key=value` or `table.key=value,value,…`, as texts.

    What is TOML as a whole is one value: `[9, 8]`, `"a,b"`. Else commas outside of quotes and
    brackets part the values: `[9, 8],[16]` has two.
    """
    key, equals, text = given.partition("=")
    if not equals or "." not in key:
        raise InvalidInputError(
            f"--set {given}: write it as table.key=value, for example --set run.rounds=30."
        )
    try:
        tomllib.loads(f"value = {text}")
        return [text.strip()]
    except (ValueError, RecursionError):
        values = _parted(text)
    if len(values) > 1 and not all(values):
        raise InvalidInputError(
            f"--set {given}: a value is missing beside a comma. Text that has a comma goes in"
            f" quotes: '{key}=\"a,b\"'."
        )
    for value, count in Counter(values).items():
        if count > 1:
            raise InvalidInputError(f"--set {given}: {value} is given twice.")
    return values


def _parted(text: str) -> list[str]:
    """Parted at the commas that are in no quotes and no brackets."""
    parts, quote, depth = [""], "", 0
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            depth += (sign in "[{") - (sign in "]}")
        if sign == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _last(sets: Sequence[str]) -> dict[str, str]:
    """Of a setting that is given twice the last counts."""
    return {given.partition("=")[0].strip(): given for given in sets}


def _bare(value: str) -> str:
    """Text without its quotes."""
    read = experiment_file.value_of(value)
    return read if isinstance(read, str) else value
