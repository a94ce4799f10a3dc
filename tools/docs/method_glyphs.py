"""The shapes in the pictures of docs/methods/: circles for clients, squares for models, trees,
clouds and arrows, as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 250, 150  # of a panel
BLUE, ORANGE, GREEN, GRAY, INK = "#0072b2", "#e69f00", "#009e73", "#8a8f98", "#2b2f36"
GROUPS = (BLUE, BLUE, ORANGE, ORANGE, GREEN, GREEN)
Glyph = Callable[[], list[str]]


def circle(x: float, y: float, color: str, r: float = 9) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" fill="{color}"/>'


def model(
    x: float, y: float, color: str, label: str = "", size: float = 26, top: str | None = None
) -> list[str]:
    """A square; with `top` its upper half has another color, for example for a shared head."""
    parts = [
        f'<rect x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size:g}" height="{size:g}"'
        f' rx="4" fill="{color}"/>'
    ]
    if top:
        parts.append(
            f'<rect x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size:g}"'
            f' height="{size / 2:g}" rx="4" fill="{top}"/>'
        )
    return [*parts, *([words(x, y + 4.5, label, "#fff")] if label else [])]


def words(
    x: float, y: float, text: str, color: str = INK, size: float = 13, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str = INK,
    width: float = 1.6,
    dash: str = "",
    head: bool = False,
) -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    end = f' marker-end="url(#to{color[1:]})"' if head else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"'
        f' stroke-width="{width:g}"{style}{end}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, color: str = INK, width: float = 1.6) -> str:
    return line(x1, y1, x2, y2, color, width, head=True)


def column(client: int) -> float:
    return 30 + client * 38


def star(
    models: Sequence[str],
    of: Sequence[int],
    way: str,
    colors: Sequence[str] = GROUPS,
    label: str = "w",
) -> Glyph:
    """Models above, six clients below; arrows from each client to its model ("up") or from the
    model to the client ("down"), or none.
    """

    def drawn() -> list[str]:
        xs = [WIDTH / (len(models) + 1) * (number + 1) for number in range(len(models))]
        parts = []
        for client, number in enumerate(of):
            low, high = (
                (column(client), 112),
                (xs[number] + (column(client) - xs[number]) * 0.25, 48),
            )
            if way == "down":
                parts.append(arrow(*high, *low))
            elif way == "up":
                parts.append(arrow(*low, *high))
        for x, color in zip(xs, models, strict=True):
            parts += model(x, 30, color, label)
        return [*parts, *(circle(column(client), 126, colors[client]) for client in range(6))]

    return drawn


def alone() -> list[str]:
    return [
        part
        for client, color in enumerate(GROUPS)
        for part in (
            *model(column(client), 84, color, size=20),
            circle(column(client), 118, color),
        )
    ]


def _shared_part(text: str, own_head: bool) -> list[str]:
    """The shared layers above; at each client they are gray, and its own layers have its color."""
    parts = model(WIDTH / 2, 26, GRAY, text, size=40)
    for client, color in enumerate(GROUPS):
        bottom, top = (GRAY, color) if own_head else (color, GRAY)
        parts += [
            line(WIDTH / 2 + (column(client) - WIDTH / 2) * 0.2, 50, column(client), 84),
            *model(column(client), 98, bottom, size=22, top=top),
        ]
        parts.append(circle(column(client), 130, color))
    return parts


def halves() -> list[str]:
    """One shared head above, a separate representation at each client."""
    return _shared_part("head", own_head=False)


def own_norms() -> list[str]:
    """FedBN: all layers but BatchNorm are shared."""
    return _shared_part("w", own_head=False)


def own_heads() -> list[str]:
    """One shared body above, a separate head at each client."""
    return _shared_part("body", own_head=True)


def personal() -> list[str]:
    parts = model(WIDTH / 2, 126, GRAY, "w")
    for client, color in enumerate(GROUPS):
        x = column(client)
        parts += [
            arrow(WIDTH / 2 + (x - WIDTH / 2) * 0.25, 108, x, 62, color),
            *model(x, 44, color, size=20),
        ]
    return parts


def cloud(centers: Sequence[tuple[float, float]], mark: str = "", reach: float = 0) -> Glyph:
    """Clients as points in the plane; `mark` is the text at the center of each group, `reach` the
    distance within which clients are related.
    """

    def drawn() -> list[str]:
        parts = []
        for (x, y), color in zip(centers, (BLUE, ORANGE, GREEN), strict=False):
            near = [
                (x + 17 * math.cos(2.4 * k + x), y + 15 * math.sin(2.4 * k + x)) for k in range(6)
            ]
            if reach:
                parts += [
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{reach:g}" fill="{color}"'
                    f' fill-opacity="0.13" stroke="{color}"/>'
                ]
            parts += [circle(px, py, color, 5.5) for px, py in near]
            if mark:
                parts.append(words(x, y + 5, mark, INK, 16))
        return parts

    return drawn


SPREAD = ((60, 45), (185, 55), (115, 112))


def tree(note: str) -> Glyph:
    """Merges of nine clients, cut into three groups."""

    def drawn() -> list[str]:
        parts, tops = [], []
        for group, color in enumerate((BLUE, ORANGE, GREEN)):
            left = 18 + group * 62
            merges = f"M{left} 124V104H{left + 20}V124M{left + 10} 104V92H{left + 40}V124"
            parts.append(f'<path d="{merges}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [circle(left + step * 20, 130, color, 6) for step in range(3)]
            tops.append(left + 25)
        first, second, third = tops
        merges = f"M{first} 92V44H{second}V92M{(first + second) / 2} 44V24H{third}V92"
        parts.append(f'<path d="{merges}" fill="none" stroke="{INK}" stroke-width="1.6"/>')
        parts.append(line(12, 70, WIDTH - 12, 70, INK, 1.4, "5 4"))
        return [*parts, words(WIDTH - 12, 64, note, INK, 11, "end")]

    return drawn


def matrix(overlap: bool = False) -> list[str]:
    """The similarity of nine clients: dark cells are similar pairs."""
    parts = []
    for row in range(9):
        for other in range(9):
            similar = row // 3 == other // 3 or (overlap and {row, other} == {2, 3})
            fill = (BLUE, ORANGE, GREEN)[row // 3] if row // 3 == other // 3 else INK
            place = f'x="{62 + other * 14}" y="{12 + row * 14}" width="13" height="13"'
            opacity = 0.9 if similar else 0.1
            parts.append(f'<rect {place} fill="{fill}" fill-opacity="{opacity}"/>')
    return parts


def updates(split: bool) -> Glyph:
    """Updates of six clients from one model, in two groups with opposite directions."""

    def drawn() -> list[str]:
        x, y, parts = WIDTH / 2, 76, []
        for angle, color in (
            (-165, BLUE),
            (-188, BLUE),
            (-205, BLUE),
            (14, ORANGE),
            (-6, ORANGE),
            (-26, ORANGE),
        ):
            to = math.radians(angle)
            parts.append(arrow(x, y, x + 78 * math.cos(to), y + 78 * math.sin(to), color, 2.4))
        if split:
            parts.append(line(x, 8, x, 144, INK, 1.4, "5 4"))
        else:
            parts.append(words(x, 140, "the mean update is almost 0", INK, 11))
        return [*parts, *model(x, y, GRAY, "w")]

    return drawn


def nodes() -> list[str]:
    """CFL's tree of models."""
    places = {
        (125, 24): GRAY,
        (66, 76): BLUE,
        (184, 76): GRAY,
        (150, 126): ORANGE,
        (218, 126): GREEN,
    }
    links = (
        ((125, 24), (66, 76)),
        ((125, 24), (184, 76)),
        ((184, 76), (150, 126)),
        ((184, 76), (218, 126)),
    )
    return [
        *(line(*a, *b) for a, b in links),
        *(part for (x, y), color in places.items() for part in model(x, y, color, "w")),
    ]


