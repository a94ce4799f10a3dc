"""A federation whose clients live elsewhere: at sites that are reached by letters."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedclade.core.federation import Aggregator, Failure, Replies, Rows, Sum
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import described
from fedclade.core.pytree import Tree, prefixed, stack, take, under
from fedclade.data.client_metadata import Population
from fedclade.engines.base import Look, Traffic
from fedclade.engines.profiler import Clock
from fedclade.engines.remote.messages import Letter, Post, packed_rows
from fedclade.engines.remote.node import mismatch
from fedclade.engines.reply_validation import Accumulator, Spec, check_sum, in_order_asked, refusal, spec_of
from fedclade.errors import InvalidInput

NOT_CONNECTED = "its site is not connected"
# What may come of reading an answer that a site wrote as it liked.
_NONSENSE = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
Note = Callable[[str], None]


@dataclass(frozen=True)
class Seat:
    """Where a client lives: its site ("": not seen yet), its number there, and what it holds."""

    site: str
    place: int
    name: str
    size: int
    test_size: int


class RemoteMemory:
    """The clients' memory is with them. The server keeps which of its turns count at which site, so that a site knows what to forget.

    A turn is a round, or a look between rounds that leaves nothing. It counts at a site if the site's answers of it were used.
    """

    def __init__(self) -> None:
        self.version = 0
        self._committed: dict[str, list[str]] = {}
        self._answered: dict[str, bool] = {}  # of this turn: whether all was answered
        self._session, self._number = secrets.token_hex(4), 0

    @property
    def turn(self) -> str:
        return f"{self._session}-{self._number}"

    def committed_at(self, site: str) -> list[str]:
        return self._committed.get(site, [])

    def answered(self, site: str, well: bool) -> None:
        """Whether the site answered a letter of this turn. If one went without an answer, nothing that it wrote counts."""
        self._answered[site] = self._answered.get(site, True) and well

    def forgotten(self, site: str) -> None:
        self._committed.pop(site, None)

    def commit(self, version: int) -> None:
        for site, well in sorted(self._answered.items()):
            if well:
                self._committed.setdefault(site, []).append(self.turn)
        self.version = version
        self.rollback()

    def rollback(self) -> None:
        self._answered = {}
        self._number += 1

    def tensors(self) -> Tree:
        return {"committed": torch.frombuffer(bytearray(json.dumps(self._committed).encode()), dtype=torch.uint8)}

    def restore(self, tensors: Tree, version: int) -> None:
        if tensors:
            self._committed = json.loads(bytes(tensors["committed"].tolist()))
        self.version = version
        self.rollback()


class RemoteFederation:
    """post: carries letters; about: version and configuration, which every site must share; run: a name for this run, under which sites
    keep its memory; bound: clients go by the name of their site too, so that none can take another's place; seats: who is known already,
    in the order of their numbers; population: what the server knows of the clients beforehand, where it has dealt the data out itself;
    probe: inputs that the server has; note: told who comes, and who cannot take part and why.

    Client numbers are given in the order in which sites come, and stay.
    """

    name = "flower"
    holds_clients = False
    average: Aggregator = "mean"

    def __init__(
        self,
        post: Post,
        about: Mapping[str, str],
        *,
        run: str = "run",
        bound: bool = False,
        seats: Sequence[Seat] = (),
        population: Population | None = None,
        probe: Tensor | None = None,
        device: str = "cpu",
        note: Note = lambda text: None,
    ) -> None:
        self.post, self.about, self.run, self.bound, self.note = post, dict(about), run, bound, note
        self.device = torch.device(device)
        self.traffic, self.clock, self.memory = Traffic(), Clock(self.device, False), RemoteMemory()
        self.seats: list[Seat] = list(seats)
        self._known, self._probe = population, probe
        self._met: dict[str, dict[str, Any]] = {}  # what each site has said of itself
        self._refused: set[str] = set()
        self._kind: Tree = {}
        self._initial: Tree = {}
        self._initialised: set[str] = set()
        self._failures: list[Failure] = []
        self._present: set[str] = set()

    @property
    def sizes(self) -> Tensor:
        if self._known is not None:
            return self._known.sizes
        return torch.tensor([seat.size for seat in self.seats], dtype=torch.int64)

    def population(self) -> Population:
        if self._known is not None:
            return self._known
        if not self._met:
            self.gather()
        if not self._kind:
            raise InvalidInput("federation: no site has answered yet; start the nodes, then run again.")
        sizes = torch.tensor([seat.test_size for seat in self.seats], dtype=torch.int64)
        classes = [met["classes"] for met in self._met.values()]
        return Population(
            self.sizes,
            sizes,
            int(sizes.sum()),
            self._kind["x"],
            self._kind["y"],
            None if None in classes else max(classes),
            probe=self._probe,
            dataset="federation",
            partition="sites",
        )

    def gather(self) -> None:
        """Who is there now; sites that are new are asked who they are, and their clients get numbers."""
        self._present = set(self.post.sites()) - self._refused
        new = sorted(self._present - self._met.keys())
        if not new:
            return
        answers = self.post.exchange({site: Letter({"kind": "hello"}) for site in new})
        for site in new:
            answer = answers[site]
            reason = answer if isinstance(answer, str) else answer.head.get("refused")
            if isinstance(answer, Letter) and reason is None:
                try:
                    reason = mismatch(self.about, answer.head["about"]) if answer.head["about"] != self.about else self._meet(site, answer)
                except _NONSENSE as error:
                    reason = f"what it says of itself makes no sense ({type(error).__name__}: {error})"
                if reason is not None:
                    self._refused.add(site)
            if reason is not None:
                self._present.discard(site)
                self.note(f"{site}: not used: {reason}")

    def _meet(self, site: str, answer: Letter) -> str | None:
        """Give the clients of a site their numbers, or say why it cannot take part."""
        head, kind = answer.head, dict(answer.tensors)
        if self._kind and spec_of(kind) != spec_of(self._kind):
            theirs, ours = tuple(kind["x"].shape[1:]), tuple(self._kind["x"].shape[1:])
            return f"its samples are of another kind: {theirs} of {kind['x'].dtype}, the others' {ours} of {self._kind['x'].dtype}"
        if not head["names"]:
            return "it has no clients"
        names = [f"{site}/{name}" if self.bound else str(name) for name in head["names"]]
        counts = [(int(size), int(test_size)) for size, test_size in zip(head["sizes"], head["test_sizes"], strict=True)]
        if len(counts) != len(names) or min(map(min, counts)) < 0:
            raise ValueError("it has other numbers of names and of sizes, or a size below 0")
        numbered = {seat.name: number for number, seat in enumerate(self.seats)}
        for name in names:
            other = self.seats[numbered[name]].site if name in numbered else site
            if other != site and other in self._present:
                return f"its client '{name}' is already there, at {other}"
        self._kind = self._kind or kind
        self._met[site] = {**head, "names": names}
        for place, (name, (size, test_size)) in enumerate(zip(names, counts, strict=True)):
            seat = Seat(site, place, name, size, test_size)
            if name in numbered:
                self.seats[numbered[name]] = seat
            else:
                self.seats.append(seat)
        self.note(f"{site}: {len(names)} clients")
        return None

    def remember(self, initial: Tree) -> None:
        """It goes along with the first letter to a site that is not known to have it."""
        self._initial = {name: value.cpu() for name, value in prefixed("memory", initial).items()}

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        shared: Tree | None = None,
        each: Rows | None = None,
        key: int,
        reduce: Sum | None = None,
    ) -> Replies:
        ids = torch.as_tensor(ids, dtype=torch.int64).cpu()
        if reduce:
            check_sum(reduce, len(ids))
        sent = {name: value.cpu() for name, value in prefixed("shared", shared or {}).items()}
        description = described(program)

        def letter(places: Tensor) -> Letter:
            rows, models = packed_rows(each[places]) if each is not None else (None, {})
            head = {"kind": "map", "program": description, "key": key, "each": rows}
            return Letter(head, sent | models)

        answers, failures = self._asked(ids, letter)
        found: dict[int, Tree] = {}
        for places, answer in answers:
            failures += self._opened(ids, places, answer, found)
        expected = _usual(list(found.values()), spec_of({name: value[0] for name, value in (each.models if each else {}).items()}))
        sizes = self.sizes
        for place, reply in sorted(found.items()):
            reason = refusal(reply, expected, int(sizes[ids[place]]))
            if reason is None and reduce is not None and isinstance(reduce.row, str):
                row = int(reply[reduce.row]) if reduce.row in reply and reply[reduce.row].numel() == 1 else -1
                reason = None if 0 <= row < reduce.rows else f"chose row {row} of {reduce.rows}"
            if reason is not None:
                failures.append(Failure(int(ids[place]), reason, refused=True))
                del found[place]
        self._failures += failures
        places = torch.tensor(sorted(found), dtype=torch.int64)
        replies = (
            {name: value.to(self.device) for name, value in stack([found[place] for place in places.tolist()]).items()} if found else {}
        )
        total = Accumulator(reduce) if reduce else None
        if total is not None and found:
            total.add(places, replies)
            added = total.keys(replies)
            replies = {name: value for name, value in replies.items() if name not in added}
        return in_order_asked(ids, [places], [replies], total, failures)

    def _opened(self, ids: Tensor, places: Tensor, answer: Letter, found: dict[int, Tree]) -> list[Failure]:
        """Put the replies of one site's clients into `found`, by the place at which they were asked; what is wrong with the others."""
        asked = {self.seats[int(ids[place])].place: int(place) for place in places}
        out = under("out", answer.tensors)
        try:
            told = list(answer.head["clients"])
            failed = {client: (str(reason), bool(refused)) for client, reason, refused in answer.head["failures"] if client in asked}
            fits = len(set(told)) == len(told) and set(told) <= asked.keys() and all(len(value) == len(told) for value in out.values())
        except _NONSENSE:
            fits = False
        if not fits:
            return [Failure(int(ids[place]), "its site's answer does not fit what was asked", refused=True) for place in places]
        for row, client in enumerate(told):
            found[asked[client]] = take(out, torch.tensor(row))
        failures = [Failure(int(ids[asked[client]]), *why) for client, why in failed.items() if client not in told]
        silent = asked.keys() - set(told) - failed.keys()
        return failures + [Failure(int(ids[asked[client]]), "its site did not answer for it") for client in sorted(silent)]

    def _asked(self, ids: Tensor, letter: Callable[[Tensor], Letter]) -> tuple[list[tuple[Tensor, Letter]], list[Failure]]:
        """Ask the sites of these clients: the places of each site's clients with its answer, and who was not asked or did not answer."""
        by_site: dict[str, list[int]] = {}
        for place, client in enumerate(ids.tolist()):
            by_site.setdefault(self.seats[client].site, []).append(place)
        places = {site: torch.tensor(at, dtype=torch.int64) for site, at in sorted(by_site.items())}
        letters = {}
        for site, at in places.items():
            if site in self._present and site in self._met:
                one = letter(at)
                here = [self.seats[client].place for client in ids[at].tolist()]
                letters[site] = replace(one, head={**one.head, "clients": here, "numbers": self._numbers_at(site)})
        answers = self._ask(letters)
        good, failures = [], []
        for site, at in places.items():
            answer = answers.get(site, NOT_CONNECTED)
            if isinstance(answer, str):
                failures += [Failure(client, answer) for client in ids[at].tolist()]
            else:
                good.append((at, answer))
        return good, failures

    def _numbers_at(self, site: str) -> list[int]:
        """The number in the federation of each of a site's clients."""
        here = sorted((seat.place, number) for number, seat in enumerate(self.seats) if seat.site == site)
        return [number for _, number in here]

    def _ask(self, letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        """Send letters with what every letter says; what a site refuses is a reason."""
        whole = {site: self._with_memory(site, letter) for site, letter in letters.items()}
        self.traffic.down += sum(letter.nbytes for letter in whole.values())
        answers: dict[str, Letter | str] = {}
        for site, answer in (self.post.exchange(whole) if whole else {}).items():
            if isinstance(answer, Letter):
                self.traffic.up += answer.nbytes
                self._initialised.add(site)
                if answer.head.get("forgotten"):
                    self._initialised.discard(site)
                    self.memory.forgotten(self._home(site))
                if "refused" in answer.head:
                    answer = str(answer.head["refused"])
            answers[site] = answer
            self.memory.answered(self._home(site), not isinstance(answer, str))
        return answers

    def _with_memory(self, site: str, letter: Letter) -> Letter:
        """What every letter says: for which configuration it is, and which memory its clients have."""
        committed = self.memory.committed_at(self._home(site)) if self._initial else []
        first = self._initial if not committed and site not in self._initialised else {}
        words = {"about": self.about, "run": self.run, "turn": self.memory.turn, "committed": committed, "remembers": bool(self._initial)}
        return Letter({**letter.head, **words}, {**letter.tensors, **first})

    def _home(self, site: str) -> str:
        """A name for a site's memory, which outlasts the site's own: a node that was started anew may have another."""
        return str(self._met[site]["names"][0])

    def evaluate(self, rows: Rows, ids: Tensor, looks: Sequence[Look], key: int = 0) -> list[Tree]:
        """All looks in one letter to a site."""
        told = [{"part": look.part, "metrics": list(look.metrics), "tune": _described(look.tune)} for look in looks]

        def letter(places: Tensor) -> Letter:
            return self._about_models({"kind": "evaluate", "looks": told, "key": key}, rows[places])

        answers, failures = self._asked(ids, letter)
        empty = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        results: list[Tree] = [{name: empty.clone() for name in ("loss", *look.metrics)} for look in looks]
        for places, answer in answers:
            values = [under(f"value{number}", answer.tensors) for number in range(len(looks))]
            whole = all(value.keys() == result.keys() for value, result in zip(values, results, strict=True))
            if not whole or any(tuple(value.shape) != (len(places),) for value in answer.tensors.values()):
                failures += [Failure(client, "its site's evaluation does not fit what was asked") for client in ids[places].tolist()]
                continue
            for result, value in zip(results, values, strict=True):
                for name, measured in value.items():
                    result[name][places] = measured.double()
        self._failures += failures
        return results

    def deliver(self, rows: Rows, ids: Tensor, tune: AnyProgram | None = None, key: int = 0) -> None:
        def letter(places: Tensor) -> Letter:
            return self._about_models({"kind": "deliver", "tune": _described(tune), "key": key}, rows[places])

        for failure in self._asked(ids, letter)[1]:
            self.note(f"client {failure.client} was not given its model: {failure.reason}")

    def _about_models(self, words: dict[str, Any], rows: Rows) -> Letter:
        each, models = packed_rows(rows)
        return Letter({**words, "each": each}, models)

    def models_of(self, rows: Rows, ids: Tensor, tune: AnyProgram | None = None, key: int = 0) -> Tree:
        if rows.own or tune is not None:
            raise InvalidInput("model: these clients' models are their own and stay with them; each site has them on its disk.")
        return rows.gather({})

    def drain_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures


def _described(program: AnyProgram | None) -> dict[str, Any] | None:
    return described(program) if program is not None else None


def _usual(replies: list[Tree], sent: Spec) -> Spec:
    """Names, shapes and dtypes of most replies, of equally many of those that are most like the model that was sent: who has others is
    refused."""
    if not replies:
        return {}
    kinds = Counter(tuple(sorted(spec_of(reply).items())) for reply in replies)
    alike = {kind: sum(1 if sent.get(name) == form else -1 for name, form in kind) for kind in kinds}
    return dict(max(kinds.items(), key=lambda counted: (counted[1], alike[counted[0]]))[0])
