"""The direct fused op: reduce-scatter, AdamW on the owned slice, all-gather."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

import harness
from checks import adamw
from checks.adamw import Run

pytestmark = pytest.mark.fused_only

VARIANTS = {
    "plain": Run(),
    "no decay": Run(weight_decay=0.0),
    "amsgrad": Run(amsgrad=True),
    "maximize": Run(maximize=True, amsgrad=True),
    "tensor lr": Run(lr_tensor=True),
    "sum": Run(reduce="sum"),
    "scaled": Run(scale=1024.0),
    "async": Run(async_op=True),
    "arena": Run(memory="arena"),
    "mixed": Run(memory="mixed", amsgrad=True),
    "channels_last": Run(layout="channels_last"),
    "channels_last arena": Run(layout="channels_last", memory="arena"),
    "transposed": Run(layout="transposed"),
    "transposed mixed": Run(layout="transposed", memory="mixed"),
    "no elements for some ranks": Run(shapes=((5,), (33,), (64,), (97,), (1,), (127,))),
    "an empty tensor": Run(shapes=((0,), (100,), (0, 4))),
}


def identical(answers: list[tuple[str, str]]) -> None:
    assert len({params for params, _ in answers}) == 1, "ranks hold different parameters"


@pytest.mark.parametrize("variant", VARIANTS)
def test_parity_with_torch(workers: harness.Workers, variant: str) -> None:
    identical(workers.run(adamw.parity, VARIANTS[variant]))


@pytest.mark.parametrize("memory", ["ordinary", "arena", "mixed"])
def test_many_small_tensors(workers: harness.Workers, memory: str) -> None:
    shapes = tuple((1 + (i * 37) % 211,) for i in range(397))
    identical(workers.run(adamw.parity, Run(shapes=shapes, steps=5, memory=memory)))


@pytest.mark.parametrize("memory", ["ordinary", "arena", "mixed"])
def test_large_tensors(workers: harness.Workers, memory: str) -> None:
    run = Run(shapes=((1_000_003,), (257, 1031)), steps=3, memory=memory)
    first = workers.run(adamw.parity, run)
    identical(first)
    assert workers.run(adamw.parity, run) == first


def test_memory_makes_no_difference(trio: harness.Workers) -> None:
    runs = [Run(steps=10, memory=memory) for memory in ("ordinary", "arena", "mixed")]
    answers = [trio.run(adamw.parity, run) for run in runs]
    assert answers[0] == answers[1] == answers[2]


def test_runs_are_identical(workers: harness.Workers) -> None:
    run = Run(steps=20, amsgrad=True)
    assert workers.run(adamw.parity, run) == workers.run(adamw.parity, run)


def test_no_lr_moves_nothing(workers: harness.Workers) -> None:
    workers.run(adamw.unmoved)


@pytest.mark.parametrize("memory", ["ordinary", "arena"])
def test_overflow_on_one_rank_stops_all(workers: harness.Workers, memory: str) -> None:
    workers.run(adamw.overflow, memory)


def test_steps_in_flight(workers: harness.Workers) -> None:
    workers.run(adamw.many_steps_in_flight)


def test_between_collectives(workers: harness.Workers) -> None:
    workers.run(adamw.with_collectives_between)


def test_leaf_parameters(pair: harness.Workers) -> None:
    pair.run(adamw.leaf_parameters)


def test_gradients_of_another_layout(pair: harness.Workers) -> None:
    pair.run(adamw.other_layout)


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("fewer gradients", "grads"),
        ("fewer moments", "exp_avgs"),
        ("fewer steps", "state_steps"),
        ("gradient shape", "grads"),
        ("moment length", "exp_avg_sqs"),
        ("param dtype", "float32"),
        ("gradient dtype", "float32"),
        ("step dtype", "state_steps"),
        ("gaps", "dense"),
        ("sparse", "sparse"),
        ("amsgrad", "max_exp_avg_sqs"),
        ("reduce", "reduce"),
        ("beta", "beta"),
    ],
)
def test_wrong_arguments(pair: harness.Workers, what: str, word: str) -> None:
    for text in pair.run(adamw.wrong, what):
        assert word in text.lower(), text


@hypothesis.settings(max_examples=300)
@hypothesis.given(numel=st.integers(0, 1 << 40), world_size=st.integers(1, 1024))
def test_shards_partition_a_tensor(numel: int, world_size: int) -> None:
    import fusedpg

    ranges = [fusedpg.shard_range(numel, world_size, rank) for rank in range(world_size)]
    chunk = -(-numel // world_size)
    chunk = -(-chunk // 32) * 32
    end = 0
    for offset, length in ranges:
        assert length >= 0
        if length:
            assert offset == end
            assert offset % 32 == 0
        end = max(end, offset + length)
        assert length in (chunk, 0) or offset + length == numel
    assert end == numel
    assert sum(length for _, length in ranges) == numel


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (10, 0, 0), (10, 2, 2), (10, 2, -1)])
def test_wrong_shards(arguments: tuple[int, int, int]) -> None:
    import fusedpg

    with pytest.raises((ValueError, RuntimeError)):
        fusedpg.shard_range(*arguments)


def test_shards_by_hand() -> None:
    import fusedpg

    assert fusedpg.shard_range(100, 2, 0) == (0, 64)
    assert fusedpg.shard_range(100, 2, 1) == (64, 36)
    assert [fusedpg.shard_range(33, 4, rank)[1] for rank in range(4)] == [32, 1, 0, 0]
