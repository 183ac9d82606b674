"""Programs and schedules that cannot be: each is refused with the node and its line."""

from __future__ import annotations

import textwrap
import types

import pytest
import torch

import fusedpg
from checks import fusion as checks
from fusedpg.fusion import (
    AsShard,
    FuseCollective,
    FuseCompute,
    FuseSend,
    IllegalProgram,
    IllegalTransformation,
    Overlap,
    Program,
    Reorder,
    Split,
    Transformation,
)

pytestmark = pytest.mark.fused_only

HEAD = "g: Partial, w: Replicate, m: Shard, k: Replicate, s: Partial, lr: float"
# What the function does, the node that the message names, and a word of the reason.
PROGRAMS = [
    ("return torch.exp(g)", "exp", "all_reduce it first"),
    ("return g * g", "mul", "not linear"),
    ("return g + w", "add", "once for each rank"),
    ("return g + 1.0", "add", "once for each rank"),
    ("return 1 / g", "truediv", "not linear"),
    ("return g * m", "mul", "beside a Shard"),
    ("return torch.where(g > 0, g, 0.0)", "gt", "not the sum"),
    ("return g.sum()", "sum_1", "all_reduce it first"),
    ("return g.norm()", "norm", "not the sum"),
    ("return all_reduce(w)", "all_reduce", "this is Replicate"),
    ("return all_reduce(all_reduce(g))", "all_reduce_1", "this is Replicate"),
    ("return all_reduce(g, 'product')", "all_reduce", "sum, mean, max, min"),
    ("return all_reduce(lr)", "all_reduce", "takes a tensor"),
    ("return reduce_scatter(m + w)", "reduce_scatter", "this is Replicate"),
    ("return reduce_scatter(g.sum())", "sum_1", "all_reduce it first"),
    ("return all_gather(w)", "all_gather", "takes a Shard"),
    ("return all_gather(all_reduce(g))", "all_gather", "takes a Shard"),
    ("return broadcast(w, 2)", "broadcast", "from 0 to 1"),
    ("return broadcast(m + all_reduce(g), 0)", "broadcast", "Partial or Replicate"),
    ("return w.softmax(-1)", "softmax", "torch.exp"),
    ("return w.view(-1)", "view", "reshape before"),
    ("return w.t()", "t", "transpose before"),
    ("return w[0]", "getitem", "take parts before"),
    ("return torch.cumsum(w, 0)", "cumsum", "compute it outside"),
    ("w.mul_(2)\nreturn w", "mul_", "x = x.mul"),
    ("return F.dropout(w, 0.5)", "dropout", "fusedpg.fusion.dropout"),
    ("return dropout(w, 0.5, lr)", "dropout", "int"),
    ("return dropout(w, 1.5, 3)", "dropout", "probability"),
    ("return F.relu(w, inplace=True)", "relu", "inplace"),
    ("return w.div(2, rounding_mode='floor')", "div", "rounding_mode"),
    ("return w.max(dim=1)", "max_1", "torch.amax"),
    ("return w.norm(1)", "norm", "order 2"),
    ("return w.sum(5)", "sum_1", "2 dimensions"),
    ("return w.int()", "int_1", "compute it outside"),
    ("return w.to(torch.int64)", "to", "floating-point"),
    ("return w.to('cpu')", "to", "types alone"),
    ("return ~w", "invert", "comparisons"),
    ("return w + OUTSIDE", "_tensor_constant0", "pass it as an argument"),
    ("return w if w.sum() > 0 else -w", "gt", "torch.where"),
    ("return w if lr > 0 else -w", "gt", "torch.where"),
    ("return w @ w", "matmul", "must fit"),
    ("return all_reduce(w.t() @ w)", "t", "transpose"),
    ("return w @ all_reduce(g).sum()", "matmul", "a matrix"),
    ("return F.layer_norm(w, (5,))", "layer_norm", "over [5]"),
    ("return F.rms_norm(w.half(), (3,))", "rms_norm", "eps"),
    ("return F.linear(g, w, w)", "linear", ""),
    ("return m * 2", "m", "full size"),
    ("return lr", "return", "not numbers"),
    ("return None", "return", "a tuple of tensors"),
    ("return w, (w, w)", "return", "nested"),
    ("return m + all_reduce(g).sum(0)", "m", "3 elements"),
    ("return w.mean().item()", "item", "keep it as a tensor"),
    ("return send(g)", "send", "this is Partial"),
    ("return send(lr)", "send", "takes a tensor"),
    ("return send(w) * 2", "send", "token is only to be returned; program.py:2: `mul"),
    ("send(w)\nreturn w", "send", "return what send gives"),
    ("return send(w), send(2 * w)", "send_1", "give it a tag"),
    ("return send(w, tag=lr)", "send", "a tag is a number"),
    ("return send(w, tag=1 << 14)", "send", "below 16384"),
    ("return send(w, dst=-1)", "send", "dst is a stage"),
    ("return recv(g)", "recv", "that is Replicate"),
    ("return recv(w + 1)", "recv", "takes an argument"),
    ("recv(w)\nreturn k", "recv", "what comes is not used"),
    ("return recv(w) + recv(w, src=None)", "recv_1", "give it a tag"),
    ("return recv(w, src='left')", "recv", "src is a stage"),
]


