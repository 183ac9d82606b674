"""Compressed training in random ways, and what an adversary has thought of.

What holds for every compressor with error feedback, whatever it chooses and however it rounds: what
goes in comes out or is kept. No part of the library says what that is.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import zlib
from typing import Any

import numpy as np
import pytest

import harness
from checks import compress_foe as foe
from checks import compress_own
from checks.compress_fuzz import Case, gradients, train, used

pytestmark = pytest.mark.fused_only

COMPRESSORS = (
    "none", "fp16", "topk", "randomk", "threshold", "guarded_threshold", "qsgd", "terngrad",
    "efsignsgd", "onebit", "natural", "powersgd", "loud", "factors",
)  # fmt: skip
OF_THE_USER = {"loud": compress_own.Loud(1.0), "factors": compress_own.Factors()}
WHERE = ("2", "3", "gloo", "two of two", "crossed", "two and one")
TOLERANCE = {"fp32": 2e-5, "fp64": 1e-10, "bf16": 2e-2}


def ranks_of(where: str) -> harness.Workers:
    if where in harness.HOSTS:
        return harness.pool_of_hosts(where)
    return harness.pool(3, backend="gloo") if where == "gloo" else harness.pool(int(where))


def drawn(seed: int, compressor: str) -> tuple[Case, float]:
    """A case, and what a residual is to be multiplied by."""
    r = random.Random(seed)
    carriers = ["allgather", "broadcast", "alltoall", "ps"]
    carriers += ["allreduce"] * (compressor in ("none", "randomk"))
    carrier = "allreduce" if compressor == "powersgd" else r.choice(carriers)
    memory, scale = r.choice([("residual", 1.0), ("residual", 1.0), ("efsignsgd", 10.0)])
    if compressor == "powersgd":
        memory, scale = "powersgd", 1.0

    def schedule() -> Any:
        return r.choice(["bucket", "layer", "one", 1, 2, 3, 7, "auto"])

    params = {
        "compressor": OF_THE_USER.get(compressor, compressor),
        "memory": memory,
        "communicator": carrier,
        "threshold": r.choice([0.5, 1e9, 0.0]),
        "compress_ratio": r.choice([0.01, 0.3, 1.0]),
        "quantum_num": r.choice([1, 4, 127, 1000]),
        "bucket_size": r.choice([0, 5, 128]),
        "compress_rank": r.choice([1, 2, 9]),
        "clip_sigma": r.choice([0.0, 2.5]),
    }
    if memory == "efsignsgd":
        params["lr"] = 0.1
    first = schedule()
    case = Case(
        params,
        first,
        numels=tuple(
            r.choice([1, 2, 3, 7, 8, 16, 40, 64, 129, 200, 1000])
            for _ in range(r.choice([1, 2, 5, 9]))
        ),
        steps=r.choice([6, 45]) if first == "auto" else r.choice([4, 6]),
        dtype=r.choice(["fp32", "fp32", "fp32", "bf16", "fp64"]),
        bucket_bytes=r.choice([60, 300, 2000, 10**6]),
        accumulate=r.choice([0, 0, 1, 2]),
        restart_at=r.choice([-1, 1, 2, 3]),
        restart_by=r.choice(["dict", "pickle", "live"]),
        schedule_after=r.choice([None, schedule()]),
        unused=r.choice([0.0, 0.0, 0.1, 0.3, 0.6]),
        named=r.choice([False, True]),
        seed=seed,
    )
    rewraps = r.sample(range(1, case.steps), r.choice([0, 1]))
    return dataclasses.replace(case, rewrap_at=tuple(rewraps)), scale


def went_in(case: Case, rank: int, step: int) -> list[Any]:
    uses = used(case, rank, step)
    micros = [gradients(case, rank, step, micro) for micro in range(case.accumulate + 1)]
    return [sum(given) * use for use, given in zip(uses, zip(*micros))]


def check_nothing_lost(case: Case, answers: list[Any], scale: float, per_host: int) -> None:
    """After each step: gradients = world size * results + what the ranks keep, of each parameter
    that has been used by some rank in every step."""
    size = len(answers)
    always = [True] * len(case.numels)
    inside = [np.zeros(n) for n in case.numels]
    largest = 64.0 * size
    for step in range(case.steps):
        given = [went_in(case, rank, step) for rank in range(size)]
        for n, uses in enumerate(zip(*(used(case, rank, step) for rank in range(size)))):
            always[n] &= any(uses)
            if not always[n]:
                continue
            results = [answer["results"][step][n] for answer in answers]
            for other in results[1:]:
                np.testing.assert_array_equal(other, results[0])
            largest = max(largest, size * np.abs(results[0]).max())
            inside[n] += sum(g[n] for g in given) - size * results[0]
            kept = np.zeros(case.numels[n])
            for answer in answers:
                for name, tensors in answer["kept"][step].items():
                    if name.startswith("residual") and tensors[n] is not None:
                        each = size if name.endswith("@server") else per_host
                        kept += each * scale * tensors[n]
            lost = np.abs(inside[n] - kept).max()
            assert lost <= TOLERANCE[case.dtype] * (step + 1) * largest, (step, n, lost)


def run(where: str, case: Case, scale: float) -> list[Any]:
    carrier = case.params["communicator"]
    # Ranks of a host add up first, where all hosts have as many.
    shared = where in ("two of two", "crossed") and carrier != "allreduce"
    answers = ranks_of(where).run(train, case)
    check_nothing_lost(case, answers, scale, 2 if shared else 1)
    return answers


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_nothing_is_lost(compressor: str, where: str) -> None:
    """FUSEDPG_COMPRESS_SEEDS=100 draws more; the seed is in the case of a failure's arguments."""
    base = zlib.crc32(f"{compressor} {where}".encode())
    for seed in range(base, base + int(os.environ.get("FUSEDPG_COMPRESS_SEEDS", "2"))):
        case, scale = drawn(seed, compressor)
        print(f"seed {seed}: {case}")
        run(where, case, scale)


