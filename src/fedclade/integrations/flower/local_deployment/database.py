"""The database of a SuperLink that has ended: what it keeps of the messages is removed.

Flower deletes the objects of a message, with its weights, when both sides have read it. SQLite only
marks such rows as free, and messages that nobody read stay.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from fedclade.errors import FedcladeError

_WAIT = 30.0  # seconds
_WITH_CONTENT = (
    "objects",
    "object_children",
    "run_objects",
    "object_push_session_pending",
    "object_push_session_roots",
    "object_push_sessions",
    "message_ins",
    "message_res",
    "message",
    "task_message",
)


def forget_messages(database: Path) -> None:
    """Remove all messages and their content from a database, and what SQLite keeps of deleted rows.
    Nodes, their keys and the list of runs stay.

    Args:
        database: the file of a SuperLink that has ended.
    """
    until = time.monotonic() + _WAIT
    while database.is_file():
        try:
            _forget(database)
        except sqlite3.Error as error:
            # A process that was killed may hold the file for a moment.
            if "locked" in str(error) and time.monotonic() < until:
                time.sleep(0.5)
                continue
            raise FedcladeError(
                f"{database}: the messages in it cannot be removed ({error}). Stop the SuperLink,"
                " or remove the file.",
                str(database),
            ) from error
        return


def _forget(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        existing = {name for (name,) in rows}
        for table in _WITH_CONTENT:
            if table in existing:
                connection.execute(f"DELETE FROM {table}")
        # It rewrites the database without free pages. Then the journal is removed.
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()
