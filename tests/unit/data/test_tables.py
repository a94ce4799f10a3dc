"""Clients from tables: exact cases of three clients, settings, and hostile files."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pa = pytest.importorskip("pyarrow", reason="pyarrow (fedclade[tables]) is not installed")
import pyarrow.parquet as pq  # noqa: E402

import fedclade as fc  # noqa: E402
from fedclade.data import column_encoding, table_columns, tables  # noqa: E402
from fedclade.data.column_encoding import (  # noqa: E402
    CategoryColumn,
    ColumnEncoding,
    NumberColumn,
)
from fedclade.data.encoding import encoding_from_json, encoding_to_json  # noqa: E402
from fedclade.data.tables import TableSettings, read_rows, read_table  # noqa: E402
from fedclade.errors import FedcladeWarning, InvalidInputError  # noqa: E402

# The part of each row is given, so that every number can be worked by hand.
THREE = """site,part,age,ward,sick
a,train,1,x,no
a,train,3,y,yes
a,test,100,z,no
b,train,5,x,yes
b,train,,x,no
b,test,2,,yes
c,train,7,y,yes
"""
BY_HAND = {"client": "site", "target": "sick", "test": "part"}


def write(tmp_path: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def from_text(tmp_path: Path, text: str | bytes, **settings: Any) -> fc.data.Clients:
    """Clients of this CSV; what is left out is not of interest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedcladeWarning)
        return fc.data.from_csv(write(tmp_path, text), **settings)


def test_three_clients_by_hand(tmp_path: Path) -> None:
    clients = from_text(tmp_path, THREE, **BY_HAND)
    # Training rows only: ages 1, 3, 5, 7 (mean 4, variance 5), wards x and y.
    assert isinstance(clients.encoding, ColumnEncoding)
    age, ward = clients.encoding.columns
    assert age == NumberColumn("age", 4.0, pytest.approx(5**0.5), True)
    assert ward == CategoryColumn("ward", ("x", "y"), False)
    assert clients.names.features == ("age", "age missing", "ward=x", "ward=y")
    assert clients.names.clients == ("a", "b", "c")
    assert clients.names.classes == ("no", "yes")
    s = 5**0.5
    x, y, x_test, y_test = clients.arrays("a")  # type: ignore[misc]
    torch.testing.assert_close(x, torch.tensor([[-3 / s, 0, 1, 0], [-1 / s, 0, 0, 1]]))
    torch.testing.assert_close(x_test, torch.tensor([[96 / s, 0, 0, 0]]))  # z is unknown
    assert y.tolist() == [0, 1]
    assert y_test.tolist() == [0]
    x, y, x_test, _ = clients.arrays("b")  # type: ignore[misc]
    torch.testing.assert_close(x, torch.tensor([[1 / s, 0, 1, 0], [0, 1, 1, 0]]))
    torch.testing.assert_close(x_test, torch.tensor([[-2 / s, 0, 0, 0]]))
    assert len(clients.arrays("c")) == 2  # no test part
    assert clients.test_part_id.tolist() == [0, 1, -1]


def test_standardize_by_client(tmp_path: Path) -> None:
    clients = from_text(tmp_path, THREE, standardize="client", **BY_HAND)
    # a: 1, 3 (mean 2, deviation 1); b: 5 alone and c: 7 alone have the deviation of all.
    assert clients.arrays("a")[0][:, 0].tolist() == [-1.0, 1.0]  # type: ignore[index, call-overload]
    assert clients.arrays("b")[0][:, 0].tolist() == [0.0, 0.0]  # type: ignore[index, call-overload]
    assert isinstance(clients.encoding, ColumnEncoding)
    table = pa.table({"age": [2.0, 4.0], "ward": ["x", "q"], "site": ["a", "new"]})
    x = clients.encoding.encode(table)
    assert x[:, 0].tolist() == [0.0, 0.0]  # (2 - 2) / 1, and (4 - 4) / √5 of all clients
    assert clients.encoding.encode(table, client="a")[:, 0].tolist() == [0.0, 2.0]


