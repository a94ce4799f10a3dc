"""`fedclade export`: the models of a run, to be used elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedclade.analysis.export import FORMATS
from fedclade.analysis.export import export as export_models
from fedclade.cli.options import OutOption, QuietOption, comma_separated, print_err
from fedclade.cli.run import ImportOption, import_all
from fedclade.cli.tables import print_out


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a run that has ended.")
    ],
    out: OutOption = None,
    formats: Annotated[
        str, typer.Option("--format", help="safetensors, onnx, or both with a comma between.")
    ] = ",".join(FORMATS),
    quiet: QuietOption = False,
    imports: ImportOption = None,
) -> None:
    """Write each group's model, as safetensors and as ONNX where it can be, with a card: which
    clients, which data, how good.
    """
    import_all(imports)

    def on_group(card: dict[str, Any]) -> None:
        if not quiet:
            said = (
                f", accuracy {accuracy['mean']:.2f} %"
                if (accuracy := card["test"].get("accuracy"))
                else ""
            )
            print_out(
                f"{card['name']}: {len(card['clients']):,} clients{said} "
                f" ({', '.join(card['files'].values())})"
            )

    done = export_models(folder, out, comma_separated(formats), on_group=on_group)
    for problem in dict.fromkeys(done.problems):
        print_err(problem)
    if not quiet:
        print_out(f"Models and cards: {done.folder}")
