"""The kernels of the direct path for two ranks in one process, on one GPU.

Each rank has memory of its own, as symmetric memory has it, so the kernels are those of the engine,
bit by bit. Both ranks' kernels run at once and meet at their barriers.

    python tests/gpu/kernel_driver.py direct           # both at once
    python tests/gpu/kernel_driver.py direct-in-turn   # for compute-sanitizer, which may serialize

In turn no kernel waits for another one: the signals of those still to come are there already, and
the exchange, which needs what the others tell, is left out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from gpu_checks import table
from gpu_checks.device import DEVICE
from gpu_checks.kernels import BF16, COUNTS, FORMULAS, FP32, HYPER, TYPES, make, own
from gpu_checks.kernels import torch_optimizer as optimizer

RANKS = 2
STRIDE = 1 << 32
ARENA = 8 << 20
ALIGNMENT = 512
STEPS = 3
HASH = 0x0123_4567_89AB_CDEF  # rank 0's
FLAGS = 16  # kHeaderFlags
EPOCH = 0  # the word of DirectSignals
PASSED = 1 << 40  # an epoch that no barrier reaches
NAMES = {torch.float64: "<f8", FP32: "<f4", torch.int64: "<i8", torch.uint8: "|u1"}


def succeed(result: Any) -> Any:
    """What a function of cuda.bindings gives beside the error code."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA driver: {error}")
    return values[0] if len(values) == 1 else values


