"""The database of a SuperLink that has ended: what it keeps of the messages is removed.

Flower deletes the objects of a message, with its weights, when both sides have read it. SQLite only
marks such rows as free, and messages that nobody read stay.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from fedclade.errors import FedcladeError

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
    if not database.is_file():
        return
    try:
        with closing(sqlite3.connect(database, isolation_level=None, timeout=10)) as connection:
            connection.execute("PRAGMA secure_delete = ON")
            rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            existing = {name for (name,) in rows}
            for table in _WITH_CONTENT:
                if table in existing:
                    connection.execute(f"DELETE FROM {table}")
            # It writes the database anew, without free pages; then the journal is removed.
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise FedcladeError(
            f"{database}: the messages in it cannot be removed ({error}). Stop the SuperLink, or"
            " remove the file.",
            str(database),
        ) from error
