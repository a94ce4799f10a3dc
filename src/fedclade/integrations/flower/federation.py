"""Flower as an engine: the federation of a ServerApp, and what both sides must agree on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

from flwr.serverapp import Grid
from torch import Tensor

from fedclade import __version__
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.remote.federation import ClientRecord, RemoteFederation
from fedclade.engines.remote.node import PROTOCOL
from fedclade.errors import FedcladeError
from fedclade.integrations.flower.grid_transport import GridTransport
from fedclade.methods.base import Method
from fedclade.methods.requirements import NeedsEncoder

_LOOK_AGAIN = 1.0  # seconds


def about(objective: Objective) -> dict[str, str]:
    """What server and sites must have in common: versions, and a model of the same parts with the
    same loss.
    """
    parts = sorted(
        (name, tuple(value.shape), str(value.dtype)) for name, value in objective.params().items()
    )
    loss = getattr(objective.example_loss, "__qualname__", type(objective.example_loss).__name__)
    digest = hashlib.blake2b(repr((parts, loss)).encode(), digest_size=6).hexdigest()
    count = sum(value.numel() for value in objective.params().values())
    return {
        "fedclade": __version__,
        "protocol": str(PROTOCOL),
        "model": f"{digest} ({count} parameters, loss {loss})",
    }


def here_of(objective: Objective, method: Method, secret: int) -> NodeContext:
    """What a place has for the programs of this method."""
    encoder = method.encoder_module if isinstance(method, NeedsEncoder) else None
    return NodeContext(objective, None if encoder is None else Encoder(encoder), secret)


class FlowerFederation(RemoteFederation):
    """The clients behind the SuperNodes of a Grid. deadline, least: as in `GridPost`; the rest as
    in `RemoteFederation`.
    """

    def __init__(
        self,
        grid: Grid,
        agreed: Mapping[str, str],
        *,
        deadline: float = 600.0,
        least: int = 1,
        run: str = "run",
        bound: bool = False,
        client_records: Sequence[ClientRecord] = (),
        population: ClientMetadata | None = None,
        probe: Tensor | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        post = GridTransport(grid, deadline, least, note)
        super().__init__(
            post,
            agreed,
            run=run,
            bound=bound,
            client_records=client_records,
            population=population,
            probe=probe,
            note=note,
        )

    def wait_for(self, nodes: int, patience: float) -> None:
        """Until so many sites are there and known."""
        begin, told = time.monotonic(), -1
        while True:
            self.refresh_membership()
            here = len(self._present)
            if here >= nodes:
                return
            if here != told:
                self.note(f"{here} of {nodes} sites are there; waiting")
                told = here
            if time.monotonic() - begin > patience:
                raise FedcladeError(
                    f"federation: {here} of {nodes} sites came within {patience:g} s; start the"
                    " others, or ask for fewer."
                )
            time.sleep(_LOOK_AGAIN)
