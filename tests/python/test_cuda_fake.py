"""The CUDA engine on a fake GPU: CPU tensors stand for device memory (see tests/fake_gpu).

Streams are threads that run late, so a missing event shows as a wrong number; NCCL works between
the processes. What kernels do on a real device is tested in tests/gpu.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import harness
from checks import (
    cuda_fake,
    cuda_halves,
    cuda_order,
    cuda_ranks,
    fused_ops,
    optim,
    optim_faults,
    optim_state,
    sparse,
)
from checks.fused_ops import BF16, FP16, FP32, FP64, OPS, Run
from checks.sparse import Case
from fuzz import core
from test_faults import wait_for

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]

MODES = ("manual", "ddp", "overlap")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduce": "sum"},
    "scaled": {"scale": 1024.0, "async_op": True},
    "weighted": {"weighted": True, "scale": 8.0},
    "tensor lr": {"lr_tensor": True},
    "transposed": {"layout": "transposed"},
    "maximize": {"hyper": (("maximize", True),)},
    "fp64": {"dtypes": (FP64,)},
    "bf16 with masters": {"dtypes": (BF16,), "master": True},
    "fp16": {"dtypes": (FP16,)},
    "fp32 with bf16 gradients": {"grad_dtypes": (BF16,)},
    "types mixed": {"dtypes": (FP32, BF16, FP64, FP16)},
    "empty tensors": {"shapes": ((0,), (100,), (0, 4), (5,), (33,), (97,))},
    # Shards that fill a chunk exactly: NCCL works in the tensor itself.
    "whole tensors": {"shapes": ((4, 96 * 1024), (1021,)), "steps": 3},
}
OWN: dict[str, dict[str, Any]] = {
    "sgd nesterov": {"op": "sgd", "hyper": (("nesterov", True),)},
    "sgd without momentum": {"op": "sgd", "hyper": (("momentum", 0.0),)},
    "adamw amsgrad": {"op": "adamw", "hyper": (("amsgrad", True),)},
    "lamb clipped": {"op": "lamb", "hyper": (("trust_clip", True), ("weight_decay", 0.01))},
}


def agree(answers: list[Any]) -> None:
    assert len(set(answers)) == 1, "ranks hold different parameters"


@pytest.fixture(params=[1, harness.slow(2), 3], ids=lambda size: f"world{size}")
def gpus(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool(request.param, **harness.fake_gpu())


@pytest.fixture
def two() -> harness.Workers:
    return harness.pool(2, **harness.fake_gpu())


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps(gpus: harness.Workers, variant: str) -> None:
    for op in OPS:
        agree(gpus.run(fused_ops.parity, Run(op, ring=True, **VARIANTS[variant])))


@pytest.mark.parametrize("variant", OWN)
def test_own_options(two: harness.Workers, variant: str) -> None:
    agree(two.run(fused_ops.parity, Run(ring=True, **OWN[variant])))


def test_took_the_stock_path(two: harness.Workers) -> None:
    for info in two.run(cuda_fake.info_after_a_step):
        assert info["cuda_path"] == "stock"
        assert info["nccl_version"] >= 22800
        assert info["state"] == "ok"


@pytest.mark.parametrize("check", [cuda_fake.interleaved, cuda_fake.used_flags, cuda_fake.work])
def test_calls(two: harness.Workers, check: Any) -> None:
    two.run(check)


@pytest.mark.parametrize("check", [cuda_fake.premul_sums, cuda_fake.found_inf])
def test_calls_of_any_number(gpus: harness.Workers, check: Any) -> None:
    gpus.run(check)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
def test_optimizers(two: harness.Workers, name: str, mode: str) -> None:
    agree(two.run(optim.parity, optim.Run(name, mode, steps=20)))


@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_under_ddp(two: harness.Workers, layout: str, mode: str) -> None:
    run = optim.Run("AdamW", mode, steps=5, layout=layout)
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        agree(two.run(optim.parity, dataclasses.replace(run, ddp=options)))


def connected(size: int, options: dict[str, Any]) -> harness.Workers:
    """Ranks whose delegate has a communicator of the fake NCCL."""
    gpus = harness.pool(size, **options)
    gpus.run(cuda_fake.with_communicator)
    return gpus


def direct(**more: str) -> dict[str, Any]:
    options = harness.fake_gpu(**more)
    options["options"] = options["options"] | {"cuda_arena_bytes": 64 << 20}
    return options


def reaching(size: int, **more: str) -> harness.Workers:
    """Ranks that reach each other's memory, with an arena."""
    gpus = harness.pool(size, **direct(**more))
    gpus.run(cuda_fake.with_symmetric_memory)
    return gpus


