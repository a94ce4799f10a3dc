"""A ServerApp and a ClientApp for any method, from two functions of the user: one loads a node's
data, one builds the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import tomllib
from collections import OrderedDict
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
from torch import nn

from fedclade.core.augmentation import Augment
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import Inputs, as_inputs
from fedclade.core.losses import ExampleLoss
from fedclade.core.rng import fold_in
from fedclade.data import from_arrays
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.remote.membership import ClientRecord, check_site
from fedclade.engines.remote.node import Node, rejection, shown
from fedclade.engines.remote.node_policy import LookCounter, NodePolicy
from fedclade.engines.remote.secure_node import SecureNode
from fedclade.errors import DifferentExperimentError, FedcladeError, InvalidInputError, require
from fedclade.integrations.flower import run_folders
from fedclade.integrations.flower.client_state_store import DiskStateStore
from fedclade.integrations.flower.federation import (
    FlowerFederation,
    compatibility_info,
    node_context,
)
from fedclade.integrations.flower.grid_transport import message_from_records, records_from_message
from fedclade.integrations.flower.local_deployment.supervisor import write_json
from fedclade.integrations.flower.policy_file import load_policy
from fedclade.io.atomic import write_text
from fedclade.io.file_names import safe_file_name
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord
from fedclade.methods.base import Method
from fedclade.methods.required_context import NeedsSecret
from fedclade.registry import find
from fedclade.training import experiment_file
from fedclade.training.config import (
    EngineConfig,
    LocalConfig,
    PrivacyConfig,
    ServerConfig,
    TrainingConfig,
)
from fedclade.training.data_config import DataConfig
from fedclade.training.output_metrics import UserMetrics
from fedclade.training.personal_layer import PersonalConfig, layer_of
from fedclade.training.result import Result
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import inject_context, measured, metrics_for

BuildModel: TypeAlias = Callable[[], nn.Module]
Data: TypeAlias = Sequence[tuple[Any, ...]] | Mapping[str, tuple[Any, ...]]
"""The clients of a node by name, or a list: (x, y) or (x, y, x_test, y_test) of each."""
LoadData: TypeAlias = Callable[[Mapping[str, Any]], Data]
_NODES_IN_MEMORY = 16  # of one process
_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class FederationSettings:
    """Settings of a federation on Flower.

    Args:
        nodes: how many nodes to wait for before the first round.
        wait_seconds: how long to wait for them.
        deadline: the seconds after which a round continues without the nodes that have not
            answered, if `min_nodes` have.
        min_nodes: how many nodes must answer in each round.
        bind_clients_to_nodes: with node authentication, a client belongs to its node's key.
        out: the folder of the runs.
    """

    nodes: int = 2
    wait_seconds: float = 600.0
    deadline: float = 600.0
    min_nodes: int = 1
    bind_clients_to_nodes: bool = False
    out: str = "fedclade-runs"

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("min_nodes", self.min_nodes)):
            require(value >= 1, f"federation.{name}", value, "must be at least 1")
        for name, seconds in (("wait_seconds", self.wait_seconds), ("deadline", self.deadline)):
            require(
                seconds > 0, f"federation.{name}", seconds, "must be a number of seconds above 0"
            )


@dataclass(frozen=True)
class AppSettings:
    """An app's configuration ([tool.flwr.app.config], or `flwr run --run-config`)."""

    method: Method
    local: LocalConfig
    run: TrainingConfig
    personal: PersonalConfig
    server: ServerConfig
    privacy: PrivacyConfig
    federation: FederationSettings
    data: DataConfig

    @staticmethod
    def of(run_config: Mapping[str, Any]) -> AppSettings:
        names = ("method", "local", "run", "personal", "server", "privacy", "federation")
        tables: dict[str, dict[str, Any]] = {name: {} for name in names}
        # Only these keys of [data]: the user's function loads the data.
        data = {"name": "federation"}
        for key, value in run_config.items():
            table, _, name = key.partition(".")
            if table in tables:
                tables[table][name] = value
            elif key in ("data.validation", "data.validation_seed"):
                data[name] = value
        method = dict(tables["method"])
        name, extra = method.pop("name", "clade"), str(method.pop("settings", ""))
        try:
            method |= tomllib.loads("\n".join(extra.split(";")))
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(
                f"method.settings = {extra!r}: write it as"
                f" 'clusters = 3; shared_layers = \"trunk\"' ({error}).",
                "method.settings",
            ) from error
        names = tables["run"].get("metrics", "")
        if isinstance(names, str):  # Flower's configuration has no lists
            tables["run"]["metrics"] = [name.strip() for name in names.split(",") if name.strip()]
        run = {
            "clients_per_round": 1.0,
            "eval_every": 0,
            **tables["run"],
            "checkpoint_every": 1,  # the server may crash at any time
        }
        federation = {
            key: float(value) if key in ("wait_seconds", "deadline") else value
            for key, value in tables["federation"].items()
        }
        return AppSettings(
            experiment_file.build(find("method", str(name), "method.name"), method, "method"),
            experiment_file.build(LocalConfig, tables["local"], "local"),
            experiment_file.build(TrainingConfig, run, "run"),
            experiment_file.build(PersonalConfig, tables["personal"], "personal"),
            experiment_file.build(ServerConfig, tables["server"], "server"),
            experiment_file.build(PrivacyConfig, tables["privacy"], "privacy"),
            experiment_file.build(FederationSettings, federation, "federation"),
            experiment_file.build(DataConfig, data, "data"),
        )

    def module(self, build_model: BuildModel) -> nn.Module:
        """The user's model, with initial weights that depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(fold_in(self.run.seed, "model"))
            return build_model()


def client_app(
    load_data: LoadData,
    build_model: BuildModel,
    loss: ExampleLoss | None = None,
    metrics: UserMetrics | None = None,
    augment: Augment | None = None,
) -> ClientApp:
    """A ClientApp for all clients of a node.

    Args:
        load_data: returns the clients of a node; it gets the node's configuration
            (`--node-config`).
        build_model: returns the model; server and nodes must build the same.
        loss: as in `fc.run`.
        metrics: as in `fc.run`.
        augment: as in `fc.run`.
    """
    app = ClientApp()
    # A process may serve several nodes, as in a simulation, and several messages.
    nodes: OrderedDict[tuple[Any, ...], Node] = OrderedDict()

    def node_of(context: Context) -> Node:
        # A new run loads the data again: they may have changed.
        key = (
            context.run_id,
            context.node_id,
            *sorted(
                (name, str(value))
                for name, value in {**context.run_config, **context.node_config}.items()
            ),
        )
        if key not in nodes:
            torch.set_num_threads(1)
            nodes[key] = _node(context, load_data, build_model, loss, metrics, augment)
        nodes.move_to_end(key)
        # A server that changes the configuration with every run must not fill the memory.
        while len(nodes) > _NODES_IN_MEMORY:
            nodes.popitem(last=False)
        return nodes[key]

    @app.query()
    def answer(message: Message, context: Context) -> Message:
        try:
            reply = node_of(context).answer(message_from_records(message.content))
        # Flower would send the text of the error to the server, and it may contain data.
        except Exception as error:
            reply = rejection(error)
            with suppress(FedcladeError):  # so that the server's log can name the site
                reply.header["site"] = site_name(context.node_config, context.node_id)
        return Message(records_from_message(reply), reply_to=message)

    return app


def _node(
    context: Context,
    load_data: LoadData,
    build_model: BuildModel,
    loss: ExampleLoss | None,
    metrics: UserMetrics | None,
    augment: Augment | None = None,
) -> Node:
    node_config = dict(context.node_config)
    with shown():
        policy = load_policy(node_config)
        settings = AppSettings.of(context.run_config)
        policy.check_method(settings.method.name)
        site = site_name(node_config, context.node_id)
    data = load_data(node_config)
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data)
    # In the order of names: load_data may list a node's files in any order.
    by_name = {str(name): arrays for name, arrays in pairs}
    names = sorted(by_name)
    clients = settings.data.with_validation(from_arrays({name: by_name[name] for name in names}))
    module, x = settings.module(build_model), as_inputs(clients.metadata.x)
    objective = Objective(module, settings.local.loss_for(loss), x, augment)
    evaluated = (
        objective,
        clients.metadata,
        metrics,
        torch.device("cpu"),
        settings.run.metrics,
    )
    method = inject_context(settings.method, clients.metadata, settings.run.seed)
    layer = layer_of(settings.personal, method, module, objective, clients.metadata)
    base = node_config.get("home", os.environ.get("FEDCLADE_HOME", Path.home() / ".fedclade"))
    home = Path(str(base)) / "nodes" / safe_file_name(site)
    with shown():
        secret = _secret(node_config, home, method)
    return Node(
        clients,
        names,
        node_context(objective, method, secret, module, x, layer),
        measured(*evaluated),
        compatibility_info(objective),
        partial(DiskStateStore, home, max_bytes=policy.max_disk_mib << 20),
        partial(metrics_for, *evaluated),
        site,
        policy,
        LookCounter(home / "looks.json"),
        _secure_node(home, policy) if settings.privacy.secure_sum else None,
    )


def _secure_node(home: Path, policy: NodePolicy) -> SecureNode:
    """The node's part of secure sums, with the key on its disk."""
    path = home / "secure_sum.key"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(path, secrets.token_hex(32), mode=0o600)
    node = SecureNode(
        bytes.fromhex(path.read_text().strip()),
        [bytes.fromhex(key) for key in policy.trusted_keys] or None,
    )
    note(f"secure sums: the public key of this node is {node.public_key}")
    return node


