"""fedclade through its public interface; with the argument "any", on a module that only its generic
path can train.

fedclade selects the clients of a round: fc.run samples them with its seed.
"""

from __future__ import annotations

import sys

import torch
from network import fill, layers_for, weights_of
from torch import Tensor, nn
from worker import BATCH, LEARNING_RATE, Job, Turns, write_weights

import fedclade as fc
from fedclade.core.kernels.mlp import dense_form


class OwnModule(nn.Module):
    """The same function, but with a branch, so that it is not recognized as a chain of layers."""

    def __init__(self, first: nn.Linear, relu: nn.ReLU, last: nn.Linear) -> None:
        super().__init__()
        self.first, self.relu, self.last = first, relu, last

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.first.in_features:
            x = x.flatten(1)
        return self.last(self.relu(self.first(x)))


def main(job_path: str, out_path: str, kind: str = "chain") -> None:
    job = Job(job_path)
    layers = layers_for(job.weights)
    model = OwnModule(*layers) if kind == "any" else nn.Sequential(*layers)
    fill(model, job.weights)
    recognized = dense_form(model, tuple(name for name, _ in model.named_parameters())) is not None
    if recognized != (kind == "chain"):
        sys.exit(
            f"fedclade takes the {'dense' if recognized else 'generic'} path for the module"
            f" '{kind}': this would measure the wrong one."
        )
    clients = fc.data.from_arrays(list(zip(torch.tensor(job.x), torch.tensor(job.y), strict=True)))

    turns = Turns(
        job.rounds,
        {"fedclade": fc.__version__, "torch": torch.__version__},
        torch.get_num_threads(),
    )
    result = fc.run(
        fc.FedAvg(),
        clients,
        model,
        rounds=job.rounds,
        clients_per_round=job.cohorts.shape[1],
        lr=LEARNING_RATE,
        batch_size=BATCH,
        epochs=1,
        eval_every=0,  # after the last round only
        device="cpu",
        on_round=lambda row: turns.round_done(),
    )
    write_weights(out_path, weights_of(result.model_of(0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
