"""What only moves data between pretended hosts, with one or several ranks on each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import harness
import hosts
from checks import cases, collectives, moves, p2p, several
from checks.cases import Case

pytestmark = pytest.mark.fused_only

SCRIPT = str(Path(__file__).resolve().parent / "scripts/moves_hosts.py")
OPS = [name for name, op in collectives.OPS.items() if not op.reduces]


@pytest.fixture(params=["two of two", "crossed", *map(harness.slow, ("two", "two and one"))])
def ranks(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool_of_hosts(request.param)


@pytest.mark.parametrize("op", OPS)
def test_collectives(ranks: harness.Workers, op: str) -> None:
    layouts = cases.LAYOUTS if collectives.OPS[op].layouts else ("contiguous",)
    for seed, numel in enumerate((0, 1, 1003, 9000, 70_001, 524_287)):
        case = Case(
            op,
            dtype=cases.GLOO[seed % len(cases.GLOO)],
            numel=numel,
            layout=layouts[seed % len(layouts)],
            async_op=seed % 2 == 1,
            root=seed % ranks.world_size,
            seed=seed,
        )
        ranks.run(collectives.check, case)


def test_several_tensors_in_one_call(ranks: harness.Workers) -> None:
    for name in ("broadcast", "all_gather"):
        ranks.run(several.check, name)


def test_they_are_ours(ranks: harness.Workers) -> None:
    ranks.run(moves.paths)


@pytest.mark.parametrize(
    "what",
    ["count", "count large", "root", "dtype", "dtype large", "operation", "sizes", "sizes large"],
)
def test_mismatch(ranks: harness.Workers, what: str) -> None:
    ranks.run(moves.mismatch, what)


def test_one_rank_refuses(ranks: harness.Workers) -> None:
    ranks.run(moves.refused)


def test_messages(ranks: harness.Workers) -> None:
    ranks.run(moves.pair)
    ranks.run(moves.messages)
    ranks.run(moves.message_sizes)
    for numel in (1, 1000, 100_003):
        ranks.run(p2p.tags_out_of_order, numel)
        ranks.run(p2p.batch, numel)
        ranks.run(p2p.any_source, numel)
    for memory in cases.MEMORY:
        ranks.run(p2p.exchange, Case("send", numel=65_537, memory=memory, seed=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch keeps batches there: limits.md")
def test_batches_beside_others(ranks: harness.Workers) -> None:
    ranks.run(p2p.batches_beside_others, 50)
    ranks.run(p2p.sum_after_a_refused_batch)


@pytest.mark.parametrize("what", ["receive", "collective"])
def test_abort(ranks: harness.Workers, what: str) -> None:
    assert max(ranks.run(moves.aborted, what)) < 1.0


@pytest.mark.parametrize(
    ("names", "what"),
    [
        *(("two", what) for what in ("receive", "first receive", "collective")),
        *(("two of two", what) for what in ("receive", "collective")),
    ],
)
def test_killed_peer(names: str, what: str) -> None:
    ranks = harness.pool_of_hosts(names)
    ranks.start(moves.killed, what)
    answers = ranks.collect(30)
    ranks.close()
    assert isinstance(answers[-1], harness.Died)
    assert all(isinstance(seconds, float) and seconds < 5 for seconds in answers[:-1]), answers


@pytest.mark.long
@pytest.mark.skipif(hosts.why_not() is not None, reason=f"no hosts: {hosts.why_not()}")
def test_bytes_on_the_wire() -> None:
    """What all ranks get crosses each host's link once."""
    count, numel = 4, 1_000_000
    with hosts.Hosts(2) as made:
        sent = _sent(made, [str(count), str(count)])
    # All-gathers: two ranks of a host have a tensor each. Broadcasts are the first host's. Headers
    # and acknowledgements come on top.
    for host, tensors in enumerate((3, 2)):
        assert 0.98 < sent[host] / (count * tensors * 4 * numel) < 1.08, sent


def _sent(made: hosts.Hosts, arguments: list[str]) -> list[int]:
    before = made.sent_bytes()
    outputs = made.run([SCRIPT, *arguments], ranks=2, timeout=120)
    assert all(json.loads(output.splitlines()[-1])["transport"] for output in outputs)
    return [now - then for now, then in zip(made.sent_bytes(), before, strict=True)]