@pytest.mark.parametrize("kind", ["", "multicast"])
@pytest.mark.parametrize("size", [2, 3])
def test_direct_path(size: int, kind: str) -> None:
    gpus = reaching(size, FUSEDPG_FAKE_SYMM_MEM=kind)
    for op in ("sgd", "adam", "adamw"):
        for variant in ("plain", "weighted", "scaled", "tensor lr", "types mixed"):
            run = Run(op, memory="arena", **VARIANTS[variant])
            agree(gpus.run(fused_ops.parity, run))
            assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {"direct"}
    # Norms need the reduced gradients twice.
    agree(gpus.run(fused_ops.parity, Run("lamb", memory="arena")))
    assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {"stock"}


def test_direct_path_under_ddp() -> None:
    gpus = reaching(2)
    run = optim.Run("AdamW", "overlap", steps=10)
    for options in ({}, {"gradient_as_bucket_view": True}):
        agree(gpus.run(optim.parity, dataclasses.replace(run, ddp=options)))
        assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {"direct"}
    agree(gpus.run(optim.parity, dataclasses.replace(run, mode="ddp")))


def test_direct_path_needs_all_tensors_in_the_arena() -> None:
    gpus = reaching(2)
    agree(gpus.run(fused_ops.parity, Run("adamw", memory="mixed")))
    assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {"stock"}


@pytest.mark.parametrize("why", ["no such memory", "apart", "fails"])
def test_direct_path_falls_back(why: str) -> None:
    with harness.Workers(2, **direct(FUSEDPG_FAKE_SYMM_MEM=why)) as gpus:
        if why != "no such memory":
            gpus.run(cuda_fake.with_symmetric_memory)
        agree(gpus.run(fused_ops.parity, Run("adamw", memory="arena")))
        assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {"stock"}


# --- sums of half gradients -------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, harness.slow(4)])
def test_half_sums_have_the_bits_of_the_cpu(size: int) -> None:
    options = harness.fake_gpu()
    gpus = harness.pool(size, **options | {"options": {"cuda_chunk_bytes": 1 << 14}})
    for op, dtype in itertools.product(("sgd", "adamw"), ("bf16", "fp16")):
        gpus.run(cuda_halves.bits_of_the_cpu, op, dtype, op == "sgd" and dtype == "bf16")
    gpus.run(cuda_halves.slices_have_the_bits_of_the_cpu)


def test_half_sums_beyond_the_type() -> None:
    gpus = harness.pool(2, **harness.fake_gpu())
    gpus.run(cuda_halves.beyond_the_type)
    for clips in (False, True):
        gpus.run(cuda_halves.optimizer_beyond_the_type, clips)


def test_half_sums_on_the_wire() -> None:
    options = harness.fake_gpu()
    options["options"] = options["options"] | {"half_sums": "wire"}
    gpus = harness.pool(2, **options)
    for variant in ("bf16 with masters", "fp16", "fp32 with bf16 gradients"):
        agree(gpus.run(fused_ops.parity, Run("adamw", ring=True, **VARIANTS[variant])))


def test_half_sums_are_compared() -> None:
    with harness.Workers(2, **harness.fake_gpu()) as gpus:
        for error in gpus.errors(cuda_halves.other_settings):
            assert "half_sums=fp32" in error.text and "half_sums=wire" in error.text, error.text


# --- a patched NCCL ---------------------------------------------------------------


