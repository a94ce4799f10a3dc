"""fedjax: its federated averaging, with the default backend for one device (jax.jit of a client's
step).
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

import fedjax
import haiku
import jax
from worker import BATCH, LEARNING_RATE, Job, Turns, write_weights


def main(job_path: str, out_path: str) -> None:
    job = Job(job_path)
    hidden, classes = (len(job.weights[name]) for name in ("0.bias", "2.bias"))
    forward = haiku.transform(lambda batch: haiku.nets.MLP([hidden, classes])(batch["x"]))
    model = fedjax.create_model_from_haiku(
        forward,
        sample_batch={"x": job.x[0, :1], "y": job.y[0, :1]},
        train_loss=lambda batch, outputs: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], outputs
        ),
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        fedjax.model_grad(model),
        client_optimizer=fedjax.optimizers.sgd(LEARNING_RATE),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH),
    )
    layers = {
        "mlp/~/linear_0": "0",
        "mlp/~/linear_1": "2",
    }  # haiku's names and ours; haiku's matrices are inputs × outputs
    state = algorithm.init(
        {
            name: {"w": job.weights[f"{at}.weight"].T, "b": job.weights[f"{at}.bias"]}
            for name, at in layers.items()
        }
    )
    clients = [fedjax.ClientDataset({"x": x, "y": y}) for x, y in zip(job.x, job.y, strict=True)]
    keys = jax.random.PRNGKey(0)

    versions = {name: version(name) for name in ("fedjax", "jax", "jaxlib", "dm-haiku", "numpy")}
    turns = Turns(job.rounds, versions, threads=len(os.sched_getaffinity(0)))
    for cohort in job.cohorts:
        keys, *own = jax.random.split(keys, 1 + len(cohort))
        state, _ = algorithm.apply(
            state, [(client, clients[client], key) for client, key in zip(cohort, own, strict=True)]
        )
        jax.block_until_ready(state.params)
        turns.round_done()
    weights = {f"{at}.weight": state.params[name]["w"].T for name, at in layers.items()}
    biases = {f"{at}.bias": state.params[name]["b"] for name, at in layers.items()}
    write_weights(out_path, weights | biases)


if __name__ == "__main__":
    main(*sys.argv[1:])
