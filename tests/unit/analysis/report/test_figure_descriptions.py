"""Colors of figures: one for each thing, never twice."""

from __future__ import annotations

from fedclade.analysis.report.figure_descriptions import COLORS, OTHER, color_of_rank, colors_of


def test_up_to_eight_groups_have_a_color_each() -> None:
    assert colors_of({3: 5, 0: 1, 7: 2, -1: 4}) == {0: 0, 3: 1, 7: 2}
    assert sorted(colors_of(dict.fromkeys(range(COLORS), 2)).values()) == list(range(COLORS))


def test_of_more_groups_the_largest_have_one() -> None:
    sizes = {group: 10 + group for group in range(40)}
    colors = colors_of(sizes)
    assert sorted(colors) == list(range(33, 40))
    assert len(set(colors.values())) == len(colors) < COLORS


def test_groups_of_single_clients_are_gray() -> None:
    assert colors_of(dict.fromkeys(range(40), 1)) == {}


def test_settings_beyond_the_colors_are_gray() -> None:
    assert [color_of_rank(rank, 3) for rank in range(3)] == [0, 1, 2]
    colors = [color_of_rank(rank, 20) for rank in range(20)]
    assert colors == [*range(COLORS - 1), *[OTHER] * (20 - COLORS + 1)]
