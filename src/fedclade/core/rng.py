"""Randomness as data: every random number is a hash of its purpose.

On the server a key is an integer, and `fold_in` makes a new key for each purpose and round. On the
device a key is a tensor of 32-bit numbers, one per client, hashed with counters (epoch, step,
position). No client's number is drawn from a generator, so it depends neither on the order of the
clients nor on the other clients, and is the same on every device.
"""

from __future__ import annotations

import math
from functools import cache
from hashlib import blake2b
from operator import index
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTORS = (0x21F0AAAD, 0x735A2D97)


def fold_in(key: int, *purpose: int | str) -> int:
    """The key for a purpose: `fold_in(seed, "cohort", round)`."""
    text = "\0".join(
        [
            str(key),
            *(f"str:{part}" if isinstance(part, str) else f"int:{index(part)}" for part in purpose),
        ]
    )
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _scramble(bits: Any) -> Any:
    """A bijection on 32-bit numbers, a tensor of them or a plain one, in which every input bit
    moves about half of the output bits.

    Multiply-xorshift; both factors are below 2**31, so that the products fit into int64 exactly.
    """
    bits = bits ^ (bits >> 16)
    bits = (bits * _FACTORS[0]) & _MASK
    bits = bits ^ (bits >> 15)
    bits = (bits * _FACTORS[1]) & _MASK
    return bits ^ (bits >> 15)


Bits = TypeVar("Bits", Tensor, NDArray[np.int64], int)


def hash_bits(key: Bits, counter: Tensor | int) -> Bits:
    """32 random bits for each pair of a key and a counter."""
    # A plain number stays one: made a tensor it would have to be copied to the device, which a CUDA
    # graph cannot hold.
    return hash_with(key, _scrambled(counter))


def _scrambled(counter: Any) -> Any:
    return _scramble((counter + 0x9E3779B9) & _MASK)


def hash_with(key: Bits, scrambled: Tensor | int) -> Bits:
    mixed: Bits = _scramble(key ^ scrambled)
    return mixed


def counter_block(count: int, first: int, device: torch.device) -> Tensor:
    """The counters first … first + count - 1, scrambled for `hash_with` and cached: every plan of a
    run needs the same ones.
    """
    return _counters(max(1, count - 1).bit_length(), first, device)[:count]


@cache  # never freed: CUDA graphs keep their addresses
def _counters(bits: int, first: int, device: torch.device) -> Tensor:
    scrambled: Tensor = _scrambled(torch.arange(first, first + (1 << bits), device=device))
    return scrambled


def client_keys(key: int, ids: Bits) -> Bits:
    """One key per client from the server's key. `ids` may be a tensor or an array."""
    high, low = key >> 32, key & _MASK
    return hash_bits(hash_bits(ids, high), low)


def bernoulli(key: Tensor, probability: float, shape: tuple[int, ...]) -> Tensor:
    """True with this probability, for each place of this shape.

    The bits are those of `uniform`, which is below the probability where this is true. They are
    computed with 32-bit integers, in a third of the time.

    Args:
        key: a single key, or one per client under vmap.
        probability: the probability.
        shape: the shape of the result.
    """
    count = math.prod(shape)
    key = key.to(torch.int32)  # the hash wraps around in 32 bits
    bits = _counters32(count, key.device) ^ key
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * _FACTORS[0]
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * _FACTORS[1]
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    return (((bits >> 8) & 0xFFFFFF) < math.ceil(probability * 2**24)).reshape(shape)


def dropout_factors(key: int, probability: float, shape: tuple[int, ...]) -> Tensor:
    """0 with this probability, else 1 / (1 - probability), for each place of this shape: what
    dropout multiplies the values of one client with. The zeros are where `bernoulli` is true.

    On the CPU this takes a quarter of the time of `bernoulli` and `masked_fill`: numpy has unsigned
    integers, each block stays in the cache, and a gradient is one product.

    Args:
        key: the key.
        probability: the probability, above 0 and below 1.
        shape: the shape of the result.
    """
    count = math.prod(shape)
    counters = _counters32(count, torch.device("cpu")).numpy().view(np.uint32)
    factors = np.empty(count, np.float32)
    bits_buffer, shifted_buffer = np.empty((2, min(count, _BLOCK)), np.uint32)
    first, second = (np.uint32(factor) for factor in _FACTORS)
    last_dropped = np.uint32((math.ceil(probability * 2**24) << 8) - 1)
    scale = np.float32(1 / (1 - probability))
    for begin in range(0, count, _BLOCK):
        block = factors[begin : begin + _BLOCK]
        bits, shifted = bits_buffer[: len(block)], shifted_buffer[: len(block)]
        np.bitwise_xor(counters[begin : begin + _BLOCK], np.uint32(key & _MASK), out=bits)
        bits ^= np.right_shift(bits, 16, out=shifted)
        bits *= first
        bits ^= np.right_shift(bits, 15, out=shifted)
        bits *= second
        bits ^= np.right_shift(bits, 15, out=shifted)
        np.copyto(block, bits > last_dropped)
        block *= scale
    return torch.from_numpy(factors).view(shape)


_BLOCK = 2**16
_CACHED_COUNTERS = 2**22


def _counters32(count: int, device: torch.device) -> Tensor:
    """The counters 0 … count - 1, scrambled, as 32-bit integers."""
    if count <= _CACHED_COUNTERS:
        return _cached_counters32(max(1, count - 1).bit_length(), device)[:count]
    scrambled: Tensor = _scrambled(torch.arange(count, device=device))
    return scrambled.to(torch.int32)


@cache  # never freed: CUDA graphs keep their addresses
def _cached_counters32(bits: int, device: torch.device) -> Tensor:
    scrambled: Tensor = _scrambled(torch.arange(1 << bits, device=device))
    return scrambled.to(torch.int32)


def uniform(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers in [0, 1) of this shape. `key` is a single key, or one per client under
    vmap.
    """
    bits = hash_bits(key, torch.arange(math.prod(shape), device=key.device))
    return ((bits >> 8).to(torch.float32) * 2.0**-24).reshape(shape)
