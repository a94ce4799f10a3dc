"""Keys: every random number is a hash of its purpose, well spread, and independent of the other
clients.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import vmap

from fedclade.core import rng
from fedclade.core.rng import client_keys, fold_in, hash_bits, uniform

WORD = 1 << 32
keys32 = st.integers(0, WORD - 1)


def bits_of(words: Tensor) -> Tensor:
    """(…, 32) the bits of 32-bit numbers as 0.0 and 1.0."""
    return ((words[..., None] >> torch.arange(32)) & 1).double()


def test_fold_is_pinned_so_that_old_runs_can_be_repeated() -> None:
    assert fold_in(0, "cohort", 1) == 2748855690499765363
    assert fold_in(7, "round", 3) == 3096474094904707234


def test_device_hash_is_pinned_so_that_old_runs_can_be_repeated() -> None:
    assert hash_bits(torch.tensor([0, 1, 2]), 0).tolist() == [340428713, 598639744, 2882849328]
    assert client_keys(fold_in(0, "sgd"), torch.arange(3)).tolist() == [
        3989038731,
        1159951616,
        2171754363,
    ]


def test_fold_in_differs_by_key_purpose_type_and_round() -> None:
    purposes: list[tuple[int | str, ...]] = [
        (),
        ("a",),
        ("b",),
        ("a", 1),
        ("a", 2),
        ("a", "1"),
        (1,),
        ("1",),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
    ]
    keys = [fold_in(key, *purpose) for key in (0, 1, 10) for purpose in purposes]
    assert len(set(keys)) == len(keys)


def test_fold_fits_into_int64_and_both_halves_are_used() -> None:
    keys = [fold_in(0, "round", number) for number in range(1000)]
    assert len(set(keys)) == 1000
    assert all(0 <= key < 1 << 62 for key in keys)
    assert len({key >> 32 for key in keys}) == 1000
    assert len({key & (WORD - 1) for key in keys}) == 1000


@given(key=keys32, first=keys32)
@settings(max_examples=20, deadline=None)
def test_counters_of_one_key_are_permuted(key: int, first: int) -> None:
    """2^17 words drawn at random would repeat about twice; a permutation never does. Counters wrap
    at 2^32.
    """
    words = hash_bits(torch.tensor(key), torch.arange(first, first + (1 << 17)))
    assert len(torch.unique(words)) == 1 << 17
    assert int(words.min()) >= 0
    assert int(words.max()) < WORD
    assert words.dtype == torch.int64


@given(counter=keys32, first=st.integers(0, WORD - (1 << 17)))
@settings(max_examples=20, deadline=None)
def test_keys_of_one_counter_are_permuted(counter: int, first: int) -> None:
    words = hash_bits(torch.arange(first, first + (1 << 17)), counter)
    assert len(torch.unique(words)) == 1 << 17


@pytest.mark.parametrize("which", ["key", "counter"])
def test_each_input_bit_moves_about_half_of_the_output_bits(which: str) -> None:
    generator = torch.Generator().manual_seed(0)
    key, counter = torch.randint(0, WORD, (2, 4000), generator=generator)
    before = bits_of(hash_bits(key, counter))
    for bit in range(32):
        flip = 1 << bit
        after = bits_of(
            hash_bits(key ^ flip, counter) if which == "key" else hash_bits(key, counter ^ flip)
        )
        moved = (before != after).double().mean(0)
        assert float(moved.min()) > 0.4
        assert float(moved.max()) < 0.6


def test_every_output_bit_of_small_keys_and_counters_is_fair() -> None:
    """Clients and steps are numbered from 0, so the first few hundred must be as random as any."""
    words = hash_bits(torch.arange(300)[:, None], torch.arange(300)).flatten()
    share = bits_of(words).mean(0)
    assert float((share - 0.5).abs().max()) < 5 * 0.5 / len(words) ** 0.5


@pytest.mark.parametrize("key", [0, 1, 12345, WORD - 1])
def test_uniform_has_the_mean_variance_and_range_of_a_uniform(key: int) -> None:
    draws = uniform(torch.tensor(key), (100, 1000))
    assert draws.shape == (100, 1000)
    assert draws.dtype == torch.float32
    assert 0 <= float(draws.min()) < 1e-3
    assert 1 - 1e-3 < float(draws.max()) < 1
    assert float(draws.double().mean()) == pytest.approx(1 / 2, abs=5 / (12 * draws.numel()) ** 0.5)
    assert float(draws.double().var()) == pytest.approx(1 / 12, rel=0.02)
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > 1e-4


def test_uniform_fills_the_shape_in_order_of_counters() -> None:
    """A smaller batch with the same key sees the same numbers: padding at the end changes
    nothing.
    """
    key = torch.tensor(99)
    assert torch.equal(uniform(key, (3, 4)).flatten(), uniform(key, (12,)))
    assert torch.equal(uniform(key, (2, 4)), uniform(key, (3, 4))[:2])
    assert uniform(key, ()).shape == ()


def test_uniform_never_reaches_one() -> None:
    largest = torch.tensor(WORD - 1)
    assert float((largest >> 8).to(torch.float32) * 2.0**-24) < 1  # the formula at its largest
    assert float(uniform(torch.tensor(3), (1 << 20,)).max()) < 1


@pytest.mark.parametrize("lag", [1, 2, 16, 64])
def test_adjacent_counters_are_not_correlated(lag: int) -> None:
    draws = uniform(torch.tensor(7), (200_000,)).double().numpy()
    assert abs(np.corrcoef(draws[:-lag], draws[lag:])[0, 1]) < 5 / len(draws) ** 0.5


@pytest.mark.parametrize("lag", [1, 2, 16, 64])
def test_adjacent_keys_are_not_correlated(lag: int) -> None:
    draws = vmap(lambda key: uniform(key, (500,)))(torch.arange(400)).double().numpy()
    one, other = draws[:-lag].ravel(), draws[lag:].ravel()
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / len(one) ** 0.5


def test_pairs_of_adjacent_numbers_fill_the_square_evenly() -> None:
    draws = (uniform(torch.tensor(11), (200_000,)) * 16).long()
    cells = (draws[0::2] * 16 + draws[1::2]).bincount(minlength=256)
    assert stats.chisquare(cells.numpy()).pvalue > 1e-4


@given(st.lists(keys32, min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_vmap_gives_what_each_key_gives_alone(keys: list[int]) -> None:
    stacked = torch.tensor(keys)
    together = vmap(lambda key: uniform(hash_bits(key, 3), (5, 2)))(stacked)
    for lane, key in enumerate(stacked):
        assert torch.equal(together[lane], uniform(hash_bits(key, 3), (5, 2)))


def test_counter_may_be_a_tensor_with_one_entry_per_client() -> None:
    keys, counters = torch.arange(5), torch.arange(5) * 7
    together = vmap(hash_bits)(keys, counters)
    assert together.tolist() == [
        int(hash_bits(key, counter)) for key, counter in zip(keys, counters, strict=True)
    ]


@given(
    key=st.integers(0, (1 << 62) - 1),
    ids=st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True),
)
@settings(max_examples=50, deadline=None)
def test_a_clients_key_does_not_depend_on_other_clients(key: int, ids: list[int]) -> None:
    together = client_keys(key, torch.tensor(ids))
    assert together.tolist() == [int(client_keys(key, torch.tensor([client]))[0]) for client in ids]


def test_no_two_clients_share_a_key() -> None:
    assert len(torch.unique(client_keys(fold_in(0, "sgd"), torch.arange(300_000)))) == 300_000


def test_client_keys_use_both_halves_of_the_servers_key() -> None:
    ids, key = torch.arange(1000), fold_in(0, "sgd")
    for other in (key ^ 1, key ^ (1 << 32), key ^ (1 << 61)):
        assert int((client_keys(key, ids) == client_keys(other, ids)).sum()) == 0


@pytest.mark.parametrize("key", [0, 5, 12345678, 2**32 - 1])
@pytest.mark.parametrize("probability", [0.0, 1e-7, 0.1, 0.5, 0.999, 1.0])
def test_bernoulli_compares_uniform_numbers(key: int, probability: float) -> None:
    shape = (7, 1001)
    expected = rng.uniform(torch.tensor(key), shape) < probability
    assert torch.equal(rng.bernoulli(torch.tensor(key), probability, shape), expected)


@pytest.mark.parametrize("key", [0, 3, 2**32 - 1])
@pytest.mark.parametrize("probability", [1e-9, 0.1, 0.5, 1 - 1e-9])
def test_dropout_factors_are_0_where_bernoulli_is_true(
    key: int, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng, "_BLOCK", 1000)  # several blocks, the last one smaller
    shape = (7, 501)
    dropped = rng.bernoulli(torch.tensor(key), probability, shape)
    factors = rng.dropout_factors(key, probability, shape)
    expected = torch.where(dropped, 0.0, torch.tensor(1 / (1 - probability)))
    assert torch.equal(factors, expected)


def test_a_plain_number_has_the_bits_of_a_tensor() -> None:
    for key in (0, 7, 2**32 - 1):
        assert rng.hash_bits(key, 5) == int(rng.hash_bits(torch.tensor(key), 5))


def test_bernoulli_of_a_large_shape_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = rng.bernoulli(torch.tensor(3), 0.4, (1000,))
    monkeypatch.setattr(rng, "_CACHED_COUNTERS", 10)
    assert torch.equal(rng.bernoulli(torch.tensor(3), 0.4, (1000,)), cached)