def spring(trained: str, pull: str) -> Glyph:
    """A client's model moves away from w and is pulled back."""
    return lambda: _spring(trained, pull)


def _spring(trained: str, pull: str) -> list[str]:
    zigzag = " ".join(f"{70 + step * 11} {92 + (-7 if step % 2 else 7)}" for step in range(1, 10))
    return [
        (
            f'<path d="M64 78C100 20 150 20 192 62" fill="none" stroke="{BLUE}" stroke-width="2"'
            f' marker-end="url(#to{BLUE[1:]})"/>'
        ),
        (
            f'<polyline points="70 92 {zigzag} 180 92" fill="none" stroke="{ORANGE}"'
            ' stroke-width="1.8"/>'
        ),
        *model(56, 92, GRAY, "w"),
        *model(196, 84, BLUE, trained),
        words(126, 122, f"{pull} pulls back", ORANGE),
    ]


def steps(normed: bool) -> Glyph:
    """Three clients with 2, 6 and 3 steps, as they are or each divided by its number."""

    def drawn() -> list[str]:
        parts = []
        for row, (count, color) in enumerate(((2, BLUE), (6, ORANGE), (3, GREEN))):
            y, length = 32 + row * 44, 92.0 if normed else count * 30.0
            parts.append(arrow(36, y, 36 + length, y, color, 3))
            if not normed:
                parts += [
                    circle(36 + (step + 1) * length / count - 3, y, color, 4)
                    for step in range(count - 1)
                ]
            parts.append(circle(22, y, color))
        return parts

    return drawn


