"""An experiment in Flower's simulation. Ray workers are the nodes, and each has a part of the
experiment's clients.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import nn

from fedclade.core.functional_model import Objective
from fedclade.core.inputs import as_inputs
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.federated_dataset import Clients
from fedclade.engines.device import check_precision
from fedclade.engines.remote.membership import ClientRecord
from fedclade.engines.remote.node import Node
from fedclade.errors import FedcladeError, InvalidInputError, require
from fedclade.integrations.flower.client_state_store import DiskStateStore
from fedclade.integrations.flower.federation import (
    FlowerFederation,
    compatibility_info,
    node_context,
)
from fedclade.integrations.flower.grid_transport import message_from_records, records_from_message
from fedclade.integrations.flower.local_deployment import supervisor
from fedclade.io.schemas import RoundRecord
from fedclade.methods.required_context import NeedsSecret
from fedclade.registry import import_file
from fedclade.training import experiment_file
from fedclade.training.callbacks import OnRound
from fedclade.training.graceful_interrupt import Interrupt
from fedclade.training.personal_layer import layer_of
from fedclade.training.result import Result
from fedclade.training.setup import inject_context, measured, module_for

QUIET = supervisor.QUIET | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_WAIT_SECONDS = 120.0  # for all nodes to register
_DEADLINE = 24 * 3600.0  # seconds; in a simulation a slow node is just working


def simulate(
    tables: dict[str, experiment_file.Table],
    clients: Clients,
    folder: Path,
    *,
    nodes: int = 4,
    resume: bool = False,
    on_round: OnRound | None = None,
    data_root: str | None = None,
    imports: Sequence[str] = (),
) -> Result:
    """Run an experiment with its clients divided among simulated SuperNodes.

    Args:
        tables: the experiment file.
        clients: the experiment's clients.
        folder: the run directory.
        nodes: the number of nodes.
        resume: continue an interrupted run.
        on_round: called with each round's row.
        data_root: the folder to search first for data sets.
        imports: Python files that register methods, models or data.
    """
    require(
        1 <= nodes <= len(clients),
        "--nodes",
        nodes,
        f"must be from 1 to the number of clients, {len(clients)}",
    )
    if " " in sys.executable:  # Ray would wait forever for its workers
        raise InvalidInputError(
            f"--engine flower: the path of Python has a space ({sys.executable}), so Ray cannot"
            " start workers. Install Python in another folder.",
            "--engine",
        )
    experiment = experiment_file.experiment(tables)
    check_precision(experiment.engine.precision, torch.device("cpu"))
    objective = Objective(
        _module(experiment, clients.metadata),
        experiment.local_for(clients.classes).loss_for(None),
        as_inputs(clients.metadata.x),
        bf16=experiment.engine.precision == "bf16",
    )
    outcome: list[Result | BaseException] = []
    interrupt, is_stopped = Interrupt(), threading.Event()
    server = ServerApp()

    def after_round(row: RoundRecord) -> bool | None:
        answer = on_round(row) if on_round is not None else None
        interrupt.after_round(row)
        return answer

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        client_records = [
            ClientRecord("", -1, str(client), int(size), 0)
            for client, size in enumerate(clients.sizes)
        ]
        fed = FlowerFederation(
            cast(Grid, _StoppableGrid(grid, is_stopped)),
            compatibility_info(objective),
            deadline=_DEADLINE,
            run=folder.name,
            client_records=client_records,
            metadata=clients.metadata,
        )
        try:
            fed.wait_for(nodes, _WAIT_SECONDS)
            run = replace(experiment.to_run(clients, "cpu"), federation=fed)
            outcome.append(run.run(folder, resume, after_round))
        except BaseException as error:  # it is raised again in the calling thread
            outcome.append(error)

    app = ClientApp()
    # Ray's workers build the nodes from this JSON.
    spec = json.dumps(
        {
            "tables": tables,
            "root": data_root,
            "imports": [str(Path(file).resolve()) for file in imports],
        }
    )
    homes = str((folder / "nodes").resolve())

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        node = experiment_node(
            spec,
            int(context.node_config["partition-id"]),
            int(context.node_config["num-partitions"]),
            homes,
        )
        return Message(
            records_from_message(node.answer(message_from_records(message.content))),
            reply_to=message,
        )

    # The ServerApp has a thread of its own, which Ctrl-C does not reach.
    with interrupt, _quietly():
        try:
            run_simulation(server, app, nodes, backend_config=_backend())
        except KeyboardInterrupt:  # the second Ctrl-C
            is_stopped.set()
            raise
    if not outcome:
        raise FedcladeError(
            "--engine flower: Flower's simulation ended before the run. Set FLWR_LOG_LEVEL=INFO to"
            " see its messages.",
            "--engine",
        )
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


class _StoppableGrid:
    """A Grid that ends the ServerApp when the simulation has been stopped: without its nodes the
    ServerApp would wait for their answers forever.
    """

    def __init__(self, grid: Grid, is_stopped: threading.Event) -> None:
        self._grid, self._is_stopped = grid, is_stopped

    def __getattr__(self, name: str) -> Any:
        if self._is_stopped.is_set():
            raise KeyboardInterrupt
        return getattr(self._grid, name)


@lru_cache(maxsize=8)
def experiment_node(spec: str, number: int, nodes: int, homes: str) -> Node:
    """Node `number` of `nodes`: every `nodes`-th client of the experiment."""
    torch.set_num_threads(1)
    options = json.loads(spec)
    for file in options["imports"]:
        import_file(file)
    experiment = experiment_file.experiment(options["tables"])
    clients = experiment.clients(options["root"])
    metadata = clients.metadata
    module, x = _module(experiment, metadata), as_inputs(metadata.x)
    objective = Objective(
        module,
        experiment.local_for(clients.classes).loss_for(None),
        x,
        bf16=experiment.engine.precision == "bf16",
    )
    method = inject_context(experiment.method, metadata, experiment.run.seed)
    layer = layer_of(experiment.personal, method, module, objective, metadata)
    ids = list(range(number, len(clients), nodes))
    metrics = measured(
        objective, clients.metadata, None, torch.device("cpu"), experiment.run.metrics
    )
    home = Path(homes) / str(number)
    return Node(
        clients.only(ids),
        [str(client) for client in ids],
        # As in the simulator: nothing is hidden.
        node_context(
            objective,
            method,
            (method.secret or 0) if isinstance(method, NeedsSecret) else 0,
            module,
            x,
            layer,
        ),
        metrics,
        compatibility_info(objective),
        lambda run: DiskStateStore(home, run),
    )


def _module(experiment: experiment_file.Experiment, clients: ClientMetadata) -> nn.Module:
    loss = experiment.local_for(clients.classes).loss
    return module_for(experiment.model, clients, experiment.run.seed, loss)


def _backend() -> Any:
    ray: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if "RAY_ADDRESS" not in os.environ:  # a running cluster has its own size
        ray |= {"num_cpus": max(1, len(os.sched_getaffinity(0))), "include_dashboard": False}
    return {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": ray}


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the logs of Flower and Ray, unless FLWR_LOG_LEVEL is set."""
    logger = logging.getLogger("flwr")
    level, before = logger.level, {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    if "FLWR_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
