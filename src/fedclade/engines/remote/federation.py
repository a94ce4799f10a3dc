"""A federation whose clients are on other machines, the nodes. Nodes answer messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedclade.core.federation import (
    Aggregator,
    ClientResults,
    Failure,
    ModelAssignment,
    SegmentSum,
    ServerUpdate,
)
from fedclade.core.inputs import Inputs
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import to_spec
from fedclade.core.pytree import Tree, add_prefix, stack, strip_prefix, tree_index
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.accumulator import Accumulator, check_sum, ordered_results
from fedclade.engines.base import Delivery, EvalRequest, Traffic, checked_ids
from fedclade.engines.profiler import Profiler
from fedclade.engines.remote.client_state import RemoteClientState
from fedclade.engines.remote.evaluation import (
    PendingEvaluation,
    RemoteEvaluation,
    join,
    spec_or_none,
    split_answers,
    with_models,
)
from fedclade.engines.remote.membership import CheckSamples, ClientRecord, Membership, Note
from fedclade.engines.remote.messages import (
    Message,
    NodeError,
    Transport,
    one_line,
    pack_assignment,
)
from fedclade.engines.remote.secure_sums import SecureCall, SecureMap, SecureSums
from fedclade.engines.reply_validation import (
    Spec,
    majority_spec,
    out_of_range_segment,
    rejection_reason,
    spec_of,
)
from fedclade.errors import InvalidInputError, is_int
from fedclade.privacy.secure_sum.protocol import ProtocolError

NOT_CONNECTED = NodeError("its node is not connected")
_TRAINING = ("map", "secure_map")  # the messages whose answers change the clients' state


class RemoteFederation:
    """Runs programs on the clients of the nodes that a transport reaches.

    Args:
        transport: sends messages to the nodes.
        compatibility_info: version and configuration; they must be the same on every node.
        run: the name of this run. Nodes store its client state under this name.
        bind_clients_to_nodes: see `Membership`.
        client_records: the clients that are already known, in the order of their numbers.
        metadata: the clients' metadata, if the server has partitioned the data.
        validation_origin: the settings of the nodes' validation data.
        probe: the server's probe data.
        device: the device of the server's tensors.
        check_samples: see `Membership`.
        note: is called with a line for each node that registers or cannot take part.
    """

    name = "flower"
    holds_clients = False
    aggregator: Aggregator = "mean"
    server_update = ServerUpdate()

    def __init__(
        self,
        transport: Transport,
        compatibility_info: Mapping[str, str],
        *,
        run: str = "run",
        bind_clients_to_nodes: bool = False,
        client_records: Sequence[ClientRecord] = (),
        metadata: ClientMetadata | None = None,
        validation_origin: Mapping[str, Any] | None = None,
        probe: Inputs | None = None,
        device: str = "cpu",
        check_samples: CheckSamples = lambda metadata: None,
        note: Note = lambda text: None,
    ) -> None:
        self.transport, self.run, self.note = transport, run, note
        self.membership = Membership(
            transport,
            compatibility_info,
            bind_clients_to_nodes=bind_clients_to_nodes,
            client_records=client_records,
            check_samples=check_samples,
            note=note,
        )
        self.device = torch.device(device)
        self.traffic = Traffic()
        self.clock = Profiler(self.device, False)
        self.client_state = RemoteClientState()
        self._metadata, self._probe = metadata, probe
        # If the server has the data, this is a simulation, whose nodes may move between processes
        # and lose their keys.
        self.has_secure_sums = metadata is None
        self._validation_origin = dict(validation_origin or {})
        self._initial_state: Tree = {}
        self._initialized: set[str] = set()  # the nodes that have the initial client state
        self._failures: list[Failure] = []
        self._round = 0
        self._secure = SecureSums(run)
        # The clients that got their final model with the last evaluation.
        self._delivered: set[int] = set()
        self._pending: PendingEvaluation | None = None

    @property
    def sizes(self) -> Tensor:
        return self._metadata.sizes if self._metadata is not None else self.membership.sizes

    def client_metadata(self) -> ClientMetadata:
        if self._metadata is not None:
            return self._metadata
        metadata = self.membership.metadata(self._probe)
        return replace(metadata, validation_origin=self._validation_origin)

    def refresh_membership(self) -> None:
        """Update which nodes are present, and register new ones."""
        self.membership.refresh()

    def begin_round(self, round_number: int) -> None:
        """Every message from now on names this round."""
        self._round = round_number

    def init_client_state(self, initial: Tree) -> None:
        """The initial state is part of the first message to each node."""
        self._initial_state = {
            name: value.cpu() for name, value in add_prefix("client_state", initial).items()
        }

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
        ids = checked_ids(ids, len(self.membership.client_records))
        if reduce:
            check_sum(reduce, len(ids))
        if reduce and reduce.min_clients:
            return self._secure_map(program, ids, broadcast, per_client, key, reduce)
        shared = {
            name: value.cpu() for name, value in add_prefix("broadcast", broadcast or {}).items()
        }
        header = {"kind": "map", "program": to_spec(program), "key": key}

        def message(places: Tensor) -> Message:
            if per_client is None:
                return Message({**header, "per_client": None}, shared)
            assignment, models = pack_assignment(per_client[places])
            return Message({**header, "per_client": assignment}, shared | models)

        answers, failures = self._train_nodes(ids, message)
        replies: dict[int, Tree] = {}
        votes: list[Tree] = []
        for places, answer in answers:
            node_replies, node_failures = self._unpack_reply(ids, places, answer)
            replies |= node_replies
            failures += node_failures
            # A node has one vote for a spec, however many clients it claims to have.
            specs = {
                tuple(sorted(spec_of(reply).items())): reply for reply in node_replies.values()
            }
            votes += specs.values()
        sent_models = per_client.models if per_client is not None else {}
        expected = majority_spec(
            votes, spec_of({name: value[0] for name, value in sent_models.items()})
        )
        sizes = self.sizes
        for place in sorted(replies):
            client = int(ids[place])
            reason = _rejection_reason(replies[place], expected, int(sizes[client]), reduce)
            if reason is not None:
                failures.append(Failure(client, reason, rejected=True))
                del replies[place]
        self._failures += failures
        places = torch.tensor(sorted(replies), dtype=torch.int64)
        outputs: Tree = {}
        total = Accumulator(reduce) if reduce else None
        if replies:
            stacked = stack([replies[place] for place in places.tolist()])
            outputs = {name: value.to(self.device) for name, value in stacked.items()}
        if total is not None and replies:
            total.add(places, outputs)
            summed = total.keys(outputs)
            outputs = {name: value for name, value in outputs.items() if name not in summed}
        return ordered_results(ids, [places], [outputs], total, failures)

    def _secure_map(
        self,
        program: AnyProgram,
        ids: Tensor,
        broadcast: Tree | None,
        per_client: ModelAssignment | None,
        key: int,
        reduce: SegmentSum,
    ) -> ClientResults:
        """`map` with secure sums. The server sees the outputs that are not summed, and sums."""
        none = torch.zeros(reduce.num_segments, dtype=torch.float64)
        nothing = ClientResults(ids[:0], {}, {}, none)
        if not len(ids):
            return nothing
        call = SecureMap(ids, reduce, self.membership.client_records)
        connected = {
            each.node for each in self.membership.client_records if self._is_connected(each.node)
        }
        try:
            self._secure.prepare(connected, call.slots, self._send_control)
            number = f"{self.client_state.transaction_id}/{self._secure.next_number()}"
            groups = call.groups(self._secure.ready)
            session = self._secure.session(number, groups, reduce.min_clients)
        except ProtocolError as error:
            return self._failed(nothing, ids, [], str(error))
        if not groups:
            return nothing
        shared = {
            name: value.cpu() for name, value in add_prefix("broadcast", broadcast or {}).items()
        }
        messages: dict[str, Message] = {}
        places_at = call.places(session)
        for node in session.public_keys:
            places = places_at.get(node, ids[:0])
            part = self._secure.sum_message(node, session, call.of_node(places))
            header: dict[str, Any] = {
                "kind": "secure_map",
                "program": to_spec(program),
                "key": key,
                "per_client": None,
                "clients": [self.membership.client_records[int(ids[p])].place for p in places],
                "numbers": self.membership.client_numbers(node),
            }
            tensors = dict(part.tensors)
            if len(places):
                tensors |= shared
                if per_client is not None:
                    header["per_client"], rows = pack_assignment(per_client[places])
                    tensors |= rows
            messages[node] = Message({**header, **part.header}, tensors)
        answers = self._send(messages)
        secure = SecureCall(self._secure, session, call.lengths)
        replies, failures = self._clear_replies(ids, places_at, answers)
        refused = secure.collect(answers)
        for node, reason in refused.items():
            self.client_state.set_answered(self.membership.state_key(node), False)
            answers[node] = NodeError(reason)
        for node, places in places_at.items():
            if node in secure.answered:
                continue
            for place in places.tolist():
                if replies.pop(place, None) is not None:
                    answer = answers.get(node)
                    reason = answer.reason if isinstance(answer, NodeError) else "no masked sum"
                    failures.append(Failure(int(ids[place]), reason, rejected=True))
        answered = torch.tensor(sorted(replies), dtype=torch.int64)
        try:
            sums, weights = call.unmasked(secure, answered, self._send_control)
        except ProtocolError as error:
            return self._failed(nothing, ids, secure.answered, str(error))
        outputs = stack([replies[place] for place in answered.tolist()]) if len(answered) else {}
        self._failures += failures
        return ClientResults(
            ids[answered],
            {name: value.to(self.device) for name, value in outputs.items()},
            {name: value.to(self.device) for name, value in sums.items()},
            weights,
            sorted(failures, key=lambda failure: failure.client),
        )

    def _clear_replies(
        self,
        ids: Tensor,
        places_at: Mapping[str, Tensor],
        answers: dict[str, Message | NodeError],
    ) -> tuple[dict[int, Tree], list[Failure]]:
        """The outputs that are not summed, by place. If one is rejected, the whole answer of its
        node is: the masked sum cannot be divided. Then `answers` has an error for the node.
        """
        replies: dict[int, Tree] = {}
        failures: list[Failure] = []
        votes: list[Tree] = []
        of_node: dict[str, dict[int, Tree]] = {}
        for node, places in places_at.items():
            answer = answers.get(node, NOT_CONNECTED)
            if isinstance(answer, NodeError):
                failures += [Failure(client, answer.reason) for client in ids[places].tolist()]
                continue
            of_node[node], node_failures = self._unpack_reply(ids, places, answer)
            failures += node_failures
            specs = {
                tuple(sorted(spec_of(reply).items())): reply for reply in of_node[node].values()
            }
            votes += specs.values()
        expected = majority_spec(votes, {})
        sizes = self.sizes
        for node, node_replies in of_node.items():
            reasons = {
                place: rejection_reason(reply, expected, int(sizes[ids[place]]))
                for place, reply in node_replies.items()
            }
            bad = [reason for reason in reasons.values() if reason is not None]
            if bad or not node_replies:
                reason = bad[0] if bad else "none of its clients has a reply"
                answers[node] = NodeError(reason)
                failures += [
                    Failure(int(ids[place]), reason, rejected=True) for place in node_replies
                ]
            else:
                replies |= node_replies
        return replies, failures

    def _failed(
        self, nothing: ClientResults, ids: Tensor, nodes: Sequence[str], reason: str
    ) -> ClientResults:
        """The results of a secure sum that could not be formed. What these nodes computed does not
        count.
        """
        for node in nodes:
            self.client_state.set_answered(self.membership.state_key(node), False)
        failures = [Failure(client, reason) for client in ids.tolist()]
        self._failures += failures
        self.note(reason)
        return replace(nothing, failures=failures)

    def _is_connected(self, node: str) -> bool:
        return bool(node) and self.membership.is_connected(node)

    def _send_control(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        """Send messages of the protocol of secure sums, which do not concern client state."""
        complete = {
            node: replace(
                message,
                header={
                    **message.header,
                    "compatibility_info": self.membership.compatibility_info,
                    "run": self.run,
                    "data": self.membership.data_of(node),
                    "transaction_id": self.client_state.transaction_id,
                    "call": 0,
                    "committed": [],
                    "retained": "",
                    "has_client_state": False,
                    "round": self._round,
                    "key": 0,
                    "clients": [],
                    "numbers": self.membership.client_numbers(node),
                },
            )
            for node, message in messages.items()
            if self._is_connected(node)
        }
        self.traffic.down += sum(message.nbytes for message in complete.values())
        received = self.transport.send_and_receive(complete) if complete else {}
        answers: dict[str, Message | NodeError] = {}
        for node, answer in received.items():
            if isinstance(answer, Message):
                self.traffic.up += answer.nbytes
                if "rejected" in answer.header:
                    answer = NodeError(one_line(answer.header["rejected"]))
            answers[node] = answer
        return answers

    def evaluate(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[EvalRequest],
        key: int = 0,
        deliver: Delivery | None = None,
    ) -> list[Tree]:
        """All requests go to a node in one message, with the final models if `deliver` is given."""
        ids = checked_ids(ids, len(self.membership.client_records))
        self.finish_evaluation()
        evaluation = RemoteEvaluation(assignment, ids, requests, key, deliver)
        answers, failures = self._query_nodes(ids, evaluation.message)
        self._delivered = {
            client
            for places, answer in answers
            if deliver is not None and answer.header.get("delivered") is True
            for client in ids[places].tolist()
        }
        results, invalid = evaluation.results(answers)
        self._failures += failures + invalid
        return results

    def evaluate_with_next(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[EvalRequest],
        key: int,
        done: Callable[[list[Tree]], None],
    ) -> None:
        """See `training.evaluation.JoinsEvaluation`."""
        evaluation = RemoteEvaluation(assignment, ids, requests, key)
        self._pending = PendingEvaluation(evaluation, self._round, done)

    def finish_evaluation(self) -> None:
        """Send an evaluation that waits for the next training alone."""
        if self._pending is not None:
            self._train_nodes(torch.empty(0, dtype=torch.int64), lambda places: Message({}))

    def push_final_models(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> None:
        header = {"kind": "save_models", "finetune": spec_or_none(finetune), "key": key}
        missing = torch.tensor([client not in self._delivered for client in ids.tolist()])
        places_of = torch.arange(len(ids))[missing.bool()]
        _, failures = self._query_nodes(
            ids[places_of], lambda places: with_models(header, assignment[places_of[places]])
        )
        names = self.client_metadata().names
        for failure in failures:
            name = names.client(failure.client)
            self.note(f"client {name} did not get its model: {failure.reason}")

    def models_of(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> Tree:
        if assignment.local_params or finetune is not None:
            raise InvalidInputError(
                "client: these clients have personal models, which are only on their nodes. Read"
                " them from the node's disk.",
                "client",
            )
        return assignment.gather({})

    def pop_failures(self) -> list[Failure]:
        failures, self._failures = self._failures, []
        return failures

    def _unpack_reply(
        self, ids: Tensor, places: Tensor, answer: Message
    ) -> tuple[dict[int, Tree], list[Failure]]:
        """The replies of one node's clients, by their place in `ids`, and the failures of its other
        clients.
        """
        records = self.membership.client_records
        place_of = {records[int(ids[place])].place: int(place) for place in places}
        outputs = strip_prefix("outputs", answer.tensors)
        try:
            answered = list(answer.header["clients"])
            failed = {
                client: (one_line(reason), bool(rejected))
                for client, reason, rejected in answer.header["failures"]
                if client in place_of
            }
            valid = (
                all(is_int(client, 0) for client in answered)
                and len(set(answered)) == len(answered)
                and set(answered) <= place_of.keys()
                and all(len(value) == len(answered) for value in outputs.values())
            )
        # The answer comes from another machine: whatever it causes is the fault of that machine.
        except Exception:
            valid = False
        if not valid:
            return {}, [
                Failure(
                    int(ids[place]), "its node's answer does not match the request", rejected=True
                )
                for place in places
            ]
        replies = {
            place_of[client]: tree_index(outputs, torch.tensor(row))
            for row, client in enumerate(answered)
        }
        failures = [
            Failure(int(ids[place_of[client]]), reason, rejected)
            for client, (reason, rejected) in failed.items()
            if client not in answered
        ]
        missing = place_of.keys() - set(answered) - failed.keys()
        failures += [
            Failure(int(ids[place_of[client]]), "its node did not answer for it")
            for client in sorted(missing)
        ]
        return replies, failures

    def _train_nodes(
        self, ids: Tensor, message: Callable[[Tensor], Message]
    ) -> tuple[list[tuple[Tensor, Message]], list[Failure]]:
        """As `_query_nodes`. An evaluation that waits is a part of the messages, and done first."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self._query_nodes(ids, message)
        trained, evaluated = self._places_of(ids), self._places_of(pending.evaluation.ids)
        training = self._messages(ids, trained, message)
        evaluation = {
            node: replace(part, header={**part.header, "round": pending.round})
            for node, part in self._messages(
                pending.evaluation.ids, evaluated, pending.evaluation.message
            ).items()
        }
        both = {
            node: join(training[node], evaluation[node])
            for node in training.keys() & evaluation.keys()
        }
        messages = {**evaluation, **training, **both}
        answers = self._send({node: messages[node] for node in sorted(messages)})
        to_training: dict[str, Message | NodeError] = {}
        to_evaluation: dict[str, Message | NodeError] = {}
        for node, answer in answers.items():
            to_training[node] = to_evaluation[node] = answer
            if node in both and isinstance(answer, Message):
                to_training[node], part = split_answers(answer)
                rejected = part.header.get("rejected")
                to_evaluation[node] = part if rejected is None else NodeError(one_line(rejected))
        # A round has the traffic of its training only.
        self.traffic.down -= sum(
            messages[node].nbytes - (training[node].nbytes if node in training else 0)
            for node in evaluation
        )
        self.traffic.up -= sum(
            answer.nbytes
            for node, answer in to_evaluation.items()
            if node in evaluation and isinstance(answer, Message)
        )
        found, failures = _by_places(pending.evaluation.ids, evaluated, to_evaluation)
        results, invalid = pending.evaluation.results(found)
        self._failures += failures + invalid
        pending.done(results)
        return _by_places(ids, trained, to_training)

    def _query_nodes(
        self, ids: Tensor, message: Callable[[Tensor], Message]
    ) -> tuple[list[tuple[Tensor, Message]], list[Failure]]:
        """Send message(places) to the node of the clients at these places of `ids`.

        Returns:
            The places of each node's clients with the node's answer, and the clients whose node is
            not connected or did not answer.
        """
        places_of = self._places_of(ids)
        return _by_places(ids, places_of, self._send(self._messages(ids, places_of, message)))

    def _places_of(self, ids: Tensor) -> dict[str, Tensor]:
        """The places of each node's clients, in the order of their clients' numbers: ids of nodes
        are random.
        """
        places_at: dict[str, list[int]] = {}
        for place, client in enumerate(ids.tolist()):
            places_at.setdefault(self.membership.client_records[client].node, []).append(place)
        return {node: torch.tensor(places, dtype=torch.int64) for node, places in places_at.items()}

    def _messages(
        self, ids: Tensor, places_of: Mapping[str, Tensor], message: Callable[[Tensor], Message]
    ) -> dict[str, Message]:
        """The messages to the nodes that are connected, with the clients that they are about."""
        messages = {}
        for node, places in places_of.items():
            if self.membership.is_connected(node):
                content = message(places)
                records = [self.membership.client_records[client] for client in ids[places]]
                header = {
                    **content.header,
                    "clients": [record.place for record in records],
                    "numbers": self.membership.client_numbers(node),
                }
                messages[node] = replace(content, header=header)
        return messages

    def _send(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        """Send messages with the common header. If a node rejects its message, the answer is an
        error.
        """
        complete = {node: self._with_state(node, message) for node, message in messages.items()}
        self.traffic.down += sum(message.nbytes for message in complete.values())
        answers: dict[str, Message | NodeError] = {}
        received = self.transport.send_and_receive(complete) if complete else {}
        for node, answer in received.items():
            state_key = self.membership.state_key(node)
            if isinstance(answer, Message):
                self.traffic.up += answer.nbytes
                self._initialized.add(node)
                if answer.header.get("state_lost"):
                    self._initialized.discard(node)
                    self.client_state.set_lost(state_key)
                if answer.header.get("data_changed"):
                    self.membership.forget(node)
                if "rejected" in answer.header:
                    answer = NodeError(one_line(answer.header["rejected"]))
            answers[node] = answer
            header = messages[node].header
            # Other messages leave the clients' state alone.
            if header["kind"] in _TRAINING and header["clients"]:
                self.client_state.set_answered(state_key, isinstance(answer, Message))
        return answers

    def _with_state(self, node: str, message: Message) -> Message:
        """Add the common header, and the initial client state if the node needs it."""
        committed = (
            self.client_state.committed_at(self.membership.state_key(node))
            if self._initial_state
            else []
        )
        needs_initial = not committed and node not in self._initialized
        common = {
            "compatibility_info": self.membership.compatibility_info,
            "run": self.run,
            "data": self.membership.data_of(node),
            "transaction_id": self.client_state.transaction_id,
            "call": self.client_state.next_call(self.membership.state_key(node)),
            "committed": committed,
            "retained": self.client_state.retained_at(self.membership.state_key(node)),
            "has_client_state": bool(self._initial_state),
        }
        initial = self._initial_state if needs_initial else {}
        header = {"round": self._round, **message.header, **common}
        return Message(header, {**message.tensors, **initial})


def _by_places(
    ids: Tensor, places_of: Mapping[str, Tensor], answers: Mapping[str, Message | NodeError]
) -> tuple[list[tuple[Tensor, Message]], list[Failure]]:
    """The places of each node's clients with the node's answer, and the clients without one."""
    answered, failures = [], []
    for node, places in places_of.items():
        answer = answers.get(node, NOT_CONNECTED)
        if isinstance(answer, NodeError):
            failures += [Failure(client, answer.reason) for client in ids[places].tolist()]
        else:
            answered.append((places, answer))
    return answered, failures


def _rejection_reason(
    reply: Tree, expected: Spec, size: int, reduce: SegmentSum | None
) -> str | None:
    reason = rejection_reason(reply, expected, size)
    if reason is not None or reduce is None or not isinstance(reduce.segment_ids, str):
        return reason
    chosen = reply.get(reduce.segment_ids)
    segment = int(chosen) if chosen is not None and chosen.numel() == 1 else -1
    return out_of_range_segment(segment, reduce.num_segments)
