"""A site: one place where some of a federation's clients live. It answers the server's letters with what its clients compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedclade.core.federation import Failure, Replies
from fedclade.core.functional_model import ExampleLoss
from fedclade.core.program_serialization import Here, made
from fedclade.core.pytree import Tree, concatenate, prefixed, take, under
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import Look
from fedclade.engines.remote.messages import Letter, numbers, unpacked_rows
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeError

PROTOCOL = 1  # what letters say; another number, another language
KEPT = 2  # committed memories: the server's last checkpoint may be one round behind


@dataclass(frozen=True)
class Kept:
    """What the clients of a site remember after a turn of the server; `turn` says which."""

    turn: str
    memory: Tree


class Keeper(Protocol):
    """Where a site keeps what must last when its process ends, for one run of the server."""

    def load(self) -> tuple[Tree, list[Kept]]:
        """What clients start from, and what they remember, oldest first."""

    def save(self, initial: Tree, kept: list[Kept]) -> None: ...

    def deliver(self, names: list[str], models: Tree) -> None:
        """Put each client's own model, a row of `models`, where it can be used."""


class InMemory:
    """A keeper for as long as the process lasts."""

    def __init__(self) -> None:
        self.initial: Tree = {}
        self.kept: list[Kept] = []
        self.models: dict[str, Tree] = {}

    def load(self) -> tuple[Tree, list[Kept]]:
        return self.initial, self.kept

    def save(self, initial: Tree, kept: list[Kept]) -> None:
        self.initial, self.kept = initial, kept

    def deliver(self, names: list[str], models: Tree) -> None:
        self.models |= {name: take(models, torch.tensor(row)) for row, name in enumerate(names)}


class Forgotten(FedcladeError):
    """The clients' memory is not there."""