def corrected() -> list[str]:
    return [
        arrow(40, 124, 176, 124, BLUE, 2.6),
        words(122, 142, "the client's gradient", BLUE, 11),
        arrow(176, 124, 196, 42, ORANGE, 2.6),
        words(194, 84, "+ c − cᵢ", ORANGE, 12, "start"),
        arrow(40, 124, 190, 34, INK, 2.6),
        words(92, 62, "the step", INK, 12),
        *model(32, 126, GRAY, "w", 22),
    ]


def chosen() -> list[str]:
    """IFCA: a client evaluates all models and selects the one with the lowest loss."""
    parts = []
    for number, (color, loss) in enumerate(((BLUE, 62), (ORANGE, 18), (GREEN, 48))):
        x = 62 + number * 62
        parts += [
            (
                line(x, 46, 125, 118, INK, 1.0, "4 3")
                if loss > 20
                else line(x, 46, 125, 118, ORANGE, 3)
            ),
            *model(x, 30, color, "w"),
        ]
        parts += [
            f'<rect x="{x + 18}" y="{44 - loss * 0.42:.1f}" width="8" height="{loss * 0.42:.1f}"'
            f' fill="{color}"/>'
        ]
    return [*parts, circle(125, 126, ORANGE, 10), words(240, 92, "bars: loss", INK, 11, "end")]


def mixed() -> list[str]:
    """FedEM: each client has its own proportions of all models."""
    parts = []
    for number, color in enumerate((BLUE, ORANGE, GREEN)):
        parts += model(62 + number * 62, 26, color, "w")
    shares = ((6, 2, 2), (5, 4, 1), (2, 7, 1), (1, 6, 3), (3, 1, 6), (1, 1, 8))
    for client, heights in enumerate(shares):
        x, y = column(client), 100.0
        for color, height in zip((BLUE, ORANGE, GREEN), heights, strict=True):
            y -= 4 * height
            parts.append(
                f'<rect x="{x - 9:.1f}" y="{y:.1f}" width="18" height="{4 * height}"'
                f' fill="{color}"/>'
            )
        parts.append(circle(x, 126, GRAY))
    return parts


