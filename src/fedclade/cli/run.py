"""`fedclade run` and `fedclade compare`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

import typer

from fedclade.analysis import comparison as comparison
from fedclade.analysis import sweep
from fedclade.analysis.report.live_server import Live
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    OutOption,
    QuietOption,
    ResumeOption,
    comma_separated,
    new_folder,
    out_console,
    print_err,
)
from fedclade.cli.progress import display
from fedclade.cli.tables import print_out, show_comparison, show_result
from fedclade.errors import FedcladeError, InvalidInputError, WriteError
from fedclade.integrations.tensorboard import Tracker, check_tracker
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord
from fedclade.registry import import_file
from fedclade.training import config
from fedclade.training.callbacks import OnRound
from fedclade.training.result import Result

ExperimentArgument = Annotated[
    str,
    typer.Argument(metavar="EXPERIMENT", help="A TOML file, or a preset (fedclade list presets)."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change one setting; may be repeated. Several values: 0.1,0.3.",
    ),
]
ProfileOption = Annotated[bool, typer.Option("--profile", help="Show where the time went.")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="simulator|flower",
        help="Where clients run; flower: Flower's simulation.",
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(
        "--nodes", min=1, help="With --engine flower: nodes that share the clients (default 4)."
    ),
]
ImportOption = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="FILE", help="Python file that registers your own things."),
]
LiveOption = Annotated[
    bool,
    typer.Option(
        "--live", help="Show the report in a browser of this machine while the run goes on."
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port", min=1, max=65535, help="With --live: on 127.0.0.1 (default: a free one)."
    ),
]
TrackOption = Annotated[
    str | None,
    typer.Option("--track", metavar="tensorboard", help="Write TensorBoard's event files too."),
]
ReportOption = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")
]


@dataclass(frozen=True)
class Watch:
    """How runs are watched, and what is written beside them: the options that run and compare
    share.
    """

    quiet: bool
    live: bool
    port: int | None
    track: str | None
    report: bool

    def __post_init__(self) -> None:
        if self.port is not None and not self.live:
            raise InvalidInputError(f"--port {self.port}: only --live has one.")
        if self.track is not None:
            check_tracker(self.track)

    @contextmanager
    def served(self, folder: Path) -> Iterator[None]:
        """With --live, the time in which the folder's report is served."""
        if not self.live:
            yield
            return
        with Live(folder, self.port or 0) as page:
            print_err(f"live report, on this machine only and until the end: {page.address}")
            yield

    @contextmanager
    def rows(self, label: str, rounds: int, folder: Path) -> Iterator[OnRound]:
        """What is done with each round's row of one run."""
        with ExitStack() as stack:
            steps: list[OnRound] = [
                stack.enter_context(display(label, rounds, out_console, self.quiet)).after_round
            ]
            if self.track is not None:
                steps.append(stack.enter_context(Tracker(folder)).after_round)

            def on_round(row: RoundRecord) -> None:
                for step in steps:
                    step(row)

            yield on_round

    def write_report(self, folder: Path) -> None:
        if not self.report:
            return
        from fedclade.analysis import report

        try:
            written = report.write_report([folder], folder / "report.html")
        except (FedcladeError, OSError) as error:  # the run itself is done, and on disk
            print_err(f"the report could not be written ({error}).")
            return
        if not self.quiet:
            print_out(f"Report: {written}")


