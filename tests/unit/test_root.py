"""The root package: public names are imported on first use."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedclade as fc
from fedclade import analysis

CODE = """
import sys
import fedclade as fc
assert "torch" not in sys.modules
assert "numpy" not in sys.modules
assert set(fc.__all__) <= set(dir(fc))
assert fc.__version__
from fedclade import FedcladeError, InvalidInputError
assert "torch" not in sys.modules
{then}
"""


@pytest.mark.parametrize(
    "then",
    [
        """
from fedclade import FedAvg
import pickle
assert pickle.loads(pickle.dumps(FedAvg())) == fc.FedAvg()
assert fc.models.MLP(200).hidden == 200
assert fc.data.load("digits").classes == 10
""",
        """
import fedclade.analysis.report, fedclade.analysis.export, fedclade.analysis.diagnose
from fedclade import *
assert run is fc.run
assert data is fc.data
assert callable(diagnose) and callable(report) and callable(export)
""",
    ],
)
def test_a_fresh_import_needs_no_torch_and_names_work_on_first_use(then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(then=then)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_type_checkers_see_the_names_that_exist() -> None:
    tree = ast.parse(Path(inspect.getfile(fc)).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(imports) == sorted(fc.__all__)
    for name, (module, original) in imports.items():
        value = getattr(fc, name)
        if inspect.ismodule(value):
            assert value.__name__ == f"{module}.{original}"
        else:
            assert value is getattr(sys.modules[str(module)], original)


def test_the_three_verbs_of_analysis_are_functions() -> None:
    assert fc.diagnose is analysis.diagnose.diagnose
    assert fc.report is analysis.report.write_report
    assert fc.export is analysis.export.export


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedclade' has no attribute 'FedAvgg'"):
        _ = fc.FedAvgg  # type: ignore[attr-defined]


def test_tab_shows_the_public_names_and_nothing_else() -> None:
    shown = {name for name in dir(fc) if not name.startswith("_")}
    assert shown == set(fc.__all__)
