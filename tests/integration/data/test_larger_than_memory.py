"""A sparse file of 20 GB of images trains in less than 4 GB of anonymous memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="anonymous memory is measured by /proc/self/status of Linux"
)
SAMPLES, SITES, SHAPE = 1_700_000, 3_400, (64, 64, 3)
# RLIMIT_DATA limits private writable mappings, of which the mapped file is one: its peak is sampled
# instead.
CHILD = """
import json, sys, threading, time
import fedclade as fc

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 2**20

peak, finished = 0.0, threading.Event()

def watch():
    global peak
    while not finished.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
data = fc.data.load(sys.argv[1])
clients = fc.data.partition(data, fc.data.NaturalId("site"), clients=10)
model = fc.models.SmallCNN()
result = fc.run(fc.FedAvg(), clients, model=model, rounds=2, clients_per_round=5, out=sys.argv[2])
finished.set()
watcher.join()
print(json.dumps(dict(peak=peak, loss=result.summary["loss"], clients=len(clients))))
"""


def test_20_gb_of_images_train_in_less_than_4_gb(tmp_path: Path) -> None:
    folder = tmp_path / "wards"
    folder.mkdir()
    x = folder / "x_train.npy"
    np.lib.format.open_memmap(x, "w+", np.uint8, (SAMPLES, *SHAPE))  # type: ignore[no-untyped-call]
    if x.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("the file system has no sparse files")
    np.save(folder / "y_train.npy", np.arange(SAMPLES) % 10)
    np.save(folder / "site_train.npy", np.arange(SAMPLES) // (SAMPLES // SITES))
    assert x.stat().st_size > 20e9
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(tmp_path / "run")],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    measured = json.loads(child.stdout.splitlines()[-1])
    assert measured["clients"] == 10
    assert np.isfinite(measured["loss"])
    assert 0.1 < measured["peak"] < 4  # GiB; torch alone needs 0.1
