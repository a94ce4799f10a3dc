"""ε and noise against dp-accounting, which is called directly here."""

from __future__ import annotations

import importlib.metadata

import pytest

from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.privacy import accounting
from fedclade.privacy.accounting import Release, epsilon_of, find_noise_multiplier

dp = pytest.importorskip("dp_accounting")
pld = pytest.importorskip("dp_accounting.pld")
rdp = pytest.importorskip("dp_accounting.rdp")


def theirs(rate: float, noise: float, rounds: int, delta: float) -> tuple[float, float]:
    """dp-accounting's ε with its own defaults: by PLD and by RDP."""
    event = dp.SelfComposedDpEvent(
        dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), rounds
    )
    return (
        pld.PLDAccountant().compose(event).get_epsilon(delta),
        rdp.RdpAccountant(orders=accounting._ORDERS).compose(event).get_epsilon(delta),
    )


@pytest.mark.parametrize(
    ("rate", "noise", "rounds", "delta"),
    [(0.1, 1.0, 100, 1e-5), (0.001, 0.76, 1500, 1e-6), (1.0, 5.0, 30, 1e-5), (0.5, 2.0, 1, 1e-3)],
)
def test_epsilon_is_that_of_dp_accounting(
    rate: float, noise: float, rounds: int, delta: float
) -> None:
    by_pld, by_rdp = theirs(rate, noise, rounds, delta)
    ours = epsilon_of([(Release(rate, noise), rounds)], delta)
    assert by_pld < by_rdp  # so that the choice of the smaller one is seen
    # Our grid is coarser than the default, so ε is slightly larger, never smaller.
    assert by_pld - 1e-9 <= ours <= by_pld * 1.002 + 2e-3


def test_the_gaussian_mechanism_has_its_exact_epsilon() -> None:
    from fedclade.methods._dp_signature import gaussian_sigma

    # Balle and Wang's exact condition, without sampling and composition.
    noise = gaussian_sigma(1.0, 1e-5)
    assert epsilon_of([(Release(1.0, noise), 1)], 1e-5) == pytest.approx(1.0, abs=2e-3)


def test_the_noise_of_the_cifar10_baseline_of_pfl() -> None:
    """ε = 2, δ = 1e-6, 1,000 of 10^6 clients in each of 1,500 rounds; pfl accounts by RDP."""
    rate, rounds, delta = 1e-3, 1500, 1e-6
    noise = find_noise_multiplier(2.0, delta, rate, rounds)
    by_pld, by_rdp = theirs(rate, noise, rounds, delta)
    assert by_pld <= 2.0 < by_rdp
    assert theirs(rate, noise * 0.995, rounds, delta)[0] > 2.0 - 0.01
    calibrated = dp.calibrate_dp_mechanism(
        lambda: pld.PLDAccountant(value_discretization_interval=1e-3),
        lambda z: dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), rounds
        ),
        2.0,
        delta,
        dp.ExplicitBracketInterval(0.5, 1.0),
        tol=1e-3,
    )
    assert noise == pytest.approx(calibrated, rel=5e-3)


def test_releases_of_several_kinds_are_composed() -> None:
    one, other = Release(0.1, 1.0), Release(0.2, 2.0)
    both = epsilon_of([(one, 10), (other, 5)], 1e-5)
    assert both > max(epsilon_of([(one, 10)], 1e-5), epsilon_of([(other, 5)], 1e-5))
    assert epsilon_of([], 1e-5) == epsilon_of([(one, 0)], 1e-5) == 0.0


def test_an_epsilon_that_no_noise_reaches_is_an_error() -> None:
    with pytest.raises(InvalidInputError, match="no noise is enough"):
        find_noise_multiplier(1e-6, 1e-12, 1.0, 10**6)


def test_another_version_of_dp_accounting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(name: str) -> str:
        return "0.0.2"

    monkeypatch.setattr(importlib.metadata, "version", old)
    with pytest.raises(FedcladeError, match=r"installed is 0\.0\.2.*fedclade\[privacy\]"):
        accounting.require_dp_accounting()
