"""The runs of a table in several processes, which share a GPU or the cores of the CPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import Queue

import torch

from fedclade.engines.device import pick_device
from fedclade.reproduce.execute import Plan, TableEntry, execute, train_encoders, without_finished


def execute_in_processes(
    plan: Plan, folder: Path, jobs: int, on_done: Callable[[TableEntry, int, int], None]
) -> None:
    """Execute the entries that are not finished in `folder`; `execute` then reads them.

    Args:
        plan: the entries.
        folder: the folder of all runs.
        jobs: how many processes run at the same time.
        on_done: called after each run with its entry, the number of finished runs and of all runs.
    """
    missing = without_finished(plan, folder)
    # Entries of one label are the same run.
    keys = {entry.label: key for key, entry in missing.entries.items()}
    if not keys:
        return
    train_encoders(missing, folder)
    with multiprocessing.Manager() as manager:
        cores = manager.Queue()
        for share in _shares(jobs, pick_device(plan.options.device).type):
            cores.put(share)
        with ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn"), _start_worker, (cores,)
        ) as pool:
            futures = {
                pool.submit(_execute_one, missing, key, folder): key for key in keys.values()
            }
            try:
                for number, future in enumerate(as_completed(futures), start=1):
                    future.result()
                    on_done(missing.entries[futures[future]], number, len(futures))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _shares(jobs: int, device: str) -> list[list[int]]:
    """The cores of each process: on the CPU every process has its own, if there are enough."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * jobs
    cores = sorted(os.sched_getaffinity(0))
    if device != "cpu" or len(cores) < jobs:
        return [cores] * jobs
    return [cores[first::jobs] for first in range(jobs)]


def _start_worker(cores: Queue[list[int]]) -> None:
    torch.set_num_threads(1)
    if share := cores.get():
        os.sched_setaffinity(0, share)


def _execute_one(plan: Plan, key: tuple[str, str, int], folder: Path) -> None:
    execute(replace(plan, entries={key: plan.entries[key]}), folder, lambda *_: None)
