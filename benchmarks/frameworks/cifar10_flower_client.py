"""The client of Flower on pfl's benchmark on CIFAR-10. Ray's actors import this module, as they do
`flower_client`.
"""

from __future__ import annotations

from functools import cache

import torch
from cifar10_job import LEARNING_RATE, Cifar10Job
from cifar10_network import layers
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from network import train
from torch import nn

app = ClientApp()


@cache
def _parts(job_folder: str) -> tuple[Cifar10Job, nn.Module]:
    return Cifar10Job(job_folder), nn.Sequential(*layers())


@app.train()
def local_training(message: Message, context: Context) -> Message:
    job, model = _parts(str(message.content["config"]["job"]))
    client = int(context.node_config["partition-id"])
    x, y = torch.tensor(job.normalized(job.x[client])), torch.tensor(job.y[client])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, x, y, LEARNING_RATE)
    reply = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(reply), reply_to=message)
