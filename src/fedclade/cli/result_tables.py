"""The results of a run or a comparison as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedclade.cli.console import out_console

if TYPE_CHECKING:
    from fedclade.training.result import Result

_WIDTH, _NAME = 92, 8  # width of the table, and of the method's name in it
_MAX_NAMED = 30  # clients whose groups are listed


def show_result(result: Result) -> None:
    from fedclade.training.metrics import own_names  # here, because it takes long to import

    summary: Mapping[str, Any] = result.summary
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows = [
        ("method", summary["method"]),
        ("clients", summary["clients"]),
        ("groups", summary["clusters"]),
        *_members(result),
    ]
    if summary["accuracy"] is not None:
        rows.append(
            ("accuracy", f"{_accuracy(summary)} (worst tenth {summary['accuracy_worst10']:.2f} %)")
        )
    elif summary.get("loss") is not None:
        rows.append(("loss", f"{summary['loss']:.4f}"))
    if summary.get("accuracy_shared") is not None:
        rows.append(("without the personal layer", f"{summary['accuracy_shared']:.2f} %"))
    for name in ("validation_accuracy", "validation_loss"):
        if summary.get(name) is not None:
            digits, unit = (2, " %") if name == "validation_accuracy" else (4, "")
            label = f"{name.removeprefix('validation_')} on validation data"
            rows.append((label, f"{summary[name]:.{digits}f}{unit}"))
    if "chosen_lr" in summary:
        rows.append(("learning rate, chosen by auto", f"{summary['chosen_lr']:g}"))
    for name in own_names(summary):
        without = summary.get(f"clients_without_{name}")
        note = f" (not defined for {without} clients)" if without else ""
        rows.append((name, f"{_number(summary[name], 4)}{note}"))
    if summary["ari"] is not None:
        rows.append(("agreement with the true groups (ARI)", f"{summary['ari']:.3f}"))
    if summary["clients_without_test"]:
        rows.append(("clients without test data, not evaluated", summary["clients_without_test"]))
    if summary.get("clients_without_validation"):
        rows.append(("clients without validation data", summary["clients_without_validation"]))
    for line in (summary.get("privacy") or {}).get("in_words", []):
        rows.append(("differential privacy", line))
    if summary.get("stopped") is not None:
        rows.append((f"stopped after round {summary['rounds']} by", summary["stopped"]))
    if summary.get("selected_round", summary["rounds"]) != summary["rounds"]:
        rows.append(("models of round", summary["selected_round"]))
    if summary["failures"]:
        rows.append(("replies missing or rejected", summary["failures"]))
    rows += [
        ("sent up / down", f"{_size(summary['bytes_up'])} / {_size(summary['bytes_down'])}"),
        ("seconds", f"{summary['seconds']:.1f}"),
    ]
    for name, value in rows:
        table.add_row(name, str(value))
    out_console.print(table)


def _members(result: Result) -> list[tuple[str, str]]:
    """Who is in which group, for a few clients with names; nothing if that is one group, or one
    for each client.
    """
    groups, clients = result.groups, len(result.clusters)
    if result.names.clients is None or clients > _MAX_NAMED or len(groups) in (1, clients):
        return []
    return [
        ("no group yet" if group < 0 else f"group {group}", ", ".join(map(str, members)))
        for group, members in groups.items()
    ]


def show_comparison(rows: list[dict[str, Any]]) -> None:
    from fedclade.training.metrics import own_names

    # Targets that are numbers have no accuracy.
    has_accuracy = any(row["accuracy"] is not None for row in rows)
    several = has_accuracy and any(row["seeds"] > 1 for row in rows)
    # Columns that only some runs have: the loss on validation data and the user's metrics.
    names = dict.fromkeys(name for row in rows for name in own_names(row))
    if any("validation_loss" in row for row in rows):
        names["validation_loss"] = None
    more = {"valid. loss" if name == "validation_loss" else name: name for name in names}
    note = "up, down: MB that clients sent and received"
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=note, caption_justify="left"
    )
    headings = [
        "method",
        "accuracy %" if has_accuracy else "loss",
        *(["seeds"] if several else []),
        *more,
        *(["var.", "worst10"] if has_accuracy else []),
        "groups",
        "ARI",
        "up",
        "down",
        "s",
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            _accuracy(row).removesuffix(" %") if has_accuracy else _number(row["loss"], 4),
            *([f"± {_number(row['accuracy_std'], 2)}"] if several else []),
            *(_number(row.get(name), 4) for name in more.values()),
            *([_number(row["accuracy_variance"], 1)] if has_accuracy else []),
            *([_number(row["accuracy_worst10"], 2)] if has_accuracy else []),
            f"{round(row['clusters'], 1):g}",
            _number(row["ari"], 2),
            _number(row["bytes_up"] / 1e6, 1),
            _number(row["bytes_down"] / 1e6, 1),
            _number(row["seconds"], 1),
        )
    # Let the terminal wrap a long line: rich would cut off numbers.
    longest = max(len(row["method"]) for row in rows)
    out_console.print(
        table,
        width=max(out_console.width, _WIDTH + 12 * len(more) + max(0, longest - _NAME)),
        crop=False,
    )
    show_hurt({row["method"]: row for row in rows})


def show_hurt(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the shares of clients that are worse off than with a baseline, by the names of the
    rows that have them.
    """
    from fedclade.analysis.clients_hurt import BASELINES

    for baseline in BASELINES:
        name = f"hurt_against_{baseline}"
        hurt = [f"{row} {own[name]:.1f}" for row, own in rows.items() if own.get(name) is not None]
        if hurt:
            out_console.print(
                f"Clients that are worse off than with {baseline}, %: {', '.join(hurt)}",
                soft_wrap=True,
                markup=False,
            )


def _accuracy(row: Mapping[str, Any]) -> str:
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
