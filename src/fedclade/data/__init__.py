"""Data: data sets, and how to partition them among clients."""

from fedclade.data.column_encoding import ColumnEncoding
from fedclade.data.datasets import DATASETS, Dataset, dataset, from_arrays, load
from fedclade.data.feature_emd import EarthMovers, earth_movers_distance
from fedclade.data.federated_dataset import Clients, Description, RaggedIndex
from fedclade.data.hugging_face import from_hf
from fedclade.data.image_encoding import ImageEncoding
from fedclade.data.image_folders import from_images
from fedclade.data.partitioning.apply_scheme import PARTITIONS, partition
from fedclade.data.partitioning.base import Scheme, Split
from fedclade.data.partitioning.drift import Drift
from fedclade.data.partitioning.feature_clusters import FeatureClusters
from fedclade.data.partitioning.grouped import (
    LabelClusters,
    LabelPermutation,
    LabelSwap,
    PowerLawClusters,
    Rotation,
)
from fedclade.data.partitioning.pfllib import PFLlib
from fedclade.data.partitioning.skewed import Dirichlet, Iid, NaturalId, Pathological, QuantitySkew
from fedclade.data.synthetic_genomics import FlippedId, genomic
from fedclade.data.tables import from_csv, from_frame, from_parquet
from fedclade.data.text_encoding import TextEncoding
from fedclade.data.texts import from_text
from fedclade.data.torch_datasets import from_datasets

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "Clients",
    "ColumnEncoding",
    "Dataset",
    "Description",
    "Dirichlet",
    "Drift",
    "EarthMovers",
    "FeatureClusters",
    "FlippedId",
    "Iid",
    "ImageEncoding",
    "LabelClusters",
    "LabelPermutation",
    "LabelSwap",
    "NaturalId",
    "PFLlib",
    "Pathological",
    "PowerLawClusters",
    "QuantitySkew",
    "RaggedIndex",
    "Rotation",
    "Scheme",
    "Split",
    "TextEncoding",
    "dataset",
    "earth_movers_distance",
    "from_arrays",
    "from_csv",
    "from_datasets",
    "from_frame",
    "from_hf",
    "from_images",
    "from_parquet",
    "from_text",
    "genomic",
    "load",
    "partition",
]
