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

from fedclade.cli.options import out_console, print_err
from fedclade.errors import InvalidInputError
from fedclade.training.config import value_of

if TYPE_CHECKING:
    from fedclade.integrations.flower.local_deployment.federation import (
        Federation,
        ServiceStatus,
        Value,
    )

flower_app = typer.Typer(
    help="Federations with Flower: one on this machine, and apps that run on any."
)

FOLDER = Path(".fedclade-federation")
DirOption = Annotated[
    Path, typer.Option("--dir", help="The folder of the federation: keys, database, logs.")
]


@flower_app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@flower_app.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a Flower app that runs as it is: a server, a client, and one file with your data and
    your model.
    """
    _local()
    from fedclade.integrations.flower.scaffold_app import new_app

    written = new_app(folder)
    for path in written:
        _say(f"  {path}")
    task = next(path for path in written if path.name == "task.py")
    _say(
        f"Your data and your model go into {task}. To try it as it is:\n  fedclade flower up"
        f" --nodes 3\n  fedclade flower run {folder}"
    )


@flower_app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, help="Number of SuperNodes.")] = 3,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="TLS, and a key for each node that the SuperLink knows."),
    ] = False,
    folder: DirOption = FOLDER,
    port: Annotated[int, typer.Option(help="Of the SuperLink on 127.0.0.1; 0: a free one.")] = 0,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, and keep them running."""
    federation = _local().up(folder, nodes, secure, port, progress=_say)
    _show(federation.status())
    where = "" if folder == FOLDER else f" --dir {folder}"
    _say(f"Logs: {federation.plan.folder}/logs\nGo on with: fedclade flower run APP_DIR{where}")
    _say(f"            fedclade flower status{where}\n            fedclade flower down{where}")


@flower_app.command()
def status(folder: DirOption = FOLDER) -> None:
    """The SuperLink and the nodes: alive, restarted, seen by the SuperLink? The exit code is 1
    where the federation is down.
    """
    federation = _local().open(folder)
    if not federation.running:
        _say(
            f"The federation in {federation.plan.folder} is down. 'fedclade flower up' starts it"
            " again, with the same nodes."
        )
        raise typer.Exit(1)
    _show(federation.status())
    _say(f"Logs: {federation.plan.folder}/logs")
    if not federation.supervised:
        print_err(
            "the supervisor is gone, so nothing is restarted that dies: 'fedclade flower down',"
            " then 'fedclade flower up'."
        )


@flower_app.command()
def down(
    folder: DirOption = FOLDER,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove the folder too: keys, database, logs.")
    ] = False,
) -> None:
    """End the federation and every app that it runs."""
    local = _local()
    if not (folder / "plan.json").exists():
        _say(f"There is no federation in {folder}; nothing to do.")
        return
    count = local.open(folder).down(purge)
    ended = f"{count} processes ended" if count else "Nothing was running"
    _say(f"{ended}{f'; {folder} removed' if purge else ''}.")


@flower_app.command()
def run(
    app_dir: Annotated[
        Path, typer.Argument(metavar="APP_DIR", help="The folder of a Flower app (pyproject.toml).")
    ],
    folder: DirOption = FOLDER,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one setting of the app."),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Show the run's log until it ends.")
    ] = True,
) -> None:
    """Run an app on the federation. The exit code is 0 where the run ended well."""
    federation = _local().open(folder)
    try:
        code = federation.run(app_dir, _settings(sets or []), stream)
    except KeyboardInterrupt:
        print_err(
            "the log is no longer shown; the run itself goes on until it ends, or until 'fedclade"
            " flower down'."
        )
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _local() -> type[Federation]:
    """Imported only here: without flwr every other command works."""
    if importlib.util.find_spec("flwr") is None:
        raise InvalidInputError(
            "fedclade flower: flwr is not installed. Install it with: pip install"
            " 'fedclade[flower]'"
        )
    from fedclade.integrations.flower.local_deployment.federation import Federation

    return Federation


def _settings(sets: Sequence[str]) -> dict[str, Value]:
    """`key=value` texts. A value is read as TOML; what is not TOML is a string."""
    settings: dict[str, Value] = {}
    for given in sets:
        key, equals, text = given.partition("=")
        if not equals or not key.strip():
            raise InvalidInputError(
                f"--set {given}: write it as key=value, for example --set rounds=3."
            )
        value = value_of(text)
        if not isinstance(value, str | int | float | bool):
            raise InvalidInputError(
                f"--set {given}: Flower's settings are text, numbers, true and false."
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
        "ended last",
    ):
        table.add_column(heading, no_wrap=heading != "ended last", overflow="fold")
    for one in services:
        online = "–" if one.online is None else "yes" if one.online else "no"
        row = (
            one.name,
            one.pid or "–",
            "yes" if one.alive else "no",
            one.port or "–",
            one.restarts,
            online,
            one.node_id,
            one.log.name,
            one.reason,
        )
        table.add_row(*(escape(str(cell)) for cell in row))
    out_console.print(table)


def _say(message: str) -> None:
    out_console.print(message, markup=False, soft_wrap=True)
