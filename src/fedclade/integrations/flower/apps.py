"""A ServerApp and a ClientApp for any method, from two functions of the user's: one loads a node's
data, one builds the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from fedclade.core.functional_model import ExampleLoss, Objective, cross_entropy
from fedclade.core.rng import fold_in
from fedclade.data import from_arrays
from fedclade.engines.remote.federation import ClientRecord
from fedclade.engines.remote.node import Node
from fedclade.errors import InvalidInputError, require
from fedclade.integrations.flower.client_state_store import DiskKeeper
from fedclade.integrations.flower.federation import FlowerFederation, about, here_of
from fedclade.integrations.flower.grid_transport import message_from_records, records_from_message
from fedclade.integrations.flower.local_deployment.supervisor import write_json
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord
from fedclade.methods.base import Method
from fedclade.registry import find
from fedclade.training import config
from fedclade.training.result import Result
from fedclade.training.runner import TrainingRun
from fedclade.training.settings import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.setup import inject_context, measured, metrics_for

BuildModel: TypeAlias = Callable[[], nn.Module]
Data: TypeAlias = Sequence[tuple[Any, ...]] | Mapping[str, tuple[Any, ...]]
"""The clients of a node: (x, y) or (x, y, x_test, y_test) of each, by name or in order."""
LoadData: TypeAlias = Callable[[Mapping[str, Any]], Data]
_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class FederationSettings:
    """sites: nodes to wait for before the first round, for `patience` seconds; deadline, least: a
    round goes on after so many seconds if so many sites have answered; bound: clients belong to
    their node's key (with node authentication); out: folder of the runs.
    """

    nodes: int = 2
    patience: float = 600.0
    deadline: float = 600.0
    least: int = 1
    bound: bool = False
    out: str = "fedclade-runs"

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("least", self.least)):
            require(value >= 1, f"federation.{name}", value, "must be at least 1")
        for name, seconds in (("patience", self.patience), ("deadline", self.deadline)):
            require(
                seconds > 0, f"federation.{name}", seconds, "must be a number of seconds above 0"
            )


@dataclass(frozen=True)
class AppSettings:
    """What an app's configuration says ([tool.flwr.app.config], or `flwr run --run-config`)."""

    method: Method
    local: LocalConfig
    run: TrainingConfig
    federation: FederationSettings

    @staticmethod
    def of(given: Mapping[str, Any]) -> AppSettings:
        tables: dict[str, dict[str, Any]] = {"method": {}, "local": {}, "run": {}, "federation": {}}
        for key, value in given.items():
            table, _, name = key.partition(".")
            if table in tables:
                tables[table][name] = value
        method = dict(tables["method"])
        name, extra = method.pop("name", "clade"), str(method.pop("settings", ""))
        try:
            method |= tomllib.loads("\n".join(extra.split(";")))
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(
                f"method.settings = {extra!r}: write it as 'clusters = 3; share = \"trunk\"'"
                f" ({error})."
            ) from error
        run = {
            "clients_per_round": 1.0,
            "eval_every": 0,
            **tables["run"],
            "checkpoint_every": 1,
        }  # a server may die at any time
        federation = {
            key: float(value) if key in ("patience", "deadline") else value
            for key, value in tables["federation"].items()
        }
        return AppSettings(
            config.build(find("method", str(name), f"method.name = '{name}'"), method, "method"),
            config.build(LocalConfig, tables["local"], "local"),
            config.build(TrainingConfig, run, "run"),
            config.build(FederationSettings, federation, "federation"),
        )

    def module(self, build_model: BuildModel) -> nn.Module:
        """The user's model, with first weights that depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fold_in(self.run.seed, "model"))
            return build_model()


def client_app(
    load_data: LoadData,
    build_model: BuildModel,
    loss: ExampleLoss | None = None,
    metrics: Mapping[str, ExampleLoss] | None = None,
) -> ClientApp:
    """A ClientApp for all clients of a node. load_data gets the node's configuration
    (`--node-config`); loss and metrics as in `fc.run`.
    """
    app = ClientApp()
    nodes: dict[
        tuple[Any, ...], Node
    ] = {}  # a process may serve several nodes, as in a simulation, and several letters

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        which = (
            context.node_id,
            *sorted(
                (key, str(value))
                for key, value in {**context.run_config, **context.node_config}.items()
            ),
        )
        if which not in nodes:
            torch.set_num_threads(1)
            nodes[which] = _node(context, load_data, build_model, loss, metrics)
        return Message(
            records_from_message(nodes[which].answer(message_from_records(message.content))),
            reply_to=message,
        )

    return app


def _node(
    context: Context,
    load_data: LoadData,
    build_model: BuildModel,
    loss: ExampleLoss | None,
    metrics: Mapping[str, ExampleLoss] | None,
) -> Node:
    settings, node = AppSettings.of(context.run_config), dict(context.node_config)
    label = str(node.get("site", f"node-{node.get('partition-id', context.node_id)}"))
    held = load_data(node)
    named = (
        dict(held)
        if isinstance(held, Mapping)
        else {str(number): each for number, each in enumerate(held)}
    )
    clients = from_arrays(list(named.values()))
    objective = Objective(settings.module(build_model), loss or cross_entropy)
    tried = (objective, clients.metadata, loss is not None, metrics, torch.device("cpu"))
    method = inject_context(settings.method, clients.metadata, settings.run.seed)
    home = (
        Path(str(node.get("home", os.environ.get("FEDCLADE_HOME", Path.home() / ".fedclade"))))
        / "sites"
        / label.replace("/", "_")
    )
    names = list(named) if settings.federation.bound else [f"{label}/{name}" for name in named]
    here, state_stores = (
        here_of(objective, method, _secret(node, home, method)),
        partial(DiskKeeper, home),
    )
    return Node(
        clients,
        names,
        here,
        measured(*tried),
        about(objective),
        state_stores,
        partial(metrics_for, *tried),
    )


def _secret(node: Mapping[str, Any], home: Path, method: Method) -> int:
    """What the server must not know: of the node's configuration, else a number of this site's own,
    kept on its disk.

    Noise in signatures is made from it; coordinates that CFL permutes are put in the same order by
    all sites, so they need the same one.
    """
    if "secret" in node:
        return int.from_bytes(hashlib.blake2b(str(node["secret"]).encode(), digest_size=7).digest())
    if getattr(method, "permute", False):
        raise InvalidInputError(
            "method.permute: all nodes need one secret; give each the same with --node-config"
            " 'secret=\"…\"'."
        )
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        suppress(FileExistsError),
        os.fdopen(
            os.open(home / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file,
    ):
        file.write(str(secrets.randbits(56)))
    return int((home / "secret").read_text())


def server_app(
    build_model: BuildModel,
    loss: ExampleLoss | None = None,
    metrics: Mapping[str, ExampleLoss] | None = None,
    probe: Tensor | None = None,
) -> ServerApp:
    """A ServerApp that runs the configured method. probe: unlabelled inputs of the server's own,
    for FLIS and PCA with a shared basis.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = AppSettings.of(context.run_config)
        result = serve(grid, settings, settings.module(build_model), loss, metrics, probe)
        accuracy = result.summary["accuracy"]
        told = f", accuracy {accuracy:.2f} %" if accuracy is not None else ""
        _log.info(
            "fedclade: %s, %s clusters%s: %s",
            result.summary["method"],
            result.summary["clusters"],
            told,
            result.folder,
        )

    return app


