"""Things made for what is asked for again and again."""

from fedclade.engines.compile_cache import LazyLRUCache


def test_it_is_made_once_when_it_was_asked_for_often_enough() -> None:
    kept: LazyLRUCache[object] = LazyLRUCache(after=2, most=8)
    assert [kept.get("a", object) for _ in range(2)] == [None, None]
    third = kept.get("a", object)
    assert third is not None
    assert kept.get("a", object) is third


def test_several_times_at_once_count_as_often() -> None:
    kept: LazyLRUCache[str] = LazyLRUCache(after=2, most=8)
    assert kept.get("a", lambda: "made", times=3) == "made"


def test_what_was_not_asked_for_longest_is_let_go_and_counted_anew() -> None:
    kept: LazyLRUCache[str] = LazyLRUCache(after=1, most=2)
    for what in ("a", "a", "b", "a", "c"):
        kept.get(what, lambda: "made")
    assert kept.get("a", lambda: "made again") == "made"
    assert kept.get("b", lambda: "made") is None


def test_what_is_given_up_or_cannot_be_made_is_not_tried_again() -> None:
    kept: LazyLRUCache[str] = LazyLRUCache(after=0, most=2)
    assert kept.get("a", lambda: "made") == "made"
    kept.give_up("a")
    assert kept.get("a", lambda: "made") is None
    assert kept.get("b", lambda: None) is None
    assert kept.get("b", lambda: "made") is None
