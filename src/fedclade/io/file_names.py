"""Names of files that are made from names of clients, sites and runs."""

from __future__ import annotations

import hashlib
import re

_MAX_LENGTH = 60


def safe_file_name(name: str) -> str:
    """A file name without directories for any text: a name must not choose a path.

    Text of letters, digits, "_" and "-" stays as it is. Other characters become "_", and a hash of
    the whole text keeps different names apart.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_MAX_LENGTH]
    if plain == name and name:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{plain}-{digest}" if plain else digest
