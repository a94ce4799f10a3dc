"""An LRU cache that builds an entry only after N requests: for CUDA graphs and traces of steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class LazyLRUCache(Generic[Entry]):
    """Builds an entry after more than `after` requests for its key.

    Args:
        after: the number of requests without an entry.
        max_keys: how many keys it holds: those that were requested last.
    """

    def __init__(self, after: int, max_keys: int) -> None:
        self._after, self._max_keys = after, max_keys
        self._requests: OrderedDict[Hashable, int] = OrderedDict()
        self._entries: dict[Hashable, Entry | None] = {}
        self._lock = Lock()

    def get(self, key: Hashable, build: Callable[[], Entry | None], times: int = 1) -> Entry | None:
        """The entry of a key; None if the key had too few requests so far, or the entry cannot be
        built.

        Args:
            key: the key.
            build: builds the entry, or returns None.
            times: the number of requests for which this call counts.
        """
        with self._lock:
            self._requests[key] = self._requests.pop(key, 0) + times
            while len(self._requests) > self._max_keys:
                self._entries.pop(self._requests.popitem(last=False)[0], None)
            if self._requests[key] > self._after and key not in self._entries:
                self._entries[key] = build()
            return self._entries.get(key)

    def give_up(self, key: Hashable) -> None:
        """Return None for this key from now on."""
        with self._lock:
            self._entries[key] = None
