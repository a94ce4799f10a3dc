"""The privacy budget of a run: its cohorts, its noise, and what they have cost."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import shake_256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core.federation import FIXED_POINT
from fedclade.errors import FedcladeError
from fedclade.io import safe_read
from fedclade.io.atomic import write_text
from fedclade.privacy.accounting import Release, epsilon_of
from fedclade.programs.gaussian_mechanism import noise_for, trace_of

FILE = "privacy.json"
_LEVELS = 1 << 32  # of the probability of being in a cohort
_SIMULATED, _SECRET = "seed (simulation)", "secret of the server"  # where randomness comes from
_QUANTILE, _CLIP_LR, _FIRST_CLIP = 0.5, 0.2, 0.1  # of adaptive clipping


@dataclass
class _Round:
    """The releases of a round. All have the same cohort, so together they are one release with less
    noise.
    """

    rate: float
    digests: list[str] = field(default_factory=list)


class PrivacyBudget:
    """Draws Poisson cohorts, makes the noise of sums, and counts the releases before they happen.

    Cohorts and noise come from a secret, by SHAKE-256. The noise also depends on the sum and on
    whose it is. So if a round is repeated after a crash, the same sum of the same clients gets the
    same noise, which costs nothing, and another one gets other noise, which is charged. Equal sums
    of different clients must have different noise: equal releases would show that a client
    contributes nothing.

    Args:
        epsilon: ε, which is never exceeded.
        delta: δ.
        noise_multiplier: z, the standard deviation of the noise in units of the clip.
        clip: the clip; None for an adaptive one.
        secret: the source of cohorts and noise.
        is_simulated: whether the secret is derived from the seed, so that it protects nobody.
        planned: releases that are known to stay within ε, and how many; None if none are.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        noise_multiplier: float,
        clip: float | None,
        secret: int,
        is_simulated: bool,
        planned: tuple[Release, int] | None = None,
    ) -> None:
        self._planned = planned
        self.epsilon, self.delta, self.noise_multiplier = epsilon, delta, noise_multiplier
        self.is_adaptive, self.is_simulated = clip is None, is_simulated
        self.clip = _FIRST_CLIP if clip is None else clip
        self.group_sizes = torch.zeros(0, dtype=torch.int64)
        self.rate, self.num_clients = 1.0, 0
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the last sums
        self._secret, self._rounds, self._round = secret, dict[int, _Round](), 0
        self._path: Path | None = None

    def open(self, folder: Path, is_resumed: bool) -> None:
        """Keep the releases and the secret in this folder, and continue with those that it has.

        Args:
            folder: the folder of the run.
            is_resumed: whether the run continues from a checkpoint.
        """
        self._path = folder / FILE
        if self._path.exists():
            self._read(self._path)
        elif is_resumed:
            raise FedcladeError(
                f"{self._path}: missing, so the budget that was spent is not known. Start a new run"
                " in another folder.",
                str(self._path),
            )
        self._write()

    @staticmethod
    def rate_of(size: int, clients: int) -> float:
        """The probability of being in a cohort of this expected size, as `draw` can draw it."""
        return min(max(1, round(size / clients * _LEVELS)), _LEVELS) / _LEVELS

    def draw(self, number: int, clients: int, size: int) -> Tensor:
        """The ids of a Poisson cohort: each client is in it with the same probability,
        independently of the others.

        Args:
            number: the round, which begins now.
            clients: the number of all clients.
            size: the expected number of clients in the cohort.
        """
        self._round, self.rate = number, self.rate_of(size, clients)
        self.num_clients = clients
        bits = shake_256(f"fedclade cohort\0{self._secret}\0{number}".encode()).digest(4 * clients)
        return torch.from_numpy(np.flatnonzero(np.frombuffer(bits, "<u4") < self.rate * _LEVELS))

    def allows(self, number: int, clients: int, size: int) -> bool:
        """Whether a release in this round stays within ε."""
        return self._fits(number, self.rate_of(size, clients))

    def noise(self, sums: Tensor, sensitivity: float, call: Tensor) -> Tensor:
        """Gaussian noise for a vector of sums, in multiples of `FIXED_POINT`. The release is
        charged first.

        Args:
            sums: the sums, in multiples of `FIXED_POINT`.
            sensitivity: the largest change of their norm by one client.
            call: a `trace_of` the call and of the clients in the sums.
        """
        trace = trace_of("training", self._round, self.noise_multiplier, sensitivity, call, sums)
        self._charge(bytes(trace_of("release", str(self._secret), trace).tolist()).hex())
        sigma = self.noise_multiplier * sensitivity
        noise = noise_for(trace, self._secret, like=torch.empty(sums.shape, dtype=torch.float64))
        return torch.round(noise * (sigma / FIXED_POINT)).mul_(FIXED_POINT)

    def spent(self) -> float:
        """The ε of all releases so far."""
        return epsilon_of(self._releases().items(), self.delta)

    def summary(self) -> dict[str, object]:
        """What was promised and spent, for summary.json."""
        return {
            "unit": "client",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "epsilon_spent": self.spent(),
            "noise_multiplier": self.noise_multiplier,
            "clip": "adaptive" if self.is_adaptive else self.clip,
            "releases": sum(len(each.digests) for each in self._rounds.values()),
            "randomness": _SIMULATED if self.is_simulated else _SECRET,
        }

    def adapt_clip(self, share_within: float) -> None:
        """Move an adaptive clip towards the median norm of the changes.

        Args:
            share_within: the share of changes that were within the clip, with noise.
        """
        error = min(max(share_within, 0.0), 1.0) - _QUANTILE
        self.clip *= math.exp(-_CLIP_LR * error)

    def _charge(self, digest: str) -> None:
        digests = self._rounds.setdefault(self._round, _Round(self.rate)).digests
        if digest in digests:
            return
        if not self._fits(self._round, self.rate):
            raise FedcladeError(
                f"privacy.epsilon = {self.epsilon:g}: one more sum in round {self._round} would"
                " exceed it. The run ends here; what a new run spends on these clients is added.",
                "privacy.epsilon",
            )
        digests.append(digest)
        self._write()

    def _releases(self) -> Counter[Release]:
        return Counter(
            Release(each.rate, self.noise_multiplier / math.sqrt(len(each.digests)))
            for each in self._rounds.values()
            if each.digests
        )

    def _fits(self, number: int, rate: float) -> bool:
        """Whether one more release in this round stays within ε."""
        releases = self._releases()
        made = len(self._rounds[number].digests) if number in self._rounds else 0
        if made:
            rate = self._rounds[number].rate
            releases[Release(rate, self.noise_multiplier / math.sqrt(made))] -= 1
        releases[Release(rate, self.noise_multiplier / math.sqrt(made + 1))] += 1
        releases = +releases  # without those that are 0
        if self._planned is not None:
            release, times = self._planned
            if releases.keys() == {release} and releases[release] <= times:
                return True  # computing ε takes longer
        return epsilon_of(releases.items(), self.delta) <= self.epsilon

    def _write(self) -> None:
        if self._path is None:
            return
        content: dict[str, object] = {
            "noise_multiplier": self.noise_multiplier,
            "rounds": {
                number: {"rate": each.rate, "releases": each.digests}
                for number, each in self._rounds.items()
            },
        }
        if not self.is_simulated:
            content["secret"] = f"{self._secret:x}"
        write_text(self._path, json.dumps(content) + "\n", mode=0o600)

    def _read(self, path: Path) -> None:
        try:
            content = safe_read.parse_json(safe_read.read(path, safe_read.MOST).decode())
            assert isinstance(content, dict)
            self.noise_multiplier = float(content["noise_multiplier"])
            self._rounds = {
                int(number): _Round(float(each["rate"]), [str(d) for d in each["releases"]])
                for number, each in content["rounds"].items()
            }
            if not self.is_simulated:
                self._secret = int(content["secret"], 16)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise FedcladeError(
                f"{path}: damaged ({error}), so the budget that was spent is not known. Start a new"
                " run in another folder.",
                str(path),
            ) from error


def in_words(privacy: Mapping[str, Any]) -> list[str]:
    """The lines that show what `PrivacyBudget.summary` and `Method.signature_privacy` say."""
    simulated = ", simulated" if privacy.get("randomness") == _SIMULATED else ""
    lines = [
        f"ε = {privacy['epsilon_spent']:.3g} of {privacy['epsilon']:g}, δ = {privacy['delta']:g},"
        f" for a whole client in training{simulated}"
    ]
    signature = privacy.get("signature")
    if signature is not None:
        lines.append(
            f"ε = {signature['epsilon']:g}, δ = {signature['delta']:g}, for one example in the"
            " signature that made the groups"
        )
    return lines
