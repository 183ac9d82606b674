"""Slices of optimizer state: geometry, the tensor subclass, checkpoints, merging."""

from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex

from fusedpg import shard_range
from fusedpg.optim import _slices
from fusedpg.optim._slices import SliceTensor

# no_dist=True says the same already.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# World size of the processes that save together.
SAVERS = 3


def numbers(shape: Sequence[int], order: Sequence[int] | None = None) -> torch.Tensor:
    """0, 1, 2, ... in memory order; ``order`` lists the dimensions from slowest to fastest."""
    order = range(len(shape)) if order is None else order
    flat = torch.arange(math.prod(shape), dtype=torch.float32)
    inverse = [list(order).index(dim) for dim in range(len(shape))]
    return flat.view([shape[dim] for dim in order]).permute(inverse)


@st.composite
def dense_tensors(draw: st.DrawFn, min_size: int = 0) -> torch.Tensor:
    sizes = st.integers(min_size, 6) | st.just(1)
    shape = draw(st.lists(sizes, max_size=5))
    tensor = numbers(shape, draw(st.permutations(range(len(shape)))))
    strides = [
        draw(st.integers(0, 50)) if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride())
    ]
    return tensor.as_strided(tensor.shape, strides)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def slices_of(full: torch.Tensor, param: torch.Tensor, world_size: int) -> list[SliceTensor]:
    found = []
    for rank in range(world_size):
        offset, length = shard_range(param.numel(), world_size, rank)
        local = _slices.from_full(full, param, offset, length)
        found.append(SliceTensor(local, param.shape, param.stride(), offset))
    return found


def fresh(param: torch.Tensor, world_size: int, rank: int) -> SliceTensor:
    offset, length = shard_range(param.numel(), world_size, rank)
    return SliceTensor(torch.full((length,), -1.0), param.shape, param.stride(), offset)


def a_slice(**options: Any) -> SliceTensor:
    return SliceTensor(torch.arange(5.0, **options), (3, 4), (1, 3), 2)


# ---- boxes


@hypothesis.given(tensor=dense_tensors(), data=st.data())
def test_boxes_cover_the_range_exactly(tensor: torch.Tensor, data: st.DataObject) -> None:
    numel = tensor.numel()
    offset = data.draw(st.integers(0, numel))
    length = data.draw(st.integers(0, numel - offset))
    found = _slices.boxes(tensor.shape, tensor.stride(), offset, length)

    assert len(found) <= max(1, 2 * tensor.dim() - 1)
    expected = flat(tensor)[offset : offset + length]
    copied = torch.full((length,), -1.0)
    begin = 0
    for box in found:
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))
        part = tensor[index]
        assert part.shape == box.sizes and part.numel() > 0
        assert box.begin == begin
        begin += part.numel()
        assert torch.equal(_slices.box_view(expected, box, tensor.stride()), part)
        _slices.box_view(copied, box, tensor.stride()).copy_(part)
    assert begin == length
    assert torch.equal(copied, expected)


def test_boxes_of_a_known_range() -> None:
    assert _slices.boxes((2, 3, 4), (12, 4, 1), 3, 18) == [
        ((0, 0, 3), (1, 1, 1), 0),
        ((0, 1, 0), (1, 2, 4), 1),
        ((1, 0, 0), (1, 2, 4), 9),
        ((1, 2, 0), (1, 1, 1), 17),
    ]
    assert _slices.boxes((2, 3), (1, 2), 1, 4) == [
        ((1, 0), (1, 1), 0),
        ((0, 1), (2, 1), 1),
        ((0, 2), (1, 1), 3),
    ]
    assert _slices.boxes((), (), 0, 1) == [((), (), 0)]
    assert _slices.boxes((1, 1), (7, 9), 0, 1) == [((0, 0), (1, 1), 0)]
    assert _slices.boxes((0, 3), (3, 1), 0, 0) == []


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "length"),
    [
        ((2, 3), (3, 1), 5, 2),
        ((2, 3), (3, 1), -1, 2),
        ((2, 3), (3, 1), 2, -1),
        ((0,), (1,), 0, 1),
        ((2, 3), (4, 1), 0, 1),
        ((2, 3), (0, 1), 0, 1),
        ((2, 3), (1,), 0, 1),
    ],
)
def test_boxes_refuse(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, length: int
) -> None:
    with pytest.raises(ValueError):
        _slices.boxes(shape, strides, offset, length)


