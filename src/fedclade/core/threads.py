"""Modules that several threads run at a time."""

from __future__ import annotations

import copy
import threading

from torch import nn


class PerThread(threading.local):
    """A module of which every thread has a copy: `functional_call` puts the given weights into the
    module while it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.own = copy.deepcopy(module)
