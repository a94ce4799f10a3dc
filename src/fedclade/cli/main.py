"""The command line."""

from __future__ import annotations

import inspect
import json
import warnings
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from fedclade import __version__
from fedclade.cli.data import data_app
from fedclade.cli.diagnose import diagnose
from fedclade.cli.export import export
from fedclade.cli.flower import flower_app
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    QuietOption,
    error_console,
    out_console,
    print_err,
    print_name_table,
)
from fedclade.cli.report import report
from fedclade.cli.reproduce import reproduce
from fedclade.cli.run import ImportOption, compare, import_all, run
from fedclade.data.catalog import CATALOGUE
from fedclade.engines.oom import is_out_of_memory
from fedclade.errors import FedcladeError, InvalidInputError, nearest
from fedclade.methods.base import GROUPS, NEEDS, SYMBOLS, Method, hyperparameters
from fedclade.registry import REGISTRY
from fedclade.reproduce.spec import tables
from fedclade.training import config, encoder_pretraining

app = typer.Typer(
    name="fedclade",
    help=(
        "Clustered federated learning: find which clients belong together and train one model per"
        " group."
    ),
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Entry point: what a person can mend is one line on stderr and exit code 2, never a
    traceback.
    """
    warnings.showwarning = _show_warning
    try:
        app(standalone_mode=False)
    except FedcladeError as error:
        _fail(str(error))
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except OSError as error:
        _fail(
            f"{error.filename or 'disk'}: it cannot be read or written ({error.strerror or error})."
        )
    except (KeyboardInterrupt, typer.Abort):
        print_err("stopped.")
        raise SystemExit(130) from None
    except Exception as error:
        if is_out_of_memory(error):
            reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
            _fail(
                f"memory: there is none left ({reason}). Try a smaller engine.chunk, model or"
                " cohort; a run goes on with --resume."
            )
        # typer passes click's own complaints about options through; anything else is a defect of
        # ours and keeps its traceback.
        if hasattr(error, "format_message"):
            # Two libraries add the same suggestion.
            message, *suggestions = error.format_message().split(" Did you mean ")
            _fail(" Did you mean ".join([message, *suggestions[:1]]))
        raise


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """What fedclade itself warns of is for the person at the terminal: one line, without the line
    of code that it comes from.
    """
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        print_err(str(message))
    else:
        error_console.print(
            warnings.formatwarning(message, category, filename, lineno, line),
            markup=False,
            soft_wrap=True,
        )


def _fail(message: str) -> NoReturn:
    print_err(" ".join(message.split()))
    raise SystemExit(2)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        out_console.print(f"fedclade {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(run)
app.command()(compare)


@app.command("list")
def list_(
    what: Annotated[
        str, typer.Argument(metavar="methods|datasets|partitions|models|presets|tables")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    imports: ImportOption = None,
) -> None:
    """What there is to choose from."""
    import_all(imports)
    known = {
        f"{kind}s": {name: _first_line(thing) for name, thing in things.items()}
        for kind, things in REGISTRY.items()
    }
    known["presets"] = config.presets()
    known["datasets"] |= {name: each.title for name, each in CATALOGUE.items()}
    known["tables"] = {name: table.title for name, table in tables().items()}
    if what not in known:
        raise InvalidInputError(f"list {what}: unknown.{nearest(what, known)}")
    if as_json:
        typer.echo(
            json.dumps(
                [{"name": name, "about": about} for name, about in known[what].items()], indent=2
            )
        )
        return
    print_name_table(known[what])


@app.command()
def describe(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A method, partition, model or data set (fedclade list …)."
        ),
    ],
    imports: ImportOption = None,
) -> None:
    """What something does and its parameters; of a method also what leaves a client, and the
    paper.
    """
    import_all(imports)
    kind = next((kind for kind, things in REGISTRY.items() if name in things), None)
    if kind is None and name in CATALOGUE:
        out_console.print(CATALOGUE[name].description(), markup=False, soft_wrap=True)
        return
    if kind is None:
        every = {known for things in REGISTRY.values() for known in things} | CATALOGUE.keys()
        raise InvalidInputError(
            f"describe '{name}': there is no method, partition, model or data set of that"
            f" name.{nearest(name, every)}"
        )
    chosen = REGISTRY[kind][name]
    text = inspect.getdoc(chosen) or ""
    if kind == "method":
        text = f"{chosen.title}\n\n{text}"
    if kind != "dataset":
        settable = (
            hyperparameters(chosen)
            if kind == "method"
            else fields(chosen)
            if is_dataclass(chosen)
            else ()
        )
        parameters = (
            "\n".join(f"  {field.name} = {_default(field)}" for field in settable)
            or "  none of its own"
        )
        text += (
            f"\n\nParameters ([{kind}] in an experiment file, {chosen.__name__}(…) in"
            f" Python):\n{parameters}"
        )
    out_console.print(text, markup=False, soft_wrap=True)
    if kind == "method":
        out_console.print(_declared(chosen), markup=False)


app.command()(diagnose)
app.command()(report)
app.command()(export)
app.command()(reproduce)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


@app.command()
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
            "--out", metavar="FILE", help="Where the encoder goes, for example encoder.safetensors."
        ),
    ],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    code: Annotated[
        int, typer.Option(min=1, help="Length e of the embedding.")
    ] = encoder_pretraining.CODE,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the first weights and the order of the samples.")
    ] = 0,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
) -> None:
    """Train an encoder for FLT on public data and write it to a file: --set method.encoder=FILE."""

    def on_epoch(epoch: int, loss: float) -> None:
        if not quiet:
            out_console.print(f"epoch {epoch}/{epochs}  loss {loss:.5f}", markup=False)

    encoder_pretraining.pretrain(
        data,
        out,
        epochs=epochs,
        code=code,
        seed=seed,
        root=data_root,
        on_epoch=on_epoch,
        device=device,
    )
    out_console.print(f"Encoder: {out}", markup=False, soft_wrap=True)


def _declared(method: type[Method]) -> str:
    """What a method says about itself beside its docstring."""
    besides = f"; {method.extra_traffic}" if method.extra_traffic else ""
    return (
        f"\nWhat leaves a client: {method.client_disclosure}.\nThe server needs:"
        f" {NEEDS[method.server_visibility]}.\nGroups: it {GROUPS[method.groups]}.\nBytes of a"
        f" client in a round: up {method.upload_cost}, down {method.download_cost}{besides}."
        f" {SYMBOLS}\nPaper: {method.paper}."
    )


def _default(field: Any) -> str:
    return "required" if field.default is MISSING else repr(field.default)


def _first_line(thing: Any) -> str:
    title = getattr(thing, "title", None)
    return title or next(iter((thing.__doc__ or "").strip().splitlines()), "").rstrip(".")


if __name__ == "__main__":
    main()
