"""Which difference from the authors' experiment explains FLIS-DC's accuracy on CIFAR-10 with a
label skew of 20 % (FLIS, Table 1: 89.5 %)?

python benchmarks/flis_cifar_ablation.py --data-root FOLDER [--device cuda] [--jobs 4]
    [--variants table,crops] [--rounds 100] [--seeds 1]

FOLDER has cifar10.npz. It writes results/methods/flis_cifar_ablation.json. Variants:

table: the settings of our Table 1.
crops: training images are cropped (4 pixels of padding) and flipped at random, as in the authors'
    code. Ten random copies of each image are made before training, and a local epoch over the
    copies takes the place of ten epochs: the same number of steps.
all_tests: a client is tested on all test images of its classes, as in the authors' code.
chosen_by_test: a client chooses the model with the highest accuracy on its test images, as in the
    authors' code. This leaks test data; it exists in this script only.
normalized: images have mean 0 and variance 1 in each channel, instead of values from -1 to 1.
momentum_0, momentum_0.9: instead of 0.5.
rounds_200: twice as many rounds.
authors: crops, all_tests, chosen_by_test and normalized together.
solo, solo_crops: each client alone, without and with crops.

For each variant: the accuracy after ten local epochs at the end, the best of the evaluated rounds,
and the accuracy of the served model.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import fedclade as fc
from fedclade.aggregation.mean import mix_models, unique_rows
from fedclade.clustering.flis import similarity_graph
from fedclade.core import UNKNOWN, Federation, ModelAssignment, State
from fedclade.core.inputs import as_inputs, one_tensor
from fedclade.core.local_sgd import sgd
from fedclade.core.pytree import Tree, tree_index
from fedclade.data import Clients, Dataset, Pathological, load, partition
from fedclade.data.federated_dataset import RaggedIndex
from fedclade.data.partitioning.base import Split
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "flis_cifar_ablation.json"
PAPER = {"FLIS-DC": 89.47, "SOLO": 79.22}
COPIES = 10  # random crops of each image: one for each local epoch
PADDING = 4
EVERY = 20
Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """What differs from the settings of Table 1."""

    crops: bool = False
    all_tests: bool = False
    chosen_by_test: bool = False
    normalized: bool = False
    momentum: float = 0.5
    longer: int = 1
    solo: bool = False


VARIANTS = {
    "table": Variant(),
    "crops": Variant(crops=True),
    "all_tests": Variant(all_tests=True),
    "chosen_by_test": Variant(chosen_by_test=True),
    "normalized": Variant(normalized=True),
    "momentum_0": Variant(momentum=0.0),
    "momentum_0.9": Variant(momentum=0.9),
    "rounds_200": Variant(longer=2),
    "authors": Variant(crops=True, all_tests=True, chosen_by_test=True, normalized=True),
    "solo": Variant(solo=True),
    "solo_crops": Variant(solo=True, crops=True),
}


@dataclass(frozen=True)
class AllTests(Pathological):
    """The label skew, with all test images of a client's classes as its test part."""

    name: ClassVar[str] = "all_tests"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        split = super().split(data, clients, rng)
        labels, test_labels = data.y_train.numpy(), data.y_test.numpy()
        test = [np.flatnonzero(np.isin(test_labels, labels[rows])) for rows in split.train]
        return replace(split, test=test)


@dataclass(frozen=True)
class ChosenByTest(fc.FLISDC):
    """FLIS-DC whose clients choose by the accuracy on their test images."""

    name: ClassVar[str] = "chosen_by_test"
    clients: ClassVar[Clients | None] = None  # of the run in this process

    def _choose(self, models: Tree, ids: Tensor) -> Tensor:
        assert self.clients is not None
        clients, device = self.clients, next(iter(models.values())).device
        chosen = []
        with torch.no_grad():
            # Predictions of all models on all test images, then each client's share of right ones.
            x = one_tensor(clients.x_test, "this script", "clients")
            inputs = as_inputs(x.to(device))
            right = torch.stack(
                [
                    self.local.objective.outputs(tree_index(models, torch.tensor(row)), inputs)
                    .argmax(1)
                    .cpu()
                    == clients.y_test
                    for row in range(len(next(iter(models.values()))))
                ]
            )
            for client in ids.tolist():
                rows = clients.test[int(clients.test_part_id[client])]
                chosen.append(int(right[:, rows].double().mean(1).argmax()))
        return torch.tensor(chosen)

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        cohort = cohort.sort().values
        assignment = ModelAssignment(state.models, self._choose(state.models, cohort))
        results = fed.map(sgd(self.local), cohort, per_client=assignment, key=key)
        trained = {name: results.outputs[name] for name in state.models}
        joint, own = unique_rows(similarity_graph(self._predictions(trained), self.beta).cpu())
        unknown = torch.full((len(fed.sizes),), UNKNOWN, dtype=torch.int64)
        models = mix_models(joint * fed.sizes[results.ids], trained, fed.aggregator)
        return replace(state, models=models, cluster_ids=unknown.index_copy(0, results.ids, own))

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        chosen = self._choose(state.models, ids)
        return replace(state, cluster_ids=state.cluster_ids.index_copy(0, ids, chosen))


