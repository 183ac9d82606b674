"""State of the fused optimizers: checkpoints, resharding, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import harness
from checks import optim_state, optim_whole
from checks.optim_state import KINDS

pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

WAYS = ("full", "merge", "dcp", "dcp flat", "dcp whole", "dcp offload", "consolidate")


def skip_whole(kind: str) -> None:
    if kind == "sgd":
        pytest.skip("torch loads no whole state that has no tensor")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_two_then_four_then_one(way: str, kind: str, layout: str, tmp_path: Path) -> None:
    if layout != "contiguous" and kind not in ("adam", "lamb"):
        pytest.skip("the layout of all state is the same")
    if way in ("dcp whole", "dcp offload"):
        skip_whole(kind)
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        Path(folder).mkdir()
    run = optim_state.leg
    harness.pool(2).run(run, way, kind, "", folders[0], 0, layout)
    harness.pool(4).run(run, way, kind, folders[0], folders[1], 1, layout)
    harness.pool(1).run(run, way, kind, folders[1], "", 2, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 master"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "lamb"])
@pytest.mark.parametrize("way", [*WAYS, "own"])
def test_same_world_same_bits(way: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if way in ("dcp whole", "dcp offload"):
        skip_whole(kind)
    harness.pool(2).run(optim_state.same_world, way, kind, str(tmp_path), dtype)


@pytest.mark.parametrize("how", ["load", "fuse"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lamb", "sgd")])
def test_from_torch_and_back(workers: harness.Workers, kind: str, how: str) -> None:
    workers.run(optim_state.from_torch, kind, 1, how)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_from_a_torch_optimizer_without_state(pair: harness.Workers, kind: str) -> None:
    for how in ("load", "fuse"):
        pair.run(optim_state.from_torch, kind, 0, how)


@pytest.mark.parametrize("how", ["own", "full", "to torch"])
def test_checkpoint_before_the_first_step(pair: harness.Workers, how: str) -> None:
    pair.run(optim_state.before_first_step, how)


@pytest.mark.parametrize("kind", KINDS)
def test_only_rank_0_saves(workers: harness.Workers, kind: str) -> None:
    workers.run(optim_state.rank0_saves, kind)


@pytest.mark.parametrize("form", ["own", "full"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "lamb"])
def test_loading_leaves_the_input_alone(pair: harness.Workers, kind: str, form: str) -> None:
    pair.run(optim_state.input_untouched, kind, form)


def test_foreign_slices_are_refused(trio: harness.Workers, tmp_path: Path) -> None:
    for foreign, small in trio.run(optim_state.foreign_slices, str(tmp_path)):
        assert "another rank" in foreign
        assert "full_state_dict" in foreign and "merge_state_dicts" in foreign
        assert "exp_avg" in small and "(3,)" in small


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_whole_or_raises(workers: harness.Workers, kind: str) -> None:
    for arm in optim_whole.ARMS:
        workers.run(optim_whole.whole_or_raises, kind, arm)


@pytest.mark.parametrize("change", optim_whole.CHANGES)
def test_what_was_consolidated_is_never_old(pair: harness.Workers, change: str) -> None:
    pair.run(optim_whole.never_old, change)


def test_a_fresh_state_dict_is_whole(pair: harness.Workers) -> None:
    pair.run(optim_whole.fresh)


def test_hooks_of_state_dicts_see_what_is_given(pair: harness.Workers) -> None:
    pair.run(optim_whole.hooks)


def test_consolidates_to_a_rank_only(pair: harness.Workers) -> None:
    pair.run(optim_whole.refuses)


def test_dcp_saves_an_optimizer_by_itself(pair: harness.Workers, tmp_path: Path) -> None:
    pair.run(optim_whole.stateful, str(tmp_path))


def test_masters(pair: harness.Workers) -> None:
    pair.run(optim_state.masters)


# --- memory ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["momentum", "adamw", "lamb"])
def test_state_is_split(workers: harness.Workers, kind: str) -> None:
    factor = 4 if kind == "momentum" else 8
    for reported, held, count in workers.run(optim_state.state_bytes, kind, 701, 5):
        assert reported <= factor * count / workers.world_size * 1.01
        assert reported <= held <= reported * 1.01


@pytest.mark.long
def test_memory_of_processes() -> None:
    width, depth = 1009, 6
    mib = 4 * depth * (width * width + width) / 2**20
    added = {}
    for which in ("fused", "torch", "zero"):
        with harness.Workers(2) as workers:
            answers = workers.run(optim_state.ddp_memory, which, width, depth)
            added[which] = sum(answers)
    # Of two ranks: two moments each with torch, two between them when split.
    assert added["torch"] > 3.6 * mib, added
    assert added["fused"] < 2 * mib * 1.15 + 4, added
    assert added["fused"] < 0.7 * added["torch"], added
    assert added["fused"] < added["zero"] * 1.1 + 4, added


def test_memory_of_shared_parameters() -> None:
    numel = 8 << 20
    mib = 4 * numel / 2**20
    size = 3
    added = {}
    for share in (False, True):
        with harness.Workers(size, oracle=False) as workers:
            added[share] = sum(workers.run(optim_state.shared_memory, share, numel))
    assert added[False] > 0.9 * mib * size, added
    assert added[True] < 1.2 * mib + 4 * size, added


@pytest.mark.parametrize("with_ddp", [False, True], ids=["manual", "ddp"])
def test_sharing_changes_no_bit(workers: harness.Workers, with_ddp: bool) -> None:
    answers = workers.run(optim_state.sharing, with_ddp)
    assert all(one == answers[0] for one in answers)


def test_writing_shared_parameters(workers: harness.Workers) -> None:
    workers.run(optim_state.writing)


@pytest.mark.parametrize("share", [False, True])
def test_parameters_outlive_their_group(share: bool) -> None:
    with harness.Workers(3, oracle=False) as workers:
        workers.run(optim_state.outlives, share)


@pytest.mark.parametrize(("saved", "loads"), sorted(optim_state.OTHER_KINDS))
def test_state_of_another_kind(pair: harness.Workers, saved: str, loads: str) -> None:
    pair.run(optim_state.other_kind, saved, loads)


@pytest.mark.parametrize("how", ["value", "one rank", "all", "layout"])
@pytest.mark.parametrize("mode", ["manual", "ddp", "overlap"])
@pytest.mark.parametrize("kind", ["adamw", harness.slow("momentum")])
def test_values_that_differ_between_ranks(
    pair: harness.Workers, kind: str, mode: str, how: str
) -> None:
    pair.run(optim_state.other_values, kind, mode, how)
