"""pfl-research on its own benchmark on CIFAR-10: its simulated backend and federated averaging.

As in benchmarks/image_classification of apple/pfl-research: all images are on the device as
float32, each user has the same weight, the cohort is evaluated before and after its training in
every tenth round, and a callback evaluates the model on all test images in every tenth round.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from cifar10_job import BATCH, EVERY, LEARNING_RATE, Cifar10Job, write_outcome
from cifar10_network import Snapshots, fill, layers
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device, to_tensor
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from worker import Turns

CENTRAL_BATCH = 10_000


class Network(nn.Sequential):
    """The model with the two methods that pfl needs."""

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return F.cross_entropy(self(x), y.long())

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
        self.train(not eval)
        outputs, labels = self(x), y.long()
        loss = F.cross_entropy(outputs, labels, reduction="sum").item()
        correct = (outputs.argmax(1) == labels).float().sum().item()
        return {"loss": Weighted(loss, len(y)), "accuracy": Weighted(correct, len(y))}


class AfterRound(TrainingProcessCallback):
    """It is the last callback, so the round has been evaluated."""

    def __init__(self, turns: Turns, snapshots: Snapshots, rounds: int) -> None:
        self.turns, self.snapshots, self.rounds = turns, snapshots, rounds

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.turns.round_done()
        number = central_iteration + 1
        if number % EVERY == 0 or number == self.rounds:
            self.snapshots.take(number, dict(model.pytorch_model.named_parameters()))
        return False, Metrics()


def main(job_folder: str, out_path: str, rounds: int) -> None:
    job = Cifar10Job(job_folder)
    device = get_default_device()
    # fedclade's precision on CUDA. torch's default for matrix products is slower.
    torch.set_float32_matmul_precision("high")
    network = Network(*layers())
    fill(network, job.weights)
    network.to(device)
    x, y = to_tensor(job.normalized(job.x)), to_tensor(job.y)
    central = Dataset(raw_data=[to_tensor(job.normalized(job.x_test)), to_tensor(job.y_test)])
    users = dict(enumerate(zip(x, y, strict=True)))
    next_user = iter(job.cohorts[:rounds].flatten().tolist())
    data = FederatedDataset.from_slices(users, lambda: next(next_user))
    model = PyTorchModel(
        network,
        torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    evaluation = NNEvalHyperParams(local_batch_size=CENTRAL_BATCH)
    snapshots = Snapshots()
    versions = {name: version(name) for name in ("pfl", "torch", "numpy")}
    turns = Turns(rounds, versions, torch.get_num_threads())
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=EVERY,
            train_cohort_size=job.cohorts.shape[1],
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
        ),
        evaluation,
        callbacks=[
            CentralEvaluationCallback(central, evaluation, frequency=EVERY),
            AfterRound(turns, snapshots, rounds),
        ],
        send_metrics_to_platform=False,
    )
    last = [value.detach().cpu().numpy() for value in network.parameters()]
    images, labels = central.raw_data
    found = snapshots.evaluated(network, images, labels)
    write_outcome(out_path, list(found), list(found.values()), last)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
