"""pfl-research: its simulated backend and federated averaging. Users' tensors stay in memory, and
pfl caches their batches.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from network import fill, layers_for, weights_of
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from worker import BATCH, LEARNING_RATE, Job, Turns, write_weights


class Network(nn.Sequential):
    """The model with the two methods that pfl needs. It evaluates only in its first round, which is
    a warm-up.
    """

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class AfterRound(TrainingProcessCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.turns.round_done()
        return False, Metrics()


def main(job_path: str, out_path: str) -> None:
    job = Job(job_path)
    network = Network(*layers_for(job.weights))
    fill(network, job.weights)
    users = [
        PyTorchTensorDataset((torch.tensor(x), torch.tensor(y)))
        for x, y in zip(job.x, job.y, strict=True)
    ]
    next_user = iter(job.cohorts.flatten().tolist())
    data = FederatedDataset(users.__getitem__, lambda: next(next_user))
    model = PyTorchModel(
        network, torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0)
    )

    turns = Turns(
        job.rounds,
        {name: version(name) for name in ("pfl", "torch", "numpy")},
        torch.get_num_threads(),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds,
            train_cohort_size=job.cohorts.shape[1],
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
        ),
        callbacks=[AfterRound(turns)],
        send_metrics_to_platform=False,
    )
    write_weights(out_path, weights_of(network))


if __name__ == "__main__":
    main(*sys.argv[1:])
