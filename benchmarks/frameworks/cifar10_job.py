"""The job of benchmarks/pfl_cifar10.py, which writes it as a folder of arrays: images of 32 x 32 x
3 bytes, divided among clients; test images; the clients of each round; the initial weights by
position. It needs numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LEARNING_RATE, BATCH, EVERY = 0.1, 10, 10


class Cifar10Job:
    """The arrays of the folder, which stay on disk until they are used."""

    def __init__(self, folder: str) -> None:
        def array(name: str) -> Any:
            return np.load(Path(folder) / f"{name}.npy", mmap_mode="r")

        self.x, self.y, self.cohorts = array("x"), array("y"), array("cohorts")
        self.x_test, self.y_test = array("x_test"), array("y_test")
        count = len(list(Path(folder).glob("weight*.npy")))
        self.weights = [array(f"weight{number}") for number in range(count)]
        self._mean, self._deviation = array("mean"), array("deviation")

    def normalized(self, images: Any) -> Any:
        """Images as float32, with mean 0 and standard deviation 1 for each channel."""
        scaled = (images.astype(np.float32) - self._mean) / self._deviation
        return scaled.astype(np.float32)


def write_outcome(
    path: str, rounds: Sequence[int], accuracies: Sequence[float], weights: Sequence[Any]
) -> None:
    """Write the accuracy on all test images after some rounds, in percent, and the last weights."""
    arrays = {f"weight{number}": np.asarray(value) for number, value in enumerate(weights)}
    np.savez(path, rounds=np.asarray(rounds), accuracies=np.asarray(accuracies), **arrays)
