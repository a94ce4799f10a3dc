"""Keys and masks: X25519, HKDF-SHA256 and AES-256 in counter mode, of the package cryptography."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedclade.privacy.secure_sum.fixed_point import Words

KEY_BYTES = 32


def packed_text(*parts: str | int | bytes) -> bytes:
    """The parts as bytes, each with its length, so that no two lists give the same bytes."""
    data = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in data)


def derive(secret: bytes, *info: str | int | bytes) -> bytes:
    """A key of 32 bytes for one purpose.

    Args:
        secret: the secret of which the key is made.
        info: the purpose: run, round, both parties and what the key is for.
    """
    hkdf = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=packed_text("fedclade", *info))
    return hkdf.derive(secret)


def shared_secret(private_key: bytes, public_key: bytes) -> bytes:
    """What the owners of two key pairs have in common. A public key that gives 0 is a
    `ValueError`.
    """
    own = X25519PrivateKey.from_private_bytes(private_key)
    return own.exchange(X25519PublicKey.from_public_bytes(public_key))


def public_key_of(private_key: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def mask(seed: bytes, length: int) -> Words:
    """Uniform words from a seed that is used for nothing else.

    Args:
        seed: 32 bytes.
        length: the number of words.
    """
    stream = Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), "<u8").astype(np.uint64)