def measure(name: str, seed: int, rounds: int, root: str | None, device: str) -> Row:
    """One run of a variant."""
    torch.set_num_threads(1)
    variant = VARIANTS[name]
    data = load("cifar10", root)
    if variant.normalized:
        train, test = (one_tensor(x, "this script", "data") for x in (data.x_train, data.x_test))
        data = replace(data, x_train=normalize(train, train), x_test=normalize(test, train))
    scheme = (AllTests if variant.all_tests else Pathological)(2)
    clients = partition(data, scheme, 100, seed=seed, probe=2500)
    if variant.crops:
        clients = cropped(clients, seed)
    method: fc.Method = fc.FLISDC(beta=0.3)
    if variant.chosen_by_test:
        ChosenByTest.clients = clients
        method = ChosenByTest(beta=0.3)
    if variant.solo:
        method = fc.Local()
    epochs = 10 // COPIES if variant.crops else 10
    result = fc.run(
        method,
        clients,
        fc.models.LeNet5(centred=not variant.normalized),
        rounds=rounds * variant.longer,
        clients_per_round=10,
        lr=0.01,
        batch_size=10,
        epochs=epochs,
        momentum=variant.momentum,
        eval_every=EVERY,
        personal=fc.PersonalConfig("finetune", epochs, every=EVERY),
        seed=seed,
        device=device,
        profile=name == "table",
    )
    if result.profile is not None:
        print(result.profile, flush=True)
    tuned = [row["accuracy"] or 0.0 for row in result.history if "accuracy_shared" in row]
    return {
        "variant": name,
        "seed": seed,
        "rounds": rounds * variant.longer,
        "tuned": result.summary["accuracy"],
        "best": max(tuned),
        "served": result.summary["accuracy_shared"],
        "by_round": tuned,
        "seconds": result.summary["seconds"],
    }


def normalize(x: Tensor, of: Tensor) -> Tensor:
    """Images as floats, with mean 0 and variance 1 in each channel of the images `of`."""
    images = as_inputs(of)
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    return (as_inputs(x) - mean) / std


def cropped(clients: Clients, seed: int) -> Clients:
    """Each client with COPIES random crops of each of its training images, flipped at random."""
    generator = torch.Generator().manual_seed(seed)
    x = one_tensor(clients.x, "this script", "clients")
    height, width = x.shape[2:]
    low = x.amin((0, 2, 3), keepdim=True)  # a black pixel, also of normalized images
    padded = low.expand(len(x), -1, height + 2 * PADDING, width + 2 * PADDING).clone()
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = x
    copies = torch.empty(COPIES, *x.shape, dtype=x.dtype)
    for copy in range(COPIES):
        top, left = torch.randint(0, 2 * PADDING + 1, (2, len(x)), generator=generator)
        rows = (top[:, None] + torch.arange(height))[:, None, :, None]
        columns = (left[:, None] + torch.arange(width))[:, None, None, :]
        images = padded[
            torch.arange(len(x))[:, None, None, None],
            torch.arange(x.shape[1])[None, :, None, None],
            rows,
            columns,
        ]
        flips = torch.rand(len(x), generator=generator) < 0.5
        images[flips] = images[flips].flip(3)
        copies[copy] = images
    index = clients.train
    parts = [
        torch.cat([index[client] + copy * len(x) for copy in range(COPIES)])
        for client in range(len(clients))
    ]
    return replace(
        clients,
        x=copies.flatten(0, 1),
        y=clients.y.repeat(COPIES),
        train=RaggedIndex.of(parts),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    names = args.variants.split(",")
    rows = []
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        pending = [
            pool.submit(measure, name, seed, args.rounds, args.data_root, args.device)
            for seed in range(args.seeds)
            for name in names
        ]
        for done in as_completed(pending):
            rows.append(done.result())
            print(rows[-1], flush=True)
            ordered = sorted(rows, key=lambda row: (names.index(row["variant"]), row["seed"]))
            # After each run: a device session may end before the last.
            write_results(args.out, {"about": environment_info(), "paper": PAPER, "rows": ordered})


if __name__ == "__main__":
    main()
