"""Flower's simulation: its FedAvg, one Ray actor for each core of this process.

Flower selects the clients of a round: the ids of its nodes do not identify their data.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

import torch
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from worker import Job, Turns, write_weights


def main(job_path: str, out_path: str) -> None:
    job = Job(job_path)
    turns = Turns(
        job.rounds,
        {name: version(name) for name in ("flwr", "ray", "torch", "numpy")},
        torch.get_num_threads(),
    )
    server_app = ServerApp()

    @server_app.main()
    def run_rounds(grid: Grid, context: Context) -> None:
        def after_round(number: int, arrays: ArrayRecord) -> None:
            if number:  # Flower also calls before the first round
                turns.round_done()

        strategy = FedAvg(fraction_train=job.cohorts.shape[1] / len(job.x), fraction_evaluate=0.0)
        first = ArrayRecord({name: torch.tensor(value) for name, value in job.weights.items()})
        settings = ConfigRecord({"job": os.path.abspath(job_path)})
        result = strategy.start(
            grid, first, num_rounds=job.rounds, train_config=settings, evaluate_fn=after_round
        )
        write_weights(
            out_path,
            {name: value.numpy() for name, value in result.arrays.to_torch_state_dict().items()},
        )

    actors = len(os.sched_getaffinity(0))
    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": actors, "log_to_driver": False},
    }
    run_simulation(server_app, client_app, num_supernodes=len(job.x), backend_config=resources)


if __name__ == "__main__":
    main(*sys.argv[1:])
