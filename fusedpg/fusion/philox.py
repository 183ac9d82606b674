"""Philox4x32-10 (Salmon et al. 2011): random bits as a function of seed and element index."""

from __future__ import annotations

import math

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
# Elements on a CPU.
_AT_ONCE = 1 << 16


def _multiply(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of a product of 32-bit words; an int64 that overflows keeps its bits."""
    product = word * factor
    return (product >> 32) & _MASK, product & _MASK


def words(seed: int, begin: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The 32-bit words (in int64) of the elements `begin` to `begin + count`.

    Element i has word i % 4 of the block whose counter is (i // 4, 0) and whose key is the seed.
    So it does not depend on who computes it, nor on what else is computed.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed is a number from 0 to 2^64 - 1, got {seed}")
    first = begin // 4
    blocks = torch.arange(first, (begin + count + 3) // 4, dtype=torch.int64, device=device)
    counter = [blocks & _MASK, (blocks >> 32) & _MASK]
    counter += [torch.zeros_like(blocks), torch.zeros_like(blocks)]
    key = [seed & _MASK, seed >> 32]
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], counter[0])
        high1, low1 = _multiply(_MULTIPLIERS[1], counter[2])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + _WEYL[0]) & _MASK, (key[1] + _WEYL[1]) & _MASK]
    return torch.stack(counter, dim=1).flatten()[begin - 4 * first :][:count]


def kept(p: float, seed: int, begin: int, count: int, device: torch.device) -> torch.Tensor:
    """Which elements dropout keeps: those whose upper 24 bits are at least p * 2^24."""
    least = math.ceil(p * (1 << 24))
    if device.type != "cpu" or count <= _AT_ONCE:
        return (words(seed, begin, count, device) >> 8) >= least
    # A dozen passes over int64: part by part, in the cache, they take a third of the time.
    found = torch.empty(count, dtype=torch.bool, device=device)
    for first in range(0, count, _AT_ONCE):
        part = found[first : first + _AT_ONCE]
        torch.ge(words(seed, begin + first, part.numel()) >> 8, least, out=part)
    return found
