"""Fused optimizers with a compressing communication hook, in random ways."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

import harness
from checks.comm_hook_fuzz import Case, Step, train

pytestmark = pytest.mark.fused_only

PAIRS = (
    ("topk", "none"), ("topk", "residual"), ("topk", "dgc"), ("topk", "efsignsgd"),
    ("guarded_threshold", "residual"), ("threshold", "residual"), ("efsignsgd", "residual"),
    ("efsignsgd", "efsignsgd"), ("onebit", "residual"), ("lossless", ""),
)  # fmt: skip
HOSTS = {"two of two": ((0, 1), (2, 3)), "crossed": ((0, 2), (1, 3))}
RESTARTS = ("full", "consolidate", "local", "dcp", "torch", "reattach", "rewrap")


def drawn(seed: int, where: str) -> Case:
    r = random.Random(seed)
    compressor, memory = r.choice(PAIRS)
    schedule: str | int = "layer"
    ratio = r.choice([0.01, 0.07, 0.5])
    if compressor == "lossless":
        compressor, memory = r.choice([("topk", "residual"), ("none", "none"), ("topk", "none")])
        schedule, ratio = r.choice(["bucket", "one", 2, 3, "auto", "auto"]), 1.0
    params = {
        "compressor": compressor, "memory": memory, "compress_ratio": ratio, "threshold": 1.0,
        "communicator": r.choice(["allgather", "broadcast", "alltoall", "ps"]), "lr": 0.25,
        "momentum": 0.8,
    }  # fmt: skip
    scaled = r.random() < 0.4
    graph = r.choice(["", "", "find_unused", "static"])

    def step(number: int) -> Step:
        lr = r.choice([0.01, 0.02, 0.005])
        backwards = r.choice([(0,), (0,), (1,), (2,), (0, 1), (1, 0)])
        restart = r.choice(RESTARTS) if number and r.random() < 0.3 else ""
        if graph == "static" and (restart or number == 0):
            backwards = (0,)  # DDP wants to see the first one
        return Step(
            lr=lr,
            backwards=backwards,
            restart=restart,
            split=r.randrange(4),
            adopt=number > 1 and r.random() < 0.3,
            bad=r.randrange(2) if scaled and r.random() < 0.3 else -1,
            zeros=r.random() < 0.3,
        )

    return Case(
        params,
        tuple(step(number) for number in range(40 if schedule == "auto" else 8)),
        optimizer=r.choice(["SGD", "Adam", "AdamW", "LAMB"]),
        schedule=schedule,
        dtype=r.choice(["fp32", "fp64"]),
        hosts=HOSTS.get(where, ()),
        split=r.randrange(4),
        others=r.random() < 0.4,
        graph=graph,
        view=r.random() < 0.5,
        bucket_bytes=r.choice([60, 1000, 10**6]),
        scaled=scaled,
        clip=r.choice(["", "option", "torch", "own"]),
        share=where in "234" and r.random() < 0.2,  # not between hosts
        seed=seed,
    )


def ranks_of(where: str) -> harness.Workers:
    if where in harness.HOSTS:
        return harness.pool_of_hosts(where)
    return harness.pool(int(where))


WHERE = ("2", "3", "4", "two of two", "crossed", "two and one")


@pytest.mark.parametrize(
    ("where", "seed"),
    [
        *((where, 1000 + n) for n, where in enumerate(WHERE)),
        *(harness.slow(where, seed) for where in WHERE for seed in range(20)),
    ],
)
def test_training_as_in_one_process(where: str, seed: int) -> None:
    """FUSEDPG_COMPRESS_SEEDS=100 draws more of each."""
    for more in range(int(os.environ.get("FUSEDPG_COMPRESS_SEEDS", "1"))):
        case: Any = drawn(seed + 1000 * more, where)
        print(f"seed {case.seed}: {case}")
        ranks_of(where).run(train, case)
