"""Time and memory of the servers' clustering against the number of clients.

python benchmarks/clustering_scaling.py [--quick] [--only WORDS] [--out
results/speed/clustering_scaling_cpu.json]

Ten true groups. FLT: 5 centers of 128 numbers, 5 points in the plane; CFL and FedSEM: updates of
2,000 numbers; Clade: signatures of 128 numbers; FLIS: predictions on 500 inputs of 10 classes;
FedGMCC: models of 15,910 weights on 128 inputs. One thread. Each point is measured in a separate
process, after a small call that loads libraries. "seconds" is processor time. "more MB" is the
growth of peak memory during the call: it includes the result, but not the inputs. An exponent of 2
between two sizes means four times the time for twice the clients.

With --only, the other rows of the file stay as they are.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from simulator_scaling import alone, peak_mb, table
from threadpoolctl import threadpool_limits
from torch import Tensor

import fedclade as fc
from fedclade.clustering.cfl import bipartition, most_similar, noise_level
from fedclade.clustering.clade import assign_new, split_groups
from fedclade.clustering.cosine import cosine
from fedclade.clustering.fedsem import kmeans_labels, nearest_center
from fedclade.clustering.flis import cluster_predictions, similarity_graph
from fedclade.clustering.flt import embed, mixing_matrix, nearest_signature
from fedclade.clustering.graph import close_components, components, threshold_graph
from fedclade.clustering.linkage import cut_gap, cut_number, linkage
from fedclade.clustering.mode_connectivity import Paths
from fedclade.clustering.set_distances import distances
from fedclade.core.functional_model import Objective
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

Array = NDArray[np.float64]
RNG = np.random.default_rng

GROUPS, CENTRES, EMBEDDING, SKETCH = 10, 5, 128, 128
UPDATE, PROBE, CLASSES = 2_000, 500, 10
NEWCOMERS = 100
QUADRATIC, LINEAR, PAIRS = (100, 1_000, 10_000), (100, 1_000, 10_000, 100_000), (10, 30, 100)


def group_of(clients: int) -> NDArray[np.int64]:
    return np.arange(clients) % GROUPS


def planted(clients: int, *shape: int, noise: float = 0.3) -> NDArray[np.float32]:
    """For each client the numbers of its group with some noise."""
    rows = RNG(1).standard_normal((clients, *shape), np.float32)
    rows *= noise
    kinds = RNG(0).standard_normal((GROUPS, *shape), np.float32)
    for group, kind in enumerate(kinds):
        rows[group::GROUPS] += kind
    return rows


def in_plane(clients: int) -> Array:
    """(clients, 5, 2): a layout with distant groups, and the points of one group within gamma =
    1.
    """
    angle = 2 * math.pi * group_of(clients) / GROUPS
    centre = 50 * np.stack([np.cos(angle), np.sin(angle)], 1)
    return np.asarray(planted(clients, CENTRES, 2) + centre[:, None], np.float64)


def apart(clients: int) -> Array:
    """(clients, clients): distances between one point of each."""
    points = in_plane(clients)[:, 0]
    return np.asarray(cdist(points, points))


def similar(clients: int) -> Array:
    """(clients, clients): cosines of short vectors."""
    vectors = planted(clients, 16).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors @ vectors.T)


def updates(clients: int) -> Tensor:
    return torch.from_numpy(planted(clients, UPDATE))


def predicted(clients: int) -> Tensor:
    """One-hot predictions; four in five equal those of the group."""
    label = RNG(0).integers(0, CLASSES, (GROUPS, PROBE))[group_of(clients)]
    label = np.where(
        RNG(1).random(label.shape) < 0.2, RNG(2).integers(0, CLASSES, label.shape), label
    )
    result = torch.zeros(clients, PROBE, CLASSES)
    return result.scatter_(2, torch.from_numpy(label)[..., None], 1).flatten(1)


def sizes_of(clients: int) -> Array:
    return np.floor(RNG(3).lognormal(4, 0.5, clients)) + 10


def sketches(clients: int) -> Array:
    """Means in units of the noise within clients, with the remaining noise and the groups."""
    noise = RNG(4).standard_normal((clients, SKETCH)) / np.sqrt(sizes_of(clients))[:, None]
    return noise + RNG(0).standard_normal((GROUPS, SKETCH))[group_of(clients)]


def clade_groups(means: Array) -> NDArray[np.int64]:
    size, labels, candidates = sizes_of(len(means)), np.zeros(len(means), np.int64), [0]
    while candidates:
        degrees = np.bincount(labels, size - 1)
        scatter = degrees[:, None, None] * np.eye(SKETCH)
        labels, candidates = split_groups(means, size, scatter, labels, candidates, seed=0)
    return labels


def clade_placed(means: Array) -> NDArray[np.int64]:
    size = sizes_of(len(means))
    return assign_new(means, size, means, size, group_of(len(means)), GROUPS)


def flt_newcomers(centers: NDArray[np.float32]) -> NDArray[np.int64]:
    new, count = centers[:NEWCOMERS] + 0.1, np.full(len(centers), CENTRES)
    return nearest_signature(new, count[:NEWCOMERS], centers, count, "matching")


def flt_mixing(matrix: Array) -> tuple[Tensor, Tensor]:
    graph = threshold_graph(matrix, 1.0)
    return mixing_matrix(components(graph), graph)


def flt_close(points: Array) -> NDArray[np.int64]:
    return close_components(points.reshape(-1, 2), 1.0, np.repeat(np.arange(len(points)), CENTRES))


def cfl_newcomers(vectors: Tensor) -> Tensor:
    cached = torch.from_numpy(planted(1_000, vectors.shape[1]))
    return most_similar(
        vectors,
        torch.zeros(len(vectors), dtype=torch.int64),
        cached,
        torch.zeros(len(cached), dtype=torch.int64),
    )


def gmcc_scores(clients: int) -> Tensor:
    """Created for each call, because `Paths` caches what it has learned."""
    objective = Objective(fc.models.MLP(20).build((784,), CLASSES))
    noise = torch.Generator().manual_seed(0)
    models = {
        name: value + 0.02 * torch.randn(clients, *value.shape, generator=noise)
        for name, value in objective.params().items()
    }
    return Paths(
        objective.outputs, models, torch.rand(128, 784, generator=noise), steps=10
    ).scores()


@dataclass(frozen=True)
class Job:
    inputs: Callable[[int], Any]
    work: Callable[[Any], object]
    sizes: tuple[int, ...]
    compiles: bool = False  # for many seconds: not in a quick run

    @property
    def warm_up(self) -> int:
        """Clients of the first call. Above 4,096 points UMAP compiles another neighbor search."""
        return 1_000 if self.compiles else min(40, self.sizes[0])


JOBS = {
    "FLT: layout by UMAP": Job(
        lambda n: planted(n * CENTRES, EMBEDDING), embed, QUADRATIC, compiles=True
    ),
    "FLT: layout by PCA": Job(
        lambda n: planted(n * CENTRES, EMBEDDING), lambda points: embed(points, "pca"), LINEAR
    ),
    "FLT: distances, matching": Job(in_plane, distances, QUADRATIC),
    "FLT: distances, min": Job(in_plane, lambda points: distances(points, kind="min"), QUADRATIC),
    "FLT: distances, chamfer": Job(
        in_plane, lambda points: distances(points, kind="chamfer"), QUADRATIC
    ),
    "FLT: graph and components": Job(
        apart, lambda matrix: components(threshold_graph(matrix, 1.0)), QUADRATIC
    ),
    "FLT: graph, components and mixing rows": Job(apart, flt_mixing, QUADRATIC),
    "FLT: components without a matrix": Job(in_plane, flt_close, LINEAR),
    "FLT: average linkage, widest gap": Job(
        apart, lambda matrix: cut_gap(linkage(matrix, "average")), QUADRATIC
    ),
    "FLT: Ward, ten groups": Job(
        apart,
        lambda matrix: cut_number(linkage(matrix, "ward"), min(GROUPS, len(matrix))),
        QUADRATIC,
    ),
    "FLT: 100 newcomers": Job(lambda n: planted(n, CENTRES, EMBEDDING), flt_newcomers, LINEAR),
    "CFL: cosines of updates": Job(updates, cosine, QUADRATIC),
    "CFL: bipartition, single": Job(similar, bipartition, QUADRATIC),
    "CFL: bipartition, complete": Job(
        similar, lambda matrix: bipartition(matrix, "complete"), QUADRATIC
    ),
    "CFL: noise": Job(
        similar, lambda matrix: noise_level(matrix, group_of(len(matrix)) < GROUPS // 2), QUADRATIC
    ),
    "CFL: newcomers in the tree": Job(
        lambda n: torch.from_numpy(planted(n, 256)), cfl_newcomers, LINEAR
    ),
    "Clade: groups": Job(sketches, clade_groups, LINEAR),
    "Clade: newcomers": Job(sketches, clade_placed, LINEAR),
    "FLIS-DC: who is alike": Job(predicted, lambda rows: similarity_graph(rows, 0.5), QUADRATIC),
    "FLIS-HC: clusters": Job(
        predicted, lambda rows: cluster_predictions(rows, 0.3, "average"), QUADRATIC
    ),
    "FedSEM: k-means": Job(
        updates, lambda vectors: kmeans_labels(vectors, GROUPS, seed=0), QUADRATIC
    ),
    "FedSEM: nearest centers": Job(
        updates, lambda vectors: nearest_center(vectors, updates(GROUPS)), LINEAR
    ),
    "FedGMCC: all pairs": Job(lambda n: n, gmcc_scores, PAIRS),
}


def measured(name: str, clients: int) -> dict[str, float]:
    """The seconds of one call; the fastest of several if it is short."""
    job = JOBS[name]
    torch.set_num_threads(1)
    with threadpool_limits(1):
        job.work(job.inputs(min(clients, job.warm_up)))
        inputs = job.inputs(clients)
        before = peak_mb()
        times: list[float] = []
        while len(times) < 5 and sum(times) < 0.5:
            begin = time.process_time()
            job.work(inputs)
            times.append(time.process_time() - begin)
    return {"seconds": min(times), "more MB": peak_mb() - before, "peak MB": peak_mb()}


def grown(now: dict[str, Any], before: dict[str, Any] | None, what: str) -> float | None:
    """The exponent of the growth between two sizes; None if there is nothing to compare."""
    if before is None or min(now[what], before[what]) <= 0:
        return None
    return math.log(now[what] / before[what]) / math.log(now["clients"] / before["clients"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--only", default="", help="only names that contain these words")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, job in JOBS.items():
        if args.only not in name or (args.quick and job.compiles):
            continue
        before = None
        for clients in (job.sizes[0], 3 * job.sizes[0]) if args.quick else job.sizes:
            now: dict[str, Any] = {
                "what": name,
                "clients": clients,
                **alone(measured, name, clients, start="fork"),
            }
            rows.append(
                now
                | {
                    "time exponent": grown(now, before, "seconds"),
                    "memory exponent": grown(now, before, "more MB"),
                }
            )
            print(f"{name}, {clients}: {now['seconds']:.4g} s, {now['more MB']:.0f} MB", flush=True)
            before = now
    print(table("what servers compute", rows))
    if args.out:
        measured_names = {row["what"] for row in rows}
        earlier = read_results(args.out)["points"] if args.only and args.out.exists() else []
        kept = [row for row in earlier if row["what"] not in measured_names]
        write_results(args.out, {"about": environment_info("cpu"), "points": kept + rows})


if __name__ == "__main__":
    main()
