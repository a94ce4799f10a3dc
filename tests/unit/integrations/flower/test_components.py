"""The parts of the Flower engine: messages, transport, a node's disk, an app's settings, the client
registry.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from flwr.app import Error
from flwr.app import Message as FlowerMessage

import fedclade as fc
from fedclade.conformance.in_process_federation import COMPATIBILITY_INFO, InProcessTransport
from fedclade.core.functional_model import Objective
from fedclade.core.losses import mse
from fedclade.core.program import TEMPORARY
from fedclade.engines.remote.membership import ClientRecord
from fedclade.engines.remote.messages import Message, NodeError
from fedclade.engines.remote.node import Node, StateSnapshot
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.integrations.flower import federation, grid_transport
from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.apps import AppSettings, ClientRegistry, _node, _secret, site_name
from fedclade.integrations.flower.client_state_store import MAX_RUNS, DiskStateStore
from fedclade.integrations.flower.federation import FlowerFederation, compatibility_info
from fedclade.integrations.flower.grid_transport import (
    GridTransport,
    message_from_records,
    records_from_message,
)
from fedclade.integrations.flower.reply_reader import LOST
from fedclade.models import MLP


def test_a_message_survives_flower() -> None:
    tensors = {
        "a/b": torch.randn(3, 2),
        "long": torch.tensor([2**62, -1]),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "bytes": torch.arange(4, dtype=torch.uint8),
        "none": torch.zeros(0, 5),
        "turned": torch.arange(6.0).view(2, 3).T,
    }
    actual = message_from_records(
        records_from_message(
            Message({"kind": "map", "key": 2**63 - 1, "list": [1, "ü", None]}, tensors)
        )
    )
    assert actual.header == {"kind": "map", "key": 2**63 - 1, "list": [1, "ü", None]}
    assert actual.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(actual.tensors[name], value)
        assert actual.tensors[name].dtype == value.dtype


When = int | Error | None


class Grid:
    """Answers each message after this number of polls; None: never; an Error: with it. A list: so
    each message to the node in turn.
    """

    def __init__(self, after: Mapping[int, When | list[When]]) -> None:
        self.after, self.looks, self.sent = after, 0, list[int]()
        self._messages: dict[str, tuple[Any, When]] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.after)

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        numbers = []
        for message in messages:
            node = message.metadata.dst_node_id
            when = self.after[node]
            if isinstance(when, list):
                when = when[self.sent.count(node)]
            numbers.append(f"m{len(self.sent)}")
            self.sent.append(node)
            self._messages[numbers[-1]] = message, when
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        self.looks += 1
        actual = []
        for number in numbers:
            message, when = self._messages[number]
            metadata = SimpleNamespace(reply_to_message_id=number)
            if isinstance(when, Error):
                actual.append(
                    SimpleNamespace(metadata=metadata, has_error=lambda: True, error=when)
                )
            elif when is not None and when <= self.looks:
                actual.append(
                    SimpleNamespace(
                        metadata=metadata, has_error=lambda: False, content=message.content
                    )
                )
        return actual


@pytest.fixture(autouse=True)
def outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower creates messages only inside a run."""

    def message(content: Any, node: int, kind: str, ttl: float) -> Any:
        return SimpleNamespace(content=content, metadata=SimpleNamespace(dst_node_id=node))

    monkeypatch.setattr(grid_transport, "FlowerMessage", message)


MESSAGES = {"1": Message({"n": 1}), "2": Message({"n": 2}), "3": Message({"n": 3})}


def send_and_receive(
    after: Mapping[int, When],
    deadline: float = 0.3,
    min_nodes: int = 1,
    note: Any = lambda text: None,
) -> dict[str, Any]:
    return GridTransport(Grid(after), deadline, min_nodes, note).send_and_receive(MESSAGES)  # type: ignore[arg-type]


def test_the_transport_returns_each_nodes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "_LONGEST_WAIT", 0.01)
    actual = send_and_receive({1: 3, 2: 1, 3: 2}, deadline=60)
    assert {node: answer.header for node, answer in actual.items()} == {
        node: message.header for node, message in MESSAGES.items()
    }


def test_after_the_deadline_it_continues_without_silent_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grid_transport, "_LONGEST_WAIT", 0.01)
    actual = send_and_receive({1: 1, 2: None, 3: 1})
    assert actual["2"] == NodeError("no answer within 0.3 s")
    assert isinstance(actual["1"], Message)


