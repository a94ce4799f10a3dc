"""`fedclade diagnose`: the kind of heterogeneity of the clients, and the method that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedclade.cli.completion import methods as method_names
from fedclade.cli.console import new_folder, out_console, print_out
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    EpochsOption,
    ExperimentArgument,
    ImportOption,
    JsonOption,
    LrOption,
    OutOption,
    SetOption,
    comma_separated,
    import_all,
    with_shortcuts,
)
from fedclade.cli.progress import diagnosing, reading
from fedclade.errors import InvalidInputError

if TYPE_CHECKING:
    from fedclade.analysis.diagnose.api import Diagnosis
    from fedclade.analysis.diagnose.hypothesis_tests import Difference

FILE = "diagnosis.json"


def diagnose(
    experiment: ExperimentArgument,
    sets: SetOption = None,
    lr: LrOption = None,
    epochs: EpochsOption = None,
    probe_rounds: Annotated[
        int, typer.Option(min=0, help="Most rounds of a method's pilot run; 0 for no pilot runs.")
    ] = 60,
    also: Annotated[
        str | None,
        typer.Option(
            help="Further methods for the pilot runs, comma-separated, such as ditto,fedrep.",
            autocompletion=method_names,
        ),
    ] = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    as_json: JsonOption = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
) -> None:
    """Analyze how clients differ and recommend a method.

    Also finds the groups of clients. Does not use test data.
    """
    settings = with_shortcuts(sets, lr=lr, epochs=epochs)
    import_all(imports)
    from fedclade.analysis.diagnose.api import diagnose_run
    from fedclade.io.atomic import write_text
    from fedclade.training import experiment_file

    tables = experiment_file.apply(experiment_file.read(experiment), settings)
    # The diagnosis recommends the method, so the file need not name one.
    chosen = experiment_file.experiment({"method": {"name": "fedavg"}} | tables)
    folder = out or new_folder(f"{Path(experiment).stem}-diagnosis")
    if (folder / FILE).exists():
        raise InvalidInputError(
            f"--out {folder}: the folder already contains a diagnosis. Choose another folder.",
            "--out",
        )
    with reading(out_console, quiet=False) as progress:
        clients = chosen.clients(data_root, progress)
    run = chosen.to_run(clients, device)
    with diagnosing(out_console) as on_progress:
        diagnosis = diagnose_run(run, probe_rounds, on_progress, comma_separated(also))
    folder.mkdir(parents=True, exist_ok=True)
    # The page of the diagnosis shows commands for this experiment.
    content = diagnosis.to_json() | {"experiment": str(experiment)}
    text = json.dumps(content, indent=2) + "\n"
    write_text(folder / FILE, text)
    _show(diagnosis)
    print_out(f"Diagnosis: {folder / FILE}")
    if as_json:
        typer.echo(text, nl=False)


def _show(diagnosis: Diagnosis) -> None:
    from fedclade.analysis.diagnose.diagnosis_text import DIFFERENCES, by_chance
    from fedclade.analysis.diagnose.recommendation import label

    for sentence in diagnosis.sentences():
        print_out(sentence)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "what differs between clients",
        "share of the variance",
        "times chance",
        "by chance alone",
    ):
        table.add_column(heading, justify="left" if heading.startswith("what") else "right")
    for name, words in DIFFERENCES.items():
        difference: Difference = getattr(diagnosis.evidence, name)
        table.add_row(
            words,
            f"{100 * difference.share:.1f} %",
            f"{difference.times_chance:.1f}",
            by_chance(name, difference.p),
        )
    out_console.print(table)
    _show_members(diagnosis)
    if not diagnosis.probes:
        return
    score = diagnosis.about["score"]
    probes = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "method",
        score,
        "gain over FedAvg",
        "models",
        "rounds",
        "seeds",
    ):
        probes.add_column(heading, justify="left" if heading == "method" else "right")
    for number, probe in enumerate(diagnosis.probes):
        gain = f"{probe.gain:+.1f} ± {probe.gain_stderr:.1f}" if number else "–"
        probes.add_row(
            label(probe.method, probe.layer),
            f"{probe.score:.1f} %" if score == "accuracy" else f"{probe.score:.3f}",
            gain,
            str(probe.clusters),
            str(probe.rounds),
            str(probe.seeds),
        )
    out_console.print(probes)
    if diagnosis.about["not_measured"]:
        print_out(f"Not measured: {', '.join(diagnosis.about['not_measured'])}.")


def _show_members(diagnosis: Diagnosis) -> None:
    """The groups with their clients and classes by name, if these have names."""
    if not diagnosis.members:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = list(diagnosis.members[0])
    for name in columns:
        table.add_column(name, justify="right" if name in ("group", "clients") else "left")
    for row in diagnosis.members:
        table.add_row(*(escape(str(row[name])) for name in columns))
    out_console.print(table)
