"""What builds on the backend: FSDP2, DTensor, checkpoints, torch.compile."""

from __future__ import annotations

import shutil

import pytest

import harness
from checks import parallel


@pytest.mark.parametrize("comm_memory", [False, True])
def test_fsdp(workers: harness.Workers, comm_memory: bool) -> None:
    if comm_memory and not harness.IS_FUSED:
        pytest.skip("Gloo allocates nothing")
    workers.run(parallel.fsdp, comm_memory)


def test_dtensor(workers: harness.Workers) -> None:
    workers.run(parallel.dtensor)


def test_tensor_parallel(workers: harness.Workers) -> None:
    workers.run(parallel.tensor_parallel)


def test_two_dimensional_mesh() -> None:
    harness.pool(4).run(parallel.two_dimensional_mesh)


def test_checkpoint(workers: harness.Workers) -> None:
    workers.run(parallel.checkpoint)


def test_functional_collectives(workers: harness.Workers) -> None:
    workers.run(parallel.functional)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compile(pair: harness.Workers) -> None:
    pair.run(parallel.compiled, timeout=180)


def test_compile_in_place(pair: harness.Workers) -> None:
    pair.run(parallel.compiled_in_place, timeout=120)


@pytest.mark.fused_only
def test_debug_detail() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group and checks every call."""
    from checks import ddp, p2p
    from checks.collectives import Case, check

    with harness.Workers(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as workers:
        for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter_tensor"):
            workers.run(check, Case(op, numel=1003))
        workers.run(p2p.batch, 100)
        workers.run(ddp.variant, "plain")
