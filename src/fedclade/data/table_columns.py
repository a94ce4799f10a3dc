"""Reading of tables (CSV, Parquet, data frames), and their columns as numbers or as text.

Problems are named by line and column. pyarrow is imported late: it is an extra.
"""

from __future__ import annotations

import codecs
import csv
import ctypes
import io
import mmap
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.core.names import checked_names
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import safe_read

if TYPE_CHECKING:
    import pyarrow as pa

NULLS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "?", "#N/A")
"""What a missing value is in a CSV file. "None" is a category."""
_BLOCK = 1 << 20  # bytes that are parsed at once: no row may be longer
_HEADER = 1 << 20
_DISTINCT = 1_000  # of a block: a column with more different texts is plain text
_DELIMITERS = ",;\t|"
_LARGEST = float(np.finfo(np.float32).max)  # of a number: inputs are float32
# The first bytes of files that are not CSV: what they are, and what to do.
_OTHER_FILES = {
    b"PK\x03\x04": "a ZIP or Excel file. Save the table as CSV UTF-8, or unpack it.",
    b"\xd0\xcf\x11\xe0": "an Excel file. Save the table as CSV UTF-8.",
    b"\x1f\x8b": "compressed by gzip. Unpack it.",
    b"PAR1": "a Parquet file. Let its name end with .parquet, or use from_parquet.",
}
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def import_pyarrow(field: str) -> Any:
    """pyarrow, or an error that says how to install it."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidInputError(
            f"{field}: pyarrow is not installed ({error}). Install it with: pip install"
            " 'fedclade[tables]'",
            field,
        ) from error
    return pyarrow


def read_csv(
    path: str | os.PathLike[str], text: Collection[str] = (), drop: Collection[str] = ()
) -> pa.Table:
    """Read a CSV file with a header. Comma, semicolon, tab or | separate its columns.

    Args:
        path: the file, in UTF-8.
        text: columns that stay as they are in the file, such as codes with leading zeros.
        drop: columns that are not read.
    """
    file = Path(path).expanduser()
    pa = import_pyarrow("data.path")
    safe_read.fit(file, safe_read.size(file))
    delimiter, header = _header(file)
    names = _checked_header([name.strip() for name in header], str(file))
    _require_columns(names, drop, "data.drop")
    raw = dict(zip(names, header, strict=True))
    coded = pa.dictionary(pa.int32(), pa.string())  # texts repeat, and their numbers are small
    types = {raw[name]: coded for name in text if name in raw}
    included = [raw[name] for name in names if name not in drop]
    try:
        table = _parse(file, delimiter, included, types)
    except (pa.ArrowInvalid, pa.ArrowKeyError, OSError) as error:
        raise _malformed(file, delimiter, len(header), error) from error
    table = table.rename_columns([name for name in names if name not in drop])
    _require_rows(table, str(file))
    # Messages name the line of a row.
    return table.replace_schema_metadata({"path": str(file), "delimiter": delimiter})


def _parse(file: Path, delimiter: str, included: Sequence[str], types: dict[str, Any]) -> pa.Table:
    """Read these columns of a CSV file. Columns without a type get that of their values.

    pyarrow keeps the text of all columns without a type until the end, which takes most of the
    memory. So the types of the first block are tried for the whole file first.
    """
    import pyarrow as pa
    import pyarrow.csv

    read = pa.csv.ReadOptions(block_size=_BLOCK)
    # Without quotes no value has a line end, and pyarrow parses twice as fast.
    quotes = _has_quotes(file)
    parse = pa.csv.ParseOptions(
        delimiter=delimiter, quote_char='"' if quotes else False, newlines_in_values=quotes
    )
    # pyarrow's default waits for huge pages, which takes half as long as the parsing.
    memory = pa.system_memory_pool()

    def convert(known: dict[str, Any]) -> Any:
        return pa.csv.ConvertOptions(
            column_types=known,
            include_columns=included,
            null_values=list(NULLS),
            strings_can_be_null=True,
            auto_dict_encode=True,
            auto_dict_max_cardinality=_DISTINCT,
        )

    try:
        with pa.OSFile(str(file)) as source:
            schema = pa.csv.open_csv(source, read, parse, convert(types)).schema
        known = {
            field.name: pa.float64() if pa.types.is_null(field.type) else field.type
            for field in schema
        }
        return pa.csv.read_csv(pa.OSFile(str(file)), read, parse, convert(known | types), memory)
    except pa.ArrowInvalid:  # a later block has values of another type, or the file is malformed
        return pa.csv.read_csv(pa.OSFile(str(file)), read, parse, convert(types), memory)


def read_parquet(path: str | os.PathLike[str], drop: Collection[str] = ()) -> pa.Table:
    """Read a Parquet file.

    Args:
        path: the file.
        drop: columns that are not read.
    """
    file = Path(path).expanduser()
    pa = import_pyarrow("data.path")
    safe_read.fit(file, safe_read.size(file))
    try:
        with pa.parquet.ParquetFile(file) as parquet:
            names = _checked_header(parquet.schema_arrow.names, str(file))
            _require_columns(names, drop, "data.drop")
            # A few bytes of a packed column can stand for any number of rows.
            unpacked = 8 * parquet.metadata.num_rows * len(names)
            safe_read.fit(file, unpacked, "unpacked")
            table = parquet.read(columns=[name for name in names if name not in drop])
    except (pa.ArrowException, OSError) as error:
        problem = str(error).partition("\n")[0]
        raise InvalidInputError(f"{file}: no Parquet file ({problem}).", str(file)) from error
    _require_rows(table, str(file))
    return table.replace_schema_metadata(None)


def read_frame(frame: object, drop: Collection[str] = ()) -> pa.Table:
    """The table of a data frame of pandas or polars, or of any that narwhals knows.

    Args:
        frame: the data frame.
        drop: columns that are left out.
    """
    pa = import_pyarrow("df")
    try:
        import narwhals
    except ImportError as error:
        raise InvalidInputError(
            f"df: narwhals is not installed ({error}). Install it with: pip install"
            " 'fedclade[tables]'",
            "df",
        ) from error
    try:
        native: Any = frame
        data = narwhals.from_native(native, eager_only=True)
        names = _checked_header(list(data.columns), "df")
        _require_columns(names, drop, "data.drop")
        table = data.select([name for name in names if name not in drop]).to_arrow()
    except InvalidInputError:
        raise
    except Exception as error:  # each library has its own classes
        problem = str(error).partition("\n")[0]
        raise InvalidInputError(f"df: not a usable data frame ({problem}).", "df") from error
    assert isinstance(table, pa.Table)
    _require_rows(table, "df")
    return table.replace_schema_metadata(None)


def number_of_rows(table: pa.Table) -> int:
    """The number of rows of a table."""
    return int(table.num_rows)


def release_memory() -> None:
    """Give the memory of tables that are gone back to the system: glibc keeps that of small blocks,
    and pyarrow does not ask for it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # the C library is glibc
        trim(0)