def patched(choice: str = "patched", **more: str) -> dict[str, Any]:
    options = harness.fake_gpu(**{"FUSEDPG_FAKE_PATCHED": "1"} | more)
    options["options"] = options["options"] | {"nccl": choice, "half_sums": "wire"}
    return options


@pytest.mark.parametrize("size", [2, 3])
def test_patched_ring(size: int) -> None:
    gpus = connected(size, patched())
    for op, variant in itertools.product(("sgd", "adam", "adamw"), VARIANTS):
        agree(gpus.run(fused_ops.parity, Run(op, ring=True, **VARIANTS[variant])))
    ring, stock = {"dtypes": (BF16,), "master": True}, {"grad_dtypes": (BF16,)}
    for kind, path in ((ring, "ring"), (stock, "stock")):
        agree(gpus.run(fused_ops.parity, Run("adamw", ring=True, **kind)))
        assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {path}
    agree(gpus.run(optim.parity, optim.Run("AdamW", "overlap", steps=10)))


def test_ring_only_between_machines() -> None:
    for hosts, path in ((("a", "a"), "stock"), (("a", "b"), "ring")):
        options = patched("auto")
        env = [options["env"] | {"FUSEDPG_HOST_ID": host} for host in hosts]
        with harness.Workers(2, **options | {"env": env}) as gpus:
            gpus.run(cuda_fake.with_communicator)
            agree(gpus.run(fused_ops.parity, Run("adamw", ring=True)))
            assert {info["cuda_path"] for info in gpus.run(cuda_fake.info)} == {path}


def test_patched_nccl_that_is_not() -> None:
    with harness.Workers(2, timeout=20, **patched(FUSEDPG_FAKE_PATCHED="0")) as gpus:
        for error in gpus.errors(fused_ops.parity, Run("adamw")):
            assert "patches/nccl/README.md" in error.text, error.text
    [error] = harness.pool(1, **harness.fake_gpu()).errors(cuda_fake.unknown_nccl)
    assert "auto, patched or stock" in error.text, error.text


def test_checkpoints_move_between_paths(tmp_path: Path) -> None:
    folder = str(tmp_path)
    ring, stock = (connected(2, patched(choice)) for choice in ("patched", "stock"))
    ring.run(optim_state.leg, "full", "adam", "", folder, 0, "contiguous")
    stock.run(optim_state.leg, "full", "adam", folder, "", 1, "contiguous")


# --- failures ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ("lr", "scalar arguments"),
        ("weight_decay", "scalar arguments"),
        ("sizes", "number of elements"),
        ("dtype", "in dtype float"),
        ("gradient dtype", "dtype of the gradients"),
        ("weight", "options"),
        ("fewer tensors", "number of tensors"),
    ],
)
def test_disagreement(what: str, field: str) -> None:
    begin = time.monotonic()
    with harness.Workers(2, timeout=20, **harness.fake_gpu()) as gpus:
        for error in gpus.errors(optim_faults.disagree, "adamw", what, False):
            assert error.kind == "DistBackendError", error.trace
            assert "fused_adamw_" in error.text and "rank 1: " in error.text, error.text
            assert field in error.text, error.text
        # The communicator is gone; what it was is told again.
        for error in gpus.errors(fused_ops.parity, Run()):
            assert "disagree" in error.text, error.text
    assert time.monotonic() - begin < 30


def test_disagreement_writes_nothing() -> None:
    options = harness.fake_gpu()
    options["options"] = options["options"] | {"cuda_chunk_bytes": 0}
    for numel in (4096, 1 << 19):  # the second one is a chunk of its own
        with harness.Workers(2, timeout=20, **options) as gpus:
            gpus.run(cuda_fake.other_parameters, numel)


