"""Use your own data, model and loss: twelve sensors in two groups, a linear model and the absolute
error.
"""

import torch
from torch import nn

import fedclade as fc

torch.manual_seed(0)


def sensor(law: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(80, 3)
    y = law * x[:, 0] + 0.1 * torch.randn(80)
    return x[:60], y[:60], x[60:], y[60:]


def absolute(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - y).abs()


clients = fc.data.from_arrays([sensor(1.0 if number % 2 else -1.0) for number in range(12)])
for method in (fc.FedAvg(), fc.Local(), fc.Clade()):
    result = fc.run(
        method,
        clients,
        model=nn.Linear(3, 1),
        rounds=20,
        clients_per_round=1.0,
        lr=0.05,
        loss=absolute,
    )
    print(f"{method.title}: mean absolute error {result.summary['loss']:.3f}")
