"""The studies behind CFL's numbers, on MNIST: congruence (the paper's Figure 7), separation gap
(Figures 5 and 6), margins of the tests.

python benchmarks/cfl_studies.py --data-root FOLDER --out FOLDER [--quick] [--only congruence points
rounds margins]

FOLDER of --data-root has mnist.npz. Writes a JSON file for each study; tools/docs/cfl_figures.py
draws figures from them. One core, an MLP with 64 hidden units; the full version takes minutes,
--quick seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from _studies import Study, run_studies
from torch import Tensor

import fedclade as fc
from fedclade.aggregation.mean import mix_models
from fedclade.clustering.cfl import (
    MARGIN,
    WARM_UP,
    bipartition,
    noise_level,
    separation_gap,
    update_norms,
)
from fedclade.clustering.cosine import cosine
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree, flatten, stack, tree_index
from fedclade.core.rng import fold_in
from fedclade.data import Clients, LabelSwap
from fedclade.data.datasets import Dataset
from fedclade.methods.cfl import AUTO_EPS1

HIDDEN, CLIENTS, GROUPS = 64, 20, 4
SHARES = (0.2, 0.1, 0.05, 0.02)  # of the scale: what eps1 might be


@dataclass
class Federation:
    """Clients that train one model without clustering, as in CFL before its first split."""

    clients: Clients
    seed: int
    local: fc.core.LocalTraining

    @staticmethod
    def of(
        clients: Clients, seed: int, lr: float = 0.1, batch_size: int = 20, epochs: int = 3
    ) -> Federation:
        torch.manual_seed(fold_in(seed, "model") % 2**32)
        objective = Objective(fc.models.MLP(HIDDEN).build(clients.shape, 10))
        return Federation(clients, seed, fc.core.LocalTraining(objective, lr, batch_size, epochs))

    def updates(
        self, fed: fc.Simulator, model: Tree, local: fc.core.LocalTraining, key: int
    ) -> tuple[Tree, Tensor]:
        """All clients' weights after local training, and their updates as vectors."""
        everyone = torch.arange(len(self.clients))
        replies = fed.map(
            fc.core.sgd(local),
            everyone,
            per_client=fc.core.ModelAssignment.all_same(stack([model]), len(everyone)),
            key=key,
        )
        return replies.outputs, flatten(replies.outputs) - flatten(stack([model]))

    def train(self, rounds: int) -> Iterator[tuple[int, Tensor, Callable[[], Tensor]]]:
        """The updates of each round, and on request the negative gradients at the round's initial
        model.
        """
        fed, model = fc.Simulator(self.clients), self.local.objective.params()
        whole = replace(self.local, lr=1.0, epochs=1, batch_size=int(self.clients.sizes.max()))
        for number in range(1, rounds + 1):
            weights, updates = self.updates(
                fed, model, self.local, fold_in(self.seed, "round", number)
            )
            start = model
            yield number, updates, lambda start=start: self.updates(fed, start, whole, 0)[1]
            model = tree_index(mix_models(self.clients.sizes[None], weights), torch.tensor(0))


def lengths(updates: Tensor) -> tuple[float, float]:
    """‖mean Δθ‖ and max ‖Δθ_i‖, clients of equal size."""
    return float(update_norms(updates.mean(0, keepdim=True))), float(update_norms(updates).max())


def two_clients(data: Dataset, points: int) -> dict[str, Clients]:
    """Pairs of clients: one model can fit both, both, or not both clients. In the last case it can
    only memorize the samples.
    """
    x, y = data.x_train, data.y_train
    low, high, one, other = (
        torch.where(y <= 4)[0][:points],
        torch.where(y > 4)[0][:points],
        slice(points),
        slice(points, 2 * points),
    )
    swapped = torch.tensor([0, 1, 2, 5, 4, 3, 6, 7, 8, 9])
    return {
        "alike: random digits": fc.data.from_arrays([(x[one], y[one]), (x[other], y[other])]),
        "congruent: digits 0-4, 5-9": fc.data.from_arrays([(x[low], y[low]), (x[high], y[high])]),
        "incongruent: the same digits, 3 and 5 swapped": fc.data.from_arrays(
            [(x[one], y[one]), (x[one], swapped[y[one]])]
        ),
        "incongruent: other digits, 3 and 5 swapped": fc.data.from_arrays(
            [(x[one], y[one]), (x[other], swapped[y[other]])]
        ),
    }


def congruence(data: Dataset, quick: bool) -> Study:
    """Figure 7: two clients for up to 1,000 rounds of one epoch, the lengths of updates."""
    rounds, points = (60, 200) if quick else (1000, 500)
    study: Study = {"points": points, "rounds": rounds}
    for name, clients in two_clients(data, points).items():
        curves = [
            lengths(updates)
            for _, updates, _ in Federation.of(clients, seed=0, batch_size=100, epochs=1).train(
                rounds
            )
        ]
        scale = max(longest for _, longest in curves[:WARM_UP])
        at = sorted({1, 3, 10, 30, 100, 300, 1000, rounds} & set(range(1, rounds + 1)))
        rest = {
            share: next(
                (
                    r
                    for r, (mean, _) in enumerate(curves, 1)
                    if r > WARM_UP and mean < share * scale
                ),
                None,
            )
            for share in SHARES
        }
        study[name] = {
            "mean": [mean for mean, _ in curves],
            "max": [longest for _, longest in curves],
            "scale": scale,
            "relative": {r: [value / scale for value in curves[r - 1]] for r in at},
            "max / scale at rest": {
                share: [r, curves[r - 1][1] / scale] if r else None for share, r in rest.items()
            },
        }
        print(f"  {name}: scale {scale:.3f}")
        print(
            "    round: mean/scale, max/scale;",
            "; ".join(f"{r}: {a:.3f}, {b:.3f}" for r, (a, b) in study[name]["relative"].items()),
        )
        print(
            "    max/scale when first ‖mean‖ < share of scale:",
            study[name]["max / scale at rest"],
            flush=True,
        )
    return study