@pytest.mark.parametrize(
    ("where", "seed"),
    [
        ("3", 1),
        ("two of two", 2),
        *(harness.slow(where, seed) for where in WHERE for seed in range(10, 20)),
    ],
)
def test_search_by_drawn_times(where: str, seed: int) -> None:
    """Whatever the ranks' clocks say, and while DDP's buckets change: nothing is lost, ranks go the
    same way, and a step without compression leaves nothing behind."""
    r = random.Random(seed)
    case, scale = drawn(seed, r.choice(COMPRESSORS))
    steps = r.choice([60, 90])
    case = dataclasses.replace(
        case, schedule="auto", schedule_after="auto", steps=steps, clock=True, accumulate=0,
        rewrap_at=tuple(sorted(r.sample(range(1, steps), r.choice([0, 1, 3, 8])))),
        restart_at=r.choice([-1, r.randrange(1, steps)]),
    )  # fmt: skip
    print(f"seed {seed}: {case}")
    answers = run(where, case, scale)
    for answer in answers:
        assert answer["plain"] == answers[0]["plain"]
        assert answer["units"] == answers[0]["units"]
        for plain, kept in zip(answer["plain"], answer["kept"]):
            for name, tensors in kept.items() if plain else ():
                if name.startswith("residual"):
                    assert not any(tensor.any() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("communicator", ["allgather", "alltoall", "ps"])
def test_host_keeps_its_slice_when_buckets_are_rebuilt(communicator: str) -> None:
    """DDP does so after its first step: all of the shards of a host's slice move."""
    params = {"compressor": "topk", "memory": "residual", "communicator": communicator}
    run("two of two", Case(params, "bucket", seed=5), 1.0)


@pytest.mark.parametrize("communicator", ["allgather", "alltoall", "ps"])
@pytest.mark.parametrize(
    "params",
    [
        {"compressor": "qsgd", "quantum_num": 2},
        {"compressor": "terngrad", "clip_sigma": 0.0},
        {"compressor": "natural"},
    ],
    ids=lambda params: params["compressor"],
)
def test_mean_is_right(params: dict[str, Any], communicator: str) -> None:
    """Also where a sum is rounded again for the way back."""
    steps = 1000
    answers = harness.pool(2).run(foe.mean_of_many, {**params, "communicator": communicator}, steps)
    mean, error, _ = answers[0]
    true = (answers[0][2] + answers[1][2]) / 2
    z = (mean - true) / np.maximum(error, 1e-9)
    # Of 301 numbers, each drawn 1000 times; some hardly ever are what they can be.
    assert 0.6 < (z**2).mean() < 1.6
    assert np.median(np.abs(z)) < 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("compressor", "memory", "communicator"),
    [
        *((c, "residual", "allgather") for c in COMPRESSORS[:-2] if c != "powersgd"),
        *((c, "residual", "ps") for c in ("topk", "randomk", "qsgd", "efsignsgd")),
        ("powersgd", "powersgd", "allreduce"),
        ("powersgd", "none", "allreduce"),
        ("topk", "dgc", "allgather"),
        ("randomk", "dgc", "allgather"),
        ("dgc", "dgc", "ps"),
        ("signsgd", "none", "allgather"),
        ("signum", "none", "allgather"),
        ("signum", "none", "ps"),
    ],
)
def test_not_finite_is_seen_at_once_and_gone(
    compressor: str, memory: str, communicator: str, bad: float
) -> None:
    params = {"compressor": compressor, "memory": memory, "communicator": communicator}
    harness.pool(3).run(foe.recovers, params, bad)


