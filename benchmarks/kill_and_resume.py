"""Kill runs at random times, and check that a resumed run writes the same files as an uninterrupted
run.

python benchmarks/kill_and_resume.py [--kills 50] [--methods fedavg,cfl,scaffold,clade] [--seed 0]

A 40-round run of the preset `quickstart`, with a checkpoint every round, is repeatedly killed
(SIGKILL) after a random time and resumed. When it is finished, its models, rounds.jsonl and
summary.json (without the seconds) are compared with those of an uninterrupted run. Runs are
repeated until the number of kills is reached. Results go to
results/robustness/kill_and_resume.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

RESULTS = Path(__file__).resolve().parents[1] / "results" / "robustness" / "kill_and_resume.json"
ROUNDS = 40
# Local training is long enough that a process spends most of its time in rounds.
SETTINGS = (
    f"run.rounds={ROUNDS}",
    "run.checkpoint_every=1",
    "run.eval_every=4",
    "model.hidden=256",
    "local.epochs=8",
)


def command(method: str, folder: Path, resume: bool) -> list[str]:
    sets = [word for setting in (*SETTINGS, f"method.name={method}") for word in ("--set", setting)]
    return [
        sys.executable,
        "-m",
        "fedclade",
        "run",
        "quickstart",
        *sets,
        "--out",
        str(folder),
        "-q",
        "--no-report",
    ] + ["--resume"] * resume


def start(method: str, folder: Path, resume: bool) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(method, folder, resume),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )


def run_files(folder: Path) -> dict[str, Any]:
    """The files of a finished run, without the times."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "models": (folder / "models" / "models.safetensors").read_bytes(),
        "rounds": [
            {name: value for name, value in row.items() if name != "seconds"} for row in rows
        ],
        "summary": {name: value for name, value in summary.items() if name != "seconds"},
    }


def finish(process: subprocess.Popen[bytes]) -> None:
    _, stderr = process.communicate()
    if process.returncode:
        raise SystemExit(f"a resumed run failed with {process.returncode}: {stderr.decode()}")


def killed(method: str, kills: int, draw: random.Random, root: Path) -> dict[str, Any]:
    """Kill runs of this method `kills` times; count the runs with the same files."""
    whole = root / "whole"
    begin = time.monotonic()
    finish(start(method, whole, resume=False))
    life = time.monotonic() - begin
    expected = run_files(whole)
    done = runs = same = 0
    at: list[int] = []
    while done < kills:
        folder = root / f"run-{runs}"
        while not (folder / "summary.json").exists():
            process = start(method, folder, resume=True)
            try:
                process.wait(draw.uniform(0.1, 1.0) * life if done < kills else None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                done += 1
                rounds = folder / "rounds.jsonl"
                at.append(rounds.read_bytes().count(b"\n") if rounds.exists() else 0)
                continue
            finish(process)
        runs, same = runs + 1, same + (run_files(folder) == expected)
        shutil.rmtree(folder)
    return {
        "kills": done,
        "runs": runs,
        "same": same,
        "kills_before_the_first_round": at.count(0),
        "different_rounds": len(set(at)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--methods", default="fedavg,cfl,scaffold,clade")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for method in args.methods.split(","):
        with tempfile.TemporaryDirectory() as root:
            counts = killed(method, args.kills, random.Random(f"{args.seed} {method}"), Path(root))
        print(method, counts, flush=True)
        results: dict[str, Any] = read_results(RESULTS) if RESULTS.exists() else {}
        results[method] = {"rounds": ROUNDS, **counts, "about": environment_info()}
        write_results(RESULTS, results)


if __name__ == "__main__":
    main()
