"""Clients that are away, send rubbish, or learn from wrong labels: what do they cost the others?
The tables of docs/experiments.md.

python benchmarks/bad_clients.py --data-root FOLDER [--jobs 2] [--seeds 3] [--only rubbish|flippers]
[--methods cfl,clade] [--device cuda]

FOLDER has mnist.npz. Results go to benchmarks/results/bad_clients.json, method by method.

rubbish: at each question 30 % of the clients do not answer; 10 % of them answer with rubbish, two
each of `KINDS`. Every method, beside a run with the same absences and no rubbish. flippers: 20 % of
the clients have every label y turned into 9 - y. The accuracy of the others, beside that in a
federation without them.

Accuracies are over the honest clients.
"""

from __future__ import annotations

import argparse
import json
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
from fedclade.io.environment_info import environment_info
from fedclade.methods import METHODS
from fedclade.training.runner import TrainingRun
from fedclade.training.settings import EngineConfig, LocalConfig, TrainingConfig

RESULTS = Path(__file__).resolve().parent / "results" / "bad_clients.json"
CLIENTS, ROUNDS = 100, 30
MODEL, LOCAL = fc.models.MLP(64), LocalConfig(lr=0.1, batch_size=10, epochs=1)
AWAY, RUBBISH, FLIPPERS = 0.3, 0.1, 0.2
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
class Mischief:
    """Absences drawn for a client and how often it was asked before, and rubbish from the clients
    in `bad`; counts what it sent.
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


def every_so_many(clients: int, share: float) -> list[int]:
    """An even share of the clients, so that of each group about as many."""
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
    """Mean over these clients, less those that have no model: FLIS-DC's clients choose one each
    time, and some are away then.
    """
    found = [result.clients["accuracy"][client] for client in who]
    return fmean(value for value in found if value is not None)


def rubbish(
    clients: Clients, name: str, groups: int, seed: int, rounds: int = ROUNDS, device: str = "cpu"
) -> dict[str, Any]:
    """A method with clients that are away and send rubbish, and without the rubbish."""
    bad = every_so_many(len(clients), RUBBISH)
    honest = [client for client in range(len(clients)) if client not in bad]
    clean = run(method_of(name, groups), clients, seed, rounds, Mischief([], seed), device)
    mischief = Mischief(bad, seed)
    found = run(method_of(name, groups), clients, seed, rounds, mischief, device)
    refused = [
        failure for row in found.history for failure in row["failures"] if failure["rejected"]
    ]
    return {
        "clean": accuracy(clean, honest),
        "found": accuracy(found, honest),
        "sent": mischief.sent,
        "refused": len(refused),
        "refused_honest": sum(failure["client"] not in bad for failure in refused),
        "set_aside": found.summary["blocked_clients"],
    }


def flipped(clients: Clients, who: Sequence[int]) -> Clients:
    """The same clients, where the training labels of these are turned round."""
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
    who = every_so_many(len(clients), FLIPPERS)
    honest = [client for client in range(len(clients)) if client not in who]
    found = run(method_of(name, 2), flipped(clients, who), seed, rounds, device=device)
    alone = run(method_of(name, 2), clients.only(honest), seed, rounds, device=device)
    return {
        "without": accuracy(alone, range(len(honest))),
        "with": accuracy(found, honest),
        "mixed": _mixed(found.clusters, who),
        "clusters": found.summary["clusters"],
    }


def _mixed(cluster: Tensor, who: Sequence[int]) -> int:
    """How many flippers are in a cluster with an honest client."""
    bad = torch.zeros(len(cluster), dtype=torch.bool)
    bad[list(who)] = True
    return int(torch.isin(cluster[bad], cluster[~bad]).sum())


def federation(study: str, seed: int, data: Dataset) -> Clients:
    scheme = (
        fc.data.Rotation(clusters=2, samples=200)
        if study == "rubbish"
        else fc.data.Rotation(clusters=1, samples=200)
    )
    return fc.data.partition(data, scheme, clients=CLIENTS, seed=seed, probe=200)


def one(job: tuple[str, str, int], root: str, device: str) -> dict[str, Any]:
    study, name, seed = job
    torch.set_num_threads(1)
    clients = federation(study, seed, fc.data.load("mnist", root))
    found = (
        rubbish(clients, name, 2, seed, device=device)
        if study == "rubbish"
        else flippers(clients, name, seed, device=device)
    )
    return {"study": study, "method": name, "seed": seed, **found}


def jobs(seeds: int, only: str | None, methods: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    for study, known in (("rubbish", tuple(METHODS)), ("flippers", FLIP_METHODS)):
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
    parser.add_argument("--only", choices=("rubbish", "flippers"))
    parser.add_argument("--methods", type=lambda given: given.split(","), default=[])
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
    results = json.loads(out.read_text()) if out.exists() else {"settings": settings, "rows": {}}
    results["rows"][f"{row['study']} {row['method']} {row['seed']}"] = row | {
        "about": environment_info(device)
    }
    results["rows"] = dict(sorted(results["rows"].items()))
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
