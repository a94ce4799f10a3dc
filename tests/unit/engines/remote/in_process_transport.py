"""Sites in this process: letters go through JSON and copies, as a real post would carry them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedclade.core.program_serialization import Here
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.messages import Letter
from fedclade.engines.remote.node import Site
from fedclade.engines.simulator import Faults, Simulator

ABOUT = {"fedclade": "test", "configuration": "one"}


class Letterbox:
    """A post to sites in this process."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.here = dict(sites)
        self.carried: list[dict[str, Letter]] = []
        self.lost: Callable[[str, Letter], bool] = lambda site, letter: False  # whether a letter gets no answer in time

    def sites(self) -> list[str]:
        return sorted(self.here)

    def exchange(self, letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        self.carried.append(dict(letters))
        answers: dict[str, Letter | str] = {}
        for site, letter in letters.items():
            answer = copied(self.here[site].answer(copied(letter)))  # it is done even where the answer comes too late
            answers[site] = "no answer in time" if self.lost(site, letter) else answer
        return answers


def copied(letter: Letter) -> Letter:
    return Letter(json.loads(json.dumps(letter.head)), {name: value.clone() for name, value in letter.tensors.items()})


def sites_of(clients: Clients, count: int, make: Callable[[Clients, list[str]], Site]) -> dict[str, Site]:
    """The clients dealt out to so many sites, one to each in turn."""
    everyone = torch.arange(len(clients))
    dealt = {f"site-{site}": everyone[site::count] for site in range(count)}
    return {name: make(clients.only(ids.tolist()), [str(client) for client in ids.tolist()]) for name, ids in dealt.items() if len(ids)}


class Remote(RemoteFederation):
    """A remote federation that stands in for a simulator in the conformance tests."""

    def __init__(
        self, clients: Clients, here: Here, faults: Faults | None = None, sites: int = 2, chunk: int | None = None, **options: Any
    ) -> None:
        def make(data: Clients, names: list[str]) -> Site:
            site = Site(data, names, here, {}, ABOUT)
            site.keepers = lambda run: site.keeper
            numbers = [int(name) for name in names]
            tamper = (lambda key, client, reply: faults(key, numbers[client], reply)) if faults is not None else None
            site.simulator = Simulator(data, faults=tamper, chunk=chunk, **options)
            return site

        self.box = Letterbox(sites_of(clients, sites, make))
        super().__init__(self.box, ABOUT)
        self.gather()
        order = sorted(range(len(self.seats)), key=lambda number: int(self.seats[number].name))
        self.seats = [self.seats[number] for number in order]  # numbers as the simulator has them

    def read(self, ids: Tensor) -> Tree:
        """What these clients remember, looked up where they live."""
        rows: dict[int, Tree] = {}
        for client in ids.tolist():
            seat = self.seats[client]
            site = self.box.here[seat.site]
            initial, kept = site.keeper.load()
            committed = [each for each in kept if each.turn in self.memory.committed_at(self._home(seat.site))]
            site.simulator.remember(initial)
            if committed:
                site.simulator.memory.restore(committed[-1].memory, 0)
            rows[client] = {name: value[0] for name, value in site.simulator.memory.read(torch.tensor([seat.place])).items()}
        names = rows[int(ids[0])] if len(ids) else {}
        return {name: torch.stack([rows[client][name] for client in ids.tolist()]) for name in names}
