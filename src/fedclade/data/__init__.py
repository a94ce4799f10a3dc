"""Data: data sets, and the ways of dealing them to clients."""

from fedclade.data.clients import Clients, Description, Parts
from fedclade.data.datasets import DATASETS, Dataset, dataset, from_arrays, load
from fedclade.data.emd import EarthMovers, earth_movers_distance
from fedclade.data.features import FeatureClusters
from fedclade.data.genomic import FlippedId, genomic
from fedclade.data.partitions import PARTITIONS, partition
from fedclade.data.planted import LabelClusters, LabelPermutation, LabelSwap, PowerLawClusters, Rotation
from fedclade.data.skews import Dirichlet, Iid, NaturalId, Pathological, QuantitySkew
from fedclade.data.splitting import Scheme, Split

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Clients",
    "Dataset",
    "Description",
    "Dirichlet",
    "EarthMovers",
    "FeatureClusters",
    "FlippedId",
    "Iid",
    "LabelClusters",
    "LabelPermutation",
    "LabelSwap",
    "NaturalId",
    "Parts",
    "Pathological",
    "PowerLawClusters",
    "QuantitySkew",
    "Rotation",
    "Scheme",
    "Split",
    "dataset",
    "earth_movers_distance",
    "from_arrays",
    "genomic",
    "load",
    "partition",
]
