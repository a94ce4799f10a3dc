"""Labels in sequences: one for each position of a sample."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.core.functional_model import ClientStackedBatch, Objective
from fedclade.core.losses import accuracy, cross_entropy


class Tagger(nn.Module):
    """Two classes for each of three positions of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.unsqueeze(-1))


def data(clients: int = 4) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    x = torch.linspace(-1, 1, 8 * 3).view(8, 3)
    return [(x, (x > 0).long(), x, (x > 0).long())] * clients


def test_loss_and_accuracy_are_means_over_positions() -> None:
    outputs = torch.tensor(
        [[[2.0, 0.0], [0.0, 0.0]]]
    )  # log-probabilities of label 0: -log(1 + e^-2), -log 2
    y = torch.tensor([[0, 1]])
    expected = (math.log(1 + math.exp(-2)) + math.log(2)) / 2
    torch.testing.assert_close(cross_entropy(outputs, y), torch.tensor([expected]))
    assert accuracy(outputs, y).tolist() == [0.5]


def test_a_stack_of_clients_has_the_gradients_of_each() -> None:
    objective = Objective(Tagger())
    params = {name: torch.randn(2, *value.shape) for name, value in objective.params().items()}
    x, y = torch.randn(2, 5, 3), torch.randint(2, (2, 5, 3))
    got = objective.gradient(
        params, ClientStackedBatch(x, y, torch.ones(2, 5), torch.zeros(2, dtype=torch.int64))
    )
    for client in range(2):
        own = {name: value[client].clone().requires_grad_() for name, value in params.items()}
        loss = cross_entropy(
            torch.func.functional_call(objective.module, own, (x[client],)), y[client]
        ).mean()
        for name, expected in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            torch.testing.assert_close(got[name][client], expected)


def test_a_run_reports_perplexity_and_accuracy_over_positions() -> None:
    clients = fc.data.from_arrays(data())
    assert clients.classes == 2
    result = fc.run(fc.FedAvg(), clients, Tagger(), rounds=30, clients_per_round=1.0, lr=0.5)
    assert result.summary["accuracy"] > 90
    losses = torch.tensor(result.clients["loss"])
    assert result.summary["perplexity"] == pytest.approx(float(losses.exp().mean()))
    assert "train" in str(clients.describe())


def test_a_model_with_one_label_a_sample_is_refused() -> None:
    with pytest.raises(fc.InvalidInputError, match=r"\b3\b.*\(2,\)"):
        fc.run(fc.FedAvg(), fc.data.from_arrays(data()), nn.Linear(3, 2), rounds=1)


@dataclass(frozen=True)
class TwoTopics:
    samples: int = 40

    def dataset(self) -> fc.data.Dataset:
        x = torch.rand(self.samples, 3)
        topic = torch.arange(self.samples) % 2
        return fc.data.dataset(
            x, (x > 0.5).long(), x[:10], (x[:10] > 0.5).long(), topic=(topic, topic[:10])
        )


def test_clusters_can_be_made_of_a_key() -> None:
    clients = fc.data.partition(
        TwoTopics().dataset(),
        fc.data.LabelClusters(clusters=2, classes=1, key="topic"),
        clients=4,
        probe=0,
    )
    assert clients.groups is not None
    rows = [
        set((clients.train[client] % 2).tolist()) for client in range(4)
    ]  # a sample's topic is the parity of its number
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert all(len(set((clients.test[part] % 2).tolist())) == 1 for part in range(2))


def test_an_unknown_key_and_labels_that_are_sequences_are_refused() -> None:
    dataset = TwoTopics().dataset()
    with pytest.raises(fc.InvalidInputError, match=r"partition\.key = 'writer'.*topic"):
        fc.data.partition(
            dataset, fc.data.LabelClusters(clusters=2, classes=1, key="writer"), clients=4
        )
    with pytest.raises(fc.InvalidInputError, match="label_clusters"):
        fc.data.partition(dataset, fc.data.Dirichlet(0.5), clients=4)
