"""Attacks of a node on the server, and of a server on a node. Each is refused, costs only the
attacker, and the run of the others is, byte for byte, one in which the attacker is absent.

The messages are encoded as on Flower. Attacks that need Flower itself are in
tests/unit/integrations/flower/test_reply_reader.py and test_node_policy.py.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import fedclade as fc
from fedclade.conformance.in_process_federation import COMPATIBILITY_INFO, InProcessTransport
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.losses import accuracy
from fedclade.core.program_serialization import NodeContext, factories_of, to_spec
from fedclade.data import Clients
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.remote.evaluation import PART, join, join_answers, split_answers
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.messages import MAX_REASON, Message, NodeError, decode, encode
from fedclade.engines.remote.node import InMemoryStateStore, Node
from fedclade.engines.remote.node_policy import LookCounter, NodePolicy
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import measured

Raw = tuple[Any, Any]
"""An encoded message: its header and its tensors."""
Attack = Callable[[Raw], Raw]
SITES = ("east", "north", "west")
ATTACKER = "west"
# What the attacker may change: its own failures and bytes. Seconds differ between any two runs.
NOT_COMPARED = {"seconds", "bytes_up", "bytes_down", "failures"}
TERABYTE = 1 << 40


@cache
def data() -> Clients:
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for client in range(6):
        x = torch.randn(12, 4, generator=generator)
        y = torch.arange(12) % 3
        arrays[str(client)] = (x, y, x[:6], y[:6])
    return fc.data.from_arrays(arrays)


def module() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return fc.models.MLP(6).build((4,), 3)


def node(site: str, policy: NodePolicy | None = None, looks: LookCounter | None = None) -> Node:
    clients = data().only([2 * SITES.index(site), 2 * SITES.index(site) + 1])
    context = NodeContext(
        Objective(module()), secret=12345, factories=factories_of(fc.Clade) | factories_of(fc.FLT)
    )
    return Node(
        clients,
        ["a", "b"],
        context,
        {"accuracy": accuracy},
        COMPATIBILITY_INFO,
        site=site,
        policy=policy or NodePolicy(),
        looks=looks,
    )


class HostileTransport(InProcessTransport):
    """Nodes of which one changes its encoded answers.

    Args:
        nodes: the nodes.
        kind: the kind of message whose answers it changes; or "training" or "evaluation", for this
            part of the answers to messages that have both.
        attack: changes an answer; None: the answer does not arrive, or the part is refused.
    """

    def __init__(self, nodes: Mapping[str, Node], kind: str, attack: Attack | None) -> None:
        super().__init__(nodes)
        self.kind, self.attack = kind, attack

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        answers: dict[str, Message | NodeError] = {}
        for name, message in messages.items():
            answer = self.connected[name].answer(decode(*encode(message)))
            raw: Raw = encode(answer)
            if name == ATTACKER and message.header["kind"] == self.kind:
                if self.attack is None:
                    answers[name] = NodeError("absent")
                    continue
                raw = self.attack(raw)
            elif name == ATTACKER and message.header["kind"] == "map":
                raw = encode(self.changed(answer))
            try:
                answers[name] = decode(*raw)
            except Exception as error:  # as GridTransport does
                answers[name] = NodeError(str(error))
        return answers

    def changed(self, answer: Message) -> Message:
        """The answer to a training with this part of it changed."""
        if self.kind == "training":
            training, evaluation = split_answers(answer)
            attacked = (
                decode(*self.attack(encode(training)))
                if self.attack
                else Message({"clients": [], "failures": [[0, "absent", 0], [1, "absent", 0]]})
            )
            return join_answers(attacked, evaluation) if PART in answer.header else attacked
        if self.kind == "evaluation" and PART in answer.header:
            training, evaluation = split_answers(answer)
            attacked = (
                decode(*self.attack(encode(evaluation)))
                if self.attack
                else Message({"rejected": "absent"})
            )
            return join_answers(training, attacked)
        return answer


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    models: bytes
    history: str
    failed: frozenset[str]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def train(kind: str, attack: Attack | None, without: str = "") -> Outcome:
    nodes = {site: node(site) for site in SITES if site != without}
    notes: list[str] = []

    def check_samples(metadata: ClientMetadata) -> None:
        objective = Objective(module(), x=metadata.x)
        measured(objective, metadata, None, torch.device("cpu"))

    fed = RemoteFederation(
        HostileTransport(nodes, kind, attack),
        COMPATIBILITY_INFO,
        check_samples=check_samples,
        note=notes.append,
    )
    run = TrainingRun(
        fc.FedAvg(),
        None,
        module(),
        LocalConfig(lr=0.1, batch_size=4),
        TrainingConfig(rounds=3, clients_per_round=1.0, eval_every=1, max_rejections=0),
        EngineConfig(),
        federation=fed,
    )
    with TemporaryDirectory() as folder:
        result = run.run(Path(folder) / "run", False, lambda row: None)
        rows = [
            {key: value for key, value in row.items() if key not in NOT_COMPARED}
            for row in result.history
        ]
        names = fed.client_metadata().names
        failures = [failure for row in result.history for failure in row["failures"]]
        return Outcome(
            (Path(folder) / "run" / "models" / "models.safetensors").read_bytes(),
            json.dumps(rows),
            frozenset(names.client(failure["client"]) for failure in failures),
            tuple(failure["reason"] for failure in failures),
            tuple(notes),
        )


@cache
def without_the_attack(kind: str) -> Outcome:
    """The attacker registers and is absent whenever it would attack; or it never registers."""
    return train(kind, None) if kind != "register" else train(kind, None, without=ATTACKER)


def header(change: Callable[[dict[str, Any]], Any]) -> Attack:
    """An attack that changes the header."""

    def attack(raw: Raw) -> Raw:
        content = json.loads(raw[0])
        changed = change(content)
        return json.dumps(content if changed is None else changed), raw[1]

    return attack


def put(**entries: Any) -> Attack:
    return header(lambda content: content.update(entries))


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Attack:
    """An attack that changes the tensors."""

    def attack(raw: Raw) -> Raw:
        message = decode(*raw)
        return encode(Message(message.header, change(dict(message.tensors))))

    return attack


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    return tensors(lambda tree: {name: change(value) for name, value in tree.items()})


def value(name: str, number: float) -> Attack:
    """An attack that reports this value of a metric for every client."""
    return tensors(
        lambda tree: {
            key: torch.full_like(measured, number) if key.endswith(name) else measured
            for key, measured in tree.items()
        }
    )


def listed(entries: dict[str, Any], content: bytes = b"") -> bytes:
    """The safetensors format with these entries."""
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(dtype: str = "F32", shape: tuple[int, ...] = (1,), end: int = 4) -> dict[str, Any]:
    return {"0:outputs/w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


def nested(levels: int) -> Any:
    content: Any = 1
    for _ in range(levels):
        content = {"a": content}
    return content


def as_npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(3))
    return buffer.getvalue()


def as_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", b"\0" * 1_000_000)
    return buffer.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code of the attacker",)


MESSAGE: dict[str, Attack] = {
    "text that is no JSON": lambda raw: ("{", raw[1]),
    "a list as header": lambda raw: ("[1]", raw[1]),
    "a number as header": lambda raw: ("7", raw[1]),
    "header nested 30 deep": put(more=nested(30)),
    "header nested 100,000 deep": lambda raw: ("[" * 100_000, raw[1]),
    "header of 2 MiB": put(more="x" * (1 << 21)),
    "number of 5,000 digits": lambda raw: ('{"a": ' + "9" * 5000 + "}", raw[1]),
    "unpaired surrogate": put(more="\ud800"),
    "numpy's file": lambda raw: (raw[0], as_npy()),
    "pickle": lambda raw: (raw[0], pickle.dumps(Evil())),
    "zip bomb": lambda raw: (raw[0], as_zip()),
    "no bytes": lambda raw: (raw[0], b""),
    "list of tensors of a terabyte": lambda raw: (raw[0], struct.pack("<Q", TERABYTE) + b"{}"),
    "tensor of a terabyte": lambda raw: (
        raw[0],
        listed(entry(shape=(TERABYTE // 4,), end=TERABYTE)),
    ),
    "shape that overflows": lambda raw: (raw[0], listed(entry(shape=(0, 2**60, 2**60), end=0))),
    "tensor of another size": lambda raw: (raw[0], listed(entry(shape=(3,)), b"1234")),
    "complex numbers": lambda raw: (raw[0], listed(entry("C64", end=8), b"12345678")),
    "8-bit floats": lambda raw: (raw[0], listed(entry("F8_E4M3", end=1), b"1")),
    "20,000 more tensors": tensors(
        lambda tree: tree | {f"{'x' * 60}{number}": torch.zeros(0) for number in range(20_000)}
    ),
    "name without a number": lambda raw: (raw[0], listed({"w": entry()["0:outputs/w"]}, b"1234")),
}
REPLY: dict[str, Attack] = {
    "NaN": each(lambda weights: weights * torch.nan),
    "infinity": each(lambda weights: weights + torch.inf),
    "weights of 1e30": each(lambda weights: weights + 1e30),
    "double precision": each(torch.Tensor.double),
    "integers": each(torch.Tensor.long),
    "other shape": each(lambda weights: weights[..., None]),
    "no numbers": each(lambda weights: weights[..., :0]),
    "one client too few": each(lambda weights: weights[:1]),
    "scalars": each(lambda weights: weights.sum()),
    "one more name": tensors(lambda tree: tree | {"outputs/more": torch.zeros(2)}),
    "a name missing": tensors(lambda tree: dict(list(tree.items())[1:])),
    "no tensors": tensors(lambda tree: {}),
    "another node's clients": put(clients=[4, 5]),
    "negative clients": put(clients=[-1, -2]),
    "a client twice": put(clients=[0, 0]),
    "true for 1": put(clients=[0, True]),
    "fractions of clients": put(clients=[0.0, 1.0]),
    "clients that are text": put(clients="01"),
    "clients that are lists": put(clients=[[0], [1]]),
    "no clients": header(lambda content: content.pop("clients") and None),
    "malformed failures": put(failures=[[0]]),
    "failures that are a number": put(failures=7),
    "failure with codes for the terminal": put(
        clients=[], failures=[[0, "\x1b[2J", True], [1, "\u202e", True]]
    ),
}
REFUSAL: dict[str, Attack] = {
    "refusal that is a table": put(rejected={"a": ["b"] * 1000}),
    "refusal of 900,000 characters": put(rejected="x" * 900_000),
    "refusal with codes for the terminal": put(rejected="\x1b[2J\x1b]0;owned\x07\r\nfake line"),
    "lost state every time": put(state_lost=True, rejected="lost"),
    "changed data every time": put(data_changed=True, rejected="changed"),
}
EVALUATION: dict[str, Attack] = {
    "refused evaluation that is a table": put(rejected={"a": ["b"] * 1000}),
    "refused evaluation of 900,000 characters": put(rejected="x" * 900_000),
    "accuracy of a million": value("accuracy", 1e6),
    "negative accuracy": value("accuracy", -1.0),
    "infinite accuracy": value("accuracy", torch.inf),
    "negative loss": value("loss", -1e9),
    "infinite loss": value("loss", -torch.inf),
    "loss of 1e300": value("loss", 1e300),
    "values of other clients": each(lambda values: values.repeat(50)),
    "values as integers": each(torch.Tensor.long),
    "values in single precision": each(torch.Tensor.float),
    "values as a matrix": each(lambda values: values[:, None]),
    "a metric missing": tensors(lambda tree: {"value0/loss": tree["value0/loss"]}),
    "a metric too many": tensors(lambda tree: tree | {"value0/more": tree["value0/loss"]}),
}
REGISTRATION: dict[str, Attack] = {
    "10,001 names": put(
        names=[str(number) for number in range(10_001)],
        **dict.fromkeys(("sizes", "test_sizes", "validation_sizes"), [1] * 10_001),
    ),
    "no names": put(names=[], sizes=[], test_sizes=[], validation_sizes=[]),
    "name of 201 characters": put(names=["a", "x" * 201]),
    "name of two lines": put(names=["a", "b\nc"]),
    "name that hides text": put(names=["a", "b\u202e"]),
    "name that is a formula": put(site="", names=["=1+1", "b"]),
    "the same name twice": put(names=["a", "a"]),
    "names that are numbers": put(names=[1, 2]),
    "names that are a table": put(names={"a": 1, "b": 2}),
    "size of 2^40": put(sizes=[1, 1 << 40]),
    "negative size": put(sizes=[1, -1]),
    "size that is a fraction": put(sizes=[1, 1.5]),
    "size that is text": put(sizes=["1", "2"]),
    "size that is true": put(sizes=[True, True]),
    "sizes that are a number": put(sizes=7),
    "a size too few": put(test_sizes=[1]),
    "a million classes and more": put(classes=(1 << 20) + 1),
    "more classes than the model": put(classes=1000),
    "targets that are no classes": put(classes=None),
    "negative classes": put(classes=-3),
    "site of another node": put(site="east"),
    "site with a path": put(site="../../x"),
    "site with codes for the terminal": put(site="\x1b[2J"),
    "site that is a list": put(site=["east"]),
    "client of another site, without a site": put(site="", names=["east/a", "b"]),
    "first site, with other samples": lambda raw: put(site="aaa")(
        tensors(lambda tree: tree | {"x/": torch.zeros(2, 5)})(raw)
    ),
    "samples that are integers": tensors(lambda tree: tree | {"x/": torch.zeros(2, 4).long()}),
    "a thousand samples": tensors(lambda tree: tree | {"x/": torch.zeros(1000, 4)}),
    "no targets": tensors(lambda tree: {"x/": tree["x/"]}),
    "several inputs": put(inputs="dict"),
    "unknown kind of inputs": put(inputs=["tensor"]),
    "another version": put(compatibility_info={"fedclade": "x" * 100_000}),
    "version that is a number": put(compatibility_info=7),
    "no version": header(lambda content: content.pop("compatibility_info") and None),
    "no digest of its data": header(lambda content: content.pop("data") and None),
    "digest of 100,000 characters": put(data="x" * 100_000),
}
ON_SERVER = [
    pytest.param(kind, attack, id=f"{kind}: {name}")
    for kind, attacks in {
        "register": MESSAGE | REGISTRATION,
        "map": MESSAGE | REFUSAL,
        "training": REPLY,
        "evaluation": EVALUATION,
        "evaluate": MESSAGE | EVALUATION,
    }.items()
    for name, attack in attacks.items()
    # One kind of message is enough for what is refused before the header is read.
    if kind == "map" or attack not in MESSAGE.values()
]


@pytest.mark.parametrize(("kind", "attack"), ON_SERVER)
def test_a_hostile_node_costs_only_itself(kind: str, attack: Attack) -> None:
    expected, actual = without_the_attack(kind), train(kind, attack)
    assert actual.models == expected.models
    assert actual.history == expected.history
    assert actual.failed == expected.failed
    assert all(
        len(text) <= MAX_REASON + 100 and text.isprintable()
        for text in (*actual.reasons, *actual.notes)
    )


def test_without_an_attack_the_attacker_counts() -> None:
    """Otherwise the test above would compare nothing."""
    alone = train("map", lambda raw: raw)
    assert alone.failed == frozenset()
    for kind in ("map", "training", "evaluation", "evaluate", "register"):
        assert alone.history != without_the_attack(kind).history
    assert alone.models != without_the_attack("map").models


def test_a_node_with_many_clients_does_not_decide_what_a_reply_looks_like() -> None:
    """300 clients of one node, all with a reply of another shape, against four of two nodes."""
    names = [str(number) for number in range(300)]
    many = {
        "register": put(
            names=names, **dict.fromkeys(("sizes", "test_sizes", "validation_sizes"), [1] * 300)
        ),
        "map": lambda raw: encode(
            Message(
                {"clients": list(range(300)), "failures": []},
                {"outputs/w": torch.zeros(300, 7)},
            )
        ),
    }

    class Crowd(HostileTransport):
        def send_and_receive(
            self, messages: Mapping[str, Message]
        ) -> dict[str, Message | NodeError]:
            kinds = {message.header["kind"] for message in messages.values()}
            self.kind = kinds.pop()
            self.attack = many.get(self.kind, lambda raw: raw)
            return super().send_and_receive(messages)

    fed = RemoteFederation(
        Crowd({site: node(site) for site in SITES}, "", None), COMPATIBILITY_INFO
    )
    fed.refresh_membership()
    objective = Objective(module())
    ids = torch.arange(len(fed.sizes))
    models = {name: weights[None] for name, weights in objective.params().items()}
    results = fed.map(
        sgd(LocalTraining(objective)),
        ids,
        per_client=fc.core.ModelAssignment(models, torch.zeros_like(ids)),
        key=1,
    )
    honest = [
        number
        for number, record in enumerate(fed.membership.client_records)
        if record.site != ATTACKER
    ]
    assert results.ids.tolist() == honest


# A server against a node.


@cache
def digest() -> str:
    return node("west").data_digest


def train_message() -> Message:
    """What an honest server sends to the node of west."""
    objective = Objective(module())
    models = {f"per_client/{name}": value[None] for name, value in objective.params().items()}
    return Message(
        {
            "kind": "map",
            "program": to_spec(sgd(LocalTraining(objective, batch_size=4))),
            "key": 3,
            "clients": [0, 1],
            "numbers": [4, 5],
            "per_client": {"model_ids": [0, 0], "local_params": []},
            "compatibility_info": COMPATIBILITY_INFO,
            "run": "run",
            "data": digest(),
            "transaction_id": "t-0",
            "call": 0,
            "round": 1,
            "committed": [],
            "retained": "",
            "has_client_state": False,
        },
        models,
    )


def evaluate_message() -> Message:
    request = {"split": "test", "metrics": ["accuracy"], "finetune": None, "is_served": True}
    message = train_message()
    added = {"kind": "evaluate", "requests": [request], "deliver": None}
    return replace(message, header={**message.header, **added})


def with_header(message: Message, **entries: Any) -> Message:
    return replace(message, header={**message.header, **entries})


def program(make: str, **arguments: Any) -> Message:
    return with_header(train_message(), program={"make": make, "with": arguments})


def training(**settings: Any) -> Message:
    message = train_message()
    local = message.header["program"]["with"]["local"]["training"]
    local.update(settings)
    return message


def signature(noise: object, name: str = "private_signature") -> Message:
    arguments = {
        "objective": {"here": "objective"},
        "kind": "joint",
        "size": 8,
        "key": 1,
        "clip": 1.0,
        "noise": noise,
        "secret": {"here": "secret"},
    }
    if name == "signature":
        arguments = {key: arguments[key] for key in ("objective", "kind", "size", "key")}
    return program(f"programs.gradient_signature.{name}", **arguments)


def deep_program(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"make": "core.local_sgd.sgd", "with": {}}
    for _ in range(levels):
        inner = {"make": "core.local_sgd.chain_training", "with": {"first": {"program": inner}}}
    return inner


ON_NODE: dict[str, tuple[NodePolicy, Message]] = {
    name: (NodePolicy(), message)
    for name, message in {
        "unknown kind of message": with_header(train_message(), kind="shell"),
        "kind that is a list": with_header(train_message(), kind=["map"]),
        "unknown program": program("os.system", command="true"),
        "program that is a path": program("../../x"),
        "program of another method": program(
            "methods.fedprox.proximal",
            local=train_message().header["program"]["with"]["local"],
            mu=1.0,
        ),
        "program that is text": with_header(train_message(), program="core.local_sgd.sgd"),
        "no program": with_header(train_message(), program=None),
        "program in a program, unknown": with_header(
            train_message(),
            program={
                "make": "core.local_sgd.chain_training",
                "with": {
                    "first": {"program": {"make": "x", "with": {}}},
                    "second": {"program": {"make": "x", "with": {}}},
                },
            },
        ),
        "programs nested 4 deep": with_header(train_message(), program=deep_program(4)),
        "a million epochs": training(epochs=1_000_000),
        "10^9 steps": training(steps=10**9),
        "epochs that are text": training(epochs="1"),
        "the secret as a learning rate": training(lr={"here": "secret"}),
        "the secret as a number of a program": program(
            "core.local_sgd.sgd",
            **train_message().header["program"]["with"] | {"local": {"here": "secret"}},
        ),
        "a secret of the server": program(
            "programs.gradient_signature.private_signature",
            objective={"here": "objective"},
            kind="joint",
            size=8,
            key=1,
            clip=1.0,
            noise=0.0,
            secret=7,
        ),
        "negative client": with_header(train_message(), clients=[-1, 0]),
        "client of another node": with_header(train_message(), clients=[0, 2]),
        "a client twice": with_header(train_message(), clients=[0, 0]),
        "client that is true": with_header(train_message(), clients=[0, True]),
        "clients that are text": with_header(train_message(), clients="01"),
        "a number too few": with_header(train_message(), numbers=[4]),
        "number of 2^70": with_header(train_message(), numbers=[4, 2**70]),
        "negative number": with_header(train_message(), numbers=[4, -5]),
        "more models than clients": with_header(
            train_message(), per_client={"model_ids": [0] * 1000, "local_params": []}
        ),
        "model that was not sent": with_header(
            train_message(), per_client={"model_ids": [7, 7], "local_params": []}
        ),
        "no models": replace(train_message(), tensors={}),
        "models of another shape": replace(
            train_message(),
            tensors={key: value[:, :1] for key, value in train_message().tensors.items()},
        ),
        "key that is text": with_header(train_message(), key="k"),
        "run of 10,000 characters": with_header(train_message(), run="x" * 10_000),
        "run that is a list": with_header(train_message(), run=["run"]),
        "transaction that is a number": with_header(train_message(), transaction_id=7),
        "committed that is text": with_header(train_message(), committed="t-0"),
        "another version": with_header(train_message(), compatibility_info={"fedclade": "0"}),
        "no version": with_header(train_message(), compatibility_info=None),
        "1,000 evaluations in a message": with_header(
            evaluate_message(), requests=evaluate_message().header["requests"] * 1000
        ),
        "unknown metric": with_header(
            evaluate_message(),
            requests=[{"split": "test", "metrics": ["x"], "finetune": None, "is_served": True}],
        ),
        "evaluation with an unknown program": with_header(
            evaluate_message(),
            requests=[
                {
                    "split": "test",
                    "metrics": [],
                    "finetune": {"make": "x", "with": {}},
                    "is_served": True,
                }
            ],
        ),
    }.items()
} | {
    "more epochs than the policy": (NodePolicy(max_epochs=2), training(epochs=3)),
    "more steps than the policy": (NodePolicy(max_epochs=2), training(steps=7)),
    "longer than the policy": (NodePolicy(max_seconds=0.05), training(epochs=1000)),
    "more looks than the policy": (
        NodePolicy(max_looks=1),
        with_header(evaluate_message(), requests=evaluate_message().header["requests"] * 2),
    ),
    "less noise than the policy": (NodePolicy(min_noise=2.0), signature(1.9)),
    "noise that is no number": (NodePolicy(min_noise=2.0), signature(float("nan"))),
    "infinite noise": (NodePolicy(min_noise=2.0), signature(float("inf"))),
    "noise that is text": (NodePolicy(min_noise=2.0), signature("3")),
    "training without a secure sum": (NodePolicy(min_group=3), train_message()),
    "signature without noise": (NodePolicy(min_noise=2.0), signature(0, "signature")),
    "signature without noise in a chain": (
        NodePolicy(min_noise=2.0),
        with_header(
            train_message(),
            program={
                "make": "core.local_sgd.chain_training",
                "with": {
                    "first": {"program": signature(0, "signature").header["program"]},
                    "second": {"program": train_message().header["program"]},
                },
            },
        ),
    ),
}


def is_refused(answer: Message) -> bool:
    """Whether the node computed nothing for the server."""
    return "rejected" in answer.header or (
        answer.header.get("clients") == []
        and not any(value.numel() for value in answer.tensors.values())
    )


@pytest.mark.parametrize(("policy", "message"), ON_NODE.values(), ids=ON_NODE)
def test_a_node_refuses_a_hostile_server(policy: NodePolicy, message: Message) -> None:
    attacked, store = node("west", policy), InMemoryStateStore()
    attacked.state_stores = lambda run: store
    answer = decode(*encode(attacked.answer(decode(*encode(message)))))
    assert is_refused(answer), answer.header
    assert store.snapshots == []
    assert store.models == {}
    # It computes for an honest server as if nothing had happened.
    attacked.policy = NodePolicy()
    before = node("west").answer(train_message())
    after = attacked.answer(train_message())
    assert after.header == before.header
    assert list(after.tensors) == list(before.tensors)
    assert all(torch.equal(after.tensors[name], before.tensors[name]) for name in before.tensors)


def joined(**entries: Any) -> Message:
    """A training with an evaluation of which these entries of the header are changed."""
    message = join(train_message(), evaluate_message())
    return with_header(message, **{PART: {**message.header[PART], **entries}})


REQUEST = evaluate_message().header["requests"][0]
JOINED: dict[str, tuple[NodePolicy, Message]] = {
    name: (NodePolicy(), message)
    for name, message in {
        "evaluation that is a list": with_header(train_message(), **{PART: [1]}),
        "evaluation without entries": with_header(train_message(), **{PART: {}}),
        "1,000 evaluations": joined(requests=[REQUEST] * 1000),
        "unknown metric": joined(requests=[{**REQUEST, "metrics": ["x"]}]),
        "unknown program": joined(requests=[{**REQUEST, "finetune": {"make": "x", "with": {}}}]),
        "a million epochs": joined(
            requests=[{**REQUEST, "finetune": training(epochs=10**6).header["program"]}]
        ),
        "client of another node": joined(clients=[0, 2]),
        "a client twice": joined(clients=[0, 0]),
        "model that was not sent": joined(per_client={"model_ids": [7, 7], "local_params": []}),
        "model that is not in the training": joined(common=["secret"]),
        "round that is text": joined(round="1"),
    }.items()
} | {"more looks than the policy": (NodePolicy(max_looks=1), joined())}


@pytest.mark.parametrize(("policy", "message"), JOINED.values(), ids=JOINED)
def test_a_node_refuses_a_hostile_evaluation_in_a_training(
    policy: NodePolicy, message: Message
) -> None:
    """The training of the message may be answered."""
    attacked, store = node("west", policy), InMemoryStateStore()
    attacked.state_stores = lambda run: store
    answer = decode(*encode(attacked.answer(decode(*encode(message)))))
    evaluation = split_answers(answer)[1]
    assert "rejected" in answer.header or "rejected" in evaluation.header
    assert evaluation.tensors == {}
    assert store.models == {}
    attacked.policy = NodePolicy()
    honest = split_answers(attacked.answer(joined()))[1]
    assert "value0/accuracy" in honest.tensors


def test_honest_messages_are_answered_under_a_policy() -> None:
    """Otherwise the test above would refuse everything."""
    policy = NodePolicy(max_epochs=3, max_seconds=60, max_looks=3, min_noise=1.0, max_signatures=1)
    honest = node("west", policy)
    for message in (train_message(), evaluate_message(), signature(1.5)):
        assert not is_refused(honest.answer(message)), honest.answer(message).header
    counted = honest.answer(train_message())
    assert "policy.max_looks = 3" in counted.header["rejected"]


def test_looks_count_over_all_runs_and_processes(tmp_path: Path) -> None:
    file = tmp_path / "west" / "looks.json"
    policy = NodePolicy(max_looks=2)
    for run in ("first", "second"):
        restarted = node("west", policy, LookCounter(file))
        assert not is_refused(restarted.answer(with_header(train_message(), run=run)))
    assert is_refused(node("west", policy, LookCounter(file)).answer(train_message()))
    file.write_text("{")
    assert is_refused(node("west", policy, LookCounter(file)).answer(train_message()))
    file.unlink()
    assert not is_refused(node("west", policy, LookCounter(file)).answer(train_message()))


def test_signatures_are_counted() -> None:
    asked = node("west", NodePolicy(max_signatures=1))
    assert not is_refused(asked.answer(signature(1.0)))
    assert is_refused(asked.answer(with_header(signature(1.0), key=4)))
    assert not is_refused(asked.answer(train_message()))


PATIENT = "Jane Doe, born 1970-01-01, HIV positive"


class Leaky(torch.nn.Module):
    """A model whose errors have data of the patient in their text."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != 2:  # not the trial of the server
            raise ValueError(PATIENT)
        outputs: torch.Tensor = self.layer(x)
        return outputs


