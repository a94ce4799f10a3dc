"""The pictures of docs/methods/: for each method one to three panels that show its idea, as SVG.
Nothing in them is measured.

python tools/docs/method_pictures.py [--out docs/images/methods]

The color is the group of a client; a circle is a client, a square a model. Color-blind readers
can distinguish the colors, and every picture has a description in words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

from method_glyphs import (
    BLUE,
    GRAY,
    GREEN,
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
    mixed,
    neighbors,
    nodes,
    own_heads,
    own_norms,
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
DOWN, UP = star((GRAY,), (0,) * 6, "down"), star((GRAY,), (0,) * 6, "up")
PICTURES: dict[str, tuple[str, list[tuple[Glyph, str, str]]]] = {
    "fedavg": (
        "FedAvg: one model for all",
        [
            (DOWN, "1. Each client receives w", "and trains it on its own data"),
            (UP, "2. It sends the trained weights", "w becomes their mean, by examples"),
        ],
    ),
    "local": (
        "Local: no exchange",
        [(alone, "Each client has its own model", "nothing is sent or shared")],
    ),
    "fedprox": (
        "FedProx: FedAvg with a proximal term",
        [
            (DOWN, "1. Each client receives w", "as in FedAvg"),
            (spring("w", "μ"), "2. It stays close to w", "each step adds μ (w_k − w)"),
            (UP, "3. The mean", "by examples, as in FedAvg"),
        ],
    ),
    "fednova": (
        "FedNova: updates are divided by their steps",
        [
            (steps(False), "1. Clients make unequal steps", "much data: many steps, a long update"),
            (steps(True), "2. Each update is normalized", "divided by its number of steps"),
            (UP, "3. The mean", "times the mean number of steps"),
        ],
    ),
    "scaffold": (
        "SCAFFOLD: steps are corrected for drift",
        [
            (DOWN, "1. Clients receive w and c", "c: mean direction of all clients"),
            (corrected, "2. Each step is corrected", "by c minus the client's direction"),
            (UP, "3. Weights and directions", "are sent; two means, by examples"),
        ],
    ),
    "lg_fedavg": (
        "LG-FedAvg: own representation, shared head",
        [(halves, "The head is averaged", "the other layers stay on the client")],
    ),
    "fedavg_finetune": (
        "FedAvg with fine-tuning",
        [
            (UP, "1. One model is trained", "as in FedAvg"),
            (personal, "2. Each client trains it further", "as far as held-out samples say"),
        ],
    ),
    "fedper": (
        "FedPer: shared body, own head",
        [(own_heads, "The body is averaged", "the head stays on the client")],
    ),
    "fedrep": (
        "FedRep: shared body, own head, trained in turn",
        [
            (own_heads, "1. A client trains its head", "with the body fixed"),
            (UP, "2. Then it trains the body", "which is averaged, by examples"),
        ],
    ),
    "fedbabu": (
        "FedBABU: a body trained with a fixed head",
        [
            (UP, "1. The body is averaged", "the head never changes"),
            (personal, "2. Each client fine-tunes", "the whole model, or the head"),
        ],
    ),
    "fedbn": (
        "FedBN: own BatchNorm layers",
        [(own_norms, "The other layers are averaged", "BatchNorm stays on the client")],
    ),
    "ditto": (
        "Ditto: an own model near the shared one",
        [
            (UP, "1. w is trained", "as in FedAvg"),
            (spring("v", "λ"), "2. v is trained too", "each step adds λ (v − w)"),
        ],
    ),
    "apfl": (
        "APFL: a mixture of an own and the shared model",
        [
            (UP, "1. w is trained", "as in FedAvg"),
            (personal, "2. v and α are trained at", "α v + (1 − α) w, which is used"),
        ],
    ),
    "fedala": (
        "FedALA: how much of the shared head to take",
        [
            (own_heads, "1. A client mixes its head", "with the shared one, by weight"),
            (UP, "2. It trains from there", "the mean is that of FedAvg"),
        ],
    ),
    "per_fedavg": (
        "Per-FedAvg: a model that one step adapts",
        [
            (UP, "1. One model is trained", "to be good after one step"),
            (
                personal,
                "2. Each client makes that step",
                "on its training data; it uses the result",
            ),
        ],
    ),
    "feddbe": (
        "FedDBE: a shared model and an offset for each client",
        [
            (UP, "1. The model is averaged", "as in FedAvg"),
            (own_heads, "2. Each client adds u_i", "to the inputs of the last layer"),
        ],
    ),
    "knn_per": (
        "kNN-Per: one model and a client's nearest samples",
        [
            (UP, "1. One model is trained", "as in FedAvg"),
            (
                neighbors,
                "2. A client compares features",
                "with its own samples: λ p_kNN + (1 − λ) p",
            ),
        ],
    ),
    "fedem": (
        "FedEM: each client has its own mixture of K models",
        [
            (mixed, "1. A client receives K models", "and computes its mixture π"),
            (
                star((BLUE, ORANGE, GREEN), (0, 0, 1, 1, 2, 2), "up", (GRAY,) * 6),
                "2. It trains all of them",
                "each sample by its part in a model",
            ),
        ],
    ),
    "ifca": (
        "IFCA: each client selects the model with the least loss",
        [
            (chosen, "1. A client receives K models", "and selects the one with least loss"),
            (BY_GROUP, "2. It trains this model", "a model: the mean of its clients"),
        ],
    ),
    "fedsem": (
        "FedSEM: k-means on trained weights",
        [
            (DOWN, "1. Once, all train w", ""),
            (
                cloud(SPREAD, "✕"),
                "2. k-means on the weights",
                "K centers; a client joins the nearest",
            ),
            (BY_GROUP, "3. Every round", "train, join the nearest, average"),
        ],
    ),
    "pca_hc": (
        "PCA+kM+HC: principal components of the data",
        [
            (axes, "1. A client's own axes", "k-means on the projections, k centers"),
            (
                tree("C given"),
                "2. Ward's tree of the clients",
                "cut into the given number of groups",
            ),
            (BY_GROUP, "3. FedAvg in each group", ""),
        ],
    ),
    "flt": (
        "FLT: clients with similar embeddings",
        [
            (encoded, "1. A client embeds its data", "and sends k centers"),
            (cloud(SPREAD, reach=32), "2. The server compares them", "distance below γ: related"),
            (BY_GROUP, "3. Related clients share", "the mean of the related models"),
        ],
    ),
    "pacfl": (
        "PACFL: angles between the data of clients",
        [
            (axes, "1. A client's singular vectors", "the first p of its samples"),
            (tree("β"), "2. Angles between subspaces", "merges below β degrees"),
            (BY_GROUP, "3. FedAvg in each group", ""),
        ],
    ),
    "flux": (
        "FLUX: means and deviations of features",
        [
            (UP, "1. One model at first", "until its accuracy is flat"),
            (
                cloud(SPREAD, reach=32),
                "2. Descriptors of clients",
                "near ones join, others are alone",
            ),
            (BY_GROUP, "3. FedAvg in each group", "new clients join without labels"),
        ],
    ),
    "feddrift": (
        "FedDrift: models open and merge",
        [
            (BY_GROUP, "1. FedAvg in each group", "each client starts alone"),
            (chosen, "2. Clients look at all models", "all became worse: a new model"),
            (linked, "3. Models are merged", "if equally good for both groups"),
        ],
    ),
    "pfedgraph": (
        "pFedGraph: a weighted mean for each client",
        [
            (UP, "1. Clients train and send", "each its own model"),
            (lambda: matrix(True), "2. Cosines of the updates", "and shares for each client"),
            (personal, "3. Each gets its own mean", "of all models, by its shares"),
        ],
    ),
    "cfl": (
        "CFL: split if updates contradict each other",
        [
            (updates(False), "1. The model has converged", "but the updates are still large"),
            (updates(True), "2. Split by cosine", "if it is larger than the noise"),
            (nodes, "3. The tree grows", "one model per leaf; new clients descend"),
        ],
    ),
    "flis": (
        "FLIS: models with similar predictions",
        [
            (probed, "1. Predictions on probe data", "the server runs all models"),
            (lambda: matrix(True), "2. DC: similarity ≥ β", "every round; groups may overlap"),
            (tree("1 − β"), "2. HC: one tree, once", "then FedAvg in each group"),
        ],
    ),
    "fedgmcc": (
        "FedGMCC: change of outputs along a path",
        [
            (path, "1. A path for every pair", "do outputs on noise inputs change?"),
            (linked, "2. Near pairs are joined", "groups: connected components"),
            (BY_GROUP, "3. The mean of the chains", "is the model of a group"),
        ],
    ),
    "clade": (
        "Clade: class priors, groups and shared layers",
        [
            (signatures, "1. Priors and groups", "class shares; signatures of gradients"),
            (BY_GROUP, "2. Candidates side by side", "groups, merged groups, one for all"),
            (linked, "3. Held-out samples decide", "groups with one p(x) share layers"),
        ],
    ),
    "clade_groups": (
        "CladeGroups: the clients' gradients, once",
        [
            (signatures, "1. One signature per client", "the mean gradient of the initial model"),
            (tree("noise"), "2. A tree, and trees of noise", "groups only if it exceeds them"),
            (BY_GROUP, "3. FedAvg in each group", ""),
        ],
    ),
    "oracle": (
        "Oracle: FedAvg inside the true groups",
        [(BY_GROUP, "The groups are given", "a reference for other methods")],
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
            f'<marker id="to{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6"'
            f' markerHeight="6" orient="auto"><path d="M0 0L8 4L0 8Z" fill="{color}"/></marker>'
            for color in (BLUE, ORANGE, GREEN, INK)
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
