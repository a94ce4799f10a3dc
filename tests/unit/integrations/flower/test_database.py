"""The SuperLink's database after the end of the federation."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from fedclade.errors import FedcladeError
from fedclade.integrations.flower.local_deployment.database import forget_messages

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator")
WEIGHTS = b"the weights of a client" * 5000


def database(folder: Path) -> Path:
    """A database as Flower makes it, with an object and a deleted one."""
    path = folder / "superlink.db"
    store = SqlObjectStore(str(path))
    store.initialize()
    store._engine.dispose()  # as the end of the SuperLink does
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA secure_delete = OFF")  # the default of most builds
    for name, content in (("kept", WEIGHTS), ("deleted", WEIGHTS[::-1])):
        connection.execute(
            "INSERT INTO objects (object_id, content, is_available, ref_count) VALUES (?, ?, 1, 1)",
            (name, content),
        )
    connection.commit()
    connection.execute("DELETE FROM objects WHERE object_id = 'deleted'")
    connection.commit()
    connection.close()
    return path


def content(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


def test_no_weights_stay_in_the_database(tmp_path: Path) -> None:
    path = database(tmp_path)
    before = content(path)
    assert WEIGHTS[:1000] in before
    assert WEIGHTS[::-1][:1000] in before  # of the deleted row
    forget_messages(path)
    after = content(path)
    assert WEIGHTS[:20] not in after
    assert WEIGHTS[::-1][:20] not in after
    assert [file.name for file in tmp_path.iterdir()] == ["superlink.db"]
    SqlObjectStore(str(path)).initialize()  # Flower can use it again


def test_no_database_is_no_error(tmp_path: Path) -> None:
    forget_messages(tmp_path / "superlink.db")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "superlink.db"
    path.write_bytes(b"x" * 10_000)
    with pytest.raises(FedcladeError) as caught:
        forget_messages(path)
    assert caught.value.field == str(path)
