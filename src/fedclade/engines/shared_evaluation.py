"""Evaluation of clients that have the same model: their samples are one batch.

With a stack of models a layer is one product per client, and a convolution has one group per
client. Without, both are one large product. Sums over a client's samples are formed on the CPU, in
order, so that they do not depend on the order in which a device adds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedclade.core.functional_model import Objective
from fedclade.core.losses import ExampleLoss
from fedclade.core.pytree import Tree
from fedclade.engines.device_dataset import DeviceDataset

_CLIENTS_PER_MODEL = 4
# Samples of a batch, and the bytes of their inputs.
_LEAST_SAMPLES, _MOST_SAMPLES, _MOST_BYTES = 256, 4096, 2**26


def is_worthwhile(device: torch.device, model_ids: Tensor) -> bool:
    """Whether clients with these models are evaluated model by model.

    Only on CUDA: on the CPU small stacks are as fast, and results do not depend on who shares a
    model.
    """
    models = len(torch.unique(model_ids))
    return device.type == "cuda" and _CLIENTS_PER_MODEL * models <= len(model_ids)


@torch.no_grad()
def evaluate_shared(
    objective: Objective,
    metrics: Mapping[str, ExampleLoss],
    dataset: DeviceDataset,
    part_ids: Tensor,
    models: Tree,
    model_ids: Tensor,
) -> Tree:
    """(K,) sums of the loss and of each metric over each client's samples, and their number.

    Args:
        objective: the model and its loss.
        metrics: functions of outputs and labels with a value for each sample.
        dataset: the samples.
        part_ids: (K,) the part of each client.
        models: a stack of models, on the device.
        model_ids: (K,) the row of `models` of each client.
    """
    sizes = dataset.sizes[part_ids]
    sums = {
        name: torch.zeros(len(part_ids), dtype=torch.float64) for name in ("loss", *metrics)
    } | {"examples": sizes.double()}
    block = max(_LEAST_SAMPLES, min(_MOST_SAMPLES, _MOST_BYTES // dataset.sample_bytes))
    for model in torch.unique(model_ids).tolist():
        places = torch.nonzero(model_ids == model).flatten()
        params = {name: value[model] for name, value in models.items()}
        values: dict[str, list[Tensor]] = {name: [] for name in ("loss", *metrics)}
        for rows in torch.split(dataset.rows_of(part_ids[places]), block):
            x, y = dataset.samples(rows)
            outputs = objective.outputs(params, x)
            values["loss"].append(objective.example_loss(outputs, y))
            for name, metric in metrics.items():
                values[name].append(metric(outputs, y))
        owners = places.repeat_interleave(sizes[places])
        for name, parts in values.items():
            sums[name].index_add_(0, owners, torch.cat(parts).double().cpu())
    return sums
