"""The ring of a patched NCCL against torch.optim, and state that changes between paths."""

from __future__ import annotations

from typing import Any

import torch

from checks import optim as trained
from checks.fused_ops import TOLERANCE, WIRE, Oracle, Run, compare, train
from gpu_checks.fused import GpuModel
from gpu_checks.optim import GpuTrainer, goes_on, with_fp32_twin
from harness import Context

README = "patches/nccl/README.md"
PATHS = {"patched": "ring", "stock": "stock"}


def refusal(context: Context) -> str:
    """Why the engine cannot use the NCCL that is loaded as a patched one; empty if it can."""
    model = GpuModel(context, Run("sgd"), nccl="patched", half_sums="wire")
    model.set_gradients(0)
    try:
        model.step()
    except RuntimeError as error:
        if README not in str(error):
            raise
        return str(error)
    return ""


def path_of(group: Any) -> str:
    import fusedpg

    return str(fusedpg.group_info(group)["cuda_path"])


class RingModel(GpuModel):
    """On the ring; parameters begin away from zero, so that each has a size to compare with."""

    def __init__(self, context: Context, run: Run, chunk_bytes: int) -> None:
        options = {"cuda_chunk_bytes": chunk_bytes} if chunk_bytes else {}
        super().__init__(context, run, nccl="patched", half_sums="wire", **options)

    def initial(self, i: int) -> torch.Tensor:
        values = super().initial(i)
        return torch.where(values < 0, values - 1, values + 1)


def parity(context: Context, run: Run, chunk_bytes: int) -> str:
    """A run against its oracle; the digest of the parameters."""
    model = RingModel(context, run, chunk_bytes)
    oracle = Oracle(model)
    train(model, oracle)
    assert path_of(model.group) == "ring"
    seen = model.on_host()
    compare(seen, oracle)
    for i, want in enumerate(oracle.params):
        # The norm of a large tensor hides a few wrong elements, as at the edge of a chunk.
        exact = want.detach()
        limit = 4 * max(TOLERANCE[run.dtype(i)], WIRE.get(run.dtype(i), 0.0))
        error = (seen.params[i].to(exact.dtype) - exact).abs() / exact.abs().clamp(min=1)
        worst = int(error.argmax())
        assert float(error.view(-1)[worst]) <= limit, (i, worst, run)
    return model.digest()


def changes_path(context: Context, run: trained.Run, first: str, tolerance: float) -> str:
    """Each rank's own state dict goes on on the other path."""
    second = "stock" if first == "patched" else "patched"
    here, there = (
        GpuTrainer(context, run, nccl=choice, half_sums="wire") for choice in (first, second)
    )
    if "master_dtype" in run.ours:
        with_fp32_twin(here)
    answer = goes_on(here, there, tolerance, own=True)
    assert [path_of(one.group) for one in (here, there)] == [PATHS[first], PATHS[second]]
    return answer
