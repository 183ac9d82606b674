"""What the tests of linear layers that are spread over a group have in common."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import fusedpg


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Block(nn.Module):
    """Attention and MLP in the way that plans for transformers expect."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.head = heads, width // heads
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6, dtype=dtype) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, dtype=dtype) for _ in range(4))
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
