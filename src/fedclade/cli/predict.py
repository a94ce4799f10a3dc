"""`fedclade predict`: predictions for new rows by the models of a run."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.console import print_err
from fedclade.cli.options import ImportOption, import_all


def predict(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS",
            help="CSV or Parquet with the run's columns, images or a folder of them, or .npz with"
            " the array x.",
        ),
    ],
    client: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Client of the rows (default: the column of clients in ROWS)."
        ),
    ] = None,
    labeled: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For a client that was not in the run: a few of its rows with targets; of images"
            " a folder for each class.",
        ),
    ] = None,
    probability: Annotated[
        bool, typer.Option("--probability", help="Also write the probability of each class.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV file to write (default: stdout).")
    ] = None,
    imports: ImportOption = None,
) -> None:
    """Predict new rows by the model of a client.

    Writes CSV with one line for each row, in the order of the rows.
    """
    from fedclade.analysis.predict_file import predict_file
    from fedclade.io.atomic import write_text
    from fedclade.training.result import load

    import_all(imports)
    result = load(folder)
    predictions = predict_file(result, rows, client, labeled, probability)
    if predictions.closest_client is not None:
        closest = predictions.closest_client
        print_err(f"the new client joins group {result.cluster_of(closest)}, as client {closest}.")
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(predictions.columns)
    writer.writerows(zip(*predictions.columns.values(), strict=True))
    if out is None:
        typer.echo(text.getvalue(), nl=False)
    else:
        write_text(out, text.getvalue())
