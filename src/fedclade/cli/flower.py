"""`fedclade flower`: a Flower federation on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedclade.cli.console import out_console, print_err, print_out
from fedclade.errors import InvalidInputError, require

if TYPE_CHECKING:
    from fedclade.integrations.flower.local_deployment.deployment import (
        Federation,
        ServiceStatus,
        Value,
    )

flower_app = typer.Typer(help="Run a Flower federation on this machine, and write Flower apps.")

FOLDER = Path(".fedclade-federation")
DirOption = Annotated[
    Path, typer.Option("--dir", help="Folder of the federation: keys, database, logs.")
]


@flower_app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@flower_app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a Flower app that runs without changes.

    It has a server, a client, and one file for your data and model.
    """
    _local()
    from fedclade.integrations.flower.app_template import new_app

    written = new_app(folder)
    for path in written:
        print_out(f"  {path}")
    task = next(path for path in written if path.name == "task.py")
    print_out(
        f"Put your data and your model into {task}. To try the app first:\n  fedclade flower up"
        f" --nodes 3\n  fedclade flower run {folder}"
    )


@flower_app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes (Flower's SuperNodes).")] = 3,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="Use TLS, and a key per node that the SuperLink checks."),
    ] = False,
    folder: DirOption = FOLDER,
    port: Annotated[
        int, typer.Option(help="Port of the SuperLink on 127.0.0.1; 0 for a free one.")
    ] = 0,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, and keep them running."""
    federation = _local().up(folder, nodes, secure, port, progress=print_out)
    _show(federation.status())
    option = "" if folder == FOLDER else f" --dir {folder}"
    print_out(
        f"Logs: {federation.plan.folder}/logs\nNext steps: fedclade flower run APP_DIR{option}"
    )
    print_out(
        f"            fedclade flower status{option}\n            fedclade flower down{option}"
    )


@flower_app.command()
def node(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink, or of its proxy.")
    ],
    name: Annotated[
        str, typer.Option(help="Name of the site; the same as node-name in --node-config.")
    ] = "",
    node_config: Annotated[
        str,
        typer.Option(metavar="'KEY=VALUE …'", help="Given to load_data(node); quote text values."),
    ] = "",
    own_app: Annotated[
        Path | None,
        typer.Option("--app", help="Folder of this node's own app; no other app runs."),
    ] = None,
    any_app: Annotated[
        bool, typer.Option("--any-app", help="Run the code of every app that the server sends.")
    ] = False,
    policy: Annotated[
        Path | None, typer.Option(help="TOML file with limits for the server (docs/flower.md).")
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="Certificate of the CA that signed the server's.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Private key of this node (ssh-keygen -t ecdsa -b 384).")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS. Only for tests on one machine.")
    ] = False,
    restart_after: Annotated[
        int,
        typer.Option(min=1, help="Replace the ClientApp's process after this number of messages."),
    ] = 1000,
    max_growth: Annotated[
        int,
        typer.Option(
            min=1, help="Replace the ClientApp's process if its memory grows by this number of MiB."
        ),
    ] = 2048,
) -> None:
    """Run one node of a federation: a SuperNode whose ClientApp stays in one process.

    It runs until a signal ends it. Start it under a service manager that restarts it.
    """
    _local()
    from fedclade.integrations.flower.supernode import ExecutorLimits, run_node

    require(
        insecure == (root_certificates is None),
        "--root-certificates",
        str(root_certificates or ""),
        "must be given, or else --insecure",
    )
    files = {"app": own_app, "policy": policy}
    pairs = [f'node-name="{name}"'] if name else []
    pairs += [f'{field}="{file.resolve()}"' for field, file in files.items() if file]
    config = " ".join([*pairs, *(["any-app=true"] if any_app else []), node_config]).strip()
    require(
        any(f"{field}=" in config for field in ("app", "any-app", "policy")),
        "--app",
        "",
        "give the folder of this node's app, a --policy with a list of apps, or --any-app",
    )
    arguments = ["--superlink", superlink]
    arguments += ["--insecure"] if insecure else ["--root-certificates", str(root_certificates)]
    arguments += ["--auth-supernode-private-key", str(key)] if key else []
    arguments += ["--node-config", config] if config else []
    run_node(arguments, ExecutorLimits(restart_after, max_growth << 20))


@flower_app.command()
def status(folder: DirOption = FOLDER) -> None:
    """Show whether the SuperLink and the nodes are running and connected.

    The exit code is 1 if the federation is down, or if its last run failed.
    """
    federation = _local().open(folder)
    if not federation.running:
        print_out(
            f"The federation in {federation.plan.folder} is down. 'fedclade flower up' starts it"
            " again, with the same nodes."
        )
        raise typer.Exit(1)
    _show(federation.status())
    print_out(f"Logs: {federation.plan.folder}/logs")
    if not federation.supervised:
        print_err(
            "the supervisor has stopped, so processes are no longer restarted. Run 'fedclade flower"
            " down', then 'fedclade flower up'."
        )
    last = federation.last_run()
    if last is not None:
        print_out(f"Last run: {last}" if last.is_finished else f"Last run: {last.status}")
        if last.is_finished and not last.ok:
            raise typer.Exit(1)


@flower_app.command()
def down(
    folder: DirOption = FOLDER,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove the folder: keys, database, logs.")
    ] = False,
) -> None:
    """Stop the federation and every app that it runs."""
    local = _local()
    if not (folder / "plan.json").exists():
        print_out(f"{folder} contains no federation; nothing to do.")
        return
    count = local.open(folder).down(purge)
    ended = f"{count} processes ended" if count else "Nothing was running"
    print_out(f"{ended}{f'; {folder} removed' if purge else ''}.")


@flower_app.command()
def run(
    app_dir: Annotated[
        Path, typer.Argument(metavar="APP_DIR", help="Folder of a Flower app (pyproject.toml).")
    ],
    folder: DirOption = FOLDER,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one setting of the app; may be repeated."
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the run's log until it ends.")
    ] = True,
) -> None:
    """Run an app on the federation.

    The exit code is 0 if the run succeeds.
    """
    federation = _local().open(folder)
    try:
        code = federation.run(app_dir, _settings(sets or []), stream)
    except KeyboardInterrupt:
        print_err(
            "the log is no longer shown, but the run continues. 'fedclade flower down' stops it."
        )
        raise SystemExit(130) from None
    raise typer.Exit(code)


def _local() -> type[Federation]:
    """The class Federation. Imported only here, so that other commands work without flwr."""
    if importlib.util.find_spec("flwr") is None:
        raise InvalidInputError(
            "fedclade flower: flwr is not installed. Install it with: pip install"
            " 'fedclade[flower]'",
            "flwr",
        )
    from fedclade.integrations.flower.local_deployment.deployment import Federation

    return Federation


def _settings(sets: Sequence[str]) -> dict[str, Value]:
    """Parse `key=value` texts. A value is read as TOML; a value that is not TOML is a string."""
    from fedclade.training.experiment_file import value_of

    settings: dict[str, Value] = {}
    for setting in sets:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise InvalidInputError(
                f"--set {setting}: must be KEY=VALUE, for example --set rounds=3.", "--set"
            )
        value = value_of(text)
        if not isinstance(value, str | int | float | bool):
            raise InvalidInputError(
                f"--set {setting}: a setting of Flower must be text, a number, true or false.",
                "--set",
            )
        settings[key.strip()] = value
    return settings


def _show(services: Sequence[ServiceStatus]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in (
        "",
        "pid",
        "alive",
        "port",
        "restarts",
        "online",
        "node id",
        "log",
        "last exit",
    ):
        table.add_column(heading, no_wrap=heading != "last exit", overflow="fold")
    for service in services:
        online = "–" if service.online is None else "yes" if service.online else "no"
        row = (
            service.name,
            service.pid or "–",
            "yes" if service.alive else "no",
            service.port or "–",
            service.restarts,
            online,
            service.node_id,
            service.log.name,
            service.reason,
        )
        table.add_row(*(escape(str(cell)) for cell in row))
    out_console.print(table)
