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

from fedclade.core.federation import Aggregator, ClientResults, Failure, ModelAssignment, SegmentSum
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import to_spec
from fedclade.core.pytree import Tree, add_prefix, stack, strip_prefix, tree_index
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.base import EvalRequest, Traffic
from fedclade.engines.profiler import Profiler
from fedclade.engines.remote.messages import Message, Transport, packed_rows
from fedclade.engines.remote.node import describe_mismatch
from fedclade.engines.reply_validation import (
    Accumulator,
    Spec,
    check_sum,
    in_order_asked,
    rejection_reason,
    spec_of,
)
from fedclade.errors import InvalidInputError

NOT_CONNECTED = "its site is not connected"
# What may come of reading an answer that a site wrote as it liked.
_NONSENSE = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
Note = Callable[[str], None]


@dataclass(frozen=True)
class ClientRecord:
    """Where a client lives: its site ("": not seen yet), its number there, and what it holds."""

    node: str
    place: int
    name: str
    size: int
    test_size: int


class RemoteMemory:
    """The clients' memory is with them. The server keeps which of its turns count at which site, so
    that a site knows what to forget.

    A turn is a round, or a look between rounds that leaves nothing. It counts at a site if the
    site's answers of it were used.
    """

    def __init__(self) -> None:
        self.version = 0
        self._committed: dict[str, list[str]] = {}
        self._answered: dict[str, bool] = {}  # of this turn: whether all was answered
        self._session, self._number = secrets.token_hex(4), 0

    @property
    def turn(self) -> str:
        return f"{self._session}-{self._number}"

    def committed_at(self, node: str) -> list[str]:
        return self._committed.get(node, [])

    def answered(self, node: str, well: bool) -> None:
        """Whether the site answered a letter of this turn. If one went without an answer, nothing
        that it wrote counts.
        """
        self._answered[node] = self._answered.get(node, True) and well

    def forgotten(self, node: str) -> None:
        self._committed.pop(node, None)

    def commit(self, version: int) -> None:
        for node, well in sorted(self._answered.items()):
            if well:
                self._committed.setdefault(node, []).append(self.turn)
        self.version = version
        self.rollback()

    def rollback(self) -> None:
        self._answered = {}
        self._number += 1

    def tensors(self) -> Tree:
        return {
            "committed": torch.frombuffer(
                bytearray(json.dumps(self._committed).encode()), dtype=torch.uint8
            )
        }

    def restore(self, tensors: Tree, version: int) -> None:
        if tensors:
            self._committed = json.loads(bytes(tensors["committed"].tolist()))
        self.version = version
        self.rollback()


