"""What evaluation costs with Clade's personal layer, and with FedAvg.

python benchmarks/evaluation_cost.py [--data-root FOLDER]
    [--out results/methods/evaluation_cost.json]

Federations and settings of benchmarks/clade.py, seed 10, but 100 rounds, and an evaluation every
ten rounds, which are the defaults. CPU seconds of the rounds, of all ten evaluations, and of making
the models of the personal layer, once, at the end; of two runs the smaller number. FOLDER has
mnist.npz. It takes about three minutes on one core.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from clade import HIDDEN, IMAGES, OUT, SETTINGS, clients_of

import fedclade as fc
from fedclade.engines.profiler import Profiler
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.training.config import EngineConfig
from fedclade.training.loop import start, train
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import prepare

SEED, ROUNDS, REPEATS = 10, 100, 2
FEDERATIONS = {
    "digits": ("iid", "Dirichlet(0.1)", "rotated"),
    "mnist": ("iid", "Dirichlet(0.1)", "rotated", "writers"),
}
PHASES = ("round", "evaluation", "personal layer")


class CpuClock(Profiler):
    """Counts seconds of the CPU."""

    def _now(self) -> float:
        return time.process_time()


def measured(method: fc.Method, data: str, federation: str, root: str) -> dict[str, float]:
    settings = SETTINGS if data == "digits" else IMAGES
    run = TrainingRun(
        method,
        clients_of(data, federation, SEED, root),
        fc.models.MLP(HIDDEN if data == "digits" else 100),
        fc.LocalConfig(settings["lr"], settings["batch_size"], settings["epochs"]),
        fc.TrainingConfig(ROUNDS, settings["clients_per_round"], SEED),
        EngineConfig(),
        "cpu",
    )
    setup = prepare(run)
    clock = CpuClock(setup.engine.device, on=True)
    setup.engine.clock = clock
    train(setup, start(setup, None, None), [], None)
    return {phase: clock.seconds.get(phase, 0.0) for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--out", type=Path, default=OUT.with_name("evaluation_cost.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for data, federations in FEDERATIONS.items():
        for federation in federations:
            runs: dict[str, list[dict[str, float]]] = {"fedavg": [], "clade": []}
            for _ in range(REPEATS):
                for method in (fc.FedAvg(), fc.Clade()):
                    runs[method.name].append(measured(method, data, federation, args.data_root))
            for name, repeats in runs.items():
                least = {phase: round(min(run[phase] for run in repeats), 3) for phase in PHASES}
                rows.append({"data": data, "federation": federation, "method": name} | least)
                print(*rows[-1].values(), flush=True)
    write_results(args.out, {"about": environment_info(), "rows": rows})


if __name__ == "__main__":
    main()
