"""`fedclade diagnose`: which heterogeneity do these clients have, and which method fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedclade.analysis.diagnose.api import PROBE_ROUNDS, Diagnosis, diagnose_run
from fedclade.analysis.diagnose.heterogeneity_tests import DRAWS, Difference
from fedclade.cli.options import DataRootOption, DeviceOption, OutOption, new_folder, out_console
from fedclade.cli.run import ExperimentArgument, ImportOption, SetOption, import_all
from fedclade.errors import InvalidInputError
from fedclade.io.atomic import write_text
from fedclade.training import config

FILE = "diagnosis.json"
_ROWS = {
    "labels": "labels, p(y)",
    "inputs": "inputs, p(x)",
    "given_labels": "inputs of one label, p(x | y)",
}


def diagnose(
    experiment: ExperimentArgument,
    sets: SetOption = None,
    probe_rounds: Annotated[
        int, typer.Option(min=0, help="Rounds for which methods are tried; 0: none.")
    ] = PROBE_ROUNDS,
    device: DeviceOption = "auto",
    out: OutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
) -> None:
    """Say how the clients of an experiment differ, which groups there are, and which method fits.
    Test data are not looked at.
    """
    import_all(imports)
    tables = config.apply(config.read(experiment), sets or [])
    chosen = config.experiment(
        {"method": {"name": "fedavg"}} | tables
    )  # which method is what the diagnosis is asked for
    folder = out or new_folder(f"{Path(experiment).stem}-diagnosis")
    if (folder / FILE).exists():
        raise InvalidInputError(
            f"--out {folder}: it holds a diagnosis already; give another folder."
        )
    run = chosen.to_run(chosen.clients(data_root), device)
    found = diagnose_run(run, probe_rounds)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found.to_json(), indent=2) + "\n"
    write_text(folder / FILE, text)
    if as_json:
        typer.echo(text, nl=False)
        return
    _show(found)
    out_console.print(f"Diagnosis: {folder / FILE}", markup=False, soft_wrap=True)


def _show(found: Diagnosis) -> None:
    for sentence in found.sentences():
        out_console.print(sentence, markup=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "what differs between clients",
        "share of the variance",
        "times chance",
        "by chance alone",
    ):
        table.add_column(heading, justify="left" if heading.startswith("what") else "right")
    for name, label in _ROWS.items():
        difference: Difference = getattr(found.evidence, name)
        # Of labels no less can be told than one in as many tables as were drawn.
        likely = (
            f"{100 / DRAWS:.1f} % at most"
            if name == "labels" and difference.p <= 1 / DRAWS
            else f"{100 * difference.p:.1f} %"
        )
        likely = "less than 0.1 %" if difference.p < 0.001 else likely
        table.add_row(
            label, f"{100 * difference.share:.1f} %", f"{difference.times_chance:.1f}", likely
        )
    out_console.print(table)
    if not found.probes:
        return
    score = found.about["score"]
    probes = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "method",
        f"{score} after {found.about['probe_rounds']} rounds",
        "gain over FedAvg",
        "models",
    ):
        probes.add_column(heading, justify="left" if heading == "method" else "right")
    for probe in found.probes:
        gain = f"{probe.gain:+.1f} ± {probe.gain_stderr:.1f}" if probe.method != "fedavg" else "–"
        probes.add_row(
            probe.method,
            f"{probe.score:.1f} %" if score == "accuracy" else f"{probe.score:.3f}",
            gain,
            str(probe.clusters),
        )
    out_console.print(probes)
