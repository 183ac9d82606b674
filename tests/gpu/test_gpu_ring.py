"""The ring of a patched NCCL, in place of torch's by LD_PRELOAD, with each of NCCL's protocols."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checks import optim as trained
from checks.fused_ops import BF16, FP16, FP32, Run
from gpu_checks import ring
from gpu_checks.device import FAKE
from ranks import Ranks, fresh, pool

pytestmark = pytest.mark.timeout(900)

# The fake NCCL has none.
PROTOCOLS = ("Simple",) if FAKE else ("Simple", "LL", "LL128")
TYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
HALF = (BF16, FP16)
# A large eps: three ranks' half sums depend on their order, and what is left of gradients that
# cancel is not to decide over a whole step. A large step: what is left out must show.
HYPERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "sgd": (("lr", 0.05),),
    "adam": (("lr", 0.05), ("eps", 1.0)),
    "adamw": (("lr", 0.05), ("eps", 1.0)),
    "lamb": (("lr", 0.05), ("eps", 1.0)),
}
ROUND = 32 * 2 * 3  # a multiple of it has no padding between the ranks' parts
PoolOf = Callable[[], Ranks]


def agree(answers: list[str]) -> None:
    assert len(set(answers)) == 1, "ranks hold different parameters"


@functools.cache
def refusal() -> str:
    with fresh(2) as workers:
        return str(workers.run(ring.refusal, timeout=200)[0])


@pytest.fixture(
    scope="module",
    params=[(size, protocol) for size in (2, 3) for protocol in PROTOCOLS],
    ids=lambda param: f"world{param[0]}-{param[1]}",
)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, PoolOf]]:
    """A name, and the ranks: new ones where a test has broken the last."""
    if refusal():
        pytest.skip(f"no patched NCCL: {refusal()}")
    size, protocol = request.param
    ranks = functools.partial(pool, size, NCCL_PROTO=protocol)
    yield f"{size} {protocol}", ranks
    # So many processes would fill a GPU with their contexts and buffers.
    ranks().workers.close()


def draw_sizes(rng: random.Random) -> list[tuple[list[int], int]]:
    """Lists of numbers of elements, with the bytes that the engine sends at once (0: default)."""

    def below(bound: int) -> int:
        """Of all magnitudes alike."""
        return int(2 ** rng.uniform(0, bound.bit_length() - 1))

    tiny = [rng.randint(1, 64) for _ in range(6)]
    odd = [below(1 << 15) | 1 for _ in range(6)]
    even = [ROUND * below(500) for _ in range(4)]
    # More than NCCL takes at once.
    large = [below(1000), rng.randint(1 << 20, 3 << 20), below(1 << 18)]
    return [(tiny, 4096), (odd, 4096), (even, 1 << 16), (large, 0)]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("op", HYPERS)
def test_random_sizes(place: tuple[str, PoolOf], op: str, kind: str) -> None:
    name, ranks = place
    dtype = TYPES[kind]
    rng = random.Random(f"{name} {op} {kind}")
    for sizes, chunk_bytes in draw_sizes(rng):
        shapes = tuple((size,) for size in sizes)
        master = dtype in HALF and rng.random() < 0.5
        run = Run(op, HYPERS[op], shapes, 3, (dtype,), master=master, ring=True)
        agree(ranks().run(ring.parity, run, chunk_bytes))


@pytest.mark.parametrize("first", ring.PATHS)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_checkpoint_changes_path(place: tuple[str, PoolOf], name: str, first: str) -> None:
    _, ranks = place
    options = {} if name == "SGD" else {"eps": 1e-3}
    run = trained.Run(name, "manual", options=options)
    agree(ranks().run(ring.changes_path, run, first, 4e-6))
    halves = trained.Run(
        name, "manual", dtypes=("bfloat16",), options=options, ours={"master_dtype": torch.float32}
    )
    agree(ranks().run(ring.changes_path, halves, first, 6e-3))
