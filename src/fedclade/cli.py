"""The command line."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedclade import __version__
from fedclade.cli_data import data_app
from fedclade.cli_flower import flower_app
from fedclade.cli_reproduce import reproduce
from fedclade.data.catalogue import CATALOGUE
from fedclade.errors import FedcladeError, InvalidInput, nearest
from fedclade.experiment import compare as comparison
from fedclade.experiment import config, encoders
from fedclade.experiment.progress import display
from fedclade.experiment.result import Result
from fedclade.experiment.store import RunStore
from fedclade.methods.base import GROUPS, NEEDS, SYMBOLS, Method, hyperparameters
from fedclade.registry import REGISTRY, import_file
from fedclade.reproduce.table import tables
from fedclade.terminal import (
    DataRootOption,
    DeviceOption,
    OutOption,
    QuietOption,
    ResumeOption,
    names,
    new_folder,
    out_console,
    show_names,
    tell,
)

app = typer.Typer(
    name="fedclade",
    help="Clustered federated learning: find which clients belong together and train one model per group.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
ExperimentArgument = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="A TOML file, or a preset (fedclade list presets).")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change one setting; may be repeated.")]
ProfileOption = Annotated[bool, typer.Option("--profile", help="Show where the time went.")]
EngineOption = Annotated[str, typer.Option("--engine", metavar="simulator|flower", help="Where clients run; flower: Flower's simulation.")]
SitesOption = Annotated[int | None, typer.Option("--sites", min=1, help="With --engine flower: nodes that share the clients (default 4).")]
ImportOption = Annotated[list[str] | None, typer.Option("--import", metavar="FILE", help="Python file that registers your own things.")]


def main() -> None:
    """Entry point: what a person can mend is one line on stderr and exit code 2, never a traceback."""
    try:
        app(standalone_mode=False)
    except FedcladeError as error:
        _fail(str(error))
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from None
    except OSError as error:
        _fail(f"{error.filename or 'disk'}: it cannot be read or written ({error.strerror or error}).")
    except (KeyboardInterrupt, typer.Abort):
        tell("stopped.")
        raise SystemExit(130) from None
    except Exception as error:
        # typer passes click's own complaints about options through; anything else is a defect of ours and keeps its traceback.
        if hasattr(error, "format_message"):
            # Two libraries add the same suggestion.
            message, *suggestions = error.format_message().split(" Did you mean ")
            _fail(" Did you mean ".join([message, *suggestions[:1]]))
        raise


def _fail(message: str) -> NoReturn:
    tell(" ".join(message.split()))
    raise SystemExit(2)


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        out_console.print(f"fedclade {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    experiment: ExperimentArgument,
    sets: SetOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
    profile: ProfileOption = False,
    engine: EngineOption = "simulator",
    sites: SitesOption = None,
) -> None:
    """Run one experiment and write its run directory."""
    _import_all(imports)
    if engine not in ("simulator", "flower"):
        raise InvalidInput(f"--engine {engine}: must be simulator or flower.")
    if sites is not None and engine != "flower":
        raise InvalidInput("--sites: only --engine flower has any.")
    told = config.apply(config.read(experiment), sets or [])
    chosen = config.experiment(told)
    folder = out or new_folder(f"{Path(experiment).stem}-{chosen.method.name}")
    if resume and out is None:
        raise InvalidInput("--resume: say which run with --out DIR.")
    if resume and not RunStore(folder).holds_run():
        tell(f"there is no run in {folder} yet; it is started anew.")
    RunStore.open(folder, resume)
    clients = chosen.clients(data_root)
    prepared = replace(chosen.prepared(clients, device), profile=profile)
    try:
        with display(chosen.method.name, chosen.run.rounds, out_console, quiet) as shown:
            if engine == "flower":
                given = {"resume": resume, "on_round": shown.row, "data_root": data_root, "imports": imports or []}
                result = _flower().simulate(told, clients, folder, sites=sites or min(4, len(clients)), **given)
            else:
                result = prepared.execute(folder, resume, shown.row)
    except KeyboardInterrupt:
        _interrupted(folder)
    if result.already_finished:
        tell(f"the run in {folder} has ended already; nothing to do.")
    if not quiet:
        _show(result)
        out_console.print(f"Run directory: {folder}", markup=False, soft_wrap=True)
    if result.profile is not None:
        out_console.print(str(result.profile), markup=False, highlight=False, soft_wrap=True)


@app.command()
def compare(
    experiment: ExperimentArgument,
    methods: Annotated[str, typer.Option(help="Names with commas between, for example fedavg,local.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: the experiment's own and those that follow it.")] = 1,
    sets: SetOption = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
    imports: ImportOption = None,
) -> None:
    """Run several methods on the same clients and print one table. A setting of one method: --set METHOD.KEY=VALUE."""
    _import_all(imports)
    chosen = comparison.plan(config.read(experiment), names(methods), sets or [])
    if resume and out is None:
        raise InvalidInput("--resume: say which comparison with --out DIR.")
    folder = out or new_folder(f"{Path(experiment).stem}-compare")

    def one(run: comparison.Planned) -> Result:
        with display(run.label, run.experiment.run.rounds, out_console, quiet) as shown:
            return run.prepared(device, data_root).execute(folder / run.label, resume, shown.row)

    try:
        rows = comparison.execute(comparison.runs(chosen, seeds), folder, resume, one)
    except KeyboardInterrupt:
        _interrupted(folder)
    _print_comparison(rows)
    out_console.print(f"Run directories and comparison.json: {folder}", markup=False, soft_wrap=True)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="methods|datasets|partitions|models|presets|tables")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    imports: ImportOption = None,
) -> None:
    """What there is to choose from."""
    _import_all(imports)
    known = {f"{kind}s": {name: _first_line(thing) for name, thing in things.items()} for kind, things in REGISTRY.items()}
    known["presets"] = config.presets()
    known["datasets"] |= {name: each.title for name, each in CATALOGUE.items()}
    known["tables"] = {name: table.title for name, table in tables().items()}
    if what not in known:
        raise InvalidInput(f"list {what}: unknown.{nearest(what, known)}")
    if as_json:
        typer.echo(json.dumps([{"name": name, "about": about} for name, about in known[what].items()], indent=2))
        return
    show_names(known[what])


@app.command()
def describe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A method, partition, model or data set (fedclade list …).")],
    imports: ImportOption = None,
) -> None:
    """What something does and its parameters; of a method also what leaves a client, and the paper."""
    _import_all(imports)
    kind = next((kind for kind, things in REGISTRY.items() if name in things), None)
    if kind is None and name in CATALOGUE:
        out_console.print(CATALOGUE[name].about(), markup=False, soft_wrap=True)
        return
    if kind is None:
        every = {known for things in REGISTRY.values() for known in things} | CATALOGUE.keys()
        raise InvalidInput(f"describe '{name}': there is no method, partition, model or data set of that name.{nearest(name, every)}")
    chosen = REGISTRY[kind][name]
    text = inspect.getdoc(chosen) or ""
    if kind == "method":
        text = f"{chosen.title}\n\n{text}"
    if kind != "dataset":
        settable = hyperparameters(chosen) if kind == "method" else fields(chosen) if is_dataclass(chosen) else ()
        parameters = "\n".join(f"  {field.name} = {_default(field)}" for field in settable) or "  none of its own"
        text += f"\n\nParameters ([{kind}] in an experiment file, {chosen.__name__}(…) in Python):\n{parameters}"
    out_console.print(text, markup=False, soft_wrap=True)
    if kind == "method":
        out_console.print(_declared(chosen), markup=False)


app.command()(reproduce)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


@app.command()
def pretrain(
    data: Annotated[str, typer.Option("--data", metavar="NAME", help="A data set that no client holds: a name or an .npz file.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the encoder goes, for example encoder.safetensors.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 10,
    code: Annotated[int, typer.Option(min=1, help="Length e of the embedding.")] = encoders.CODE,
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and the order of the samples.")] = 0,
    device: DeviceOption = "auto",
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
) -> None:
    """Train an encoder for FLT on public data and write it to a file: --set method.encoder=FILE."""

    def on_epoch(epoch: int, loss: float) -> None:
        if not quiet:
            out_console.print(f"epoch {epoch}/{epochs}  loss {loss:.5f}", markup=False)

    encoders.pretrain(data, out, epochs=epochs, code=code, seed=seed, root=data_root, on_epoch=on_epoch, device=device)
    out_console.print(f"Encoder: {out}", markup=False, soft_wrap=True)


def _declared(method: type[Method]) -> str:
    """What a method says about itself beside its docstring."""
    besides = f"; {method.besides}" if method.besides else ""
    return (
        f"\nWhat leaves a client: {method.leaves}.\nThe server needs: {NEEDS[method.needs]}.\nGroups: it {GROUPS[method.groups]}.\n"
        f"Bytes of a client in a round: up {method.up}, down {method.down}{besides}. {SYMBOLS}\nPaper: {method.paper}."
    )


def _default(field: Any) -> str:
    return "required" if field.default is MISSING else repr(field.default)


def _first_line(thing: Any) -> str:
    title = getattr(thing, "title", None)
    return title or next(iter((thing.__doc__ or "").strip().splitlines()), "").rstrip(".")


def _flower() -> ModuleType:
    try:
        from fedclade.flower import simulation
    except ImportError as error:
        raise InvalidInput(f"--engine flower: Flower is not installed ({error}); pip install 'fedclade[flower]'.") from error
    return simulation


def _interrupted(folder: Path) -> NoReturn:
    tell(f"interrupted; go on with the same command and --out {folder} --resume")
    raise SystemExit(130)


def _import_all(files: list[str] | None) -> None:
    for file in files or []:
        import_file(file)


def _show(result: Result) -> None:
    summary = result.summary
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [("method", summary["method"]), ("clients", summary["clients"]), ("clusters", summary["clusters"])]
    if summary["accuracy"] is not None:
        rows.append(("accuracy", f"{_accuracy(summary)} (worst tenth {summary['accuracy_worst10']:.2f} %)"))
    if summary.get("accuracy_tuned") is not None:
        rows.append(("after fine-tuning", f"{summary['accuracy_tuned']:.2f} %"))
    if summary["ari"] is not None:
        rows.append(("agreement with the true groups (ARI)", f"{summary['ari']:.3f}"))
    if summary["clients_without_test"]:
        rows.append(("clients without test data, not evaluated", summary["clients_without_test"]))
    if summary["failures"]:
        rows.append(("replies missing or refused", summary["failures"]))
    rows += [("sent up / down", f"{_size(summary['bytes_up'])} / {_size(summary['bytes_down'])}"), ("seconds", f"{summary['seconds']:.1f}")]
    for name, value in rows:
        table.add_row(name, str(value))
    out_console.print(table)


def _print_comparison(rows: list[dict[str, Any]]) -> None:
    several = any(row["seeds"] > 1 for row in rows)
    note = "up, down: MB that clients sent and were sent"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=note, caption_justify="left")
    headings = ["method", "accuracy %", *(["seeds"] if several else []), "var.", "worst10", "clusters", "ARI", "up", "down", "s"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            _accuracy(row).removesuffix(" %"),
            *([f"± {_number(row['accuracy_std'], 2)}"] if several else []),
            _number(row["accuracy_variance"], 1),
            _number(row["accuracy_worst10"], 2),
            f"{row['clusters']:g}",
            _number(row["ari"], 2),
            _number(row["bytes_up"] / 1e6, 1),
            _number(row["bytes_down"] / 1e6, 1),
            _number(row["seconds"], 1),
        )
    # Rather a line that the terminal folds than numbers cut off.
    out_console.print(table, width=max(out_console.width, 92), crop=False)


def _accuracy(row: dict[str, Any]) -> str:
    if row["accuracy"] is None:
        return "–"
    return f"{row['accuracy']:.2f} ± {row['accuracy_stderr']:.2f} %"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


if __name__ == "__main__":
    main()
