"""`fedclade export`: write the models of a run for use elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedclade.cli.console import print_err, print_out
from fedclade.cli.options import ImportOption, QuietOption, comma_separated, import_all


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the models (default: export in DIR).")
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="safetensors, onnx, or both, comma-separated.")
    ] = "safetensors,onnx",
    quiet: QuietOption = False,
    imports: ImportOption = None,
) -> None:
    """Write the models of a run as safetensors and ONNX.

    Each group gets one model and a model card with its clients, its data and its accuracy. A model
    that ONNX cannot express is written as safetensors only.
    """
    from fedclade.analysis.export import export as export_models

    import_all(imports)

    def on_group(card: dict[str, Any]) -> None:
        if quiet:
            return
        accuracy = card["test"].get("accuracy")
        score = f", accuracy {accuracy['mean']:.2f} %" if accuracy else ""
        files = ", ".join(card["files"].values())
        count = len(card["clients"])
        clients = "1 client" if count == 1 else f"{count:,} clients"
        print_out(f"{card['name']}: {clients}{score}  ({files})")

    exported = export_models(folder, out, comma_separated(formats), on_group=on_group)
    for problem in dict.fromkeys(exported.problems):
        print_err(problem)
    if not quiet:
        print_out(f"Models and cards: {exported.folder}")
