"""Signatures by embedding: a client fine-tunes an autoencoder, embeds its samples and replies with
the centers of the embeddings.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import grad, vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Batch
from fedclade.core.inputs import one_tensor
from fedclade.core.kmeans import kmeans, single_threaded
from fedclade.core.local_sgd import chain_training
from fedclade.core.program import AnyProgram, Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.errors import InvalidInputError
from fedclade.programs.gaussian_mechanism import SUM, after, clipped, noise_for, trace_of

Centres: TypeAlias = int | Literal["auto"]
Codes: TypeAlias = NDArray[np.float32]

MOST_CENTRES = 8  # the largest k that k = "auto" may choose
_RESTARTS = 10
_BLOCK = 256  # samples embedded at a time
_SILHOUETTE_SAMPLES = 500
_BATCH, _LR, _BETA1, _BETA2, _EPSILON = (
    32,
    1e-3,
    0.9,
    0.999,
    1e-8,
)  # of the fine-tuning: Adam with the defaults of its paper


@serializable_program
def autoencode(encoder: Encoder, epochs: int) -> Program:
    """Train the autoencoder on the client's samples by Adam. Its weights are in `broadcast`. The
    reply is the trained weights.

    Args:
        encoder: the autoencoder.
        epochs: passes over the client's samples.
    """
    if not encoder.reconstructs or not encoder.trained:
        raise InvalidInputError(
            "method.encoder: fine-tuning needs a module with trainable parameters and a method"
            " `encode`. Use method.fine_tune = 'none'.",
            "method.encoder",
        )

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        sent = strip_prefix("encoder", broadcast)
        w = {name: sent[name] for name in encoder.trained}
        zeros = tree_map(torch.zeros_like, w)
        steps = torch.zeros((), device=next(iter(w.values())).device)
        return {}, add_prefix("w", w) | add_prefix("mean", zeros) | add_prefix("square", zeros) | {
            "steps": steps
        }

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        w, steps = strip_prefix("w", carry), carry["steps"] + 1
        g = grad(encoder.loss)(w, strip_prefix("encoder", broadcast), batch)
        mean = tree_map(
            lambda old, new: _BETA1 * old + (1 - _BETA1) * new, strip_prefix("mean", carry), g
        )
        square = tree_map(
            lambda old, new: _BETA2 * old + (1 - _BETA2) * new**2, strip_prefix("square", carry), g
        )
        rate, scale = broadcast["lr"] / (1 - _BETA1**steps), (1 - _BETA2**steps).rsqrt()
        w = tree_map(lambda p, m, s: p - rate * m / (s.sqrt() * scale + _EPSILON), w, mean, square)
        return (
            add_prefix("w", w)
            | add_prefix("mean", mean)
            | add_prefix("square", square)
            | {"steps": steps}
        )

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return strip_prefix("w", carry), None

    return Program(
        start, step, finish, Batches(_BATCH, epochs), "autoencode", hyperparams={"lr": _LR}
    )


@serializable_program
def signature(encoder: Encoder, k: Centres, fine_tune: int = 0) -> AnyProgram:
    """Embed all samples and cluster the embeddings. The reply is `centres` (k, e), of which the
    first `count` are real and the rest zeros.

    Args:
        encoder: the encoder.
        k: the number of centers, or "auto".
        fine_tune: epochs of `autoencode` before the embedding. The trained weights stay with the
            client.
    """
    rows = MOST_CENTRES if k == "auto" else k

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return encoder.needed(strip_prefix("encoder", broadcast) | params), {}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        codes = encoder.codes(const, batch.x)
        return (
            {"codes": torch.cat([carry["codes"], codes]), "key": carry["key"]}
            if carry
            else {"codes": codes, "key": batch.key}
        )

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        codes = carry["codes"]
        real = centres_of(codes.cpu().numpy(), k, seed=int(carry["key"]))
        centres = codes.new_zeros((rows, codes.shape[1]))
        centres[: len(real)] = torch.from_numpy(real).to(codes)
        return {"centres": centres, "count": torch.tensor(len(real), device=codes.device)}, None

    program = Program(start, step, finish, Batches.whole(_BLOCK), "signature", vectorized=False)
    return chain_training(autoencode(encoder, fine_tune), program) if fine_tune else program


@serializable_program
def private_signature(encoder: Encoder, clip: float, noise: float, secret: int) -> Program:
    """One center: the mean of the embeddings, clipped to the norm `clip`, with Gaussian noise
    (gaussian_mechanism.py) of `noise` times the sensitivity.

    Several centers have no useful bound of the sensitivity: one example may move all of them far.

    Args:
        encoder: the encoder.
        clip: the largest norm of an embedding.
        noise: the standard deviation of the noise, in units of the sensitivity.
        secret: the client's secret, from which the noise is made.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        weights = encoder.needed(strip_prefix("encoder", broadcast))
        return weights, {"trace": trace_of(clip, noise, *weights.values())}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        x = one_tensor(batch.x, "method flt", "method.name")
        # Each example alone: if examples could affect each other, the sensitivity would differ.
        codes = clipped(vmap(lambda x: encoder.codes(const, x[None])[0])(x).double(), clip)
        batch_sums = {"sum": codes.sum(0), "size": codes.new_tensor(len(codes))}
        sums = tree_map(torch.add, batch_sums, carry) if "sum" in carry else batch_sums
        return sums | {"trace": after(carry["trace"], x)}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        error = SUM * clip * noise * noise_for(carry["trace"], secret, like=carry["sum"])
        mean = (carry["sum"] + error) / carry["size"]
        return {"centres": mean[None].float(), "count": torch.tensor(1, device=mean.device)}, None

    return Program(start, step, finish, Batches.whole(_BLOCK), "signature", vectorized=False)


def centres_of(codes: Codes, k: Centres, seed: int) -> Codes:
    """The centers of k-means; fewer than k if fewer samples are distinct. Codes that are not finite
    have one center, which is not finite either.
    """
    if not np.isfinite(codes).all():
        return np.asarray(codes.mean(0, keepdims=True))  # the engine rejects such a reply
    distinct = len(np.unique(codes, axis=0))
    if k == "auto":
        return _by_silhouette(codes, distinct, seed)
    return kmeans(codes, min(k, distinct), restarts=_RESTARTS, seed=seed)[0]


def _by_silhouette(codes: Codes, distinct: int, seed: int) -> Codes:
    """The centers for the k with the highest silhouette score, k ≥ 2: the score is defined neither
    for one center nor for as many centers as samples.
    """
    from sklearn.metrics import silhouette_score  # type: ignore[import-untyped]

    most = min(MOST_CENTRES, distinct - 1)
    if most < 2:
        return kmeans(codes, distinct, restarts=_RESTARTS, seed=seed)[0]
    sample = np.random.default_rng(seed).permutation(len(codes))[:_SILHOUETTE_SAMPLES]
    best, best_score = codes[:1], -np.inf
    for k in range(2, most + 1):
        centres, labels = kmeans(codes, k, restarts=_RESTARTS, seed=seed)
        if not 2 <= len(np.unique(labels[sample])) < len(sample):
            continue
        with single_threaded():
            score = silhouette_score(codes[sample], labels[sample])
        if score > best_score:
            best, best_score = centres, score
    return best
