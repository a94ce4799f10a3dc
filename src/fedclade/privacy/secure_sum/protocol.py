"""The protocol of a secure sum, as state machines without any transport.

The parties are nodes. A node adds the vectors of its own clients, and masks the sum:

    y_u,g = x_u,g + mask(b_u,g) + Σ_{v > u} mask(s_uv,g) - Σ_{v < u} mask(s_uv,g)   mod 2^64

for each group g of clients that are summed. s_uv,g comes from the parties' key pairs of this round
(X25519), b_u,g from u alone. Pairwise masks cancel in the sum over the parties of a group. For the
others, each party has dealt Shamir shares of its private key and of its b_u,g to all parties.

Before a round each party deals (`Party.deal`): a new public key, and encrypted shares. In the round
there are two exchanges: `Party.mask`, then `Party.reveal`, in which a party reveals its shares of
b_v,g of each v that answered, or of the private key of each v that did not, never of both. If a
party did not answer, the others first sign the list of those that dropped out (`Party.confirm`):
keys are revealed only if more than two thirds have the same list. The deal of the next round
travels with the answer of `mask`, so keys cost no exchange of their own.

The protocol is that of Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine
Learning, CCS 2017, with keys that are dealt one round ahead.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedclade.errors import FedcladeError
from fedclade.privacy.secure_sum import shamir
from fedclade.privacy.secure_sum.fixed_point import Words
from fedclade.privacy.secure_sum.masks import (
    derive,
    mask,
    packed_text,
    public_key_of,
    shared_secret,
)

MAX_PARTIES, MAX_SLOTS = 10_000, 1_000
Groups: TypeAlias = dict[str, dict[str, int]]
"""For each group, the number of clients that each party has in it."""
_NONCE = bytes(12)  # every key encrypts one message


class ProtocolError(FedcladeError):
    """A message that breaks the rules of the protocol."""

    def __init__(self, text: str) -> None:
        super().__init__(f"secure sum: {text}", "privacy.secure_sum")


def threshold_of(parties: int) -> int:
    """The number of parties whose shares give a secret: more than two thirds.

    A server that tells some parties that v answered, and others that it did not, gets both secrets
    of v only if 2 · threshold shares can be had from `parties` parties. With more than two thirds
    that fails even if up to a third of the parties help the server. Fewer than a third may drop
    out.
    """
    return 2 * parties // 3 + 1


@dataclass(frozen=True)
class Identity:
    """A party's keys of a run.

    Args:
        name: the party.
        verify_key: the Ed25519 key of its signatures.
        encryption_key: the X25519 key with which shares are encrypted for it.
        signature: of run, name and encryption key.
    """

    name: str
    verify_key: bytes
    encryption_key: bytes
    signature: bytes


@dataclass(frozen=True)
class Deal:
    """What a party hands out before a round.

    Args:
        name: the party.
        number: the number of the deal; a party uses each once.
        public_key: its X25519 key of the round.
        commitments: the hash of each self-mask's seed; one for each group that it may be in.
        directory: a hash of the identities that it has dealt to.
        shares: the encrypted shares for each party. Only the dealer and that party have their key,
            so they need no signature, and a party needs only its own.
        signature: of everything else and the run.
    """

    name: str
    number: int
    public_key: bytes
    commitments: tuple[bytes, ...]
    directory: bytes
    shares: Mapping[str, bytes]
    signature: bytes

    def signed_text(self, run: str) -> bytes:
        head = (self.name, self.number, self.public_key, self.directory)
        return packed_text("deal", run, *head, *self.commitments)


@dataclass(frozen=True)
class Session:
    """One sum. All parties must get the same; else their masks do not cancel.

    Args:
        run: the run.
        number: the round, and the call in it.
        groups: the parties and their numbers of clients, by group.
        public_keys: the public key of each party that takes part, with or without clients.
        deals: the number of the deal of each party.
        min_clients: the least number of clients in a sum.
    """

    run: str
    number: str
    groups: Groups
    public_keys: Mapping[str, bytes]
    deals: Mapping[str, int]
    min_clients: int

    def digest(self) -> bytes:
        parts: list[str | int | bytes] = [self.run, self.number, self.min_clients]
        for group in sorted(self.groups):
            members = self.groups[group]
            parts += [group, len(members)]
            for name in sorted(members):
                parts += [name, members[name]]
        for name in sorted(self.public_keys):
            parts += [name, self.public_keys[name], self.deals[name]]
        return hashlib.sha256(packed_text(*parts)).digest()

    def slot_of(self, name: str, group: str) -> int:
        """The number of a group among those of a party."""
        own = sorted(each for each, members in self.groups.items() if name in members)
        return own.index(group)


@dataclass(frozen=True)
class Reveal:
    """The shares that a party reveals.

    Args:
        masks: its share of b_v,g, by group g and party v.
        keys: its share of the private key of v.
    """

    masks: Mapping[str, Mapping[str, int]]
    keys: Mapping[str, int]


@dataclass
class _Dealt:
    """The secrets of a party's own deal."""

    private_key: bytes
    seeds: list[bytes]


