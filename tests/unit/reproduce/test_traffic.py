"""FLT's Table 6: the simulator counts exactly the bytes of the paper's formula plus `besides`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

import fedclade as fc
from fedclade.core.cost_formula import SYMBOLS, evaluate_cost
from fedclade.reproduce.compare_to_paper import Cell, Outcome, in_words, outcome
from fedclade.reproduce.execute import Options, execute, plan
from fedclade.reproduce.markdown import page
from fedclade.reproduce.spec import Table, find
from fedclade.training import encoders

M, N, T, C, K = 6, 3, 2, 2, 4
W = 4 * (64 * 8 + 8 + 8 * 10 + 10)  # an MLP with 8 hidden units on 8 × 8 pixels, 4 bytes a number


@pytest.fixture(scope="module")
def table() -> Table:
    """Table 6 on digits."""
    rows: list[dict[str, Any]] = []
    for row in find("flt_6").rows:
        settings = (
            [f"method.k={K}", "method.manifold=pca", "method.fine_tune=none"]
            if row.method == "flt"
            else [f"method.clusters={C}"]
        )
        rows.append(
            {
                "name": row.name,
                "method": row.method,
                "set": settings,
                "formula": row.formula,
                "besides": row.besides,
                "why": row.why,
            }
        )
    experiment = {
        "partition": {
            "name": "label_clusters",
            "clients": M,
            "clusters": 2,
            "classes": 5,
            "samples": 20,
        },
        "model": {"name": "mlp", "hidden": 8},
        "run": {"rounds": T, "clients_per_round": N},
    }
    content = {
        "title": "Bytes",
        "paper": "nobody",
        "metric": "bytes",
        "seeds": 2,
        "experiment": experiment,
        "rows": rows,
    }
    return TypeAdapter(Table).validate_python(
        {**content, "columns": [{"name": "digits", "data": ["digits"]}]}
    )


def done(table: Table, folder: Path, **options: Any) -> tuple[Outcome, int]:
    planned, started = plan(table, Options(device="cpu", **options)), []
    results = execute(planned, folder, lambda entry, number, total: started.append(entry))
    return outcome(planned, results, "cpu"), len(started)


@pytest.fixture(scope="module")
def measured(table: Table, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("bytes")
    return done(table, folder)[0], folder


def cell(result: Outcome, row: str) -> Cell:
    return next(cell for cell in result.cells if cell.row == row)


def encoder_bytes() -> tuple[int, int]:
    """The bytes of the encoder that FLT sends for digits, and the length of a code."""
    module = encoders.resolve("default", (1, 8, 8), seed=0)
    sent = [value for name, value in module.state_dict().items() if not name.startswith("decoder.")]
    code = module.encode(fc.core.inputs.as_inputs(fc.data.load("digits").x_test[:1]))  # type: ignore[operator]
    return sum(value.numel() * value.element_size() for value in sent), code.shape[1]


def test_counted_bytes_equal_the_formula_plus_besides(
    measured: tuple[Outcome, Path],
) -> None:
    encoder, code = encoder_bytes()
    expected = {
        "FLT": (M * encoder + 4 * K * M * code + 2 * N * W * T, 8 * M),
        "FedSEM": (2 * N * W * T, 2 * M * W),
        "IFCA": (N * W * T * (C + 1), 8 * N * T),
    }
    for name, (formula, besides) in expected.items():
        entry = cell(measured[0], name)
        assert entry.paper == formula
        assert entry.values == (formula + besides, formula + besides)
        assert (entry.difference, entry.std, entry.mark) == (besides, 0.0, "within")


def test_a_difference_of_one_byte_is_detected(table: Table, measured: tuple[Outcome, Path]) -> None:
    for besides, mark, words in (("8*n*T - 1", "above", "worse"), ("8*n*T + 1", "below", "better")):
        wrong = replace(
            table,
            rows=tuple(replace(row, besides=besides) for row in table.rows if row.name == "IFCA"),
        )
        result, started = done(wrong, measured[1])
        assert started == 0
        assert (cell(result, "IFCA").mark, in_words(cell(result, "IFCA"))) == (mark, words)


def test_finished_runs_are_read_and_a_quick_version_is_exact_too(
    table: Table, measured: tuple[Outcome, Path]
) -> None:
    again, started = done(table, measured[1])
    assert started == 0
    assert again.cells == measured[0].cells
    quick, _ = done(table, measured[1], quick=True)
    assert [cell.mark for cell in quick.cells] == ["within"] * 3


def test_the_page_has_the_formula_with_its_numbers(measured: tuple[Outcome, Path]) -> None:
    text = page(measured[0])
    assert (
        f"n*W*T*(C + 1) with M = 6, n = 3, T = 2, W = {W:,}, C = 2. In addition 8*n*T = 48 bytes."
        " Each client also sends" in text
    )


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_formula_is_arithmetic(a: int, b: int, m: int, w: int) -> None:
    assert evaluate_cost(f"{a}*M - (W + {b})*M", {"M": m, "W": w}) == a * m - (w + b) * m


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "W.real",
        "2**9",
        "W/2",
        "x*M",
        "1.5*M",
        "True",
        "M if 1 else W",
        "[M]",
        "M*",
        "",
    ],
)
def test_a_formula_is_only_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match=r"^formula '"):
        evaluate_cost(text, dict.fromkeys(SYMBOLS, 1))


def test_an_unknown_letter_is_reported() -> None:
    with pytest.raises(fc.InvalidInputError, match=r"^formula '4\*k': .* k "):
        evaluate_cost("4*k", {"M": 1})
