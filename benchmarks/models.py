"""Seconds a round of fedclade against a plain loop over clients, for models of several kinds.

python benchmarks/models.py [--device cpu|cuda] [--repeats 5] [--only NAME …] [--out FILE]

Both sides train the same clients from the same weights on the same number of batches of the same
size, by SGD, and average the weights. The loop is what a user would write: one module, its weights
loaded for each client, torch.optim.SGD, batches of a shuffled data set. The two sides take turns in
one process; a ratio is the median of the loop's seconds over the median of fedclade's. On the CPU
pin the process to one core (taskset -c 0) and run nothing else. The seconds there are those of the
process, without the time in which the core works for others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedclade as fc
from fedclade.core import LocalTraining, ModelAssignment, Objective, SegmentSum, sgd, stack
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

LR = 0.01


class Block(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(h + self.skip(x))


def resnet18(norm: Callable[[int], nn.Module]) -> nn.Module:
    """ResNet-18 for images of 32 x 32: a first layer of 3 x 3 and no pooling after it."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        norm(64),
        nn.ReLU(),
        *(Block(*width, norm) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


class Encoder(nn.Module):
    """A transformer encoder on vectors; on images it takes patches of 4 x 4."""

    def __init__(self, inputs: int, width: int, heads: int, layers: int, patches: bool) -> None:
        super().__init__()
        self.patches = patches
        self.embedding = nn.Linear(inputs, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.patches:
            x = F.unfold(x, 4, stride=4).transpose(1, 2)
        outputs: Tensor = self.head(self.encoder(self.embedding(x)).mean(1))
        return outputs


class LoRALinear(nn.Linear):
    """A frozen linear layer plus a trained product of rank 8."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features)
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(torch.randn(8, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


def with_lora(model: Encoder) -> nn.Module:
    model.requires_grad_(False)
    for layer in model.encoder.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        layer.linear1, layer.linear2 = LoRALinear(layer.linear1), LoRALinear(layer.linear2)
    model.head.requires_grad_(True)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def encoder() -> Encoder:
    return Encoder(32, 128, 4, 4, patches=False)


@dataclass(frozen=True)
class Job:
    """Clients that each make some steps with batches of one size."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    steps: int
    batch: int


JOBS = {
    "mlp": Job(mlp, (784,), 20, 20, 10),
    "leaf_cnn": Job(lambda: fc.models.LeafCNN().build((1, 28, 28), 10), (1, 28, 28), 40, 50, 10),
    "resnet18_gn": Job(lambda: resnet18(group_norm), (3, 32, 32), 10, 10, 20),
    "resnet18_bn": Job(lambda: resnet18(nn.BatchNorm2d), (3, 32, 32), 10, 10, 20),
    "resnet18_gn_large": Job(lambda: resnet18(group_norm), (3, 32, 32), 20, 4, 64),
    "vit_tiny": Job(lambda: Encoder(48, 192, 3, 12, patches=True), (3, 32, 32), 10, 5, 10),
    "transformer": Job(encoder, (64, 32), 10, 10, 10),
    "lora": Job(lambda: with_lora(encoder()), (64, 32), 10, 10, 10),
}
CPU_JOBS = {  # fewer clients: a core takes minutes for the others
    **JOBS,
    "leaf_cnn": Job(JOBS["leaf_cnn"].model, (1, 28, 28), 10, 10, 10),
    "resnet18_gn": Job(JOBS["resnet18_gn"].model, (3, 32, 32), 2, 5, 20),
    "resnet18_bn": Job(JOBS["resnet18_bn"].model, (3, 32, 32), 2, 5, 20),
    "vit_tiny": Job(JOBS["vit_tiny"].model, (3, 32, 32), 4, 5, 10),
    "transformer": Job(encoder, (64, 32), 4, 10, 10),
    "lora": Job(JOBS["lora"].model, (64, 32), 4, 10, 10),
}
del CPU_JOBS["resnet18_gn_large"]


def compare(job: Job, device: str, repeats: int) -> dict[str, float]:
    """The seconds of both sides and their ratio."""
    torch.manual_seed(0)
    module = job.model().to(device)
    x = torch.rand(job.clients, job.steps * job.batch, *job.shape)
    y = torch.randint(0, 10, (job.clients, job.steps * job.batch))
    clients = fc.data.from_arrays(list(zip(x, y, strict=True)))
    fed = fc.Simulator(clients, device=device)
    on_device = x.to(device)
    objective = Objective(module, x=on_device[0, :2])
    program = sgd(LocalTraining(objective, LR, job.batch))
    models, everyone = stack([objective.params()]), torch.arange(job.clients)
    reduce = SegmentSum(
        weights=torch.ones(job.clients), num_segments=1, segment_ids=torch.zeros_like(everyone)
    )

    def by_fedclade(key: int) -> None:
        assignment = ModelAssignment.all_same(models, job.clients)
        fed.map(program, everyone, per_client=assignment, key=key, reduce=reduce)

    labels = y.to(device)
    start = {name: value.clone() for name, value in module.state_dict().items()}

    def by_loop(key: int) -> None:
        total: dict[str, Tensor] = {}
        for client in range(job.clients):
            module.load_state_dict(start)
            module.train()
            trained = [value for value in module.parameters() if value.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=LR)
            for rows in torch.randperm(len(y[0]), device=device).split(job.batch):
                optimizer.zero_grad()
                loss = F.cross_entropy(module(on_device[client, rows]), labels[client, rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] = total[name] + value if name in total else value.clone()

    def seconds(side: Callable[[int], None], key: int) -> float:
        if device == "cpu":
            begin = time.process_time()
            side(key)
            return time.process_time() - begin
        torch.cuda.synchronize()
        begin = time.perf_counter()
        side(key)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    for key in range(3):  # kernels are loaded, and steps captured or traced
        by_fedclade(key)
    by_loop(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: dict[str, list[float]] = {"fedclade": [], "loop": []}
    for key in range(3, 3 + repeats):
        times["fedclade"].append(seconds(by_fedclade, key))
        times["loop"].append(seconds(by_loop, key))
    medians = {side: statistics.median(values) for side, values in times.items()}
    result = {side: round(value, 5) for side, value in medians.items()}
    result["ratio"] = round(medians["loop"] / medians["fedclade"], 2)
    result["vectorized"] = float(objective.vectorized)
    if device == "cuda":
        result["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(JOBS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jobs = JOBS if args.device == "cuda" else CPU_JOBS
    results = {}
    for name, job in jobs.items():
        if args.only and name not in args.only:
            continue
        results[name] = {
            **compare(job, args.device, args.repeats),
            "clients": job.clients,
            "steps": job.steps,
            "batch": job.batch,
        }
        print(name, results[name], flush=True)
    if args.out:
        write_results(args.out, {"machine": environment_info(), "models": results})


if __name__ == "__main__":
    main()
