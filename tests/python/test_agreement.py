"""What several packages share of ranks' dealings: comparisons, and collectives with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fusedpg import _agreement, _collectives
from harness import Context, on_ranks

SIZES = 1, 2, 3


@on_ranks(*SIZES)
def test_same(context: Context) -> None:
    """Each rank in turn has something else; the answer is one on all ranks."""
    assert _agreement.same({"lr": 0.1}, None)
    for odd in range(context.world_size):
        other = _agreement.same((1, context.rank == odd), None, torch.device("cpu"))
        assert other == (context.world_size == 1)
    assert _agreement.same(context.rank, None) == (context.world_size == 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@on_ranks(*SIZES)
def test_largest_of_same(context: Context, dtype: torch.dtype) -> None:
    own = torch.tensor([context.rank, -context.rank, 7], dtype=dtype)
    for call in range(20):  # of which half have a hash that 32 bits with a sign do not hold
        found = _agreement.largest_of_same(call, own, None)
        assert found is not None and found.dtype == dtype
        assert found.tolist() == [context.world_size - 1, 0, 7]
        found = _agreement.largest_of_same((call, context.rank), own, None)
        assert (found is None) == (context.world_size > 1)


@on_ranks(*SIZES)
def test_extremes(context: Context) -> None:
    rank, last = context.rank, context.world_size - 1
    least, most = _agreement.extremes(torch.tensor([rank, -rank, 5]), None)
    assert (least.tolist(), most.tolist()) == ([0, -last, 5], [last, 0, 5])
    # A number that float32 does not hold, and ranks but one that have none.
    own = torch.tensor([rank + 0.1, torch.inf], dtype=torch.float64)
    least, most = _agreement.extremes(own, None, has_some=rank == last)
    assert least.tolist() == most.tolist() == [last + 0.1, torch.inf]
    assert _agreement.largest([rank + 0.1, -rank], None) == [last + 0.1, 0.0]


@on_ranks(2, 3)
def test_words(context: Context) -> None:
    own = ["lr=0.1", f"p={context.rank // 2}", f"beta={min(context.rank, 1)}"]
    facts = _agreement.by_rank(own)
    assert facts == [["lr=0.1", f"p={r // 2}", f"beta={min(r, 1)}"] for r in range(len(facts))]
    text = _agreement.in_words(facts, context.rank)
    if context.world_size == 2:
        assert text == "rank 0 has beta=0; rank 1 has beta=1"
    else:
        assert text == "rank 0 has p=0, beta=0; rank 1 has p=0, beta=1; rank 2 has p=1, beta=1"
    assert _agreement.in_words([["x"], ["y"], ["x"], ["z"]], 2) == (
        "rank 0 has x; rank 1 has y; rank 2 has x; rank 3 has z"
    )
    many = [[str(r)] for r in range(20)]
    assert _agreement.in_words(many, 0).count(";") == 7


@on_ranks(2)
def test_answers(context: Context) -> None:
    """Of each group and thing there is one, which nobody has to keep."""
    groups = [dist.new_group() for _ in range(2)]
    for n, group in enumerate(groups):
        assert _agreement.answer(group, "x").all_have_it is None
        _agreement.answer(group, "x").all_have_it = bool(n)
        assert _agreement.answer(group, "y").all_have_it is None
    assert [_agreement.answer(group, "x").all_have_it for group in groups] == [False, True]


@on_ranks(3)
def test_groups_of_some_ranks(context: Context) -> None:
    """Comparisons are those of the group, and so are gradients."""
    pair = dist.new_group([0, 2])
    if context.rank == 1:
        return
    assert _agreement.same(context.rank % 2, pair)
    assert not _agreement.same(context.rank, pair)
    assert _agreement.largest([context.rank], pair) == [2.0]
    assert _agreement.by_rank(context.rank, pair) == [0, 2]
    x = torch.full((2, 3), float(context.rank), requires_grad=True)
    whole = _collectives.gather(x, 1, pair)
    assert whole.tolist() == [[0.0] * 3 + [2.0] * 3] * 2
    (whole * torch.arange(6.0)).sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == ([3.0, 4.0, 5.0] if context.rank else [0.0, 1.0, 2.0])


@on_ranks(*SIZES)
def test_gradients(context: Context) -> None:
    rank, size = context.rank, context.world_size
    group = dist.group.WORLD
    assert group is not None
    total = sum(range(1, size + 1))
    own, factors = float(rank + 1), torch.arange(6.0 * size).view(2, 3 * size)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.full(shape, own, requires_grad=True)

    x = leaf(2, 3)
    y = x * 1
    summed = _collectives.sum_(y, group)
    assert summed is y and summed.unique().tolist() == [total]
    (summed * 5).sum().backward()
    assert x.grad is not None and x.grad.unique().tolist() == [5.0]

    x = leaf(3, 2)
    summed = _collectives.sum_((x * 1).t(), group)  # not contiguous
    assert summed.shape == (2, 3) and summed.unique().tolist() == [total]
    summed.sum().backward()
    assert x.grad is not None and x.grad.unique().tolist() == [1.0]

    x = leaf(2, 3)
    (_collectives.sum_both(x, group) * own).sum().backward()
    assert x.grad is not None and x.grad.unique().tolist() == [total]

    many = [leaf(2, 3), leaf(3).detach().double().requires_grad_(), leaf(1)]
    same = _collectives.sum_gradients(many, group)
    assert all(torch.equal(a, b) for a, b in zip(same, many, strict=True))
    torch.stack([one.double().sum() * own for one in same]).sum().backward()
    for one in many:
        assert one.grad is not None and one.grad.unique().tolist() == [total]
        assert one.grad.shape == one.shape and one.grad.dtype == one.dtype

    x = leaf(2, 3)
    whole = _collectives.gather(x, 1, group)
    assert whole[0].tolist() == [r + 1.0 for r in range(size) for _ in range(3)]
    (whole * factors).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, factors[:, 3 * rank : 3 * rank + 3])

    x = torch.arange(6.0 * size).view(2, 3 * size).requires_grad_()
    mine = _collectives.scatter(x, 1, group)
    assert mine.is_contiguous() and torch.equal(mine, factors[:, 3 * rank : 3 * rank + 3])
    (mine * own).sum().backward()
    assert x.grad is not None
    assert x.grad[0].tolist() == [r + 1.0 for r in range(size) for _ in range(3)]


@on_ranks(2)
def test_gradients_of_gradients(context: Context) -> None:
    """Where gradients are not sent there are any number; where they are, torch says that not."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.full((2,), 3.0, requires_grad=True)
    sums = _collectives.sum_(x * x, group)
    (first,) = torch.autograd.grad((sums**2).sum(), x, create_graph=True)
    first.sum().backward()
    for call in (
        _collectives.sum_both,
        lambda x, group: _collectives.sum_gradients([x], group)[0],
        lambda x, group: _collectives.scatter(x, 0, group),
        lambda x, group: _collectives.gather(x, 0, group),
    ):
        (first,) = torch.autograd.grad((call(x * x, group) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.sum().backward()