# ---- whole tensors


@hypothesis.given(
    param=dense_tensors(), world_size=st.integers(1, 5), same=st.booleans(), data=st.data()
)
def test_merge_gives_back_the_whole(
    param: torch.Tensor, world_size: int, same: bool, data: st.DataObject
) -> None:
    full = param if same else param.contiguous().clone()
    dicts: list[dict[str, Any]] = [
        {"state": {0: {"step": torch.tensor(2.0), "exp_avg": piece}}, "param_groups": [{"lr": 0.1}]}
        for piece in slices_of(full, param, world_size)
    ]
    merged = _slices.merge_state_dicts(data.draw(st.permutations(dicts)))
    value = merged["state"][0]["exp_avg"]
    assert type(value) is torch.Tensor
    assert torch.equal(value, full)
    assert value.stride() == param.stride()
    assert merged["param_groups"] == [{"lr": 0.1}]
    assert merged["state"][0]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_from_full_copies(dtype: torch.dtype) -> None:
    param = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for full in (
        torch.randn(2, 3, 4, 5).to(dtype),
        torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last),
        torch.ones(2, 1, 1, 5, dtype=dtype).expand(2, 3, 4, 5),
    ):
        before = full.clone()
        expected = full.permute(0, 2, 3, 1).reshape(-1)[17:90]
        piece = _slices.from_full(full, param, 17, 73)
        assert piece.dtype == dtype and piece.is_contiguous()
        assert torch.equal(piece, expected)
        piece.zero_()
        assert torch.equal(full, before)


def test_from_full_of_a_tensor_that_requires_grad() -> None:
    full = torch.ones(6, requires_grad=True)
    assert not _slices.from_full(full, full, 1, 3).requires_grad