def test_standardize_none_and_missing_drop(tmp_path: Path) -> None:
    plain = from_text(tmp_path, THREE, standardize="none", **BY_HAND)
    assert plain.x[:, 0].tolist() == [1.0, 3.0, 5.0, 4.0, 7.0]  # type: ignore[call-overload,index]
    with pytest.warns(FedcladeWarning, match="2 of 7 rows left out"):
        dropped = fc.data.from_csv(tmp_path / "t.csv", missing="drop", **BY_HAND)
    assert dropped.sizes.tolist() == [2, 1, 1]
    assert dropped.test_sizes.tolist() == [1, 0, 0]
    assert dropped.names.features == ("age", "ward=x", "ward=y")


def test_encode_is_what_training_saw(tmp_path: Path) -> None:
    rows = "".join(
        f"{'ab'[i % 2]},{i * 0.37 - 4},{'uvw'[i % 3]},{i % 5 * 1.5}\n" for i in range(40)
    )
    path = write(tmp_path, "site,n,c,y\n" + rows)
    clients = fc.data.from_csv(path, client="site", target="y", test=0.0)
    assert clients.encoding is not None
    encoding = encoding_from_json(json.loads(json.dumps(encoding_to_json(clients.encoding))))
    assert encoding == clients.encoding
    assert isinstance(encoding, ColumnEncoding)
    torch.testing.assert_close(encoding.encode(read_rows(path, encoding)), clients.x)
    # Numbers come back in their unit.
    assert clients.classes is None
    decoded = encoding.decode(clients.y[:, None])
    np.testing.assert_allclose(decoded, [i % 5 * 1.5 for i in range(40)], atol=1e-5)


@pytest.mark.parametrize("change", [{"scale": 0.0}, {"scale": "wide"}, {"other": 1}])
def test_damaged_encoding_json(tmp_path: Path, change: dict[str, Any]) -> None:
    encoding = from_text(tmp_path, THREE, **BY_HAND).encoding
    assert encoding is not None
    content = json.loads(json.dumps(encoding_to_json(encoding)))
    content["columns"][0] |= change
    with pytest.raises(ValueError, match=next(iter(change))):
        encoding_from_json(content)


def test_test_part_is_stratified_and_depends_on_the_seed(tmp_path: Path) -> None:
    rows = "".join(f"s{i % 3},{i},{'yes' if i % 4 == 0 else 'no'}\n" for i in range(240))
    settings = {"client": "s", "target": "y", "validation": 0.25}
    clients = from_text(tmp_path, "s,a,y\n" + rows, **settings)
    assert clients.sizes.tolist() == [48] * 3
    assert clients.validation_sizes.tolist() == [16] * 3  # type: ignore[union-attr]
    for client in range(3):
        held = clients.y_test[clients.test[int(clients.test_part_id[client])]]
        assert held.bincount().tolist() == [12, 4]
    again = from_text(tmp_path, "s,a,y\n" + rows, **settings)
    other = from_text(tmp_path, "s,a,y\n" + rows, seed=1, **settings)
    assert torch.equal(again.x_test, clients.x_test)  # type: ignore[arg-type]
    assert not torch.equal(other.y_test, clients.y_test) or not torch.equal(
        other.x_test,  # type: ignore[arg-type]
        clients.x_test,  # type: ignore[arg-type]
    )


