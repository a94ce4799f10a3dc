"""The LRU cache that builds entries after N requests."""

from fedclade.engines.compile_cache import LazyLRUCache


def test_an_entry_is_built_once_after_enough_requests() -> None:
    cache: LazyLRUCache[object] = LazyLRUCache(after=2, max_keys=8)
    assert [cache.get("a", object) for _ in range(2)] == [None, None]
    third = cache.get("a", object)
    assert third is not None
    assert cache.get("a", object) is third


def test_a_request_may_count_several_times() -> None:
    cache: LazyLRUCache[str] = LazyLRUCache(after=2, max_keys=8)
    assert cache.get("a", lambda: "built", times=3) == "built"


def test_the_key_requested_longest_ago_is_dropped_and_counted_from_zero() -> None:
    cache: LazyLRUCache[str] = LazyLRUCache(after=1, max_keys=2)
    for key in ("a", "a", "b", "a", "c"):
        cache.get(key, lambda: "built")
    assert cache.get("a", lambda: "built again") == "built"
    assert cache.get("b", lambda: "built") is None


def test_an_entry_that_was_given_up_or_cannot_be_built_is_not_tried_again() -> None:
    cache: LazyLRUCache[str] = LazyLRUCache(after=0, max_keys=2)
    assert cache.get("a", lambda: "built") == "built"
    cache.give_up("a")
    assert cache.get("a", lambda: "built") is None
    assert cache.get("b", lambda: None) is None
    assert cache.get("b", lambda: "built") is None