def neighbors() -> list[str]:
    """kNN-Per: a new point among the labeled points of its client."""
    points = ((48, 40), (70, 72), (44, 96), (96, 38), (150, 52), (176, 92), (140, 112), (204, 60))
    colors = (BLUE, BLUE, BLUE, BLUE, ORANGE, ORANGE, ORANGE, ORANGE)
    parts = [line(120, 76, x, y, GRAY, 1.2, "4 3") for x, y in (points[1], points[3], points[4])]
    parts += [circle(x, y, color, 6) for (x, y), color in zip(points, colors, strict=True)]
    return [*parts, *model(120, 76, INK, "?", 20), words(240, 138, "points: φ(x)", INK, 11, "end")]


def encoded() -> list[str]:
    """Samples through an encoder to k centers."""
    parts = [
        f'<rect x="{16 + 7 * k}" y="{44 + 7 * k}" width="38" height="38" fill="#fff"'
        f' stroke="{INK}"/>'
        for k in range(3)
    ]
    parts += [
        f'<path d="M92 36L138 60V98L92 122Z" fill="{GRAY}" fill-opacity="0.35" stroke="{INK}"/>',
        words(114, 83, "G", INK, 15),
    ]
    return [
        *parts,
        arrow(142, 79, 164, 79),
        *(circle(186 + 20 * (k % 2), 58 + 14 * k, BLUE, 6) for k in range(4)),
        words(196, 132, "k centers", INK, 11),
    ]


def axes() -> list[str]:
    points = [
        circle(
            125 + 62 * math.cos(1.9 * k) * 0.9,
            78 + 22 * math.sin(2.6 * k) - 20 * math.cos(1.9 * k),
            BLUE,
            4.5,
        )
        for k in range(14)
    ]
    return [
        *points,
        arrow(125, 78, 206, 50, INK, 2.2),
        arrow(125, 78, 137, 118, INK, 2.2),
        words(214, 46, "1", INK, 12),
        words(147, 126, "2", INK, 12),
    ]


def path() -> list[str]:
    return [
        line(48, 112, 202, 112, GRAY, 1.6, "5 4"),
        f'<path d="M48 112L125 44L202 112" fill="none" stroke="{BLUE}" stroke-width="2.4"/>',
        *model(48, 112, BLUE, "w"),
        *model(202, 112, BLUE, "w"),
        circle(125, 44, ORANGE, 7),
        words(125, 30, "bend θ", ORANGE),
        words(125, 132, "straight", GRAY, 11),
    ]


def linked() -> list[str]:
    spots = [
        (44, 40, BLUE),
        (92, 62, BLUE),
        (52, 96, BLUE),
        (170, 36, ORANGE),
        (214, 70, ORANGE),
        (160, 116, GREEN),
        (212, 124, GREEN),
    ]
    pairs = ((0, 1), (1, 2), (3, 4), (5, 6))
    links = [
        line(spots[a][0], spots[a][1], spots[b][0], spots[b][1], spots[a][2], 3) for a, b in pairs
    ]
    return [*links, *(circle(x, y, color) for x, y, color in spots)]


def probed() -> list[str]:
    """The predictions of three models for the same probe inputs."""
    parts = []
    predictions = ((BLUE, "334143"), (BLUE, "334141"), (ORANGE, "897798"))
    for row, (color, digits) in enumerate(predictions):
        y = 36 + row * 40
        parts += [
            *model(36, y, color, "w"),
            *(words(84 + 27 * k, y + 5, digit, color, 16) for k, digit in enumerate(digits)),
        ]
    return parts


def signatures() -> list[str]:
    parts = [
        part
        for client in range(6)
        for part in (
            circle(column(client), 126, GROUPS[client]),
            arrow(column(client), 112, column(client), 70, GROUPS[client]),
        )
    ]
    bars = ((3, 8, 5), (3, 8, 6), (9, 2, 4), (8, 2, 4), (5, 5, 10), (5, 6, 10))
    for client, heights in enumerate(bars):
        parts += [
            f'<rect x="{column(client) - 11 + 8 * k:.0f}" y="{58 - 4 * height}" width="6"'
            f' height="{4 * height}" fill="{GROUPS[client]}"/>'
            for k, height in enumerate(heights)
        ]
    return parts