def test_validation_rows_teach_nothing(tmp_path: Path) -> None:
    text = THREE + "c,validation,1000,q,no\n"
    clients = from_text(tmp_path, text, **BY_HAND)
    assert clients.encoding == from_text(tmp_path, THREE, **BY_HAND).encoding
    assert clients.validation_sizes.tolist() == [0, 0, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["a", "b"], None, ("a", "b")),
        (["10", "9"], None, ("9", "10")),
        (["007", "7"], None, ("007", "7")),
        (["true", "false"], None, ("false", "true")),
        (["1.5", "2"], None, None),
        ([str(i) for i in range(11)], None, None),
        ([str(i) for i in range(11)], "classification", tuple(str(i) for i in range(11))),
        (["0", "1"], "regression", None),
    ],
)
def test_task(
    tmp_path: Path, values: list[str], task: Any, classes: tuple[str, ...] | None
) -> None:
    rows = "".join(f"{site},{i},{value}\n" for site in "ab" for i, value in enumerate(values))
    clients = from_text(tmp_path, "s,n,y\n" + rows, client="s", target="y", task=task, test=0.0)
    assert clients.names.classes == classes
    assert (clients.classes is None) == (classes is None)


def test_parquet_and_frames_equal_csv(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    polars = pytest.importorskip("polars", reason="polars is not installed")
    expected = from_text(tmp_path, THREE, categorical=["age"], **BY_HAND)
    frame = pandas.read_csv(tmp_path / "t.csv")  # its ages are floats with NaN
    pq.write_table(pa.Table.from_pandas(frame), tmp_path / "t.parquet")
    with pytest.warns(FedcladeWarning):
        others = [
            fc.data.from_frame(frame, categorical=["age"], **BY_HAND),
            fc.data.from_frame(polars.read_csv(tmp_path / "t.csv"), categorical=["age"], **BY_HAND),
            fc.data.from_parquet(tmp_path / "t.parquet", categorical=["age"], **BY_HAND),
        ]
    for clients in others:
        assert clients.names == expected.names
        assert torch.equal(clients.x, expected.x)  # type: ignore[arg-type]
        assert torch.equal(clients.y_test, expected.y_test)


HEAD = "site,age,sick\n"
ROWS = "".join(f"{site},{i},{'no' if i % 2 else 'yes'}\n" for site in "ab" for i in range(5))
# name -> content: each loads as two clients of four training rows and one test row
HANDLED: dict[str, str | bytes] = {
    "plain": HEAD + ROWS,
    "BOM": b"\xef\xbb\xbf" + (HEAD + ROWS).encode(),
    "semicolons": (HEAD + ROWS).replace(",", ";"),
    "tabs": (HEAD + ROWS).replace(",", "\t"),
    "decimal commas": (HEAD + ROWS).replace(",", ";").replace(";3;", ";3,5;"),
    "windows line ends": (HEAD + ROWS).replace("\n", "\r\n"),
    "no last line end": (HEAD + ROWS).rstrip("\n"),
    "blank lines": "\n" + HEAD + "\n" + ROWS.replace("b,0", "\nb,0"),
    "spaces": (HEAD + ROWS).replace(",", " , "),
    "quoted newlines": "site,age,sick,note\n"
    + ROWS.replace("no\n", 'no,"two\nlines"\n').replace("yes\n", "yes,one\n"),
    "quoted delimiters": 'site,"age, years",sick\n' + ROWS.replace("a,", '"a",'),
    "missing somewhere": HEAD + ROWS.replace(",3,", ",?,").replace(",2,", ",NA,"),
    "missing everywhere": "site,age,sick,empty\n" + ROWS.replace("\n", ",\n"),
}


@pytest.mark.parametrize("name", HANDLED)
def test_hostile_files_that_load(tmp_path: Path, name: str) -> None:
    clients = from_text(tmp_path, HANDLED[name], client="site", target="sick")
    assert clients.names.clients == ("a", "b")
    assert clients.names.classes == ("no", "yes")
    assert clients.sizes.tolist() == [4, 4]
    assert clients.test_sizes.tolist() == [1, 1]
    assert bool(torch.isfinite(clients.x).all())  # type: ignore[arg-type]


FILE = "the path of the file"
# name -> (content, settings, the field of the error, what its message names)
REFUSED: dict[str, tuple[str | bytes, dict[str, Any], str, str]] = {
    "empty file": (b"", {}, FILE, "empty"),
    "header only": (HEAD, {}, FILE, "no rows"),
    "UTF-16": ((HEAD + ROWS).encode("utf-16"), {}, FILE, "UTF-8"),
    "latin-1": ((HEAD + ROWS + "é,1,no\n").encode("latin-1"), {}, FILE, "UTF-8"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(range(256)), {}, FILE, "gzip"),
    "Excel": (b"PK\x03\x04" + bytes(range(256)), {}, FILE, "Excel"),
    "Parquet": (b"PAR1" + bytes(range(256)), {}, FILE, "from_parquet"),
    "duplicate columns": ("site,age,age,sick\na,1,2,no\n", {}, "{path}: columns", "age"),
    "missing column name": ("site,,sick\na,1,no\n", {}, FILE, "column 2 of 3"),
    "short row": (HEAD + ROWS + "b,7\n", {}, FILE, "line 12"),
    "long row": (HEAD + ROWS + "b,7,no,1\n", {}, FILE, "line 12"),
    "short row after quoted newline": (HEAD + '"a\n\nb",1,no\na,1\n', {}, FILE, "line 5"),
    "huge field": (HEAD + ROWS + f'b,"{"x" * (1 << 23)}",no\n', {}, FILE, "line 12"),
    "mixed types": (HEAD + ROWS + "b,old,no\n", {}, "age", "line 12"),
    "infinite": (HEAD + ROWS + "b,1e999,no\n", {}, "age", "line 12"),
    "too large": (HEAD + ROWS + "b,1,no\nb,-1e39,no\n", {}, "age", "line 13"),
    "numbers with a unit": (
        HEAD + "".join(f"a,{i} %,{'no' if i % 2 else 'yes'}\n" for i in range(300)),
        {},
        "age",
        "'0 %'",
    ),
    "free text": (
        HEAD + "".join(f"a,text {i},{'no' if i % 2 else 'yes'}\n" for i in range(300)),
        {},
        "age",
        "different texts",
    ),
    "dates": (HEAD + "a,2020-01-01,no\nb,2021-02-03,yes\n", {}, "age", "dates"),
    "one class": (HEAD + "a,1,no\nb,2,no\n", {}, "data.target", "1 classes (no)"),
    "no target at all": (HEAD + "a,1,\nb,2,\n", {"task": "regression"}, FILE, "no row remains"),
    "no inputs": ("site,sick\na,no\nb,yes\n", {}, FILE, "no column"),
    "all inputs empty": (HEAD + "a,,no\nb,,yes\n", {}, FILE, "no column"),
    "text as regression": (HEAD + ROWS, {"task": "regression"}, "sick", "line 2"),
    "unknown client column": (HEAD + ROWS, {"client": "sit"}, "data.client", "site"),
    "unknown target": (HEAD + ROWS, {"target": "x"}, "data.target", "x"),
    "unknown drop": (HEAD + ROWS, {"drop": ["x"]}, "data.drop", "x"),
    "unknown categorical": (HEAD + ROWS, {"categorical": ["x"]}, "data.categorical", "x"),
    "unknown part": (HEAD + ROWS, {"test": "x"}, "data.test", "x"),
    "a part that is none": (HEAD + ROWS, {"test": "age"}, "data.test", "line 2"),
    "formula as client": (HEAD + ROWS + "=1+1,2,no\n", {}, "data.client", "=1"),
    "newline in client": (HEAD + ROWS + '"x\ny",2,no\n', {}, "data.client", "x"),
    "target dropped": (HEAD + ROWS, {"drop": ["sick"]}, "data.drop", "sick"),
    "wrong missing": (HEAD + ROWS, {"missing": "median"}, "data.missing", "median"),
    "wrong standardize": (HEAD + ROWS, {"standardize": "yes"}, "data.standardize", "yes"),
    "wrong share": (HEAD + ROWS, {"test": 1.0}, "data.test", "1.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_files_that_are_refused(tmp_path: Path, name: str) -> None:
    content, settings, field, names = REFUSED[name]
    path = tmp_path / "t.csv"
    with pytest.raises(InvalidInputError) as caught:
        from_text(tmp_path, content, **({"client": "site", "target": "sick"} | settings))
    expected = str(path) if field == FILE else field.format(path=path)
    assert caught.value.field == expected
    assert names in str(caught.value)


def test_hostile_clients_stay(tmp_path: Path) -> None:
    """One row and one class in a client are no reason to lose it."""
    text = HEAD + ROWS + "one row,3,no\n" + "".join(f"one class,{i},no\n" for i in range(5))
    with pytest.warns(FedcladeWarning, match="1 client has too few rows for a test part"):
        clients = fc.data.from_csv(write(tmp_path, text), client="site", target="sick")
    assert clients.names.clients == ("a", "b", "one class", "one row")
    assert clients.sizes.tolist() == [4, 4, 4, 1]
    assert clients.test_sizes.tolist() == [1, 1, 1, 0]
    result = fc.run(fc.FedAvg(), clients, model=fc.models.MLP(4), rounds=1, clients_per_round=1.0)
    assert result.clients["client"] == ["a", "b", "one class", "one row"]


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    text = HEAD + ROWS + ",1,no\nc,2,\nc,3,\n"
    with pytest.warns(FedcladeWarning) as caught:
        clients = fc.data.from_csv(write(tmp_path, text), client="site", target="sick")
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("3 of 13 rows", "1 with no value in 'site'", "2 with no value in 'sick'"):
        assert part in message
    assert clients.names.clients == ("a", "b")


def test_client_without_training_rows_is_named(tmp_path: Path) -> None:
    with pytest.warns(FedcladeWarning, match=r"1 with clients without training rows \(d\)"):
        clients = fc.data.from_csv(write(tmp_path, THREE + "d,test,1,x,no\n"), **BY_HAND)
    assert clients.names.clients == ("a", "b", "c")


def test_new_rows(tmp_path: Path) -> None:
    encoding = from_text(tmp_path, THREE, **BY_HAND).encoding
    assert isinstance(encoding, ColumnEncoding)
    x = encoding.encode(read_rows(write(tmp_path, "ward,age\nq,4\n,\n", "new.csv"), encoding))
    assert x.tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]
    with pytest.raises(InvalidInputError) as caught:
        encoding.encode(read_rows(write(tmp_path, "ward\nq\n", "new.csv"), encoding))
    assert caught.value.field == "age"
    with pytest.raises(InvalidInputError) as caught:
        encoding.encode(read_rows(write(tmp_path, "ward,age\nx,1\nx,old\n", "new.csv"), encoding))
    assert caught.value.field == "age"
    assert "line 3" in str(caught.value)


def test_rows_with_missing_values_cannot_be_predicted_after_drop(tmp_path: Path) -> None:
    encoding = from_text(tmp_path, THREE, missing="drop", **BY_HAND).encoding
    assert isinstance(encoding, ColumnEncoding)
    with pytest.raises(InvalidInputError) as caught:
        encoding.encode(pa.table({"age": [1.0, None], "ward": ["x", "x"]}))
    assert caught.value.field == "age"


def test_damaged_parquet(tmp_path: Path) -> None:
    path = write(tmp_path, b"PAR1 nothing", "t.parquet")
    with pytest.raises(InvalidInputError) as caught:
        fc.data.from_parquet(path, client="site", target="sick")
    assert caught.value.field == str(path)


def test_parquet_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"site": ["a"] * 100_000, "y": [0] * 100_000}), path)
    monkeypatch.setattr("fedclade.io.safe_read.memory", lambda: 500_000)
    with pytest.raises(InvalidInputError) as caught:
        fc.data.from_parquet(path, client="site", target="y")
    assert caught.value.field == str(path)


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidInputError, match=r"fedclade\[tables\]") as caught:
        from_text(tmp_path, THREE, **BY_HAND)
    assert caught.value.field == "data.path"


