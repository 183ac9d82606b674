"""The schedule that is played on devices which share cores, against what can be said by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fusedpg.plan import Plan
from fusedpg.plan.contention import SharedCores, Work, played
from fusedpg.plan.database import Database, DatabaseError
from fusedpg.plan.model import CostModel
from plan_toys import write_toy


def work(stage: int, **changes: float) -> Work:
    plain = Work(stage, 1, forward=2.0, backward=4.0, receive=0.0, send=0.0, finish=0.0, wait=0.0)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_enough_cores(stages: int, count: int, schedule: str) -> None:
    """Equal stages with a core each: all passes of one, and the others' once."""
    found = played([work(i) for i in range(stages)], count, SharedCores(4, 4), schedule)
    assert found == pytest.approx(6.0 * (count + stages - 1))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_one_stage_shares_cores_with_itself(width: int) -> None:
    found = played([work(0, width=width, finish=1.0, wait=3.0)], 5, SharedCores(4, 2))
    assert found == pytest.approx((5 * 6.0 + 1.0) * max(1.0, width / 2) + 3.0)


def test_cores_are_never_idle_where_there_is_work() -> None:
    """Four stages on one core take as long as all of their passes in a row."""
    stages = [work(i, forward=1.0 + i) for i in range(4)]
    total = sum(one.forward + one.backward for one in stages)
    assert played(stages, 6, SharedCores(4, 1)) == pytest.approx(6 * total)
    assert played(stages, 6, SharedCores(2, 1)) < 6 * total, "two machines"


def test_messages_take_time_and_links_carry_one_at_a_time() -> None:
    slow = [work(0), work(1, receive=10.0, send=0.0)]
    assert played(slow, 1, SharedCores(2, 2)) == pytest.approx(2 + 10 + 2 + 4 + 4)
    # GPipe's second message waits for the first one.
    both = played(slow, 2, SharedCores(2, 2), "gpipe")
    assert both == pytest.approx(2 + 10 + 10 + 2 + 4 + 4 + 4)
    back = [work(0, send=7.0), work(1)]
    assert played(back, 1, SharedCores(2, 2)) == pytest.approx(2 + 2 + 4 + 7 + 4)


@pytest.mark.parametrize("busy", [1.0, 0.75, 0.5, 0.0])
def test_a_pass_that_waits_leaves_its_core(busy: float) -> None:
    """Two stages on a core in turn while they compute, and at the same time while they wait."""
    share = {"forward_busy": busy, "backward_busy": busy}
    stages = [work(0, **share), work(1, forward=0.0, backward=0.0)]
    assert played(stages, 5, SharedCores(2, 1)) == pytest.approx(5 * 6.0), "one alone"
    stages = [work(0, width=2, **share)]
    found = played(stages, 5, SharedCores(2, 1))
    assert found == pytest.approx(5 * 6.0 * max(1.0, 2 * busy))
    assert played([work(0, width=2)], 1, SharedCores(2, 1.6)) == pytest.approx(6.0 * 2 / 1.6)


def test_messages_take_time_of_cores(tmp_path: Path) -> None:
    """What messages take of both ends' cores is in every pass where cores are shared."""
    write_toy(tmp_path, 4)
    path = tmp_path / "model_toy_s.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shared_cores": [2, 1]}))
    columns = [((value,) * 2,) * 2 for value in (1, 1, 0, 0)]
    plan = Plan("toy", "s", 8, 1, (1, 1), (2, 2), *columns).check()
    link = tmp_path / "p2p_intra_node.csv"
    before = CostModel(Database(tmp_path, "toy", "s"), 2).price(plan).time_ms
    link.write_text(link.read_text() + "3,3,3\n")
    after = CostModel(Database(tmp_path, "toy", "s"), 2).price(plan)
    sizes = [3.0 * min(1.0, size) for size in (1.0,)]
    assert [stage.messaging for stage in after.stages] == pytest.approx(sizes * 2)
    # 8 micro-batches, 2 stages, a message at an end of each of the 2 passes; of which the core
    # may wait for some at the beginning and the end.
    assert before + 8 * 2 * 2 * 3.0 * 0.8 < after.time_ms <= before + 8 * 2 * 2 * 3.0 + 1e-6


def test_the_model_plays_where_cores_are_shared(tmp_path: Path) -> None:
    """Two stages on one core: no parallelism; on two cores the formula's time."""
    write_toy(tmp_path, 4)
    counts = {"num_ops_in_each_stage": (2, 2), "num_gpus": (1, 1)}
    columns = [((value,) * 2,) * 2 for value in (1, 1, 0, 0)]
    plan = Plan("toy", "s", 8, 1, (1, 1), (2, 2), *columns).check()
    assert counts["num_gpus"] == plan.num_gpus
    path = tmp_path / "model_toy_s.json"
    described = json.loads(path.read_text())
    times = {}
    for cores in (None, [2, 2], [2, 1]):
        path.write_text(json.dumps(described | ({} if cores is None else {"shared_cores": cores})))
        times[str(cores)] = CostModel(Database(tmp_path, "toy", "s"), 2).price(plan)
    alone = times["[2, 1]"]
    passes = sum(stage.forward_pass + stage.backward_pass for stage in alone.stages)
    ends = sum(stage.optimizer + stage.exposed for stage in alone.stages)
    assert alone.time_ms >= 8 * passes
    assert alone.time_ms <= 8 * passes + ends + sum(s.receive + s.send for s in alone.stages)
    assert times["[2, 2]"].time_ms <= times["None"].time_ms * (1 + 1e-9), "messages overlap"
    assert times["[2, 2]"].time_ms < alone.time_ms
    path.write_text(json.dumps(described | {"shared_cores": [2, 0]}))
    with pytest.raises(DatabaseError, match=r"shared_cores \[2, 0\] is not \[devices, cores\]"):
        Database(tmp_path, "toy", "s")
