"""`fedclade run`: one experiment, or a sweep over several values of a setting."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from fedclade.cli.compare import run_all
from fedclade.cli.console import out_console, print_err, print_json, print_out
from fedclade.cli.dry_run import show_plan
from fedclade.cli.options import (
    ENGINES,
    DataRootOption,
    DeviceOption,
    DryRunOption,
    EngineOption,
    EpochsOption,
    ExperimentArgument,
    ImportOption,
    JsonOption,
    LiveOption,
    LrOption,
    MethodOption,
    NodesOption,
    OutOption,
    PortOption,
    ProfileOption,
    QuietOption,
    ReportOption,
    ResumeOption,
    RoundsOption,
    SetOption,
    ShardsOption,
    TrackOption,
    import_all,
    with_shortcuts,
)
from fedclade.cli.progress import reading
from fedclade.cli.result_tables import show_result
from fedclade.cli.run_monitoring import RunOutput, output_folder, resumable_errors
from fedclade.errors import InvalidInputError

_DEFAULT_NODES = 4


def run(
    experiment: ExperimentArgument,
    sets: SetOption = None,
    method: MethodOption = None,
    lr: LrOption = None,
    rounds: RoundsOption = None,
    epochs: EpochsOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
    profile: ProfileOption = False,
    engine: EngineOption = "simulator",
    nodes: NodesOption = None,
    shards: ShardsOption = None,
    live: LiveOption = False,
    port: PortOption = None,
    track: TrackOption = None,
    report: ReportOption = True,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run one experiment and write its run directory.

    If a --set has several values, run every combination and show a table.
    """
    output = RunOutput(quiet, live, port, track, report)
    settings = with_shortcuts(sets, method=method, lr=lr, rounds=rounds, epochs=epochs)
    import_all(imports)
    if engine not in ENGINES:
        raise InvalidInputError(f"--engine {engine}: must be {' or '.join(ENGINES)}.", "--engine")
    if dry_run and engine != "simulator":
        raise InvalidInputError("--dry-run: works with --engine simulator only.", "--dry-run")
    if nodes is not None and engine != "flower":
        raise InvalidInputError(f"--nodes {nodes}: needs --engine flower.", "--nodes")
    if shards is not None and engine != "ray":
        raise InvalidInputError(f"--shards {shards}: needs --engine ray.", "--shards")
    if _is_launched_by_torchrun():
        if engine != "simulator":
            raise InvalidInputError(
                f"--engine {engine}: torchrun starts the workers itself; leave it out.", "--engine"
            )
        engine = "torchrun"
        if os.environ["RANK"] != "0":
            from fedclade.integrations.sharded_run import serve_rank

            serve_rank()
            return
    from fedclade.analysis import comparison_runs, sweep_grid
    from fedclade.io.run_dir import RunDirectory
    from fedclade.training import experiment_file

    tables = experiment_file.read(experiment)
    if sweep_grid.is_sweep(settings):
        if engine != "simulator" or profile:
            option = "--profile" if profile else "--engine"
            raise InvalidInputError(
                f"{option}{'' if profile else f' {engine}'}: works with one run only. Give each"
                " --set one value.",
                option,
            )
        folder = output_folder(out, resume, "sweep", f"{Path(experiment).stem}-sweep")
        planned = comparison_runs.runs(sweep_grid.expand(tables, settings), 1)
        run_all(planned, folder, resume, output, device, data_root, dry_run, as_json)
        return
    settings = [*settings, *([] if shards is None else [f"engine.shards={shards}"])]
    tables = experiment_file.apply(tables, settings)
    chosen = experiment_file.experiment(tables)
    folder = output_folder(out, resume, "run", f"{Path(experiment).stem}-{chosen.method.name}")
    if dry_run:
        show_plan([chosen], folder, resume, output, device, data_root, as_json)
        return
    if resume and not RunDirectory(folder).holds_run():
        print_err(f"{folder} contains no run yet; starting a new one.")
    RunDirectory.open(folder, resume)
    with resumable_errors(folder), output.live_page(folder):
        with reading(out_console, quiet) as progress:
            clients = chosen.clients(data_root, progress)
        if clients.probe is not None and not quiet:
            print_out(clients.sizes_in_words)
        training_run = replace(chosen.to_run(clients, device), profile=profile)
        with output.on_round(chosen.method.name, chosen.run.rounds, folder) as on_round:
            if engine == "flower":
                result = _flower_simulation().simulate(
                    tables,
                    clients,
                    folder,
                    nodes=nodes or min(_DEFAULT_NODES, len(clients)),
                    resume=resume,
                    on_round=on_round,
                    data_root=data_root,
                    imports=imports or [],
                )
            elif engine in ("ray", "torchrun"):
                from fedclade.integrations.sharded_run import run_sharded
                from fedclade.training.shard_building import ExperimentSource

                result, times = run_sharded(
                    "ray" if engine == "ray" else "torchrun",
                    training_run,
                    ExperimentSource.of(tables, data_root, imports or []),
                    folder,
                    lambda sharded: sharded.run(folder, resume, on_round),
                )
                if not quiet:
                    print_out(times.in_words)
            else:
                result = training_run.run(folder, resume, on_round)
    if not quiet:
        show_result(result)
    if result.already_finished:
        print_err(f"the run in {folder} is already finished; nothing to do.")
    page = folder / "report.html" if result.already_finished else output.write_report(folder)
    if not quiet:
        print_out(f"Run directory: {folder}")
    if result.profile is not None:
        out_console.print(str(result.profile), markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "report": str(page) if page is not None and page.exists() else None,
                "summary": result.summary,
                "groups": result.groups,
            }
        )


def _is_launched_by_torchrun() -> bool:
    """Whether torchrun started this process together with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _flower_simulation() -> ModuleType:
    try:
        from fedclade.integrations.flower import simulation
    except ImportError as error:
        raise InvalidInputError(
            f"--engine flower: Flower is not installed ({error}). Install it with: pip install"
            " 'fedclade[flower]'",
            "--engine",
        ) from error
    return simulation