def test_with_too_few_answers_it_keeps_waiting_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(grid_transport, "_LONGEST_WAIT", 0.01)
    notes: list[str] = []
    actual = send_and_receive({1: 1, 2: 40, 3: None}, deadline=0.1, min_nodes=2, note=notes.append)
    assert isinstance(actual["2"], Message)
    (note,) = notes
    assert note.startswith("1 of 3 nodes have answered within 0.1 s")
    assert "at least 2" in note


HELLO = Message({"kind": "register"})


def test_a_new_node_that_loads_slowly_delays_nobody() -> None:
    grid = Grid({1: 1, 4: 3})
    transport = GridTransport(grid, 60)  # type: ignore[arg-type]
    assert transport.hello({"4": HELLO}, wait=False) == {}
    assert transport.hello({"4": HELLO}, wait=False) == {}
    assert isinstance(transport.hello({}, wait=False)["4"], Message)
    assert len(grid.sent) == 1  # a node whose answer is outstanding gets no second message


def test_without_other_nodes_it_waits_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "_FIRST_WAIT", 0.01)
    transport = GridTransport(Grid({4: 3, 5: None}), 60)  # type: ignore[arg-type]
    assert list(transport.hello({"4": HELLO, "5": HELLO}, wait=True)) == ["4"]


def test_a_message_whose_client_app_crashed_is_sent_again_once() -> None:
    grid = Grid({1: 1, 2: [Error(8, "crashed"), 1], 3: Error(8, "crashed")})
    notes: list[str] = []
    transport = GridTransport(grid, 60, note=notes.append, name_of=lambda node: f"site {node}")  # type: ignore[arg-type]
    answers = transport.send_and_receive(MESSAGES)
    assert answers["2"] == MESSAGES["2"]
    assert isinstance(answers["3"], NodeError)
    assert grid.sent == [1, 2, 3, 2, 3]
    assert [note.split(":")[0] for note in notes] == ["site 2", "site 3"]


