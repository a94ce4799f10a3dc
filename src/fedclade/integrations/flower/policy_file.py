"""The policy file of a node: what the server may ask for, and which apps the node runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedclade.engines.remote.node_policy import NO_LIMITS, NodePolicy, RefusedError
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read
from fedclade.training import experiment_file


def load_policy(node_config: Mapping[str, Any]) -> NodePolicy:
    """The policy in the TOML file that `policy` of a node's configuration names. The server cannot
    change this configuration.

    Args:
        node_config: the `--node-config` of the node.
    """
    if "policy" not in node_config:
        return NO_LIMITS
    path = Path(str(node_config["policy"])).expanduser()
    try:
        table = safe_read.parse_toml(safe_read.read(path, safe_read.MOST_TOML).decode())
    except InvalidInputError:
        raise
    except ValueError as error:
        raise InvalidInputError(f"{path}: not valid TOML ({error}).", str(path)) from error
    return experiment_file.build(NodePolicy, table, "policy")


def app_hash(folder: Path) -> str:
    """The SHA-256 hash by which Flower names the app in a folder.

    Args:
        folder: the folder of the app, with its pyproject.toml.
    """
    from flwr.cli.build import build_fab_from_disk

    return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()


def check_app(node_config: Mapping[str, Any], fab: bytes) -> Path | None:
    """Refuse a run whose app the node does not allow, before its code is unpacked.

    Args:
        node_config: the `--node-config` of the node. `app` names the folder of the node's own app;
            with `any-app = true` the node runs every app.
        fab: the packed app that the server sent.

    Returns:
        The folder of the node's own app if the server sent the same app: it is loaded from there.
        None if the app that the server sent is to be unpacked.
    """
    sent, allowed = hashlib.sha256(fab).hexdigest(), load_policy(node_config).apps
    if node_config.get("any-app") is True or sent in allowed:
        return None
    if "app" in node_config:
        folder = Path(str(node_config["app"])).expanduser()
        if app_hash(folder) == sent:
            return folder
    raise RefusedError(
        f"app: this node does not run the app with the SHA-256 hash {sent}. It runs the app in its"
        " own folder (app of --node-config) and those in policy.apps.",
        "policy.apps",
    )