@dataclass
class _Round:
    """What a party remembers of a round, until it has revealed."""

    session: Session
    verify_keys: dict[str, bytes]  # of all parties to which its deals were dealt
    shares: dict[str, list[int]]  # those that each party dealt to this one
    lists: tuple[frozenset[str], frozenset[str]] | None = None  # who answered, who did not
    revealed: set[str] = field(default_factory=set)  # the groups


class Party:
    """A node in the protocol.

    Args:
        name: its name.
        run: the run.
        signing_key: its Ed25519 key, 32 bytes.
        trusted: the Ed25519 keys of all parties; None to trust the keys that the server sends
            first, which protects against a curious server, not against one that invents parties.
    """

    def __init__(
        self,
        name: str,
        run: str,
        signing_key: bytes,
        trusted: Collection[bytes] | None = None,
    ) -> None:
        self.name, self.run, self._trusted = name, run, trusted
        self._signer = Ed25519PrivateKey.from_private_bytes(signing_key)
        self._encryption_key = secrets.token_bytes(32)
        self._identities: dict[str, Identity] = {}
        self._dealt: dict[int, _Dealt] = {}
        self._next_deal = 0
        self._rounds: dict[str, _Round] = {}
        self._used: set[str] = set()
        # For each encryption key of a party, its last deal that was in a round.
        self._last_deals: dict[bytes, int] = {}

    def identity(self) -> Identity:
        """The keys of this party."""
        key = public_key_of(self._encryption_key)
        signature = self._signer.sign(packed_text("identity", self.run, self.name, key))
        verify_key = self._signer.public_key().public_bytes_raw()
        return Identity(self.name, verify_key, key, signature)

    def deal(self, identities: Sequence[Identity], slots: int) -> Deal:
        """Deal the secrets of a next round to all parties.

        Args:
            identities: all parties of the run.
            slots: the largest number of groups in which this party will have clients.
        """
        self._accept(identities)
        _require(1 <= slots <= MAX_SLOTS, f"{slots} groups of one party")
        own = _Dealt(secrets.token_bytes(32), [secrets.token_bytes(32) for _ in range(slots)])
        number, self._next_deal = self._next_deal, self._next_deal + 1
        # An older deal that was never used is forgotten.
        self._dealt = {number: own}
        names = sorted(self._identities)
        threshold = threshold_of(len(names))
        places = range(1, len(names) + 1)
        parts = [
            shamir.split(secret, threshold, places) for secret in (own.private_key, *own.seeds)
        ]
        shares = {}
        for place, holder in zip(places, names, strict=True):
            plain = b"".join(part[place].to_bytes(shamir.SHARE_BYTES, "big") for part in parts)
            key = self._share_key(self.name, holder, number, own=holder)
            shares[holder] = ChaCha20Poly1305(key).encrypt(_NONCE, plain, None)
        deal = Deal(
            self.name,
            number,
            public_key_of(own.private_key),
            tuple(_commitment(seed) for seed in own.seeds),
            _directory(self._identities.values()),
            shares,
            b"",
        )
        signature = self._signer.sign(deal.signed_text(self.run))
        return Deal(**{**vars(deal), "signature": signature})

    def mask(
        self, session: Session, deals: Sequence[Deal], vectors: Mapping[str, Words]
    ) -> dict[str, Words]:
        """The masked vectors, for the first exchange of a round.

        Args:
            session: the sum.
            deals: the deals of all parties that take part.
            vectors: the sum of the own clients' vectors, by group.
        """
        _require(session.run == self.run, "another run")
        _require(session.number not in self._used, f"round {session.number} was masked already")
        self._check(session, deals)
        number = session.deals.get(self.name, -1)
        _require(number in self._dealt, "the own deal is unknown or was used already")
        own_groups = {name for name, members in session.groups.items() if self.name in members}
        _require(own_groups == set(vectors), "groups without a vector, or vectors without a group")
        shares = {
            deal.name: self._opened(deal.name, session, deal.shares[self.name]) for deal in deals
        }
        self._used.add(session.number)
        for name, used in session.deals.items():
            self._last_deals[self._identities[name].encryption_key] = used
        dealt = self._dealt.pop(number)
        others = [name for name in session.public_keys if name != self.name]
        secret_of = {
            name: shared_secret(dealt.private_key, session.public_keys[name]) for name in others
        }
        digest, result = session.digest(), {}
        for group, vector in vectors.items():
            total = vector + mask(dealt.seeds[session.slot_of(self.name, group)], len(vector))
            for name in others:
                if name in session.groups[group]:
                    low, high = sorted((self.name, name))
                    seed = pair_seed(secret_of[name], session, digest, low, high, group)
                    words = mask(seed, len(vector))
                    total = total + words if name == high else total - words
            result[group] = total
        # The next deal may be for other parties, and must not change this round's threshold.
        keys = {name: each.verify_key for name, each in self._identities.items()}
        self._rounds = {session.number: _Round(session, keys, shares)}
        return result

    def confirm(self, number: str, answered: Iterable[str], dropped: Iterable[str]) -> bytes:
        """The signature of who dropped out, for an exchange before `reveal` if somebody did. A
        party signs one list in a round.

        Args:
            number: the session.
            answered: the parties whose masked vectors are in the sum.
            dropped: the parties that did not answer.
        """
        state, _, gone = self._with_lists(number, answered, dropped)
        return self._signer.sign(_dropped_text(state.session, gone))

    def reveal(
        self,
        number: str,
        answered: Iterable[str],
        dropped: Iterable[str],
        groups: Iterable[str] | None = None,
        confirmations: Mapping[str, bytes] | None = None,
    ) -> Reveal:
        """The shares that unmask the sums of these groups, for the second exchange of a round. Each
        group is revealed once, and always for the same parties.

        Args:
            number: the session.
            answered: the parties whose masked vectors are in the sum.
            dropped: the parties that did not answer.
            groups: the groups; None for all. Those with too few clients are left out.
            confirmations: what `confirm` of the parties returned; needed if some dropped out.
        """
        state, present, gone = self._with_lists(number, answered, dropped)
        here = state.session
        if gone:
            # Two lists cannot both have that number. Else a server could get the keys of a group.
            text = _dropped_text(here, gone)
            valid = [
                name
                for name, signature in (confirmations or {}).items()
                if name in present and _is_signed(state.verify_keys[name], signature, text)
            ]
            least = threshold_of(len(state.verify_keys))
            _require(len(valid) >= least, f"only {len(valid)} parties confirmed who dropped out")
        wanted = set(here.groups) if groups is None else set(groups)
        _require(wanted <= here.groups.keys(), "unknown groups")
        _require(not wanted & state.revealed, "a group that was revealed already")
        state.revealed |= wanted
        masks = {}
        for group in wanted:
            members = [name for name in here.groups[group] if name in present]
            if sum(here.groups[group][name] for name in members) >= here.min_clients:
                masks[group] = {
                    name: state.shares[name][1 + here.slot_of(name, group)] for name in members
                }
        return Reveal(masks, {name: state.shares[name][0] for name in gone})

    def _with_lists(
        self, number: str, answered: Iterable[str], dropped: Iterable[str]
    ) -> tuple[_Round, frozenset[str], frozenset[str]]:
        """The round, and who answered in it and who did not; never other lists than the first."""
        _require(number in self._rounds, f"round {number} is unknown")
        state = self._rounds[number]
        here, lists = state.session, (frozenset(answered), frozenset(dropped))
        present, gone = lists
        _require(not present & gone, "a party that both answered and dropped out")
        _require(present | gone == set(here.public_keys), "other parties than in this round")
        threshold = threshold_of(len(state.verify_keys))
        _require(len(present) >= threshold, f"only {len(present)} parties answered")
        _require(self.name in present, "the own answer is missing")
        _require(state.lists in (None, lists), "other parties than when it was revealed already")
        state.lists = lists
        return state, present, gone

    def _accept(self, identities: Sequence[Identity]) -> None:
        """Check the identities, and keep them for the run."""
        names = [each.name for each in identities]
        _require(len(set(names)) == len(names) <= MAX_PARTIES, "a party is there twice")
        _require(self.name in names, "this party is missing")
        keys = {each.verify_key for each in identities}
        _require(len(keys) == len(names), "two parties have one key")
        for each in identities:
            text = packed_text("identity", self.run, each.name, each.encryption_key)
            _verify(each.verify_key, each.signature, text, each.name)
            if self._trusted is not None:
                trusted = each.verify_key in self._trusted
                _require(trusted, f"the key of {each.name!r} is not trusted")
            known = self._identities.get(each.name)
            _require(
                known is None or known.verify_key == each.verify_key,
                f"the key of {each.name!r} has changed",
            )
            if each.name == self.name:
                _require(each == self.identity(), "the own keys were replaced")
        self._identities = {each.name: each for each in identities}

    def _check(self, session: Session, deals: Sequence[Deal]) -> None:
        """Check that the session is that of these deals, and hides every client in a sum."""
        by_name = {deal.name: deal for deal in deals}
        _require(len(by_name) == len(deals), "two deals of one party")
        _require(
            by_name.keys() == session.public_keys.keys() == session.deals.keys(),
            "deals of other parties than those of the round",
        )
        _require(self.name in by_name, "this party is missing")
        directory = _directory(self._identities.values())
        slots = dict.fromkeys(by_name, 0)
        for group, members in session.groups.items():
            _require(members.keys() <= by_name.keys(), f"unknown parties in group {group}")
            _require(min(members.values(), default=1) > 0, "a party without clients in a group")
            _require(
                sum(members.values()) >= session.min_clients,
                f"group {group} has fewer than {session.min_clients} clients",
            )
            for name in members:
                slots[name] += 1
        for name, deal in by_name.items():
            _require(name in self._identities, f"unknown party {name!r}")
            _verify(
                self._identities[name].verify_key,
                deal.signature,
                deal.signed_text(self.run),
                name,
            )
            _require(deal.directory == directory, f"{name!r} dealt to other parties")
            # If a party never got its message of a round, the others revealed its key of that deal.
            last = self._last_deals.get(self._identities[name].encryption_key, -1)
            _require(deal.number > last, f"the deal of {name!r} was used already")
            _require(
                deal.public_key == session.public_keys[name]
                and deal.number == session.deals[name]
                and slots[name] <= len(deal.commitments),
                f"the deal of {name!r} is another one",
            )
            _require(self.name in deal.shares, f"no share from {name!r}")

    def _share_key(self, dealer: str, holder: str, number: int, own: str) -> bytes:
        """The key of the shares that `dealer` encrypts for `holder`.

        Args:
            dealer: the party that deals.
            holder: the party that gets the shares.
            number: the number of the deal.
            own: which of the two is not this party; for its own shares either.
        """
        secret = shared_secret(self._encryption_key, self._identities[own].encryption_key)
        return derive(secret, "share", self.run, dealer, holder, number)

    def _opened(self, dealer: str, session: Session, encrypted: bytes) -> list[int]:
        """The shares that a party dealt to this one: of its key, then of its self-masks."""
        key = self._share_key(dealer, self.name, session.deals[dealer], own=dealer)
        try:
            plain = ChaCha20Poly1305(key).decrypt(_NONCE, encrypted, None)
        except InvalidTag as error:
            raise ProtocolError(f"the shares of {dealer!r} are damaged") from error
        size = shamir.SHARE_BYTES
        return [
            int.from_bytes(plain[start : start + size], "big")
            for start in range(0, len(plain), size)
        ]


