"""How long processes of a federation wait between two questions to each other. Flower's own waits
of 1 to 3 s are longer than the work of a small round.
"""

from __future__ import annotations

from flwr.supercore.inflatable import inflatable_utils

# Seconds until an object that is not there yet is asked for again; Flower: 1 s, up to 10 s.
_PULL_AGAIN = {"initial_backoff": 0.02, "backoff_cap": 0.5, "max_tries_per_object": None}


def shorten_pull_waits() -> None:
    """Let Flower's functions that pull objects ask again after 0.02 s, in this process.

    The functions take these values as keyword arguments, but Flower passes none.
    """
    for pull in (
        inflatable_utils.pull_objects,
        inflatable_utils.pull_and_inflate_object_from_tree,
    ):
        pull.__kwdefaults__ = {**(pull.__kwdefaults__ or {}), **_PULL_AGAIN}