def view(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that is mapped there."""
    bits = dtype if dtype in NAMES else torch.int16
    interface = {
        "shape": (count,),
        "typestr": NAMES.get(bits, "<i2"),
        "data": (address, False),
        "version": 3,
    }
    holder = type("Memory", (), {"__cuda_array_interface__": interface})()
    return torch.as_tensor(holder, device=DEVICE).view(dtype)


class Arenas:
    """Memory of each rank, mapped at `base + rank * STRIDE`."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = DEVICE.index or 0
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = succeed(driver.cuMemGetAllocationGranularity(prop, minimum))
        self.bytes = -(-(ARENA + table.DIRECT_ROOM) // unit) * unit
        self.base = int(succeed(driver.cuMemAddressReserve(RANKS * STRIDE, STRIDE, 0, 0)))
        access = driver.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.handles = []
        for rank in range(RANKS):
            handle = succeed(driver.cuMemCreate(self.bytes, prop, 0))
            self.handles.append(handle)
            succeed(driver.cuMemMap(self.place(rank), self.bytes, 0, handle, 0))
            succeed(driver.cuMemSetAccess(self.place(rank), self.bytes, [access], 1))
            view(self.place(rank), self.bytes, torch.uint8).zero_()
        self.taken = 0

    def place(self, rank: int) -> int:
        return self.base + rank * STRIDE

    def take(
        self, count: int, dtype: torch.dtype, shift: int = 0
    ) -> tuple[int, list[torch.Tensor]]:
        """The offset of a tensor, and it in every rank's memory."""
        offset = self.taken + shift * dtype.itemsize
        self.taken += -(-(count + shift) * dtype.itemsize // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        assert self.taken <= ARENA, "the arena is too small"
        return offset, [view(self.place(r) + offset, count, dtype) for r in range(RANKS)]

    def signals(self, rank: int) -> torch.Tensor:
        """By thread block: the epoch, and what each rank has passed, as 64-bit words."""
        words = table.SIGNAL_BYTES // 8
        count = table.DIRECT_BLOCKS * words
        return view(self.place(rank) + ARENA, count, torch.int64).view(table.DIRECT_BLOCKS, words)

    def close(self) -> None:
        torch.cuda.synchronize(DEVICE)
        for rank, handle in enumerate(self.handles):
            succeed(self.driver.cuMemUnmap(self.place(rank), self.bytes))
            succeed(self.driver.cuMemRelease(handle))
        succeed(self.driver.cuMemAddressFree(self.base, RANKS * STRIDE))


@contextlib.contextmanager
def arenas() -> Iterator[Arenas]:
    torch.zeros(1, device=DEVICE)  # a context
    made = Arenas()
    try:
        yield made
    finally:
        made.close()


def pass_barriers(memory: Arenas, value: int) -> None:
    """What every rank has signalled to every other one; epochs start anew."""
    for rank in range(RANKS):
        signals = memory.signals(rank)
        signals.fill_(value)
        signals[:, EPOCH] = 0


def exchange(
    launch: Any, mapped: Any, rank: int, own_offsets: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Gets `offsets`, all ranks', by the kernel, and gives the headers, a row for each rank."""
    offsets.fill_(-1)
    row = -(-table.header_bytes(len(COUNTS)) // 8) * 8
    headers = torch.zeros(RANKS, row, dtype=torch.uint8, device=DEVICE)
    used = torch.tensor([t % RANKS == rank for t in range(len(COUNTS))], device=DEVICE)
    launch.propose(headers[rank], HASH + rank, used=used.to(torch.uint8))
    launch.exchange(mapped, headers, own_offsets, offsets)
    return headers


def check_headers(headers: torch.Tensor) -> None:
    """Each rank's hash and flags (found_inf, then those of the tensors) are in its row."""
    flags = FLAGS + 1
    for rank, row in enumerate(headers.cpu()):
        assert int(row.view(torch.int64)[0]) == HASH + rank
        want = [int(t % RANKS == rank) for t in range(len(COUNTS))]
        assert row[flags : flags + len(COUNTS)].tolist() == want, f"flags of rank {rank}"


def step(
    api: Any,
    formula: str,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    masters: bool,
    in_turn: bool,
    shift: int,
    **changed: Any,
) -> None:
    """Three steps of both ranks against torch.optim; replicas must have the same bits."""
    hyper = HYPER | changed
    param_type, grad_type, state_type = types
    wide = torch.float64 if param_type == torch.float64 else FP32
    count = 2 + hyper.get("amsgrad", False) if formula != "sgd" else 1
    if formula == "sgd" and not hyper.get("momentum"):
        count = 0
    with arenas() as memory:
        mapped = table.MappedArenas(api, memory.base, STRIDE, RANKS, ARENA)
        placed = [
            (memory.take(n, grad_type, shift), memory.take(n, param_type, shift)) for n in COUNTS
        ]
        start = make(3, COUNTS, param_type)
        pairs = [[grad[0], param[0]] for grad, param in placed]
        own_offsets = torch.tensor(pairs, dtype=torch.int64, device=DEVICE)
        offsets = [own_offsets.repeat(RANKS, 1, 1) for _ in range(RANKS)]
        shards = [table.shard_size(n, RANKS) for n in COUNTS]
        params = [[param[1][r] for _, param in placed] for r in range(RANKS)]
        grads = [[grad[1][r] for grad, _ in placed] for r in range(RANKS)]
        states, master, counters = [], [], []
        for rank in range(RANKS):
            for to, value in zip(params[rank], start, strict=True):
                to.copy_(value)
            slices = [own(p, rank, s) for p, s in zip(params[rank], shards, strict=True)]
            states.append(
                [
                    [torch.zeros(s.numel(), dtype=state_type, device=DEVICE) for s in slices]
                    for _ in range(count)
                ]
            )
            master.append([s.to(FP32) for s in slices] if masters else [])
            counters.append([torch.zeros((), device=DEVICE) for _ in COUNTS])
        twins = [value.cpu().to(wide).requires_grad_() for value in start]
        oracle = optimizer(formula, hyper, twins)
        streams = [torch.cuda.Stream(DEVICE) for _ in range(RANKS)]
        for number in range(STEPS):
            made = [make(10 + RANKS * number + r, COUNTS, grad_type) for r in range(RANKS)]
            for rank, own_made in enumerate(made):
                for to, value in zip(grads[rank], own_made, strict=True):
                    to.copy_(value)
            first = formula == "sgd" and number == 0
            if in_turn:
                pass_barriers(memory, PASSED)
            launches = [
                table.Slices(
                    api,
                    rank,
                    RANKS,
                    hyper | {"first_step": first},
                    params[rank],
                    grads=grads[rank],
                    masters=master[rank],
                    states=states[rank],
                    steps=counters[rank],
                )
                for rank in range(RANKS)
            ]
            for launch in launches:
                launch.prepare(divisor=float(RANKS))
            torch.cuda.synchronize(DEVICE)
            told = []
            for rank, (launch, stream, known) in enumerate(
                zip(launches, streams, offsets, strict=True)
            ):
                with torch.cuda.stream(stream):
                    if not in_turn:
                        told.append(exchange(launch, mapped, rank, own_offsets, known))
                    launch.direct_step(formula, mapped, known)
                if in_turn:
                    torch.cuda.synchronize(DEVICE)
            torch.cuda.synchronize(DEVICE)
            for headers in told:
                check_headers(headers)
            for t, twin in enumerate(twins):
                total = sum(one[t].cpu().to(wide) for one in made)
                twin.grad = total / RANKS
            oracle.step()
            for twin in twins:
                if not masters:
                    twin.data.copy_(twin.detach().to(param_type))
                for key, value in oracle.state[twin].items():
                    if key != "step" and value is not None:
                        value.copy_(value.to(state_type))
        noise = {torch.float64: 1e-13, FP32: 2e-6, torch.float16: 1e-3, BF16: 8e-3}[param_type]
        for t, twin in enumerate(twins):
            replicas = [one[t].cpu() for one in params]
            assert torch.equal(replicas[0], replicas[1]), f"tensor {t}: ranks differ"
            want = twin.detach()
            error = float((replicas[0].to(wide) - want).norm())
            assert error <= noise * max(1.0, float(want.norm())), (t, error)


def cases(in_turn: bool) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The compute-sanitizer takes its time: fewer in turn."""
    kinds = ("fp32", "bf16") if in_turn else tuple(TYPES)
    chosen = []
    for title, (formula, changed) in FORMULAS.items():
        if formula == "lamb":
            continue  # needs sums of all ranks in between
        for kind, shift in itertools.product(kinds, (0,) if in_turn else (0, 1)):
            name = f"{title}, {kind}, shifted by {shift}"
            masters = kind == "bf16"
            chosen.append((name, (formula, TYPES[kind], masters, in_turn, shift), changed))
    return chosen


def run_all(context: Any, in_turn: bool = False) -> int:
    api = table.load()
    for name, arguments, changed in cases(in_turn):
        try:
            step(api, *arguments, **changed)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return len(cases(in_turn))