def test_a_message_whose_answer_was_lost_on_the_way_is_sent_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that is killed while it sends an answer."""
    grid, notes = Grid({1: 1, 2: 1, 3: 1}), list[str]()
    transport = GridTransport(grid, 60, note=notes.append)  # type: ignore[arg-type]
    read = transport._reader.read

    def lossy(message_ids: Iterable[str]) -> Any:
        # m1 is the first message to node 2; m2 and m4 are those to node 3.
        lost = ("m1", "m2", "m4")
        return {key: LOST if key in lost else v for key, v in read(message_ids).items()}

    monkeypatch.setattr(transport._reader, "read", lossy)
    answers = transport.send_and_receive(MESSAGES)
    assert (answers["1"], answers["2"]) == (MESSAGES["1"], MESSAGES["2"])
    assert answers["3"] is LOST
    assert grid.sent == [1, 2, 3, 2, 3]
    assert len(notes) == 2


def test_progress_names_the_nodes_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_transport, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(grid_transport.Progress, "EVERY", 0.0)
    notes: list[str] = []
    send_and_receive({1: 1, 2: 5, 3: 1}, deadline=60, note=notes.append)
    assert "2 of 3 nodes answered; waiting for 2" in notes


def test_an_error_of_a_node_is_a_node_error(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = send_and_receive({1: 1, 2: Error(5, "node unavailable"), 3: 1}, deadline=60)
    assert actual["2"] == NodeError("its node reports an error: node unavailable (code 5)")


def test_too_few_that_can_answer_end_the_run() -> None:
    gone = Error(5, "node unavailable")
    with pytest.raises(FedcladeError, match=r"= 2: .*1 of 3 nodes.*node unavailable") as caught:
        send_and_receive({1: 1, 2: gone, 3: gone}, deadline=60, min_nodes=2)
    assert caught.value.field == "federation.min_nodes"


def test_one_that_cannot_answer_ends_nothing_while_others_can() -> None:
    grid = Grid({1: 1, 2: 1, 3: Error(2, "broken")})
    transport = GridTransport(grid, 60, min_nodes=2)  # type: ignore[arg-type]
    assert isinstance(transport.hello({"3": HELLO}, wait=True)["3"], NodeError)
    assert isinstance(transport.send_and_receive(MESSAGES)["1"], Message)
    assert isinstance(transport.send_and_receive({"3": MESSAGES["3"]})["3"], NodeError)


def test_the_disk_store_loads_what_was_saved(tmp_path: Path) -> None:
    state_store = DiskStateStore(tmp_path, "run")
    assert state_store.load() == ({}, [])
    initial = {"c": torch.zeros(2)}
    kept = [
        StateSnapshot("a-1", {"ids": torch.tensor([0]), "rows/c": torch.ones(1, 2)}),
        StateSnapshot("a-2", {"ids": torch.tensor([1])}),
    ]
    state_store.save(initial, [])
    state_store.save(initial, kept[:1])
    state_store.save(initial, kept)
    loaded_initial, loaded = DiskStateStore(tmp_path, "run").load()
    assert torch.equal(loaded_initial["c"], initial["c"])
    assert [each.transaction_id for each in loaded] == ["a-1", "a-2"]
    assert torch.equal(loaded[0].client_state["rows/c"], torch.ones(1, 2))
    state_store.save(initial, kept[1:])
    assert [each.transaction_id for each in state_store.load()[1]] == ["a-2"]
    assert len(list(tmp_path.rglob("transaction-*"))) == 1
    assert DiskStateStore(tmp_path, "other run").load() == ({}, [])


def test_the_disk_store_keeps_temporary_state_of_clients_without_state(tmp_path: Path) -> None:
    temporary = {f"{TEMPORARY}/right": torch.ones(2, 5)}
    DiskStateStore(tmp_path, "run").save({}, [StateSnapshot("a-1", temporary, call=3)])
    initial, (loaded,) = DiskStateStore(tmp_path, "run").load()
    assert initial == {}
    assert (loaded.transaction_id, loaded.call) == ("a-1", 3)
    assert torch.equal(loaded.client_state[f"{TEMPORARY}/right"], torch.ones(2, 5))


def test_only_the_owner_reads_it_and_old_runs_go(tmp_path: Path) -> None:
    for run in range(MAX_RUNS + 2):
        DiskStateStore(tmp_path, f"run{run}").save({"c": torch.zeros(1)}, [])
    state_store = DiskStateStore(tmp_path, "run9")
    state_store.save_models(["ward/../../1"], {"w": torch.ones(1, 3)})
    assert len(list((tmp_path / "client_state").iterdir())) == MAX_RUNS
    (model,) = (tmp_path / "models").iterdir()  # nowhere else, whatever a client is called
    for file in (model, *tmp_path.rglob("initial*")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_client_state_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    state_store = DiskStateStore(tmp_path, "run")
    state_store.save({"c": torch.zeros(1)}, [])
    (tmp_path / "client_state" / "run" / "initial.safetensors").write_bytes(b"x")
    folder = tmp_path / "client_state" / "run"
    with pytest.raises(FedcladeError, check=lambda error: error.field == str(folder)):
        state_store.load()


def test_settings_of_an_app() -> None:
    actual = AppSettings.of(
        {
            "method.name": "ifca",
            "method.settings": "clusters = 3; shared_layers = 'trunk'",
            "run.rounds": 7,
            "local.lr": 0.5,
            "own": 1,
        }
    )
    assert actual.method == fc.IFCA(clusters=3, shared_layers="trunk")
    assert (
        actual.run.rounds,
        actual.run.checkpoint_every,
        actual.run.clients_per_round,
        actual.local.lr,
    ) == (
        7,
        1,
        1.0,
        0.5,
    )
    assert AppSettings.of({}).method == fc.Clade()
    assert (AppSettings.of({}).data.validation, AppSettings.of({}).run.metrics) == (0.0, ())


def test_validation_and_metrics_of_an_app() -> None:
    actual = AppSettings.of(
        {
            "data.validation": 0.25,
            "data.path": "own",
            "run.metrics": "auroc, f1",
            "run.patience": 2,
            "run.eval_every": 1,
        }
    )
    assert actual.data.validation_origin == {"validation": 0.25}
    assert actual.run.metrics == ("auroc", "f1")
    assert AppSettings.of({"run.metrics": ""}).run.metrics == ()


@pytest.mark.parametrize(
    ("run_config", "field"),
    [
        ({"method.name": "clad"}, "method.name = 'clad'"),
        (
            {"method.name": "ifca", "method.settings": "clusters 3"},
            "method.settings = 'clusters 3'",
        ),
        ({"method.name": "ifca", "method.settings": "cluster = 3"}, "method.cluster"),
        ({"run.round": 3}, "run.round"),
        ({"run.metrics": "auc"}, "run.metrics = ['auc']"),
        ({"data.validation": 1.0}, "data.validation = 1.0"),
        ({"federation.nodes": 0}, "federation.nodes = 0"),
        ({"federation.deadline": 0}, "federation.deadline = 0.0"),
    ],
)
def test_wrong_settings_are_refused(run_config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        AppSettings.of(run_config)
    assert str(caught.value).startswith(f"{field}:")


def test_the_template_has_every_setting_and_the_defaults_are_right(tmp_path: Path) -> None:
    import tomllib

    new_app(tmp_path / "my clinics")
    config = tomllib.loads((tmp_path / "my clinics" / "pyproject.toml").read_text())["tool"][
        "flwr"
    ]["app"]["config"]
    flat = {
        f"{table}.{name}": value
        for table, values in config.items()
        for name, value in values.items()
    }
    assert AppSettings.of(flat).method == fc.Clade()
    assert (tmp_path / "my clinics" / "my_clinics" / "task.py").exists()
    for folder in ("my clinics", "7"):
        with pytest.raises(InvalidInputError) as caught:
            new_app(tmp_path / folder)
        assert caught.value.field == str(tmp_path / folder)


def test_numbers_outlast_the_server(tmp_path: Path) -> None:
    registry = ClientRegistry(tmp_path / "federation.json")
    records = [
        ClientRecord("17", 0, "ward", 5, 2, "north"),
        ClientRecord("18", 0, "ward", 6, 3, "south", owner="18"),
    ]
    registry.write(records)
    again = ClientRegistry(tmp_path / "federation.json")
    assert again.run == registry.run
    assert again.client_records() == [replace(record, node="", place=-1) for record in records]


NODE_SIZES = (("a", 8), ("b", 3))


def node_of(
    load_data: Any, tmp_path: Path, run_config: dict[str, Any] | None = None, **node_config: Any
) -> Node:
    context = SimpleNamespace(
        run_config=run_config or {}, node_id=77, node_config={"home": str(tmp_path), **node_config}
    )
    return _node(context, load_data, lambda: MLP(4).build((3,), 2), None, None)  # type: ignore[arg-type]


def test_a_node_lists_its_clients_by_name(tmp_path: Path) -> None:
    arrays = {
        name: (torch.full((4, 3), float(number)), torch.arange(4) % 2)
        for number, name in enumerate(("ward-b", "ward-a"))
    }
    one = node_of(lambda config: arrays, tmp_path, **{"node-name": "north"})
    other = node_of(
        lambda config: dict(reversed(arrays.items())), tmp_path, **{"node-name": "north"}
    )
    assert one.site == other.site == "north"
    assert one.names == other.names == ["ward-a", "ward-b"]
    assert torch.equal(one.clients.x, other.clients.x)
    assert float(one.clients.arrays("ward-a")[0][0, 0]) == 1.0
    listed = node_of(lambda config: list(arrays.values()), tmp_path)
    assert listed.names == ["0", "1"]


def test_a_node_has_the_loss_of_the_settings_and_the_augmentation_of_the_app(
    tmp_path: Path,
) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([a, b], -1))

    x = {"a": torch.zeros(4, 1), "b": torch.zeros(4, 2)}
    context = SimpleNamespace(
        run_config={"local.loss": "mse"}, node_id=77, node_config={"home": str(tmp_path)}
    )
    node = _node(context, lambda config: [(x, torch.arange(4.0))], Two, None, None, dict)  # type: ignore[arg-type]
    objective = node.context.objective
    assert objective.example_loss is mse
    assert objective.augment is dict
    server = Objective(Two(), mse, augment=dict)
    assert node.compatibility_info == compatibility_info(server)
    assert node.compatibility_info != compatibility_info(Objective(Two(), mse))
    answer = node.answer(Message({"kind": "register"}))
    assert answer.header["inputs"] == "dict"
    assert set(answer.tensors) == {"x/a", "x/b", "y"}


def test_a_node_keeps_validation_data_as_clients_in_python_do(tmp_path: Path) -> None:
    arrays = {name: (torch.randn(size, 3), torch.arange(size) % 2) for name, size in NODE_SIZES}
    node = node_of(lambda config: arrays, tmp_path, {"data.validation": 0.25})
    expected = fc.data.from_arrays(arrays).with_validation(0.25)
    assert node.clients.validation is not None
    assert expected.validation is not None
    assert torch.equal(node.clients.validation.index, expected.validation.index)
    assert node.clients.sizes.tolist() == [6, 3]
    registration = node.answer(Message({"kind": "register"})).header
    assert registration["sizes"] == [6, 3]
    assert registration["validation_sizes"] == [2, 0]
    assert node_of(lambda config: arrays, tmp_path).clients.validation is None


def test_a_site_has_the_name_in_the_configuration_or_its_partition() -> None:
    assert site_name({"node-name": "north", "partition-id": 3}, 77) == "north"
    assert site_name({"partition-id": 3}, 77) == "node-3"
    assert site_name({}, 77) == "node-77"


@pytest.mark.parametrize("name", ["", "a/b", "two\nlines", "=x", "x" * 201])
def test_a_bad_site_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "node-name"):
        site_name({"node-name": name}, 77)


def test_no_site_name_chooses_a_path(tmp_path: Path) -> None:
    data = {"../../x": (torch.zeros(4, 3), torch.arange(4) % 2)}
    node = node_of(lambda config: data, tmp_path / "home", **{"node-name": ".."})
    node.state_stores("run").save_models(node.names, {"w": torch.ones(1, 3)})
    (model,) = tmp_path.rglob("*.safetensors")
    assert model.parent.parent.parent == tmp_path / "home" / "nodes"


def waiting(nodes: dict[str, Node], later: dict[str, Node], monkeypatch: Any) -> FlowerFederation:
    """A federation to which one more node connects with every poll."""
    transport = InProcessTransport(nodes)
    fed = FlowerFederation(Grid({}), COMPATIBILITY_INFO)  # type: ignore[arg-type]
    fed.membership.transport = transport
    arriving = iter(later.items())
    monkeypatch.setattr(
        federation.time, "sleep", lambda seconds: transport.connected.update([next(arriving)])
    )
    return fed


def site_node(site: str, tmp_path: Path) -> Node:
    node = node_of(
        lambda config: {"ward": (torch.zeros(4, 3), torch.arange(4) % 2)},
        tmp_path,
        **{"node-name": site},
    )
    node.compatibility_info = COMPATIBILITY_INFO
    return node


def test_the_order_in_which_nodes_connect_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, north, west = (site_node(site, tmp_path) for site in ("east", "north", "west"))
    fed = waiting({"1": west}, {"2": north, "3": east}, monkeypatch)
    fed.wait_for(3, 60)
    names = fed.client_metadata().names.clients
    assert names == ("east/ward", "north/ward", "west/ward")


def test_a_second_node_with_a_sites_name_is_not_used_and_named_at_the_end_of_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = {number: site_node("east", tmp_path) for number in ("1", "2")}
    fed = waiting(twins, {}, monkeypatch)
    with pytest.raises(FedcladeError, match=r"east \(node 2\) .*'east'.* node 1 ") as caught:
        fed.wait_for(2, -1)
    assert caught.value.field == "federation.nodes"
    assert fed.membership.present == {"1"}


def test_a_node_that_cannot_load_its_data_is_named_at_the_end_of_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = site_node("west", tmp_path)

    def answer(message: Message) -> Message:
        return Message({"rejected": "ValueError (its text is in the log)", "site": "west"})

    broken.answer = answer  # type: ignore[method-assign]
    fed = waiting({"1": site_node("east", tmp_path), "2": broken}, {}, monkeypatch)
    with pytest.raises(FedcladeError, match=r"west \(node 2\) .*ValueError") as caught:
        fed.wait_for(2, -1)
    assert caught.value.field == "federation.nodes"


def test_too_few_nodes_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = waiting({"1": site_node("east", tmp_path)}, {}, monkeypatch)
    with pytest.raises(FedcladeError, match="= 2: 1 ") as caught:
        fed.wait_for(2, -1)
    assert caught.value.field == "federation.nodes"


def test_models_with_other_parameters_are_not_compatible() -> None:
    one, same, other = (Objective(MLP(hidden).build((4,), 3)) for hidden in (8, 8, 9))
    assert compatibility_info(one) == compatibility_info(same)
    assert compatibility_info(one)["model"] != compatibility_info(other)["model"]


def test_a_nodes_secret_is_its_own_and_stays(tmp_path: Path) -> None:
    one, again = (_secret({}, tmp_path / "a", fc.Clade()) for _ in range(2))
    assert one == again != _secret({}, tmp_path / "b", fc.Clade())
    assert stat.S_IMODE((tmp_path / "a" / "secret").stat().st_mode) == 0o600
    assert _secret({"secret": "x"}, tmp_path / "a", fc.CFL(permute=True)) == _secret(
        {"secret": "x"}, tmp_path / "b", fc.CFL(permute=True)
    )
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "method.permute"):
        _secret({}, tmp_path / "a", fc.CFL(permute=True))
