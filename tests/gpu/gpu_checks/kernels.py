"""The kernels alone, through the table of libfusedpg_cuda.so, on one process.

The functions are also what compute-sanitizer runs: python kernel_driver.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from checks.cases import randn
from checks.optim_script import in_one_process
from gpu_checks import table
from gpu_checks.device import DEVICE

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Less than a vector, odd, more than a tile, several tiles; a rank without a share.
COUNTS = (5, 1, 4096 * 2, 33_333, 64, 0, 4099)
HYPER = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-7, "weight_decay": 0.1}


def make(seed: int, counts: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(seed, i, numel=n).to(dtype).to(DEVICE) for i, n in enumerate(counts)]


def own(tensor: torch.Tensor, rank: int, shard: int) -> torch.Tensor:
    return tensor[rank * shard : (rank + 1) * shard]


def wire_of(launch: table.Slices, tensors: list[torch.Tensor], block: int) -> torch.Tensor:
    """The block that a rank's slices make: zeros where a tensor ends."""
    parts = []
    for tensor, shard in zip(tensors, launch.shards, strict=True):
        part = own(tensor, block, shard)
        parts += [part, part.new_zeros(shard - part.numel())]
    return torch.cat(parts)


def moves(api: table.CudaApi, dtype: torch.dtype, size: int) -> None:
    """Pack and unpack, there and back."""
    grads = make(1, COUNTS, dtype)
    for rank in range(size):
        params = [torch.zeros_like(grad) for grad in grads]
        outputs = [torch.full_like(grad, 7) for grad in grads]
        launch = table.Slices(api, rank, size, HYPER, params, grads=grads, outputs=outputs)
        wire = torch.full((launch.block * size,), 9, dtype=dtype, device=DEVICE)
        launch.pack(wire)
        launch.synchronize()
        for block in range(size):
            want = wire_of(launch, grads, block)
            assert torch.equal(own(wire, block, launch.block), want), (rank, block)
        launch.unpack(wire)
        launch.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(params, grads, strict=True))
        mine = own(wire, rank, launch.block).clone()
        launch.unpack(mine, to_outputs=True, divisor=4.0)
        launch.pack(wire, 0.5)
        launch.synchronize()
        for output, grad, shard in zip(outputs, grads, launch.shards, strict=True):
            want = torch.full_like(grad, 7)
            own(want, rank, shard).copy_(own(grad, rank, shard) / 4)
            assert torch.equal(output, want), "written outside the slice"
        for block in range(size):
            want = wire_of(launch, [grad * 0.5 for grad in grads], block)
            assert torch.equal(own(wire, block, launch.block), want), "weighted"


