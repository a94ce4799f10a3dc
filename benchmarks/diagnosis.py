"""Is the diagnosis right, and its advice good? Planted federations on MNIST and emnist47, and the
table of docs/diagnosis.md.

python benchmarks/diagnosis.py --data-root FOLDER [--device cuda] [--jobs 2] [--only NAME] [--again]
measures what is missing python benchmarks/diagnosis.py --page docs/diagnosis.md
writes the table from the results

FOLDER has mnist.npz and emnist47.npz. Results go to benchmarks/results/diagnosis.json after every
federation: a run that was stopped goes on where it was. Seeds 0 to 4 are diagnosed; for seeds 0 and
1 the methods are trained too. Thresholds were chosen on seeds 100 to 104.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diagnosis_federations import CLIENTS, EXPECTED, SAMPLES, federation
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.analysis.diagnose import Diagnosis, diagnose
from fedclade.data import Clients, Dataset
from fedclade.registry import REGISTRY

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "diagnosis.json"
BEGIN, END = "<!-- made by benchmarks/diagnosis.py -->", "<!-- end -->"
DATASETS = ("mnist", "emnist47")
SEEDS, TRAINED = range(5), (0, 1)
MODEL, ROUNDS = fc.models.MLP(64), 30
LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 10, "epochs": 2}
SCARCE, SCARCE_CLIENTS, SCARCE_SEEDS = (5, 8, 12, 20), 20, range(3)  # samples a client
NAMES = {"fedavg": "FedAvg", "local": "Local", "ifca": "IFCA", "cfl": "CFL", "clade": "Clade"}


def diagnosed(clients: Clients, seed: int, device: str, rounds: int) -> dict[str, Any]:
    """What the diagnosis says, without its words."""
    begin = time.perf_counter()
    found = diagnose(clients, MODEL, seed, device, **LOCAL, probe_rounds=rounds, threads=1)
    ari = (
        None
        if found.group is None or clients.groups is None
        else float(adjusted_rand_score(clients.groups, found.group))
    )
    told = {
        "kind": found.kind,
        "sure": found.sure,
        "groups": found.groups,
        "agree": found.groups_agree,
        "ari": ari,
    }
    told["seconds"] = round(time.perf_counter() - begin, 1)
    return told | (_advice(found) if rounds else {})


def _advice(found: Diagnosis) -> dict[str, Any]:
    return {
        "method": found.advice.method,
        "settings": found.advice.settings,
        "gain": found.advice.gain,
    }


def trained(
    clients: Clients,
    seed: int,
    device: str,
    told: dict[str, Any],
    groups: int | None,
    old: dict[str, Any],
) -> dict[str, float]:
    """Final accuracies of the five methods, and of the recommended one as it was recommended. IFCA
    is told the true number of groups.
    """
    methods = {
        "fedavg": fc.FedAvg(),
        "local": fc.Local(),
        "ifca": fc.IFCA(clusters=groups or 5),
        "cfl": fc.CFL(),
        "clade": fc.Clade(),
    }
    accuracy = old.get("final") or {
        name: _accuracy(method, clients, seed, device) for name, method in methods.items()
    }
    recommended = REGISTRY["method"][told["method"]](**told["settings"])
    usual = recommended == methods[told["method"]]
    same = usual or (told["method"], told["settings"]) == (old.get("method"), old.get("settings"))
    best = accuracy.get(told["method"] if usual else "recommended") if same else None
    return accuracy | {
        "recommended": _accuracy(recommended, clients, seed, device) if best is None else best
    }


def _accuracy(method: fc.Method, clients: Clients, seed: int, device: str) -> float:
    result = fc.run(
        method,
        clients,
        MODEL,
        ROUNDS,
        1.0,
        **LOCAL,
        seed=seed,
        eval_every=0,
        device=device,
        threads=1,
    )
    return float(result.summary["accuracy"])


@lru_cache(maxsize=1)
def loaded(dataset: str, root: str) -> Dataset:
    return fc.data.load(dataset, root)


def one(key: str, root: str, device: str, old: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """One federation, diagnosed and, for some seeds, trained, unless it was trained before."""
    dataset, name, text = key.split(", ")
    seed = int(text)
    clients = federation(loaded(dataset, root), name, seed)
    told = diagnosed(clients, seed, device, rounds=10 if seed in TRAINED else 0)
    if seed in TRAINED:
        told["final"] = trained(clients, seed, device, told, EXPECTED[name].groups, old)
    return key, told


def scarce(samples: int) -> list[dict[str, Any]]:
    """Federations with too few samples to be sure: what was said, how sure, and whether it was
    right.
    """
    digits = fc.data.load("digits")
    rows = []
    for name, planted in EXPECTED.items():
        for seed in SCARCE_SEEDS:
            found = diagnose(
                federation(digits, name, seed, SCARCE_CLIENTS, samples),
                MODEL,
                seed,
                "cpu",
                probe_rounds=0,
                threads=1,
            )
            rows.append(
                {
                    "planted": name,
                    "seed": seed,
                    "samples": samples,
                    "sure": found.sure,
                    "right": found.kind == planted.kind,
                }
            )
    return rows


def measure(root: str, device: str, only: str, jobs: int, again: bool) -> None:
    """What is missing, `jobs` federations at a time, each in a process of its own."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    keys = [
        f"{dataset}, {name}, {seed}" for dataset in DATASETS for name in EXPECTED for seed in SEEDS
    ]
    missing = [key for key in keys if only in key and (again or key not in results)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        few = (
            [pool.submit(scarce, samples) for samples in SCARCE]
            if again or "scarce" not in results
            else []
        )
        for done in as_completed(
            [pool.submit(one, key, root, device, results.get(key, {})) for key in missing]
        ):
            key, told = done.result()
            results[key] = told
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(key, told, flush=True)
        if few:
            results["scarce"] = [row for done in few for row in done.result()]
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def table(results: dict[str, Any]) -> str:
    """Kinds and groups over all seeds, then advice over those that were trained."""
    lines = [
        "| data | planted | kind right | groups right (true) | least ARI | mean sureness |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    kinds, groups = [], []
    for dataset in DATASETS:
        for name, planted in EXPECTED.items():
            rows = [results[f"{dataset}, {name}, {seed}"] for seed in SEEDS]
            kind = [row["kind"] == planted.kind for row in rows]
            kinds += kind
            sure = sum(row["sure"] for row in rows) / len(rows)
            number, ari = "none found", "–"
            if planted.groups is not None:
                right = [row["groups"] == planted.groups for row in rows]
                groups += right
                number, ari = (
                    f"{sum(right)} of {len(right)} ({planted.groups})",
                    f"{min(row['ari'] or 0.0 for row in rows):.2f}",
                )
            elif any(row["groups"] is not None for row in rows):
                number = "found: " + ", ".join(str(row["groups"]) for row in rows)
            lines.append(
                f"| {dataset} | {name} | {sum(kind)} of {len(kind)} | {number} | {ari} |"
                f" {100 * sure:.0f} % |"
            )
    share = (
        f"Kind right in {sum(kinds)} of {len(kinds)} federations"
        f" ({100 * sum(kinds) / len(kinds):.1f} %); number of groups right in "
    )
    share += (
        f"{sum(groups)} of {len(groups)} that have groups"
        f" ({100 * sum(groups) / len(groups):.1f} %)."
    )
    return "\n".join(
        [*lines, "", share, "", *_advice_table(results), "", *_sureness_table(results["scarce"])]
    )


def _advice_table(results: dict[str, Any]) -> list[str]:
    columns = [
        "data",
        "planted",
        "seed",
        *NAMES.values(),
        "recommended",
        "behind the best",
        "gain over FedAvg: expected, true",
    ]
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    behind = []
    for dataset in DATASETS:
        for name in EXPECTED:
            for seed in TRAINED:
                row = results[f"{dataset}, {name}, {seed}"]
                final = row["final"]
                behind.append(max(final[method] for method in NAMES) - final["recommended"])
                settings = "".join(f", {key} = {value}" for key, value in row["settings"].items())
                cells = [f"{final[method]:.1f}" for method in NAMES]
                gains = f"{row['gain']:+.1f}, {final['recommended'] - final['fedavg']:+.1f}"
                told = [
                    dataset,
                    name,
                    str(seed),
                    *cells,
                    NAMES[row["method"]] + settings,
                    f"{max(0.0, behind[-1]):.2f}",
                    gains,
                ]
                lines.append("| " + " | ".join(told) + " |")
    good = sum(gap <= 1 for gap in behind)
    return [
        *lines,
        "",
        (
            f"Within one point of the best of the five: {good} of {len(behind)}; most behind:"
            f" {max(behind):.2f} points."
        ),
    ]


def _sureness_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| said to be sure | federations | kind right |", "| --- | --- | --- |"]
    for least, most in ((0.0, 0.6), (0.6, 0.9), (0.9, 1.0)):
        some = [row["right"] for row in rows if least <= row["sure"] < most]
        lines.append(
            f"| {100 * least:.0f} to {100 * most:.0f} % | {len(some)} |"
            f" {100 * sum(some) / max(1, len(some)):.0f} % |"
        )
    return lines


def page(text: str) -> str:
    """The page with the table in it."""
    before, rest = text.split(BEGIN)
    return (
        f"{before}{BEGIN}\n\n{table(json.loads(RESULTS.read_text()))}\n\n{END}{rest.split(END)[1]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="a part of 'mnist, label swap, 0'")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument(
        "--again", action="store_true", help="diagnose all again; what was trained is kept"
    )
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.data_root:
        print(f"{CLIENTS} clients of {SAMPLES} samples", flush=True)
        measure(args.data_root, args.device, args.only, args.jobs, args.again)
    if args.page:
        args.page.write_text(page(args.page.read_text()))


if __name__ == "__main__":
    main()