class Aggregation:
    """The server's side of one sum.

    Args:
        session: the sum.
        deals: the deals of the parties that take part.
        parties: the names of all parties of the run, to which shares were dealt.
        lengths: the length of the vectors of each group.
    """

    def __init__(
        self,
        session: Session,
        deals: Iterable[Deal],
        parties: Sequence[str],
        lengths: Mapping[str, int],
    ) -> None:
        self.session, self._parties, self._lengths = session, sorted(parties), lengths
        self._commitments = {deal.name: deal.commitments for deal in deals}
        self._masked: dict[str, dict[str, Words]] = {}

    @property
    def answered(self) -> list[str]:
        return sorted(self._masked)

    @property
    def dropped(self) -> list[str]:
        return sorted(self.session.public_keys.keys() - self._masked.keys())

    def is_complete(self, reveal: Reveal, groups: Iterable[str] | None = None) -> bool:
        """Whether a party revealed all shares that the sums of these groups need."""
        return set(self.dropped) <= reveal.keys.keys() and all(
            set(present) <= reveal.masks.get(group, {}).keys()
            for group, present in self._present(groups).items()
        )

    def _present(self, groups: Iterable[str] | None = None) -> dict[str, list[str]]:
        """The parties whose vectors are in the sum of each group that has enough clients."""
        wanted = set(self.session.groups) if groups is None else set(groups)
        present = {
            group: [name for name in members if name in self._masked]
            for group, members in self.session.groups.items()
            if group in wanted
        }
        return {
            group: names
            for group, names in present.items()
            if sum(self.session.groups[group][name] for name in names) >= self.session.min_clients
        }

    def add(self, name: str, masked: Mapping[str, Words]) -> None:
        """Take the masked vectors of a party. Malformed ones are a `ProtocolError`, and the party
        counts as dropped out.
        """
        own = {group for group, members in self.session.groups.items() if name in members}
        _require(name in self.session.public_keys, f"{name!r} does not take part")
        _require(name not in self._masked, f"a second answer of {name!r}")
        _require(own == masked.keys(), f"{name!r} has other groups")
        for group, vector in masked.items():
            _require(
                vector.dtype == np.uint64 and vector.shape == (self._lengths[group],),
                f"a vector of {name!r} has another length",
            )
        self._masked[name] = dict(masked)

    def sums(
        self, reveals: Mapping[str, Reveal], groups: Iterable[str] | None = None
    ) -> dict[str, Words]:
        """The sum over the parties that answered, for each group with enough clients.

        Args:
            reveals: what the parties revealed, complete.
            groups: the groups; None for all.
        """
        threshold = threshold_of(len(self._parties))
        _require(
            min(len(self._masked), len(reveals)) >= threshold,
            f"{len(self._masked)} parties answered and {len(reveals)} revealed their shares;"
            f" {threshold} of {len(self._parties)} are needed",
        )
        place = {name: number for number, name in enumerate(self._parties, start=1)}
        digest, result = self.session.digest(), {}
        private_keys = {
            name: _combined(
                {place[holder]: reveal.keys[name] for holder, reveal in reveals.items()},
                threshold,
                name,
            )
            for name in self.dropped
        }
        for name, key in private_keys.items():
            _require(
                public_key_of(key) == self.session.public_keys[name],
                f"the shares of {name!r} do not fit",
            )
        for group, present in self._present(groups).items():
            members, length = self.session.groups[group], self._lengths[group]
            total = np.zeros(length, np.uint64)
            for name in present:
                shares = {
                    place[holder]: reveal.masks[group][name] for holder, reveal in reveals.items()
                }
                seed = _combined(shares, threshold, name)
                slot = self.session.slot_of(name, group)
                _require(
                    _commitment(seed) == self._commitments[name][slot],
                    f"the shares of {name!r} do not fit",
                )
                total = total + self._masked[name][group] - mask(seed, length)
                for gone, key in private_keys.items():
                    if gone in members:
                        low, high = sorted((name, gone))
                        secret = shared_secret(key, self.session.public_keys[name])
                        seed = pair_seed(secret, self.session, digest, low, high, group)
                        words = mask(seed, length)
                        total = total - words if gone == high else total + words
            result[group] = total
        return result


