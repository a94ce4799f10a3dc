"""fedclade on pfl's benchmark on CIFAR-10, through its public interface.

The test images are divided among the clients, so that the mean over clients is the accuracy on all
test images, as in pfl's benchmark.
"""

from __future__ import annotations

import sys

import torch
from cifar10_job import BATCH, EVERY, LEARNING_RATE, Cifar10Job, write_outcome
from cifar10_network import fill
from worker import Turns

import fedclade as fc


def main(job_folder: str, out_path: str, rounds: int, device: str) -> None:
    job = Cifar10Job(job_folder)

    def images(values: object) -> torch.Tensor:
        return torch.tensor(job.normalized(values)).movedim(-1, -3).contiguous()

    x, x_test = images(job.x), images(job.x_test)
    y, y_test = torch.tensor(job.y), torch.tensor(job.y_test)
    parts = zip(x_test.chunk(len(x)), y_test.chunk(len(x)), strict=True)
    clients = fc.data.from_arrays(
        [(*train, *test) for train, test in zip(zip(x, y, strict=True), parts, strict=True)]
    )
    model = fc.models.PflCNN().build(tuple(x.shape[2:]), 10)
    fill(model, job.weights)
    accuracies: dict[int, float] = {}
    versions = {"fedclade": fc.__version__, "torch": torch.__version__}
    turns = Turns(rounds, versions, torch.get_num_threads())

    def after_round(row: dict[str, object]) -> None:
        turns.round_done()
        if isinstance(found := row.get("accuracy"), float):
            accuracies[int(str(row["round"]))] = found

    result = fc.run(
        fc.FedAvg(),
        clients,
        model,
        rounds=rounds,
        clients_per_round=job.cohorts.shape[1],
        lr=LEARNING_RATE,
        batch_size=BATCH,
        epochs=1,
        eval_every=EVERY,
        device=device,
        on_round=after_round,
    )
    last = [value.detach().cpu().numpy() for value in result.model_of(0).parameters()]
    write_outcome(out_path, list(accuracies), list(accuracies.values()), last)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
