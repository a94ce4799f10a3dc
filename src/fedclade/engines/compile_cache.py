"""Things that are worth making only for what is asked for again and again: graphs and traces of
steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Made = TypeVar("Made")


class LazyLRUCache(Generic[Made]):
    """Makes what was asked for more than `after` times; of more than `most` kinds, those not asked
    for longest are let go.
    """

    def __init__(self, after: int, most: int) -> None:
        self._after, self._most = after, most
        self._query_nodes: OrderedDict[Hashable, int] = OrderedDict()
        self._made: dict[Hashable, Made | None] = {}
        self._lock = Lock()

    def get(self, what: Hashable, make: Callable[[], Made | None], times: int = 1) -> Made | None:
        """What was made for this kind; None where it was asked for too seldom so far, or cannot be
        made.
        """
        with self._lock:
            self._query_nodes[what] = self._query_nodes.pop(what, 0) + times
            while len(self._query_nodes) > self._most:
                self._made.pop(self._query_nodes.popitem(last=False)[0], None)
            if self._query_nodes[what] > self._after and what not in self._made:
                self._made[what] = make()
            return self._made.get(what)

    def give_up(self, what: Hashable) -> None:
        """It turned out to be of no use: `get` answers None from now on."""
        with self._lock:
            self._made[what] = None
