"""Flower as an engine: the federation of a ServerApp, and what server and nodes must share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from fedclade import __version__
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import Inputs
from fedclade.core.program_serialization import NodeContext, factories_of
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.membership import CheckSamples, ClientRecord
from fedclade.engines.remote.node import PROTOCOL
from fedclade.errors import FedcladeError
from fedclade.integrations.flower.grid_transport import GridTransport
from fedclade.methods.base import Method
from fedclade.methods.required_context import NeedsEncoder
from fedclade.programs.personal_layer import LAYER_FACTORIES
from fedclade.training.personal_layer import PersonalLayer
from fedclade.training.run_fingerprint import qualified_name

_FIRST_POLL, _LONGEST_POLL = 0.1, 1.0  # seconds between two looks for nodes


def compatibility_info(objective: Objective) -> dict[str, str]:
    """What server and nodes must share: versions, a model with the same parameters and loss, and
    the name of the augmentation.
    """
    params = objective.params()
    weights = {name: params[name] for name in objective.trained}
    parts = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in weights.items())
    loss = getattr(objective.example_loss, "__qualname__", type(objective.example_loss).__name__)
    digest = hashlib.blake2b(repr((parts, loss)).encode(), digest_size=6).hexdigest()
    count = sum(value.numel() for value in weights.values())
    augment = objective.augment
    return {
        "fedclade": __version__,
        "protocol": str(PROTOCOL),
        "model": f"{digest} ({count} parameters, loss {loss})",
        **({} if augment is None else {"augment": qualified_name(augment)}),
    }


def node_context(
    objective: Objective,
    method: Method,
    secret: int,
    module: nn.Module,
    x: Inputs,
    layer: PersonalLayer | None = None,
) -> NodeContext:
    """What a node has for the programs of this method.

    Args:
        objective: the model and its loss.
        method: the method.
        secret: the number that the server must not know.
        module: the model.
        x: a few inputs.
        layer: the personal layer.
    """
    encoder = method.encoder_module if isinstance(method, NeedsEncoder) else None
    served = method.served_objective(module, objective, x)
    factories = factories_of(type(method))
    if layer is not None:
        served = layer.served_objective(module, objective, x)
        factories |= LAYER_FACTORIES
    return NodeContext(
        objective, None if encoder is None else Encoder(encoder), secret, served, factories
    )


class FlowerFederation(RemoteFederation):
    """The clients behind the SuperNodes of a Grid. `deadline` and `min_nodes` are those of
    `GridTransport`, the others those of `RemoteFederation`.
    """

    def __init__(
        self,
        grid: Grid,
        compatibility_info: Mapping[str, str],
        *,
        deadline: float = 600.0,
        min_nodes: int = 1,
        run: str = "run",
        bind_clients_to_nodes: bool = False,
        client_records: Sequence[ClientRecord] = (),
        metadata: ClientMetadata | None = None,
        validation_origin: Mapping[str, Any] | None = None,
        probe: Inputs | None = None,
        check_samples: CheckSamples = lambda metadata: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        transport = GridTransport(
            grid, deadline, min_nodes, note, lambda node: self.membership.name_of(node)
        )
        super().__init__(
            transport,
            compatibility_info,
            run=run,
            bind_clients_to_nodes=bind_clients_to_nodes,
            client_records=client_records,
            metadata=metadata,
            validation_origin=validation_origin,
            probe=probe,
            check_samples=check_samples,
            note=note,
        )

    def wait_for(self, nodes: int, wait_seconds: float) -> None:
        """Wait until enough nodes have registered, then number the clients of all of them.

        Args:
            nodes: the number of nodes.
            wait_seconds: the seconds after which the wait ends with an error.
        """
        begin, noted, membership = time.monotonic(), -1, self.membership
        pause = _FIRST_POLL
        while True:
            membership.register_nodes()
            present = len(membership.present)
            if present >= nodes:
                membership.number_clients()
                return
            if present != noted:
                self.note(f"{present} of {nodes} nodes are connected; waiting")
                noted = present
            if time.monotonic() - begin > wait_seconds:
                refused = list(membership.refused().items())
                reasons = "".join(f" {node} is not used: {text}." for node, text in refused[:5])
                more = f" So are {len(refused) - 5} others." if len(refused) > 5 else ""
                raise FedcladeError(
                    f"federation.nodes = {nodes}: {present} nodes connected within"
                    f" {wait_seconds:g} s. Start the others, or set a smaller number."
                    f"{reasons}{more}",
                    "federation.nodes",
                )
            time.sleep(pause)
            pause = min(_LONGEST_POLL, 1.5 * pause)
