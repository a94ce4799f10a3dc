"""Load a CSV file of 10⁶ rows and 30 columns: `fc.data.from_csv` and `pandas.read_csv`, each in its
own process, in turns; time and peak memory.

    python benchmarks/csv_loading.py --out results/speed/csv_loading.json

Seconds are of the wall clock and, for a machine that others use too, of the processor. from_csv
parses the file, splits off test parts, learns the columns and makes the tensors of all clients.
pandas.read_csv and pyarrow.csv.read_csv, with their defaults, only parse it. Since version 3.1
pandas reads a large file with several threads too. "pandas, prepared" does with pandas and numpy
what from_csv does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

FROM_CSV = """
import fedclade as fc
clients = fc.data.from_csv(path, client="hospital", target="sick")
size = len(clients), int(clients.sizes.sum() + clients.test_sizes.sum()), clients.shape[0]
"""
PANDAS = """
frame = pandas.read_csv(path)
size = frame.shape
"""
PYARROW = """
table = pyarrow.csv.read_csv(path)
size = table.shape
"""
PREPARED = """
frame = pandas.read_csv(path)
client, names = pandas.factorize(frame.pop("hospital"), sort=True)
y, _ = pandas.factorize(frame.pop("sick"), sort=True)
ward = pandas.get_dummies(frame.pop("ward"), dtype="float32").to_numpy()
order = pandas.Series(numpy.random.default_rng(0).random(len(frame)))
test = (order.groupby(2 * client + y).rank(pct=True) <= 0.2).to_numpy()
numbers = frame.to_numpy(copy=True)
missing = numpy.isnan(numbers)
numbers -= numpy.nanmean(numbers[~test], axis=0)
numbers /= numpy.sqrt(numpy.nanmean(numbers[~test] ** 2, axis=0))
numbers[missing] = 0
x = numpy.hstack([numbers, missing, ward], dtype="float32")
clients = {
    name: [
        (torch.from_numpy(x[rows]), torch.from_numpy(y[rows]))
        for rows in ((client == number) & ~test, (client == number) & test)
    ]
    for number, name in enumerate(names)
}
size = len(clients), len(x), x.shape[1]
"""
MEASURE = """
import json, sys, time
{imports}
path = sys.argv[1]
begin, cpu = time.perf_counter(), time.process_time()
{work}
seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
# Not ru_maxrss, which counts the process that started this one too.
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmHWM" in line)
print(json.dumps(dict(seconds=seconds, cpu_seconds=cpu_seconds, peak_mb=peak / 1024, size=size)))
"""
LOADERS = {
    "fedclade.from_csv": ("import fedclade.data, pyarrow.csv, pyarrow.parquet", FROM_CSV),
    "pandas.read_csv": ("import pandas", PANDAS),
    "pyarrow.csv.read_csv": ("import pyarrow.csv", PYARROW),
    "pandas, prepared": ("import numpy, pandas, torch", PREPARED),
}


def write_csv(path: Path, rows: int, clients: int = 50) -> None:
    """27 columns of numbers with missing values, one of categories, the client and the target."""
    rng = np.random.default_rng(0)
    names = [f"n{number}" for number in range(27)]
    with path.open("w") as file:
        file.write(",".join(["hospital", "sick", "ward", *names]) + "\n")
        for start in range(0, rows, 50_000):
            count = min(50_000, rows - start)
            numbers = np.char.mod("%.4f", rng.normal(size=(count, 27)))
            numbers[rng.random(numbers.shape) < 0.02] = ""
            hospital = np.char.add("h", rng.integers(0, clients, count).astype(str))
            sick = np.where(rng.random(count) < 0.3, "yes", "no")
            ward = np.array(["north", "south", "east", "west"])[rng.integers(0, 4, count)]
            columns = [hospital, sick, ward, *numbers.T]
            file.writelines(",".join(row) + "\n" for row in zip(*columns, strict=True))


def measure(loader: str, path: Path) -> dict[str, object]:
    """The time and the memory of one loader, in a new process."""
    imports, work = LOADERS[loader]
    script = MEASURE.format(imports=imports, work=work)
    process = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    result: dict[str, object] = json.loads(process.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        write_csv(path, options.rows)
        runs: dict[str, list[dict[str, object]]] = {loader: [] for loader in LOADERS}
        for _ in range(options.repeats):
            for loader in LOADERS:
                runs[loader].append(measure(loader, path))
        results = {
            "rows": options.rows,
            "columns": 30,
            "file_mb": round(path.stat().st_size / 2**20, 1),
            "cores": len(os.sched_getaffinity(0)),
            "loaders": {
                loader: {
                    "seconds_median": statistics.median(run["seconds"] for run in of_loader),
                    "cpu_seconds_median": statistics.median(
                        run["cpu_seconds"] for run in of_loader
                    ),
                    "peak_mb": max(run["peak_mb"] for run in of_loader),
                    "runs": of_loader,
                }
                for loader, of_loader in runs.items()
            },
            "environment": environment_info(),
        }
    for loader, result in results["loaders"].items():
        print(
            f"{loader}: {result['seconds_median']:.2f} s ({result['cpu_seconds_median']:.2f} s of"
            f" the processor), peak {result['peak_mb']:.0f} MiB"
        )
    if options.out is not None:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
