"""The names of clients, classes and features, as the user gives them. Names are shown; no number of
a run depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedclade.errors import InvalidInputError, nearest, require

MAX_LENGTH = 200  # characters of a name
# A spreadsheet reads a cell of clients.csv that begins like this as a formula.
_FORMULA = ("=", "+", "-", "@")


@dataclass(frozen=True)
class Names:
    """The names of a federation's clients, classes and features.

    Args:
        clients: the name of each client; None: clients have numbers only.
        classes: the name of each class; None: classes have numbers only.
        features: the name of each input feature; None: features have numbers only.
    """

    clients: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None

    def client(self, number: int) -> str:
        """The name of a client, or its number as text."""
        return _name(self.clients, number)

    def class_name(self, label: int) -> str:
        """The name of a class, or its number as text."""
        return _name(self.classes, label)

    def only(self, numbers: Sequence[int]) -> Names:
        """The names of some clients, in this order, with all classes and features."""
        if self.clients is None:
            return self
        return replace(self, clients=tuple(self.clients[number] for number in numbers))


def _name(names: tuple[str, ...] | None, number: int) -> str:
    # Names from a file may be fewer than the numbers.
    return str(number) if names is None or number >= len(names) else names[number]


NO_NAMES = Names()


def client_number(client: int | str, clients: Sequence[int | str]) -> int:
    """The number of a client.

    Args:
        client: its name or its number.
        clients: the name of each client, or its number where clients have no names.
    """
    if isinstance(client, str):
        if client in clients:
            return clients.index(client)
        known = [name for name in clients if isinstance(name, str)]
        hint = nearest(client, known) or f" Clients have numbers, 0 to {len(clients) - 1}."
        raise InvalidInputError(f"client = {client!r}: there is no such client.{hint}", "client")
    number = int(client)
    allowed = f"there are {len(clients)} clients, numbered 0 to {len(clients) - 1}"
    require(0 <= number < len(clients), "client", client, allowed)
    return number


def checked_names(names: object, field: str) -> tuple[str, ...]:
    """Names as a tuple of text, if each can be shown on one line and no name occurs twice.

    Args:
        names: a sequence or an array of text.
        field: what the names are, as the user writes it ("class_names").
    """
    if isinstance(names, str | bytes) or not hasattr(names, "__iter__"):
        kind = type(names).__name__
        raise InvalidInputError(f"{field}: it is of type {kind}; give a list of names.", field)
    checked: dict[str, None] = {}
    for name in names:
        require(isinstance(name, str), field, name, "a name must be text")
        text = str(name)  # numpy's text is a subclass of Python's
        require(
            0 < len(text) <= MAX_LENGTH,
            field,
            text if len(text) <= MAX_LENGTH else f"{text[:40]}…",
            f"a name must have 1 to {MAX_LENGTH} characters, this one has {len(text)}",
        )
        require(
            text.isprintable() and text == text.strip(),
            field,
            text,
            "a name must be one line of printable characters, without a space at either end",
        )
        require(text not in checked, field, text, "this name occurs twice; make names unique")
        checked[text] = None
    return tuple(checked)


def checked_client_names(names: object, field: str) -> tuple[str, ...]:
    """`checked_names` for clients, whose names are cells of clients.csv."""
    checked = checked_names(names, field)
    for name in checked:
        require(
            not name.startswith(_FORMULA),
            field,
            name,
            f"a client's name must not begin with {' '.join(_FORMULA)}, since a spreadsheet would"
            " read it as a formula",
        )
    return checked