class Site:
    """clients: those that live here; names: what each is called; here: the model, its loss and the encoder of this place; metrics: what is
    measured beside the loss; about: version and configuration, in words, which must be the server's too; keepers: by the name of a run,
    where its memory lasts; check: called once, before it is agreed that this site takes part: it raises what speaks against it."""

    def __init__(
        self,
        clients: Clients,
        names: list[str],
        here: Here,
        metrics: Mapping[str, ExampleLoss],
        about: Mapping[str, str],
        keepers: Callable[[str], Keeper] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.clients, self.names, self.here, self.metrics, self.about = clients, names, here, metrics, dict(about)
        here_only: dict[str, Keeper] = {}
        self.keepers = keepers or (lambda run: here_only.setdefault(run, InMemory()))
        self.keeper: Keeper = InMemory()
        self.check = check
        self.simulator = Simulator(clients)

    def answer(self, letter: Letter) -> Letter:
        """The answer to a letter; what cannot be done is said in it, never raised."""
        kinds: dict[str, Callable[[Letter], Letter]] = {
            "hello": self._hello,
            "map": self._map,
            "evaluate": self._evaluate,
            "deliver": self._deliver,
        }
        head = letter.head
        try:
            if head["kind"] != "hello" and head["about"] != self.about:
                return Letter({"refused": mismatch(head["about"], self.about)})
            if head["kind"] != "hello":
                self.keeper = self.keepers(head["run"])
            return kinds[head["kind"]](letter)
        except FedcladeError as error:
            return Letter({"refused": str(error), "forgotten": isinstance(error, Forgotten)})
        except Exception as error:  # of the user's own code: whatever it is, the federation goes on without this site
            return Letter({"refused": f"{type(error).__name__}: {error}"})

    def _hello(self, letter: Letter) -> Letter:
        self.check()
        data = self.clients
        head = {
            "about": self.about,
            "names": self.names,
            "sizes": numbers(data.sizes),
            "test_sizes": numbers(data.test_sizes),
            "classes": data.classes,
            "metrics": list(self.metrics),
        }
        # Of the samples only what kind they are is told.
        return Letter(head, {"x": data.x.new_zeros(2, *data.x.shape[1:]), "y": data.y.new_zeros(2, *data.y.shape[1:])})

    def _map(self, letter: Letter) -> Letter:
        head = letter.head
        program = made(head["program"], self.here)
        local = torch.tensor(head["clients"], dtype=torch.int64)
        shared = under("shared", letter.tensors)
        each = unpacked_rows(head["each"], letter.tensors) if head["each"] is not None else None
        kept = self._recall(letter)

        def run(places: Tensor) -> Replies:
            rows = each[places] if each is not None else None
            return self.simulator.map(program, local[places], shared=shared, each=rows, key=head["key"])

        everyone = torch.arange(len(local))
        try:
            replies = [run(everyone)]
        except (RuntimeError, ValueError, TypeError):
            if len(local) == 1:
                raise
            replies = [self._alone(run, place, int(local[place])) for place in everyone[:, None]]
        if self.simulator.memory.initial:
            self.simulator.memory.commit(0)
            kept = [each for each in kept if each.turn != head["turn"]]
            self.keeper.save(self.simulator.memory.initial, [*kept, Kept(head["turn"], self.simulator.memory.tensors())])
        out = concatenate([reply.out for reply in replies if len(reply.ids)]) if any(len(reply.ids) for reply in replies) else {}
        return Letter(
            {
                "clients": [client for reply in replies for client in numbers(reply.ids)],
                "failures": [list(astuple(failure)) for reply in replies for failure in reply.failures],
            },
            {name: value.cpu() for name, value in prefixed("out", out).items()},
        )

    @staticmethod
    def _alone(run: Callable[[Tensor], Replies], place: Tensor, client: int) -> Replies:
        """One client by itself, where all together failed: it costs only itself."""
        try:
            return run(place)
        except (RuntimeError, ValueError, TypeError) as error:
            return Replies(place[:0], {}, failures=[Failure(client, f"{type(error).__name__}: {error}")])

    def _evaluate(self, letter: Letter) -> Letter:
        head = letter.head
        self._recall(letter)
        rows, local = unpacked_rows(head["each"], letter.tensors), torch.tensor(head["clients"], dtype=torch.int64)
        values: Tree = {}
        for number, told in enumerate(head["looks"]):
            metrics = {name: self.metrics[name] for name in told["metrics"]}
            tune = made(told["tune"], self.here) if told["tune"] is not None else None
            look = Look(self.here.objective, metrics, told["part"], tune)
            values |= prefixed(f"value{number}", self.simulator.measure(rows, local, look, head["key"]))
        return Letter({}, values)

    def _deliver(self, letter: Letter) -> Letter:
        head = letter.head
        self._recall(letter)
        tune = made(head["tune"], self.here) if head["tune"] is not None else None
        rows, local = unpacked_rows(head["each"], letter.tensors), torch.tensor(head["clients"], dtype=torch.int64)
        models = self.simulator.models_of(rows, local, tune, head["key"])
        self.keeper.deliver([self.names[client] for client in local.tolist()], {name: value.cpu() for name, value in models.items()})
        return Letter({})

    def _recall(self, letter: Letter) -> list[Kept]:
        """Give the clients the memory that the server means, and their numbers in the federation; what is left of what was kept.

        Of turns that the server has committed the latest counts, or this turn's own if there was a letter before. What any other turn
        left was never part of the run: the server died in it, or went on without this site's answer.
        """
        head, first = letter.head, under("memory", letter.tensors)
        initial, kept = (first, []) if first else self.keeper.load()
        if first:
            self.keeper.save(first, [])
        if head["remembers"] and not initial:
            raise Forgotten("this site has lost what its clients remembered; they begin anew with the next letter.")
        committed = set(head["committed"])
        kept = [each for each in kept if each.turn in committed or each.turn == head["turn"]]
        kept = [*[each for each in kept if each.turn in committed][-KEPT:], *[each for each in kept if each.turn not in committed]]
        self.simulator.names = torch.tensor(head["numbers"], dtype=torch.int64)
        self.simulator.remember(initial)
        if kept:
            self.simulator.memory.restore(kept[-1].memory, 0)
        return kept


def mismatch(server: Mapping[str, str], site: Mapping[str, str]) -> str:
    """What server and site do not agree on, both sides named."""
    differing = [name for name in {**server, **site} if server.get(name) != site.get(name)]
    told = "; ".join(f"{name}: the server has {server.get(name, 'none')}, this site {site.get(name, 'none')}" for name in differing)
    return f"server and site do not fit together ({told}); give both the same version and configuration."
