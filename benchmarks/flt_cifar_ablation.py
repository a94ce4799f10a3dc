"""Why FLT misses its number on CIFAR-10, Scenario 2: which difference from the paper's experiment
loses the relations, and which changes the accuracy.

python benchmarks/flt_cifar_ablation.py --data-root FOLDER [--device cuda] [--seeds 3]
[--parts relations accuracy] [--out results/methods/flt_cifar_ablation.json]

Relations need no federated training: an encoder embeds the images, each client sends its k-means
centers, and the relations are compared with the true groups. One setting at a time differs from the
first row, which is Table 2's Enc1: an encoder trained on CIFAR-20 for 5 epochs, e = 128, k = 3, the
best matching, UMAP with u = 2, samples of shared classes divided. Encoders are trained once;
client signatures are computed in worker processes.

Accuracy: 100 rounds of FedAvg inside the true groups, which is the bound of FLT, and of FLT with
the encoder of the first row, both with reused samples; Table 2 has the same with divided samples.
FOLDER has cifar10.npz and cifar100.npz.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.clustering.flt import Distance, Manifold, cluster_signatures
from fedclade.core.inputs import one_tensor
from fedclade.core.rng import fold_in
from fedclade.engines.device import pick_device
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods.flt import FLT, FLTState
from fedclade.programs.encoder_signature import centres_of
from fedclade.reproduce.encoder_data import encoder_data
from fedclade.reproduce.execute import thinned
from fedclade.training import encoders
from fedclade.training.setup import inject_context

CLIENTS, GROUPS, GAMMA = 100, 5, 1.0
OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "flt_cifar_ablation.json"


@dataclass(frozen=True)
class Setting:
    """One way to compute the relations. The defaults are Table 2's Enc1."""

    name: str = "Table 2, Enc1"
    encoder: str = "cifar20"
    epochs: int = 5
    code: int = 128
    fine_tune: str = "none"
    k: int = 3
    distance: Distance = "matching"
    manifold: Manifold = "umap"
    dim: int = 2
    reuse: bool = False

    @property
    def trained(self) -> tuple[str, int, int]:
        return self.encoder, self.epochs, self.code


SETTINGS = (
    Setting(),
    Setting("encoder: CIFAR-100 only, as before", encoder="cifar100"),
    Setting("encoder: CIFAR-10 only", encoder="cifar10"),
    Setting("encoder: 15 epochs", epochs=15),
    Setting("e = 64, as in the authors' code", code=64),
    Setting("Enc2: CIFAR-100, fine-tuned per client", encoder="cifar100", fine_tune="client"),
    Setting("CIFAR-100, fine-tuned by FedAvg", encoder="cifar100", fine_tune="federated"),
    Setting("k = 5, as printed", k=5),
    Setting("k = 2", k=2),
    Setting("distance: min, as printed", distance="min"),
    Setting("distance: chamfer", distance="chamfer"),
    Setting("UMAP with u = 3", dim=3),
    Setting("samples reused, 166 of each class", reuse=True),
    Setting("samples reused, CIFAR-100 only", encoder="cifar100", reuse=True),
    Setting("samples reused, e = 64", code=64, reuse=True),
)


def scheme(args: argparse.Namespace, reuse: bool) -> fc.data.LabelClusters:
    samples = (
        (args.samples or 50_000) // args.clients // 3 * 3 if reuse else None
    )  # 166 of each class
    return fc.data.LabelClusters(GROUPS, 3, overlap=1, samples=samples, reuse=reuse)