def run(
    experiment: ExperimentArgument,
    sets: SetOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
    profile: ProfileOption = False,
    engine: EngineOption = "simulator",
    nodes: NodesOption = None,
    live: LiveOption = False,
    port: PortOption = None,
    track: TrackOption = None,
    report: ReportOption = True,
) -> None:
    """Run one experiment and write its run directory. With several values in a --set: every
    combination, and a table.
    """
    watch = Watch(quiet, live, port, track, report)
    import_all(imports)
    if engine not in ("simulator", "flower"):
        raise InvalidInputError(f"--engine {engine}: must be simulator or flower.")
    if nodes is not None and engine != "flower":
        raise InvalidInputError("--nodes: only --engine flower has any.")
    tables = config.read(experiment)
    if sweep.is_sweep(sets or []):
        if engine == "flower" or profile:
            raise InvalidInputError(
                f"{'--profile' if profile else '--engine flower'}: for one run; give each --set one"
                " value."
            )
        where = _folder(out, resume, "sweep", f"{Path(experiment).stem}-sweep")
        _several(
            comparison.runs(sweep.expand(tables, sets or []), 1),
            where,
            resume,
            watch,
            device,
            data_root,
        )
        return
    told = config.apply(tables, sets or [])
    chosen = config.experiment(told)
    folder = _folder(out, resume, "run", f"{Path(experiment).stem}-{chosen.method.name}")
    if resume and not RunDirectory(folder).holds_run():
        print_err(f"there is no run in {folder} yet; it is started anew.")
    RunDirectory.open(folder, resume)
    try:
        with watch.served(folder):
            clients = chosen.clients(data_root)
            prepared = replace(chosen.to_run(clients, device), profile=profile)
            with watch.rows(chosen.method.name, chosen.run.rounds, folder) as on_round:
                if engine == "flower":
                    given = {
                        "resume": resume,
                        "on_round": on_round,
                        "data_root": data_root,
                        "imports": imports or [],
                    }
                    result = _flower().simulate(
                        told, clients, folder, nodes=nodes or min(4, len(clients)), **given
                    )
                else:
                    result = prepared.run(folder, resume, on_round)
    except KeyboardInterrupt:
        _interrupted(folder)
    except WriteError as error:
        _not_written(error, folder)
    if not quiet:
        show_result(result)
    if result.already_finished:
        print_err(f"the run in {folder} has ended already; nothing to do.")
    else:
        watch.write_report(folder)
    if not quiet:
        print_out(f"Run directory: {folder}")
    if result.profile is not None:
        out_console.print(str(result.profile), markup=False, highlight=False, soft_wrap=True)


def compare(
    experiment: ExperimentArgument,
    methods: Annotated[
        str, typer.Option(help="Names with commas between, for example fedavg,local.")
    ],
    seeds: Annotated[
        int,
        typer.Option(min=1, help="Number of seeds: the experiment's own and those that follow it."),
    ] = 1,
    sets: SetOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
    live: LiveOption = False,
    port: PortOption = None,
    track: TrackOption = None,
    report: ReportOption = True,
) -> None:
    """Run several methods on the same clients: a table, and which differences are real. A setting
    of one method: --set METHOD.KEY=VALUE.
    """
    watch = Watch(quiet, live, port, track, report)
    import_all(imports)
    chosen = comparison.plan(config.read(experiment), comma_separated(methods), sets or [])
    where = _folder(out, resume, "comparison", f"{Path(experiment).stem}-compare")
    _several(comparison.runs(chosen, seeds), where, resume, watch, device, data_root)


def _several(
    experiments: Sequence[config.Experiment],
    folder: Path,
    resume: bool,
    watch: Watch,
    device: str,
    data_root: str | None,
) -> None:
    """Do the runs, each in a folder of its own below this one, and show the table."""

    def run_one(experiment: config.Experiment) -> Result:
        label = experiment.label
        with watch.rows(label, experiment.run.rounds, folder / label) as on_round:
            training_run = experiment.to_run(experiment.clients(data_root), device)
            return training_run.run(folder / label, resume, on_round)

    runs, swept = len(experiments), any(experiment.chosen for experiment in experiments)
    if swept and not watch.quiet:
        titles = len({experiment.title for experiment in experiments})
        print_out(
            f"{runs} runs: {titles} settings{f', {runs // titles} seeds each' * (runs > titles)}"
        )
    try:
        with watch.served(folder):
            rows = comparison.execute(experiments, folder, resume, run_one)
    except KeyboardInterrupt:
        _interrupted(folder)
    except WriteError as error:
        _not_written(error, folder)
    show_comparison(rows)
    for line in RunDirectory(folder).comparison()["differences"]["in_words"]:
        print_out(line)
    if swept:
        print_out(
            "These accuracies are on test data: the best of many settings looks better than it is."
        )
    watch.write_report(folder)
    print_out(f"Run directories and comparison.json: {folder}")


def _folder(out: Path | None, resume: bool, what: str, default: str) -> Path:
    if resume and out is None:
        raise InvalidInputError(f"--resume: say which {what} with --out DIR.")
    return out or new_folder(default)


def import_all(files: list[str] | None) -> None:
    for file in files or []:
        import_file(file)


def _flower() -> ModuleType:
    try:
        from fedclade.integrations.flower import simulation
    except ImportError as error:
        raise InvalidInputError(
            f"--engine flower: Flower is not installed ({error}); pip install 'fedclade[flower]'."
        ) from error
    return simulation


def _interrupted(folder: Path) -> NoReturn:
    print_err(f"interrupted; go on with the same command and --out {folder} --resume")
    raise SystemExit(130)


def _not_written(error: WriteError, folder: Path) -> NoReturn:
    raise WriteError(f"{error} Go on with the same command and --out {folder} --resume.") from error