def test_heart_comes_along() -> None:
    clients = read_table("heart", TableSettings("hospital", "disease", drop=("num",)))
    sizes = dict(zip(clients.names.clients or (), clients.sizes.tolist(), strict=True))
    assert {name: sizes[name] + int(clients.test_sizes[i]) for i, name in enumerate(sizes)} == {
        "cleveland": 303,
        "hungarian": 294,
        "switzerland": 123,
        "va": 200,
    }
    # FLamby's Fed-Heart-Disease: the rows that are complete without slope, ca and thal.
    drop = ("num", "slope", "ca", "thal")
    settings = TableSettings("hospital", "disease", drop=drop, missing="drop", test=0.0)
    with pytest.warns(FedcladeWarning, match="180 of 920"):
        assert read_table("heart", settings).sizes.tolist() == [303, 261, 46, 130]


def test_sums_equal_those_of_all_rows() -> None:
    """The mean and the deviation from sums over clients are those of the pooled rows."""
    rng = np.random.default_rng(0)
    values, ids = 1e8 + rng.normal(size=300), np.sort(rng.integers(0, 3, 300))
    values[::7] = np.nan
    sums = tables._Sums.of(values.copy(), np.searchsorted(ids, [0, 1, 2]))
    assert sums.mean == pytest.approx(np.nanmean(values), rel=1e-14)
    assert sums.scale == pytest.approx(np.nanstd(values), rel=1e-6)
    means, scales = sums.by_client()
    for client in range(3):
        assert means[client] == pytest.approx(np.nanmean(values[ids == client]), rel=1e-14)
        assert scales[client] == pytest.approx(np.nanstd(values[ids == client]), rel=1e-5)


