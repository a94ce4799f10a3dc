"""Memory: FedAvg on a large federation never holds a model for every client."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
import torch
import fedclade as fc

samples = 2400 * 10
generator = torch.Generator().manual_seed(0)
x = torch.randint(0, 256, (samples, 784), generator=generator, dtype=torch.uint8)
y = torch.randint(0, 47, (samples,), generator=generator)
dataset = fc.data.dataset(x, y, x[:470], y[:470])
clients = fc.data.partition(dataset, fc.data.Iid(), clients=2400, seed=0)
result = fc.run(fc.FedAvg(), clients, fc.models.MLP(200), rounds=1, clients_per_round=1.0)
assert result.summary["failures"] == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def test_2400_mlp_clients_need_under_3_gb() -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert float(process.stdout) < 3.0
