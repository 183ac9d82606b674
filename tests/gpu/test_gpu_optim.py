"""The fused optimizers on a GPU, alone and with DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checks.optim import Run
from gpu_checks import optim
from ranks import Ranks

pytestmark = pytest.mark.timeout(900)

MODES = ("manual", "ddp", "overlap")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "LAMB")


def agree(answers: list[str]) -> None:
    assert len(set(answers)) == 1, "ranks hold different parameters"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parity(pair: Ranks, name: str, mode: str) -> None:
    agree(pair.run(optim.parity, Run(name, mode, steps=20)))


@pytest.mark.parametrize("mode", MODES)
def test_other_sizes_and_types(ranks: Ranks, mode: str) -> None:
    agree(ranks.run(optim.parity, Run("AdamW", mode, steps=8)))
    agree(ranks.run(optim.parity, Run("SGD", mode, steps=8, dtypes=("float64",))))


@pytest.mark.parametrize("layout", ["channels_last", "transposed"])
@pytest.mark.parametrize("mode", MODES)
def test_layouts(pair: Ranks, mode: str, layout: str) -> None:
    agree(pair.run(optim.parity, Run("AdamW", mode, steps=5, layout=layout)))


DDP: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("options", DDP)
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
def test_ddp_options(pair: Ranks, mode: str, options: str) -> None:
    agree(pair.run(optim.parity, Run("AdamW", mode, steps=8, ddp=DDP[options])))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_with_masters(pair: Ranks, name: str, mode: str) -> None:
    run = Run(name, mode, steps=10, dtypes=("bfloat16",), ours={"master_dtype": torch.float32})
    agree(pair.run(optim.masters, run))


@pytest.mark.parametrize("mode", ["manual", "ddp"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_scaler_and_clipping(pair: Ranks, name: str, mode: str) -> None:
    agree(pair.run(optim.scaled_and_clipped, Run(name, mode, steps=8), 5.0))


@pytest.mark.parametrize("mode", ["manual", "ddp"])
def test_max_grad_norm(pair: Ranks, mode: str) -> None:
    run = Run("AdamW", mode, steps=8, ours={"max_grad_norm": 5.0})
    agree(pair.run(optim.clipped_inside, run, 5.0))


@pytest.mark.parametrize("mode", ["ddp", "overlap"])
def test_accumulation(pair: Ranks, mode: str) -> None:
    agree(pair.run(optim.accumulates, Run("AdamW", mode, steps=5)))


@pytest.mark.parametrize("to_gpu", [True, False], ids=["to gpu", "to cpu"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_checkpoint_changes_device(pair: Ranks, name: str, to_gpu: bool) -> None:
    agree(pair.run(optim.moves_between_devices, Run(name, "manual"), to_gpu))


@pytest.mark.parametrize("options", [{}, DDP["views"]], ids=["", "views"])
def test_training_like_nccl(pair: Ranks, options: dict[str, Any]) -> None:
    answers = pair.run(optim.like_nccl, 20, options)
    for results in answers:
        want, _ = results["torch"]
        assert want[-1] < want[0], "does not learn"
        for name, (losses, _) in results.items():
            assert losses == pytest.approx(want, rel=1e-3), name
            # The first losses have seen no rounding to speak of.
            assert losses[:3] == pytest.approx(want[:3], rel=1e-5), name
        assert results["overlap=True"] == results["overlap=False"]
    for name in answers[0]:
        agree([results[name][1] for results in answers])