def look(similarity: np.ndarray, groups: np.ndarray) -> Study:
    """The separation gap, and whether the bipartition keeps every group together."""
    side, cross = bipartition(similarity)
    whole = all(len(set(side[groups == group])) == 1 for group in set(groups))
    return {"gap": separation_gap(similarity, groups), "whole": whole, "cross": cross}


def gaps(data: Dataset, points: int, rounds: int, at: list[int], seed: int) -> dict[int, Study]:
    """By round: the separation of four groups with swapped labels, by updates and by gradients."""
    clients = fc.data.partition(
        data, LabelSwap(clusters=GROUPS, samples=points), clients=CLIENTS, seed=seed, probe=None
    )
    assert clients.groups is not None
    groups, by_round = clients.groups.numpy(), {}
    for number, updates, gradients in Federation.of(clients, seed).train(rounds):
        if number in at:
            by_round[number] = {
                "updates": look(cosine(updates).numpy(), groups),
                "gradients": look(cosine(gradients()).numpy(), groups),
            }
    return by_round


def by_points(data: Dataset, quick: bool) -> Study:
    """Figure 5: the gap after 50 rounds against the number of samples per client."""
    rounds, seeds = (10, 1) if quick else (50, 3)
    study: Study = {"rounds": rounds, "seeds": seeds, "points": {}}
    for points in (10, 50, 200) if quick else (10, 20, 30, 50, 75, 100, 150, 200):
        study["points"][points] = [
            gaps(data, points, rounds, [rounds], seed)[rounds] for seed in range(seeds)
        ]
        _print_gaps(f"{points} points", study["points"][points])
    return study


def by_rounds(data: Dataset, quick: bool) -> Study:
    """Figure 6: the gap against rounds, with 100 samples per client."""
    at, seeds = ([1, 5, 10], 1) if quick else ([1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50], 3)
    runs = [gaps(data, 100, at[-1], at, seed) for seed in range(seeds)]
    study: Study = {
        "points": 100,
        "seeds": seeds,
        "rounds": {number: [run[number] for run in runs] for number in at},
    }
    for number in at:
        _print_gaps(f"round {number}", study["rounds"][number])
    return study


def _print_gaps(where: str, runs: list[Study]) -> None:
    parts = []
    for kind in ("updates", "gradients"):
        values = [run[kind]["gap"] for run in runs]
        parts.append(
            f"{kind} {np.mean(values):+.2f} ({sum(run[kind]['whole'] for run in runs)} of"
            f" {len(runs)} splits right)"
        )
    print(f"  {where}: gap {', '.join(parts)}", flush=True)


def margins(data: Dataset, quick: bool) -> Study:
    """The statistics of CFL's three tests when a cluster first converges: clients of one group
    against four groups.
    """
    rounds, seeds = (40, 1) if quick else (80, 3)
    study: Study = {}
    for points in (100,) if quick else (30, 50, 100, 200, 500):
        for kinds in (1, GROUPS):
            runs = []
            for seed in range(seeds):
                clients = fc.data.partition(
                    data,
                    LabelSwap(clusters=kinds, samples=points),
                    clients=CLIENTS,
                    seed=seed,
                    probe=None,
                )
                assert clients.groups is not None
                runs.append(_at_rest(Federation.of(clients, seed), rounds, clients.groups.numpy()))
            name = f"{points} points, {'one kind' if kinds == 1 else f'{kinds} groups'}"
            study[name] = runs
            print(
                f"  {name}:",
                *(
                    f"[round {r['round']}: max/scale {r['longest']:.2f}, stands out"
                    f" {r['stands out']:.2f}]"
                    for r in runs
                    if r
                ),
            )
    return study


def _at_rest(federation: Federation, rounds: int, groups: np.ndarray) -> Study | None:
    scale = 0.0
    for number, updates, _ in federation.train(rounds):
        mean, longest = lengths(updates)
        if number > WARM_UP and mean < AUTO_EPS1 * scale:
            similarity = cosine(updates).numpy()
            side, cross = bipartition(similarity)
            noise = noise_level(similarity, side) / MARGIN
            stands_out = float(np.sqrt((1 - cross) / 2)) / noise
            return {
                "round": number,
                "longest": longest / scale,
                "stands out": stands_out,
                **look(similarity, groups),
            }
        scale = max(scale, longest) if number <= WARM_UP else scale
    return None


STUDIES: dict[str, Callable[[Dataset, bool], Study]] = {
    "congruence": congruence,
    "points": by_points,
    "rounds": by_rounds,
    "margins": margins,
}


def main() -> None:
    run_studies(__doc__, STUDIES, lambda root: fc.data.load("mnist", root))


if __name__ == "__main__":
    main()
