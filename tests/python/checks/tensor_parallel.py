"""What the tests of linear layers that are spread over a group have in common."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fusedpg
from fuzz.layers import agree, whole_of

BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def close(got: Any, want: Any, what: str, dtype: torch.dtype) -> None:
    """Of plain tensors or DTensors, as near as the type lets sums of some hundred products be."""
    got, want = whole_of(got), whole_of(want)
    agree(got, want, want, BOUNDS[dtype], what)


class Block(nn.Module):
    """Attention and MLP in the way that plans for transformers expect; heads have 8 features."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = 8
        self.norm1 = nn.RMSNorm(width, eps=1e-6, dtype=dtype)
        self.norm2 = nn.LayerNorm(width, dtype=dtype)
        inside = heads * self.head
        self.q, self.k, self.v = (nn.Linear(width, inside, dtype=dtype) for _ in range(3))
        self.o = nn.Linear(inside, width, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if isinstance(self.o, fusedpg.RowParallelLinear):
            x = self.o(z, x)
            return self.down(F.silu(self.up(self.norm2(x))), x)
        x = x + self.o(z)
        return x + self.down(F.silu(self.up(self.norm2(x))))
