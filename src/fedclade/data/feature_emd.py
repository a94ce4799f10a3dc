"""The earth mover's distance between the clients' inputs, by exact optimal transport in a feature
space.
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
from torch import Tensor

from fedclade.core.inputs import as_inputs, one_tensor
from fedclade.data.array_checks import type_name
from fedclade.data.federated_dataset import Clients
from fedclade.data.partitioning.base import Index
from fedclade.errors import InvalidInputError, require_int

# Inputs as a model reads them -> codes, one row per sample.
Features: TypeAlias = Callable[[Tensor], Tensor]
Codes: TypeAlias = NDArray[np.float64]

SAMPLES = 500
DIMENSIONS = 32
FITTED = 5000  # samples from which the principal components are computed
BLOCK = 1000  # samples in one call of an encoder
# Of the simplex method. POT's default of 100,000 stops before the optimum for large samples.
PIVOTS = 100_000_000
STREAM = 0xE3D  # separates these random numbers from other uses of the same seed


@dataclass(frozen=True, eq=False)
class EarthMovers:
    """The result of `earth_movers_distance`, in percent of the mean distance between two training
    inputs.

    Attributes:
        percent: The mean over the clients, weighted by their training samples.
        clients: (clients,) The distance of each client.
        floor: The mean distance that sampling alone causes; it is subtracted from the others.
    """

    percent: float
    clients: Codes
    floor: float


def earth_movers_distance(
    clients: Clients, features: Features | None = None, samples: int = SAMPLES, seed: int = 0
) -> EarthMovers:
    """The distance of the clients' training inputs from those of all clients together: about 0 if
    all clients have the same distribution, at most 100.

    Let P_k be the codes of client k, P those of all clients, and W the Wasserstein-1 distance: the
    least mean Euclidean distance over which P_k must be moved to become P (exact optimal
    transport). The result is the mean of W(P_k, P) − floor_k, in percent of the mean distance
    between two codes of P. Two samples of one distribution have a positive distance too: floor_k is
    the distance of the same number of codes drawn from P. Small samples blur the differences
    between clients, so the value rises with `samples`: compare only values with equal `samples`.

    Labels are not used. FedGMCC (Lucchetti et al., arXiv 2204.11017) does not define the scale of
    its EMDs; the units here are those of fedclade. The package POT is needed (fedclade[ot]).

    Args:
        clients: The clients.
        features: A function from inputs, as a model reads them, to codes with one row per sample;
            None for the first 32 principal components of the inputs.
        samples: The largest number of codes of P_k and of P that are compared.
        seed: The seed of the drawn samples.
    """
    require_int("earth_movers_distance.samples", samples, 2)
    require_int("earth_movers_distance.seed", seed, 0)
    rng = np.random.default_rng([seed, STREAM])
    x = one_tensor(clients.x, "the earth mover's distance", "clients")
    pool = clients.train.index.numpy()
    encode = features or principal_components(x[some(pool, FITTED, rng)], rng)
    measure = Measure(
        lambda rows: codes_of(x[rows], encode), pool, clients.sizes.numpy(), samples, rng
    )
    return measure([clients.train[client].numpy() for client in range(len(clients))])


class Measure:
    """The distance of parts of a pool of rows. The samples are drawn once, so that different
    partitions into parts of these sizes are compared on the same samples.

    Args:
        codes: the codes of rows.
        pool: all rows.
        sizes: the number of rows of each part.
        samples: the largest number of codes of a part and of the pool.
        rng: the source of all random numbers.
    """

    def __init__(
        self,
        codes: Callable[[Index], Codes],
        pool: Index,
        sizes: Index,
        samples: int,
        rng: np.random.Generator,
    ) -> None:
        from scipy.spatial.distance import cdist

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
        scale = self._scale or 1.0  # 0 if all codes are equal: then the costs are 0 too
        distances = (costs - self._floors) / scale
        mean, floor = (
            float(np.average(values, weights=self._sizes))
            for values in (distances, self._floors / scale)
        )
        return EarthMovers(mean, distances, floor)

    def _cost(self, rows: Index) -> float:
        return transport_cost(self._codes(rows), self._everyone)


def transport_cost(a: Codes, b: Codes) -> float:
    """The Wasserstein-1 distance between the uniform distributions on the codes `a` and `b`."""
    from scipy.spatial.distance import cdist

    masses = (np.full(len(codes), 1 / len(codes)) for codes in (a, b))
    return float(optimal_transport().emd2(*masses, cdist(a, b), numItermax=PIVOTS))


def optimal_transport() -> ModuleType:
    """The package POT, which is an optional dependency."""
    try:
        return import_module("ot")
    except ImportError as error:
        raise InvalidInputError(
            "earth mover's distance: needs the package POT, which is not installed: pip install"
            " fedclade[ot].",
            "ot",
        ) from error


def principal_components(x: Tensor, rng: np.random.Generator) -> Features:
    """The first 32 principal components of the samples x: features without training or labels."""
    from sklearn.decomposition import PCA  # type: ignore[import-untyped]  # slow to import

    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise InvalidInputError(
            f"features: inputs of type {type_name(x)} are tokens or ids, between which there is no"
            " distance. Give a function that encodes them (features=…, or `encoder` in a subclass"
            " of the scheme).",
            "features",
        )
    flat = as_inputs(x).flatten(1).numpy()
    with np.errstate(invalid="ignore"):  # if all samples are equal, scikit-learn divides 0 by 0
        fitted = PCA(min(DIMENSIONS, *flat.shape), random_state=int(rng.integers(2**31))).fit(flat)
    return lambda inputs: torch.from_numpy(fitted.transform(inputs.flatten(1).numpy()))


def codes_of(x: Tensor, features: Features) -> Codes:
    """The codes of samples, one row per sample."""
    with torch.inference_mode():
        blocks = [features(as_inputs(block)) for block in torch.split(x, BLOCK)]
    for block, rows in zip(blocks, torch.split(x, BLOCK), strict=True):
        if not isinstance(block, Tensor) or block.ndim < 2 or len(block) != len(rows):
            kind = (
                f"shape {tuple(block.shape)}" if isinstance(block, Tensor) else type(block).__name__
            )
            raise InvalidInputError(
                f"features: returned {kind} for {len(rows)} samples. It must return a tensor with"
                " one row per sample.",
                "features",
            )
        if not bool(block.isfinite().all()):
            raise InvalidInputError(
                "features: returned codes that are NaN or infinite. All must be finite.", "features"
            )
    codes: Codes = torch.cat(blocks).flatten(1).cpu().double().numpy()
    return codes


def some(rows: Index, most: int, rng: np.random.Generator) -> Index:
    """At most `most` rows, drawn without replacement."""
    return rng.choice(rows, min(most, len(rows)), replace=False)
