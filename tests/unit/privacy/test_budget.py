"""Cohorts, noise, charges, and what a resumed run knows of them."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from fedclade.core.federation import FIXED_POINT
from fedclade.errors import FedcladeError
from fedclade.privacy.accounting import Release, epsilon_of
from fedclade.privacy.budget import FILE, PrivacyBudget
from fedclade.programs.gaussian_mechanism import trace_of

pytest.importorskip("dp_accounting")
DELTA = 1e-5
CALL = trace_of("the clients and the call")


def a_budget(
    epsilon: float = 100.0, noise: float = 1.0, secret: int = 7, simulated: bool = False
) -> PrivacyBudget:
    return PrivacyBudget(epsilon, DELTA, noise, 1.0, secret, simulated)


def a_sum(value: float = 0.0, length: int = 4) -> Tensor:
    return torch.full((1, length), value, dtype=torch.float64)


def test_a_client_is_in_a_cohort_independently_of_the_others() -> None:
    budget = a_budget()
    cohorts = [budget.draw(number, 200, 50) for number in range(1, 401)]
    sizes = torch.tensor([len(cohort) for cohort in cohorts]).double()
    # The number is binomial: a fixed one would have variance 0.
    assert float(sizes.mean()) == pytest.approx(50, abs=4 * math.sqrt(200 * 0.25 * 0.75 / 400))
    assert float(sizes.var()) == pytest.approx(200 * 0.25 * 0.75, rel=0.3)
    counts = torch.bincount(torch.cat(cohorts), minlength=200).numpy()
    assert stats.chisquare(counts).pvalue > 1e-3
    assert budget.rate == 0.25


def test_cohorts_follow_from_secret_and_round() -> None:
    assert torch.equal(a_budget().draw(3, 100, 30), a_budget().draw(3, 100, 30))
    assert not torch.equal(a_budget().draw(3, 100, 30), a_budget().draw(4, 100, 30))
    assert not torch.equal(a_budget().draw(3, 100, 30), a_budget(secret=8).draw(3, 100, 30))
    assert torch.equal(a_budget().draw(1, 10, 10), torch.arange(10))


def test_noise_is_gaussian_and_in_fixed_point() -> None:
    budget = a_budget(noise=2.0)
    budget.draw(1, 100, 50)
    noise = budget.noise(a_sum(length=100_000), sensitivity=0.5, call=CALL).flatten()
    assert torch.equal(noise, torch.round(noise / FIXED_POINT) * FIXED_POINT)
    assert stats.kstest(noise.numpy(), "norm", args=(0, 2.0 * 0.5)).pvalue > 1e-3


def test_the_same_sum_of_a_round_has_the_same_noise_and_costs_once() -> None:
    budget = a_budget()
    budget.draw(1, 100, 10)
    first = budget.noise(a_sum(), 1.0, CALL)
    spent = budget.spent()
    assert torch.equal(budget.noise(a_sum(), 1.0, CALL), first)
    assert budget.spent() == spent == epsilon_of([(Release(budget.rate, 1.0), 1)], DELTA)
    # Another sum of the same cohort: other noise, charged as one release with less noise.
    other = budget.noise(a_sum(1.0), 1.0, CALL)
    assert not torch.equal(other, first)
    rate = budget.rate
    assert budget.spent() == epsilon_of([(Release(rate, 1 / math.sqrt(2)), 1)], DELTA) > spent
    budget.draw(2, 100, 10)
    assert not torch.equal(budget.noise(a_sum(), 1.0, CALL), first)
    assert budget.spent() == epsilon_of(
        [(Release(rate, 1 / math.sqrt(2)), 1), (Release(rate, 1.0), 1)], DELTA
    )


def test_a_release_beyond_the_budget_is_refused_before_it_is_made() -> None:
    once = epsilon_of([(Release(1.0, 1.0), 1)], DELTA)
    budget = a_budget(epsilon=once * 1.2)
    budget.draw(1, 10, 10)
    budget.noise(a_sum(), 1.0, CALL)
    assert not budget.allows(2, 10, 10)
    budget.draw(2, 10, 10)
    with pytest.raises(FedcladeError, match=r"privacy.epsilon = .* round 2"):
        budget.noise(a_sum(), 1.0, CALL)
    assert budget.spent() == once


def test_planned_releases_need_no_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = (Release(0.5, 1.0), 2)
    budget = PrivacyBudget(1.0, DELTA, 1.0, 1.0, 7, True, planned)
    monkeypatch.setattr("fedclade.privacy.budget.epsilon_of", lambda *_: math.inf)
    for number in (1, 2):
        budget.draw(number, 10, 5)
        budget.noise(a_sum(), 1.0, CALL)
    # A third one, one of another cohort, and a second one in a round are not planned.
    assert not budget.allows(3, 10, 5)
    other = PrivacyBudget(1.0, DELTA, 1.0, 1.0, 7, True, planned)
    assert not other.allows(1, 10, 6)
    other.draw(1, 10, 5)
    other.noise(a_sum(), 1.0, CALL)
    with pytest.raises(FedcladeError, match="would exceed it"):
        other.noise(a_sum(1.0), 1.0, CALL)


def test_nobody_else_can_read_the_secret_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    write_bytes = Path.write_bytes

    def note(path: Path, data: bytes) -> int:
        modes.append(stat.S_IMODE(path.stat().st_mode) if path.exists() else None)
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", note)
    budget = a_budget()
    budget.open(tmp_path, is_resumed=False)
    budget.draw(1, 10, 5)
    budget.noise(a_sum(), 1.0, CALL)
    assert set(modes) == {0o600}


def test_releases_are_on_the_disk_before_noise_is_returned(tmp_path: Path) -> None:
    budget = a_budget()
    budget.open(tmp_path, is_resumed=False)
    budget.draw(1, 10, 5)
    first = budget.noise(a_sum(), 1.0, CALL)
    # The process dies here. Another one has another secret, until it reads the file.
    again = a_budget(secret=99)
    again.open(tmp_path, is_resumed=True)
    assert again.spent() == budget.spent() > 0
    assert torch.equal(again.draw(1, 10, 5), budget.draw(1, 10, 5))
    assert torch.equal(again.noise(a_sum(), 1.0, CALL), first)
    assert again.spent() == budget.spent()
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_the_secret_of_a_simulation_is_not_stored(tmp_path: Path) -> None:
    a_budget(simulated=True).open(tmp_path, is_resumed=False)
    assert "secret" not in json.loads((tmp_path / FILE).read_text())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"noise_multiplier": 1}', '{"rounds": {}}'])
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(FedcladeError, match="damaged"):
        a_budget().open(tmp_path, is_resumed=True)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FedcladeError, match="missing"):
        a_budget().open(tmp_path, is_resumed=True)


def test_an_adaptive_clip_moves_towards_the_median() -> None:
    budget = PrivacyBudget(1.0, DELTA, 1.0, None, 1, True)
    start = budget.clip
    budget.adapt_clip(1.0)
    assert budget.clip == pytest.approx(start * math.exp(-0.1))
    budget.adapt_clip(-5.0)  # noise may lead below 0
    assert budget.clip == pytest.approx(start)
