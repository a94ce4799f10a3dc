"""docs/images/quickstart.svg: the clients of the quickstart as CladeGroups groups them, and what
each client gains over FedAvg.

python tools/docs/quickstart_picture.py [--out docs/images/quickstart.svg]

Both runs are the preset as it is. The map has the first two principal components of what
CladeGroups groups by, its whitened signatures.
"""

from __future__ import annotations

import argparse
import tempfile
from html import escape
from pathlib import Path

import numpy as np
import torch
from method_glyphs import BLUE, GREEN, INK, ORANGE, circle, line, words
from sklearn.decomposition import PCA

from fedclade.training import experiment_file, plot_data
from fedclade.training.result import Result

OUT = Path(__file__).resolve().parents[2] / "docs" / "images" / "quickstart.svg"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#d55e00", "#56b4e9", INK)
WIDTH, HEIGHT, LEFT, TOP, SIDE = 760, 330, 56, 40, 240


def train(method: str, folder: Path) -> Result:
    settings = experiment_file.apply(experiment_file.read("quickstart"), [f"method.name={method}"])
    experiment = experiment_file.experiment(settings)
    return experiment.to_run(experiment.clients(), "cpu").run(folder, False, lambda row: None)


def picture() -> str:
    with tempfile.TemporaryDirectory() as folder:
        clade, fedavg = (train(name, Path(folder) / name) for name in ("clade_groups", "fedavg"))
        known = plot_data.read(Path(folder) / "clade_groups")
    if known is None or known.features is None:
        raise SystemExit("the run kept nothing of what CladeGroups grouped by")
    groups = np.unique(np.asarray(clade.clusters), return_inverse=True)[1]
    points = PCA(2, random_state=0).fit_transform(known.features)
    before, after = (np.asarray(each.clients["accuracy"], dtype=float) for each in (fedavg, clade))
    title = (
        f"The quickstart: {len(groups)} clients, {groups.max() + 1} groups found; FedAvg"
        f" {before.mean():.1f} %, CladeGroups {after.mean():.1f} %"
    )
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            f' width="{WIDTH}" height="{HEIGHT}" role="img" font-family="system-ui, sans-serif">'
        ),
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        *_map(points, groups),
        *_gains(before, after, groups),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _map(points: np.ndarray, groups: np.ndarray) -> list[str]:
    low, span = points.min(0), np.ptp(points, axis=0)
    at = (points - low) / span * (SIDE - 24) + 12
    parts = [
        f'<rect x="{LEFT - 26}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none"'
        ' stroke="#c9cdd3"/>'
    ]
    parts += [
        circle(LEFT - 26 + x, TOP + SIDE - y, COLOURS[group], 6)
        for (x, y), group in zip(at, groups, strict=True)
    ]
    for group in np.unique(groups):  # the dots of a group may lie over each other
        x, y = at[groups == group].mean(0)
        inner = -16 if x > SIDE / 2 else 16
        parts.append(
            words(
                LEFT - 26 + x + inner,
                TOP + SIDE - y + 4,
                f"{(groups == group).sum()}",
                INK,
                12,
                "end" if inner < 0 else "start",
            )
        )
    middle = LEFT - 26 + SIDE / 2
    return [
        *parts,
        words(middle, TOP - 14, "The signatures before training", INK, 14),
        words(middle, TOP + SIDE + 22, "clients by found group, with group sizes", "#565d68", 11.5),
    ]


def _gains(before: np.ndarray, after: np.ndarray, groups: np.ndarray) -> list[str]:
    left, right = 360, WIDTH - 30
    order = np.lexsort((np.arange(len(groups)), before))

    def height(accuracy: float) -> float:
        return TOP + SIDE - accuracy / 100 * (SIDE - 12)

    parts = [words((left + right) / 2, TOP - 14, "Accuracy of each client, %", INK, 14)]
    for mark in (0, 25, 50, 75, 100):
        parts += [
            line(left, height(mark), right, height(mark), "#e2e5e9", 1),
            words(left - 8, height(mark) + 4, str(mark), "#565d68", 11, "end"),
        ]
    for rank, client in enumerate(order):
        x = left + (rank + 0.5) * (right - left) / len(order)
        parts += [
            line(x, height(before[client]), x, height(after[client]), COLOURS[groups[client]], 1.4)
        ]
        parts += [
            (
                f'<circle cx="{x:.1f}" cy="{height(before[client]):.1f}" r="3.4" fill="#fff"'
                f' stroke="{INK}" stroke-width="1.4"/>'
            ),
            circle(x, height(after[client]), COLOURS[groups[client]], 4),
        ]
    worst = max(1, len(before) // 10)
    middle = (left + right) / 2
    dots = (("○ FedAvg", before, middle - 103), ("● CladeGroups", after, middle + 103))
    for name, each, x in dots:
        parts.append(
            words(
                x,
                TOP + SIDE + 22,
                f"{name} {each.mean():.1f}, worst {np.sort(each)[:worst].mean():.1f}",
                INK,
                12,
            )
        )
    return [
        *parts,
        words(
            middle,
            TOP + SIDE + 40,
            "clients, by accuracy under FedAvg; worst: the worst tenth",
            "#565d68",
            11.5,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    torch.set_num_threads(1)
    parser.parse_args().out.write_text(picture())


if __name__ == "__main__":
    main()