@pytest.mark.parametrize("mode", MODES)
def test_killed_peer(mode: str) -> None:
    with harness.Workers(3, timeout=20, **harness.fake_gpu()) as gpus:
        gpus.start(optim_faults.train_until_failure, mode, 1, "outside")
        wait_for(gpus, "running", [0, 1, 2])
        gpus.signal(1, signal.SIGKILL)
        since = time.monotonic()
        for answer in gpus.collect(25, ranks=[0, 2]):
            assert not isinstance(answer, harness.RemoteError | harness.Died), answer
            assert answer[1] - since < 12
        gpus.start(optim_faults.train_anew, [0, 2], mode, ranks=[0, 2])
        first, second = gpus.collect(30, ranks=[0, 2])
        assert isinstance(first, str), first
        assert first == second


def test_absent_rank_is_named() -> None:
    with harness.Workers(2, timeout=2, **harness.fake_gpu()) as gpus:
        present, _ = gpus.run(cuda_fake.absent, 6)
        assert "did not finish within 2000 ms" in present, present
        assert "rank 1: does not answer" in present, present


def test_abort_ends_a_wait() -> None:
    with harness.Workers(2, timeout=60, **harness.fake_gpu()) as gpus:
        first, _ = gpus.run(cuda_fake.aborted)
        assert "abort" in first, first


def test_missing_libraries_are_named() -> None:
    for variable, text in (("FUSEDPG_CUDA_LIB", "nvcc"), ("FUSEDPG_NCCL_LIB", "NCCL")):
        options = harness.fake_gpu(**{variable: "/nowhere/lib.so"})
        with harness.Workers(1, **options) as gpus:
            [error] = gpus.errors(fused_ops.parity, dataclasses.replace(Run(), steps=1))
            assert "/nowhere/lib.so" in error.text and text in error.text, error.text


