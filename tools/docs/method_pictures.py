"""The pictures of docs/methods/: for each method one to three panels that show its idea, as SVG.
Nothing in them is measured.

python tools/docs/method_pictures.py [--out docs/images/methods]

The colour is the group of a client; a circle is a client, a square a model. Colour-blind readers
can distinguish the colours, and every picture has a description in words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

from method_glyphs import (
    BLUE,
    GREEN,
    GREY,
    HEIGHT,
    INK,
    ORANGE,
    SPREAD,
    WIDTH,
    Glyph,
    alone,
    axes,
    chosen,
    cloud,
    corrected,
    encoded,
    halves,
    line,
    linked,
    matrix,
    nodes,
    path,
    personal,
    probed,
    signatures,
    spring,
    star,
    steps,
    tree,
    updates,
    words,
)

OUT = Path(__file__).resolve().parents[2] / "docs" / "images" / "methods"
TEXT = 46  # height of the words below a panel
BY_GROUP = star((BLUE, ORANGE, GREEN), (0, 0, 1, 1, 2, 2), "up")
DOWN, UP = star((GREY,), (0,) * 6, "down"), star((GREY,), (0,) * 6, "up")
PICTURES: dict[str, tuple[str, list[tuple[Glyph, str, str]]]] = {
    "fedavg": (
        "FedAvg: one model for all",
        [
            (DOWN, "1. Everyone gets w", "and trains it on its own data"),
            (UP, "2. Trained weights go up", "w becomes their mean, by examples"),
        ],
    ),
    "local": (
        "Local: no exchange",
        [(alone, "Each client its own model", "nothing is sent; nothing is shared")],
    ),
    "fedprox": (
        "FedProx: FedAvg with a spring",
        [
            (DOWN, "1. Everyone gets w", "as in FedAvg"),
            (spring, "2. Training is held back", "each step adds μ (w − w of the round)"),
            (UP, "3. The mean", "by examples, as in FedAvg"),
        ],
    ),
    "fednova": (
        "FedNova: updates are divided by their steps",
        [
            (steps(False), "1. Clients make unequal steps", "much data: many steps, a long update"),
            (steps(True), "2. Each update is normed", "divided by the steps behind it"),
            (UP, "3. The mean", "times the mean number of steps"),
        ],
    ),
    "scaffold": (
        "SCAFFOLD: steps are corrected for drift",
        [
            (DOWN, "1. Everyone gets w and c", "c: where all clients pull"),
            (corrected, "2. Each step is corrected", "by c minus the client's own pull"),
            (UP, "3. Weights and pulls go up", "two means, by examples"),
        ],
    ),
    "lg_fedavg": (
        "LG-FedAvg: own representation, shared head",
        [(halves, "The head is averaged", "layers below it never leave a client")],
    ),
    "per_fedavg": (
        "Per-FedAvg: a start from which one step fits",
        [
            (UP, "1. One model is trained", "to be good after a step"),
            (
                personal,
                "2. Each client makes that step",
                "on its own training data, and uses the result",
            ),
        ],
    ),
    "ifca": (
        "IFCA: every client takes the model with the least loss",
        [
            (chosen, "1. K models go to a client", "it takes the one with the least loss"),
            (BY_GROUP, "2. It trains that one", "each model: the mean of its takers"),
        ],
    ),
    "fedsem": (
        "FedSEM: k-means on trained weights",
        [
            (DOWN, "1. Once, all train the first model", ""),
            (cloud(SPREAD, "✕"), "2. k-means on the weights", "K centres; each client its nearest"),
            (BY_GROUP, "3. Every round", "train, go to the nearest, take the mean"),
        ],
    ),
    "pca_hc": (
        "PCA+kM+HC: principal components of the data",
        [
            (axes, "1. A client's own axes", "k-means on the projections, k centres"),
            (
                tree("C given"),
                "2. Ward's tree of the clients",
                "cut into the C groups that are given",
            ),
            (BY_GROUP, "3. FedAvg in each group", ""),
        ],
    ),
    "flt": (
        "FLT: data that look alike to an encoder",
        [
            (encoded, "1. A client embeds its data", "and sends k centres"),
            (cloud(SPREAD, reach=32), "2. The server lays them out", "nearer than γ: related"),
            (BY_GROUP, "3. Related clients mix", "the mean of the related models"),
        ],
    ),
    "cfl": (
        "CFL: split where updates contradict each other",
        [
            (updates(False), "1. The model has come to rest", "but clients would still change it"),
            (updates(True), "2. Split by cosine", "if it stands out from the noise"),
            (nodes, "3. The tree grows", "each leaf a model; newcomers walk down"),
        ],
    ),
    "flis": (
        "FLIS: models that predict alike",
        [
            (probed, "1. Models on the probe", "the server runs them on unlabelled inputs"),
            (lambda: matrix(True), "2. DC: who agrees by β", "every round; groups may overlap"),
            (tree("1 − β"), "2. HC: the tree, once", "then FedAvg in each group"),
        ],
    ),
    "fedgmcc": (
        "FedGMCC: how far outputs stray on a path",
        [
            (path, "1. A path for every pair", "outputs on noise inputs stray little?"),
            (linked, "2. Near pairs are joined", "clusters are what hangs together"),
            (BY_GROUP, "3. The mean of the chains", "is a cluster's model"),
        ],
    ),
    "clade": (
        "Clade: one look at the clients' gradients",
        [
            (signatures, "1. Once, a signature each", "the mean gradient at the first model"),
            (tree("noise"), "2. A tree, and trees of noise", "groups only where it stands out"),
            (BY_GROUP, "3. FedAvg in each group", ""),
        ],
    ),
    "oracle": (
        "Oracle: FedAvg inside the true groups",
        [(BY_GROUP, "The groups are told", "what others are measured against")],
    ),
}


def svg(title: str, panels: Sequence[tuple[Glyph, str, str]]) -> str:
    width, height = WIDTH * len(panels) + 20, HEIGHT + TEXT + 14
    description = "; ".join(f"{head}{': ' + rest if rest else ''}" for _, head, rest in panels)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img" font-family="system-ui, sans-serif">'
        ),
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
        "<defs>",
        *(
            f'<marker id="to{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6"'
            f' markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8Z" fill="{colour}"/></marker>'
            for colour in (BLUE, ORANGE, GREEN, INK)
        ),
        "</defs>",
    ]
    for number, (glyph, head, rest) in enumerate(panels):
        parts += [f'<g transform="translate({10 + number * WIDTH} 8)">', *glyph()]
        parts += [
            words(WIDTH / 2, HEIGHT + 20, head, INK, 13.5),
            words(WIDTH / 2, HEIGHT + 38, rest, "#565d68", 11.5),
            "</g>",
        ]
        if number:
            parts.append(
                line(10 + number * WIDTH, 18, 10 + number * WIDTH, height - 14, "#d9dce1", 1)
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, (title, panels) in PICTURES.items():
        (out / f"{name}.svg").write_text(svg(title, panels))


if __name__ == "__main__":
    main()