def test_constant_column_is_zero(tmp_path: Path) -> None:
    clients = from_text(
        tmp_path, HEAD + "a,0.1,no\na,0.1,yes\nb,0.1,no\n", client="site", target="sick", test=0.0
    )
    torch.testing.assert_close(clients.x, torch.zeros(3, 1))


def test_location_counts_lines(tmp_path: Path) -> None:
    path = write(tmp_path, 'a,b\n"1\n2",x\n\n3,y\n')
    table = table_columns.read_csv(path)
    assert [table_columns.location(table, row) for row in range(2)] == ["line 2", "line 5"]


def test_codes_that_a_file_writes_as_decimals_are_the_known_categories(tmp_path: Path) -> None:
    column = CategoryColumn("ward", ("1", "2", "3.0"))
    encoding = ColumnEncoding("site", "sick", "classification", (column,), ("no", "yes"))
    rows = write(tmp_path, "ward\n1.0\n2\n3.0\n1.5\n", "rows.csv")
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert encoding.encode(read_rows(rows, encoding)).tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "2.5", "3"], [1, 2.5, 3]),
        (["", "1", "2"], [np.nan, 1, 2]),
        (["1", "", "01"], [1, np.nan, 1]),
    ],
    ids=["floats-later", "missing-first", "missing-later"],
)
def test_numbers_of_another_type_in_a_later_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[str], expected: list[float]
) -> None:
    """Each value fills a block, and pyarrow finds the types in the first one."""
    monkeypatch.setattr(table_columns, "_BLOCK", 64)
    rows = "".join(f"{value},{'x' * 50}\n" for value in values for _ in range(5))
    table = table_columns.read_csv(write(tmp_path, f"v,filler\n{rows}"))
    assert table_columns.kind_of(table, "v") == "number"
    np.testing.assert_array_equal(
        table_columns.as_numbers(table, "v"), np.repeat(np.array(expected), 5)
    )