class RemoteFederation:
    """post: carries letters; about: version and configuration, which every site must share; run: a
    name for this run, under which sites keep its memory; bound: clients go by the name of their
    site too, so that none can take another's place; seats: who is known already, in the order of
    their numbers; population: what the server knows of the clients beforehand, where it has dealt
    the data out itself; probe: inputs that the server has; note: told who comes, and who cannot
    take part and why.

    Client numbers are given in the order in which sites come, and stay.
    """

    name = "flower"
    holds_clients = False
    aggregator: Aggregator = "mean"

    def __init__(
        self,
        post: Transport,
        about: Mapping[str, str],
        *,
        run: str = "run",
        bound: bool = False,
        client_records: Sequence[ClientRecord] = (),
        population: ClientMetadata | None = None,
        probe: Tensor | None = None,
        device: str = "cpu",
        note: Note = lambda text: None,
    ) -> None:
        self.post, self.about, self.run, self.bound, self.note = post, dict(about), run, bound, note
        self.device = torch.device(device)
        self.traffic, self.clock, self.client_state = (
            Traffic(),
            Profiler(self.device, False),
            RemoteMemory(),
        )
        self.client_records: list[ClientRecord] = list(client_records)
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
        return torch.tensor(
            [client_record.size for client_record in self.client_records], dtype=torch.int64
        )

    def client_metadata(self) -> ClientMetadata:
        if self._known is not None:
            return self._known
        if not self._met:
            self.refresh_membership()
        if not self._kind:
            raise InvalidInputError(
                "federation: no site has answered yet; start the nodes, then run again."
            )
        sizes = torch.tensor(
            [client_record.test_size for client_record in self.client_records], dtype=torch.int64
        )
        classes = [met["classes"] for met in self._met.values()]
        return ClientMetadata(
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

    def refresh_membership(self) -> None:
        """Who is there now; sites that are new are asked who they are, and their clients get
        numbers.
        """
        self._present = set(self.post.nodes()) - self._refused
        new = sorted(self._present - self._met.keys())
        if not new:
            return
        answers = self.post.send_and_receive({node: Message({"kind": "hello"}) for node in new})
        for node in new:
            answer = answers[node]
            reason = answer if isinstance(answer, str) else answer.header.get("refused")
            if isinstance(answer, Message) and reason is None:
                try:
                    reason = (
                        describe_mismatch(self.about, answer.header["about"])
                        if answer.header["about"] != self.about
                        else self._register_node(node, answer)
                    )
                except _NONSENSE as error:
                    reason = (
                        f"what it says of itself makes no sense ({type(error).__name__}: {error})"
                    )
                if reason is not None:
                    self._refused.add(node)
            if reason is not None:
                self._present.discard(node)
                self.note(f"{node}: not used: {reason}")

    def _register_node(self, node: str, answer: Message) -> str | None:
        """Give the clients of a site their numbers, or say why it cannot take part."""
        head, kind = answer.header, dict(answer.tensors)
        if self._kind and spec_of(kind) != spec_of(self._kind):
            theirs, ours = tuple(kind["x"].shape[1:]), tuple(self._kind["x"].shape[1:])
            return (
                f"its samples are of another kind: {theirs} of {kind['x'].dtype}, the others'"
                f" {ours} of {self._kind['x'].dtype}"
            )
        if not head["names"]:
            return "it has no clients"
        names = [f"{node}/{name}" if self.bound else str(name) for name in head["names"]]
        counts = [
            (int(size), int(test_size))
            for size, test_size in zip(head["sizes"], head["test_sizes"], strict=True)
        ]
        if len(counts) != len(names) or min(map(min, counts)) < 0:
            raise ValueError("it has other numbers of names and of sizes, or a size below 0")
        numbered = {
            client_record.name: number for number, client_record in enumerate(self.client_records)
        }
        for name in names:
            other = self.client_records[numbered[name]].node if name in numbered else node
            if other != node and other in self._present:
                return f"its client '{name}' is already there, at {other}"
        self._kind = self._kind or kind
        self._met[node] = {**head, "names": names}
        for place, (name, (size, test_size)) in enumerate(zip(names, counts, strict=True)):
            client_record = ClientRecord(node, place, name, size, test_size)
            if name in numbered:
                self.client_records[numbered[name]] = client_record
            else:
                self.client_records.append(client_record)
        self.note(f"{node}: {len(names)} clients")
        return None

    def init_client_state(self, initial: Tree) -> None:
        """It goes along with the first letter to a site that is not known to have it."""
        self._initial = {name: value.cpu() for name, value in add_prefix("memory", initial).items()}

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None = None,
        per_client: ModelAssignment | None = None,
        key: int,
        reduce: SegmentSum | None = None,
    ) -> ClientResults:
        ids = torch.as_tensor(ids, dtype=torch.int64).cpu()
        if reduce:
            check_sum(reduce, len(ids))
        sent = {name: value.cpu() for name, value in add_prefix("shared", broadcast or {}).items()}
        description = to_spec(program)

        def message(places: Tensor) -> Message:
            rows, models = packed_rows(per_client[places]) if per_client is not None else (None, {})
            head = {"kind": "map", "program": description, "key": key, "each": rows}
            return Message(head, sent | models)

        answers, failures = self._query_nodes(ids, message)
        found: dict[int, Tree] = {}
        for places, answer in answers:
            failures += self._unpack_reply(ids, places, answer, found)
        expected = _majority_spec(
            list(found.values()),
            spec_of(
                {
                    name: value[0]
                    for name, value in (per_client.models if per_client else {}).items()
                }
            ),
        )
        sizes = self.sizes
        for place, reply in sorted(found.items()):
            reason = rejection_reason(reply, expected, int(sizes[ids[place]]))
            if reason is None and reduce is not None and isinstance(reduce.segment_ids, str):
                row = (
                    int(reply[reduce.segment_ids])
                    if reduce.segment_ids in reply and reply[reduce.segment_ids].numel() == 1
                    else -1
                )
                reason = (
                    None
                    if 0 <= row < reduce.num_segments
                    else f"chose row {row} of {reduce.num_segments}"
                )
            if reason is not None:
                failures.append(Failure(int(ids[place]), reason, rejected=True))
                del found[place]
        self._failures += failures
        places = torch.tensor(sorted(found), dtype=torch.int64)
        replies = (
            {
                name: value.to(self.device)
                for name, value in stack([found[place] for place in places.tolist()]).items()
            }
            if found
            else {}
        )
        total = Accumulator(reduce) if reduce else None
        if total is not None and found:
            total.add(places, replies)
            added = total.keys(replies)
            replies = {name: value for name, value in replies.items() if name not in added}
        return in_order_asked(ids, [places], [replies], total, failures)

    def _unpack_reply(
        self, ids: Tensor, places: Tensor, answer: Message, found: dict[int, Tree]
    ) -> list[Failure]:
        """Put the replies of one site's clients into `found`, by the place at which they were
        asked; what is wrong with the others.
        """
        asked = {self.client_records[int(ids[place])].place: int(place) for place in places}
        out = strip_prefix("out", answer.tensors)
        try:
            told = list(answer.header["clients"])
            failed = {
                client: (str(reason), bool(refused))
                for client, reason, refused in answer.header["failures"]
                if client in asked
            }
            fits = (
                len(set(told)) == len(told)
                and set(told) <= asked.keys()
                and all(len(value) == len(told) for value in out.values())
            )
        except _NONSENSE:
            fits = False
        if not fits:
            return [
                Failure(
                    int(ids[place]), "its site's answer does not fit what was asked", rejected=True
                )
                for place in places
            ]
        for row, client in enumerate(told):
            found[asked[client]] = tree_index(out, torch.tensor(row))
        failures = [
            Failure(int(ids[asked[client]]), *why)
            for client, why in failed.items()
            if client not in told
        ]
        silent = asked.keys() - set(told) - failed.keys()
        return failures + [
            Failure(int(ids[asked[client]]), "its site did not answer for it")
            for client in sorted(silent)
        ]

    def _query_nodes(
        self, ids: Tensor, message: Callable[[Tensor], Message]
    ) -> tuple[list[tuple[Tensor, Message]], list[Failure]]:
        """Ask the sites of these clients: the places of each site's clients with its answer, and
        who was not asked or did not answer.
        """
        by_node: dict[str, list[int]] = {}
        for place, client in enumerate(ids.tolist()):
            by_node.setdefault(self.client_records[client].node, []).append(place)
        places = {node: torch.tensor(at, dtype=torch.int64) for node, at in sorted(by_node.items())}
        messages = {}
        for node, at in places.items():
            if node in self._present and node in self._met:
                one = message(at)
                here = [self.client_records[client].place for client in ids[at].tolist()]
                messages[node] = replace(
                    one, header={**one.header, "clients": here, "numbers": self._numbers_at(node)}
                )
        answers = self._ask(messages)
        good, failures = [], []
        for node, at in places.items():
            answer = answers.get(node, NOT_CONNECTED)
            if isinstance(answer, str):
                failures += [Failure(client, answer) for client in ids[at].tolist()]
            else:
                good.append((at, answer))
        return good, failures

    def _numbers_at(self, node: str) -> list[int]:
        """The number in the federation of each of a site's clients."""
        here = sorted(
            (client_record.place, number)
            for number, client_record in enumerate(self.client_records)
            if client_record.node == node
        )
        return [number for _, number in here]

    def _ask(self, messages: Mapping[str, Message]) -> dict[str, Message | str]:
        """Send letters with what every letter says; what a site refuses is a reason."""
        whole = {node: self._with_memory(node, message) for node, message in messages.items()}
        self.traffic.down += sum(message.nbytes for message in whole.values())
        answers: dict[str, Message | str] = {}
        for node, answer in (self.post.send_and_receive(whole) if whole else {}).items():
            if isinstance(answer, Message):
                self.traffic.up += answer.nbytes
                self._initialised.add(node)
                if answer.header.get("forgotten"):
                    self._initialised.discard(node)
                    self.client_state.forgotten(self._state_key(node))
                if "refused" in answer.header:
                    answer = str(answer.header["refused"])
            answers[node] = answer
            self.client_state.answered(self._state_key(node), not isinstance(answer, str))
        return answers

    def _with_memory(self, node: str, message: Message) -> Message:
        """What every letter says: for which configuration it is, and which memory its clients
        have.
        """
        committed = self.client_state.committed_at(self._state_key(node)) if self._initial else []
        first = self._initial if not committed and node not in self._initialised else {}
        words = {
            "about": self.about,
            "run": self.run,
            "turn": self.client_state.turn,
            "committed": committed,
            "remembers": bool(self._initial),
        }
        return Message({**message.header, **words}, {**message.tensors, **first})

    def _state_key(self, node: str) -> str:
        """A name for a site's memory, which outlasts the site's own: a node that was started anew
        may have another.
        """
        return str(self._met[node]["names"][0])

    def evaluate(
        self, rows: ModelAssignment, ids: Tensor, looks: Sequence[EvalRequest], key: int = 0
    ) -> list[Tree]:
        """All looks in one letter to a site."""
        told = [
            {"part": look.split, "metrics": list(look.metrics), "tune": _described(look.finetune)}
            for look in looks
        ]

        def message(places: Tensor) -> Message:
            return self._about_models({"kind": "evaluate", "looks": told, "key": key}, rows[places])

        answers, failures = self._query_nodes(ids, message)
        empty = torch.full((len(ids),), torch.nan, dtype=torch.float64)
        results: list[Tree] = [
            {name: empty.clone() for name in ("loss", *look.metrics)} for look in looks
        ]
        for places, answer in answers:
            values = [
                strip_prefix(f"value{number}", answer.tensors) for number in range(len(looks))
            ]
            whole = all(
                value.keys() == result.keys() for value, result in zip(values, results, strict=True)
            )
            if not whole or any(
                tuple(value.shape) != (len(places),) for value in answer.tensors.values()
            ):
                failures += [
                    Failure(client, "its site's evaluation does not fit what was asked")
                    for client in ids[places].tolist()
                ]
                continue
            for result, value in zip(results, values, strict=True):
                for name, measured in value.items():
                    result[name][places] = measured.double()
        self._failures += failures
        return results

    def push_final_models(
        self, rows: ModelAssignment, ids: Tensor, tune: AnyProgram | None = None, key: int = 0
    ) -> None:
        def message(places: Tensor) -> Message:
            return self._about_models(
                {"kind": "deliver", "tune": _described(tune), "key": key}, rows[places]
            )

        for failure in self._query_nodes(ids, message)[1]:
            self.note(f"client {failure.client} was not given its model: {failure.reason}")

    def _about_models(self, words: dict[str, Any], rows: ModelAssignment) -> Message:
        each, models = packed_rows(rows)
        return Message({**words, "each": each}, models)

    def models_of(
        self, rows: ModelAssignment, ids: Tensor, tune: AnyProgram | None = None, key: int = 0
    ) -> Tree:
        if rows.local_params or tune is not None:
            raise InvalidInputError(
                "model: these clients' models are their own and stay with them; each site has them"
                " on its disk."
            )
        return rows.gather({})

    def pop_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures


def _described(program: AnyProgram | None) -> dict[str, Any] | None:
    return to_spec(program) if program is not None else None


def _majority_spec(replies: list[Tree], sent: Spec) -> Spec:
    """Names, shapes and dtypes of most replies, of equally many of those that are most like the
    model that was sent: who has others is refused.
    """
    if not replies:
        return {}
    kinds = Counter(tuple(sorted(spec_of(reply).items())) for reply in replies)
    alike = {
        kind: sum(1 if sent.get(name) == form else -1 for name, form in kind) for kind in kinds
    }
    return dict(max(kinds.items(), key=lambda counted: (counted[1], alike[counted[0]]))[0])
