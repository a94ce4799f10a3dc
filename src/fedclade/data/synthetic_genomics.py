"""Synthetic genomic reads like those of FedGMCC: which parts of a read differ from the reference?
The clients are populations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.data.datasets import DATASETS, Dataset
from fedclade.data.partitioning.base import Index, Split
from fedclade.data.partitioning.skewed import NaturalId
from fedclade.data.partitioning.transforms import relabel
from fedclade.errors import InvalidInputError, require, require_int

BASES = 4
KMER = 5
READ = 30  # k-mers of a read: 150 bases
CODE = 64  # bits of the code of a k-mer
REFERENCE = 600  # k-mers of the reference: 3,000 bases, few enough for a model to memorize
SITES = 0.1  # the fraction of the bases that vary
INDIVIDUALS = 20  # of a population, for training; a quarter of this number for testing


def genomic(
    populations: int = 10, reads: int = 1000, divergence: float = 0.3, seed: int = 0
) -> Dataset:
    """Synthetic genomic reads: which 5-mers of a read differ from the reference?

    The data follow FedGMCC (Lucchetti et al., arXiv 2204.11017), whose reads come from 1000
    Genomes:

    1. The reference has 3,000 random bases.
    2. A tenth of the bases vary, with one other base each. The ancestral frequency of that base is
       drawn from U(0.05, 0.95). Its frequency in each population follows from it by the model of
       Balding and Nichols with F_ST = `divergence`. An individual has two copies of the genome,
       whose sites are drawn independently.
    3. A read has 150 bases. It starts at a random 5-mer of a random copy and is cut into 30 5-mers.
       The label of a 5-mer is 1 if it differs from the 5-mer of the reference at the same position.
       The inputs contain neither the reference nor the position: a model must learn them.

    A sample is a read: x (30, 64), with a fixed random code of 64 bits for each of the 4^5 5-mers;
    y (30,). The key "population" has the population of each read.

    Args:
        populations: The number of populations.
        reads: The number of training reads of each population. There are a quarter as many test
            reads, from other individuals.
        divergence: F_ST, from 0 (all populations have the same frequencies) to below 1 (each
            population has its own variants).
        seed: The seed of all random numbers.
    """
    for field, value in (("populations", populations), ("reads", reads)):
        require_int(f"genomic.{field}", value, 1)
    between = isinstance(divergence, Real) and 0 <= float(divergence) < 1
    require(
        between,
        "genomic.divergence",
        divergence,
        "must be a number from 0 up to, but not including, 1",
    )
    require_int("genomic.seed", seed, 0)
    rng = np.random.default_rng(seed)
    # Models read bytes as x / 255.
    bits = torch.from_numpy(rng.integers(0, 2, (BASES**KMER, CODE), np.uint8) * np.uint8(255))
    reference = rng.integers(0, BASES, REFERENCE * KMER)
    sites = np.sort(rng.choice(len(reference), round(SITES * len(reference)), replace=False))
    variant = (reference[sites] + rng.integers(1, BASES, len(sites))) % BASES
    frequency = _frequencies(rng.uniform(0.05, 0.95, len(sites)), populations, divergence, rng)

    parts = []
    for individuals, number in (
        (INDIVIDUALS, reads),
        (max(1, INDIVIDUALS // 4), max(1, reads // 4)),
    ):
        copies = np.tile(reference, (populations, 2 * individuals, 1))
        varies = rng.random((populations, 2 * individuals, len(sites))) < frequency[:, None]
        copies[:, :, sites] = np.where(varies, variant, reference[sites])
        kmers, labels = _reads(copies, reference, number, rng)
        parts.append((bits[kmers], labels, torch.arange(populations).repeat_interleave(number)))
    (x, y, population), (x_test, y_test, test_population) = parts
    return Dataset("genomic", x, y, x_test, y_test, {"population": (population, test_population)})


DATASETS["genomic"] = genomic


def _frequencies(
    ancestral: NDArray[np.float64], populations: int, divergence: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """(populations, sites) frequencies, drawn from Beta(p (1 − F) / F, (1 − p)(1 − F) / F), which
    has mean p and variance F p (1 − p).
    """
    if divergence == 0:
        return np.tile(ancestral, (populations, 1))
    spread = (1 - divergence) / divergence
    return rng.beta(ancestral * spread, (1 - ancestral) * spread, (populations, len(ancestral)))


def _reads(
    copies: Index, reference: Index, number: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k-mers and labels of `number` reads of each population, from its `copies` (populations,
    copies, bases).
    """
    populations, num_copies = copies.shape[:2]
    place = BASES ** np.arange(KMER)[::-1]
    genomes, original = (
        copies.reshape(populations * num_copies, -1, KMER) @ place,
        reference.reshape(-1, KMER) @ place,
    )
    copy_of_read = np.arange(populations).repeat(number) * num_copies + rng.integers(
        0, num_copies, populations * number
    )
    at = rng.integers(0, len(original) - READ + 1, populations * number)[:, None] + np.arange(READ)
    kmers = genomes[copy_of_read[:, None], at]
    return torch.from_numpy(kmers), torch.from_numpy((kmers != original[at]).astype(np.int64))


@dataclass(frozen=True)
class FlippedId(NaturalId):
    """Each client is one id of a key; some clients have reversed labels.

    It is `NaturalId` with two true groups: with two classes, 0 becomes 1 and 1 becomes 0 in the
    second group. These are the non-IID genomic clients of FedGMCC.

    Args:
        key: The key of the data set whose ids are the clients.
        test_fraction: As in `NaturalId`.
        flipped: The fraction of the clients, drawn at random, whose training and test labels are
            reversed.
    """

    name: ClassVar[str] = "flipped_id"
    key: str = "population"
    flipped: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        is_fraction = (
            isinstance(self.flipped, Real)
            and not isinstance(self.flipped, bool)
            and 0 <= float(self.flipped) <= 1
        )
        require(is_fraction, "partition.flipped", self.flipped, "must be a number from 0 to 1")

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        if data.classes is None:
            raise InvalidInputError(
                f"partition.name = {self.name!r}: it reverses class labels, but the targets of"
                f" {data.name!r} are floats. Use natural_id.",
                "partition.name",
            )
        groups = np.zeros(clients, np.int64)
        groups[rng.choice(clients, round(self.flipped * clients), replace=False)] = 1
        labels = np.arange(data.classes)
        return replace(
            super().split(data, clients, rng),
            groups=groups,
            transform=relabel(np.stack([labels, labels[::-1]])),
        )