def test_texts_in_a_later_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_columns, "_BLOCK", 64)
    rows = "".join(f"{value},{'x' * 50}\n" for value in ("", "1", "b", "c", "b"))
    table = table_columns.read_csv(write(tmp_path, f"v,filler\n{rows}"))
    assert table_columns.kind_of(table, "v") == "category"
    codes, texts = table_columns.as_codes(table, "v")
    assert [texts[code] if code >= 0 else None for code in codes] == [None, "1", "b", "c", "b"]


@pytest.mark.parametrize("distinct", [0, 1_000], ids=["text", "coded"])
def test_texts_have_no_spaces_at_the_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distinct: int
) -> None:
    monkeypatch.setattr(table_columns, "_DISTINCT", distinct)
    table = table_columns.read_csv(write(tmp_path, "w,v\na,1\n a ,2\n  ,3\nb,4\n,5\n"))
    assert pa.types.is_dictionary(table.column("w").type) == (distinct > 0)
    codes, texts = table_columns.as_codes(table, "w")
    assert texts == ["a", "b"]
    assert codes.tolist() == [0, 0, -1, 1, -1]
    assert table_columns.as_text(table, "w").to_pylist() == ["a", "a", None, "b", None]


def test_categories_of_a_frame_that_no_row_has_are_no_categories() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "site": pandas.Categorical(["a", "a", "b"], ["z", "b", "a"]),
            "ward": pandas.Categorical(["1", "2", None], ["2", "none", "1"]),
            "size": pandas.Categorical(["10", "2", "3"], ["2", "3", "10", "unknown"]),
            "sick": ["no", "yes", "no"],
        }
    )
    clients = fc.data.from_frame(
        frame, client="site", target="sick", test=0.0, categorical=["ward"]
    )
    assert clients.names.clients == ("a", "b")
    assert isinstance(clients.encoding, ColumnEncoding)
    assert [column.kind for column in clients.encoding.columns] == ["category", "number"]
    assert clients.names.features == ("ward=1", "ward=2", "ward missing", "size")


