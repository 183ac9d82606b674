"""The functions of libfusedpg_cuda.so as ctypes see them, and launches of its kernels on tensors.

The structures are those of `csrc/cuda/launch.hpp` and `cuda_api.hpp`, in their order;
`tests/gpu/test_gpu_table.py` compares sizes and offsets with the compiler's. Nothing here needs
torch.distributed: a launch sees one rank of a group that need not exist.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TILE = 4096  # kTile
SHARD_ALIGNMENT = 32
AGREE_BYTES = 4096
SGD, ADAM, LAMB = range(3)  # kernels::Formula
DTYPES = {torch.float16: 5, torch.bfloat16: 6, torch.float32: 7, torch.float64: 8}


class TensorInfo(Structure):
    _fields_ = [
        ("param", c_void_p),
        ("grad", c_void_p),
        ("output", c_void_p),
        ("master", c_void_p),
        ("state", c_void_p * 3),
        ("step", c_void_p),
        ("count", c_uint64),
        ("shard", c_uint64),
        ("hyper", c_uint32),
        ("unused", c_uint32),
    ]


class Piece(Structure):
    _fields_ = [
        ("tensor", c_uint32),
        ("unused", c_uint32),
        ("begin", c_uint64),
        ("length", c_uint64),
        ("wire", c_uint64),
    ]


class Tile(Structure):
    _fields_ = [("piece", c_uint32), ("index", c_uint32)]


class Chunk(Structure):
    _fields_ = [
        ("tensors", c_void_p),
        ("pieces", c_void_p),
        ("tiles", c_void_p),
        ("num_tiles", c_uint32),
        ("rank", c_int32),
        ("size", c_int32),
        ("unused", c_uint32),
        ("block", c_uint64),
    ]


class Hyper(Structure):
    _fields_ = [
        *((name, c_double) for name in ("lr", "beta1", "beta2", "eps")),
        *((name, c_double) for name in ("weight_decay", "momentum", "dampening")),
        *((name, c_bool) for name in ("nesterov", "first_step", "decoupled", "amsgrad")),
        *((name, c_bool) for name in ("maximize", "trust_clip", "always_adapt")),
    ]


class SgdScalars(Structure):
    _fields_ = [
        *((name, c_double) for name in ("lr", "weight_decay", "momentum", "one_minus_dampening")),
        ("nesterov", c_bool),
        ("first_step", c_bool),
    ]


class AdamScalars(Structure):
    _fields_ = [
        *((name, c_double) for name in ("decay", "l2", "beta1", "one_minus_beta1", "beta2")),
        *((name, c_double) for name in ("one_minus_beta2", "eps", "step_size")),
        ("bias_correction2_sqrt", c_double),
        ("decoupled", c_bool),
        ("amsgrad", c_bool),
    ]


class LambScalars(Structure):
    _fields_ = [
        *((name, c_double) for name in ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2")),
        *((name, c_double) for name in ("eps", "inverse_bias_correction1")),
        *((name, c_double) for name in ("inverse_bias_correction2", "weight_decay", "step_size")),
    ]


class TensorScalars(Structure):
    _fields_ = [
        ("sgd", SgdScalars),
        ("adam", AdamScalars),
        ("lamb", LambScalars),
        ("grad_factor", c_double),
        ("skip", c_bool),
    ]


class ProposeArgs(Structure):
    _fields_ = [
        ("agree", c_void_p),
        ("used", c_void_p),
        ("found_inf", c_void_p),
        ("hash", c_uint64),
        ("tensors", c_uint32),
        ("unused", c_uint32),
    ]


class PrepareArgs(Structure):
    _fields_ = [
        ("agree", c_void_p),
        ("tensors", c_void_p),
        ("hypers", c_void_p),
        ("lrs", c_void_p),
        ("lr_types", c_void_p),
        ("grad_scale", c_void_p),
        ("weights", c_void_p),
        ("divisor", c_double),
        ("scalars", c_void_p),
        ("used", c_void_p),
        ("found_inf", c_void_p),
        ("mismatch", c_void_p),
        ("sequence", c_uint64),
        ("num_tensors", c_uint32),
        ("size", c_int32),
    ]


class PackArgs(Structure):
    _fields_ = [
        ("chunk", Chunk),
        ("wire", c_void_p),
        ("type", c_uint8),
        ("weight", c_double),
    ]


class UnpackArgs(Structure):
    _fields_ = [
        ("chunk", Chunk),
        ("wire", c_void_p),
        ("type", c_uint8),
        ("to_outputs", c_bool),
        ("scalars", c_void_p),
        ("divisor", c_double),
        ("weights", c_void_p),
        ("used", c_void_p),
    ]


class UpdateArgs(Structure):
    _fields_ = [
        ("chunk", Chunk),
        ("formula", c_uint8),
        ("param_type", c_uint8),
        ("grad_type", c_uint8),
        ("state_type", c_uint8),
        ("masters", c_bool),
        ("decoupled", c_bool),
        ("amsgrad", c_bool),
        ("momentum", c_bool),
        ("nesterov", c_bool),
        ("scalars", c_void_p),
        ("grads", c_void_p),
        ("params_out", c_void_p),
    ]


class MomentsArgs(Structure):
    _fields_ = [("update", UpdateArgs), ("tile_sums", c_void_p)]


class AddSumsArgs(Structure):
    _fields_ = [
        ("partial", c_void_p),
        ("list", c_void_p),
        ("begin", c_void_p),
        ("sums", c_void_p),
        ("num_tensors", c_uint32),
        ("pairs", c_uint32),
    ]


class TrustArgs(Structure):
    _fields_ = [
        ("gathered", c_void_p),
        ("tensors", c_void_p),
        ("hypers", c_void_p),
        ("scalars", c_void_p),
        ("num_tensors", c_uint32),
        ("size", c_int32),
    ]


class DirectArgs(Structure):
    _fields_ = [
        ("update", UpdateArgs),
        ("offsets", c_void_p),
        ("weights", c_void_p),
        ("present", c_void_p),
        ("num_tensors", c_uint32),
        ("unused", c_uint32),
        ("signals", c_void_p),
        ("stop", c_void_p),
        ("context", c_void_p),
    ]


class TensorBlocks(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("count", c_uint64),
        ("block", c_uint64),
        ("type", c_uint8),
    ]


class FindBlocksArgs(Structure):
    _fields_ = [
        ("tensor", TensorBlocks),
        ("num_blocks", c_uint64),
        ("flags", c_void_p),
        ("present", c_void_p),
    ]


class ListBlocksArgs(Structure):
    _fields_ = [
        ("flags", c_void_p),
        ("num_blocks", c_uint64),
        ("list", c_void_p),
        ("present", c_void_p),
        ("found", c_void_p),
    ]


class MoveBlocksArgs(Structure):
    _fields_ = [
        ("tensor", TensorBlocks),
        ("list", c_void_p),
        ("wire", c_void_p),
        ("num_items", c_uint32),
        ("to_wire", c_bool),
    ]


class DirectCounts(Structure):
    _fields_ = [(name, c_uint64) for name in ("blocks_union", "blocks_present", "sent", "received")]


class DirectSumArgs(Structure):
    _fields_ = [
        ("tensor", TensorBlocks),
        ("num_blocks", c_uint64),
        ("shard", c_uint64),
        ("agree", c_void_p),
        ("offsets", c_void_p),
        ("flags", c_void_p),
        ("counts", c_void_p),
        ("rank", c_int32),
        ("size", c_int32),
        ("mean", c_bool),
        ("signals", c_void_p),
        ("stop", c_void_p),
        ("context", c_void_p),
    ]


def _launch(args: type[Structure]) -> Any:
    return CFUNCTYPE(c_int, POINTER(args), c_void_p)


_STREAM = CFUNCTYPE(c_int, c_void_p)
_OUT = CFUNCTYPE(c_int, POINTER(c_void_p))
_OUT_INT = CFUNCTYPE(c_int, POINTER(c_int))
_ALLOCATE = CFUNCTYPE(c_int, POINTER(c_void_p), c_size_t)


class CudaApi(Structure):
    _fields_ = [
        ("version", c_uint32),
        ("bytes", c_uint32),
        ("name", c_char_p),
        ("direct_nccl_version", c_int32),
        ("runtime_version", c_int32),
        ("error_string", CFUNCTYPE(c_char_p, c_int)),
        ("device_count", _OUT_INT),
        ("get_device", _OUT_INT),
        ("set_device", CFUNCTYPE(c_int, c_int)),
        ("stream_create", _OUT),
        ("stream_destroy", _STREAM),
        ("stream_synchronize", _STREAM),
        ("stream_wait_event", CFUNCTYPE(c_int, c_void_p, c_void_p)),
        ("stream_capture", CFUNCTYPE(c_int, c_void_p, POINTER(c_uint64))),
        ("event_create", _OUT),
        ("event_destroy", _STREAM),
        ("event_record", CFUNCTYPE(c_int, c_void_p, c_void_p)),
        ("event_query", _STREAM),
        ("allocate", _ALLOCATE),
        ("release", _STREAM),
        ("host_allocate", _ALLOCATE),
        ("host_release", _STREAM),
        ("copy", CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)),
        ("clear", CFUNCTYPE(c_int, c_void_p, c_size_t, c_void_p)),
        ("propose", _launch(ProposeArgs)),
        ("prepare", _launch(PrepareArgs)),
        ("pack", _launch(PackArgs)),
        ("unpack", _launch(UnpackArgs)),
        ("update", _launch(UpdateArgs)),
        ("lamb_moments", _launch(MomentsArgs)),
        ("add_sums", _launch(AddSumsArgs)),
        ("trust", _launch(TrustArgs)),
        ("find_blocks", _launch(FindBlocksArgs)),
        ("list_blocks", _launch(ListBlocksArgs)),
        ("move_blocks", _launch(MoveBlocksArgs)),
        ("direct_create", CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(c_int))),
        ("direct_destroy", _STREAM),
        ("direct_step", _launch(DirectArgs)),
        ("direct_sum", _launch(DirectSumArgs)),
    ]


def library() -> Path:
    """Where the engine looks for the kernels."""
    named = os.environ.get("FUSEDPG_CUDA_LIB")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("fusedpg")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("fusedpg is not installed")
    return Path(spec.submodule_search_locations[0]) / "libfusedpg_cuda.so"


def load(path: Path | None = None) -> CudaApi:
    """The table of a library.

    Raises:
        OSError: when there is none.
        RuntimeError: when it was built from other headers than this file describes.
    """
    get = ctypes.CDLL(str(path or library())).fusedpg_cuda_api
    get.restype = POINTER(CudaApi)
    api: CudaApi = get().contents
    if api.bytes != ctypes.sizeof(CudaApi):
        raise RuntimeError(
            f"the table has {api.bytes} bytes, this description {ctypes.sizeof(CudaApi)}"
        )
    return api


# ---------------------------------------------------------------------------------------------
# Launches


def upload(data: Any, device: torch.device) -> Tensor:
    """The bytes of ctypes values in the memory of a device."""
    raw = bytearray(bytes(data)) or bytearray(16)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().to(device)


def shard_size(count: int, size: int) -> int:
    chunk = -(-count // size)
    return -(-chunk // SHARD_ALIGNMENT) * SHARD_ALIGNMENT


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


class Slices:
    """What a launch knows of some tensors: one chunk that holds all of this rank's slices.

    `grads` are whole gradients, or wire blocks of reduced ones passed to `update`. States and
    masters are slices.
    """

    def __init__(
        self,
        api: CudaApi,
        rank: int,
        size: int,
        hyper: dict[str, Any],
        params: Sequence[Tensor],
        *,
        grads: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        masters: Sequence[Tensor] | None = None,
        states: Sequence[Sequence[Tensor]] = (),
        steps: Sequence[Tensor] | None = None,
    ) -> None:
        self.api, self.rank, self.size = api, rank, size
        self.device = params[0].device
        self.counts = [param.numel() for param in params]
        self.shards = [shard_size(count, size) for count in self.counts]
        # Kept: the device's arrays hold their addresses.
        self.params, self.grads, self.outputs = params, grads, outputs
        self.masters, self.states, self.steps = masters, states, steps
        infos = (TensorInfo * len(params))()
        pieces = (Piece * len(params))()
        tiles, begins, wire = [], [0], 0
        for i, (info, piece) in enumerate(zip(infos, pieces, strict=True)):
            info.param = address(params[i])
            info.grad = address(grads[i]) if grads else None
            info.output = address(outputs[i]) if outputs else None
            info.master = address(masters[i]) if masters else None
            info.state = (c_void_p * 3)(*(address(state[i]) for state in states))
            info.step = address(steps[i]) if steps else None
            info.count, info.shard = self.counts[i], self.shards[i]
            piece.tensor, piece.length, piece.wire = i, self.shards[i], wire
            wire += self.shards[i]
            indices = torch.arange(-(-self.shards[i] // TILE), dtype=torch.int32)
            tiles.append(torch.stack([torch.full_like(indices, i), indices], 1))
            begins.append(begins[-1] + len(indices))
        self.block = wire
        self._infos = upload(infos, self.device)
        self._pieces = upload(pieces, self.device)
        self._tiles = torch.cat(tiles).contiguous().to(self.device)
        self._begins = torch.tensor(begins, dtype=torch.int32).to(self.device)
        self._list = torch.arange(begins[-1], dtype=torch.int32).to(self.device)
        self.hyper = {"decoupled": True} | hyper
        self._hypers = upload(Hyper(**self.hyper), self.device)
        self.scalars = torch.zeros(
            len(params) * ctypes.sizeof(TensorScalars), dtype=torch.uint8, device=self.device
        )
        self.tile_sums = torch.zeros(2 * begins[-1], dtype=torch.float64, device=self.device)
        self.sums = torch.zeros(2 * len(params), dtype=torch.float64, device=self.device)
        self.num_tiles = begins[-1]
        self.chunk = Chunk(
            address(self._infos),
            address(self._pieces),
            address(self._tiles),
            self.num_tiles,
            rank,
            size,
            0,
            self.block,
        )
        self.own_stream: int | None = None

    def stream(self) -> int | None:
        """Torch's, or one of its own where the library is not CUDA's (a fake in tests)."""
        if self.device.type == "cuda":
            return int(torch.cuda.current_stream(self.device).cuda_stream)
        if self.own_stream is None:
            made = c_void_p()
            self.call("stream_create", ctypes.byref(made))
            self.own_stream = made.value
        return self.own_stream

    def call(self, name: str, *args: Any) -> None:
        error = getattr(self.api, name)(*args)
        if error != 0:
            raise RuntimeError(f"{name}: {self.api.error_string(error).decode()}")

    def launch(self, name: str, args: Structure) -> None:
        self.call(name, ctypes.byref(args), self.stream())

    def synchronize(self) -> None:
        self.call("stream_synchronize", self.stream())

    def propose(
        self, agree: Tensor, number: int, *, used: Tensor | None = None, found: Tensor | None = None
    ) -> None:
        """`number`: the hash of the call."""
        args = ProposeArgs(
            address(agree), address(used), address(found), number, len(self.counts), 0
        )
        self.launch("propose", args)

    def prepare(self, *, divisor: float = 1.0, **pointers: Tensor | None) -> None:
        args = PrepareArgs()
        args.tensors, args.hypers = address(self._infos), address(self._hypers)
        args.divisor, args.scalars = divisor, address(self.scalars)
        args.num_tensors, args.size = len(self.counts), self.size
        for name, tensor in pointers.items():
            setattr(args, name, address(tensor))
        args.sequence = 7
        self.launch("prepare", args)

    def pack(self, wire: Tensor, weight: float = 1.0) -> None:
        args = PackArgs(self.chunk, address(wire), DTYPES[wire.dtype], weight)
        self.launch("pack", args)

    def unpack(self, wire: Tensor, *, to_outputs: bool = False, divisor: float = 1.0) -> None:
        args = UnpackArgs(
            self.chunk, address(wire), DTYPES[wire.dtype], to_outputs, None, divisor, None, None
        )
        self.launch("unpack", args)

    def _update(self, formula: int, grads: Tensor | None, out: Tensor | None) -> UpdateArgs:
        param_type = self.params[0].dtype
        state = self.states[0][0].dtype if self.states else torch.float32
        args = UpdateArgs(self.chunk, formula, DTYPES[param_type])
        args.grad_type = DTYPES[(param_type if grads is None else grads.dtype)]
        if grads is None and self.grads:
            args.grad_type = DTYPES[self.grads[0].dtype]
        args.state_type = DTYPES[state]
        args.masters = self.masters is not None
        args.decoupled = self.hyper["decoupled"]
        args.amsgrad = self.hyper.get("amsgrad", False)
        args.momentum = self.hyper.get("momentum", 0) != 0
        args.nesterov = self.hyper.get("nesterov", False)
        args.scalars, args.grads = address(self.scalars), address(grads)
        args.params_out = address(out)
        return args

    def update(self, formula: int, grads: Tensor | None, out: Tensor | None = None) -> None:
        """`grads`, `out`: this rank's wire blocks; without them the tensors themselves."""
        self.launch("update", self._update(formula, grads, out))

    def lamb(self, grads: Tensor | None, out: Tensor | None = None) -> None:
        """Both halves of a step of a group of one rank."""
        args = self._update(LAMB, grads, out)
        self.launch("lamb_moments", MomentsArgs(args, address(self.tile_sums)))
        count = len(self.counts)
        self.launch(
            "add_sums",
            AddSumsArgs(
                address(self.tile_sums),
                address(self._list),
                address(self._begins),
                address(self.sums),
                count,
                1,
            ),
        )
        self.launch(
            "trust",
            TrustArgs(
                address(self.sums),
                address(self._infos),
                address(self._hypers),
                address(self.scalars),
                count,
                1,
            ),
        )
        self.launch("update", args)
