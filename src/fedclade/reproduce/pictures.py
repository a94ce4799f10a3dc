"""The pictures of a table, from its finished runs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import replace

from fedclade.reproduce.execute import Done, Plan
from fedclade.reproduce.panels import Panel, Picture, Series
from fedclade.reproduce.paper_metrics import measure, metric_text
from fedclade.reproduce.spec import Column, PictureSpec

_MAX_POINTS = 60  # of a line

Finished = Mapping[tuple[str, str, int], Done]


def pictures(plan: Plan, done: Finished) -> tuple[Picture, ...]:
    """The pictures for which there is at least one panel.

    Args:
        plan: the planned entries.
        done: the finished entries, by row, column and seed.
    """
    found = []
    makers = {"curves": _curves, "rows": _over_rows, "study": _study}
    for spec in plan.table.pictures:
        columns = [
            column
            for column in plan.table.columns
            if (spec.kind == "rows" or column.like is None)
            and (not spec.columns or column.name in spec.columns)
        ]
        if panels := makers[spec.kind](plan, done, spec, columns):
            file = "-".join(filter(None, (plan.table.name, spec.name)))
            found.append(Picture(file, spec.title, spec.reading, tuple(panels)))
    return tuple(found)


def _runs(
    plan: Plan, done: Finished, spec: PictureSpec, column: Column
) -> dict[str, tuple[str, list[Done]]]:
    """Of each distinct run of a column: the first row that has it, and its seeds in order. Rows
    that show different rounds of one run share it.
    """
    runs: dict[str, tuple[str, list[Done]]] = {}
    for row in plan.table.rows:
        seeds = sorted(
            seed for name, place, seed in done if (name, place) == (row.name, column.name)
        )
        if seeds and (not spec.rows or row.name in spec.rows):
            label = plan.entries[row.name, column.name, seeds[0]].label
            runs.setdefault(
                label, (row.name, [done[row.name, column.name, seed] for seed in seeds])
            )
    return runs


def _curves(plan: Plan, done: Finished, spec: PictureSpec, columns: list[Column]) -> list[Panel]:
    panels = []
    for column in columns:
        series = tuple(
            line
            for name, runs in _runs(plan, done, spec, column).values()
            if (line := _line(name, spec.metric, runs)) is not None
        )
        if series:
            panels.append(Panel(column.name, "lines", "round", metric_text(spec.metric), series))
    return panels


def _over_rows(plan: Plan, done: Finished, spec: PictureSpec, columns: list[Column]) -> list[Panel]:
    """One panel for each data set, with a line for each column. x is the number in the name of a
    row, such as 0.3 in "β=0.3"; rows without a number are left out.
    """
    rows = [
        (row.name, match[1], float(match[2]))
        for row in plan.table.rows
        if (not spec.rows or row.name in spec.rows)
        and (match := re.fullmatch(r"(.*)=([\d.]+)", row.name))
    ]
    by_data: dict[str, list[Series]] = {}
    for column in columns:
        source, metric = plan.table.settings_of(column).name, plan.table.metric_of(column)
        points = []
        for row, _, x in rows:
            runs = [run for (name, place, _), run in done.items() if (name, place) == (row, source)]
            values = [measure(metric, run.summary, run.history) for run in runs]
            known = [value for value in values if value is not None]
            if known:
                points.append((x, statistics.fmean(known), min(known), max(known)))
        data = plan.data.get(column.name)
        if points and data is not None:
            numbers, mean, low, high = zip(*sorted(points), strict=True)
            by_data.setdefault(data, []).append(Series(column.name, numbers, mean, low, high))
    label = rows[0][1] if rows else ""
    text = metric_text(plan.table.metric_of(columns[0])) if columns else ""
    return [Panel(data, "lines", label, text, tuple(series)) for data, series in by_data.items()]


def _line(name: str, metric: str, runs: list[Done]) -> Series | None:
    """The mean over seeds of each round that has a number, with the lowest and the highest; None
    if there is no number.
    """
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for row in run.history:
            value = row.get(metric)
            if value is not None and math.isfinite(value):
                by_round.setdefault(row["round"], []).append(float(value))
    rounds = sorted(by_round)
    if len(rounds) > _MAX_POINTS:  # evenly, with the first and the last
        last = len(rounds) - 1
        rounds = [rounds[round(index * last / (_MAX_POINTS - 1))] for index in range(_MAX_POINTS)]
    if not rounds:
        return None
    values = [by_round[number] for number in rounds]
    several = len(runs) > 1
    return Series(
        name,
        tuple(map(float, rounds)),
        tuple(map(statistics.fmean, values)),
        tuple(map(min, values)) if several else None,
        tuple(map(max, values)) if several else None,
    )


def _study(plan: Plan, done: Finished, spec: PictureSpec, columns: list[Column]) -> list[Panel]:
    """The panels of the first seed of each run, with the row's name if there are several runs. With
    `series`, one panel with the series of this name of all runs, each named after its row.
    """
    by_run = [
        (name, runs[0].panels)
        for column in columns
        for name, runs in _runs(plan, done, spec, column).values()
        if runs[0].panels
    ]
    if spec.series:
        first = by_run[0][1][0] if by_run else None
        series = tuple(
            replace(line, name=name)
            for name, panels in by_run
            for panel in panels
            for line in panel.series
            if line.name == spec.series
        )
        return [replace(first, title=spec.series, series=series)] if first and series else []
    return [
        panel if len(by_run) == 1 else replace(panel, title=f"{name}: {panel.title}")
        for name, panels in by_run
        for panel in panels
    ]
