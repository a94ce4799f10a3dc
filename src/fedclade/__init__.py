"""fedclade: clustered federated learning. Find which clients belong together, train one model per
group, give each client its own.

    import fedclade as fc
    clients = fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2), clients=50, seed=0
    )
    result = fc.run(fc.FedAvg(), clients, model=fc.models.MLP(200), rounds=30)
    result.summary; result.clusters; result.model_of(7)

What the author of a method needs in addition is in `fedclade.core`.

Names are imported on first use, so that the command line starts without torch. A public name is in
three places below: the imports for type checkers, `__all__` and `_MODULES`. A test compares them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedclade import core, data, methods, models
    from fedclade.analysis.comparison import Comparison, compare
    from fedclade.analysis.diagnose import Diagnosis, diagnose
    from fedclade.analysis.export import export
    from fedclade.analysis.report import write_report as report
    from fedclade.conformance.runner import check_method
    from fedclade.core.losses import accuracy, cross_entropy
    from fedclade.engines.simulator import Simulator
    from fedclade.errors import (
        FedcladeError,
        FedcladeWarning,
        InvalidInputError,
        VectorizationError,
        WriteError,
    )
    from fedclade.integrations import sklearn
    from fedclade.methods import (
        APFL,
        CFL,
        FLISDC,
        FLISHC,
        FLT,
        FLUX,
        IFCA,
        PACFL,
        PCAHC,
        SCAFFOLD,
        Clade,
        CladeGroups,
        Ditto,
        FedALA,
        FedAvg,
        FedAvgFineTune,
        FedBABU,
        FedBN,
        FedDBE,
        FedDrift,
        FedEM,
        FedGMCC,
        FedNova,
        FedPer,
        FedProx,
        FedRep,
        FedSEM,
        KNNPer,
        LGFedAvg,
        Local,
        Method,
        Oracle,
        PerFedAvg,
        PFedGraph,
    )
    from fedclade.models.transformers import LoRA
    from fedclade.registry import register
    from fedclade.training.config import (
        LocalConfig,
        PrivacyConfig,
        ServerConfig,
        TrainingConfig,
    )
    from fedclade.training.encoders import pretrain
    from fedclade.training.personal_layer import PersonalConfig
    from fedclade.training.result import Result, load
    from fedclade.training.runner import run

__version__ = "0.2.0.dev0"

__all__ = [
    "APFL",
    "CFL",
    "FLISDC",
    "FLISHC",
    "FLT",
    "FLUX",
    "IFCA",
    "PACFL",
    "PCAHC",
    "SCAFFOLD",
    "Clade",
    "CladeGroups",
    "Comparison",
    "Diagnosis",
    "Ditto",
    "FedALA",
    "FedAvg",
    "FedAvgFineTune",
    "FedBABU",
    "FedBN",
    "FedDBE",
    "FedDrift",
    "FedEM",
    "FedGMCC",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSEM",
    "FedcladeError",
    "FedcladeWarning",
    "InvalidInputError",
    "KNNPer",
    "LGFedAvg",
    "LoRA",
    "Local",
    "LocalConfig",
    "Method",
    "Oracle",
    "PFedGraph",
    "PerFedAvg",
    "PersonalConfig",
    "PrivacyConfig",
    "Result",
    "ServerConfig",
    "Simulator",
    "TrainingConfig",
    "VectorizationError",
    "WriteError",
    "accuracy",
    "check_method",
    "compare",
    "core",
    "cross_entropy",
    "data",
    "diagnose",
    "export",
    "load",
    "methods",
    "models",
    "pretrain",
    "register",
    "report",
    "run",
    "sklearn",
]

# Public modules, and where they are.
_SUBPACKAGES = {
    "core": "fedclade.core",
    "data": "fedclade.data",
    "methods": "fedclade.methods",
    "models": "fedclade.models",
    "sklearn": "fedclade.integrations.sklearn",
}
# Module: its public names.
_MODULES = {
    "fedclade.analysis.comparison": "Comparison compare",
    "fedclade.analysis.diagnose": "Diagnosis diagnose",
    "fedclade.analysis.export": "export",
    "fedclade.analysis.report": "report",
    "fedclade.conformance.runner": "check_method",
    "fedclade.core.losses": "accuracy cross_entropy",
    "fedclade.engines.simulator": "Simulator",
    "fedclade.errors": (
        "FedcladeError FedcladeWarning InvalidInputError VectorizationError WriteError"
    ),
    "fedclade.methods": (
        "APFL CFL FLISDC FLISHC FLT IFCA PCAHC SCAFFOLD Clade CladeGroups Ditto FedALA FedAvg "
        "FedAvgFineTune FedBABU FedBN FedEM FedGMCC FedNova FedPer FedProx FedRep FedSEM KNNPer "
        "LGFedAvg Local Method Oracle PerFedAvg PACFL FedDrift FLUX PFedGraph FedDBE"
    ),
    "fedclade.models.transformers": "LoRA",
    "fedclade.registry": "register",
    "fedclade.training.config": "LocalConfig PrivacyConfig ServerConfig TrainingConfig",
    "fedclade.training.personal_layer": "PersonalConfig",
    "fedclade.training.encoders": "pretrain",
    "fedclade.training.result": "Result load",
    "fedclade.training.runner": "run",
}
_RENAMED = {"report": "write_report"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562)."""
        if name in _SUBPACKAGES:
            return import_module(_SUBPACKAGES[name])
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'fedclade' has no attribute '{name}'")
        value = getattr(import_module(_MODULE_OF[name]), _RENAMED.get(name, name))
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """What TAB shows: the public names."""
    return sorted([*__all__, "__all__", "__doc__", "__version__"])
