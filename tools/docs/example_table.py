"""examples/stay.csv: invented patients of twelve hospitals, for the README.

    python tools/docs/example_table.py

Six hospitals code the diagnosis in one way, six in another. Patients and numbers are random.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

TARGET = Path(__file__).resolve().parents[2] / "examples" / "stay.csv"
HOSPITALS = (
    "Aalen", "Bonn", "Celle", "Dachau", "Emden", "Fulda",
    "Gotha", "Halle", "Ilmenau", "Jena", "Kiel", "Lindau",
)  # fmt: skip
CODES = (("cardiac", "infection", "other"), ("infection", "other", "cardiac"))


def main() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number, hospital in enumerate(HOSPITALS):
        for _ in range(int(rng.integers(70, 130))):
            age, pulse, crp = rng.normal(62, 14), rng.normal(85, 15), rng.gamma(2.0, 20.0)
            ward = ("north", "south", "intensive")[int(rng.integers(3))]
            cardiac = (pulse - 85) / 15 + 0.5 * (age - 62) / 14 + (ward == "intensive")
            infection = (crp - 40) / 20 + 0.5 * (ward == "south")
            scores = np.array([2 * cardiac, 2 * infection, 0.5]) + rng.gumbel(size=3)
            diagnosis = CODES[number % 2][int(scores.argmax())]
            measured = "" if rng.random() < 0.1 else f"{crp:.0f}"
            admitted = f"2026-{rng.integers(1, 13):02}-{rng.integers(1, 29):02}"
            rows.append(
                (hospital, admitted, f"{age:.0f}", f"{pulse:.0f}", measured, ward, diagnosis)
            )
    with TARGET.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("patient", "hospital", "admitted", "age", "pulse", "crp", "ward", "diagnosis")
        )
        order = rng.permutation(len(rows))
        writer.writerows((1000 + n, *rows[row]) for n, row in enumerate(order))


if __name__ == "__main__":
    main()
