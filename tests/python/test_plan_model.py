"""Databases and cost models of plans: Aceso's numbers, and its faults mended."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from fusedpg.plan import Plan, PlanError
from fusedpg.plan.aceso import AcesoModel
from fusedpg.plan.catalogue import Layout, known_operators
from fusedpg.plan.database import Database, DatabaseError, MissingRow
from fusedpg.plan.model import CostModel, resharding_steps
from fusedpg.plan.primitives import PRIMITIVES, uniform_state
from fusedpg.plan.space import Space
from plan_toys import ACESO, write_rows, write_toy

JUDGED = json.loads((ACESO / "judged.json").read_text())


@pytest.fixture(scope="module")
def gpt() -> Database:
    return Database(ACESO, "gpt", "1_3B")


def uniform(
    database: Database, widths: tuple[int, ...], cuts: tuple[int, ...], **changes: Any
) -> Plan:
    """A plan without recomputation, by default with tp of each stage's width."""
    ops = len(database.operators.sequence)
    borders = (0, *cuts, ops)
    counts = tuple(b - a for a, b in itertools.pairwise(borders))
    dp = changes.pop("dp", (1,) * len(widths))

    def each(values: Any) -> tuple[tuple[int, ...], ...]:
        return tuple((value,) * count for value, count in zip(values, counts))

    plan = Plan(
        model_name=database.model_name,
        model_size=database.model_size,
        global_batch_size=16,
        micro_batch_size=2,
        num_gpus=widths,
        num_ops_in_each_stage=counts,
        model_parallel_size_of_each_op=each(w // d for w, d in zip(widths, dp)),
        data_parallel_size_of_each_op=each(dp),
        recompute_ops=each([0] * len(widths)),
        algo_of_each_op=each([0] * len(widths)),
    )
    return dataclasses.replace(plan, **changes).check()


@pytest.mark.parametrize("case", range(len(JUDGED)))
def test_as_aceso_prices(gpt: Database, case: int) -> None:
    """Random plans, with all degrees and recomputation mixed, have the original's prices."""
    said = JUDGED[case]
    price = AcesoModel(gpt, 4).price(Plan.from_json(said["plan"]))
    assert price.stage_times_ms == pytest.approx(said["time"], rel=1e-12)
    assert price.time_ms == max(price.stage_times_ms)
    assert [stage.memory for stage in price.stages] == pytest.approx(said["memory"], rel=1e-12)
    assert [stage.reserved for stage in price.stages] == pytest.approx(said["reserved"], rel=1e-12)


def test_models_of_aceso(gpt: Database) -> None:
    assert len(gpt.operators.sequence) == 1 + 13 * 24 + 2
    assert gpt.micro_batch_sizes == (1, 2, 4, 8) and gpt.tensor_parallel == (1, 2, 4)
    assert len(Database(ACESO, "gpt", "1_3B", num_layers=1000).operators.sequence) == 13003


def test_default_micro_batches_are_of_all_data_parallel_devices(gpt: Database) -> None:
    assert CostModel(gpt, 3).micro_batch_sizes() == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert AcesoModel(gpt, 3).micro_batch_sizes() == [1, 2, 4, 8]


def test_sequences_of_operators() -> None:
    """Fault 10: layers come as often as the model has them; a file describes other models."""
    t5 = [f"encoder{i}" for i in range(15)] + [f"decoder{i}" for i in range(24)]
    known = known_operators("t5", t5, {"num_layers": 3})
    assert known is not None
    layers = [t5[0], *t5[1:14] * 3, *t5[14:16], *t5[16:37] * 3, *t5[37:]]
    assert list(known.sequence) == layers
    resnet = known_operators("resnet", ["conv1", "bn1", "block-0-0-conv1"], {})
    assert resnet is not None and resnet.sequence == ("conv1", "bn1", "block-0-0-conv1")
    assert resnet.layer_starts == {"block-0-0-conv1"} and resnet.memory_main_params == 0
    assert known_operators("llama", ["a"], {"num_layers": 1}) is None


def test_data_parallelism_is_not_free(tmp_path: Path) -> None:
    """Fault 1: gradients are reduced, and the optimizer takes its time."""
    database = write_toy(tmp_path, 1)
    plan = uniform(database, (2,), (), dp=(2,))
    (aceso,) = AcesoModel(database, 2).price(plan).stages
    (ours,) = CostModel(database, 2).price(plan).stages
    weights = ours.gradients
    assert weights > 0 and aceso.reduction == aceso.optimizer == 0
    assert ours.reduction == pytest.approx(database.collective("all_reduce", 2)(weights))
    hidden = min(ours.backward, 0.5 * ours.reduction)  # the toys' overlap
    assert ours.exposed == pytest.approx(ours.reduction - hidden)
    assert ours.optimizer == pytest.approx(weights / 1000)  # the toys' column: 1 us a MB
    price = CostModel(database, 2).price(plan)
    assert price.time_ms == pytest.approx(ours.time * 8 + ours.exposed + ours.optimizer)


def test_overlap_hides_no_more_than_the_backward_pass(tmp_path: Path) -> None:
    database = write_toy(tmp_path, 1)
    write_rows(tmp_path / "prim_toy_s_all_reduce_2gpus.csv", ["size", "ms"], [1, 1e6], [999, 1e6])
    (ours,) = CostModel(database, 2).price(uniform(database, (2,), (), dp=(2,))).stages
    assert ours.exposed == pytest.approx(1e6 - ours.backward)


def test_reductions_of_later_stages_begin_earlier(tmp_path: Path) -> None:
    """A stage's gradients are whole before those of the stages in front of it."""
    database = write_toy(tmp_path, 4)
    write_rows(tmp_path / "prim_toy_s_all_reduce_2gpus.csv", ["size", "ms"], [1, 1e4], [999, 1e4])
    price = CostModel(database, 3).price(uniform(database, (1, 2), (2,), dp=(1, 2)))
    first, second = price.stages
    assert first.exposed == 0 and second.exposed + second.optimizer > first.backward > 0
    tail = second.exposed + second.optimizer - first.backward
    steady = max(first.time, second.time) * 7
    assert price.time_ms == pytest.approx(steady + first.time + second.time + tail)


def test_link_of_every_pair(tmp_path: Path) -> None:
    """Fault 2: whatever prices a stage knows which of its neighbours are on other machines."""
    database = write_toy(tmp_path, 2, inter_node=True)
    prices = {
        nodes: CostModel(database, 4, 4 // nodes).price(uniform(database, (1, 1, 2), (1, 2)))
        for nodes in (1, 2)
    }
    size = 2 * 1.0  # MB of two samples, of some power of two each
    near, far = prices[1].stages, prices[2].stages
    assert near[0] == far[0], "devices 0 and 1 are on one machine"
    assert far[1].send > near[1].send * 5 and far[2].receive > near[2].receive * 5
    assert far[1].receive == near[1].receive and size > 0
    (tmp_path / "p2p_inter_node.csv").unlink()
    with pytest.raises(MissingRow, match=r"p2p_inter_node\.csv"):
        CostModel(Database(tmp_path, "toy", "s"), 4, 2).price(uniform(database, (1, 1, 2), (1, 2)))


def test_unequal_widths_between_machines(tmp_path: Path) -> None:
    model = CostModel(write_toy(tmp_path, 2), 6, 3)
    assert model.place((2, 1, 3), 0).sends == 0
    assert model.place((2, 1, 3), 1).sends == 1
    assert model.place((2, 4), 0).sends == 2, "device 1 sends to 4 and 5, too"
    assert model.place((2, 4), 1).nodes == 2
    assert model.place((3, 3), 1).sends is None


@pytest.mark.parametrize(
    "megabytes, speed", [(0.008, 5), (1, 5), (2, 5.45), (8, 8), (64, 10), (640, 10)]
)
def test_bandwidth_of_a_size(tmp_path: Path, megabytes: float, speed: float) -> None:
    """Fault 3: the row of the size, not of another."""
    curve = write_toy(tmp_path, 0).message(False)
    if megabytes == 2:  # a straight line in time between 1 MB and 8 MB
        assert curve(2) == pytest.approx(1 / 5 + (8 / 8 - 1 / 5) / 7)
    else:  # as the nearest row's
        assert curve(megabytes) == pytest.approx(megabytes / speed)


def test_output_has_the_degree_of_the_last_operator(tmp_path: Path) -> None:
    """Fault 4."""
    database = write_toy(tmp_path, 3)
    for tp in (1, 2):
        path = tmp_path / f"toy_s_mbs2_tp{tp}_algo0.csv"
        header, *rows = [line.split(",") for line in path.read_text().splitlines()]
        rows[1][header.index("output_size")] = str(8 * tp)
        write_rows(path, header, *rows)
        path = tmp_path / f"toy_s_mbs1_tp{tp}_algo0.csv"
        write_rows(path, header, *rows)
    database = Database(tmp_path, "toy", "s")
    plan = uniform(
        database,
        (2, 2),
        (2,),
        model_parallel_size_of_each_op=((1, 2), (2, 2)),
        data_parallel_size_of_each_op=((2, 1), (1, 1)),
    )
    reshard = CostModel(database, 4)
    tables = reshard.tables(2)
    edge = (int(reshard.pair[0]), tables.index[1, 2, 0], tables.index[2, 1, 0])
    ours = reshard.price(plan).stages[0]
    assert ours.reshard_backward == pytest.approx(tables.reshard_backward[edge])
    assert ours.send == pytest.approx(database.message(False)(16))


def test_reserved_memory_of_the_last_operator(tmp_path: Path) -> None:
    """Fault 5."""
    database = write_toy(tmp_path, 5)
    path = tmp_path / "toy_s_mbs2_tp1_algo0.csv"
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[-1][header.index("bwd_reserved")] = "5000"
    write_rows(path, header, *rows)
    database = Database(tmp_path, "toy", "s")
    plan = uniform(database, (1,), ())
    assert AcesoModel(database, 1).price(plan).memory_mb < 5000
    assert CostModel(database, 1).price(plan).memory_mb > 5000


def test_missing_size_of_a_collective(gpt: Database) -> None:
    """Fault 6: Aceso's price of 100 s is noted, ours is between the rows."""
    whole, split = Layout(2, (1, 1, 1)), Layout(1, (1, 2, 1))
    aceso, ours = AcesoModel(gpt, 4), CostModel(gpt, 4)
    assert aceso.reshard(split, whole, 64, 1) == ours.reshard(split, whole, 64, 1)
    assert aceso.notes == {}
    assert aceso.reshard(split, whole, 69, 1) == (100000, 0)
    assert list(aceso.notes) == [
        "all_gather of 69 MB on 2 devices was not measured: 100000 ms, as in Aceso"
    ]
    curve = gpt.collective("all_gather", 2)
    low, high = curve(64), curve(74)
    assert ours.reshard(split, whole, 69, 1)[0] == pytest.approx((low + high) / 2)
    assert curve(4096) == pytest.approx(2 * curve(2048)), "rows that failed are left out"
    assert curve(0.001) == curve(2)


@pytest.mark.parametrize("model", [AcesoModel, CostModel])
def test_missing_file_is_named(tmp_path: Path, model: Any) -> None:
    database = write_toy(tmp_path, 6)
    (tmp_path / "toy_s_mbs2_tp2_algo0.csv").unlink()
    (tmp_path / "toy_s_mbs4_tp2_algo0.csv").unlink()
    plan = uniform(database, (2,), ())
    with pytest.raises(MissingRow, match=r"no toy_s_mbs2_tp2_algo0\.csv, for row op0"):
        model(Database(tmp_path, "toy", "s"), 2).price(plan)


def test_a_copy_reads_its_own_files(tmp_path: Path, gpt: Database) -> None:
    gpt.collective("all_gather", 2)
    copied = pickle.loads(pickle.dumps(gpt))
    copied.folder = tmp_path
    with pytest.raises(MissingRow, match=str(tmp_path)):
        copied.collective("all_gather", 2)
    space = Space(CostModel(gpt, 4), 64, (2, 4), 12000)
    same = pickle.loads(pickle.dumps(space))
    assert (same.settings(2, 2) == space.settings(2, 2)).all()


def test_failed_measurement_is_named(tmp_path: Path) -> None:
    write_toy(tmp_path, 6)
    path = tmp_path / "toy_s_mbs2_tp2_algo0.csv"
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[2][1] = "10000000.000"
    write_rows(path, header, *rows)
    database = Database(tmp_path, "toy", "s")
    with pytest.raises(MissingRow, match=r"mbs2_tp2_algo0\.csv: row op2 says .* failed"):
        CostModel(database, 2).price(uniform(database, (2,), ()))


def test_missing_reduction_is_named(tmp_path: Path) -> None:
    database = write_toy(tmp_path, 6)
    (tmp_path / "prim_toy_s_all_reduce_2gpus.csv").unlink()
    with pytest.raises(MissingRow, match=r"prim_toy_s_all_reduce_2gpus\.csv"):
        CostModel(database, 2).price(uniform(database, (2,), (), dp=(2,)))


def test_between_micro_batch_sizes(tmp_path: Path) -> None:
    """Fault 10: other sizes than 1, 2, 4 and 8, and other device counts."""
    database = write_toy(tmp_path, 7)
    rows = [database.row("op1", samples, 1, 0) for samples in (2, 3, 4)]
    assert rows[1] == pytest.approx([(a + b) / 2 for a, b in zip(rows[0], rows[2])])
    with pytest.raises(MissingRow, match="mbs5"):
        database.row("op1", 5, 1, 0)
    plan = uniform(database, (3,), (), dp=(3,), micro_batch_size=6, global_batch_size=18)
    assert CostModel(database, 3).price(plan).time_ms > 0


def test_tensor_parallelism_between_machines_was_not_measured(tmp_path: Path) -> None:
    database = write_toy(tmp_path, 8, inter_node=True)
    model = CostModel(database, 4, 2)
    with pytest.raises(MissingRow, match=r"no measurements of tp 4 between machines"):
        model.price(uniform(database, (4,), ()))
    with pytest.raises(MissingRow, match=r"all_reduce_2gpus_2nodes\.csv"):
        model.price(uniform(database, (4,), (), dp=(2,)))
    shutil.copy(
        tmp_path / "prim_toy_s_all_reduce_4gpus.csv",
        tmp_path / "prim_toy_s_all_reduce_2gpus_2nodes.csv",
    )
    for name in ("all_gather", "all_to_all"):
        for devices in (2, 4):
            shutil.copy(
                tmp_path / f"prim_toy_s_{name}_4gpus.csv",
                tmp_path / f"prim_toy_s_{name}_{devices}gpus_2nodes.csv",
            )
    assert model.price(uniform(database, (4,), (), dp=(2,))).stages[0].reduction > 0


def test_gpipe_holds_all_micro_batches(tmp_path: Path) -> None:
    database = write_toy(tmp_path, 9)
    model = CostModel(database, 2)
    plan = uniform(database, (1, 1), (2,))
    one, other = model.price(plan), model.price(dataclasses.replace(plan, schedule="gpipe"))
    assert one.time_ms == other.time_ms
    assert other.stages[1].activations == pytest.approx(7 * other.stages[1].peak)
    assert one.stages[1].activations == 0
    zero_bubble = dataclasses.replace(plan, schedule="zero_bubble")
    with pytest.raises(PlanError, match="not zero_bubble"):
        model.price(zero_bubble)


@pytest.mark.parametrize("dims", list(itertools.product(range(1, 7), repeat=2)))
def test_resharding_accounts_for_every_device(dims: tuple[int, int]) -> None:
    """Gathers undo the source's parts and splits make the target's, for any two degrees."""
    one, other = dims
    source, target = Layout(other, (1, one, 1)), Layout(one, (1, other, 1))
    parts = one
    for forward, _, devices in resharding_steps(source, target):
        assert devices > 1
        parts = parts // devices if forward == "all_gather" else parts * devices
    assert parts == other


def edited(path: Path, change: Any) -> None:
    path.write_text(change(path.read_text()))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda text: text[:-5], "cut off"),
        (lambda text: text[: text.rindex("op3")], "differ in op3"),
        (lambda text: text.split("\n")[0] + "\n", "no rows"),
        (lambda text: text.replace("weights", "mass"), "lacks the column weights"),
        (lambda text: text.replace("op2,", "op2,x"), "line 4: 'x"),
        (lambda text: text.replace("op2,", "op2,-"), "line 4: '-"),
        (lambda text: text.replace("op2,", "op2,1,"), "line 4: 14 cells below a header of 13"),
        (lambda text: text.replace("op2,", "op1,"), "line 4: a second row op1"),
        (lambda text: text.replace("1.0,0.0,0.0", "1.5,0.0,0.0"), "line 2: busy 1.5"),
    ],
)
def test_damaged_file(tmp_path: Path, change: Any, said: str) -> None:
    write_toy(tmp_path, 0)
    path = tmp_path / "toy_s_mbs2_tp1_algo0.csv"
    edited(path, change)
    with pytest.raises(DatabaseError, match=said) as info:
        Database(tmp_path, "toy", "s")
    assert path.name in str(info.value)


