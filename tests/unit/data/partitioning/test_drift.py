"""Clients whose data change at a round: which versions they have, and where each is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedclade as fc
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core import ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import stack
from fedclade.data import Clients, Dataset, Drift, dataset, load, partition
from fedclade.data.partitioning.base import Split
from fedclade.engines.base import EvalRequest
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError
from fedclade.programs.evaluation import evaluate_losses

KINDS = pytest.mark.parametrize("kind", ["swap_labels", "rotate", "move"])


def toy() -> Dataset:
    """Forty images of 2 × 2 pixels, of which one is the number of the sample, of eight classes."""
    x = np.zeros((40, 1, 2, 2), np.float32)
    x[:, 0, 0, 0] = np.arange(40)
    y = np.arange(40) % 8
    return dataset(x[:24], y[:24], x[24:], y[24:])


class ByHand:
    """Three clients of two samples and one shared test part; 10 is added to the labels of group 1.
    Client 0 moves from group 0 to 1 in round 3, client 2 from 1 to 0 in round 2.
    """

    name = "by_hand"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        return Split(
            [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])],
            test=[np.array([0])],
            test_part_id=np.zeros(3, np.int64),
            groups=np.array([0, 0, 1]),
            transform=lambda x, y, group: (x, y + 10 * group),
            changes_at=np.array([3, 0, 2]),
            later_groups=np.array([1, 1, 0]),
        )


def test_three_clients_by_hand() -> None:
    data = dataset(np.arange(6.0)[:, None], np.arange(6), [[9.0]], [6])
    clients = partition(data, ByHand(), 3)
    labels = {
        number: [
            (sorted(y.tolist()), y_test.tolist())
            for _, y, _, y_test in map(clients.at_round(number).arrays, range(3))  # type: ignore[misc]
        ]
        for number in (1, 2, 3)
    }
    second = ([2, 3], [6])
    assert labels[1] == [([0, 1], [6]), second, ([14, 15], [16])]
    assert labels[2] == [([0, 1], [6]), second, ([4, 5], [6])]
    assert labels[3] == [([10, 11], [16]), second, ([4, 5], [6])]
    groups = [clients.at_round(number).groups.tolist() for number in (1, 2, 3)]  # type: ignore[union-attr]
    assert groups == [[0, 0, 1], [0, 0, 0], [1, 0, 0]]
    assert len(clients.y) == 6 + 2 * 2, "data that do not change are stored once"


@KINDS
def test_a_changed_client_has_the_same_samples_in_another_version(kind: Any) -> None:
    clients = partition(toy(), Drift(kind, 2, at=(4, 0)), 6, seed=0)
    for number in (0, 1, 3):
        for client in range(6):
            for one, other in zip(
                clients.arrays(client), clients.at_round(number).arrays(client), strict=True
            ):
                assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    after = clients.at_round(4)
    for client in range(6):
        x, y, x_test, y_test = clients.arrays(client)  # type: ignore[misc]
        x2, y2, x2_test, y2_test = after.arrays(client)  # type: ignore[misc]
        for a, b in ((x, x2), (x_test, x2_test)):
            assert torch.equal(a.flatten(1).sum(1), b.flatten(1).sum(1)), "the samples"
        changed = client < 3
        for now, then in (((x, y), (x2, y2)), ((x_test, y_test), (x2_test, y2_test))):
            same_x, same_y = torch.equal(now[0], then[0]), torch.equal(now[1], then[1])
            if not changed:
                assert same_x
                assert same_y
            elif kind == "rotate":
                assert not same_x
                assert same_y
        if changed and kind != "rotate":
            assert not torch.equal(y_test, y2_test)


def test_moved_clients_have_the_version_of_the_next_group() -> None:
    clients = partition(toy(), Drift("move", 3, at=(2, 0, 0)), 6, seed=0)
    assert clients.at_round(2).test_part_id.tolist()[0] == clients.test_part_id.tolist()[2]


def test_swapped_clients_are_like_no_group_before() -> None:
    clients = partition(toy(), Drift("swap_labels", 2, at=5), 4, seed=0)
    labelings = [clients.arrays(c)[3].tolist() for c in range(4)]  # type: ignore[misc]
    labelings += [clients.at_round(5).arrays(c)[3].tolist() for c in range(4)]  # type: ignore[misc]
    assert len({tuple(each) for each in labelings}) == 4


@pytest.mark.parametrize(("share", "expected"), [(1.0, 4), (0.5, 2), (0.01, 1)])
def test_a_share_of_each_group_changes(share: float, expected: int) -> None:
    clients = partition(toy(), Drift(clusters=2, at=(7, 9), share=share), 8, seed=3)
    assert clients.later is not None
    rounds = clients.later.rounds
    assert (rounds[:4] == 7).sum() == (rounds[4:] == 9).sum() == expected
    assert (rounds > 0).sum() == 2 * expected


def test_rounds_of_groups() -> None:
    assert Drift(clusters=3, at=8).rounds == (8, 8, 8)
    assert Drift(clusters=3, at=(0, 5, 0)).rounds == (0, 5, 0)
    both = partition(toy(), Drift(clusters=2, at=(2, 4)), 4, seed=0)
    changed = [(both.at_round(n).groups >= 2).tolist() for n in (1, 2, 3, 4)]  # type: ignore[operator]
    assert changed == [
        [False] * 4,
        [True, True, False, False],
        [True, True, False, False],
        [True] * 4,
    ]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kind": "shift"}, "partition.kind"),
        ({"clusters": 0}, "partition.clusters"),
        ({"kind": "move", "clusters": 1}, "partition.clusters"),
        ({"at": (3, 4)}, "partition.at"),
        ({"at": 0}, "partition.at"),
        ({"at": (0, 0, 0, 0)}, "partition.at"),
        ({"at": (1, 2, -1, 0)}, "partition.at"),
        ({"at": (1, 2.5, 1, 0)}, "partition.at"),
        ({"share": 0}, "partition.share"),
        ({"share": 1.2}, "partition.share"),
        ({"samples": 0}, "partition.samples"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        Drift(**settings)
    assert error.value.field == field


def test_too_few_labels_or_inputs_that_are_no_images() -> None:
    two = dataset(np.zeros((8, 3)), [0, 1] * 4, np.zeros((2, 3)), [0, 1])
    for scheme, field in (
        (Drift(clusters=1, at=2), "partition.clusters"),
        (Drift("rotate", 2, at=2), "partition.name"),
    ):
        with pytest.raises(InvalidInputError) as error:
            partition(two, scheme, 4)
        assert error.value.field == field


def test_an_own_scheme_needs_a_transform_for_changes() -> None:
    class Own:
        name = "own"

        def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
            rows = np.array_split(np.arange(24), clients)
            zeros = np.zeros(clients, np.int64)
            return Split(rows, groups=zeros, changes_at=zeros + 2, later_groups=zeros)

    with pytest.raises(InvalidInputError) as error:
        partition(toy(), Own(), 4)
    assert error.value.field == "Own.split"


@KINDS
def test_validation_and_probe_samples_stay_apart_after_the_change(kind: Any) -> None:
    clients = partition(toy(), Drift(kind, 2, at=2), 2, seed=0)
    clients = clients.with_validation(0.25).with_probe(0.25)
    after = clients.at_round(2)
    assert clients.validation is not None
    assert after.validation is not None
    assert clients.probe is not None
    for now in (clients, after):
        for client in range(2):
            train = now.x[now.train[client]].flatten(1).sum(1)
            apart = now.x[now.validation[client]].flatten(1).sum(1)  # type: ignore[index]
            assert len(apart) == 3
            assert not set(train.tolist()) & {
                *apart.tolist(),
                *clients.probe.flatten(1).sum(1).tolist(),
            }
    for client in range(2):
        one, other = (c.x[c.validation[client]].flatten(1).sum(1) for c in (clients, after))  # type: ignore[index]
        assert torch.equal(one, other)


def test_some_of_the_clients() -> None:
    clients = partition(toy(), Drift("rotate", 2, at=(2, 3)), 6, seed=0).with_validation(0.25)
    some = clients.only([5, 1])
    for number in (1, 2, 3):
        whole, part = clients.at_round(number), some.at_round(number)
        assert part.groups is not None
        assert whole.groups is not None
        assert part.groups.tolist() == whole.groups[[5, 1]].tolist()
        for place, client in enumerate((5, 1)):
            pairs = zip(part.arrays(place), whole.arrays(client), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
            assert torch.equal(
                part.x[part.validation[place]],
                whole.x[whole.validation[client]],  # type: ignore[index]
            )


def losses(fed: Any, objective: Objective, ids: torch.Tensor) -> torch.Tensor:
    models = stack([objective.params()])
    replies = fed.map(evaluate_losses(objective), ids, broadcast=models, key=0)
    return replies.outputs["loss"].flatten()


@KINDS
def test_engines_use_the_data_of_the_round(kind: Any) -> None:
    """Training, validation and test data of both engines are those of `Clients.at_round`."""
    clients = partition(load("digits"), Drift(kind, 2, at=(2, 4), share=0.5), 6, seed=0)
    clients = clients.with_validation(0.2)
    objective = Objective(fc.models.MLP(5).build((1, 8, 8), 10))
    ids = torch.tensor([4, 0, 1, 5, 2])
    fed, remote = (
        Simulator(clients),
        InProcessFederation(clients, NodeContext(objective, None, None)),
    )
    results = []
    for number in (1, 2, 3, 4, 1):
        static = Simulator(clients.at_round(number))
        fed.begin_round(number)
        remote.begin_round(number)
        expected = losses(static, objective, ids)
        torch.testing.assert_close(losses(fed, objective, ids), expected, rtol=0, atol=0)
        torch.testing.assert_close(losses(remote, objective, ids), expected)
        assignment = ModelAssignment.all_same(stack([objective.params()]), len(ids))
        requests = [EvalRequest(objective, {}, split) for split in ("train", "validation", "test")]
        for one, other in zip(
            fed.evaluate(assignment, ids, requests),
            static.evaluate(assignment, ids, requests),
            strict=True,
        ):
            torch.testing.assert_close(one["loss"], other["loss"], rtol=0, atol=0)
        groups, static_groups = fed.client_metadata().groups, static.client_metadata().groups
        assert groups is not None
        assert static_groups is not None
        assert torch.equal(groups, static_groups)
        results.append(expected)
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[3])
    assert torch.equal(results[0], results[4])


def run(clients: Clients, out: Path | None = None, **changed: Any) -> fc.Result:
    settings: dict[str, Any] = {"rounds": 6, "clients_per_round": 1.0, "eval_every": 1, "seed": 1}
    return fc.run(
        fc.IFCA(clusters=2), clients, fc.models.MLP(8), out=out, **{**settings, **changed}
    )


def test_a_run_before_the_change_is_that_without_drift() -> None:
    clients = partition(load("digits"), Drift(clusters=2, at=(4, 0)), 6, seed=0)
    drift, still = run(clients), run(clients.at_round(1))
    assert [row["accuracy"] for row in drift.history[:3]] == [
        row["accuracy"] for row in still.history[:3]
    ]
    assert drift.history[3]["accuracy"] != still.history[3]["accuracy"]


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path: Path, stop: int) -> None:
    """Stopped before the change, after it, and after the last round."""
    clients = partition(load("digits"), Drift(clusters=2, at=(4, 0)), 6, seed=0)
    whole = run(clients, tmp_path / "whole", checkpoint_every=1)

    def interrupt(row: Any) -> bool:
        if row["round"] == stop:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run(clients, tmp_path / "stopped", checkpoint_every=1, on_round=interrupt)
    resumed = run(clients, tmp_path / "stopped", checkpoint_every=1, resume=True)
    models = ("models/models.safetensors", "clients.csv")
    for name in models:
        assert (tmp_path / "whole" / name).read_bytes() == (
            tmp_path / "stopped" / name
        ).read_bytes()
    assert [row["accuracy"] for row in resumed.history] == [
        row["accuracy"] for row in whole.history
    ]


def test_another_date_is_another_run(tmp_path: Path) -> None:
    clients = partition(load("digits"), Drift(clusters=2, at=(4, 0)), 6, seed=0)
    run(clients, tmp_path / "run", rounds=2)
    assert clients.later is not None
    moved = replace(clients, later=replace(clients.later, rounds=clients.later.rounds + 1))
    with pytest.raises(fc.errors.DifferentExperimentError):
        run(moved, tmp_path / "run", resume=True)


def test_an_experiment_file_has_a_round_or_a_list_of_rounds() -> None:
    from fedclade.training import experiment_file

    tables = experiment_file.read("quickstart")
    for text, at in (("7", 7), ("[0, 9]", (0, 9))):
        sets = ["partition.name=drift", "partition.clusters=2", f"partition.at={text}"]
        scheme = experiment_file.experiment(experiment_file.apply(tables, sets)).scheme
        assert isinstance(scheme, Drift)
        assert scheme.at == at
