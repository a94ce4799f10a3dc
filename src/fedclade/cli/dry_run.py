"""`--dry-run`: the runs of a command, their traffic and their minutes, without writing a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedclade.cli.console import out_console, print_json, print_out
from fedclade.cli.progress import reading
from fedclade.cli.run_monitoring import RunOutput

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from fedclade.analysis.cost_estimate import CostEstimate
    from fedclade.data.federated_dataset import Clients
    from fedclade.training.experiment_file import Experiment


def loader(output: RunOutput, data_root: str | None) -> Callable[[Experiment], Clients]:
    """A function that reads the clients of an experiment, and keeps those of the last one."""
    known: dict[object, Clients] = {}  # of the last run: the next has mostly the same

    def clients_of(experiment: Experiment) -> Clients:
        key = experiment.federation_key
        if key not in known:
            known.clear()  # first: two federations may not fit into memory
            with reading(out_console, output.quiet) as progress:
                known[key] = experiment.clients(data_root, progress)
        return known[key]

    return clients_of


def show_plan(
    experiments: Sequence[Experiment],
    folder: Path,
    resume: bool,
    output: RunOutput,
    device: str,
    data_root: str | None,
    as_json: bool,
) -> None:
    """Show what would run. Of each setting the first rounds of one seed are run in memory.

    Args:
        experiments: the runs.
        folder: the folder that they would be written to.
        resume: whether the folder may hold a run already.
        output: what is shown.
        device: "auto", "cpu" or "cuda".
        data_root: the folder to search first for data sets.
        as_json: whether to print the plan as JSON, too.
    """
    from fedclade.analysis.cost_estimate import estimate_cost
    from fedclade.io.run_dir import RunDirectory

    RunDirectory.open(folder, resume)
    clients_of = loader(output, data_root)
    costs: dict[str, CostEstimate] = {}
    seeds: dict[str, list[int]] = {}
    for experiment in experiments:
        seeds.setdefault(experiment.title, []).append(experiment.run.seed)
        if experiment.title not in costs:
            run = experiment.to_run(clients_of(experiment), device)
            costs[experiment.title] = estimate_cost(run)
    _show(costs, seeds, folder)
    if as_json:
        runs = [
            {"title": title, "seeds": seeds[title], **asdict(cost)} for title, cost in costs.items()
        ]
        print_json({"dry_run": True, "folder": str(folder), "runs": runs})


def _show(costs: dict[str, CostEstimate], seeds: dict[str, list[int]], folder: Path) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=len(costs) > 1)
    total_up = sum(cost.bytes_up * len(seeds[title]) for title, cost in costs.items())
    total_down = sum(cost.bytes_down * len(seeds[title]) for title, cost in costs.items())
    seconds = sum(cost.seconds * len(seeds[title]) for title, cost in costs.items())
    for heading, footer in (
        ("run", "all"),
        ("seeds", ""),
        ("clients", ""),
        ("in a round", ""),
        ("rounds", ""),
        ("MB up", _megabytes(total_up)),
        ("MB down", _megabytes(total_down)),
        ("minutes", _minutes(seconds)),
    ):
        justify: JustifyMethod = "left" if heading == "run" else "right"
        table.add_column(heading, footer=footer, justify=justify, no_wrap=True)
    for title, cost in costs.items():
        count = len(seeds[title])
        table.add_row(
            title,
            ", ".join(map(str, seeds[title])) if count <= 5 else f"{count} seeds",
            f"{cost.clients:,}",
            f"{cost.cohort:,}",
            f"{cost.rounds:,}",
            _megabytes(cost.bytes_up * count),
            _megabytes(cost.bytes_down * count),
            _minutes(cost.seconds * count),
        )
    out_console.print(table)
    timed = sum(cost.timed_seconds for cost in costs.values())
    rounds = max(cost.timed_rounds for cost in costs.values())
    print_out(
        f"Extrapolated from the first {rounds} rounds of each row, run now on this machine in"
        f" {timed:.1f} s. Of a method that still changes its groups, the costs are rough."
    )
    print_out(f"Nothing was written. The folder would be {folder}.")


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:,.1f}" if seconds >= 6 else "under 0.1"
