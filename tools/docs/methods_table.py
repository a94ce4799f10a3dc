"""The table of all methods in docs/methods/README.md: what the methods declare, and the bytes that
the simulator counts in a round.

python tools/docs/methods_table.py [--out docs/methods/README.md]

Every method runs the preset `quickstart`: the phase before the first round, then three rounds. The
bytes of a client in the last of them are compared with the formula that the method declares.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from markdown_table import table

from fedclade.core.cost_formula import evaluate_cost
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.pytree import nbytes
from fedclade.core.rng import fold_in
from fedclade.data import Clients
from fedclade.engines.simulator import Simulator
from fedclade.methods import METHODS
from fedclade.methods.base import COST_LEGEND, GROUPS, NEEDS, Method
from fedclade.methods.required_context import need_probe_samples
from fedclade.training import experiment_file
from fedclade.training.client_sampling import cohort_of
from fedclade.training.setup import inject_context, module_for

ROUNDS = 3
ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "methods" / "README.md"
HEAD = [
    "method",
    "paper",
    "what leaves a client",
    "the server needs",
    "groups: the method",
    "bytes of a client in a round",
    "counted, kB",
]
ABOUT = """# The methods

`python tools/docs/methods_table.py` writes this page from the declarations of the methods; a test
compares it with the code.

{symbols}
Eight bytes in addition to a model are the number of a cluster. The column *counted* has the bytes
that the simulator sent per client in the third round of the preset `quickstart` ({clients} clients,
half of them in a round, a model of {size:,} bytes); *before* is the mean over all clients before
the first round. `fedclade describe METHOD` shows the same, with a description and the parameters.

"""


def counted(
    kind: type[Method], chosen: experiment_file.Experiment, clients: Clients
) -> tuple[int, int, int, int, int]:
    """K, the bytes up and down per client in the last round, and before the first round."""
    objective = Objective(module_for(chosen.model, clients.metadata, seed=0))
    method = inject_context(kind(), clients.metadata, seed=0).with_local_config(
        LocalTraining(objective, lr=chosen.local.lr, batch_size=10, epochs=1)
    )
    fed, params = Simulator(clients), objective.params()
    fed.init_client_state(method.initial_client_state(params))
    state = method.init(fed, params, fold_in(0, "init"))
    once = (fed.traffic.up // len(clients), fed.traffic.down // len(clients))
    for number in range(1, ROUNDS + 1):
        cohort = cohort_of(fold_in(0, number), len(clients), len(clients) // 2)
        state, cohort = method.prepare_cohort(fed, state, cohort, fold_in(0, "admit", number))
        before, symbols = (fed.traffic.up, fed.traffic.down), method.cost_symbols(state)
        state = method.round(fed, state, cohort, fold_in(0, "round", number))
    up, down = (
        (fed.traffic.up - before[0]) // len(cohort),
        (fed.traffic.down - before[1]) // len(cohort),
    )
    for way, formula, sent in (("up", kind.upload_cost, up), ("down", kind.download_cost, down)):
        if evaluate_cost(formula, symbols) != sent:
            raise SystemExit(
                f"{kind.name} declares {way} = {formula} with {symbols}, but sent {sent} bytes"
            )
    return symbols["K"], up, down, *once


def row(kind: type[Method], chosen: experiment_file.Experiment, clients: Clients) -> list[str]:
    models, up, down, once_up, once_down = counted(kind, chosen, clients)
    pages = (f"{kind.name}.md", f"{kind.name.partition('_')[0]}.md")  # FLIS's two methods share one
    page = next(
        (page for page in pages if (OUT.parent / page).exists()), f"baselines.md#{kind.name}"
    )
    name = f"[{kind.name}]({page})"
    formula = f"{_pretty(kind.upload_cost)} up, {_pretty(kind.download_cost)} down" + (
        f"; {kind.extra_traffic}" if kind.extra_traffic else ""
    )
    cost = f"{_kb(up)} up, {_kb(down)} down" + (
        f" (K = {models})" if "K" in kind.download_cost else ""
    )
    if once_up or once_down:
        cost += f"; before: {_kb(once_up)} up, {_kb(once_down)} down"
    return [
        name,
        kind.paper,
        kind.client_disclosure,
        NEEDS[kind.server_visibility],
        GROUPS[kind.groups],
        formula,
        cost,
    ]


def _pretty(formula: str) -> str:
    return formula.replace("*", "·")


def _kb(count: int) -> str:
    return f"{count / 1000:.1f}"


def page() -> str:
    chosen = experiment_file.experiment(experiment_file.read("quickstart"))
    needs_probe = need_probe_samples(kind() for kind in METHODS.values())
    clients = replace(chosen, needs_probe=needs_probe).clients()
    size = nbytes(Objective(module_for(chosen.model, clients.metadata, seed=0)).params())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [row(kind, chosen, clients) for kind in METHODS.values()]
    return ABOUT.format(clients=len(clients), size=size, symbols=COST_LEGEND) + table(HEAD, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    out.write_text(page())
    print(out)


if __name__ == "__main__":
    main()
