"""FLT's Table 6: what the simulator counts is the paper's formula and what is said to go beyond it,
to the byte.
"""

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
    """Table 6 with its own rows, on digits."""
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
    told = {
        "title": "Bytes",
        "paper": "nobody",
        "metric": "bytes",
        "seeds": 2,
        "experiment": experiment,
        "rows": rows,
    }
    return TypeAdapter(Table).validate_python(
        {**told, "columns": [{"name": "digits", "data": ["digits"]}]}
    )


def done(table: Table, folder: Path, **options: Any) -> tuple[Outcome, int]:
    planned, begun = plan(table, Options(device="cpu", **options)), []
    found = execute(planned, folder, lambda entry, number, total: begun.append(entry))
    return outcome(planned, found, "cpu"), len(begun)


@pytest.fixture(scope="module")
def measured(table: Table, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    folder = tmp_path_factory.mktemp("bytes")
    return done(table, folder)[0], folder


def cell(result: Outcome, row: str) -> Cell:
    return next(cell for cell in result.cells if cell.row == row)


def encoder_bytes() -> tuple[int, int]:
    """What FLT sends of the encoder for digits, and how many numbers a code has."""
    module = encoders.resolve("default", (1, 8, 8), seed=0)
    sent = [value for name, value in module.state_dict().items() if not name.startswith("decoder.")]
    code = module.encode(fc.data.federated_dataset.as_inputs(fc.data.load("digits").x_test[:1]))  # type: ignore[operator]
    return sum(value.numel() * value.element_size() for value in sent), code.shape[1]


def test_counted_bytes_are_the_formula_and_what_is_said_beyond_it(
    measured: tuple[Outcome, Path],
) -> None:
    encoder, code = encoder_bytes()
    expected = {
        "FLT": (M * encoder + 4 * K * M * code + 2 * N * W * T, 8 * M),
        "FedSEM": (2 * N * W * T, 2 * M * W),
        "IFCA": (N * W * T * (C + 1), 8 * N * T),
    }
    for name, (formula, besides) in expected.items():
        found = cell(measured[0], name)
        assert found.paper == formula
        assert found.values == (formula + besides, formula + besides)
        assert (found.difference, found.std, found.mark) == (besides, 0.0, "within")


def test_a_byte_too_many_or_too_few_is_noticed(
    table: Table, measured: tuple[Outcome, Path]
) -> None:
    for besides, mark, words in (("8*n*T - 1", "above", "worse"), ("8*n*T + 1", "below", "better")):
        wrong = replace(
            table,
            rows=tuple(replace(row, besides=besides) for row in table.rows if row.name == "IFCA"),
        )
        result, begun = done(wrong, measured[1])
        assert begun == 0
        assert (cell(result, "IFCA").mark, in_words(cell(result, "IFCA"))) == (mark, words)


def test_runs_that_were_done_are_read_and_a_quick_look_is_exact_too(
    table: Table, measured: tuple[Outcome, Path]
) -> None:
    again, begun = done(table, measured[1])
    assert begun == 0
    assert again.cells == measured[0].cells
    quick, _ = done(table, measured[1], quick=True)
    assert [cell.mark for cell in quick.cells] == ["within"] * 3


def test_the_page_has_the_formula_with_its_numbers(measured: tuple[Outcome, Path]) -> None:
    text = page(measured[0])
    assert (
        f"n*W*T*(C + 1) with M = 6, n = 3, T = 2, W = {W:,}, C = 2. Beyond it 8*n*T = 48 bytes."
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
def test_and_nothing_but_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match=r"^formula '"):
        evaluate_cost(text, dict.fromkeys(SYMBOLS, 1))


def test_a_letter_that_the_run_does_not_have_is_named() -> None:
    with pytest.raises(
        fc.InvalidInputError, match=r"formula '4\*k': this run has no k \(centres a client\)"
    ):
        evaluate_cost("4*k", {"M": 1})
