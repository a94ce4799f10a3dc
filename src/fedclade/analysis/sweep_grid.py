"""Sweeps: `--set table.key=1,2,3` runs one experiment per value; several such settings run every
combination.
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

# A title starts with the method, and all seeds of a setting share one title.
_NOT_IN_TITLE = ("method.name", "run.seed")


def is_sweep(sets: Sequence[str]) -> bool:
    """Whether a setting has several values."""
    return any(len(values_of(setting)) > 1 for setting in _last(sets).values())


def expand(tables: dict[str, Table], sets: Sequence[str]) -> list[Experiment]:
    """An experiment for each combination of the listed values."""
    choices = [
        [(key, value) for value in values_of(setting)] for key, setting in _last(sets).items()
    ]
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


def values_of(setting: str) -> list[str]:
    """The values of `table.key=value` or `table.key=value,value,…`, as texts.

    Text that is valid TOML is one value: `[9, 8]`, `"a,b"`. Otherwise commas outside quotes and
    brackets separate the values: `[9, 8],[16]` has two.
    """
    key, equals, text = setting.partition("=")
    if not equals or "." not in key:
        raise InvalidInputError(
            f"--set {setting}: must be TABLE.KEY=VALUE, for example --set run.rounds=30.", "--set"
        )
    try:
        tomllib.loads(f"value = {text}")
        return [text.strip()]
    except (ValueError, RecursionError):
        values = _split_at_commas(text)
    if len(values) > 1 and not all(values):
        raise InvalidInputError(
            f"--set {setting}: a value is missing before or after a comma. Put text with a comma in"
            f" quotes: '{key}=\"a,b\"'.",
            key.strip(),
        )
    for value, count in Counter(values).items():
        if count > 1:
            raise InvalidInputError(f"--set {setting}: {value} is given twice.", key.strip())
    return values


def _split_at_commas(text: str) -> list[str]:
    """Split at the commas outside quotes and brackets."""
    parts, quote, depth = [""], "", 0
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _last(sets: Sequence[str]) -> dict[str, str]:
    """Key -> setting. If a key is given twice, the last one counts."""
    return {setting.partition("=")[0].strip(): setting for setting in sets}


def _bare(value: str) -> str:
    """Text without its quotes."""
    parsed = experiment_file.value_of(value)
    return parsed if isinstance(parsed, str) else value