def compared(groups: np.ndarray, related: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The groups and relations found against the true groups, over pairs of different clients."""
    pairs = ~np.eye(len(true), dtype=bool)
    same, found = (true[:, None] == true)[pairs], related[pairs]
    return {
        "groups": len(np.unique(groups)),
        "ari": round(float(adjusted_rand_score(true, groups)), 4),
        "related_and_same_group": round(float(same[found].mean()) if found.any() else 1.0, 4),
        "same_group_and_related": round(float(found[same].mean()), 4),
    }


def relate(
    centers: np.ndarray, counts: np.ndarray, true: np.ndarray, setting: Setting, seed: int
) -> dict[str, float]:
    groups, related = cluster_signatures(
        centers,
        counts,
        setting.manifold,
        setting.distance,
        "threshold",
        GAMMA,
        None,
        fold_in(fold_in(seed, "init"), "manifold") % 2**32,
        dim=setting.dim,
    )
    assert related is not None
    return compared(groups, related.toarray(), true)


def from_codes(
    codes_file: str, rows: list[np.ndarray], true: np.ndarray, setting: Setting, seed: int
) -> dict[str, float]:
    """In a worker: the relations from the codes of all images, without fine-tuning."""
    torch.set_num_threads(1)
    codes = np.load(codes_file, mmap_mode="r")
    centers = [
        centres_of(np.asarray(codes[own]), setting.k, seed=fold_in(seed, "client", client) % 2**32)
        for client, own in enumerate(rows)
    ]
    counts = np.array([len(own) for own in centers])
    padded = np.zeros((len(rows), setting.k, codes.shape[1]), np.float32)
    for client, own in enumerate(centers):
        padded[client, : len(own)] = own
    return relate(padded, counts, true, setting, seed)


def fine_tuned(
    clients: fc.data.Clients, module: Any, setting: Setting, seed: int, device: str
) -> dict[str, float]:
    """The relations after fine-tuning, by the method itself."""
    method = FLT(k=setting.k, manifold="none", fine_tune=setting.fine_tune, encoder_module=module)  # type: ignore[arg-type]
    fed = fc.Simulator(clients, device=device)
    state = inject_context(method, clients.metadata, seed).init(
        fed, {"w": torch.zeros(1)}, fold_in(seed, "init")
    )
    assert isinstance(state, FLTState)
    assert clients.groups is not None
    return relate(
        state.centres.numpy(), state.counts.numpy(), clients.groups.numpy(), setting, seed
    )


@torch.no_grad()
def all_codes(module: Any, images: torch.Tensor, device: str) -> np.ndarray:
    module = module.to(device).eval()
    codes = [
        module.encode(block.to(device).float() / 255).cpu() for block in torch.split(images, 2_000)
    ]
    module.cpu()
    return torch.cat(codes).numpy()


def relations(args: argparse.Namespace, settings: tuple[Setting, ...]) -> list[dict[str, Any]]:
    data = fc.data.load("cifar10", args.data_root)
    if args.samples:
        data = thinned(data, args.samples)
    federations = {
        (reuse, seed): fc.data.partition(data, scheme(args, reuse), args.clients, seed, probe=0)
        for reuse in sorted({setting.reuse for setting in settings})
        for seed in range(args.seeds)
    }
    found: dict[tuple[str, int], Any] = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(args.workers, mp_context=spawn) as pool,
    ):
        for trained in dict.fromkeys(setting.trained for setting in settings):
            name, epochs, code = trained
            begin = time.perf_counter()
            train_on = encoder_data(name, args.data_root)
            if args.samples:
                train_on = thinned(train_on, args.samples)
            module = encoders.pretrain(train_on, epochs=epochs, code=code, device=args.device)
            file = Path(folder) / f"{name}-{epochs}-{code}.npy"
            np.save(
                file, all_codes(module, one_tensor(data.x_train, "an encoder", "data"), args.device)
            )
            print(f"encoder {trained}: {time.perf_counter() - begin:.0f} s", flush=True)
            for setting in settings:
                for seed in range(args.seeds if setting.trained == trained else 0):
                    clients = federations[setting.reuse, seed]
                    assert clients.groups is not None
                    if setting.fine_tune == "none":
                        rows = [clients.train[client].numpy() for client in range(len(clients))]
                        found[setting.name, seed] = pool.submit(
                            from_codes, str(file), rows, clients.groups.numpy(), setting, seed
                        )
                    else:
                        found[setting.name, seed] = fine_tuned(
                            clients, module, setting, seed, args.device
                        )
        results = []
        for setting in settings:
            for seed in range(args.seeds):
                result = found[setting.name, seed]
                result = result if isinstance(result, dict) else result.result()
                results.append({"setting": setting.name, "seed": seed, **result})
                print(results[-1], flush=True)
    return results


def accuracy(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The accuracy of the true groups and of FLT where groups reuse samples."""
    data = fc.data.load("cifar10", args.data_root)
    train_on = encoder_data("cifar20", args.data_root)
    if args.samples:
        data, train_on = thinned(data, args.samples), thinned(train_on, args.samples)
    module = encoders.pretrain(train_on, epochs=Setting().epochs, device=args.device)
    flt = FLT(k=3, fine_tune="none", encoder_module=module)
    methods: dict[str, fc.Method[Any]] = {"True groups": fc.Oracle(), "FLT": flt}
    results = []
    for seed in range(args.seeds):
        clients = fc.data.partition(data, scheme(args, reuse=True), args.clients, seed, probe=0)
        for name, method in methods.items():
            begin = time.perf_counter()
            result = fc.run(
                method,
                clients,
                fc.models.LeNet5(centred=True),
                rounds=args.rounds,
                clients_per_round=0.2,
                lr=0.01,
                batch_size=10,
                epochs=5,
                momentum=0.5,
                seed=seed,
                eval_every=0,
                device=args.device,
            )
            numbers = {key: round(result.summary[key] or 0.0, 4) for key in ("accuracy", "ari")}
            results.append({"method": name, "seed": seed, **numbers})
            print(results[-1], f"{time.perf_counter() - begin:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--parts", nargs="+", default=["relations", "accuracy"])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--samples", type=int, help="use at most this many images of a data set")
    parser.add_argument("--settings", nargs="*", help="names of settings; all by default")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.device = pick_device(args.device).type
    settings = tuple(s for s in SETTINGS if not args.settings or s.name in args.settings)
    # The parts may be measured one after the other.
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    content |= {"about": environment_info(args.device), "clients": args.clients}
    for part in args.parts:
        begin = time.perf_counter()
        content[part] = relations(args, settings) if part == "relations" else accuracy(args)
        content[f"{part}_seconds"] = round(time.perf_counter() - begin, 1)
        write_results(args.out, content)


if __name__ == "__main__":
    main()
