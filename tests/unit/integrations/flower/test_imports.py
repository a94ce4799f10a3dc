"""What the processes of a federation import: a node starts faster without the rest of fedclade."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

HEAVY = ("scipy", "sklearn", "matplotlib", "pandas", "ray", "umap", "torch._dynamo")
APART = ("fedclade.analysis", "fedclade.reproduce", "fedclade.conformance")


def imported(code: str, names: tuple[str, ...]) -> list[str]:
    """The modules of these names that a new process has imported after this code."""
    check = f"\nimport sys; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, check=True
    )
    found: list[str] = eval(done.stdout.splitlines()[-1])
    return found


def test_fedclade_alone_imports_neither_torch_nor_flower() -> None:
    assert imported("import fedclade", ("torch", "numpy", "flwr", *HEAVY, *APART)) == []


@pytest.mark.parametrize("method", ["fedavg", "clade", "scaffold"])
def test_the_process_of_a_client_app_imports_no_scipy(method: str) -> None:
    code = (
        "import fedclade.integrations.flower.executor, fedclade.integrations.flower.apps as apps\n"
        f"apps.AppSettings.of({{'method.name': '{method}'}})"
    )
    assert imported(code, (*HEAVY, *APART)) == []


def test_the_supernode_imports_no_torch() -> None:
    code = "import fedclade.integrations.flower.supernode, fedclade.cli.flower"
    assert imported(code, ("torch", "fedclade.methods", *HEAVY, *APART)) == []
