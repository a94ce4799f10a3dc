"""Genomic reads made up after FedGMCC's: which parts of a read differ from the reference?
Populations are the clients.
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
CODE = 64  # numbers for a k-mer
REFERENCE = 600  # k-mers of the reference: 3,000 bases, few enough to be learned by heart
SITES = 0.1  # the share of the bases that vary
INDIVIDUALS = 20  # of a population, for training; a quarter as many others are tested


def genomic(
    populations: int = 10, reads: int = 1000, divergence: float = 0.3, seed: int = 0
) -> Dataset:
    """Made-up genomic reads of several populations; for each 5-mer of a read: does it differ from
    the reference?

    After FedGMCC (Lucchetti et al., arXiv 2204.11017), whose reads come from 1000 Genomes:

    1. A reference of 3,000 random bases.
    2. Individuals. A tenth of the bases vary, with one other base each. That base's frequency is
    drawn once, U(0.05, 0.95), and departs
       from it in each population by the model of Balding and Nichols, in which `divergence` is
       F_ST: 0, all populations are alike; near 1, each has its own variants. An individual has two
       copies of the genome, drawn site by site.
    3. Reads of 150 bases that begin at a random 5-mer of a random copy, cut into 30 5-mers. The
    label of a 5-mer is 1 where it differs
       from that of the reference in the same place. Neither the reference nor the place is given: a
       model has to learn them.

    A sample is a read: x (30, 64), a fixed random code of 64 bits for each of the 4^5 5-mers; y
    (30,). `reads` is the number for training of each population; a quarter as many, of other
    individuals, are for testing. The key "population" says whose a read is.
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
    bits = torch.from_numpy(
        rng.integers(0, 2, (BASES**KMER, CODE), np.uint8) * np.uint8(255)
    )  # bytes are read as x / 255
    reference = rng.integers(0, BASES, REFERENCE * KMER)
    nodes = np.sort(rng.choice(len(reference), round(SITES * len(reference)), replace=False))
    variant = (reference[nodes] + rng.integers(1, BASES, len(nodes))) % BASES
    frequency = _frequencies(rng.uniform(0.05, 0.95, len(nodes)), populations, divergence, rng)

    parts = []
    for individuals, number in (
        (INDIVIDUALS, reads),
        (max(1, INDIVIDUALS // 4), max(1, reads // 4)),
    ):
        copies = np.tile(reference, (populations, 2 * individuals, 1))
        drawn = rng.random((populations, 2 * individuals, len(nodes))) < frequency[:, None]
        copies[:, :, nodes] = np.where(drawn, variant, reference[nodes])
        kmers, labels = _reads(copies, reference, number, rng)
        parts.append((bits[kmers], labels, torch.arange(populations).repeat_interleave(number)))
    (x, y, whose), (x_test, y_test, whose_test) = parts
    return Dataset("genomic", x, y, x_test, y_test, {"population": (whose, whose_test)})


DATASETS["genomic"] = genomic


def _frequencies(
    ancestral: NDArray[np.float64], populations: int, divergence: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """(populations, sites): p becomes Beta(p (1 − F) / F, (1 − p)(1 − F) / F), of mean p and
    variance F p (1 − p).
    """
    if divergence == 0:
        return np.tile(ancestral, (populations, 1))
    spread = (1 - divergence) / divergence
    return rng.beta(ancestral * spread, (1 - ancestral) * spread, (populations, len(ancestral)))


def _reads(
    copies: Index, reference: Index, number: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`number` reads of each population from its copies (populations, copies, bases): their k-mers
    and labels.
    """
    populations, each = copies.shape[:2]
    place = BASES ** np.arange(KMER)[::-1]
    genomes, original = (
        copies.reshape(populations * each, -1, KMER) @ place,
        reference.reshape(-1, KMER) @ place,
    )
    whose = np.arange(populations).repeat(number) * each + rng.integers(
        0, each, populations * number
    )
    at = rng.integers(0, len(original) - READ + 1, populations * number)[:, None] + np.arange(READ)
    kmers = genomes[whose[:, None], at]
    return torch.from_numpy(kmers), torch.from_numpy((kmers != original[at]).astype(np.int64))


@dataclass(frozen=True)
class FlippedId(NaturalId):
    """`NaturalId`, with the labels in reverse order (0 for 1 and 1 for 0, where there are two) at
    some clients: two known groups.

    As FedGMCC makes its non-IID genomic clients. `flipped` is the share of the clients, drawn at
    random, whose labels are reversed, in training and test alike.
    """

    name: ClassVar[str] = "flipped_id"
    key: str = "population"
    flipped: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        share = (
            isinstance(self.flipped, Real)
            and not isinstance(self.flipped, bool)
            and 0 <= float(self.flipped) <= 1
        )
        require(share, "partition.flipped", self.flipped, "must be a share from 0 to 1")

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        if data.classes is None:
            raise InvalidInputError(
                f"partition.name = {self.name!r}: reverses class labels, and the targets of"
                f" {data.name!r} are floats."
            )
        groups = np.zeros(clients, np.int64)
        groups[rng.choice(clients, round(self.flipped * clients), replace=False)] = 1
        labels = np.arange(data.classes)
        return replace(
            super().split(data, clients, rng),
            groups=groups,
            transform=relabel(np.stack([labels, labels[::-1]])),
        )