def location(table: pa.Table, row: int) -> str:
    """The place of a row in the file, such as "line 17"; "row 16" where there are no lines."""
    metadata = table.schema.metadata or {}
    if b"path" in metadata:
        lines = _rows(Path(metadata[b"path"].decode()), metadata[b"delimiter"].decode())
        for number, (line, _) in enumerate(lines):
            if number == row + 1:  # row 0 is the header
                return f"line {line}"
    return f"row {row + 1}"


def kind_of(table: pa.Table, name: str) -> Literal["number", "category"]:
    """Whether a column holds numbers or categories. Mixed columns, dates and nested values are
    errors.
    """
    import pyarrow.compute as pc

    if _is_coded(table.column(name)):
        texts = _distinct(table, name)[1]
        if not any(_are_numbers(texts)) and _decimal_comma(table, texts) is None:
            return "category"
    column = _plain(table, name)
    if not _is_text(column):
        return "number"
    values = as_text(table, name)
    numeric = pc.match_substring_regex(values, _NUMBER)
    count, present = pc.sum(numeric).as_py() or 0, len(values) - values.null_count
    if count == present or _decimal_comma(table, values) is not None:
        return "number"
    if 2 * count > present:
        row = pc.index(numeric, False).as_py()
        raise InvalidInputError(
            f"column '{name}', {location(table, row)}: {shown(values[row].as_py())} is not a"
            f" number, but {count:,} of {present:,} values are. Correct it, or list the column in"
            " data.categorical or data.drop.",
            name,
        )
    return "category"


