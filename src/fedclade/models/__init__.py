"""The networks of the papers, as specs that build a torch module when the data's shape is known.
`MODELS` has them by name.
"""

from fedclade.models.autoencoder import Autoencoder, ConvAutoencoder, ResidualAutoencoder
from fedclade.models.base import ModelSpec
from fedclade.models.cnn import CNN, CflCNN, GmccCNN, LeafCNN, LeNet5, PflCNN, SmallCNN
from fedclade.models.mlp import MLP, Logistic
from fedclade.models.recurrent import BiLstmTagger, LstmLanguageModel
from fedclade.models.resnet import ResNet9
from fedclade.models.text import BagOfWords, TextTransformer
from fedclade.models.transformers import LoRA, from_transformers

_SPECS: tuple[type[ModelSpec], ...] = (
    MLP,
    LeafCNN,
    SmallCNN,
    LeNet5,
    CflCNN,
    GmccCNN,
    CNN,
    PflCNN,
    ResNet9,
    LstmLanguageModel,
    BiLstmTagger,
    BagOfWords,
    TextTransformer,
    Logistic,
    ConvAutoencoder,
    ResidualAutoencoder,
)
MODELS: dict[str, type[ModelSpec]] = {spec.name: spec for spec in _SPECS}

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "Autoencoder",
    "BagOfWords",
    "BiLstmTagger",
    "CflCNN",
    "ConvAutoencoder",
    "GmccCNN",
    "LeNet5",
    "LeafCNN",
    "LoRA",
    "Logistic",
    "LstmLanguageModel",
    "ModelSpec",
    "PflCNN",
    "ResNet9",
    "ResidualAutoencoder",
    "SmallCNN",
    "TextTransformer",
    "from_transformers",
]
