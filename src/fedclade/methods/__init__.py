"""Methods: what the server does, one file each. A method never knows which engine runs it."""

from fedclade.methods.base import UNKNOWN, Method, State
from fedclade.methods.cfl import CFL
from fedclade.methods.clade import Clade
from fedclade.methods.fedavg import FedAvg
from fedclade.methods.fednova import FedNova
from fedclade.methods.fedprox import FedProx
from fedclade.methods.flt import FLT
from fedclade.methods.ifca import IFCA
from fedclade.methods.lg_fedavg import LGFedAvg
from fedclade.methods.local import Local
from fedclade.methods.per_fedavg import PerFedAvg
from fedclade.methods.scaffold import SCAFFOLD

_ALL = (FedAvg, Local, FedProx, FedNova, SCAFFOLD, LGFedAvg, PerFedAvg, IFCA, FLT, CFL, Clade)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "CFL",
    "FLT",
    "IFCA",
    "METHODS",
    "SCAFFOLD",
    "UNKNOWN",
    "Clade",
    "FedAvg",
    "FedNova",
    "FedProx",
    "LGFedAvg",
    "Local",
    "Method",
    "PerFedAvg",
    "State",
]
