"""How well FedGMCC's score separates pairs inside a group from pairs across groups, what learned
bends add, and how well the method clusters.

python benchmarks/fedgmcc_separation.py --data-root FOLDER --out FOLDER [--quick] [--only separation
training inputs bends method]

FOLDER of --data-root has mnist.npz. Writes a JSON file for each study. One core; all of it takes
about 45 minutes, --quick two minutes. AUC is the probability that a pair inside a group scores
lower than a pair across: 1 separates, 0.5 is chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from _studies import Study, run_studies
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedclade as fc
from fedclade.clustering.mode_connectivity import (
    LR,
    SCORED_AT,
    Outputs,
    Paths,
    fit_bends,
    losses_along,
    midpoint,
)
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.core.rng import client_keys, fold_in, uniform
from fedclade.data import Clients, Dataset, LabelClusters, LabelPermutation, Rotation
from fedclade.engines.base import EvalRequest
from fedclade.methods.fedgmcc import FedGMCC, FedGMCCState
from fedclade.training.metrics import adjusted_rand
from fedclade.training.setup import inject_context

CLIENTS = 10
MC_SAMPLES = FedGMCC().mc_samples


@dataclass(frozen=True)
class Setting:
    """A data set, and how its clients train: as in the paper ten clients, all in every round."""

    data: Dataset
    samples: int
    hidden: int
    epochs: int
    lr: float = 0.1
    batch_size: int = 20

    def clients(self, kind: str, seed: int) -> Clients:
        scheme = {
            "permuted, 2 groups": LabelPermutation(2, samples=self.samples),
            "permuted, 4 groups": LabelPermutation(4, samples=self.samples),
            "rotated, 2 groups": Rotation(2, samples=self.samples),
            "rotated, 4 groups": Rotation(4, samples=self.samples),
            "5 digits each, 2 groups": LabelClusters(2, 5, samples=self.samples),
            "2 digits each, 5 groups": LabelClusters(5, 2, samples=self.samples),
            "one kind": LabelPermutation(1, samples=self.samples),
        }[kind]
        return fc.data.partition(self.data, scheme, CLIENTS, seed, probe=None)

    def local(self, clients: Clients, seed: int) -> fc.core.LocalTraining:
        torch.manual_seed(fold_in(seed, "model") % 2**32)
        objective = Objective(fc.models.MLP(self.hidden).build(clients.shape, 10))
        return fc.core.LocalTraining(objective, self.lr, self.batch_size, self.epochs)


KINDS = [
    "permuted, 2 groups",
    "permuted, 4 groups",
    "rotated, 2 groups",
    "rotated, 4 groups",
    "5 digits each, 2 groups",
]
KINDS += ["2 digits each, 5 groups"]


def trained(
    clients: Clients, local: fc.core.LocalTraining, rounds: int, seed: int
) -> Iterator[tuple[int, Tree]]:
    """The weights of all clients in each round of FedAvg, without clustering."""
    fed, model, everyone = (
        fc.Simulator(clients),
        stack([local.objective.params()]),
        torch.arange(len(clients)),
    )
    for number in range(1, rounds + 1):
        replies = fed.map(
            fc.core.sgd(local),
            everyone,
            per_client=fc.core.ModelAssignment.all_same(model, len(everyone)),
            key=fold_in(seed, "round", number),
        )
        yield number, replies.outputs
        model = {name: value.mean(0, keepdim=True) for name, value in replies.outputs.items()}


def noise(shape: tuple[int, ...], seed: int, samples: int = MC_SAMPLES) -> Tensor:
    return uniform(client_keys(fold_in(seed, "inputs"), torch.tensor(0)), (samples, *shape))


def softmax(outputs: Outputs) -> Outputs:
    return lambda params, x: outputs(params, x).softmax(-1)


def auc(scores: Tensor, clients: Clients) -> float:
    assert clients.groups is not None
    one, other = clients.groups[torch.combinations(torch.arange(len(clients)))].T
    return float(roc_auc_score((one != other).numpy(), scores.numpy()))


def summed_up(runs: list[dict[int, dict[str, float]]]) -> dict[int, dict[str, list[float]]]:
    """By round and way: the values of all seeds."""
    return {
        number: {way: [run[number][way] for run in runs] for way in runs[0][number]}
        for number in runs[0]
    }


def say(where: str, rounds: dict[int, dict[str, list[float]]]) -> None:
    print(f"  {where}")
    for way in next(iter(rounds.values())):
        print(
            f"    {way}: "
            + ", ".join(
                f"round {number} {np.mean(ways[way]):.2f}" for number, ways in rounds.items()
            ),
            flush=True,
        )


def separation(settings: dict[str, Setting], quick: bool) -> Study:
    """AUC of the score during FedAvg: straight paths, learned bends, raw outputs and outputs after
    softmax.
    """
    study: Study = {}
    for name, setting in settings.items():
        at, seeds = ([1, 3], 1) if quick else ([1, 3, 10], 3)
        for kind in KINDS[:1] if quick else KINDS:
            for epochs in (2, 10) if name == "digits" else (1, 5):
                runs = [
                    _separated(replace(setting, epochs=epochs), kind, at, seed, name == "digits")
                    for seed in range(seeds)
                ]
                study[f"{name}, {kind}, E = {epochs}"] = summed_up(runs)
                say(f"{name}, {kind}, E = {epochs}", summed_up(runs))
    return study


def _separated(
    setting: Setting, kind: str, at: list[int], seed: int, more: bool
) -> dict[int, dict[str, float]]:
    clients, by_round = setting.clients(kind, seed), {}
    local, inputs = setting.local(clients, seed), noise(clients.shape, seed)
    plain = local.objective.outputs
    ways: dict[str, tuple[Outputs, int, float]] = {
        "straight": (plain, 0, LR),
        "bent": (plain, FedGMCC().curve_steps, LR),
        "straight, softmax": (softmax(plain), 0, LR),
    }
    if more:
        ways |= {
            "bent, 50 steps of 1e-3": (plain, 50, 1e-3),
            "bent, softmax": (softmax(plain), FedGMCC().curve_steps, LR),
        }
    for number, weights in trained(clients, local, at[-1], seed):
        if number in at:
            by_round[number] = {
                way: auc(Paths(outputs, weights, inputs, steps, lr).scores(), clients)
                for way, (outputs, steps, lr) in ways.items()
            }
    return by_round


def training(settings: dict[str, Setting], quick: bool) -> Study:
    """AUC of straight paths against local epochs, with noise as inputs and, for comparison, with
    held-out images.
    """
    study: Study = {}
    at, seeds = ([1, 3], 1) if quick else ([1, 3, 10], 5)
    for kind in ("permuted, 2 groups", "rotated, 2 groups"):
        for epochs in (2, 10) if quick else (1, 2, 5, 10, 20, 50):
            runs = []
            for seed in range(seeds):
                clients, by_round = settings["digits"].clients(kind, seed), {}
                local = replace(settings["digits"].local(clients, seed), epochs=epochs)
                assert clients.probe is not None
                inputs = {
                    "noise": noise(clients.shape, seed),
                    "images": fc.core.inputs.as_inputs(clients.probe[:MC_SAMPLES]),
                }
                for number, weights in trained(clients, local, at[-1], seed):
                    if number in at:
                        by_round[number] = {
                            way: auc(
                                Paths(local.objective.outputs, weights, x, 0).scores(), clients
                            )
                            for way, x in inputs.items()
                        }
                runs.append(by_round)
            study[f"{kind}, E = {epochs}"] = summed_up(runs)
            say(f"{kind}, E = {epochs}", summed_up(runs))
    return study


def inputs(settings: dict[str, Setting], quick: bool) -> Study:
    """AUC of straight paths against the number of Monte Carlo inputs: mean and standard deviation
    over ten draws.
    """
    study: Study = {}
    setting, kind, seeds = settings["digits"], "permuted, 2 groups", 1 if quick else 5
    for samples in (8, 128) if quick else (8, 32, 128, 512, 2048):
        for number in (1, 2):
            draws = []
            for seed in range(seeds):
                clients = setting.clients(kind, seed)
                local = setting.local(clients, seed)
                weights = dict(trained(clients, local, number, seed))[number]
                for draw in range(10):
                    x = noise(clients.shape, fold_in(seed, draw), samples)
                    draws.append(
                        auc(Paths(local.objective.outputs, weights, x, 0).scores(), clients)
                    )
            spread = np.array(draws).reshape(seeds, 10).std(1).mean()
            study[f"{samples}, round {number}"] = {
                "mean": float(np.mean(draws)),
                "spread": float(spread),
            }
            print(
                f"  {samples} inputs, round {number}: {np.mean(draws):.3f} ± {spread:.3f}",
                flush=True,
            )
    return study


def bends(settings: dict[str, Setting], quick: bool) -> Study:
    """How far learning lowers the mean loss along a path, relative to the straight path, on its
    training inputs and on new inputs.
    """
    study: Study = {}
    for name, setting in settings.items():
        clients = setting.clients("permuted, 2 groups", 0)
        local = setting.local(clients, 0)
        few = 4 if quick else 6
        weights = tree_index(
            dict(trained(clients, local, 3, 0))[3], torch.arange(2, 2 + few)
        )  # of both groups
        training, fresh = noise(clients.shape, 0), noise(clients.shape, 1, 512)
        a, b = (tree_index(weights, end) for end in torch.combinations(torch.arange(few)).T)
        straight = midpoint(a, b)
        apart = 2 * _mean_losses(local, a, straight, b, fresh, [0.0])
        study[f"{name}, straight / mean square difference of the ends"] = float(
            (_mean_losses(local, a, straight, b, fresh, SCORED_AT) / apart).mean()
        )
        for steps in (10,) if quick else (5, 10, 20, 50, 100):
            for lr in (1e-4, LR, 1e-3, 1e-2):
                begin = time.perf_counter()
                bend = fit_bends(local.objective.outputs, a, b, training, steps, lr)
                seconds = time.perf_counter() - begin
                lower = [
                    float(
                        (
                            _mean_losses(local, a, bend, b, x, SCORED_AT)
                            / _mean_losses(local, a, straight, b, x, SCORED_AT)
                        ).mean()
                    )
                    for x in (training, fresh)
                ]
                each = seconds / len(next(iter(a.values())))
                study[f"{name}, {steps} steps of {lr:g}"] = {
                    "seen": lower[0],
                    "fresh": lower[1],
                    "seconds a pair": each,
                }
                print(
                    f"  {name}, {steps} steps of {lr:g}: {lower[0]:.3f} of straight, {lower[1]:.3f}"
                    " on fresh inputs",
                    flush=True,
                )
    return study


def _mean_losses(
    local: fc.core.LocalTraining, a: Tree, bend: Tree, b: Tree, inputs: Tensor, at: list[float]
) -> Tensor:
    return losses_along(local.objective.outputs, a, bend, b, inputs, at).mean(0)


def method(settings: dict[str, Setting], quick: bool) -> Study:
    """The method for 15 rounds: clusters, adjusted Rand index, percentile and accuracy, with
    straight and bent paths, and for FedAvg.
    """
    study: Study = {}
    for name, setting in settings.items():
        rounds, seeds = (6, 1) if quick else (15, 6 if name == "digits" else 3)
        methods: dict[str, fc.Method] = {
            "fedavg": fc.FedAvg(),
            "straight": FedGMCC(curve_steps=0),
            "bent": FedGMCC(),
        }
        kinds = (
            KINDS[:1]
            if quick
            else KINDS
            if name == "digits"
            else [KINDS[0], KINDS[1], KINDS[2], KINDS[4]]
        )
        for kind in [*kinds, "one kind"]:
            fixed = {
                "permuted, 4 groups": 17.0,
                "rotated, 4 groups": 17.0,
                "2 digits each, 5 groups": 10.0,
            }.get(kind)
            more = (
                {}
                if fixed is None
                else {f"straight, percentile {fixed:g} fixed": FedGMCC(fixed, 0.0, curve_steps=0)}
            )
            for way, chosen in (methods | more).items():
                runs = [
                    _run(chosen, setting, setting.clients(kind, seed), rounds, seed)
                    for seed in range(seeds)
                ]
                study[f"{name}, {kind}, {way}"] = runs
                accuracy = ", ".join(f"{run['accuracy']:.1f}" for run in runs)
                ends = "; ".join(f"{run['clusters'][-1]} ({run['ari'][-1]:.2f})" for run in runs)
                settled = [run["settled"] for run in runs]
                print(
                    f"  {name}, {kind}, {way}: accuracy {accuracy}; clusters (ARI) {ends}; settled"
                    f" in {settled}",
                    flush=True,
                )
    return study


def _run(method: fc.Method, setting: Setting, clients: Clients, rounds: int, seed: int) -> Study:
    local, everyone, fed = (
        setting.local(clients, seed),
        torch.arange(len(clients)),
        fc.Simulator(clients),
    )
    bound = inject_context(method, clients.metadata, seed).with_local_config(local)
    state, log, begin = (
        bound.init(fed, local.objective.params(), fold_in(seed, "init")),
        [],
        time.perf_counter(),
    )
    for number in range(1, rounds + 1):
        state = bound.round(fed, state, everyone, fold_in(seed, "round", number))
        where = (
            (float(state.percentile), bool(state.settled))
            if isinstance(state, FedGMCCState)
            else (None, False)
        )
        log.append((len(state), adjusted_rand(clients.groups, state.cluster_ids), *where))
    seconds = (time.perf_counter() - begin) / rounds
    accuracy = fed.evaluate(
        bound.assign_models(state, everyone),
        everyone,
        [EvalRequest(local.objective, {"accuracy": fc.accuracy})],
    )[0]["accuracy"]
    clusters, ari, percentile, settled = (list(column) for column in zip(*log, strict=True))
    return {
        "accuracy": 100 * float(accuracy.mean()),
        "clusters": clusters,
        "ari": ari,
        "percentile": percentile,
        "settled": settled.index(True) + 1 if True in settled else None,
        "seconds a round": seconds,
    }


STUDIES: dict[str, Callable[[dict[str, Setting], bool], Study]] = {
    "separation": separation,
    "training": training,
    "inputs": inputs,
    "bends": bends,
    "method": method,
}


def settings(root: str) -> dict[str, Setting]:
    return {
        "digits": Setting(fc.data.load("digits"), samples=120, hidden=64, epochs=10),
        "mnist": Setting(fc.data.load("mnist", root), samples=300, hidden=200, epochs=5),
    }


def main() -> None:
    run_studies(__doc__, STUDIES, settings)


if __name__ == "__main__":
    main()
