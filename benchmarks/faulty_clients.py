"""Absent clients, malformed replies, flipped labels: how much accuracy do other clients lose? The
numbers are in docs/experiments.md.

python benchmarks/faulty_clients.py --data-root FOLDER [--jobs 2] [--seeds 3]
[--only malformed|flippers] [--methods cfl,clade] [--device cuda]

FOLDER has mnist.npz. Results go to results/robustness/faulty_clients.json after every run.

malformed: at each request 30 % of the clients do not answer, and 10 % of the clients send malformed
replies, two clients for each of `KINDS`. Every method is compared with a run with the same absences
and no malformed replies. flippers: 20 % of the clients replace every label y by 9 - y. The accuracy
of the others is compared with that in a federation without the flippers.

Accuracies are means over the honest clients.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import fedclade as fc
from fedclade.core.pytree import Tree
from fedclade.data import Clients, Dataset
from fedclade.engines.simulator import Faults
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods import METHODS
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

RESULTS = Path(__file__).resolve().parents[1] / "results" / "robustness" / "faulty_clients.json"
CLIENTS, ROUNDS = 100, 30
MODEL, LOCAL = fc.models.MLP(64), LocalConfig(lr=0.1, batch_size=10, epochs=1)
AWAY, MALFORMED, FLIPPERS = 0.3, 0.1, 0.2
FLIP_METHODS = ("fedavg", "cfl", "clade", "ifca", "local")


def _nan(reply: Tree) -> Tree:
    return {name: value * torch.nan for name, value in reply.items()}


def _infinite(reply: Tree) -> Tree:
    return {name: value * torch.inf for name, value in reply.items()}


def _misshapen(reply: Tree) -> Tree:
    return {name: value[None] for name, value in reply.items()}


def _huge(reply: Tree) -> Tree:
    return {
        name: torch.full_like(value, 1e30, dtype=torch.float32) for name, value in reply.items()
    }


def _claiming(reply: Tree) -> Tree:
    return reply | {"examples": torch.tensor(1e9)}


KINDS: tuple[Callable[[Tree], Tree], ...] = (_nan, _infinite, _misshapen, _huge, _claiming)


@dataclass
class InjectedFaults:
    """Faults of the simulator: random absences, and malformed replies from the clients in `bad`.
    Counts the malformed replies.
    """

    bad: Sequence[int]
    seed: int = 0
    sent: int = 0
    asked: Counter[int] = field(default_factory=Counter)

    def __call__(self, key: int, client: int, reply: Tree) -> Tree | None:
        self.asked[client] += 1
        if Random(f"{self.seed} {client} {self.asked[client]}").random() < AWAY:
            return None
        if client not in self.bad or not reply:
            return reply
        self.sent += 1
        return KINDS[self.bad.index(client) % len(KINDS)](reply)


def evenly_spaced(clients: int, share: float) -> list[int]:
    """A share of the clients, evenly spaced: about the same number from each group."""
    return [int(client / share) for client in range(round(share * clients))]


def method_of(name: str, groups: int) -> fc.Method:
    kind = METHODS[name]
    return kind(clusters=groups) if name in ("ifca", "fedsem", "pca_hc") else kind()  # type: ignore[call-arg]


def run(
    method: fc.Method,
    clients: Clients,
    seed: int,
    rounds: int,
    faults: Faults | None = None,
    device: str = "cpu",
) -> fc.Result:
    settings = TrainingConfig(rounds, 1.0, seed, eval_every=0, checkpoint_every=0)
    engine = fc.Simulator(clients, device=device, threads=1, faults=faults)
    return TrainingRun(
        method, clients, MODEL, LOCAL, settings, EngineConfig(), federation=engine
    ).run()


def accuracy(result: fc.Result, who: Sequence[int]) -> float:
    """Mean over these clients, without those that have no model: FLIS-DC's clients choose a model
    in each round, and some are absent then.
    """
    accuracies = [result.clients["accuracy"][client] for client in who]
    return fmean(value for value in accuracies if value is not None)


def malformed(
    clients: Clients, name: str, groups: int, seed: int, rounds: int = ROUNDS, device: str = "cpu"
) -> dict[str, Any]:
    """A method with absent clients and malformed replies, and with absent clients only."""
    bad = evenly_spaced(len(clients), MALFORMED)
    honest = [client for client in range(len(clients)) if client not in bad]
    clean = run(method_of(name, groups), clients, seed, rounds, InjectedFaults([], seed), device)
    faults = InjectedFaults(bad, seed)
    faulty = run(method_of(name, groups), clients, seed, rounds, faults, device)
    rejected = [
        failure for row in faulty.history for failure in row["failures"] if failure["rejected"]
    ]
    return {
        "clean": accuracy(clean, honest),
        "faulty": accuracy(faulty, honest),
        "sent": faults.sent,
        "rejected": len(rejected),
        "rejected_honest": sum(failure["client"] not in bad for failure in rejected),
        "blocked": faulty.summary["blocked_clients"],
    }


def flipped(clients: Clients, who: Sequence[int]) -> Clients:
    """The same clients; the training labels of some are flipped."""
    assert clients.classes is not None
    y = clients.y.clone()
    for client in who:
        rows = clients.train[client]
        y[rows] = clients.classes - 1 - y[rows]
    groups = torch.zeros(len(clients), dtype=torch.int64)
    groups[list(who)] = 1
    return replace(clients, y=y, groups=groups)


def flippers(
    clients: Clients, name: str, seed: int, rounds: int = ROUNDS, device: str = "cpu"
) -> dict[str, Any]:
    """A method with flippers among the clients, and on the honest clients alone."""
    who = evenly_spaced(len(clients), FLIPPERS)
    honest = [client for client in range(len(clients)) if client not in who]
    mixed = run(method_of(name, 2), flipped(clients, who), seed, rounds, device=device)
    alone = run(method_of(name, 2), clients.only(honest), seed, rounds, device=device)
    return {
        "without": accuracy(alone, range(len(honest))),
        "with": accuracy(mixed, honest),
        "mixed": _mixed(mixed.clusters, who),
        "clusters": mixed.summary["clusters"],
    }


def _mixed(cluster: Tensor, who: Sequence[int]) -> int:
    """How many flippers are in a cluster with an honest client."""
    bad = torch.zeros(len(cluster), dtype=torch.bool)
    bad[list(who)] = True
    return int(torch.isin(cluster[bad], cluster[~bad]).sum())


def federation(study: str, seed: int, data: Dataset) -> Clients:
    scheme = (
        fc.data.Rotation(clusters=2, samples=200)
        if study == "malformed"
        else fc.data.Rotation(clusters=1, samples=200)
    )
    return fc.data.partition(data, scheme, clients=CLIENTS, seed=seed, probe=200)


def one(job: tuple[str, str, int], root: str, device: str) -> dict[str, Any]:
    study, name, seed = job
    torch.set_num_threads(1)
    clients = federation(study, seed, fc.data.load("mnist", root))
    measured = (
        malformed(clients, name, 2, seed, device=device)
        if study == "malformed"
        else flippers(clients, name, seed, device=device)
    )
    return {"study": study, "method": name, "seed": seed, **measured}


def jobs(seeds: int, only: str | None, methods: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    trained = tuple(name for name in METHODS if name != "fedbn")  # the model has no BatchNorm
    for study, known in (("malformed", trained), ("flippers", FLIP_METHODS)):
        if only in (None, study):
            yield from (
                (study, name, seed)
                for name in known
                if not methods or name in methods
                for seed in range(seeds)
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("malformed", "flippers"))
    parser.add_argument("--methods", type=lambda names: names.split(","), default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [
            pool.submit(one, job, args.data_root, args.device)
            for job in jobs(args.seeds, args.only, args.methods)
        ]
        for done in as_completed(waiting):
            row = done.result()
            print(
                " ".join(
                    f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                ),
                flush=True,
            )
            _write(args.out, row, args.device)


def _write(out: Path, row: dict[str, Any], device: str) -> None:
    settings = {
        "clients": CLIENTS,
        "rounds": ROUNDS,
        "model": asdict(MODEL),
        "local": asdict(LOCAL),
    }
    results = read_results(out) if out.exists() else {"settings": settings, "rows": {}}
    results["rows"][f"{row['study']} {row['method']} {row['seed']}"] = row | {
        "about": environment_info(device)
    }
    results["rows"] = dict(sorted(results["rows"].items()))
    write_results(out, results)


if __name__ == "__main__":
    main()