def traced(text: str) -> Program:
    source = f"def program({HEAD}):\n{textwrap.indent(text, '    ')}\n"
    fused = fusedpg.fuse(checks.compiled(source, {**checks.FUSED, "OUTSIDE": torch.ones(3)}))
    tensors = {"g": torch.ones(2, 3), "w": torch.ones(2, 3), "m": torch.ones(6)}
    return fused.program(**tensors, k=torch.ones(3, 4), s=torch.ones(()), lr=0.1, world_size=2)


@pytest.mark.parametrize("text, node, reason", PROGRAMS, ids=[text for text, _, _ in PROGRAMS])
def test_illegal_programs(text: str, node: str, reason: str) -> None:
    with pytest.raises(IllegalProgram) as raised:
        traced(text)
    message = str(raised.value)
    assert f"`{node}" in message, message
    assert reason in message, message
    if node != "m":
        assert "program.py:" in message, message


FACTORS = [2.0]


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTORS[0]


def test_numbers_that_could_change_unnoticed() -> None:
    """A program is found by the numbers that were traced: not if an object holds them."""
    config = types.SimpleNamespace(lr=0.1)
    for function, name in ((lambda x: x * config.lr, "config"), (lambda x: helper(x), "FACTORS")):
        with pytest.raises(IllegalProgram, match=f"`{name}` is a .* from outside"):
            fusedpg.fuse(function).program(torch.ones(3), world_size=2)


