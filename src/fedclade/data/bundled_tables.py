"""Tables that come with fedclade, by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from fedclade.data.table_columns import as_numbers, import_pyarrow, read_csv

if TYPE_CHECKING:
    import pyarrow as pa


def heart() -> pa.Table:
    """920 patients of four hospitals, the UCI Heart Disease data (Janosi, Steinbrunn, Pfisterer and
    Detrano, 1988; CC BY 4.0).

    The column `num` of the published data is the degree of the disease, 0 (none) to 4. The column
    `disease` is added: "yes" where `num` is above 0. Use one of them as the target and drop the
    other.
    """
    pyarrow = import_pyarrow("data.path")
    with resources.as_file(resources.files("fedclade.data") / "bundled" / "heart.csv") as path:
        table = read_csv(path, text=("hospital",))
    disease = ["yes" if degree > 0 else "no" for degree in as_numbers(table, "num")]
    return table.append_column("disease", pyarrow.array(disease))


BUNDLED_TABLES: dict[str, Callable[[], pa.Table]] = {"heart": heart}
