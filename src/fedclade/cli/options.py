"""The options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.completion import experiments, methods
from fedclade.cli.console import out_console
from fedclade.errors import InvalidInputError

ExperimentArgument = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT",
        help="A TOML file, or a preset (fedclade list presets).",
        autocompletion=experiments,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for the results (default: a new one under runs/).")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue the interrupted run in --out.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
DataRootOption = Annotated[
    str | None,
    typer.Option("--data-root", metavar="DIR", help="Folder to search first for data sets."),
]
ImportOption = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help="Python file that registers your own methods, models or data; may be repeated.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change one setting; may be repeated. Several values: 0.1,0.3.",
    ),
]
# Shortcuts for --set, as text: several values start a sweep.
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="Short for --set method.name=NAME.",
        autocompletion=methods,
    ),
]
LrOption = Annotated[
    str | None, typer.Option("--lr", metavar="VALUE", help="Short for --set local.lr=VALUE.")
]
RoundsOption = Annotated[
    str | None, typer.Option("--rounds", metavar="N", help="Short for --set run.rounds=N.")
]
EpochsOption = Annotated[
    str | None, typer.Option("--epochs", metavar="N", help="Short for --set local.epochs=N.")
]
MAX_SEEDS = 1000  # of one list; more is a typing error
_SEED_DIGITS = 9
_SHORTCUTS = {
    "--method": "method.name",
    "--lr": "local.lr",
    "--rounds": "run.rounds",
    "--epochs": "local.epochs",
}
ENGINES = ("simulator", "ray", "flower")
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="Engine that runs the clients; ray: several simulators; flower: Flower's simulation.",
    ),
]
ShardsOption = Annotated[
    int | None,
    typer.Option(
        "--shards",
        min=1,
        help="With --engine ray: number of simulators (default: one per GPU or core).",
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        help="With --engine flower: number of nodes that share the clients (default 4).",
    ),
]
ProfileOption = Annotated[
    bool, typer.Option("--profile", help="Show the time spent in each phase of the run.")
]
LiveOption = Annotated[
    bool,
    typer.Option("--live", help="Serve a live report on this machine during the run."),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port", min=1, max=65535, help="With --live: port on 127.0.0.1 (default: a free one)."
    ),
]
TrackOption = Annotated[
    str | None,
    typer.Option(
        "--track",
        metavar="tensorboard|mlflow",
        help="Also write TensorBoard event files, or a run of MLflow (MLFLOW_TRACKING_URI).",
    ),
]
ReportOption = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")
]


def _print_on_stderr(context: typer.Context, is_json: bool) -> bool:
    """With --json, send messages, tables and progress to stderr until the command ends."""
    if is_json:
        out_console.stderr = True
        context.call_on_close(lambda: setattr(out_console, "stderr", False))
    return is_json


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document on stdout, and everything else on stderr.",
        callback=_print_on_stderr,
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Write nothing; show what would run, its traffic and its minutes."
    ),
]


def comma_separated(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list of names."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def with_shortcuts(
    sets: Sequence[str] | None,
    *,
    method: str | None = None,
    lr: str | None = None,
    rounds: str | None = None,
    epochs: str | None = None,
) -> list[str]:
    """The settings of --set and of its shortcuts.

    Args:
        sets: the values of --set.
        method: the value of --method.
        lr: the value of --lr.
        rounds: the value of --rounds.
        epochs: the value of --epochs.
    """
    settings = list(sets or [])
    by_key = {setting.partition("=")[0].strip(): setting for setting in settings}
    for (option, key), value in zip(_SHORTCUTS.items(), (method, lr, rounds, epochs), strict=True):
        if value is None:
            continue
        if key in by_key:
            raise InvalidInputError(
                f"{option} {value}: --set {by_key[key]} is the same setting. Use one of the two.",
                option,
            )
        settings.append(f"{key}={value}")
    return settings


def parse_seeds(text: str) -> int | tuple[int, ...]:
    """The value of --seeds: a number of seeds, or the seeds of a list: `101,102`, `0-4`."""
    is_count = text.isdecimal()
    if is_count and len(text) <= _SEED_DIGITS and 0 < int(text) <= MAX_SEEDS:
        return int(text)
    seeds: list[int] = []
    for part in [] if is_count else text.split(","):
        first, dash, last = (end.strip() for end in part.partition("-"))
        bounds = (first, last) if dash else (first, first)
        if not all(bound.isdecimal() and len(bound) <= _SEED_DIGITS for bound in bounds):
            seeds = []
            break
        seeds += range(int(bounds[0]), min(int(bounds[1]), int(bounds[0]) + MAX_SEEDS) + 1)
    if not seeds or len(seeds) > MAX_SEEDS or len(set(seeds)) < len(seeds):
        raise InvalidInputError(
            f"--seeds {text}: must be a number of seeds, such as 3, or a list of different seeds,"
            f" such as 101,102 or 0-4; at most {MAX_SEEDS} seeds.",
            "--seeds",
        )
    return tuple(seeds)


def import_all(files: Sequence[str] | None) -> None:
    """Run the files of --import: they register methods, models, partitions and data sets."""
    if not files:
        return
    from fedclade.registry import import_file

    for file in files:
        import_file(file)