def test_the_text_of_an_exception_stays_at_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaky = Leaky()
    nodes = {site: node(site) for site in SITES}
    for one in nodes.values():
        one.context = NodeContext(Objective(leaky))
    received: list[Raw] = []
    kinds: set[str] = set()

    class Recorded(HostileTransport):
        def send_and_receive(
            self, messages: Mapping[str, Message]
        ) -> dict[str, Message | NodeError]:
            for name, message in messages.items():
                kinds.add(message.header["kind"])
                received.append(encode(self.connected[name].answer(message)))
            return super().send_and_receive(messages)

    transport = Recorded(nodes, "", None)
    fed = RemoteFederation(transport, COMPATIBILITY_INFO)
    run = TrainingRun(
        fc.FedAvg(),
        None,
        leaky,
        LocalConfig(lr=0.1, batch_size=4),
        TrainingConfig(rounds=1, clients_per_round=1.0, eval_every=0),
        EngineConfig(),
        federation=fed,
    )
    result = run.run(tmp_path / "run", False, lambda row: None)
    reasons = {failure["reason"] for failure in result.history[0]["failures"]}
    assert {reason[:12] for reason in reasons} == {"ValueError ("}
    assert {"register", "map", "evaluate"} <= kinds
    for text, content in received:
        assert PATIENT not in text
        assert PATIENT.encode() not in content
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert files
    assert not any(b"Jane" in file.read_bytes() for file in files)
    assert PATIENT in caplog.text  # in the log of the node
