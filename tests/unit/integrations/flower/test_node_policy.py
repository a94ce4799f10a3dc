"""The policy of a node: which apps it runs, what it keeps on its disk, and what its app sends."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk

from fedclade.engines.remote.messages import Message
from fedclade.engines.remote.node import StateSnapshot
from fedclade.engines.remote.node_policy import NodePolicy, RefusedError
from fedclade.errors import InvalidInputError
from fedclade.integrations.flower import apps
from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.client_state_store import DiskStateStore
from fedclade.integrations.flower.grid_transport import message_from_records, records_from_message
from fedclade.integrations.flower.policy_file import app_hash, check_app, load_policy
from fedclade.models import MLP

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")
PATIENT = "Jane Doe, born 1970-01-01"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder of the node's own app."""
    new_app(tmp_path / "clinics")
    return tmp_path / "clinics"


@pytest.fixture
def shipped(own: Path) -> bytes:
    """The same app, as the server sends it."""
    return build_fab_from_disk(own)


def test_a_node_runs_its_own_app_from_its_own_disk(own: Path, shipped: bytes) -> None:
    assert check_app({"app": str(own)}, shipped) == own


def test_a_node_runs_the_apps_of_its_policy(tmp_path: Path, own: Path, shipped: bytes) -> None:
    assert app_hash(own) == hashlib.sha256(shipped).hexdigest()
    (tmp_path / "policy.toml").write_text(f'apps = ["{app_hash(own)}"]\n')
    assert check_app({"policy": str(tmp_path / "policy.toml")}, shipped) is None


def test_a_node_without_a_list_runs_an_app_only_if_it_may_be_any(shipped: bytes) -> None:
    assert check_app({"any-app": True}, shipped) is None
    for config in ({}, {"any-app": False}, {"any-app": 1}, {"any-app": "true"}):
        with pytest.raises(RefusedError):
            check_app(config, shipped)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "clinics" / "task.py").open("a").write("import os\n"),
        lambda folder: (folder / "clinics" / "more.py").write_text("import os\n"),
        lambda folder: (folder / "pyproject.toml").write_text(
            (folder / "pyproject.toml").read_text().replace("client_app:app", "server_app:app")
        ),
    ],
    ids=["a file changed", "a file added", "the configuration changed"],
)
def test_another_app_is_refused(
    own: Path, shipped: bytes, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    (tmp_path / "policy.toml").write_text(f'apps = ["{app_hash(own)}"]\n')
    change(own)
    other = build_fab_from_disk(own)
    for config in ({"policy": str(tmp_path / "policy.toml")}, {"app": str(own)}):
        sent = other if "policy" in config else shipped
        with pytest.raises(RefusedError, check=lambda error: error.field == "policy.apps"):
            check_app(config, sent)


def test_bytes_after_the_app_are_another_app(own: Path, shipped: bytes) -> None:
    with pytest.raises(RefusedError):
        check_app({"app": str(own)}, shipped + b"\0")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("max_epoch = 3", "policy.max_epoch"),
        ('max_epochs = "3"', "policy.max_epochs"),
        ("max_epochs = 0", "policy.max_epochs"),
        ("max_looks = -1", "policy.max_looks"),
        ("max_seconds = 0", "policy.max_seconds"),
        ("max_seconds = nan", "policy.max_seconds"),
        ("min_noise = -1.0", "policy.min_noise"),
        ("max_disk_mib = 0.5", "policy.max_disk_mib"),
        ('apps = ["../../x"]', "policy.apps"),
        ('apps = "x"', "policy.apps"),
    ],
)
def test_a_policy_that_says_something_else_is_refused(
    tmp_path: Path, text: str, field: str
) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        load_policy({"policy": str(tmp_path / "policy.toml")})


def test_a_policy_that_is_missing_or_no_toml_is_not_taken_for_no_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    with pytest.raises(InvalidInputError, check=lambda error: error.field == str(file)):
        load_policy({"policy": str(file)})
    file.write_text("max_epochs")
    with pytest.raises(InvalidInputError, check=lambda error: error.field == str(file)):
        load_policy({"policy": str(file)})
    assert load_policy({}) == NodePolicy()


def test_the_server_cannot_fill_the_disk(tmp_path: Path) -> None:
    weights = {"w": torch.zeros(1000)}  # 4,000 bytes and a list of names
    for run in ("one", "two"):
        DiskStateStore(tmp_path, run, max_bytes=10_000).save(weights, [])
    third = DiskStateStore(tmp_path, "three", max_bytes=10_000)
    with pytest.raises(RefusedError, check=lambda error: error.field == "policy.max_disk_mib"):
        third.save(weights, [])
    with pytest.raises(RefusedError):
        third.save_models(["a"], {"w": torch.zeros(1, 1000)})
    second = DiskStateStore(tmp_path, "two", max_bytes=10_000)
    with pytest.raises(RefusedError):
        second.save(weights, [StateSnapshot("t-1", weights)])
    second.save(weights, [])  # what is there may be replaced
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 10_000
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def answer(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    load_data: Callable[[Any], Any],
    node_config: dict[str, Any] | None = None,
    **run_config: Any,
) -> Message:
    """What a ClientApp with this data answers to a registration."""
    monkeypatch.setattr(apps, "Message", lambda content, reply_to: SimpleNamespace(content=content))
    app = apps.client_app(load_data, lambda: MLP(4).build((3,), 2))
    (function,) = [
        handler
        for handlers in vars(app).values()
        if isinstance(handlers, dict)
        for handler in handlers.values()
    ]
    config = {"node-name": "north", "home": str(tmp_path)} | (node_config or {})
    context = Context(1, 2, config, RecordDict(), run_config)
    content = records_from_message(Message({"kind": "register"}))
    return message_from_records(function(SimpleNamespace(content=content), context).content)


def good(node_config: Any) -> Any:
    return {"ward": (torch.zeros(4, 3), torch.arange(4) % 2)}


def bad(node_config: Any) -> Any:
    raise ValueError(f"row 7: {PATIENT}")


def bad_input(node_config: Any) -> Any:
    return {PATIENT: (torch.zeros(4, 3), [PATIENT] * 4)}


@pytest.mark.parametrize("load_data", [bad, bad_input])
def test_an_error_of_load_data_leaves_the_node_as_its_type(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    load_data: Callable[[Any], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = answer(monkeypatch, tmp_path, load_data)
    assert reply.header["rejected"].endswith("Error (its text is in the log of the node)")
    assert "Jane" not in str(reply)
    assert "Jane" in caplog.text


def test_what_has_no_data_is_sent_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert answer(monkeypatch, tmp_path, good).header["names"] == ["ward"]
    unknown = answer(monkeypatch, tmp_path, good, **{"method.name": "clad"})
    assert "clade" in unknown.header["rejected"]


def test_a_method_that_is_not_in_the_policy_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text('methods = ["fedavg"]\n')
    config = {"policy": str(tmp_path / "policy.toml")}
    reply = answer(monkeypatch, tmp_path, good, config, **{"method.name": "clade"})
    assert "policy.methods" in reply.header["rejected"]
    allowed = answer(monkeypatch, tmp_path, good, config, **{"method.name": "fedavg"})
    assert allowed.header["names"] == ["ward"]
