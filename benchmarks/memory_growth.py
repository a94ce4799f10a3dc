"""Memory of long runs against the number of rounds.

python benchmarks/memory_growth.py [--methods fedavg,scaffold,cfl,clade,ifca,flis_hc] [--teachers]
[--rounds 1000] [--clients 1000] [--out FILE]

Each method runs on the same clients in a separate process, with a run folder, and an evaluation of
all clients and a checkpoint every ten rounds. The resident memory of the process is read after a
twentieth and after each quarter of the rounds. The clients are in four groups, each with different
labels for the same classes. With --teachers each group has a linear teacher instead; that is hard
to learn from few samples, and CFL keeps splitting. Results go to results/speed/memory_growth.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fedclade as fc
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

RESULTS = Path(__file__).resolve().parents[1] / "results" / "speed" / "memory_growth.json"
METHODS: dict[str, fc.Method] = {
    "fedavg": fc.FedAvg(),
    "scaffold": fc.SCAFFOLD(),
    "cfl": fc.CFL(),
    "clade": fc.Clade(),
    "ifca": fc.IFCA(clusters=4),
    "flis_hc": fc.FLISHC(),
}
GROUPS, NUMBERS, CLASSES, TRAIN, TEST, PROBE = 4, 16, 4, 20, 10, 200
SETTINGS: dict[str, Any] = {
    "clients_per_round": 0.2,
    "lr": 0.1,
    "batch_size": 10,
    "eval_every": 10,
    "checkpoint_every": 10,
    "threads": 1,
}
HIDDEN = 16


def planted(clients: int, teachers: bool) -> fc.data.Clients:
    """Clients of four groups with the same inputs and different labels."""
    draw = torch.Generator().manual_seed(0)
    middles = 2 * torch.randn(CLASSES, NUMBERS, generator=draw)
    linear = torch.randn(GROUPS, NUMBERS, CLASSES, generator=draw)

    def one(client: int) -> tuple[torch.Tensor, ...]:
        kind, group = torch.randint(0, CLASSES, (TRAIN + TEST,), generator=draw), client % GROUPS
        x = torch.randn(len(kind), NUMBERS, generator=draw)
        x, y = (
            (x, (x @ linear[group]).argmax(1))
            if teachers
            else (x + middles[kind], (kind + group) % CLASSES)
        )
        return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]

    dealt = fc.data.from_arrays([one(client) for client in range(clients)])
    return replace(dealt, probe=torch.randn(PROBE, NUMBERS, generator=draw))


def resident() -> int:
    """The resident memory of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("memory_growth.py reads /proc/self/status, which only Linux has.")


def measured(method: str, clients: int, rounds: int, teachers: bool) -> dict[str, Any]:
    """Resident megabytes at some rounds of one run."""
    torch.set_num_threads(1)
    looks = [rounds // 20, *(rounds * quarter // 4 for quarter in (1, 2, 3, 4))]
    resident_mb: list[float] = []
    clusters: list[int] = []

    def on_round(row: dict[str, Any]) -> None:
        if row["round"] in looks:
            resident_mb.append(round(resident() / 1e6, 1))
            clusters.append(row["clusters"])

    with tempfile.TemporaryDirectory() as folder:
        model = fc.models.MLP(HIDDEN)
        dealt = planted(clients, teachers)
        result = fc.run(
            METHODS[method],
            dealt,
            model,
            rounds=rounds,
            out=folder,
            device="cpu",
            on_round=on_round,
            **SETTINGS,
        )
    summary = {name: result.summary[name] for name in ("rounds", "clients", "accuracy", "seconds")}
    growth = round(100 * (resident_mb[-1] / resident_mb[0] - 1), 2)
    samples = {"after": looks, "resident MB": resident_mb, "clusters": clusters, "growth %": growth}
    return {**summary, "model": f"MLP({HIDDEN})", "settings": SETTINGS, **samples}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--teachers", action="store_true")
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results: dict[str, Any] = read_results(args.out) if args.out.exists() else {}
    for method in args.methods.split(","):
        # Separate processes, so that memory of one method does not hide the growth of the next.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            row = alone.submit(measured, method, args.clients, args.rounds, args.teachers).result()
        sizes = "  ".join(
            f"{number}: {size:.1f}"
            for number, size in zip(row["after"], row["resident MB"], strict=True)
        )
        name = f"{method} teachers" if args.teachers else method
        groups = f"{row['clusters'][0]} to {row['clusters'][-1]} groups"
        print(
            f"{name:12} {sizes}  {row['growth %']:+.2f} %  ({groups}, {row['seconds']:.0f} s)",
            flush=True,
        )
        results[name] = {**row, "about": environment_info()}
        write_results(args.out, results)


if __name__ == "__main__":
    main()
