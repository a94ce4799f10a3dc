"""Methods: what the server does, one file each. A method never knows which engine runs it."""

from fedclade.methods.base import UNKNOWN, Method, State
from fedclade.methods.cfl import CFL
from fedclade.methods.clade import Clade
from fedclade.methods.fedavg import FedAvg
from fedclade.methods.flt import FLT
from fedclade.methods.local import Local

METHODS: dict[str, type[Method]] = {method.name: method for method in (FedAvg, Local, FLT, CFL, Clade)}

__all__ = ["CFL", "FLT", "METHODS", "UNKNOWN", "Clade", "FedAvg", "Local", "Method", "State"]
