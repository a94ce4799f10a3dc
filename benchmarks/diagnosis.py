"""How often the kind and the groups of a diagnosis are correct, on federations of MNIST and
emnist47 with known kind and groups. benchmarks/diagnosis_advice.py measures the advice.

python benchmarks/diagnosis.py --data-root FOLDER [--device cuda] [--jobs 2] [--only NAME] [--again]

FOLDER has mnist.npz and emnist47.npz. The script measures the federations that have no results yet
and writes results/diagnosis.json after each, so an interrupted run can continue. Seeds 0 to 4 are
diagnosed. Thresholds were chosen on seeds 100 to 104. tools/docs/diagnosis_page.py writes the
tables of docs/diagnosis.md from the results.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diagnosis_federations import CLIENTS, EXPECTED, SAMPLES, federation
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.analysis.diagnose import diagnose
from fedclade.data import Clients, Dataset
from fedclade.io.compact_json import read_results, write_results

RESULTS = Path(__file__).resolve().parents[1] / "results" / "diagnosis.json"
DATASETS = ("mnist", "emnist47")
SEEDS, MODEL = range(5), fc.models.MLP(64)
SCARCE, SCARCE_CLIENTS, SCARCE_SEEDS = (5, 8, 12, 20), 20, range(3)  # samples a client
Key = tuple[str, str, int]  # data set, federation, seed


def diagnosed(clients: Clients, seed: int, device: str) -> dict[str, Any]:
    """The kind and the groups."""
    begin = time.perf_counter()
    diagnosis = diagnose(clients, MODEL, seed, device, probe_rounds=0, threads=1)
    ari = (
        None
        if diagnosis.group is None or clients.groups is None
        else float(adjusted_rand_score(clients.groups, diagnosis.group))
    )
    return {
        "kind": diagnosis.kind,
        "sure": diagnosis.sure,
        "groups": diagnosis.groups,
        "agree": diagnosis.groups_agree,
        "ari": ari,
        "seconds": round(time.perf_counter() - begin, 1),
    }


@lru_cache(maxsize=1)
def loaded(dataset: str, root: str) -> Dataset:
    return fc.data.load(dataset, root)


def measured(key: Key, root: str, device: str) -> tuple[Key, dict[str, Any]]:
    dataset, name, seed = key
    return key, diagnosed(federation(loaded(dataset, root), name, seed), seed, device)


def scarce(samples: int) -> list[dict[str, Any]]:
    """Federations with few samples: the confidence of the diagnosis, and whether it is correct."""
    digits = fc.data.load("digits")
    rows = []
    for name, planted in EXPECTED.items():
        for seed in SCARCE_SEEDS:
            clients = federation(digits, name, seed, SCARCE_CLIENTS, samples)
            diagnosis = diagnose(clients, MODEL, seed, "cpu", probe_rounds=0, threads=1)
            rows.append(
                {
                    "federation": name,
                    "seed": seed,
                    "samples": samples,
                    "sure": diagnosis.sure,
                    "right": diagnosis.kind == planted.kind,
                }
            )
    return rows


def measure(root: str, device: str, only: str, jobs: int, again: bool) -> None:
    """Measure the missing federations, `jobs` at a time, each in its own process."""
    results = read_results(RESULTS) if RESULTS.exists() else {}
    rows: dict[Key, dict[str, Any]] = {
        (row["dataset"], row["federation"], row["seed"]): row for row in results.get("rows", [])
    }
    keys = [(dataset, name, seed) for dataset in DATASETS for name in EXPECTED for seed in SEEDS]
    missing = [
        key for key in keys if only in ", ".join(map(str, key)) and (again or key not in rows)
    ]

    def write(few: list[dict[str, Any]]) -> None:
        content = {
            "expected": {name: asdict(planted) for name, planted in EXPECTED.items()},
            "rows": [rows[key] for key in keys if key in rows],
            "scarce": few,
            "advice": results.get("advice", []),
        }
        write_results(RESULTS, content)

    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        known = [] if again else results.get("scarce", [])
        few = [] if known else [pool.submit(scarce, samples) for samples in SCARCE]
        for done in as_completed([pool.submit(measured, key, root, device) for key in missing]):
            (dataset, name, seed), row = done.result()
            rows[dataset, name, seed] = {
                "dataset": dataset,
                "federation": name,
                "seed": seed,
                **row,
            }
            write(known)
            print(dataset, name, seed, row, flush=True)
        write(known or [row for done in few for row in done.result()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="a part of 'mnist, label swap, 0'")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--again", action="store_true", help="repeat all diagnoses")
    args = parser.parse_args()
    print(f"{CLIENTS} clients of {SAMPLES} samples", flush=True)
    measure(args.data_root, args.device, args.only, args.jobs, args.again)


if __name__ == "__main__":
    main()
