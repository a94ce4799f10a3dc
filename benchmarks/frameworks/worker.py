"""What every contestant has in common: the job's file, its turns, and where its weights go. Runs in
every environment: numpy only.

A worker is started as `python X_worker.py JOB.npz OUT.npz`. It prints a line of JSON when it is
ready (its versions). It then reads lines that hold a number of rounds, runs as many and prints
their seconds as a JSON list, until the rounds of the job are done; last it writes its weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

# The job, the same for all: its arrays are in the file.
LEARNING_RATE = 0.01
BATCH = 10
NAMES = (
    "0.weight",
    "0.bias",
    "2.weight",
    "2.bias",
)  # of nn.Sequential(nn.Linear, nn.ReLU, nn.Linear): the weights in the files


class Job:
    """The clients' data, the first weights and, round by round, the clients that take part."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.x, self.y, self.cohorts = file["x"], file["y"], file["cohorts"]
            self.weights = {name: file[name] for name in NAMES}

    @property
    def rounds(self) -> int:
        return len(self.cohorts)


class Turns:
    """Lets rounds pass as the coordinator says and takes their times, from the end of one call to
    the beginning of the next.

    threads: how many a matrix product of this contestant takes.
    """

    def __init__(self, rounds: int, versions: Mapping[str, str], threads: int) -> None:
        # Libraries print too: what they print goes to the log (stderr), and the protocol has the
        # real stdout to itself.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._to_come, self._granted, self._began = rounds, 0, 0.0
        self._seconds: list[float] = []
        self._answer(
            {"versions": {"python": sys.version.split()[0], **versions}, "threads": threads}
        )
        self._wait()

    def round_done(self) -> None:
        """To be called after every round, when all its work is done."""
        self._seconds.append(time.perf_counter() - self._began)
        self._to_come -= 1
        if len(self._seconds) == self._granted:
            self._answer(self._seconds)
            self._seconds = []
            if self._to_come:
                self._wait()
        self._began = time.perf_counter()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            sys.exit("The coordinator has gone.")
        self._granted = int(line)
        self._began = time.perf_counter()

    def _answer(self, content: Any) -> None:
        print(json.dumps(content), file=self._answers, flush=True)


def write_weights(path: str, weights: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {name: np.asarray(weights[name]) for name in NAMES}
    np.savez(path, **arrays)