def test_from_full_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="shape"):
        _slices.from_full(torch.ones(6), torch.ones(2, 3), 0, 6)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, torch.ones(2)), (1, torch.ones(5))], r"\[1, 2\) of 6 are there more than once"),
        ([(0, torch.ones(6)), (0, torch.ones(6))], "more than once"),
        ([(1, torch.ones(2)), (4, torch.ones(1))], r"\[0, 1\), \[3, 4\), \[5, 6\) of 6 are miss"),
        ([(0, torch.ones(2)), (2, torch.ones(5))], "exceed"),
        ([(0, torch.ones(2)), (2, torch.ones(4).double())], "dtypes"),
        ([(0, torch.ones(2, 3))], "1-D"),
        ([(0, torch.ones(0))], "missing"),
        ([], "no pieces"),
    ],
)
def test_to_full_refuses(pieces: list[tuple[int, torch.Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _slices.to_full(pieces, (2, 3), (3, 1))


def state_dicts(world_size: int) -> list[dict[str, Any]]:
    params = [numbers((9, 30)), numbers((4, 3, 5, 5), (0, 2, 3, 1)), numbers(())]
    return [
        {
            "state": {
                i: {"step": torch.tensor(3.0), "exp_avg": pieces[rank]}
                for i, pieces in enumerate(slices_of(p, p, world_size) for p in params)
            },
            "param_groups": [{"betas": (0.9, torch.tensor(0.99)), "params": [0, 1, 2]}],
            "version": 1,
        }
        for rank in range(world_size)
    ]


def test_merge_leaves_its_inputs_alone() -> None:
    dicts = state_dicts(3)
    before = pickle.dumps(dicts)
    merged = _slices.merge_state_dicts(dicts)
    for entry in merged["state"].values():
        for value in entry.values():
            value.fill_(-5.0)
    merged["param_groups"][0]["params"].append(3)
    merged["param_groups"][0]["betas"][1].zero_()
    assert pickle.dumps(dicts) == before


def test_a_merged_dict_loads_into_torch_optim() -> None:
    params = [torch.nn.Parameter(torch.randn(5, 40)), torch.nn.Parameter(torch.randn(7))]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    whole = optimizer.state_dict()
    dicts = []
    for rank in range(3):
        local = copy.deepcopy(whole)
        for i, param in enumerate(params):
            for key in ("exp_avg", "exp_avg_sq"):
                local["state"][i][key] = slices_of(whole["state"][i][key], param, 3)[rank]
        dicts.append(local)
    other = torch.optim.AdamW(params)
    other.load_state_dict(_slices.merge_state_dicts(dicts))
    for param in params:
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, other.state[param][key])


def test_merge_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no state dicts"):
        _slices.merge_state_dicts([])
    with pytest.raises(ValueError, match=r"state\[0\]\['exp_avg'\]: elements \[96, 192\) of 270"):
        _slices.merge_state_dicts([state_dicts(3)[0], state_dicts(3)[2]])
    with pytest.raises(ValueError, match=r"state\[0\]\['exp_avg'\].*more than once"):
        _slices.merge_state_dicts([*state_dicts(3), state_dicts(3)[1]])

    dicts = state_dicts(3)
    dicts[2]["state"][1]["step"] += 1
    with pytest.raises(ValueError, match=r"state\[1\]\['step'\] differs .* 0 and 2"):
        _slices.merge_state_dicts(dicts)
    dicts = state_dicts(3)
    del dicts[1]["state"][2]
    with pytest.raises(ValueError, match=r"state\[2\] is missing in state dicts \[1\] of 3"):
        _slices.merge_state_dicts(dicts)
    dicts = state_dicts(3)
    dicts[1]["param_groups"][0]["betas"] = (0.9, torch.tensor(0.9))
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['betas'\]\[1\] differs"):
        _slices.merge_state_dicts(dicts)
    dicts = state_dicts(3)
    dicts[1]["state"][0]["exp_avg"] = torch.zeros(9, 30)
    with pytest.raises(ValueError, match="something else"):
        _slices.merge_state_dicts(dicts)
    dicts = state_dicts(2)
    dicts[1]["state"][0]["exp_avg"] = slices_of(numbers((270,)), numbers((270,)), 2)[1]
    with pytest.raises(ValueError, match="different layouts"):
        _slices.merge_state_dicts(dicts)


def test_merge_accepts_nan() -> None:
    dicts = [{"x": torch.tensor([math.nan, 1.0])} for _ in range(2)]
    assert _slices.merge_state_dicts(dicts)["x"][0].isnan()


# ---- the tensor


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        type(a) is SliceTensor
        and type(b) is SliceTensor
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.offset == b.offset
        and a.dtype == b.dtype == a.local().dtype
        and type(a.local()) is type(b.local()) is torch.Tensor
        and torch.equal(a.local(), b.local())
    )


def test_reports_the_whole_and_shares_the_slice() -> None:
    local = torch.arange(5.0)
    value = SliceTensor(local, (3, 4), (1, 3), 2)
    assert value.shape == (3, 4) and value.stride() == (1, 3) and value.numel() == 12
    assert (value.dtype, value.device, value.offset) == (local.dtype, local.device, 2)
    assert value.local().data_ptr() == local.data_ptr()
    assert "elements [2, 7) of 12" in repr(value)
    assert isinstance(value, _Checkpointable)


def test_copies() -> None:
    value = a_slice()
    address = value.local().data_ptr()
    for other in (value.clone(), copy.deepcopy(value), value.to(torch.float32, copy=True)):
        assert same(other, value)
        assert other.local().data_ptr() != address
    for other in (value.detach(), value.data, value.cpu(), value.to("cpu"), copy.copy(value)):
        assert same(other, value)
        assert other.local().data_ptr() == address
    assert same(value.double().float(), value)
    assert value.to("meta").local().device.type == "meta"
    for other in (torch.zeros_like(value), torch.empty_like(value), value.new_empty((3, 4))):
        assert same(other.copy_(value), value)
    assert same(value.double().copy_(value).float(), value)
    both = {"a": value, "b": value}
    both = copy.deepcopy(both)
    assert both["a"] is both["b"]


@pytest.mark.parametrize(
    "other",
    [
        SliceTensor(torch.zeros(5), (3, 4), (1, 3), 3),
        SliceTensor(torch.zeros(4), (3, 4), (1, 3), 2),
        SliceTensor(torch.zeros(5), (3, 4), (4, 1), 2),
        SliceTensor(torch.zeros(5), (4, 3), (1, 4), 2),
        torch.zeros(3, 4),
    ],
)
def test_copy_wants_the_same_slice(other: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="full_state_dict"):
        a_slice().copy_(other)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: x.sum(),
        lambda x: x[0],
        lambda x: x.view(-1),
        lambda x: torch.stack([x, x]),
        lambda x: torch.zeros(3, 4).copy_(x),
        lambda x: torch.zeros(3, 4).add_(x),
        lambda x: torch._foreach_add([x], 1),
        lambda x: x.contiguous(),
        lambda x: x.clone(memory_format=torch.contiguous_format),
        lambda x: x.new_empty((2, 2)),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.__dlpack__(),
        lambda x: x.apply_(abs),
        lambda x: x.map2_(x, x, max),
        lambda x: list(x),
        lambda x: x == x,
    ],
)
def test_computing_is_refused(compute: Any) -> None:
    with pytest.raises(RuntimeError, match=r"slice of optimizer state \(elements \[2, 7\) of 12"):
        compute(a_slice())