STEP = "n = 0.9 * m + all_reduce(g)\nreturn w - lr * n, n"
ROWS = "return w - all_reduce(g) @ k @ (1 + k).sum() "
NORM = "r = all_reduce(g)\nq = 2 * r\nreturn q / q.norm()"
TWO = "return all_reduce(g) + all_reduce(3 * g)"
PRODUCT = "return all_reduce(g @ k)"
SENDS = "return send(all_reduce(g @ k) + 1)"
GATHER = "x = all_gather(reduce_scatter(g))\n"
SENT = "return send(w + all_reduce(g)), send(reduce_scatter(g), tag=1), send(all_reduce(s), tag=2)"
CROSS = "a = w + 1\nb = a * 2\nc = w + 3\nd = c * 4\nreturn b.sum() + d, d.sum() + b"
# A program, what is applied before, what is refused, and words of the message.
SCHEDULES: list[tuple[str, list[Transformation], Transformation, list[str]]] = [
    (STEP, [], Split("w"), ["`w`", "about all_reduce"]),
    (STEP, [], Split("nothing"), ["'nothing'", "all_reduce_slice"]),
    (STEP, [Split()], Split(), ["no all_reduce"]),
    ("return w + all_reduce(s)", [], Split("all_reduce"), ["`all_reduce =", "no slices"]),
    ("return all_reduce(g)", [], Reorder(), ["no all_gather"]),
    ("return all_reduce(g)", [Split()], Reorder("all_reduce"), ["`all_reduce =", "no operation"]),
    (STEP, [], Reorder("sub"), ["`sub =", "about all_gather"]),
    (GATHER + "return x @ k", [], Reorder("all_gather"), ["`matmul =", "needs the whole"]),
    (GATHER + "return x.sum(0) + x, x @ k", [], Reorder("all_gather"), ["`matmul =", "whole"]),
    (GATHER + "return all_reduce(g * x)", [], Reorder("all_gather"), ["`mul =", "whole"]),
    (STEP, [Split(), FuseCompute()], Reorder(), ["fused groups"]),
    (STEP, [AsShard()], AsShard(), ["no value"]),
    (STEP, [], AsShard("w"), ["sub uses the whole", "program.py:3"]),
    (STEP, [], AsShard("m"), ["`m`", "is Shard and not"]),
    (STEP, [], AsShard("sub"), ["`sub =", "returned as a whole"]),
    ("return w + all_reduce(s)", [], AsShard("all_reduce"), ["`all_reduce =", "no slices"]),
    ("return m + all_reduce(g)", [], AsShard("w"), ["`w`", "no slice"]),
    ("return m + all_reduce(g), w.sum()", [], AsShard("g"), ["`g`", "Partial and not"]),
    ("x = reduce_scatter(g @ k)\nreturn 2 * x + all_reduce(g) @ k", [], AsShard("matmul_1"),
     ["`matmul_1 =", "does not work on slices"]),
    ("return all_reduce(g)", [], FuseCompute(), ["no elementwise"]),
    (STEP, [], FuseCompute("all_reduce", "mul"), ["`all_reduce =", "only elementwise"]),
    (STEP, [], FuseCompute("mul"), ["`mul =", "at least two"]),
    (STEP, [], FuseCompute("mul", "sub"), ["`sub =", "layout and shape differ"]),
    (STEP, [], FuseCompute("mul", "none"), ["'none'"]),
    (NORM, [], FuseCompute("mul", "truediv"), ["a cycle", "`norm"]),
    (STEP, [FuseCompute("mul", "add")], FuseCompute("add", "mul_1"), ["`add =", "already"]),
    (CROSS, [FuseCompute("mul", "add_3")], FuseCompute("mul_1", "add_2"), ["a cycle"]),
    (STEP, [FuseCompute()], Split(), ["fused groups"]),
    (STEP, [FuseCompute()], AsShard(), ["fused groups"]),
    (STEP, [], FuseCollective(), ["Split comes first"]),
    (STEP, [], FuseCollective("all_reduce"), ["`all_reduce =", "about reduce_scatter"]),
    (TWO, [Split()], FuseCollective(), ["`all_reduce_1_scattered", "several reduce_scatters"]),
    ("return all_reduce(g)", [Split()], FuseCollective(), ["nothing is computed"]),
    ("y = reduce_scatter(g)\nreturn y * y.sum(0)", [], FuseCollective(),
     ["several collectives", "FuseCompute", "_local ="]),
    ("y = reduce_scatter(g)\nreturn y * (k * y.amax()).sum()", [], FuseCollective(),
     ["a cycle", "`sum_1 ="]),
    (SENDS, [FuseSend(), AsShard(), FuseCollective()], Overlap(chunks=2),
     ["is sent", "FuseSend out", "`add ="]),
    ("y = reduce_scatter(g @ k)\nreturn all_gather(y * y.norm())", [FuseCollective()],
     Overlap(chunks=2), ["over all rows", "_local ="]),
    (GATHER + "y = reduce_scatter(g * 0 + g)\nz = x @ k\nreturn z", [], FuseCollective(),
     ["nothing is computed"]),
    ("y = reduce_scatter(g)\nz = all_gather(2 * y).amax(1, True)\nreturn y * z", [],
     FuseCollective(), ["a cycle", "amax"]),
    (SENDS, [FuseSend(), AsShard(), FuseCollective()], Overlap("send", chunks=9), ["9 chunks"]),
    (SENDS, [FuseSend()], Overlap("send", chunks=2), ["no matmul", "FuseCollective"]),
    ("y = 2 * all_reduce(g)\nreturn send(y), send(y, tag=1)",
     [FuseSend(), AsShard(), FuseCollective()], Overlap("send", chunks=2), ["is sent", "only one"]),
    ("return send(w @ k)", [], Overlap("send", chunks=2.0), ["2.0 chunks"]),
    ("return send(w @ k)", [FuseSend()], Overlap("send", chunks=9), ["9 chunks"]),
    ("y = w @ k\nreturn send(y), y", [], Overlap("send", chunks=2), ["no matmul", "`matmul ="]),
    ("y = reduce_scatter(g) * 2\nreturn send(y), y", [FuseCollective()], Overlap("send", chunks=2),
     ["slice is needed", "`mul ="]),
    ("return recv(w) * m", [FuseSend(), Reorder()], Overlap("recv_slice_1", chunks=2),
     ["all rows"]),
    ("return recv(w)", [FuseSend()], Overlap("recv", chunks=3), ["2 rows do not make 3 chunks"]),
    (STEP, [], Overlap(), ["0 collectives follow"]),
    (STEP, [], Overlap("all_reduce"), ["does not follow a matmul"]),
    (PRODUCT, [Split()], Overlap(chunks=2), ["none of a chunk", "FuseCollective", "_scattered ="]),
    (PRODUCT + " * 2", [Split(), Reorder()], Overlap(chunks=2), ["none of a chunk"]),
    ("return reduce_scatter(g @ k) * 2", [FuseCollective()], Overlap(chunks=2),
     ["slice is needed", "`mul ="]),
    ("y = reduce_scatter(g @ k)\nz = 2 * y\nreturn all_gather(z), z", [FuseCollective()],
     Overlap(chunks=2), ["slice is needed", "`mul ="]),
    ("y = reduce_scatter(g @ k)\nreturn all_gather(y * reduce_scatter(g @ k))",
     [FuseCollective("reduce_scatter_1")], Overlap("reduce_scatter_1", chunks=2),
     ["a slice of all rows", "`reduce_scatter ="]),
    ("p = g @ k\nreturn 2 * all_reduce(p), all_reduce(3 * p)",
     [Split("all_reduce"), Reorder(), FuseCollective()], Overlap("all_reduce", chunks=2),
     ["other users", "`mul_"]),
    (PRODUCT, [], Overlap(), ["`matmul =", "2 rows do not make 4 chunks"]),
    (PRODUCT, [], Overlap(chunks=1), ["2 rows do not make 1 chunks"]),
    ("p = g @ k\nreturn all_reduce(p), all_reduce(2 * p)", [], Overlap(chunks=2),
     ["other users", "`mul ="]),
    ("return all_reduce(g @ k) + all_reduce(g @ (2 * k))", [], Overlap(), ["2 collectives"]),
    (STEP, [], FuseSend(), ["no send or recv"]),
    (STEP, [], FuseSend("sub"), ["`sub =", "about send or recv"]),
    (SENT, [], FuseSend("send_1"), ["`reduce_scatter =", "slices already"]),
    (SENT, [], FuseSend("send_2"), ["`all_reduce_1 =", "no slices"]),
    (SENT, [FuseSend()], FuseSend(), ["no send or recv"]),
    (SENT, [FuseSend(), AsShard(), FuseCollective("all_reduce")],
     FuseSend(), ["fused groups"]),
    (SENT, [], AsShard("add"), ["`send =", "uses the whole"]),
    (GATHER + "return send(x)", [], Reorder("all_gather"), ["`send =", "needs the whole"]),
    ("return recv(w) @ k", [FuseSend()], Reorder("recv"), ["`matmul =", "needs the whole"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "text, before, refused, words", SCHEDULES, ids=[str(n) for n in range(len(SCHEDULES))]
)
def test_illegal_transformations(
    text: str, before: list[Transformation], refused: Transformation, words: list[str]
) -> None:
    program = traced(text)
    for transformation in before:
        program = transformation.apply(program)
    with pytest.raises(IllegalTransformation) as raised:
        refused.apply(program)
    message = str(raised.value)
    assert message.startswith(str(refused)), message
    for word in words:
        assert word in message, message
