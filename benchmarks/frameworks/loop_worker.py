"""A plain loop over clients without a framework, for comparison."""

from __future__ import annotations

import sys

import torch
from network import fill, layers_for, train, weights_of
from torch import nn
from worker import Job, Turns, write_weights


def main(job_path: str, out_path: str) -> None:
    job = Job(job_path)
    model = nn.Sequential(*layers_for(job.weights))
    fill(model, job.weights)
    shared = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.tensor(job.x), torch.tensor(job.y)

    turns = Turns(job.rounds, {"torch": torch.__version__}, torch.get_num_threads())
    for cohort in job.cohorts.tolist():
        examples = sum(len(y[client]) for client in cohort)
        mean = {name: torch.zeros_like(value) for name, value in shared.items()}
        for client in cohort:
            model.load_state_dict(shared)
            train(model, x[client], y[client])
            for name, value in model.state_dict().items():
                mean[name].add_(value, alpha=len(y[client]) / examples)
        shared = mean
        turns.round_done()
    model.load_state_dict(shared)
    write_weights(out_path, weights_of(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
