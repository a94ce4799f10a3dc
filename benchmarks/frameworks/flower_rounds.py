"""Rounds of Flower's simulation: its FedAvg, one Ray actor for each core of this process.

Flower selects the clients of a round: the ids of its nodes do not identify their data.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

PACKAGES = ("flwr", "ray", "torch", "numpy")  # whose versions are reported


def run_rounds(
    client_app: ClientApp,
    job: str,
    clients: int,
    cohort: int,
    rounds: int,
    first: ArrayRecord,
    after_round: Callable[[int, ArrayRecord], None],
) -> None:
    """Run the job, and call `after_round` with the number and the weights of each round.

    Args:
        client_app: the client. It finds the job's path in the message.
        job: the path of the job.
        clients: the number of clients.
        cohort: the number of clients in a round.
        rounds: the number of rounds.
        first: the initial weights.
        after_round: called after each round.
    """
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        def evaluate(number: int, arrays: ArrayRecord) -> None:
            if number:  # Flower also calls before the first round
                after_round(number, arrays)

        strategy = FedAvg(fraction_train=cohort / clients, fraction_evaluate=0.0)
        settings = ConfigRecord({"job": os.path.abspath(job)})
        strategy.start(grid, first, num_rounds=rounds, train_config=settings, evaluate_fn=evaluate)

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "log_to_driver": False},
    }
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)