def as_numbers(
    table: pa.Table, name: str, out: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """A column as float64, NaN where a value is missing.

    Args:
        table: the table.
        name: the name of the column.
        out: (rows,) where the numbers are written; None for a new array.
    """
    numbers = np.empty(table.num_rows) if out is None else out
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is_coded(table.column(name)):
        codes, texts = _distinct(table, name)
        parsed = _parsed(table, texts)
        if parsed is not None:
            distinct = np.full(len(texts) + 1, np.nan)  # -1, a missing value, is the last
            _copy_into(distinct, parsed, np.nan)
            np.take(distinct, codes, out=numbers, mode="wrap")
            return _finite(table, name, numbers)
        wrong = np.array([not number for number in _are_numbers(texts)] + [False])[codes]
        if wrong.any():
            row = int(wrong.argmax())
            raise _no_number(table, name, row, texts[codes[row]].as_py())
    column = _plain(table, name)
    if _is_text(column):
        text = as_text(table, name)
        parsed = _parsed(table, text)
        if parsed is None:
            row = pc.index(pc.match_substring_regex(text, _NUMBER), False).as_py()
            raise _no_number(table, name, row, text[row].as_py())
        column = parsed
    _copy_into(numbers, column.cast(pa.float64(), safe=False), np.nan)
    return _finite(table, name, numbers)


def is_text(table: pa.Table, name: str) -> bool:
    """Whether a column holds text, also if that is the text of numbers."""
    column = table.column(name)
    return _is_coded(column) or _is_text(column)


def as_codes(table: pa.Table, name: str) -> tuple[NDArray[np.int64], list[str]]:
    """The number of each row's text, -1 where it is missing, and the different texts. They are
    those of `as_text`.
    """
    codes, texts = _distinct(table, name)
    used = np.bincount(codes + 1, minlength=len(texts) + 1)[1:] > 0
    numbers: dict[str, int] = {}
    lookup = [
        numbers.setdefault(text, len(numbers)) if text and is_used else -1
        for text, is_used in zip(texts.to_pylist(), used.tolist(), strict=True)
    ]
    return np.array([*lookup, -1])[codes], list(numbers)


def _distinct(table: pa.Table, name: str) -> tuple[NDArray[np.int64], pa.ChunkedArray]:
    """For each row a place in the second array, -1 where a value is missing. It has the column's
    texts without spaces at the ends, of which some may be equal, empty, or in no row.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    column = (
        column.unify_dictionaries()
        if _is_coded(column)
        else as_text(table, name).dictionary_encode()
    )
    array = column.combine_chunks()
    texts = pc.utf8_trim_whitespace(array.dictionary.cast(pa.string()))
    indices = pa.chunked_array([array.indices.cast(pa.int64())])
    codes = np.empty(len(array), np.int64)
    _copy_into(codes, indices, -1)
    return codes, pa.chunked_array([texts])


def _are_numbers(texts: pa.ChunkedArray) -> list[bool]:
    import pyarrow.compute as pc

    numeric: list[bool] = pc.match_substring_regex(texts, _NUMBER).to_pylist()
    return numeric


def _no_number(table: pa.Table, name: str, row: int, text: str) -> InvalidInputError:
    return InvalidInputError(
        f"column '{name}', {location(table, row)}: {shown(text)} is not a number.", name
    )


def _is_coded(column: pa.ChunkedArray) -> bool:
    """Whether a column has the numbers of distinct texts."""
    import pyarrow as pa

    return pa.types.is_dictionary(column.type) and _is_text_type(column.type.value_type)


def _parsed(table: pa.Table, text: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Text as numbers; None if one is no number."""
    import pyarrow as pa

    try:
        return text.cast(pa.float64())
    except pa.ArrowInvalid:
        return _decimal_comma(table, text)


def _copy_into(into: NDArray[Any], column: pa.ChunkedArray, missing: float) -> None:
    """Copy a column of the same type, with `missing` where a value is missing. pyarrow's `to_numpy`
    would import pandas, which takes longer than all columns.
    """
    end = 0
    for chunk in column.chunks:
        start, end, offset = end, end + len(chunk), chunk.offset
        if start == end:
            continue
        validity, data = chunk.buffers()
        into[start:end] = np.frombuffer(data, into.dtype, offset + len(chunk))[offset:]
        if chunk.null_count:
            first = offset % 8  # the first byte holds bits of values before the chunk too
            packed = np.frombuffer(validity, np.uint8)[offset // 8 :]
            bits = np.unpackbits(packed, count=first + len(chunk), bitorder="little")[first:]
            into[start:end][bits == 0] = missing


def _finite(table: pa.Table, name: str, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    if max(np.fmax.reduce(numbers, initial=0), -np.fmin.reduce(numbers, initial=0)) > _LARGEST:
        row = int((np.abs(numbers) > _LARGEST).argmax())
        raise InvalidInputError(
            f"column '{name}', {location(table, row)}: the value is infinite or too large for"
            " float32. Correct it, or leave it empty.",
            name,
        )
    return numbers


def as_text(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column as text without spaces at the ends; null where a value is missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _plain(table, name, dates=True)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, column.type))
        if pc.all(pc.equal(column, pc.trunc(column))).as_py() is not False:
            column = column.cast(pa.int64(), safe=False)  # a code "1" that a library made 1.0
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def _plain(table: pa.Table, name: str, dates: bool = False) -> pa.ChunkedArray:
    """A column of numbers, truth values or text."""
    import pyarrow as pa

    types, column = pa.types, table.column(name)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_null(column.type):
        return column.cast(pa.float64())
    if types.is_boolean(column.type) and not dates:
        return column.cast(pa.int8())
    if types.is_temporal(column.type) and not dates:
        raise InvalidInputError(
            f"column '{name}': holds dates or times, which are no inputs. List it in data.drop, or"
            " store numbers, such as days.",
            name,
        )
    known = (
        types.is_integer(column.type)
        or types.is_floating(column.type)
        or types.is_decimal(column.type)
        or types.is_temporal(column.type)
        or types.is_boolean(column.type)
        or _is_text(column)
    )
    if not known:
        what = "text that is not UTF-8" if types.is_binary(column.type) else f"{column.type}"
        raise InvalidInputError(
            f"column '{name}': holds {what}; numbers, text and truth values are allowed. Convert"
            " it, or list it in data.drop.",
            name,
        )
    return column


def _is_text(column: pa.ChunkedArray) -> bool:
    return _is_text_type(column.type)


def _is_text_type(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _decimal_comma(table: pa.Table, text: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Text such as "1,5" as numbers, in a file whose columns semicolons separate."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if (table.schema.metadata or {}).get(b"delimiter") != b";":
        return None
    try:
        return pc.replace_substring(text, ",", ".").cast(pa.float64())
    except pa.ArrowInvalid:
        return None


def shown(value: str) -> str:
    """A value of the file in a message."""
    return repr(value if len(value) <= 40 else f"{value[:40]}…")


def _checked_header(names: Sequence[object], where: str) -> tuple[str, ...]:
    """The names of columns; each must have one of its own."""
    for number, name in enumerate(names, 1):
        if not isinstance(name, str) or not name.strip():
            raise InvalidInputError(
                f"{where}: column {number} of {len(names)} has no name. Name it in the first line.",
                where,
            )
    return checked_names(names, f"{where}: columns")


def _require_columns(known: Sequence[str], wanted: Collection[str], field: str) -> None:
    for name in wanted:
        require_column(known, name, field)


def require_column(known: Sequence[str], name: str, field: str) -> None:
    """Raise `InvalidInputError` unless the table has this column."""
    if name not in known:
        raise InvalidInputError(
            f"{field} = '{name}': the table has no such column.{nearest(name, known)}", field
        )


def _require_rows(table: pa.Table, where: str) -> None:
    if table.num_rows == 0:
        raise InvalidInputError(f"{where}: no rows. Give a table with rows.", where)


def _header(path: Path) -> tuple[str, list[str]]:
    """The delimiter of a CSV file and its first row."""
    try:
        with path.open("rb") as file:
            start = file.read(_HEADER)
        for magic, problem in _OTHER_FILES.items():
            if start.startswith(magic):
                raise InvalidInputError(f"{path}: no CSV file, but {problem}", str(path))
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UnicodeError("it is UTF-16")
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)
    except UnicodeError as error:
        raise InvalidInputError(
            f"{path}: not a text file in UTF-8 ({error}). Save it as CSV UTF-8.", str(path)
        ) from error
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read ({error.strerror}).", str(path)) from error
    text = text.lstrip("\r\n")
    if not text.strip():
        raise InvalidInputError(f"{path}: empty. The first line must name the columns.", str(path))
    unquoted = "".join(text.splitlines()[0].split('"')[::2])
    delimiter = max(_DELIMITERS, key=unquoted.count)
    try:
        return delimiter, next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise InvalidInputError(f"{path}, line 1: {error}.", str(path)) from error


def _has_quotes(path: Path) -> bool:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return content.find(b'"') >= 0


def _rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV file with the line in which each begins. It is slow: for messages only."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader, line = csv.reader(file, delimiter=delimiter), 1
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1


def _malformed(path: Path, delimiter: str, columns: int, error: Exception) -> InvalidInputError:
    """What is wrong with a CSV file that pyarrow refused."""
    line = 0
    try:
        for line, row in _rows(path, delimiter):
            if len(row) != columns:
                first = shown(row[-1]) if len(row) < columns else shown(row[columns])
                where = "the last is" if len(row) < columns else "the first too many is"
                return InvalidInputError(
                    f"{path}, line {line}: {len(row)} values for {columns} columns ({where}"
                    f" {first}). Correct the line, or quote values that contain '{delimiter}'.",
                    str(path),
                )
    except csv.Error as problem:
        return InvalidInputError(
            f"{path}, line {line + 1}: {problem}. A quote may be missing.", str(path)
        )
    return InvalidInputError(
        f"{path}: not a readable CSV file ({str(error).partition(chr(10))[0]}).", str(path)
    )
