"""`fedclade compare`, and the loop over several runs that a sweep uses too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclade.cli.completion import methods as method_names
from fedclade.cli.console import print_json, print_out
from fedclade.cli.dry_run import loader, show_plan
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    DryRunOption,
    EpochsOption,
    ExperimentArgument,
    ImportOption,
    JsonOption,
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
from fedclade.cli.result_tables import show_comparison
from fedclade.cli.run_monitoring import RunOutput, output_folder, resumable_errors

if TYPE_CHECKING:
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
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
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
    run_all(planned, folder, resume, output, device, data_root, dry_run, as_json)


def run_all(
    experiments: Sequence[Experiment],
    folder: Path,
    resume: bool,
    output: RunOutput,
    device: str,
    data_root: str | None,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """Execute the runs, each in its own subfolder, and show the table.

    Args:
        experiments: the runs.
        folder: the folder of all of them.
        resume: whether to continue interrupted runs.
        output: what is shown and written in addition.
        device: "auto", "cpu" or "cuda".
        data_root: the folder to search first for data sets.
        dry_run: whether only to show what would run.
        as_json: whether to print the table and the differences as JSON, too.
    """
    if dry_run:
        show_plan(experiments, folder, resume, output, device, data_root, as_json)
        return
    from fedclade.analysis import comparison_runs
    from fedclade.io.run_dir import RunDirectory

    sizes: dict[str, None] = {}
    clients_of = loader(output, data_root)

    def execute(experiment: Experiment) -> Result:
        path = folder / experiment.label
        clients = clients_of(experiment)
        sizes[clients.sizes_in_words] = None
        with output.on_round(experiment.label, experiment.run.rounds, path) as on_round:
            result = experiment.to_run(clients, device).run(path, resume, on_round)
        if "chosen_lr" in result.summary and not output.quiet:
            print_out(f"{experiment.label}: learning rate {result.summary['chosen_lr']:g}, chosen")
        return result

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
    comparison = RunDirectory(folder).comparison()
    for line in comparison["differences"]["in_words"]:
        print_out(line)
    if is_sweep:
        print_out("These accuracies are on test data: the best of many settings is overestimated.")
    page = output.write_report(folder)
    print_out(f"Run directories and comparison.json: {folder}")
    if as_json:
        files = {"folder": str(folder), "report": None if page is None else str(page)}
        print_json(files | comparison)
