"""An encoder as pure functions of its weights."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedclade.core.functional_model import Batch, PerThread
from fedclade.core.inputs import Inputs, one_tensor
from fedclade.core.pytree import Tree
from fedclade.errors import FedcladeError, InvalidInputError


class Encoder:
    """A module as pure functions of its weights: the codes of inputs and, for an autoencoder, the
    reconstruction loss.

    A module with a method `encode` is an autoencoder, and calling it gives the reconstruction. The
    outputs of any other module are the codes.
    """

    def __init__(self, module: nn.Module | None) -> None:
        if module is None:
            raise FedcladeError(
                "encoder_module: the method has no encoder. Use fc.run, or set encoder_module to a"
                " module.",
                "encoder_module",
            )
        self.trained = tuple(
            name for name, value in module.named_parameters() if value.requires_grad
        )
        plain = copy.deepcopy(module).cpu().eval().requires_grad_(False)
        self.reconstructs = hasattr(module, "encode")
        self.pretrained = bool(getattr(module, "pretrained", True))
        # Only a module's forward can be called with other weights.
        self._module, self._encode = PerThread(plain), PerThread(_Encode(plain))
        self.programs: dict[Hashable, Any] = {}  # see core/program_cache.py

    def weights(self) -> Tree:
        """Parameters and buffers. Clients have the module's code but not its weights."""
        return {name: value.clone() for name, value in self._module.own.state_dict().items()}

    def tuning(self, fine_tune: str) -> str:
        """How to fine-tune it. "auto" trains random weights by FedAvg, so that the codes of all
        clients are in one space.
        """
        return fine_tune if fine_tune != "auto" else "none" if self.pretrained else "federated"

    def needed(self, weights: Tree) -> Tree:
        """The weights that embedding needs: all but the decoder's."""
        return {name: value for name, value in weights.items() if not name.startswith("decoder.")}

    def codes(self, weights: Tree, x: Inputs) -> Tensor:
        """(samples, e): the embeddings of a batch."""
        x = one_tensor(x, "method flt", "method.name")
        codes: Tensor = functional_call(
            self._encode.own, {f"module.{name}": value for name, value in weights.items()}, (x,)
        )
        return codes

    def loss(self, trained: Tree, sent: Tree, batch: Batch) -> Tensor:
        """Mean squared error of the reconstruction of a batch."""
        x = one_tensor(batch.x, "method flt", "method.name")
        if not x.is_floating_point():
            raise InvalidInputError(
                "method.encoder: an autoencoder cannot reconstruct integer inputs. Use a trained"
                " encoder and method.fine_tune = 'none'.",
                "method.encoder",
            )
        errors: Tensor = (functional_call(self._module.own, {**sent, **trained}, (x,)) - x) ** 2
        return (errors.flatten(1).mean(1) * batch.weight).sum() / batch.weight.sum().clamp_min(1)


class _Encode(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        codes: Tensor = getattr(self.module, "encode", self.module)(x)
        return codes.flatten(1)
