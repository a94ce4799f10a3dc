"""The common part of all frameworks' workers: the job file, the turns, and the output of weights.
It runs in every environment, so it needs numpy only.

A worker is started as `python X_worker.py JOB.npz OUT.npz`. When it is ready, it prints a line of
JSON with its versions. Then it reads lines with a number of rounds, runs them and prints their
seconds as a JSON list, until the job has no more rounds. At the end it writes its weights.
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
    """The clients' data, the initial weights, and the clients of each round."""

    def __init__(self, path: str) -> None:
        with np.load(path) as file:
            self.x, self.y, self.cohorts = file["x"], file["y"], file["cohorts"]
            self.weights = {name: file[name] for name in NAMES}

    @property
    def rounds(self) -> int:
        return len(self.cohorts)


class Turns:
    """Waits for the coordinator between turns, and times the rounds.

    Args:
        threads: the number of threads of this framework's matrix products.
    """

    def __init__(self, rounds: int, versions: Mapping[str, str], threads: int) -> None:
        # Libraries print too. Their output goes to the log (stderr), so that stdout is only for the
        # protocol.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._to_come, self._granted, self._began = rounds, 0, 0.0
        self._seconds: list[float] = []
        self._answer(
            {"versions": {"python": sys.version.split()[0], **versions}, "threads": threads}
        )
        self._wait()

    def round_done(self) -> None:
        """Must be called after every round, when all its work is done."""
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
            sys.exit("The coordinator has ended.")
        self._granted = int(line)
        self._began = time.perf_counter()

    def _answer(self, content: Any) -> None:
        print(json.dumps(content), file=self._answers, flush=True)


def write_weights(path: str, weights: Mapping[str, Any]) -> None:
    arrays: dict[str, Any] = {name: np.asarray(weights[name]) for name in NAMES}
    np.savez(path, **arrays)