def agreement(api: table.CudaApi) -> None:
    """Proposals, and what is made of all ranks'."""
    params = make(2, COUNTS, FP32)
    steps = [torch.full((), 3.0, device=DEVICE) for _ in params]
    launch = table.Slices(api, 0, 2, HYPER, params, steps=steps)
    used = torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.uint8, device=DEVICE)
    number = 0x0123_4567_89AB_CDEF
    bytes_each = -(-table.header_bytes(len(params)) // 8) * 8
    headers = torch.zeros(2, bytes_each, dtype=torch.uint8, device=DEVICE)

    def propose(rank: int, found: float, flags: torch.Tensor | None, value: int = number) -> None:
        flag = torch.tensor(found, device=DEVICE)
        launch.propose(headers[rank], value, used=flags, found=flag)
        launch.synchronize()

    propose(0, 0, used)
    propose(1, 0, used.flip(0).contiguous())
    seen = torch.zeros_like(used)
    mismatch = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    launch.prepare(headers=headers, hash=number, used=seen, mismatch=mismatch, sequence=7)
    launch.synchronize()
    want = torch.maximum(used, used.flip(0))
    assert torch.equal(seen, want) and int(mismatch) == 0
    assert [float(step) for step in steps] == [3.0 + float(flag) for flag in want]
    # One rank has seen an infinity.
    found = torch.zeros((), device=DEVICE)
    propose(0, 1, None)
    propose(1, 0, None)
    launch.prepare(headers=headers, hash=number, found_inf=found, mismatch=mismatch, sequence=7)
    launch.synchronize()
    assert float(found) == 1 and int(mismatch) == 0
    # They do different things.
    propose(0, 0, None)
    propose(1, 0, None, number + 1)
    launch.prepare(headers=headers, hash=number, mismatch=mismatch, sequence=7)
    launch.synchronize()
    assert int(mismatch) == 7, "the sequence number of the disagreement"
    assert [float(step) for step in steps] == [3.0 + float(flag) for flag in want]


def torch_optimizer(formula: str, hyper: dict[str, Any], params: list[torch.Tensor]) -> Any:
    adam = "AdamW" if hyper.get("decoupled", True) else "Adam"
    kind = {"sgd": "SGD", "lamb": "LAMB"}.get(formula, adam)
    options: dict[str, Any] = {"lr": hyper["lr"], "weight_decay": hyper["weight_decay"]}
    if kind == "SGD":
        options |= {
            "momentum": hyper.get("momentum", 0.0),
            "nesterov": hyper.get("nesterov", False),
        }
    else:
        options |= {"betas": (hyper["beta1"], hyper["beta2"]), "eps": hyper["eps"]}
    if kind == adam:
        options["amsgrad"] = hyper.get("amsgrad", False)
    return in_one_process(kind, params, **options)


def update(
    api: table.CudaApi,
    formula: str,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    masters: bool = False,
    size: int = 2,
    **changed: Any,
) -> None:
    """Three steps of the slices of one rank, from a wire block of reduced gradients."""
    hyper = HYPER | changed
    param_type, grad_type, state_type = types
    wide = FP64 if param_type == FP64 else FP32
    # LAMB's norms are of whole tensors.
    size = 1 if formula == "lamb" else size
    rank = size - 1
    params = make(3, COUNTS, param_type)
    shards = [table.shard_size(n, size) for n in COUNTS]
    slices = [own(p, rank, s).clone() for p, s in zip(params, shards, strict=True)]
    count = 2 + hyper.get("amsgrad", False) if formula != "sgd" else 1
    if formula == "sgd" and not hyper.get("momentum"):
        count = 0
    states = [[torch.zeros_like(s, dtype=state_type) for s in slices] for _ in range(count)]
    master = [s.to(FP32) for s in slices] if masters else []
    steps = [torch.zeros((), device=DEVICE) for _ in params]
    before = [param.clone() for param in params]
    twins = [s.detach().cpu().to(wide).requires_grad_() for s in slices]
    oracle = torch_optimizer(formula, hyper, twins)
    for number in range(3):
        first = formula == "sgd" and number == 0
        launch = table.Slices(
            api,
            rank,
            size,
            hyper | {"first_step": first},
            params,
            masters=master,
            states=states,
            steps=steps,
        )
        reduced = make(10 + number, COUNTS, grad_type)
        block = wire_of(launch, reduced, rank)
        out = torch.zeros(launch.block, dtype=param_type, device=DEVICE)
        launch.prepare(divisor=2.0)
        if formula == "lamb":
            launch.lamb(block)
        else:
            # To the wire first, which leaves the parameters alone, then in place.
            to_wire = number == 2
            launch.update(formula, block, out if to_wire else None)
        launch.synchronize()
        if number == 2 and formula != "lamb":
            place = 0
            for param, shard in zip(params, shards, strict=True):
                target = own(param, rank, shard)
                target.copy_(out[place : place + target.numel()])
                place += shard
        for twin, grad, shard in zip(twins, reduced, shards, strict=True):
            twin.grad = own(grad, rank, shard).cpu().to(wide) / 2
        oracle.step()
        if not masters:
            for twin in twins:
                twin.data.copy_(twin.detach().to(param_type))
        for twin in twins:
            for key, value in oracle.state[twin].items():
                if key != "step" and value is not None:
                    value.copy_(value.to(state_type))
    noise = {FP64: 1e-13, FP32: 2e-6, FP16: 1e-3, BF16: 8e-3}[param_type]
    for i, twin in enumerate(twins):
        found = (master or [own(p, rank, s) for p, s in zip(params, shards, strict=True)])[i]
        want = twin.detach()
        limit = 4e-6 if masters else noise
        error = float((found.cpu().to(wide) - want).norm())
        assert error <= limit * max(1.0, float(want.norm())), (i, error, types, changed)
        assert float(steps[i]) == 3
        for other in range(size):
            if other != rank:
                a, b = own(params[i], other, shards[i]), own(before[i], other, shards[i])
                assert torch.equal(a, b), "another rank's slice was written"


TYPES = {
    "fp32": (FP32, FP32, FP32),
    "fp64": (FP64, FP64, FP64),
    "bf16": (BF16, BF16, FP32),
    "fp16": (FP16, FP16, FP32),
    "bf16 state": (BF16, BF16, BF16),
    "fp32 with bf16 gradients": (FP32, BF16, FP32),
    "bf16 with fp32 gradients": (BF16, FP32, FP32),
}
FORMULAS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "sgd momentum": ("sgd", {"momentum": 0.9}),
    "sgd nesterov": ("sgd", {"momentum": 0.9, "nesterov": True}),
    "adam": ("adam", {"decoupled": False}),
    "adamw": ("adam", {}),
    "adamw amsgrad": ("adam", {"amsgrad": True}),
    "lamb": ("lamb", {}),
}


def every(api: table.CudaApi) -> dict[str, Callable[[], None]]:
    """All checks by name."""
    checks: dict[str, Callable[[], None]] = {"agreement": lambda: agreement(api)}
    for dtype in (FP32, FP64, BF16, FP16):
        for size in (1, 3):
            name = f"moves of {str(dtype)[6:]}, {size} ranks"
            checks[name] = lambda dtype=dtype, size=size: moves(api, dtype, size)
    for title, (formula, changed) in FORMULAS.items():
        for kind, types in TYPES.items():
            if formula == "lamb" and kind == "bf16 state":
                continue  # its moments are never in a half type
            checks[f"{title}, {kind}"] = lambda f=formula, t=types, c=changed: update(
                api, f, t, **c
            )
        for kind in ("bf16", "fp16"):
            checks[f"{title}, {kind} with masters"] = lambda f=formula, t=TYPES[kind], c=changed: (
                update(api, f, t, True, **c)
            )
    return checks


def run_all(context: Any) -> int:
    api = table.load()
    checks = every(api)
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return len(checks)
