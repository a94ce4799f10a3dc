"""What scripts of several studies have in common: which of them to run, on what, and where their
numbers go.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedclade.io.results_json import write_results

Study = dict[str, Any]
T = TypeVar("T")


def run_studies(
    about: str | None,
    studies: Mapping[str, Callable[[T, bool], Study]],
    prepare: Callable[[str], T],
) -> tuple[dict[str, Study], Path]:
    """Run those that the command line names on what `prepare` makes of --data-root, and write a
    JSON file for each.

    Returns what they found, and the folder.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True, help="folder with mnist.npz")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(studies), default=list(studies))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    data, found = prepare(options.data_root), {}
    for name in options.only:
        print(f"{name}: {(studies[name].__doc__ or '').splitlines()[0]}", flush=True)
        begin = time.perf_counter()
        found[name] = studies[name](data, options.quick)
        write_results(options.out / f"{name}.json", found[name])
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
    return found, options.out
