"""The command line of scripts with several studies: select studies, run them, write results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedclade.io.compact_json import write_results

Study = dict[str, Any]
T = TypeVar("T")


def run_studies(
    about: str | None,
    studies: Mapping[str, Callable[[T, bool], Study]],
    prepare: Callable[[str], T],
) -> None:
    """Run the selected studies on `prepare(--data-root)`, and write a JSON file for each."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True, help="folder with mnist.npz")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(studies), default=list(studies))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = prepare(options.data_root)
    for name in options.only:
        print(f"{name}: {(studies[name].__doc__ or '').splitlines()[0]}", flush=True)
        begin = time.perf_counter()
        write_results(options.out / f"{name}.json", studies[name](data, options.quick))
        print(f"  {time.perf_counter() - begin:.0f} s", flush=True)
