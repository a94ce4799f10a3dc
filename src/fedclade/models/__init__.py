"""The networks of the papers, as specs that build a torch module for the data at hand. `MODELS` has them by name."""

from fedclade.models.autoencoder import Autoencoder, ConvAutoencoder
from fedclade.models.base import ModelSpec
from fedclade.models.cnn import LeafCNN, LeNet5, SmallCNN
from fedclade.models.mlp import MLP, Logistic

_SPECS: tuple[type[ModelSpec], ...] = (MLP, LeafCNN, SmallCNN, LeNet5, Logistic, ConvAutoencoder)
MODELS: dict[str, type[ModelSpec]] = {spec.name: spec for spec in _SPECS}

__all__ = ["MLP", "MODELS", "Autoencoder", "ConvAutoencoder", "LeNet5", "LeafCNN", "Logistic", "ModelSpec", "SmallCNN"]
