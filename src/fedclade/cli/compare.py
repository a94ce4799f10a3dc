"""`fedclade compare`, and the loop over several runs that a sweep uses too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclade.cli.completion import methods as method_names
from fedclade.cli.console import out_console, print_out
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    EpochsOption,
    ExperimentArgument,
    ImportOption,
    LiveOption,
    LrOption,
    OutOption,
    PortOption,
    QuietOption,
    ReportOption,
    ResumeOption,
    RoundsOption,
    SetOption,
    TrackOption,
    comma_separated,
    import_all,
    parse_seeds,
    with_shortcuts,
)
from fedclade.cli.progress import reading
from fedclade.cli.result_tables import show_comparison
from fedclade.cli.run_monitoring import RunOutput, output_folder, resumable_errors

if TYPE_CHECKING:
    from fedclade.data.federated_dataset import Clients
    from fedclade.training.experiment_file import Experiment
    from fedclade.training.result import Result


def compare(
    experiment: ExperimentArgument,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated methods, such as fedavg,local.", autocompletion=method_names
        ),
    ],
    seeds: Annotated[
        str,
        typer.Option(
            metavar="N|LIST",
            help="Number of seeds, starting at the seed of the experiment; or the seeds themselves,"
            " such as 101,102 or 0-4.",
        ),
    ] = "1",
    sets: SetOption = None,
    lr: LrOption = None,
    rounds: RoundsOption = None,
    epochs: EpochsOption = None,
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
    """Run several methods on the same clients and compare them.

    Shows a table and the significant differences. To change a setting of one method only, use
    --set METHOD.KEY=VALUE.
    """
    output = RunOutput(quiet, live, port, track, report)
    settings = with_shortcuts(sets, lr=lr, rounds=rounds, epochs=epochs)
    chosen_seeds = parse_seeds(seeds)
    import_all(imports)
    from fedclade.analysis import comparison_runs
    from fedclade.training import experiment_file

    experiments = comparison_runs.plan(
        experiment_file.read(experiment), comma_separated(methods), settings
    )
    folder = output_folder(out, resume, "comparison", f"{Path(experiment).stem}-compare")
    planned = comparison_runs.runs(experiments, chosen_seeds)
    run_all(planned, folder, resume, output, device, data_root)


def run_all(
    experiments: Sequence[Experiment],
    folder: Path,
    resume: bool,
    output: RunOutput,
    device: str,
    data_root: str | None,
) -> None:
    """Execute the runs, each in its own subfolder, and show the table."""
    from fedclade.analysis import comparison_runs
    from fedclade.io.run_dir import RunDirectory

    sizes: dict[str, None] = {}
    known: dict[object, Clients] = {}  # of the last run: the next has mostly the same

    def clients_of(experiment: Experiment) -> Clients:
        key = experiment.federation_key
        if key not in known:
            known.clear()  # first: two federations may not fit into memory
            with reading(out_console, output.quiet) as progress:
                known[key] = experiment.clients(data_root, progress)
        return known[key]

    def execute(experiment: Experiment) -> Result:
        path = folder / experiment.label
        clients = clients_of(experiment)
        sizes[clients.sizes_in_words] = None
        with output.on_round(experiment.label, experiment.run.rounds, path) as on_round:
            return experiment.to_run(clients, device).run(path, resume, on_round)

    runs, is_sweep = len(experiments), any(experiment.chosen for experiment in experiments)
    if is_sweep and not output.quiet:
        settings = len({experiment.title for experiment in experiments})
        seeds = f", {runs // settings} seeds each" if runs > settings else ""
        print_out(f"{runs} runs: {settings} settings{seeds}")
    with resumable_errors(folder), output.live_page(folder):
        rows = comparison_runs.execute(experiments, folder, resume, execute)
    show_comparison(rows)
    if len(sizes) == 1:  # a sweep may compare several federations
        print_out(*sizes)
    for line in RunDirectory(folder).comparison()["differences"]["in_words"]:
        print_out(line)
    if is_sweep:
        print_out("These accuracies are on test data: the best of many settings is overestimated.")
    output.write_report(folder)
    print_out(f"Run directories and comparison.json: {folder}")
