"""Flower's simulation, on the job of benchmarks/framework_comparison.py."""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from flower_client import app as client_app
from flower_rounds import PACKAGES, run_rounds
from flwr.app import ArrayRecord
from worker import Job, Turns, write_weights


def main(job_path: str, out_path: str) -> None:
    job = Job(job_path)
    turns = Turns(job.rounds, {name: version(name) for name in PACKAGES}, torch.get_num_threads())

    def after_round(number: int, arrays: ArrayRecord) -> None:
        turns.round_done()
        if number == job.rounds:
            last = arrays.to_torch_state_dict()
            write_weights(out_path, {name: value.numpy() for name, value in last.items()})

    first = ArrayRecord({name: torch.tensor(value) for name, value in job.weights.items()})
    clients, cohort = len(job.x), job.cohorts.shape[1]
    run_rounds(client_app, job_path, clients, cohort, job.rounds, first, after_round)


if __name__ == "__main__":
    main(*sys.argv[1:])
