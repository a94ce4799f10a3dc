"""The local training of a client: its objective and the settings of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedclade.core.batching import Batches, ClassWeight
from fedclade.core.functional_model import Objective

Optimizer: TypeAlias = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains. `fc.run` sets it in the method.

    Args:
        objective: the model and its loss.
        lr: the learning rate of this round.
        batch_size: examples per batch.
        epochs: passes over the client's data.
        steps: the number of steps, in place of `epochs`; 0 for whole passes.
        momentum: the momentum of SGD.
        weight_decay: the weight decay.
        optimizer: "sgd", "adam" or "adamw", as torch.optim defines them.
        clip_norm: the largest norm of a gradient; 0 for no limit.
        class_weight: "balanced" weights the classes of a client so that each has the same total
            weight.
    """

    objective: Objective
    lr: float = 0.1
    batch_size: int = 10
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: Optimizer = "sgd"
    clip_norm: float = 0.0
    class_weight: ClassWeight = "none"
    steps: int = 0

    @property
    def batches(self) -> Batches:
        """The batches of one round of training."""
        return Batches(
            self.batch_size,
            self.epochs,
            self.steps,
            class_weight=self.class_weight,
            augment=self.objective.augment,
        )
