"""What users of GRACE and MergeComp bring along: their classes, and their parameters' names."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import harness
from checks import compress_own as checks
from fusedpg import compress
from fusedpg.compress import communicators, compressors, memories

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("schedule", ["bucket", "layer", "one", 3])
@pytest.mark.parametrize("pair", checks.PAIRS)
def test_class_written_for_grace(pair: str, schedule: Any) -> None:
    communicator = "broadcast" if schedule == 3 else "allgather"
    harness.pool(3).run(checks.by_graces_steps, pair, schedule, communicator)


@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize("communicator", ["allgather", "alltoall", "allreduce"])
@pytest.mark.parametrize("what", checks.BROKEN)
def test_class_that_returns_what_it_must_not(what: str, communicator: str, backend: str) -> None:
    """No number comes of it: all ranks hear what is wrong."""
    if (what, communicator) == ("no sum", "allreduce"):
        pytest.skip("nothing is aggregated")
    for text in harness.pool(2, backend=backend).run(checks.broken, what, communicator):
        assert "TypeError: Broken." in text, text


MIXED = [
    ("none", "none"), ("fp16", "none"), ("fp16", "residual"), ("topk", "residual"),
    ("randomk", "residual"), ("threshold", "none"), ("qsgd", "none"), ("terngrad", "none"),
    ("natural", "none"), ("efsignsgd", "residual"), ("onebit", "none"), ("signum", "none"),
    ("dgc", "dgc"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_processors_of_different_kinds(dtype: torch.dtype) -> None:
    """Ranks decode what they have gathered to the same bits, whatever they do it with."""
    kinds = [("avx2", "avx2"), ("default", "x86-64-v2"), ("avx2", "avx2")]
    env = [{"ATEN_CPU_CAPABILITY": torchs, "FUSEDPG_ISA": ours} for torchs, ours in kinds]
    with harness.Workers(3, env=env, oracle=False) as workers:
        for compressor, memory in MIXED:
            params = {"compressor": compressor, "memory": memory, "communicator": "allgather"}
            answers = workers.run(checks.mixed_processors, params, dtype)
            assert len({kind for kind, _ in answers}) == 2, [kind for kind, _ in answers]
            for _, found in answers[1:]:
                for a, b in zip(found, answers[0][1], strict=True):
                    np.testing.assert_array_equal(a, b, err_msg=compressor)
        for error in workers.errors(checks.mixed_processors, {"compressor": "powersgd"}, dtype):
            assert "has processor" in error.text, error.text


# --- without ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", compressors.BY_NAME)
def test_default_communicator_is_graces(compressor: str) -> None:
    """All-reduce; where that would add up what cannot be added, all-gather."""
    state = compress.from_params({"compressor": compressor})
    linear = compressor in ("none", "fp16", "randomk", "powersgd")
    assert type(state.communicator) is communicators.BY_NAME["allreduce" if linear else "allgather"]


def test_names_of_grace_and_mergecomp() -> None:
    state = compress.from_params({"compressor": "topk", "ratio": 0.02, "fusion_num": 2})
    assert state.compressor.compress_ratio == 0.02
    assert state.schedule == 2
    assert compress.from_params({"fusion_num": 0}).schedule == "layer"
    state = compress.from_params({"compressor": "threshold", "ratio": 0.02})
    assert state.compressor.threshold == 0.02
    state = compress.from_params({"compressor": "qsgd_cuda", "quantum": 64})
    assert isinstance(state.compressor, compressors.QSGD)
    assert state.compressor.quantum_num == 64
    state = compress.from_params({"compressor": "natural_cuda", "communicator": "all-to-all"})
    assert isinstance(state.compressor, compressors.Natural)
    made = {"compressor": "topk", "kernel": "cupy", "world_size": 4, "communicator": "allgather"}
    assert isinstance(compress.from_params(made).compressor, compressors.TopK)
    model = torch.nn.Linear(2, 3)
    state = compress.from_params({"params": model.named_parameters()})
    assert state._residuals._names[model.bias] == "bias"
    state = compress.from_params({"compressor": "dgc", "memory": "dgc", "gradient_clipping": False})
    assert state.memory.gradient_clipping == 0


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (
            {"compressor": "dgc", "memory": "dgc", "gradient_clipping": True},
            "the largest norm of a gradient, got True",
        ),
        ({"compressor": "efsignsgd", "memory": "residual", "lr": 0.1}, "mean of what the ranks"),
        ({"compressor": "topk", "ratio": 0.1, "compress_ratio": 0.1}, "are the same"),
        ({"fusion_num": 2.0}, "fusion_num is 0"),
        ({"memory": "1bitadam"}, "memory '1bitadam' is not known"),
        ({"communicator": SimpleNamespace(send_step=0)}, "GRACE's, which calls Horovod"),
        ({"quantums": 3}, "quantum, quantum_num"),
        ({"compressor": "dgc", "memory": "dgc", "momentum_masking": 0}, "True or False"),
        ({"compressor": compressors.TopK(), "communicator": "allreduce"}, "linear = True"),
    ],
)
def test_nothing_is_taken_for_something_else(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compress.from_params(params)
    with pytest.raises(ValueError, match="schedule= are the same"):
        compress.from_params({"fusion_num": 2}, schedule="one")
    assert memories.EFSignSGDMemory(0.1).scale == 10.0


NUMBERS = [
    ({"compressor": "topk", "memory": "residual"}, "compressor", "compress_ratio", (0, -1, 1.1)),
    ({"compressor": "randomk"}, "compressor", "compress_ratio", (0, 1.1)),
    ({"compressor": "guarded_threshold"}, "compressor", "compress_ratio", (0, 1.1)),
    ({"compressor": "threshold"}, "compressor", "threshold", (-1,)),
    ({"compressor": "terngrad"}, "compressor", "clip_sigma", (-1,)),
    ({"compressor": "signum"}, "compressor", "momentum", (1, -0.1)),
    ({"compressor": "qsgd"}, "compressor", "quantum_num", (0, 32768, 1.5)),
    ({"compressor": "qsgd"}, "compressor", "bucket_size", (-1, 1.5)),
    ({"compressor": "powersgd"}, "compressor", "compress_rank", (0, 1.5)),
    ({"compressor": "topk", "memory": "residual"}, "memory", "beta", (-0.5,)),
    ({"compressor": "topk", "memory": "residual"}, "memory", "gamma", (0, -1)),
    ({"compressor": "topk", "memory": "efsignsgd"}, "memory", "lr", (0, -1, 1e-46)),
    ({"compressor": "topk", "memory": "dgc"}, "memory", "momentum", (1, -0.1)),
    ({"compressor": "topk", "memory": "dgc"}, "memory", "gradient_clipping", (-1,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "part", "key", "wrong"),
    NUMBERS,
    ids=["-".join([*one[0].values(), one[2]]) for one in NUMBERS],
)
def test_impossible_numbers(params: dict[str, Any], part: str, key: str, wrong: Any) -> None:
    """When they are given, and when the attribute is set later."""
    for value in (*wrong, math.inf, -math.inf, math.nan, 1e39, "0.5", None, [0.5], 1j):
        with pytest.raises(ValueError, match=f"{key} is "):
            compress.from_params({**params, key: value})
        made = getattr(compress.from_params(params), part)
        before = getattr(made, key)
        with pytest.raises(ValueError, match=f"{key} is "):
            setattr(made, key, value)
        assert getattr(made, key) == before
    for number in (np.asarray(before)[()], torch.tensor(before)):
        setattr(made, key, number)
        assert type(getattr(made, key)) is type(before)


def test_impossible_seeds_and_factors() -> None:
    for value in (math.inf, math.nan, 1.5, "1"):
        with pytest.raises(ValueError, match="seed is an integer"):
            compress.from_params({}, seed=value)  # type: ignore[arg-type]
    for factor in ("scale", "beta", "gamma"):
        own = type("Own", (compress.Memory,), {factor: math.nan})()
        with pytest.raises(ValueError, match=rf"Own\.{factor} is "):
            compress.from_params({"compressor": "topk", "memory": own})
