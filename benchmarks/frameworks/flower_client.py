"""The client of Flower. It is a separate module, so that Ray's actors import it and keep data and
model, instead of unpickling it.
"""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from network import layers_for, train
from torch import Tensor, nn
from worker import Job

app = ClientApp()


@cache
def _parts(job_path: str) -> tuple[Tensor, Tensor, nn.Module]:
    job = Job(job_path)
    return torch.tensor(job.x), torch.tensor(job.y), nn.Sequential(*layers_for(job.weights))


@app.train()
def local_training(message: Message, context: Context) -> Message:
    x, y, model = _parts(str(message.content["config"]["job"]))
    client = int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, x[client], y[client])
    reply = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y[client])}),
    }
    return Message(RecordDict(reply), reply_to=message)
