"""How far the clients' inputs are from one another: earth mover's distance by exact optimal
transport in a feature space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from torch import Tensor

from fedclade.data.array_checks import type_name
from fedclade.data.federated_dataset import Clients, as_inputs
from fedclade.data.partitioning.base import Index
from fedclade.errors import InvalidInputError, require_int

Features: TypeAlias = Callable[
    [Tensor], Tensor
]  # inputs as a model reads them -> codes, one row a sample
Codes: TypeAlias = NDArray[np.float64]

SAMPLES = 500
DIMENSIONS = 32
FITTED = 5000  # samples that the principal components are made from
BLOCK = 1000  # samples in one call of an encoder
# of the simplex method: POT stops at 100,000 by itself, short of the optimum for large samples
PIVOTS = 100_000_000
STREAM = 0xE3D  # keeps these random numbers apart from any other use of the same seed


@dataclass(frozen=True, eq=False)
class EarthMovers:
    """What `earth_movers_distance` measures, in percent of the mean distance between two training
    inputs.
    """

    percent: float  # mean over the clients, weighted by their training samples
    clients: Codes  # of each client
    floor: float  # what sampling alone gives, which is taken off


def earth_movers_distance(
    clients: Clients, features: Features | None = None, samples: int = SAMPLES, seed: int = 0
) -> EarthMovers:
    """How far the clients' training inputs are from those of all clients together: about 0 where
    all are alike, 100 at the very most.

    With P_k the codes of client k, P those of all clients and W the least mean Euclidean distance
    over which the one has to be moved to become the other (exact optimal transport), it is the mean
    of W(P_k, P) − floor_k in percent of the mean distance between two codes of P. At most `samples`
    codes of each are compared; even samples of one distribution are some way apart, so floor_k is
    what as many codes drawn from P come to. Samples blur what sets clients apart: with more of them
    the value rises, so compare like with like.

    `features` makes codes of inputs as a model reads them; None takes the first 32 principal
    components of the inputs. Labels play no part. FedGMCC (Lucchetti et al., arXiv 2204.11017)
    gives its EMDs on a scale that it does not define: the units are ours.
    """
    require_int("earth_movers_distance.samples", samples, 2)
    require_int("earth_movers_distance.seed", seed, 0)
    rng = np.random.default_rng([seed, STREAM])
    pool = clients.train.index.numpy()
    encode = features or principal_components(clients.x[some(pool, FITTED, rng)], rng)
    measure = Measure(
        lambda rows: codes_of(clients.x[rows], encode), pool, clients.sizes.numpy(), samples, rng
    )
    return measure([clients.train[client].numpy() for client in range(len(clients))])


class Measure:
    """The distance of parts of the rows `pool`. All that is drawn is drawn once: partitions into
    parts of these sizes compare exactly.
    """

    def __init__(
        self,
        codes: Callable[[Index], Codes],
        pool: Index,
        sizes: Index,
        samples: int,
        rng: np.random.Generator,
    ) -> None:
        self._codes = codes
        self._sizes = sizes
        self._everyone = codes(some(pool, samples, rng))
        count = len(self._everyone)
        self._scale = (
            cdist(self._everyone, self._everyone).sum() / max(1, count * (count - 1)) / 100
        )
        self._floors = np.array([self._cost(some(pool, min(samples, size), rng)) for size in sizes])
        self._places = [some(np.arange(size), samples, rng) for size in sizes]

    def __call__(self, parts: Sequence[Index]) -> EarthMovers:
        costs = np.array(
            [self._cost(part[places]) for part, places in zip(parts, self._places, strict=True)]
        )
        scale = self._scale or 1.0  # all codes are equal: nothing has to be moved
        each = (costs - self._floors) / scale
        mean, floor = (
            float(np.average(values, weights=self._sizes))
            for values in (each, self._floors / scale)
        )
        return EarthMovers(mean, each, floor)

    def _cost(self, rows: Index) -> float:
        return transport_cost(self._codes(rows), self._everyone)


def transport_cost(a: Codes, b: Codes) -> float:
    """The least mean Euclidean distance over which equal masses on the codes `a` are moved to equal
    masses on `b`.
    """
    masses = (np.full(len(codes), 1 / len(codes)) for codes in (a, b))
    return float(optimal_transport().emd2(*masses, cdist(a, b), numItermax=PIVOTS))


def optimal_transport() -> ModuleType:
    """The package POT: an extra, since few need it."""
    try:
        return import_module("ot")
    except ImportError as error:
        raise InvalidInputError(
            "earth mover's distance: needs the package POT, which is not installed: pip install"
            " fedclade[ot]."
        ) from error


def principal_components(x: Tensor, rng: np.random.Generator) -> Features:
    """The first 32 principal components of the samples x: features that need no training and look
    at no labels.
    """
    from sklearn.decomposition import PCA  # type: ignore[import-untyped]  # slow to import

    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise InvalidInputError(
            f"features: inputs of type {type_name(x)} are numbers of words or the like, which have"
            " no distance of their own; give a function that makes codes of them (features=…, or"
            " the encoder of a scheme of your own)."
        )
    flat = as_inputs(x).flatten(1).numpy()
    with np.errstate(invalid="ignore"):  # where all samples are equal their variance has no shares
        fitted = PCA(min(DIMENSIONS, *flat.shape), random_state=int(rng.integers(2**31))).fit(flat)
    return lambda inputs: torch.from_numpy(fitted.transform(inputs.flatten(1).numpy()))


def codes_of(x: Tensor, features: Features) -> Codes:
    """The codes of samples, a row each."""
    with torch.inference_mode():
        blocks = [features(as_inputs(block)) for block in torch.split(x, BLOCK)]
    for block, rows in zip(blocks, torch.split(x, BLOCK), strict=True):
        if not isinstance(block, Tensor) or block.ndim < 2 or len(block) != len(rows):
            given = (
                f"shape {tuple(block.shape)}" if isinstance(block, Tensor) else type(block).__name__
            )
            raise InvalidInputError(
                f"features: gave {given} for {len(rows)} samples; give a tensor with one row a"
                " sample."
            )
        if not bool(block.isfinite().all()):
            raise InvalidInputError(
                "features: gave codes that are NaN or infinite; all must be finite."
            )
    codes: Codes = torch.cat(blocks).flatten(1).cpu().double().numpy()
    return codes


def some(rows: Index, most: int, rng: np.random.Generator) -> Index:
    """At most this number of rows, drawn without replacement."""
    return rng.choice(rows, min(most, len(rows)), replace=False)