def test_damaged_tables_of_links_and_collectives(tmp_path: Path) -> None:
    database = write_toy(tmp_path, 0)
    write_rows(tmp_path / "p2p_intra_node.csv", [1, 2, 3], [1, 2])
    with pytest.raises(DatabaseError, match="3 sizes, 2 bandwidths"):
        database.message(False)
    write_rows(tmp_path / "p2p_intra_node.csv", [1, 2, 3], [1, 2, 3], [1, 2])
    with pytest.raises(DatabaseError, match="3 sizes, 2 times of ends"):
        database.message_end(False)
    edited(tmp_path / "prim_toy_s_all_reduce_2gpus.csv", lambda text: text.replace("8,", "8,1,"))
    with pytest.raises(DatabaseError, match="3 cells, not 2"):
        database.collective("all_reduce", 2)


def test_damaged_description(tmp_path: Path) -> None:
    write_toy(tmp_path, 0)
    edited(tmp_path / "model_toy_s.json", lambda text: text[: len(text) // 2])
    with pytest.raises(DatabaseError, match=r"model_toy_s\.json is no JSON, was it cut off"):
        Database(tmp_path, "toy", "s")


@pytest.mark.parametrize(
    "change, said",
    [
        ([], "is list, not an object"),
        ({"overlap": "half"}, "overlap 'half' is not between"),
        ({"overlap": 1.5}, "overlap 1.5 is not between"),
        ({"shared_cores": 2}, "shared_cores 2 is not"),
        ({"shared_cores": [4, "2"]}, r"shared_cores \[4, '2'\] is not"),
        ({"shared_cores": [4, float("nan")]}, r"shared_cores \[4, nan\] is not"),
        ({"shared_cores": [1.5, 1]}, r"shared_cores \[1.5, 1\] is not"),
    ],
)
def test_description_of_nonsense(tmp_path: Path, change: Any, said: str) -> None:
    write_toy(tmp_path, 0)
    path = tmp_path / "model_toy_s.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if change else change))
    with pytest.raises(DatabaseError, match=said) as info:
        Database(tmp_path, "toy", "s")
    assert path.name in str(info.value)


def test_no_database(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gpt_1_3B_mbs"):
        Database(tmp_path, "gpt", "1_3B")
    write_toy(tmp_path, 0)
    (tmp_path / "model_toy_s.json").unlink()
    with pytest.raises(DatabaseError, match=r"model_toy_s\.json must list its operators"):
        Database(tmp_path, "toy", "s")


def test_described_models_share_nothing_of_aceso(tmp_path: Path) -> None:
    """A profile of another implementation of GPT has the same names, but not Aceso's memory."""
    for path in ACESO.glob("*.csv"):
        shutil.copy(path, tmp_path)
    names = Database(ACESO, "gpt", "1_3B").operators.sequence
    described = {"operators": names, "memory_optimizer": 2, "memory_main_params": 0}
    (tmp_path / "model_gpt_1_3B.json").write_text(json.dumps(described))
    operators = Database(tmp_path, "gpt", "1_3B").operators
    assert operators.shared_activations == {} and operators.layer_starts == frozenset()
    assert operators.memory_optimizer == 2 and operators.sequence == names


def test_a_plan_at_the_limit_fits(gpt: Database) -> None:
    """Fault 9: as much as there is may be used."""
    model = AcesoModel(gpt, 4)
    plan = uniform(gpt, (4,), (), dp=(1,))
    limit = model.price(plan).memory_mb
    for most, fits in ((limit, True), (limit * (1 - 1e-9), False)):
        space = Space(model, 16, (2,), most)
        setting = model.tables(2).index[4, 1, 0]
        state = uniform_state(2, (4,), (model.num_ops,), (setting,))
        candidate = space.candidate(state)
        assert candidate is not None
        assert (candidate.memory == limit and not any(candidate.flags[0])) == fits


def test_smaller_micro_batches_fit_where_larger_do_not(gpt: Database) -> None:
    """Fault 8: dec_mbs leads to legal plans."""
    space = Space(CostModel(gpt, 4), 64, (2, 4), 12000)
    setting = space.model.tables(4).index[1, 4, 0]
    start = space.candidate(uniform_state(4, (4,), (space.model.num_ops,), (setting,)))
    assert start is not None and start.overrun > 0
    (primitive,) = (one for one in PRIMITIVES if one.name == "dec_mbs")
    states = list(primitive.apply(space, start, 0))
    candidates = [space.candidate(state) for state in states]
    assert candidates and all(one is not None and one.overrun == 0 for one in candidates)
    assert {state.micro_batch for state in states} == {2}


def test_values_in_two_layouts_are_held_twice(tmp_path: Path) -> None:
    """Where degrees change, what was made stays for its operator, what is used for the next."""
    write_toy(tmp_path, 3, ops=2)
    path = tmp_path / "model_toy_s.json"
    described = json.loads(path.read_text())
    described["layouts"] = {name: [["replicated", "replicated"]] for name in ("op0", "op1")}
    path.write_text(json.dumps(described))

    def memory(degrees: tuple[int, int]) -> float:
        columns = [(tuple(column),) for column in (degrees, [2 // tp for tp in degrees])]
        zeros = ((0, 0),)
        plan = Plan("toy", "s", 8, 2, (2,), (2,), *columns, zeros, zeros).check()
        return CostModel(Database(tmp_path, "toy", "s"), 2).price(plan).stages[0].peak

    plain = {degrees: memory(degrees) for degrees in itertools.product((1, 2), repeat=2)}
    for name in tmp_path.glob("toy_s_mbs*.csv"):
        edited(name, lambda text: text.replace("1.0,0.0,0.0", "1.0,7.0,3.0"))
    for degrees, before in plain.items():
        more = 0.0 if degrees[0] == degrees[1] else 7.0 - 3.0
        assert memory(degrees) == pytest.approx(before + more), degrees


def test_resharding_crosses_machines_only_if_dp_changes(tmp_path: Path) -> None:
    """Tensor-parallel devices are on one machine; there are no measurements between two here."""
    tables = CostModel(write_toy(tmp_path, 8, inter_node=True), 4, 2).tables(4, nodes=2)
    lacking = list(tables.missing_reshard)
    assert lacking and all("2nodes" in str(tables.missing_reshard[key]) for key in lacking)
    assert all(tables.dp[one] != tables.dp[other] for _, one, other in lacking)
    same = tables.dp[:, None] == tables.dp
    assert math.isfinite(tables.reshard_forward[:, same].sum())
    assert tables.reshard_forward[:, same].sum() > 0
