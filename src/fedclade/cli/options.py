"""The options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ExperimentArgument = Annotated[
    str,
    typer.Argument(metavar="EXPERIMENT", help="A TOML file, or a preset (fedclade list presets)."),
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
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="simulator|flower",
        help="Engine that runs the clients; flower: Flower's simulation.",
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


def comma_separated(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list of names."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def import_all(files: Sequence[str] | None) -> None:
    """Run the files of --import: they register methods, models, partitions and data sets."""
    if not files:
        return
    from fedclade.registry import import_file

    for file in files:
        import_file(file)
