"""The command line: the commands, and how their errors and exit codes reach the shell."""

from __future__ import annotations

import difflib
import logging
import warnings
from typing import Annotated, Any, NoReturn, TextIO

import typer
import typer.core

from fedclade import __version__
from fedclade.cli.check_method import check_method
from fedclade.cli.compare import compare
from fedclade.cli.console import error_console, log_lines, out_console, print_err
from fedclade.cli.data import data_app
from fedclade.cli.describe import describe
from fedclade.cli.diagnose import diagnose
from fedclade.cli.doctor import doctor
from fedclade.cli.export import export
from fedclade.cli.flower import flower_app
from fedclade.cli.index import read_index
from fedclade.cli.init import init
from fedclade.cli.list import list_
from fedclade.cli.predict import predict
from fedclade.cli.pretrain import pretrain
from fedclade.cli.report import report
from fedclade.cli.reproduce import reproduce
from fedclade.cli.run import run
from fedclade.cli.track import track
from fedclade.errors import FedcladeError, FedcladeWarning

# Plain help: drawing boxes with rich doubles the time of --help. rich_markup_mode=None is not
# enough: typer 0.20 escapes brackets for rich in every mode.
typer.core.HAS_RICH = False
_INTERRUPTED = 130  # the exit code after Ctrl-C
app = typer.Typer(
    name="fedclade",
    help=(
        "Clustered federated learning: find which clients belong together and train one model per"
        " group."
    ),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        out_console.print(f"fedclade {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(init)
app.command()(run)
app.command()(compare)
# A short help is for `fedclade --help` on 80 columns, where a longer first sentence is cut off.
app.command("list", short_help="List methods, data sets, presets, settings and more.")(list_)
app.command()(describe)
app.command()(diagnose)
app.command()(report)
app.command()(predict)
app.command()(export)
app.command(short_help="Write finished runs to MLflow.")(track)
app.command()(reproduce)
app.command(short_help="Train an encoder for FLT on public data.")(pretrain)
app.command("check-method")(check_method)
app.command(short_help="Show versions, device and data, and what is missing.")(doctor)
app.add_typer(data_app, name="data")
app.add_typer(
    flower_app, name="flower", short_help="Run a Flower federation here; write Flower apps."
)


def main() -> None:
    """Entry point. An error that the user can correct gives one line on stderr and exit code 2,
    without a traceback.
    """
    warnings.showwarning = _show_warning
    logging.getLogger("fedclade").addHandler(log_lines)
    try:
        # click returns the code of a typer.Exit; some versions raise the exception instead.
        code = app(prog_name="fedclade", standalone_mode=False)
        if code == _INTERRUPTED:  # typer turns KeyboardInterrupt into an exit
            print_err("stopped.")
    except typer.Exit as stop:
        code = stop.exit_code
    except FedcladeError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'disk'}: cannot be read or written ({error.strerror or error}).")
    except (KeyboardInterrupt, typer.Abort):
        print_err("stopped.")
        raise SystemExit(_INTERRUPTED) from None
    except Exception as error:
        # An error of click about an option; typer does not export the class.
        if hasattr(error, "format_message"):
            _fail(_about_option(error))
        from fedclade.engines.oom import is_out_of_memory

        if is_out_of_memory(error):
            reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
            _fail(
                f"memory: out of memory ({reason}). Try a smaller engine.chunk, model or"
                " cohort; continue a run with --resume."
            )
        raise  # a defect of fedclade keeps its traceback
    if code:
        raise SystemExit(code)


def _about_option(error: Any) -> str:
    """The message of click about an option. Instead of an unknown option it suggests the one that
    is closest to it, or the setting of that name.
    """
    context, unknown = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if unknown is None or context is None:
        # Both click and typer add the suggestion.
        message, *suggestions = error.format_message().split(" Did you mean ")
        return " Did you mean ".join([message, *suggestions[:1]])
    options = [option for entry in context.command.params for option in entry.opts]
    known = {option: option for option in [*options, "--help"] if option.startswith("--")}
    if "--set" in known:
        # Of settings with the same last part, that of the run or of local training is meant.
        for key in sorted(read_index()["settings"], key=lambda key: key[:3] not in ("run", "loc")):
            option = f"--{key.rpartition('.')[2].replace('_', '-')}"
            known.setdefault(option, f"--set {key}=…")
    close = difflib.get_close_matches(unknown.replace("_", "-"), known, n=1, cutoff=0.75)
    hint = f"Did you mean '{known[close[0]]}'?" if close else f"See {context.command_path} --help."
    return f"No such option '{unknown}'. {hint}"


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning of fedclade as one line, without the line of code that it comes from."""
    if isinstance(message, FedcladeWarning):
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
