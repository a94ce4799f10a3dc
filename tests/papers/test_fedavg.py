"""FedAvg's textbook case on real MNIST, against a number measured with a plain implementation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedclade.training import experiment_file


def test_mnist_iid_ends_at_89_percent(real_data: Callable[[str], Path]) -> None:
    root = real_data("mnist").parent
    chosen = experiment_file.experiment(
        experiment_file.apply(experiment_file.read("mnist_iid"), ["run.eval_every=0"])
    )
    result = chosen.to_run(chosen.clients(str(root)), "cpu").run()
    assert result.summary["accuracy"] == pytest.approx(89.2, abs=1.0)
