"""`fedclade pretrain`: train FLT's encoder on public data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.console import print_out
from fedclade.cli.options import DataRootOption, DeviceOption, QuietOption


def pretrain(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="NAME",
            help="A data set that no client holds: a name or an .npz file.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="FILE", help="File for the encoder, such as encoder.safetensors."
        ),
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    code: Annotated[int, typer.Option(min=1, help="Length e of the embedding.")] = 128,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed for initial weights and sample order.")
    ] = 0,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
) -> None:
    """Train an encoder for FLT on public data and write it to a file.

    Use it with --set method.encoder=FILE.
    """
    from fedclade.training import encoders

    def on_epoch(epoch: int, loss: float) -> None:
        if not quiet:
            print_out(f"epoch {epoch}/{epochs}  loss {loss:.5f}")

    encoders.pretrain(
        data,
        out,
        epochs=epochs,
        code=code,
        seed=seed,
        root=data_root,
        on_epoch=on_epoch,
        device=device,
    )
    print_out(f"Encoder: {out}")