@pytest.mark.parametrize("kind", ["momentum", "adam", "lamb"])
def test_checkpoints_fit_the_other_engine(kind: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        Path(folder).mkdir()
    gpus = harness.pool(2, **harness.fake_gpu())
    leg = optim_state.leg
    gpus.run(leg, "full", kind, "", folders[0], 0, "contiguous")
    harness.pool(3).run(leg, "full", kind, folders[0], folders[1], 1, "contiguous")
    gpus.run(leg, "full", kind, folders[1], "", 2, "contiguous")


# --- zeros, which no kernel skips ---------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sgd", "amsgrad"])
def test_steps_that_may_skip_zeros(name: str, kind: str) -> None:
    reaching(2).run(sparse.fused_steps, name, kind)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_group_that_may_skip_zeros(mode: str) -> None:
    options = harness.fake_gpu()
    options["options"] = options["options"] | {"block_skip": mode}
    gpus = harness.pool(2, **options | {"oracle": True})
    gpus.run(sparse.equals_oracle, *[Case(50_000, density=0.05, seed=i) for i in range(20)])


def test_sparse_all_reduce_says_what_to_do() -> None:
    harness.pool(2, **harness.fake_gpu()).run(sparse.refused_on_gpus)


def test_steps_are_not_coalesced() -> None:
    harness.pool(2, **harness.fake_gpu()).run(sparse.refuses_coalescing)


# --- the order of calls, on streams -------------------------------------------------


@pytest.fixture
def streams() -> harness.Workers:
    options = harness.fake_gpu()
    # Its tensors are on a GPU as torch sees it.
    return harness.pool(1, **options | {"options": {"cuda_chunk_bytes": 1 << 10}})


KINDS = ("sync", "async", "coalesced", "coalesced async")


OF_EACH_KIND = (
    cuda_order.fused_behind,
    cuda_order.ordinary_behind,
    cuda_order.refused_in_between,
    cuda_order.eager_then_captured,
    cuda_order.ordered_in_a_graph,
)
OF_ALL_KINDS = (
    cuda_order.before_the_engine,
    cuda_order.keeps_coalesced_tensors,
    cuda_order.keeps_tensors_of_all_callers,
    cuda_order.fresh_group,
    cuda_order.calls_beside_a_region,
    cuda_order.eager_beside_a_capture,
    cuda_order.out_of_memory_in_a_capture,
    cuda_order.first_step_captured,
    cuda_order.other_device_is_current,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", OF_EACH_KIND)
def test_order_of_each_kind(streams: harness.Workers, check: Any, kind: str) -> None:
    streams.run(check, kind)


@pytest.mark.parametrize("check", OF_ALL_KINDS)
def test_order(streams: harness.Workers, check: Any) -> None:
    streams.run(check)


@pytest.mark.parametrize("kind", ["delegate", "ours", "launch", "caller"])
def test_exception_among_coalesced(streams: harness.Workers, kind: str) -> None:
    streams.run(cuda_order.exception_in_a_region, kind)


@pytest.mark.parametrize("what", ["thread", "delegate", "gpu"])
def test_end_that_raises(what: str) -> None:
    with harness.Workers(1, **harness.fake_gpu() | {"options": {}}) as workers:
        workers.run(cuda_order.end_that_raises, what)


# --- the order of calls, between ranks ----------------------------------------------


@pytest.mark.parametrize("name", cuda_ranks.PROGRAMS)
def test_programs_of_ranks(name: str) -> None:
    cuda_ranks.workers("2").run(cuda_ranks.fixed, name)


@pytest.mark.parametrize("where", ["2", harness.slow("3")])
def test_random_programs_of_ranks(where: str) -> None:
    core.search("gpu", where, core.seed(random.randrange(1 << 30)))


@pytest.mark.parametrize("how", ["abort", harness.slow("shutdown")])
def test_end_beside_a_caller(how: str) -> None:
    with harness.Workers(2, **harness.fake_gpu() | {"options": {}}) as workers:
        workers.run(cuda_ranks.ends_beside_a_caller, how)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first"])
def test_inside_a_group_of_nccl(warm: bool) -> None:
    cuda_ranks.workers("2").run(cuda_ranks.inside_a_group_of_nccl, warm)


@pytest.mark.parametrize(
    "why", ["failed", *map(harness.slow, ("no engine", "sync", "async", "coalesced"))]
)
def test_end_with_an_ordinary_one_outstanding(why: str) -> None:
    with harness.Workers(2, **harness.fake_gpu() | {"options": {}}) as workers:
        workers.run(cuda_ranks.ends_with_an_ordinary_one_outstanding, why)


STARTS = ("stream_create", "symmetric memory", "library")


@pytest.mark.parametrize("what", [STARTS[0], *map(harness.slow, STARTS[1:])])
def test_one_rank_cannot_start(what: str) -> None:
    options = harness.fake_gpu(FUSEDPG_CUDA_ARENA_BYTES=str(4 << 20)) | {"options": {}}
    with harness.Workers(3, timeout=60, **options) as workers:
        workers.run(cuda_fake.with_symmetric_memory)
        workers.run(cuda_ranks.one_rank_cannot_start, what)


@pytest.mark.parametrize(("what", "rank"), [("ncclCommInitRankConfig", 1), ("ncclGetUniqueId", 0)])
def test_one_rank_cannot_connect(what: str, rank: int) -> None:
    with harness.Workers(2, timeout=60, **harness.fake_gpu() | {"options": {}}) as workers:
        workers.run(cuda_ranks.one_rank_cannot_connect, what, rank)


def test_peer_dies_before_its_start() -> None:
    with harness.Workers(2, timeout=60, **harness.fake_gpu() | {"options": {}}) as workers:
        workers.start(cuda_ranks.peer_dies_before_its_start)
        wait_for(workers, "running", [0, 1])
        time.sleep(0.5)
        workers.signal(1, signal.SIGKILL)
        since = time.monotonic()
        [(text, when)] = workers.collect(25, ranks=[0])
        assert "the process of rank 1" in text and "ended" in text, text
        assert when - since < 12


@pytest.mark.parametrize(("what", "least"), [("allocate", 3), ("host_allocate", 1)])
def test_out_of_memory(what: str, least: int) -> None:
    with harness.Workers(2, **harness.fake_gpu() | {"options": {}}) as workers:
        found = workers.run(cuda_ranks.out_of_memory, what)
        assert found[0] == 0 and found[1] >= least, found
