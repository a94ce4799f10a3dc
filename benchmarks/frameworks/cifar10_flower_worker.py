"""Flower's simulation on pfl's benchmark on CIFAR-10, on the CPU. The server evaluates the model on
all test images in every tenth round.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from cifar10_flower_client import app as client_app
from cifar10_job import EVERY, Cifar10Job, write_outcome
from cifar10_network import accuracy, fill, layers
from flower_rounds import PACKAGES, run_rounds
from flwr.app import ArrayRecord
from torch import nn
from worker import Turns


def main(job_folder: str, out_path: str, rounds: int) -> None:
    job = Cifar10Job(job_folder)
    network = nn.Sequential(*layers())
    fill(network, job.weights)
    x_test, y_test = torch.tensor(job.normalized(job.x_test)), torch.tensor(job.y_test)
    accuracies: dict[int, float] = {}
    turns = Turns(rounds, {name: version(name) for name in PACKAGES}, torch.get_num_threads())

    def after_round(number: int, arrays: ArrayRecord) -> None:
        if number % EVERY == 0 or number == rounds:
            network.load_state_dict(arrays.to_torch_state_dict())
            accuracies[number] = accuracy(network, x_test, y_test)
        turns.round_done()

    first = ArrayRecord(network.state_dict())
    clients, cohort = len(job.x), job.cohorts.shape[1]
    run_rounds(client_app, job_folder, clients, cohort, rounds, first, after_round)
    last = [value.detach().numpy() for value in network.parameters()]
    write_outcome(out_path, list(accuracies), list(accuracies.values()), last)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