def site_name(node_config: Mapping[str, Any], node_id: int) -> str:
    """The name of a node's site: `node-name` of its configuration, else its partition.

    A node with neither is called by its id. Flower draws ids at random, so the numbers of its
    clients then differ between two deployments.
    """
    default = f"node-{node_config.get('partition-id', node_id)}"
    site = str(node_config.get("node-name", default))
    check_site(site)
    return site


def _secret(node_config: Mapping[str, Any], home: Path, method: Method) -> int:
    """The number that the server must not know: from the node's configuration, or a random number
    on the node's disk.

    The noise in signatures is derived from it. If CFL permutes coordinates, all nodes need the same
    secret, because they must use the same permutation.
    """
    if "secret" in node_config:
        secret = str(node_config["secret"]).encode()
        return int.from_bytes(hashlib.blake2b(secret, digest_size=7).digest())
    if isinstance(method, NeedsSecret) and method.one_secret_for_all:
        raise InvalidInputError(
            "method.permute: all nodes need one secret; give each the same with --node-config"
            " 'secret=\"…\"'.",
            "method.permute",
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
    metrics: UserMetrics | None = None,
    probe: Inputs | None = None,
    augment: Augment | None = None,
) -> ServerApp:
    """A ServerApp that runs the configured method.

    Args:
        build_model: returns the model; server and nodes must build the same.
        loss: as in `fc.run`.
        metrics: as in `fc.run`.
        probe: unlabelled inputs that the server has, for FLIS and PCA with a shared basis.
        augment: as in `fc.run`; the nodes apply it.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        # Flower logs the traceback of an exception; an error of the user needs only its text.
        _log.addFilter(one_line_errors)
        settings = AppSettings.of(context.run_config)
        module = settings.module(build_model)
        result = serve(grid, settings, module, loss, metrics, probe, augment)
        accuracy = result.summary["accuracy"]
        accuracy_text = f", accuracy {accuracy:.2f} %" if accuracy is not None else ""
        _log.info(
            "fedclade: %s, %s groups%s: %s",
            result.summary["method"],
            result.summary["clusters"],
            accuracy_text,
            result.folder,
        )

    return app


def serve(
    grid: Grid,
    settings: AppSettings,
    module: nn.Module,
    loss: ExampleLoss | None = None,
    metrics: UserMetrics | None = None,
    probe: Inputs | None = None,
    augment: Augment | None = None,
) -> Result:
    """Run the method on the grid's nodes. An unfinished run with the same settings is resumed,
    unless another process runs it.
    """
    base = Path(settings.federation.out).expanduser().resolve()
    rest = (grid, settings, module, loss, metrics, probe, augment)
    for folder in run_folders.unfinished(base):
        with run_folders.locked(folder) as is_ours:
            if not is_ours:
                note(f"{folder}: another run uses it.")
                continue
            try:
                return _serve_in(folder, *rest)
            except DifferentExperimentError as error:
                note(f"{error} It stays unchanged.")
    with run_folders.new_folder(base) as folder:
        return _serve_in(folder, *rest)


def _serve_in(
    folder: Path,
    grid: Grid,
    settings: AppSettings,
    module: nn.Module,
    loss: ExampleLoss | None,
    metrics: UserMetrics | None,
    probe: Inputs | None,
    augment: Augment | None,
) -> Result:
    registry = ClientRegistry(folder / "federation.json")
    options = settings.federation

    def check_samples(metadata: ClientMetadata) -> None:
        objective = Objective(module, settings.local.loss_for(loss), as_inputs(metadata.x))
        measured(objective, metadata, metrics, torch.device("cpu"), settings.run.metrics)

    fed = FlowerFederation(
        grid,
        compatibility_info(Objective(module, settings.local.loss_for(loss), augment=augment)),
        deadline=options.deadline,
        min_nodes=options.min_nodes,
        run=registry.run,
        bind_clients_to_nodes=options.bind_clients_to_nodes,
        client_records=registry.client_records(),
        validation_origin=settings.data.validation_origin,
        probe=probe,
        check_samples=check_samples,
        note=note,
    )
    fed.wait_for(options.nodes, options.wait_seconds)
    registry.write(fed.membership.client_records)
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
        augment=augment,
        server=settings.server,
        personal=settings.personal,
        privacy=settings.privacy,
    )

    def on_round(row: RoundRecord) -> None:
        registry.write(fed.membership.client_records)
        reasons = "; ".join(sorted({failure["reason"] for failure in row["failures"]}))
        # A client may fail in training and in the evaluation.
        failed = len({failure["client"] for failure in row["failures"]})
        problems = f", {failed} clients failed ({reasons})" if failed else ""
        accuracy = row.get("accuracy")
        measured = f", accuracy {accuracy:.2f} %" if accuracy is not None else ""
        note(
            f"round {row['round']} of {settings.run.rounds}: {row['clusters']} groups,"
            f" {row['seconds']:.1f} s{measured}{problems}"
        )

    return run.run(folder, RunDirectory(folder).holds_run(), on_round)


class ClientRegistry:
    """The number of each client, on disk, so that clients keep theirs when the server restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content: dict[str, Any] = (
            json.loads(path.read_text())
            if path.exists()
            else {"run": secrets.token_hex(8), "clients": []}
        )
        self.run: str = content["run"]
        self._clients: list[dict[str, Any]] = content["clients"]

    def client_records(self) -> list[ClientRecord]:
        return [ClientRecord("", -1, **client) for client in self._clients]

    def write(self, client_records: Sequence[ClientRecord]) -> None:
        names = [
            field.name for field in fields(ClientRecord) if field.name not in ("node", "place")
        ]
        clients = [{name: getattr(record, name) for name in names} for record in client_records]
        if clients != self._clients or not self.path.exists():
            self._clients = clients
            write_json(self.path, {"run": self.run, "clients": clients})


def one_line_errors(record: logging.LogRecord) -> bool:
    """A filter for Flower's log: of fedclade's own errors only the text is logged."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedcladeError):
        record.msg, record.args, record.exc_info = "fedclade: %s", (str(error),), None
    return True


def note(text: str) -> None:
    _log.info("fedclade: %s", text)