def test_many_rows_are_written_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        f"{'abc'[i % 3]},{'' if i % 7 == 0 else i},{'xyz'[i % 5 % 3]},{i % 2}" for i in range(100)
    ]
    text = "site,age,ward,sick\n" + "\n".join(rows) + "\n"
    settings: dict[str, Any] = {"client": "site", "target": "sick", "standardize": "client"}
    expected = from_text(tmp_path, text, **settings)
    for size in (1, 9):
        monkeypatch.setattr(column_encoding, "_ROWS", size)
        actual = from_text(tmp_path, text, **settings)
        assert torch.equal(actual.x, expected.x)  # type: ignore[arg-type]
        assert torch.equal(actual.x_test, expected.x_test)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["double", "int32", "uint8", "float", "bool", "string"])
def test_rows_are_encoded_alike_however_they_are_stored(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Blocks of 7 rows, chunks of 5 and 40 rows, slices that begin inside a byte of the mask."""
    monkeypatch.setattr(column_encoding, "_ROWS", 7)
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2 if kind == "bool" else 50, 90)
    missing = rng.random(90) < 0.3
    plain = [None if out else int(value) for value, out in zip(values, missing, strict=True)]
    texts = [None if value is None else str(value) for value in plain]
    array = pa.array(texts) if kind == "string" else pa.array(plain, pa.int64()).cast(kind)
    column = pa.chunked_array([array[0:3], array[3:8], array[8:8], array[8:48], array[48:90]])
    encoding = ColumnEncoding(
        "c", "t", "regression", (NumberColumn("n", 10.0, 4.0, True), CategoryColumn("k", ("7",)))
    )
    x = encoding.encode(pa.table({"n": column, "k": texts}))
    expected = np.where(missing, 0, (values - 10) / 4).astype(np.float32)
    np.testing.assert_array_equal(x[:, 0], expected)
    np.testing.assert_array_equal(x[:, 1], missing)
    np.testing.assert_array_equal(x[:, 2], (values == 7) & ~missing)


def test_the_order_of_clients_does_not_depend_on_that_of_the_rows() -> None:
    """Not even with a client that is called nan."""
    rows = {"site": ["3", "nan", "1"], "a": [1, 2, 3], "sick": [0, 1, 0]}
    names = []
    for step in (1, -1):
        frame = pa.table({column: values[::step] for column, values in rows.items()})
        names.append(fc.data.from_frame(frame, client="site", target="sick", test=0.0).names)
    assert names[0] == names[1]
