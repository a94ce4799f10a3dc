"""Plans: which samples are in which step, for every size, number of epochs, grouping and set of
clients.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedclade.core.batching import Batches, Part, Plan, make_plan
from fedclade.core.rng import client_keys
from fedclade.errors import InvalidInputError

batches = st.builds(
    Batches,
    size=st.integers(1, 9),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    group=st.integers(1, 4),
)
shuffled = st.builds(
    Batches, size=st.integers(1, 9), epochs=st.integers(1, 4), group=st.integers(1, 4)
)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)
many = settings(max_examples=50, deadline=None)


def plan_of(
    how: Batches, given_sizes: list[int], ids: list[int] | None = None, key: int = 5
) -> Plan:
    who = torch.tensor(ids) if ids is not None else torch.arange(len(given_sizes))
    return make_plan(how, torch.tensor(given_sizes), client_keys(key, who), max(given_sizes))


def epochs_of(how: Batches, plan: Plan, client: int, size: int) -> list[list[list[int]]]:
    """For each epoch, the batches in the order in which the client meets them, without padding."""
    steps = int(how.steps(torch.tensor(size)))
    met = [
        plan.position[client, step, member, : int(plan.valid[client, step, member])].tolist()
        for step in range(steps)
        for member in range(how.group)
    ]
    each = len(met) // how.epochs
    return [met[epoch * each : (epoch + 1) * each] for epoch in range(how.epochs)]


@given(batches, sizes)
@many
def test_every_epoch_visits_each_sample_exactly_once(how: Batches, given_sizes: list[int]) -> None:
    plan = plan_of(how, given_sizes)
    for client, size in enumerate(given_sizes):
        whole = ceil(size / how.size)
        for epoch in epochs_of(how, plan, client, size):
            visited = [sample for batch in epoch[:whole] for sample in batch]
            assert sorted(visited) == list(range(size))


@given(batches, sizes)
@many
def test_only_the_last_batch_of_an_epoch_is_partial(how: Batches, given_sizes: list[int]) -> None:
    plan = plan_of(how, given_sizes)
    for client, size in enumerate(given_sizes):
        whole = ceil(size / how.size)
        for epoch in epochs_of(how, plan, client, size):
            assert [len(batch) for batch in epoch[:whole]] == [how.size] * (whole - 1) + [
                size - (whole - 1) * how.size
            ]


@given(batches, sizes)
@many
def test_the_last_group_continues_with_the_epochs_first_batches(
    how: Batches, given_sizes: list[int]
) -> None:
    plan = plan_of(how, given_sizes)
    for client, size in enumerate(given_sizes):
        whole = ceil(size / how.size)
        for epoch in epochs_of(how, plan, client, size):
            assert len(epoch) == ceil(whole / how.group) * how.group
            assert epoch == [epoch[number % whole] for number in range(len(epoch))]


@given(batches, sizes)
@many
def test_padding_repeats_samples_of_the_same_batch_in_turn(
    how: Batches, given_sizes: list[int]
) -> None:
    plan = plan_of(how, given_sizes)
    for client, size in enumerate(given_sizes):
        for step in range(int(how.steps(torch.tensor(size)))):
            for member in range(how.group):
                places, valid = (
                    plan.position[client, step, member].tolist(),
                    int(plan.valid[client, step, member]),
                )
                assert 1 <= valid <= how.size
                assert places == [places[number % valid] for number in range(how.size)]


@given(shuffled, sizes, st.integers(1, 12))
@many
def test_a_number_of_steps_is_the_start_of_enough_epochs(
    how: Batches, given_sizes: list[int], num_steps: int
) -> None:
    fixed = plan_of(replace(how, epochs=1, num_steps=num_steps), given_sizes)
    whole = plan_of(replace(how, epochs=num_steps), given_sizes)
    for name in ("position", "valid", "key"):
        steps = getattr(fixed, name)
        assert steps.shape[1] == num_steps
        assert torch.equal(steps, getattr(whole, name)[:, :num_steps])


def test_every_client_with_samples_makes_the_same_number_of_steps() -> None:
    how = Batches(size=4, num_steps=7)
    assert how.steps(torch.tensor([1, 9, 100, 0])).tolist() == [7, 7, 7, 0]
    assert [how.most(size) for size in (1, 100, 0)] == [7, 7, 0]


@given(st.integers(1, 9), sizes)
@many
def test_whole_reads_every_sample_once_and_in_order(block: int, given_sizes: list[int]) -> None:
    how = Batches.whole(block)
    plan = plan_of(how, given_sizes)
    for client, size in enumerate(given_sizes):
        (epoch,) = epochs_of(how, plan, client, size)
        assert [sample for batch in epoch for sample in batch] == list(range(size))


@given(batches, sizes)
@many
def test_steps_is_what_the_plan_holds(how: Batches, given_sizes: list[int]) -> None:
    plan, steps = plan_of(how, given_sizes), how.steps(torch.tensor(given_sizes))
    assert steps.tolist() == [
        ceil(ceil(size / how.size) / how.group) * how.epochs for size in given_sizes
    ]
    assert plan.position.shape == (len(given_sizes), int(steps.max()), how.group, how.size)
    assert plan.valid.shape == plan.position.shape[:3]
    assert plan.key.shape == plan.position.shape[:2]


@given(batches, st.lists(st.integers(1, 40), min_size=2, max_size=6), st.data())
@many
def test_a_clients_plan_does_not_depend_on_other_clients(
    how: Batches, given_sizes: list[int], data: st.DataObject
) -> None:
    """Neither on the company nor on its order nor on the longest client."""
    ids = data.draw(
        st.lists(
            st.integers(0, 1000), min_size=len(given_sizes), max_size=len(given_sizes), unique=True
        )
    )
    together = plan_of(how, given_sizes, ids)
    for lane, (client, size) in enumerate(zip(ids, given_sizes, strict=True)):
        alone = plan_of(how, [size], [client])
        steps = int(how.steps(torch.tensor(size)))
        for one, all_of_them in (
            (alone.position, together.position),
            (alone.valid, together.valid),
            (alone.key, together.key),
        ):
            assert torch.equal(one[0, :steps], all_of_them[lane, :steps])


@given(shuffled, sizes)
@many
def test_a_plan_is_reproducible(how: Batches, given_sizes: list[int]) -> None:
    one, other = plan_of(how, given_sizes), plan_of(how, given_sizes)
    assert torch.equal(one.position, other.position)
    assert torch.equal(one.key, other.key)


def orders(count: int, key: int = 5, clients: int = 1, size: int = 30) -> list[list[int]]:
    """The orders of `count` epochs of each of these clients."""
    how = Batches(size=7, epochs=count)
    plan = plan_of(how, [size] * clients, key=key)
    return [
        list(chain.from_iterable(epoch))
        for client in range(clients)
        for epoch in epochs_of(how, plan, client, size)
    ]


def test_each_epoch_client_and_key_has_its_own_order() -> None:
    """30! orders: any two that agree were not drawn apart. 8 epochs x 6 clients x 5 keys."""
    drawn = [tuple(order) for key in range(5) for order in orders(8, key, clients=6)]
    assert len(set(drawn)) == len(drawn) == 240


def test_no_shuffle_keeps_the_order_in_every_epoch() -> None:
    how = Batches(size=4, epochs=3, shuffle=False)
    assert [
        list(chain.from_iterable(epoch)) for epoch in epochs_of(how, plan_of(how, [10]), 0, 10)
    ] == [list(range(10))] * 3


def test_every_sample_is_equally_likely_at_every_place() -> None:
    size, draws = 6, 3000
    at = torch.tensor(orders(1, clients=draws, size=size))
    table = torch.stack([(at == sample).sum(0) for sample in range(size)])
    for row in table.tolist():
        assert stats.chisquare(row).pvalue > 1e-4
    # All places together: a table of permutations has fixed margins, which scales the statistic and
    # takes freedom from it.
    statistic = float(((table - draws / size) ** 2 / (draws / size)).sum()) * (size - 1) / size
    assert stats.chi2.sf(statistic, (size - 1) ** 2) > 1e-4


def test_every_order_of_four_samples_is_equally_likely() -> None:
    """Also whether consecutive epochs of one client are drawn apart: pairs of what comes first."""
    drawn = orders(2, clients=4000, size=4)
    code = [sum(sample * 4**place for place, sample in enumerate(order)) for order in drawn]
    counts = torch.unique(torch.tensor(code), return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4
    pairs = torch.tensor([4 * drawn[at][0] + drawn[at + 1][0] for at in range(0, len(drawn), 2)])
    assert stats.chisquare(pairs.bincount(minlength=16).numpy()).pvalue > 1e-4


def distinct(values: Tensor) -> bool:
    return len(torch.unique(values)) == values.numel()


def test_every_step_of_every_client_has_its_own_key() -> None:
    plan = plan_of(Batches(size=1, epochs=3), [40] * 20)
    assert distinct(plan.key)


@pytest.mark.parametrize("field", ["size", "epochs", "group"])
@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "3", None])
def test_batches_need_positive_integers(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == f"batches.{field}"):
        Batches(**{"size": 4, field: value})  # type: ignore[arg-type]


def read_positions(part: Part, sizes: list[int], size: int = 3, epochs: int = 1) -> list[list[int]]:
    """The positions that each client reads, in order."""
    batches = Batches(size, epochs, shuffle=False, part=part)
    of = torch.tensor(sizes)
    plan = make_plan(batches, of, torch.arange(len(sizes)), max(sizes))
    steps = batches.steps(of).tolist()
    assert steps == [batches.most(each) for each in sizes]
    return [
        [
            int(place)
            for step in range(steps[client])
            for place in plan.position[client, step, 0, : int(plan.valid[client, step, 0])]
        ]
        for client in range(len(sizes))
    ]


def test_every_fifth_sample_is_held_out() -> None:
    assert read_positions("held_out", [12, 5, 4]) == [[4, 9], [4], []]
    assert read_positions("fit", [12, 5, 4]) == [
        [0, 1, 2, 3, 5, 6, 7, 8, 10, 11],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert read_positions("none", [12, 5]) == [[], []]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 7))
def test_the_two_parts_are_all_samples(sizes: list[int], size: int) -> None:
    fit, held_out = (read_positions(part, sizes, size) for part in ("fit", "held_out"))
    for client, samples in enumerate(sizes):
        assert sorted(fit[client] + held_out[client]) == list(range(samples))


def test_a_shuffled_part_stays_in_the_clients_data() -> None:
    sizes = torch.tensor([12, 5, 4])
    plan = make_plan(Batches(4, 3, part="fit"), sizes, torch.arange(3), 12)
    assert bool((plan.position < sizes[:, None, None, None]).all())
    assert not bool((plan.position[0] % 5 == 4).any())
