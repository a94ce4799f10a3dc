"""Whether the recommended method is among the best, on twelve natural or mixed federations.

python benchmarks/diagnosis_advice.py --data-root DIR [--seeds 10 11] [--only "own angle"]
    [--out results/diagnosis.json] [--final | --again]

DIR has mnist.npz with writers and shakespeare.csv. For each federation and seed: the test accuracy
of each method that the diagnosis knows, on all training data, and the diagnosis, which sees
training data only. --final: only the accuracies. --again: repeat the diagnoses, keep the
accuracies. tools/docs/diagnosis_page.py writes the table of docs/diagnosis.md.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from advice_federations import FEDERATIONS, Federation

import fedclade as fc
from fedclade.analysis.diagnose import diagnose
from fedclade.data import Clients
from fedclade.io.compact_json import read_results, write_results

RESULTS = Path(__file__).resolve().parents[1] / "results" / "diagnosis.json"
LAYER = "fedavg + personal layer"
METHODS: dict[str, fc.Method] = {
    "fedavg": fc.FedAvg(),
    LAYER: fc.FedAvg(),
    "scaffold": fc.SCAFFOLD(),
    "local": fc.Local(),
    "clade_groups": fc.CladeGroups(),
    "clade": fc.Clade(),
    "cfl": fc.CFL(),
    "ifca": fc.IFCA(),
}
Row = dict[str, Any]


def accuracy(federation: Federation, clients: Clients, name: str, seed: int) -> float:
    """The mean test accuracy over clients. IFCA gets the true number of groups, or 4."""
    method = METHODS[name] if name != "ifca" else fc.IFCA(clusters=federation.groups or 4)
    result = fc.run(
        method,
        clients,
        federation.model,
        rounds=federation.rounds,
        clients_per_round=federation.per_round,
        **federation.local,
        seed=seed,
        eval_every=0,
        device="cpu",
        threads=1,
        personal=fc.PersonalConfig("auto") if name == LAYER else None,
    )
    value = result.summary["accuracy"]
    assert value is not None
    return value


def advice(federation: Federation, clients: Clients, seed: int) -> Row:
    begin = time.process_time()
    diagnosis = diagnose(clients, federation.model, seed, "cpu", **federation.local, threads=1)
    best = diagnosis.advice
    return {
        "kind": diagnosis.kind,
        "groups": diagnosis.groups,
        "method": _name(best.method, best.layer),
        "gain": best.gain,
        "gain_stderr": best.gain_stderr,
        "sure": best.sure,
        "probes": [
            {
                "method": _name(probe.method, probe.layer),
                "score": probe.score,
                "behind": probe.behind,
                "behind_stderr": probe.behind_stderr,
                "rounds": probe.rounds,
                "seeds": probe.seeds,
            }
            for probe in diagnosis.probes
        ],
        "seconds": round(time.process_time() - begin, 1),
    }


def _name(method: str, layer: str | None) -> str:
    return LAYER if layer == "auto" else method


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--only", default="", help="a part of the federation's name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in options.seeds:
        for name, federation in FEDERATIONS.items():
            if options.only in name:
                clients = federation.clients(options.data_root, seed)
                _measure(options, name, federation, clients, seed)


def _measure(
    options: argparse.Namespace, name: str, federation: Federation, clients: Clients, seed: int
) -> None:
    def update(key: str, value: Any) -> None:
        """Another process may have added rows, so the file is read again."""
        rows = _rows(options.out)
        rows.setdefault((name, seed), {"federation": name, "seed": seed})[key] = value
        others = read_results(options.out) if options.out.exists() else {}
        write_results(options.out, others | {"advice": list(rows.values())})
        print(name, seed, key, value, flush=True)

    row = _rows(options.out).get((name, seed), {})
    final = dict(row.get("final", {}))
    for method in METHODS:
        if method not in final:
            final[method] = accuracy(federation, clients, method, seed)
            update("final", final)
    if not options.final and ("advice" not in row or options.again):
        update("advice", advice(federation, clients, seed))


def _rows(path: Path) -> dict[tuple[str, int], Row]:
    rows = read_results(path).get("advice", []) if path.exists() else []
    return {(row["federation"], row["seed"]): row for row in rows}


if __name__ == "__main__":
    main()
