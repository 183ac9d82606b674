"""Compressed gradients: what ranks check.

No postponed annotations here: DDP inspects those of its hooks.
"""

import pickle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.refused import refused
from fusedpg import compress
from fusedpg.compress import State
from harness import Context

SHAPES = ((3, 5), (40,), (17, 23), (1,), (300,), (6, 4, 5))
NUMELS = [int(np.prod(shape)) for shape in SHAPES]
Array = np.ndarray[Any, Any]
Arrays = list[Array]


class Given(nn.Module):
    """A model whose gradients are what is passed in."""

    def __init__(self, shapes: Any = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes)

    def forward(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        return sum((p * g).sum() for p, g in zip(self.parts, grads) if g is not None)  # type: ignore[return-value]


def given(step: int, rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def fitting(params: dict[str, Any]) -> dict[str, Any]:
    """Without a learning rate that nothing uses."""
    if params.get("memory") == "efsignsgd":
        return params
    return {key: value for key, value in params.items() if key != "lr"}


def hooked(module: nn.Module, state: State, **options: Any) -> DistributedDataParallel:
    """A DDP module whose gradients go by a state."""
    ddp = DistributedDataParallel(module, **options)
    ddp.register_comm_hook(state, compress.hook)
    return ddp


def wrapped(
    context: Context, params: dict[str, Any], schedule: Any = "layer",
    bucket_cap_mb: float = 0.001, **options: Any,
) -> tuple[DistributedDataParallel, State]:  # fmt: skip
    state = compress.from_params(fitting(params), schedule=schedule, **options)
    ddp = hooked(Given(), state, bucket_cap_mb=bucket_cap_mb)
    return ddp, state


def step_of(ddp: DistributedDataParallel, grads: list[Any]) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(grads).backward()
    return [p.grad.clone() for p in ddp.module.parts]


# --- oracles: one rank's and one parameter's compression, in numpy -------------------------


def top(v: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    order = np.lexsort((np.arange(v.size), -np.abs(v)))[:k]
    out = np.zeros_like(v)
    out[order] = v[order]
    return out


def sent(name: str, v: np.ndarray[Any, Any], params: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What a payload decompresses to, by each method's definition."""
    k = max(1, int(v.size * params["compress_ratio"]))
    if name == "none":
        return v
    if name == "fp16":
        return (v / params["ranks"]).astype(np.float32).astype(np.float16).astype(np.float64) * (
            params["ranks"]
        )
    if name in ("topk", "dgc"):
        return top(v, k)
    over = np.where(np.abs(v) > params["threshold"], v, 0)
    if name == "threshold":
        return over
    if name == "guarded_threshold":
        return over if (over != 0).sum() >= k else top(v, k)
    high = v >= 0
    if name in ("signsgd", "signum"):
        return np.where(high, 1.0, -1.0)
    if name == "efsignsgd":
        return np.where(high, 1.0, -1.0) * np.abs(v).mean()
    if name == "onebit":
        means = [v[which].mean() if which.any() else 0.0 for which in (~high, high)]
        return np.where(high, means[1], means[0])
    raise AssertionError(name)


class Oracle:
    """What all ranks' gradients of a parameter give together, each parameter by itself.

    Args:
        hosts: ranks that add up first, and have one residual.
    """

    def __init__(
        self, ranks: int, params: dict[str, Any], hosts: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        self.params = {"ranks": ranks, **params}
        self._hosts = hosts
        self._kept: dict[tuple[str, int, int], Array] = {}

    def step(self, grads: list[Arrays]) -> Arrays:
        everyone = zip(*([g.astype(np.float64).reshape(-1) for g in mine] for mine in grads))
        return [self.exchange(n, list(given)) for n, given in enumerate(everyone)]

    def uncompressed(self, grads: list[Arrays]) -> Arrays:
        """A step in which all that was kept is sent, too."""
        lr = self.params["lr"] if self.params["memory"] == "efsignsgd" else 1.0
        results = []
        for n in range(len(SHAPES)):
            everyone = []
            for rank, mine in enumerate(grads):
                kept = self._state("kept", rank, n)
                everyone.append(mine[n].astype(np.float64).reshape(-1) + kept / lr)
                kept[:] = 0
            results.append(np.mean(everyone, 0))
        return results

    def exchange(self, n: int, given: list[Array]) -> Array:
        """The result of all ranks' gradients of parameter n."""
        if not self._hosts:
            return self._among(n, list(range(len(given))), given, 0)
        count, numel = len(self._hosts[0]), NUMELS[n]
        each = -(-numel // count)
        found = []
        for place in range(count):
            part = slice(min(place * each, numel), min((place + 1) * each, numel))
            means = [np.mean([given[rank][part] for rank in host], 0) for host in self._hosts]
            found.append(self._among(n, [host[place] for host in self._hosts], means, part.start))
        return np.concatenate(found)

    def _state(self, name: str, rank: int, n: int) -> Array:
        return self._kept.setdefault((name, rank, n), np.zeros(NUMELS[n]))

    def _among(self, n: int, ranks: list[int], given: list[Array], first: int) -> Array:
        numel, communicator = given[0].size, self.params["communicator"]
        shards = len(ranks) if communicator in ("alltoall", "ps") else 1
        each = -(-numel // shards)
        out = np.zeros(numel)
        for shard in range(shards):
            part = slice(min(shard * each, numel), min((shard + 1) * each, numel))
            at = slice(first + part.start, first + part.stop)
            if part.start == part.stop:
                continue
            payloads = [self._send(rank, n, at, g[part]) for rank, g in zip(ranks, given)]
            out[part] = np.mean(payloads, 0)
            if self.params["compressor"] in ("signsgd", "signum"):
                out[part] = np.where(out[part] >= 0, 1.0, -1.0)
            if communicator == "ps":
                out[part] = self._answer(ranks[shard], n, at, out[part])
        return out

    def _send(self, rank: int, n: int, at: slice, g: Array) -> Array:
        compressor, memory = self.params["compressor"], self.params["memory"]
        kept = self._state("kept", rank, n)
        lr = self.params["lr"] if memory == "efsignsgd" else 1.0
        v = g if memory == "none" else kept[at] + lr * g
        if memory == "dgc" or compressor == "signum":
            m, momentum = self.params["momentum"], self._state("momentum", rank, n)
            momentum[at] = m * momentum[at] + (g if memory == "dgc" else (1 - m) * v)
            v = (kept[at] if memory == "dgc" else 0) + momentum[at]
        out = sent(compressor, v, self.params)
        if memory == "dgc":
            gone = out != 0
            masked = self.params.get("momentum_masking", True)
            momentum[at], kept[at] = np.where(gone & masked, 0, momentum[at]), np.where(gone, 0, v)
        elif memory != "none":
            kept[at] = np.where(np.isfinite(v - out), v - out, 0)
        return out / lr

    def _answer(self, rank: int, n: int, at: slice, mean: Array) -> Array:
        """A server's."""
        if self.params["memory"] == "none":
            return sent(self.params["compressor"], mean, self.params)
        kept = self._state("server", rank, n)
        v = kept[at] + mean
        out = sent(self.params["compressor"], v, self.params)
        kept[at] = np.where(np.isfinite(v - out), v - out, 0)
        return out


def warms_up(
    context: Context, compressor: str, memory: str, schedule: Any, ratios: list[float], how: str
) -> None:
    """Steps that are not compressed and shares by epoch are those of the formulas, also where the
    state is saved and loaded in between."""
    params: dict[str, Any] = {
        "compressor": compressor, "memory": memory, "communicator": "allgather",
        "compress_ratio": 0.07, "threshold": 1.0, "lr": 0.25,
    }  # fmt: skip
    options: dict[str, Any] = {
        "uncompressed_steps": 2, "uncompressed_every": 4, "warmup_ratios": ratios
    }  # fmt: skip
    ddp, state = wrapped(context, params, schedule, **options)
    oracle = Oracle(context.world_size, params)
    for step in range(12):
        epoch = step // 3
        if step % 3 == 0:
            state.set_epoch(epoch)
        if step == 7:
            # In the middle of an epoch.
            if how == "pickle":
                state = pickle.loads(pickle.dumps(state))
            elif how == "state_dict":
                kept = state.state_dict()
                state = compress.from_params(fitting(params), schedule=schedule, **options)
                state.load_state_dict(kept)
            module = ddp.module if how == "as it is" else Given()
            del ddp
            ddp = hooked(module, state, bucket_cap_mb=0.001)
        oracle.params["compress_ratio"] = [*ratios, 0.07, 0.07, 0.07, 0.07][epoch]
        everyone = [given(step, rank) for rank in range(context.world_size)]
        arrays = [[g.numpy() for g in mine] for mine in everyone]
        got = step_of(ddp, everyone[context.rank])
        plain = step in (0, 1, 3, 7, 11)
        want = oracle.uncompressed(arrays) if plain else oracle.step(arrays)
        for shape, mine, theirs in zip(SHAPES, got, want):
            np.testing.assert_allclose(
                mine.numpy().reshape(-1), theirs, rtol=1e-4, atol=2e-5,
                err_msg=f"step {step}, {shape}",
            )  # fmt: skip


def epochs_differ(context: Context) -> None:
    """Ranks in other epochs would send other numbers of elements."""
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.1}
    ddp, state = wrapped(context, params, warmup_ratios=[0.25])
    state.set_epoch(context.rank)
    with refused("compress_ratio"):
        step_of(ddp, list(given(0, context.rank)))


def equals_oracle(
    context: Context, compressor: str, memory: str, communicator: str, more: dict[str, Any]
) -> None:
    params: dict[str, Any] = {
        "compressor": compressor, "memory": memory, "communicator": communicator,
        "compress_ratio": 0.07, "threshold": 1.0, "lr": 0.25, "momentum": 0.8, **more,
    }  # fmt: skip
    ddp, _ = wrapped(context, params)
    oracle = Oracle(context.world_size, params)
    # float16 payloads are added in float16.
    tolerance = 2e-3 if (compressor, communicator) == ("fp16", "allreduce") else 2e-5
    for step in range(8):
        everyone = [given(step, rank) for rank in range(context.world_size)]
        got = step_of(ddp, everyone[context.rank])
        want = oracle.step([[g.numpy() for g in mine] for mine in everyone])
        for shape, mine, theirs in zip(SHAPES, got, want):
            np.testing.assert_allclose(
                mine.numpy().reshape(-1), theirs, rtol=1e-4, atol=tolerance,
                err_msg=f"step {step}, {shape}",
            )  # fmt: skip


def alike(tensors: list[torch.Tensor]) -> None:
    """The same bits on all ranks."""
    flat = torch.cat([t.reshape(-1).double() for t in tensors])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    assert torch.equal(low, high)


def survives(context: Context, params: dict[str, Any], how: str, schedule: Any) -> None:
    """A state that is saved and loaded in the middle goes on as the one that was not, bit by bit,
    though its DDP has the buckets of a first backward again. With "ps", whose shards are of what is
    sent at once, both get a new DDP."""

    def results(saved: bool) -> list[torch.Tensor]:
        ddp, state = wrapped(context, params, schedule)
        found = []
        for step in range(9):
            if step == 4 and (saved or params["communicator"] == "ps"):
                # The model's order is that of the first backward, which a new DDP repeats.
                kept: Any = pickle.dumps(state) if how == "pickle" else state.state_dict()
                module = ddp.module
                del ddp
                if saved:
                    module = Given()
                    if how == "pickle":
                        state = pickle.loads(kept)
                    else:
                        state = compress.from_params(fitting(params), schedule=schedule)
                        state.load_state_dict(kept)
                ddp = hooked(module, state, bucket_cap_mb=0.001)
            found += step_of(ddp, list(given(step, context.rank)))
        return found

    for one, other in zip(results(False), results(True), strict=True):
        assert torch.equal(one, other)


def same_by_any_schedule(context: Context, params: dict[str, Any]) -> None:
    """What is sent at once makes no difference to any bit."""

    def results(schedule: Any) -> list[torch.Tensor]:
        ddp, _ = wrapped(context, params, schedule)
        return [g for n in range(4) for g in step_of(ddp, list(given(n, context.rank)))]

    wanted = results("layer")
    for schedule in ("bucket", "one", 3):
        for one, other in zip(wanted, results(schedule), strict=True):
            assert torch.equal(one, other), schedule


def follows_ddp(context: Context) -> None:
    """no_sync, unused and frozen parameters: with a compressor that loses nothing, plain DDP."""
    for schedule in ("bucket", "layer", "one", 2):
        plain = DistributedDataParallel(Given(), bucket_cap_mb=0.001, find_unused_parameters=True)
        state = compress.from_params(
            {"compressor": "topk", "memory": "residual", "compress_ratio": 1.0}, schedule=schedule
        )
        mine = hooked(Given(), state, bucket_cap_mb=0.001, find_unused_parameters=True)
        for step in range(7):
            grads: list[Any] = list(given(step, context.rank))
            if step % 3 == 1:
                grads[2] = None
            if step % 3 == 2 and context.rank == 0:
                grads[0] = None
            for ddp in (plain, mine):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(grads).backward()
                ddp(list(given(50 + step, context.rank))).backward()
                ddp(grads).backward()
            for a, b in zip(plain.module.parts, mine.module.parts):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None:
                    torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def auto(context: Context) -> list[list[int]]:
    """A search in training: ranks end alike."""
    params = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.1}
    ddp, state = wrapped(context, params, "auto", 0.002)
    for step in range(120):
        step_of(ddp, list(given(step, context.rank)))
    report = state.report()
    assert [one.chosen for one in report.tried].count(True) == 1, str(report)
    assert len(report.tried) >= 5
    return [sorted(one.candidate.splits) for one in report.tried if one.chosen]


def learns(context: Context, params: dict[str, Any], lr: float) -> float:
    """Accuracy on handwritten digits that were held out, after 24 epochs."""
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
    import _common as common

    train, test = common.digits(0)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    if params:
        ddp.register_comm_hook(compress.from_params(params), compress.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    x, y = train.tensors
    draw = torch.Generator().manual_seed(1)
    batch = 16 * context.world_size
    for _ in range(24):
        for rows in torch.randperm(len(x), generator=draw).split(batch):
            if len(rows) < batch:
                continue
            mine = rows[context.rank :: context.world_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
            optimizer.step()
    alike([p.detach() for p in model.parameters()])
    with torch.no_grad():
        guessed = model(test.tensors[0]).argmax(1)
    return float((guessed == test.tensors[1]).double().mean())
