"""The protocol: exact sums for all drop-outs, nothing from few shares, and every abuse refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedclade.core.federation import FIXED_POINT
from fedclade.errors import InvalidInputError
from fedclade.privacy.secure_sum import shamir
from fedclade.privacy.secure_sum.fixed_point import Words, decode, encode
from fedclade.privacy.secure_sum.masks import derive, mask, packed_text, public_key_of
from fedclade.privacy.secure_sum.protocol import (
    Aggregation,
    Deal,
    Groups,
    Identity,
    Party,
    ProtocolError,
    Reveal,
    Session,
    threshold_of,
)

RUN = "run-1"
LENGTH = 6


class Parties:
    """The parties of a run, and the messages between them and the server."""

    def __init__(self, count: int, slots: int = 2) -> None:
        names = [f"node-{number}" for number in range(count)]
        self.parties = {name: Party(name, RUN, derive(name.encode())) for name in names}
        self.slots = slots
        self.identities = [party.identity() for party in self.parties.values()]
        self.deals = {
            name: party.deal(self.identities, slots) for name, party in self.parties.items()
        }

    def session(self, groups: Groups, number: str = "1", min_clients: int = 1) -> Session:
        keys = {name: deal.public_key for name, deal in self.deals.items()}
        deals = {name: deal.number for name, deal in self.deals.items()}
        return Session(RUN, number, groups, keys, deals, min_clients)

    def mask(
        self, session: Session, name: str, vectors: Mapping[str, Words] | None = None
    ) -> dict[str, Words]:
        if vectors is None:
            vectors = a_vector(session, name)
        return self.parties[name].mask(session, list(self.deals.values()), vectors)

    def aggregation(self, session: Session) -> Aggregation:
        lengths = dict.fromkeys(session.groups, LENGTH)
        return Aggregation(session, self.deals.values(), list(self.parties), lengths)

    def run(
        self, session: Session, silent: set[str] = frozenset(), gone: set[str] = frozenset()
    ) -> dict[str, Words]:
        """A whole round.

        Args:
            session: the sum.
            silent: parties that do not answer at all.
            gone: parties that answer, and then do not reveal.
        """
        total = self.aggregation(session)
        for name in self.parties:
            masked = self.mask(session, name)
            if name not in silent:
                total.add(name, masked)
        lists = (session.number, total.answered, total.dropped)
        present = [name for name in total.answered if name not in gone]
        signed = {name: self.parties[name].confirm(*lists) for name in present}
        reveals = {}
        for name in present:
            reveals[name] = self.parties[name].reveal(*lists, confirmations=signed)
            assert total.is_complete(reveals[name])
        return total.sums(reveals)

    def confirmed(self, answered: list[str], dropped: list[str]) -> dict[str, bytes]:
        """What all that answered sign in the first session."""
        return {name: self.parties[name].confirm("1", answered, dropped) for name in answered}


def a_vector(session: Session, name: str) -> dict[str, Words]:
    """Numbers over the whole range of the words."""
    return {
        group: mask(derive(packed_text(name, group)), LENGTH)
        for group, members in session.groups.items()
        if name in members
    }


def plain_sum(session: Session, present: set[str]) -> dict[str, Words]:
    sums = {}
    for group, members in session.groups.items():
        sums[group] = np.zeros(LENGTH, np.uint64)
        for name in members.keys() & present:
            sums[group] = sums[group] + a_vector(session, name)[group]
    return sums


def one_group(parties: Parties, clients: int = 1) -> Groups:
    return {"all": dict.fromkeys(parties.parties, clients)}


@pytest.mark.parametrize("fates", list(product(range(3), repeat=5)))
def test_masked_sums_are_plain_sums_for_all_drop_outs_of_five(fates: tuple[int, ...]) -> None:
    """Each party stays (0), does not answer (1), or answers and then disappears (2)."""
    parties = Parties(5)
    names = list(parties.parties)
    silent = {name for name, fate in zip(names, fates, strict=True) if fate == 1}
    gone = {name for name, fate in zip(names, fates, strict=True) if fate == 2}
    two = {name: number + 1 for number, name in enumerate(names)}
    groups = {"all": two, "some": {name: two[name] for name in names[1:4]}}
    session = parties.session(groups)
    if len(silent) + len(gone) <= 5 - threshold_of(5):
        sums = parties.run(session, silent, gone)
        expected = plain_sum(session, set(names) - silent)
        assert sums.keys() == expected.keys()
        assert all(np.array_equal(sums[group], expected[group]) for group in groups)
    else:
        with pytest.raises(ProtocolError, match=r"are needed|only . parties"):
            parties.run(session, silent, gone)


def test_two_of_ten_may_disappear_at_any_time() -> None:
    for silent, gone in (({0, 1}, set()), ({2}, {3}), (set(), {4, 9}), ({5, 6}, {7})):
        parties = Parties(10)
        names = list(parties.parties)
        session = parties.session(one_group(parties))
        sums = parties.run(session, {names[i] for i in silent}, {names[i] for i in gone})
        present = {name for i, name in enumerate(names) if i not in silent}
        assert np.array_equal(sums["all"], plain_sum(session, present)["all"])


def test_a_party_without_clients_helps_to_unmask() -> None:
    parties = Parties(4)
    session = parties.session({"all": {"node-0": 2, "node-1": 2}})
    sums = parties.run(session, silent={"node-1"})
    assert np.array_equal(sums["all"], a_vector(session, "node-0")["all"])


def test_a_small_group_stays_masked() -> None:
    """Group b loses a client and is then too small; group a is unmasked."""
    parties = Parties(5)
    names = list(parties.parties)
    groups = {"a": dict.fromkeys(names, 1), "b": dict.fromkeys(names[:3], 1)}
    session = parties.session(groups, min_clients=3)
    sums = parties.run(session, silent={"node-0"})
    assert sums.keys() == {"a"}
    assert np.array_equal(sums["a"], plain_sum(session, set(names[1:]))["a"])


def test_what_the_server_gets_is_uniform() -> None:
    """Also where all vectors are 0, and also if all pairwise masks of a party are revealed."""
    bits = []
    for _ in range(30):
        parties = Parties(5)
        session = parties.session({"all": dict.fromkeys(parties.parties, 1)})
        zeros = {"all": np.zeros(200, np.uint64)}
        masked = parties.mask(session, "node-0", zeros)["all"]
        bits.append(masked.view(np.uint8))
    counts = np.bincount(np.concatenate(bits), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("seeds", [1, 2])
def test_masks_are_uniform_and_differ(seeds: int) -> None:
    words = mask(derive(b"seed", seeds), 100_000)
    assert stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue > 1e-3
    assert not np.array_equal(words, mask(derive(b"seed", seeds + 1), 100_000))


@given(values=st.lists(st.floats(-1e6, 1e6, allow_nan=False, width=32), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_fixed_point_rounds_to_half_a_unit(values: list[float]) -> None:
    array = np.array(values)
    assert np.abs(decode(encode(array, 100)) - array).max() <= FIXED_POINT / 2


@pytest.mark.parametrize("value", [2.0**33, -(2.0**33), 1e12, np.inf, np.nan])
def test_fixed_point_never_saturates(value: float) -> None:
    with pytest.raises(InvalidInputError, match="is not below"):
        encode(np.array([0.0, value]), 1)


def test_the_limit_of_fixed_point_is_that_of_the_sum() -> None:
    encode(np.array([2.0**32]), 1)
    with pytest.raises(InvalidInputError, match="for 2 clients"):
        encode(np.array([2.0**32]), 2)
    largest = encode(np.full(3, 2.0**32 - 1), 2)
    assert decode(largest + largest).tolist() == [2.0**33 - 2] * 3


@given(
    threshold=st.integers(1, 6), extra=st.integers(0, 3), secret=st.binary(min_size=32, max_size=32)
)
@settings(max_examples=40, deadline=None)
def test_any_threshold_shares_give_the_secret(threshold: int, extra: int, secret: bytes) -> None:
    shares = shamir.split(secret, threshold, range(1, threshold + extra + 1))
    for places in combinations(shares, threshold):
        assert shamir.combine({place: shares[place] for place in places}, threshold) == secret
    with pytest.raises(ValueError, match="needed"):
        shamir.combine(dict(list(shares.items())[: threshold - 1]), threshold)


def test_fewer_shares_reveal_nothing() -> None:
    """Two shares of three have the same distribution for two very different secrets, and any third
    share leads to another secret.
    """
    samples = {}
    for secret in (bytes(32), b"\xff" * 32):
        shares = [shamir.split(secret, 3, range(1, 6)) for _ in range(2000)]
        top = [share[place] >> (521 - 4) for share in shares for place in (2, 5)]
        samples[secret] = np.bincount(top, minlength=16)
        assert stats.chisquare(samples[secret]).pvalue > 1e-3
    _, p, _, _ = stats.chi2_contingency(np.stack(list(samples.values())))
    assert p > 1e-3
    known = shamir.split(bytes(32), 3, range(1, 6))
    guesses = set()
    for third in range(200):
        try:
            guesses.add(shamir.combine({1: known[1], 2: known[2], 3: third}, 3))
        except ValueError:
            guesses.add(bytes([third]))  # a secret of more than 32 bytes
    assert len(guesses) == 200


def test_wrong_shares_are_noticed() -> None:
    shares = shamir.split(bytes(32), 2, (1, 2, 3))
    with pytest.raises(ValueError, match="one secret"):
        shamir.combine({1: shares[1], 2: shares[2] + 1}, 2)


# What a server or a party may try.


def started() -> tuple[Parties, Session, Aggregation]:
    """Five parties that have all answered."""
    parties = Parties(5)
    session = parties.session(one_group(parties))
    total = parties.aggregation(session)
    for name in parties.parties:
        total.add(name, parties.mask(session, name))
    return parties, session, total


@pytest.mark.parametrize(
    ("answered", "dropped", "text"),
    [
        ([0, 1, 2, 3, 4], [4], "both answered and dropped"),
        ([0, 1, 2, 3], [], "other parties"),
        ([0, 1, 2, 3, 4, 5], [], "other parties"),
        ([0, 1, 2], [3, 4], "only 3 parties"),
        ([1, 2, 3, 4], [0], "the own answer is missing"),
    ],
)
def test_false_lists_are_refused(answered: list[int], dropped: list[int], text: str) -> None:
    parties, session, _ = started()
    with pytest.raises(ProtocolError, match=text):
        parties.parties["node-0"].reveal(
            session.number, [f"node-{i}" for i in answered], [f"node-{i}" for i in dropped]
        )


def test_a_second_unmasking_is_refused() -> None:
    parties, session, total = started()
    party = parties.parties["node-0"]
    party.reveal(session.number, total.answered, [])
    # The attack: now the private key of node-4 as well.
    with pytest.raises(ProtocolError, match="revealed already"):
        party.reveal(session.number, total.answered[:4], ["node-4"])
    with pytest.raises(ProtocolError, match="revealed already"):
        party.reveal(session.number, total.answered, [])


def test_groups_may_be_unmasked_one_after_another() -> None:
    parties = Parties(4)
    names = list(parties.parties)
    session = parties.session({name: dict.fromkeys(names, 1) for name in ("a", "b")})
    total = parties.aggregation(session)
    for name in names[:3]:
        total.add(name, parties.mask(session, name))
    signed = parties.confirmed(names[:3], names[3:])
    for group in ("a", "b"):
        reveals = {
            name: parties.parties[name].reveal("1", names[:3], names[3:], [group], signed)
            for name in names[:3]
        }
        assert all(reveal.masks.keys() == {group} for reveal in reveals.values())
        sums = total.sums(reveals, [group])
        assert np.array_equal(sums[group], plain_sum(session, set(names[:3]))[group])
        assert sums.keys() == {group}
    with pytest.raises(ProtocolError, match="unknown groups"):
        parties.parties["node-0"].reveal("1", names[:3], names[3:], ["c"], signed)


def test_a_replayed_round_is_refused() -> None:
    parties, session, _ = started()
    with pytest.raises(ProtocolError, match="masked already"):
        parties.mask(session, "node-0")
    # With another number, but the old deals.
    with pytest.raises(ProtocolError, match="used already"):
        parties.mask(replace(session, number="2"), "node-0")


def test_the_deal_of_a_party_that_never_got_its_message_is_not_used_again() -> None:
    """Else the server would have its private key from the first round, and its self-mask from the
    second.
    """
    parties = Parties(5)
    first = parties.session(one_group(parties), "1")
    others = [name for name in parties.parties if name != "node-4"]
    for name in others:
        parties.mask(first, name)
    signed = parties.confirmed(others, ["node-4"])
    for name in others:
        parties.parties[name].reveal("1", others, ["node-4"], confirmations=signed)
    for name in others:
        parties.deals[name] = parties.parties[name].deal(parties.identities, 2)
    second = parties.session(one_group(parties), "2")
    for name in others:
        with pytest.raises(ProtocolError, match="the deal of 'node-4' was used already"):
            parties.mask(second, name)


def test_the_next_deal_does_not_change_the_threshold_of_a_round() -> None:
    """With the threshold of a party alone, the server would get all keys but that of node-4, from
    all parties, each of which assumes that only itself and node-4 answered.
    """
    parties, session, _ = started()
    for name, party in parties.parties.items():
        party.deal([party.identity()], 1)
        answered = {name, "node-4"}
        with pytest.raises(ProtocolError, match=r"only . parties answered"):
            party.reveal(session.number, answered, parties.parties.keys() - answered)


def test_different_lists_for_different_parties_reveal_no_key() -> None:
    """The server tells two parties that node-4 dropped out, and three that it answered."""
    parties, session, total = started()
    everyone = total.answered
    for name in everyone[2:]:
        parties.parties[name].reveal(session.number, everyone, [])
    lists = (session.number, everyone[:4], ["node-4"])
    signed = {name: parties.parties[name].confirm(*lists) for name in everyone[:2]}
    for name in everyone[2:4]:
        with pytest.raises(ProtocolError, match="revealed already"):
            parties.parties[name].confirm(*lists)
    signed |= {"node-2": bytes(64), "node-3": signed["node-0"], "node-9": signed["node-1"]}
    for name in everyone[:2]:
        with pytest.raises(ProtocolError, match="only 2 parties confirmed"):
            parties.parties[name].reveal(*lists, confirmations=signed)


def test_lists_that_all_differ_reveal_nothing() -> None:
    """24 parties, eight of them in a group with one client each, and no list leaves fewer than
    three there. 17 parties would reveal the key of each of seven of them, and all the mask of the
    eighth, whose vector the server would then have.
    """
    parties = Parties(24)
    names = list(parties.parties)
    target, *others = names[:8]
    session = parties.session({"all": dict.fromkeys([target, *others], 1)}, min_clients=3)
    for name in names:
        parties.mask(session, name)
    revealed = dict.fromkeys(others, 0)
    lists = {}
    for name in names:
        dropped = sorted(set(others) - {name}, key=lambda each: revealed[each])[:5]
        lists[name] = (session.number, sorted(set(names) - set(dropped)), dropped)
        revealed |= {each: revealed[each] + 1 for each in dropped}
    assert min(revealed.values()) >= threshold_of(24)
    signed = {name: parties.parties[name].confirm(*lists[name]) for name in names}
    for name in names:
        with pytest.raises(ProtocolError, match="confirmed who dropped out"):
            parties.parties[name].reveal(*lists[name], confirmations=signed)


def test_different_sessions_do_not_unmask() -> None:
    """A server that shows parties different groups gets a sum of noise."""
    parties = Parties(4)
    everyone = list(parties.parties)
    whole = parties.session(one_group(parties))
    other = parties.session({"all": dict.fromkeys(everyone, 2)})
    total = parties.aggregation(whole)
    for name in everyone:
        session = whole if name != "node-0" else other
        total.add(name, parties.mask(session, name, a_vector(whole, name)))
    reveals = {name: parties.parties[name].reveal("1", everyone, []) for name in everyone}
    assert not np.array_equal(total.sums(reveals)["all"], plain_sum(whole, set(everyone))["all"])


def _deal_of_another(parties: Parties) -> None:
    deal = parties.deals["node-1"]
    parties.deals["node-1"] = replace(deal, public_key=public_key_of(derive(b"server")))


def _unsigned_deal(parties: Parties) -> None:
    parties.deals["node-1"] = replace(parties.deals["node-1"], signature=bytes(64))


def _changed_shares(parties: Parties) -> None:
    deal = parties.deals["node-1"]
    shares = dict(deal.shares) | {"node-0": bytes(len(deal.shares["node-0"]))}
    parties.deals["node-1"] = replace(deal, shares=shares)


def _deal_to_others(parties: Parties) -> None:
    server = Party("node-5", RUN, derive(b"server"))
    more = [*parties.identities, server.identity()]
    parties.deals["node-1"] = parties.parties["node-1"].deal(more, parties.slots)


def _deal_of_another_run(parties: Parties) -> None:
    others = [Party(name, "run-0", derive(name.encode())) for name in parties.parties]
    identities = [other.identity() for other in others]
    parties.deals["node-1"] = others[1].deal(identities, parties.slots)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_deal_of_another, "no valid signature"),
        (_unsigned_deal, "no valid signature"),
        (_changed_shares, "are damaged"),
        (_deal_to_others, "dealt to other parties"),
        (_deal_of_another_run, "no valid signature"),
    ],
)
def test_false_deals_are_refused(change: Callable[[Parties], None], text: str) -> None:
    parties = Parties(5)
    change(parties)
    with pytest.raises(ProtocolError, match=text):
        parties.mask(parties.session(one_group(parties)), "node-0")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"run": "run-2"}, "another run"),
        ({"groups": {"all": {"node-0": 1, "node-9": 5}}}, "unknown parties"),
        ({"groups": {"all": {"node-0": 1}}, "min_clients": 3}, "fewer than 3 clients"),
        ({"groups": {"all": {"node-0": 3, "node-1": 0}}}, "without clients"),
        ({"deals": {f"node-{i}": 7 for i in range(5)}}, "is another one"),
        ({"public_keys": {"node-0": bytes(32)}}, "other parties than"),
    ],
)
def test_false_sessions_are_refused(changed: dict[str, Any], text: str) -> None:
    parties = Parties(5)
    session = replace(parties.session(one_group(parties)), **changed)
    with pytest.raises(ProtocolError, match=text):
        parties.mask(session, "node-0")


def test_more_groups_than_dealt_are_refused() -> None:
    parties = Parties(4, slots=1)
    groups = {name: dict.fromkeys(parties.parties, 1) for name in ("a", "b")}
    with pytest.raises(ProtocolError, match="is another one"):
        parties.mask(parties.session(groups), "node-0")


def _unsigned(identities: list[Identity]) -> list[Identity]:
    return [identities[0], replace(identities[1], signature=bytes(64)), *identities[2:]]


def _substituted(identities: list[Identity]) -> list[Identity]:
    return [identities[0], Party("node-1", RUN, derive(b"server")).identity(), *identities[2:]]


def _twice(identities: list[Identity]) -> list[Identity]:
    return [*identities, identities[1]]


def _without_own(identities: list[Identity]) -> list[Identity]:
    return identities[1:]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_unsigned, "no valid signature"),
        (_substituted, "has changed"),
        (_twice, "there twice"),
        (_without_own, "this party is missing"),
    ],
)
def test_false_identities_are_refused(
    change: Callable[[list[Identity]], list[Identity]], text: str
) -> None:
    parties = Parties(4)
    with pytest.raises(ProtocolError, match=text):
        parties.parties["node-0"].deal(change(parties.identities), 1)


def test_only_trusted_keys_are_accepted() -> None:
    others = [Party(f"node-{i}", RUN, derive(str(i).encode())) for i in range(1, 4)]
    first = Party("node-0", RUN, derive(b"0"))
    identities = [first.identity(), *(other.identity() for other in others)]
    trusted = [each.verify_key for each in identities]
    party = Party("node-0", RUN, derive(b"0"), trusted)
    party.deal([party.identity(), *identities[1:]], 1)
    invented = Party("node-2", RUN, derive(b"server")).identity()
    with pytest.raises(ProtocolError, match="'node-2' is not trusted"):
        party.deal([party.identity(), identities[1], invented, identities[3]], 1)


@pytest.mark.parametrize(
    "vectors",
    [
        {"all": np.zeros(LENGTH + 1, np.uint64)},
        {"all": np.zeros(LENGTH, np.int64)},
        {},
        {"all": np.zeros(LENGTH, np.uint64), "more": np.zeros(LENGTH, np.uint64)},
    ],
    ids=["longer", "signed", "none", "more"],
)
def test_a_party_that_lies_about_its_vector_is_refused(vectors: dict[str, Any]) -> None:
    parties = Parties(5)
    session = parties.session(one_group(parties))
    total = parties.aggregation(session)
    with pytest.raises(ProtocolError, match=r"another length|other groups"):
        total.add("node-0", vectors)
    # It counts as dropped out, and the others have their sum.
    for name in list(parties.parties)[1:]:
        total.add(name, parties.mask(session, name))
    with pytest.raises(ProtocolError, match="a second answer"):
        total.add("node-1", vectors)
    signed = parties.confirmed(total.answered, total.dropped)
    reveals = {
        name: parties.parties[name].reveal("1", total.answered, total.dropped, confirmations=signed)
        for name in total.answered
    }
    expected = plain_sum(session, set(total.answered))["all"]
    assert np.array_equal(total.sums(reveals)["all"], expected)


def test_a_party_that_reveals_false_shares_is_noticed() -> None:
    parties, session, total = started()
    reveals = {
        name: parties.parties[name].reveal(session.number, total.answered, [])
        for name in total.answered
    }
    false = {"all": {name: share + 1 for name, share in reveals["node-0"].masks["all"].items()}}
    with pytest.raises(ProtocolError, match="do not fit"):
        total.sums(reveals | {"node-0": Reveal(false, {})})
    parties = Parties(5)
    session = parties.session(one_group(parties))
    total = parties.aggregation(session)
    for name in list(parties.parties)[:4]:
        total.add(name, parties.mask(session, name))
    signed = parties.confirmed(total.answered, total.dropped)
    reveals = {
        name: parties.parties[name].reveal("1", total.answered, total.dropped, confirmations=signed)
        for name in total.answered
    }
    false_key = replace(reveals["node-0"], keys={"node-4": reveals["node-0"].keys["node-4"] + 1})
    with pytest.raises(ProtocolError, match="do not fit"):
        total.sums(reveals | {"node-0": false_key})
    assert not total.is_complete(Reveal({}, {}))


def test_shares_of_the_next_round_cannot_be_opened_with_those_of_this_one() -> None:
    """Keys are new in every round: what is revealed of a party says nothing about the next."""
    parties = Parties(5)
    first = parties.session(one_group(parties), "1")
    parties.run(first, silent={"node-4"})
    old: dict[str, Deal] = dict(parties.deals)
    parties.deals = {
        name: party.deal(parties.identities, 1) for name, party in parties.parties.items()
    }
    assert all(old[name].public_key != deal.public_key for name, deal in parties.deals.items())
    second = parties.session(one_group(parties), "2")
    assert np.array_equal(
        parties.run(second)["all"], plain_sum(second, set(parties.parties))["all"]
    )