def test_steps_without_compression_are_of_the_same_training() -> None:
    memory = foe.compress.memories.ResidualMemory(beta=0.5, gamma=2.0)
    params = {"compressor": "topk", "memory": memory, "compress_ratio": 0.25}
    for found in harness.pool(2).run(foe.plain_steps_equal_mean, params):
        residual = np.zeros(8)
        was_plain = []
        own = [calls for plain, calls, _ in found if plain]
        for step, (plain, calls, result) in enumerate(found):
            # Both ranks have the same residual but for the mean of their gradients.
            v = 0.5 * residual + 2 * (np.arange(8) + 0.5 + step)
            wanted = v if plain else np.where(np.arange(8) >= 6, v, 0)
            np.testing.assert_allclose(result, wanted)
            residual = v - wanted
            was_plain.append(plain)
            assert plain or not calls
        assert True in was_plain
        assert False in was_plain
        # What was kept goes by the hook's group; then DDP's own has nothing else to do.
        assert own == [0, *[1] * (len(own) - 1)]


@pytest.mark.parametrize("numel", [1, 5, 6])
@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("communicator", ["allgather", "alltoall", "ps"])
def test_ones_own_with_uneven_shards(communicator: str, memory: str, numel: int) -> None:
    for found in harness.pool(3).run(foe.ones_own, communicator, memory, numel):
        np.testing.assert_array_equal(found, np.arange(numel) + 2)


@pytest.mark.parametrize(
    "trial",
    [
        foe.neighbours_in_memory,
        foe.two_modules,
        foe.half_wrapper,
        foe.empty_parameters,
        foe.replaced_parts,
        foe.new_memory_after_old_parameters,
        foe.wrong_checkpoint_changes_nothing,
        foe.named_checkpoint,
    ],
    ids=lambda trial: trial.__name__,
)
def test_trial(trial: Any) -> None:
    harness.pool(2).run(trial)


@pytest.mark.parametrize(
    ("how", "views"),
    [
        ("new module", False),
        ("new module", True),
        ("checkpoint", True),
        # Without views of buckets DDP itself gives elements to others then.
        ("same module", True),
    ],
)
def test_memory_order_changes(how: str, views: bool) -> None:
    harness.pool(2).run(foe.other_memory_order, how, views)


def test_low_rank_of_a_transpose() -> None:
    harness.pool(2).run(foe.low_rank_in_any_order)


def test_state_of_two_modules_in_one_backward() -> None:
    """What is first cut off would wait forever for the rest of its buckets."""
    for text in harness.pool(2).run(foe.backward_within_another):
        assert "a state is for one DDP module" in text


@pytest.mark.parametrize("communicator", ["allgather", "ps"])
@pytest.mark.parametrize("where", ["2", "two of two"])
def test_rank_without_a_checkpoint(where: str, communicator: str) -> None:
    """What ranks share out is moved by all of them, whoever has anything."""
    first, *others = ranks_of(where).run(foe.newcomer, communicator)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "two types"])
def test_checkpoint_under_other_buckets(mixed: bool) -> None:
    harness.pool(2).run(foe.other_buckets, mixed)


@pytest.mark.parametrize("communicator", ["allgather", "ps"])
def test_rates_that_change(communicator: str) -> None:
    harness.pool(2).run(foe.rates_that_change, communicator)


def test_sparse_gradients_are_refused() -> None:
    for text in harness.pool(2).run(foe.sparse_gradients):
        assert text.startswith("ValueError: fusedpg.compress: compresses dense gradients")


