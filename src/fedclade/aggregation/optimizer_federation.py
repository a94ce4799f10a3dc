"""A federation whose server has an optimizer, or serves the means of models over the rounds."""

from __future__ import annotations

from dataclasses import dataclass

from fedclade.aggregation.federation_view import FederationView
from fedclade.core.federation import ServerUpdate


@dataclass(frozen=True)
class OptimizerFederation(FederationView):
    """The same clients with another `server_update`, which `update_models` applies.

    Args:
        federation: the clients.
        update: how the new models are made from the means.
    """

    update: ServerUpdate

    @property
    def server_update(self) -> ServerUpdate:
        return self.update