@pytest.mark.parametrize(
    ("local", "offset"),
    [
        (torch.zeros(2, 2), 0),
        (torch.zeros(()), 0),
        (torch.zeros(8)[::2], 0),
        (torch.zeros(8), 5),
        (torch.zeros(8), -1),
        (a_slice(), 0),
    ],
)
def test_a_bad_slice_is_refused(local: torch.Tensor, offset: int) -> None:
    with pytest.raises(ValueError):
        SliceTensor(local, (3, 4), (4, 1), offset)


def test_pickle_and_torch_save() -> None:
    part = torch.arange(1000.0)[10:15]
    for value in (
        a_slice(),
        a_slice(dtype=torch.bfloat16),
        SliceTensor(part, (3, 4), (1, 3), 2),
        SliceTensor(torch.empty(0), (3, 4), (4, 1), 12),
        SliceTensor(torch.ones(1), (), (), 0),
        SliceTensor(torch.empty(0), (0, 2), (2, 1), 0),
    ):
        assert same(pickle.loads(pickle.dumps(value)), value)
        for weights_only in (True, False):
            file = io.BytesIO()
            torch.save({"state": {0: {"exp_avg": value}}}, file)
            assert file.tell() < 3000, "saved the storage of others"
            file.seek(0)
            loaded = torch.load(file, weights_only=weights_only)["state"][0]["exp_avg"]
            assert same(loaded, value)


def test_weights_only_load_in_a_new_process(tmp_path: Path) -> None:
    torch.save({"exp_avg": a_slice()}, tmp_path / "state.pt")
    code = (
        "import sys, torch\n"
        "import fusedpg.optim._slices\n"
        "value = torch.load(sys.argv[1], weights_only=True)['exp_avg']\n"
        "print(type(value).__name__, tuple(value.shape), value.stride(), value.offset,"
        " value.local().tolist())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state.pt")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "SliceTensor (3, 4) (1, 3) 2 [0.0, 1.0, 2.0, 3.0, 4.0]"


def test_parts_are_views() -> None:
    value = a_slice()
    for chunk in value.__create_chunk_list__():
        value.__get_tensor_shard__(MetadataIndex("x", chunk.offsets)).fill_(7.0)
    assert value.local().eq(7.0).all()
    with pytest.raises(ValueError, match="offset"):
        value.__get_tensor_shard__(MetadataIndex("x", (2, 3)))
    with pytest.raises(ValueError, match="offset"):
        value.__get_tensor_shard__(MetadataIndex("x"))


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