@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_states_share_a_group_and_a_thread(backend: str) -> None:
    """However many states a group has had, they share one group and one thread."""
    with harness.Workers(2, backend=backend, oracle=False) as workers:
        for found in workers.run(foe.after_states):
            groups = [counts["groups"] for counts in found]
            assert groups == [groups[0]] * len(groups)
            if backend == "fused":
                assert found[-1]["threads"] <= found[2]["threads"] + 1, found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", ["seed", "compressor", "schedule"])
def test_ranks_that_differ(what: str, world_size: int) -> None:
    """Their payloads may have the same sizes, and mean something else."""
    for error in harness.pool(world_size).errors(foe.disagree, what):
        assert all(f"rank {r} has {what} " in error.text for r in (0, 1)), error.text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("what", ["seed", "step"])
def test_ranks_that_load_what_differs(what: str, world_size: int) -> None:
    """They would draw other elements, and take each other's for their own."""
    for error in harness.pool(world_size).errors(foe.disagree_later, what):
        assert all(f"rank {r} has {what} " in error.text for r in (0, 1)), error.text


@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize(
    ("params", "part", "what"),
    [
        ({"compressor": "efsignsgd", "memory": "efsignsgd"}, "memory", "lr"),
        ({"compressor": "topk", "memory": "residual"}, "compressor", "compress_ratio"),
        ({"compressor": "randomk"}, "compressor", "compress_ratio"),
        ({"compressor": "qsgd"}, "compressor", "quantum_num"),
        ({"compressor": "threshold", "communicator": "ps"}, "compressor", "threshold"),
        ({"compressor": "topk", "memory": foe.InQuarters()}, "memory", "scale"),
    ],
)
def test_ranks_that_differ_later(params: Any, part: str, what: str, backend: str) -> None:
    """One rank's learning rate or share changes, or is forgotten to be changed."""
    workers = harness.pool(3, backend=backend)
    for error in workers.errors(foe.differ_later, params, part, what):
        assert all(f"rank {r} has {part} " in error.text for r in (0, 2)), error.text
        assert f"{what}=" in error.text, error.text


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one rank"])
@pytest.mark.parametrize(
    "how", ["fewer", "more", "transposed", "flat", "renamed", "type", "reordered"]
)
def test_checkpoint_of_another_model(how: str, ranks: tuple[int, ...]) -> None:
    """Residuals would go to parameters that they are not of."""
    answers = harness.pool(2).run(foe.other_model, how, ranks)
    for rank, text in enumerate(answers):
        if rank in ranks:
            assert text.startswith("ValueError: the checkpoint is of another model"), answers
        else:
            assert "a step has failed" in text, answers


def test_checkpoint_of_the_same_model() -> None:
    assert harness.pool(2).run(foe.other_model, "same", (0, 1)) == ["nothing"] * 2


@pytest.mark.parametrize(
    ("backend", "schedule"), [("fused", "bucket"), ("fused", "auto"), ("gloo", "bucket")]
)
def test_rank_that_dies(backend: str, schedule: str) -> None:
    with harness.Workers(3, timeout=15, backend=backend) as workers:
        workers.start(foe.dies, 1, schedule)
        answers = workers.collect(40)
        assert isinstance(answers[1], harness.Died)
        assert all(isinstance(answers[rank], str) for rank in (0, 2)), answers


@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_compressor_that_raises_on_one_rank(backend: str) -> None:
    # On ours the others hear of it at once.
    timeout = 60 if backend == "fused" else 6
    with harness.Workers(3, timeout=timeout, backend=backend) as workers:
        workers.start(foe.own_fails, 1)
        answers = workers.collect(30)
        assert "ValueError: of one's own" in answers[1], answers
        assert all("a step has failed" in answers[rank] for rank in (0, 2)), answers


@pytest.mark.parametrize("backend", ["fused", "gloo"])
def test_backward_that_raises_on_one_rank(backend: str) -> None:
    with harness.Workers(2, timeout=6, backend=backend) as workers:
        workers.start(foe.raises_in_backward, 1)
        answers = workers.collect(40)
        assert answers[1] == "of one's own", answers
        assert "a step has failed" in answers[0], answers


def test_group_that_has_ended() -> None:
    with harness.Workers(2, timeout=6) as workers:
        for text in workers.run(foe.state_of_an_ended_group):
            assert "a step has failed" in text, text
