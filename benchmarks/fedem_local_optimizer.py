"""Why is Local better here than in FedEM's table of EMNIST: the optimizer, or the clients' data?

python benchmarks/fedem_local_optimizer.py [--clients-csv CLIENTS.csv] [--alpha 0.4]
    [--data-root FOLDER] [--clients 8] [--out results/methods/fedem_local_optimizer.json]

Clients of evenly spaced sizes train alone, by a plain loop of torch with the authors' settings: SGD
with lr 0.01, momentum 0.9 from the first to the last epoch, and weight decay 0.0005; lr is divided
by 10 after half of the 200 epochs and again after three quarters. CLIENTS.csv is that of the run of
Local in `fedclade reproduce fedem_1`, with the accuracy of each client by our settings. With
another --alpha each class is divided by Dirichlet(alpha), and only the authors' settings are run.
FOLDER has emnist62.npz. A client takes one to three minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.data import Clients
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.reproduce.execute import Options, plan
from fedclade.reproduce.spec import find
from fedclade.training import experiment_file
from fedclade.training.setup import module_for

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "fedem_local_optimizer.json"
ALPHA = 0.4
EPOCHS, BATCH, LR, MOMENTUM, WEIGHT_DECAY = 200, 128, 0.01, 0.9, 0.0005


def trained_alone(model: torch.nn.Module, clients: Clients, number: int) -> float:
    """The test accuracy of a client after the authors' local training, in percent."""
    x, y, x_test, y_test = (as_model_input(part) for part in clients.arrays(number))
    generator = torch.Generator().manual_seed(number)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    milestones = [EPOCHS // 2, 3 * EPOCHS // 4]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return 100 * float((model(x_test).argmax(1) == y_test).float().mean())


def as_model_input(part: Tensor) -> Tensor:
    """Images of bytes as numbers from 0 to 1, as fedclade's engines read them."""
    return part if part.dtype == torch.int64 else part.float().div(255)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients-csv", type=Path)
    parser.add_argument("--alpha", type=float, default=ALPHA)
    parser.add_argument("--data-root")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours: list[float] | None = None
    if args.clients_csv is not None and args.alpha == ALPHA:
        with args.clients_csv.open() as file:
            ours = [float(row["accuracy"]) for row in csv.DictReader(file)]
    table = find("fedem_1")
    options = Options(methods=("Local",), columns=("EMNIST",), data_root=args.data_root)
    (entry,) = plan(table, options).entries.values()
    tables = experiment_file.apply(entry.tables, [f"partition.alpha={args.alpha}"])
    experiment = experiment_file.experiment(tables)
    clients = experiment.clients(args.data_root)
    by_size = clients.sizes.argsort()
    step = len(by_size) // args.clients
    rows = read_results(args.out)["clients"] if args.out.exists() else []
    rows = [row for row in rows if row["alpha"] != args.alpha]
    for number in by_size[step // 2 :: step].tolist()[: args.clients]:
        model = module_for(experiment.model, clients.metadata, seed=0)
        row = {
            "alpha": args.alpha,
            "client": number,
            "samples": int(clients.sizes[number]),
            "test samples": int(clients.test_sizes[number]),
            "ours": None if ours is None else round(ours[number], 2),
            "authors' optimizer": round(trained_alone(model, clients, number), 2),
        }
        rows.append(row)
        print(row, flush=True)
        write_results(args.out, {"about": environment_info(), "clients": rows})


if __name__ == "__main__":
    main()