def serve(
    grid: Grid,
    settings: AppSettings,
    module: nn.Module,
    loss: ExampleLoss | None = None,
    metrics: Mapping[str, ExampleLoss] | None = None,
    probe: Tensor | None = None,
) -> Result:
    """Run the method on the grid's nodes. A run of the same settings that was broken off is gone on
    with.
    """
    base = Path(settings.federation.out).expanduser().resolve()
    number = max(
        [
            0,
            *(
                int(run.name.removeprefix("run-"))
                for run in base.glob("run-*")
                if run.name[4:].isdigit()
            ),
        ]
    )
    latest = base / f"run-{number}"
    if number and RunDirectory(latest).summary() is None:
        try:
            return _serve_in(latest, grid, settings, module, loss, metrics, probe)
        except InvalidInputError as error:
            if "another experiment" not in str(error):
                raise
            note(f"{error} It stays as it is; this is a new run.")
    return _serve_in(base / f"run-{number + 1}", grid, settings, module, loss, metrics, probe)


def _serve_in(
    folder: Path,
    grid: Grid,
    settings: AppSettings,
    module: nn.Module,
    loss: ExampleLoss | None,
    metrics: Mapping[str, ExampleLoss] | None,
    probe: Tensor | None,
) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    registry = ClientRegistry(folder / "federation.json")
    wanted = settings.federation
    agreed = about(Objective(module, loss or cross_entropy))
    fed = FlowerFederation(
        grid,
        agreed,
        deadline=wanted.deadline,
        least=wanted.least,
        run=registry.run,
        bound=wanted.bound,
        client_records=registry.client_records(),
        probe=probe,
        note=note,
    )
    fed.wait_for(wanted.nodes, wanted.patience)
    registry.write(fed.client_records)
    run = TrainingRun(
        settings.method,
        None,
        module,
        settings.local,
        settings.run,
        EngineConfig(),
        "cpu",
        loss,
        metrics,
        federation=fed,
    )

    def on_round(row: RoundRecord) -> None:
        registry.write(fed.client_records)
        missing = "; ".join(sorted({failure["reason"] for failure in row["failures"]}))
        problems = f", {len(row['failures'])} did not count ({missing})" if missing else ""
        note(
            f"round {row['round']} of {settings.run.rounds}: {row['clusters']} clusters,"
            f" {row['seconds']:.1f} s{problems}"
        )

    return run.run(folder, RunDirectory(folder).holds_run(), on_round)


class ClientRegistry:
    """Who has which number, on disk: clients keep theirs when the server is started anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"run": secrets.token_hex(8), "clients": []}
        )
        self.run: str = known["run"]
        self._clients: list[dict[str, Any]] = known["clients"]

    def client_records(self) -> list[ClientRecord]:
        return [ClientRecord("", -1, **client) for client in self._clients]

    def write(self, client_records: Sequence[ClientRecord]) -> None:
        names = [
            field.name for field in fields(ClientRecord) if field.name not in ("node", "place")
        ]
        clients = [
            {name: getattr(client_record, name) for name in names}
            for client_record in client_records
        ]
        if clients != self._clients or not self.path.exists():
            self._clients = clients
            write_json(self.path, {"run": self.run, "clients": clients})


def note(text: str) -> None:
    _log.info("fedclade: %s", text)