def pair_seed(
    secret: bytes, session: Session, digest: bytes, low: str, high: str, group: str
) -> bytes:
    """The seed of the mask that two parties have in common in a group.

    Args:
        secret: what their key pairs have in common.
        session: the sum.
        digest: its digest.
        low: the party whose name is first in the alphabet.
        high: the other party.
        group: the group.
    """
    return derive(secret, "pair", session.run, session.number, low, high, group, digest)


def _combined(shares: Mapping[int, int], threshold: int, name: str) -> bytes:
    try:
        return shamir.combine(shares, threshold)
    except ValueError as error:
        raise ProtocolError(f"the shares of {name!r} do not fit ({error})") from error


def _commitment(seed: bytes) -> bytes:
    return hashlib.sha256(packed_text("commitment", seed)).digest()


def _directory(identities: Iterable[Identity]) -> bytes:
    ordered = sorted(identities, key=lambda each: each.name)
    parts = [part for i in ordered for part in (i.name, i.verify_key, i.encryption_key)]
    return hashlib.sha256(packed_text(*parts)).digest()


def _dropped_text(session: Session, dropped: Iterable[str]) -> bytes:
    return packed_text("dropped", session.digest(), *sorted(dropped))


def _is_signed(key: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def _verify(key: bytes, signature: bytes, text: bytes, name: str) -> None:
    _require(_is_signed(key, signature, text), f"a key of {name!r} has no valid signature")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ProtocolError(text)
