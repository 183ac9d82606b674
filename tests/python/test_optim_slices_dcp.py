"""Slices of optimizer state in torch.distributed.checkpoint, without an optimizer of ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedpg.optim import _slices
from test_optim_slices import a_slice, numbers, same, slices_of

# no_dist=True says the same already.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# World size of the processes that save together.
SAVERS = 3


# ---- torch.distributed.checkpoint

PARAMS = {
    "contiguous": numbers((7, 40)),
    "channels_last": numbers((5, 3, 4, 6), (0, 2, 3, 1)),
    "transposed": numbers((20, 9, 2), (1, 2, 0)),
    "size 1": numbers((1, 200, 1)).as_strided((1, 200, 1), (3, 1, 77)),
    "one rank only": numbers((5,)),
    "scalar": numbers(()),
    "empty": numbers((0, 4)),
}


def wholes(scale: float = 1.0) -> dict[str, Any]:
    """Plain state, which torch.optim would hold; partly laid out unlike the parameter."""
    return {
        "state": {
            name: {
                "step": torch.tensor(scale),
                "exp_avg": param.clone() * scale + 1,
                "exp_avg_sq": (param * scale + 2).contiguous(),
            }
            for name, param in PARAMS.items()
        }
    }


def sliced(values: dict[str, Any], world_size: int, rank: int) -> dict[str, Any]:
    return {
        "state": {
            name: {
                key: value if key == "step" else slices_of(value, PARAMS[name], world_size)[rank]
                for key, value in entry.items()
            }
            for name, entry in values["state"].items()
        }
    }


def blank(world_size: int, rank: int) -> dict[str, Any]:
    return sliced(wholes(-1.0), world_size, rank)


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for name, entry in expected["state"].items():
        for key, value in entry.items():
            assert torch.equal(found["state"][name][key], value), (name, key)


def check_loads(path: Path, expected: dict[str, Any]) -> None:
    """Load a checkpoint as every world size and as plain tensors."""
    for world_size in (1, 2, 3, 5):
        dicts = [blank(world_size, rank) for rank in range(world_size)]
        # The slices must be written in place: optimizers hold these tensors.
        held = [d["state"]["channels_last"]["exp_avg"].local() for d in dicts]
        for local in dicts:
            dcp.load(local, checkpoint_id=path, no_dist=True)
        check_equal(_slices.merge_state_dicts(dicts), expected)
        for tensor, local in zip(held, dicts):
            assert torch.equal(tensor, local["state"]["channels_last"]["exp_avg"].local())
    plain = wholes(-1.0)
    dcp.load(plain, checkpoint_id=path, no_dist=True)
    check_equal(plain, expected)


def save_as_rank(rank: int, root: str) -> None:
    path = Path(root)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path / 'store'}", rank=rank, world_size=SAVERS
    )
    dcp.save(sliced(wholes(), SAVERS, rank), checkpoint_id=path / "slices")
    # Staging copies the slices before the call returns.
    staged = sliced(wholes(3.0), SAVERS, rank)
    saving = dcp.async_save(staged, checkpoint_id=path / "async")
    for entry in staged["state"].values():
        entry["exp_avg"].local().fill_(-7.0)
    saving.result()
    stager = dcp.staging.BlockingAsyncStager(cache_staged_state_dict=True)
    again = stager.stage({k: v for k, v in staged["state"].items() if k != "scalar"})
    for name, entry in again.items():
        assert same(entry["exp_avg"], staged["state"][name]["exp_avg"])
        assert entry["exp_avg"] is not staged["state"][name]["exp_avg"]
    # Loading together, what one process saved.
    loaded = blank(SAVERS, rank)
    dcp.load(loaded, checkpoint_id=path / "plain")
    for name, entry in sliced(wholes(2.0), SAVERS, rank)["state"].items():
        assert same(loaded["state"][name]["exp_avg"], entry["exp_avg"])
        assert same(loaded["state"][name]["exp_avg_sq"], entry["exp_avg_sq"])
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_checkpoints_of_several_processes(tmp_path: Path) -> None:
    dcp.save(wholes(2.0), checkpoint_id=tmp_path / "plain", no_dist=True)
    torch.multiprocessing.spawn(save_as_rank, (str(tmp_path),), nprocs=SAVERS)
    check_loads(tmp_path / "slices", wholes())
    check_loads(tmp_path / "async", wholes(3.0))
    check_loads(tmp_path / "plain", wholes(2.0))
    dcp_to_torch_save(tmp_path / "slices", tmp_path / "whole.pt")
    check_equal(torch.load(tmp_path / "whole.pt", weights_only=True), wholes())


def test_checkpoint_of_one_process(tmp_path: Path) -> None:
    dcp.save(sliced(wholes(), 1, 0), checkpoint_id=tmp_path / "slices", no_dist=True)
    check_loads(tmp_path / "slices", wholes())


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    dcp.save({"x": torch.zeros(4, 3)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"x": a_slice()}, checkpoint_id=tmp_path / "plain", no_dist=True)


class Sliced(torch.optim.AdamW):
    """Shows and takes its state as the slices of rank 0 of 2."""

    def state_dict(self) -> dict[str, Any]:
        result = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        result["state"] = {
            i: {
                key: value if key == "step" else slices_of(value, params[i], 2)[0]
                for key, value in entry.items()
            }
            for i, entry in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = copy.deepcopy(state_dict)


OPTIONS = {
    "default": {},
    "offload": {"cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "flat offload": {"flatten_optimizer_state_dict": True, "cpu_offload": True},
    "full": {"full_state_dict": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_state_dict_functions_keep_slices(options: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Conv2d(2, 3, 3))
    model[1].to(memory_format=torch.channels_last)
    optimizer = Sliced(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    chosen = StateDictOptions(**OPTIONS[options])
    found = get_optimizer_state_dict(model, optimizer, options=chosen)
    prefix = "state." if chosen.flatten_optimizer_state_dict else ""
    for name, param in model.named_parameters():
        entry: Any = found if prefix else found["state"][name]
        value = entry[f"state.{name}.exp_avg" if prefix else "exp_avg"]
        assert same(value, slices_of(optimizer.state[param]["exp_avg"], param, 2)[0])
    if chosen.full_state_dict:
        return
    set_optimizer_state_dict(model, optimizer, found, options=chosen)
    for name, param in model.named_parameters():
        value = optimizer.loaded["state"][name]["exp_avg"]
        assert same(value, slices_of(optimizer.state[param]["exp_avg"], param, 2)[0])


def test_a_full_state_dict_reaches_the_optimizer() -> None:
    model = torch.nn.Linear(9, 9)
    optimizer = Sliced(model.parameters())
    plain = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    plain.step()
    optimizer.step()
    chosen = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, plain, options=chosen)
    set_optimizer_state_dict(model, optimizer, whole, options=chosen)
    for name, param in model.named_parameters():
        value = optimizer.loaded["state"][name]["exp_avg"]
        assert type(value) is torch.Tensor
        assert torch.equal(value, plain.state[param]["exp_avg"])
