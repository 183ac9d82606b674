"""Aggregators: what they add up, who may use them, and what happens when somebody dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import aggregators as checks
from fusedpg import aggregator
from harness import Died

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(180)]

KEY = "00112233445566778899aabbccddeeff"
# Seconds, of groups whose deadline is a minute: 2 on an idle machine.
SOON = 10
LISTENS = "fusedpg-aggregator: listens at "


class Aggregator:
    """A process, and what it prints."""

    def __init__(self, listen: str = "127.0.0.1:0", key: str = KEY, *more: str) -> None:
        environment = {**os.environ, "FUSEDPG_AGGREGATOR_KEY": key}
        command = harness.python("-m", "fusedpg.aggregator", "--listen", listen, *more)
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first.startswith(LISTENS), self.process.communicate()
        self.place = first.removeprefix(LISTENS).strip()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.place.rsplit(":", 1)
        return host, int(port)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> tuple[str, str]:
        self.process.kill()
        return self.process.communicate()

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def on_hosts(size: int, same_host: bool = False, **more: str) -> list[dict[str, str]]:
    """The environments of ranks that take each other for those of several hosts."""
    return [
        {
            "FUSEDPG_HOST_ID": "one" if same_host and rank else str(rank),
            "FUSEDPG_AGGREGATOR_KEY": KEY,
            "FUSEDPG_AGGREGATE": "on",
            **more,
        }
        for rank in range(size)
    ]


def workers(size: int, *, init: bool = True, **more: Any) -> Any:
    env = on_hosts(size, **more)
    return harness.Workers(size, env=env, init=init, oracle=False, one_host=False)


@pytest.fixture(scope="module")
def two() -> Iterator[str]:
    with Aggregator() as first, Aggregator() as second:
        yield f"{first.place},{second.place}"


@pytest.fixture
def ranks() -> Any:
    return harness.pool(3, env=on_hosts(3), oracle=False, one_host=False)


def test_sparse_embedding(ranks: Any, two: str) -> None:
    ranks.run(checks.embedding_is_unchanged, two)


def test_absent_blocks_never_travel(ranks: Any, two: str) -> None:
    ranks.run(checks.absent_blocks_never_travel, two)


def test_messages_have_their_size(ranks: Any, two: str) -> None:
    ranks.run(checks.messages_have_their_size, two)


def test_block_skip_goes_by_aggregators(ranks: Any, two: str) -> None:
    ranks.run(checks.block_skip_goes_by_aggregators, two)


def test_threshold_keeps_the_rest(ranks: Any, two: str) -> None:
    ranks.run(checks.threshold_keeps_the_rest, two)


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [("1,10", "aggregators"), ("1,1.5", "aggregators"), ("1,1.2", "rank to rank"),
     ("1,0.5", "rank to rank"), ("10,10", "rank to rank")],
)  # fmt: skip
def test_follows_the_rates(ranks: Any, two: str, rates: str, wanted: str) -> None:
    """Of three ranks and two aggregators."""
    ranks.run(checks.follows_the_rates, two, rates, wanted)


def test_two_ranks_never_choose_them(two: str) -> None:
    """Their links carry the same bytes either way."""
    with workers(2) as found:
        found.run(checks.follows_the_rates, two, "1,100", "rank to rank")


def test_learns_the_overlap(ranks: Any, two: str) -> None:
    ranks.run(checks.learns_the_overlap, two)


def test_measures_links(ranks: Any, two: str) -> None:
    ranks.run(checks.measures_links, two)


@pytest.mark.parametrize(
    "options",
    [{"aggregate": "sometimes"},
     *({"aggregate_message_bytes": size} for size in (4095, 1 << 20)),
     *({"aggregate_rates": text} for text in ("1", "x,1", "1;1", "0,1", "1,-1", "1,2,3", "nan,1"))],
)  # fmt: skip
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        fusedpg.ProcessGroupFused(dist.HashStore(), 0, 1, fusedpg.Options(**options))


def test_link_carries_the_tensor_once(ranks: Any, two: str) -> None:
    ranks.run(checks.bytes_of_link, two)


def test_groups_at_the_same_time(ranks: Any, two: str) -> None:
    ranks.run(checks.several_groups, two, 6)


def test_ddp(ranks: Any, two: str) -> None:
    ranks.run(checks.ddp_is_unchanged, two)


def test_flat_order_on_shared_hosts(two: str) -> None:
    with workers(3, same_host=True, FUSEDPG_ORDER="flat") as found:
        found.run(checks.equals_without, two, torch.float32, checks.LARGE)
    with workers(3, same_host=True) as found:
        found.run(checks.all_to_one, two, 'order="flat"')


@pytest.mark.parametrize(
    ("places", "text"),
    [("nowhere", '"host:port", got "nowhere"'), ("127.0.0.1:x", "host:port"),
     ("127.0.0.1:1", "aggregator 0 (127.0.0.1:1)")],
)  # fmt: skip
def test_what_cannot_be_reached(ranks: Any, places: str, text: str) -> None:
    ranks.run(checks.all_to_one, places, text)


def test_another_key(ranks: Any) -> None:
    with Aggregator("127.0.0.1:0", "f" * 32) as other:
        ranks.run(checks.all_to_one, other.place, "has another key")
    with workers(2, FUSEDPG_AGGREGATOR_KEY="short") as found:
        found.run(checks.all_to_one, "127.0.0.1:1", "32 hexadecimal digits")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("blocks", [False, True])
def test_worker_is_killed(tmp_path: Path, two: str, blocks: bool) -> None:
    """The others raise soon, and name it; a group of these works."""
    with workers(3, init=False) as found:
        found.run(checks.join, "a", [0, 1, 2], two, 60.0)
        found.start(checks.until_it_fails, str(tmp_path / "go"), blocks)
        wait_for(tmp_path / "go")
        killed = time.time()
        found.signal(1, signal.SIGKILL)
        answers = found.collect(30)
        assert isinstance(answers[1], Died)
        for rank in (0, 2):
            when, text = answers[rank]
            assert when - killed < SOON, answers
            assert "rank 1" in text, text
        found.start(checks.join, "b", [0, 2], two, 60.0, ranks=[0, 2])
        assert found.collect(30, ranks=[0, 2]) == [None, None]
        found.start(checks.some_rounds, 3, ranks=[0, 2])
        assert found.collect(30, ranks=[0, 2]) == [None, None]


@pytest.mark.long
@pytest.mark.parametrize("blocks", [False, True])
def test_worker_is_stopped(tmp_path: Path, two: str, blocks: bool) -> None:
    """The others raise at the group's deadline, and name it."""
    with workers(3, init=False) as found:
        found.run(checks.join, "a", [0, 1, 2], two, 8.0)
        found.start(checks.until_it_fails, str(tmp_path / "go"), blocks)
        wait_for(tmp_path / "go")
        found.signal(1, signal.SIGSTOP)
        try:
            answers = found.collect(30, ranks=[0, 2])
        finally:
            found.signal(1, signal.SIGCONT)
        for _, text in answers:
            assert "rank 1" in text, text
        found.collect(30, ranks=[1])


def test_aggregator_is_killed_and_started_again(tmp_path: Path) -> None:
    """All raise soon, and name it; a new group works when it is there again."""
    with workers(3, init=False) as found, Aggregator() as first, contextlib.ExitStack() as later:
        second = later.enter_context(Aggregator())
        both = f"{first.place},{second.place}"
        for number in range(2):
            go = tmp_path / str(number)
            found.run(checks.join, f"a{number}", [0, 1, 2], both, 60.0)
            found.start(checks.until_it_fails, str(go), number == 0)  # blocks, then all
            wait_for(go)
            killed = time.time()
            second.close()
            for when, text in found.collect(30):
                assert when - killed < SOON
                assert f"aggregator 1 ({second.place})" in text, text
            second = later.enter_context(Aggregator(second.place))
        found.run(checks.join, "b", [0, 1, 2], both, 60.0)
        found.run(checks.some_rounds, 3)
        found.run(checks.leave)


def test_strangers_reach_nothing(ranks: Any) -> None:
    """Garbage, silence and half of a greeting, while ranks work."""
    with Aggregator() as one, contextlib.ExitStack() as open_:
        draw = random.Random(4)
        magic = (0x3130706370736466).to_bytes(8, "little")
        door = (1).to_bytes(8, "little")
        for n in range(60):
            stranger = open_.enter_context(socket.create_connection(one.address))
            with contextlib.suppress(OSError):
                stranger.sendall(
                    [b"", draw.randbytes(100), b"GET / HTTP/1.1\r\n\r\n", magic,
                     magic + door + bytes(24), magic + door + bytes(8) + draw.randbytes(60)][n % 6]
                )  # fmt: skip
        ranks.run(checks.several_groups, one.place, 3)
        assert one.process.poll() is None


def test_drains(tmp_path: Path) -> None:
    """SIGTERM: its groups go on, new ones are refused, and it ends with the last one."""
    with workers(2, init=False) as found, Aggregator() as one:
        found.run(checks.join, "a", [0, 1], one.place, 60.0)
        found.run(checks.some_rounds, 1)
        one.signal(signal.SIGTERM)
        assert one.process.stdout is not None
        assert "no more jobs" in one.process.stdout.readline()
        found.run(checks.some_rounds, 2)
        found.run(checks.all_to_one, one.place, "takes nobody in any more")
        assert one.process.poll() is None
        found.run(checks.leave)
        assert one.process.wait(10) == 0


def test_second_signal_ends_it(tmp_path: Path) -> None:
    with workers(2, init=False) as found, Aggregator() as one:
        found.run(checks.join, "a", [0, 1], one.place, 60.0)
        found.start(checks.until_it_fails, str(tmp_path / "go"))
        wait_for(tmp_path / "go")
        one.signal(signal.SIGTERM)
        assert one.process.stdout is not None
        assert "no more jobs" in one.process.stdout.readline()
        one.signal(signal.SIGINT)
        for _, text in found.collect(30):
            assert f"aggregator 0 ({one.place})" in text
        assert one.process.wait(10) == 0


def test_stats(ranks: Any) -> None:
    with Aggregator("127.0.0.1:0", KEY, "--stats", "0.1") as one:
        ranks.run(checks.several_groups, one.place, 2)
        assert one.process.stdout is not None
        deadline = time.monotonic() + 20
        while True:
            stats = json.loads(one.process.stdout.readline())
            if stats["jobs"] == 2 and stats["active"] == 0:
                break
            assert time.monotonic() < deadline, stats
    assert (stats["operations"], stats["failed"], stats["refused"]) == (4, 0, 0)
    assert stats["bytes_received"] == stats["bytes_sent"] == 4 * 3 * 4 * checks.LARGE


def test_settings(tmp_path: Path) -> None:
    """Flags, then the environment, then the file."""
    (tmp_path / "key").write_text(KEY + "\n")
    file = tmp_path / "a.toml"
    file.write_text('listen = "a:1"\nkey_file = "key"\nstats = 3\n')
    config = ["--config", str(file)]
    environment = {"listen": "b:2", "key": "", "stats": ""}
    of = aggregator.settings
    assert of([], {}) == aggregator.Settings("127.0.0.1:4711", "", 0)
    assert of(config, {}) == aggregator.Settings("a:1", KEY, 3)
    assert of(config, environment) == aggregator.Settings("b:2", KEY, 3)
    flags = [*config, "--listen", "c:3", "--stats", "0.5"]
    assert of(flags, environment | {"stats": "7"}) == aggregator.Settings("c:3", KEY, 0.5)
    file.write_text('udp = "d:4"\n')
    assert of(config, {}).udp == "d:4"
    assert of([*config, "--udp", "e:5"], {}).udp == "e:5"
    for text, message in (
        ("listens = 'a:1'", "unknown listens"),
        ("key = 'a'\nkey_file = 'key'", "give one"),
        ("key_file = 'none'", "No such file"),
        ("listen = 5", "listen is a text"),
        ("key_file = 5", "key_file is a text"),
        ("udp = 5", "udp is a text"),
        ("stats = -1", "stats is a number"),
        ("stats = true", "stats is a number"),
        ("listen =", "a.toml"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            of(config, {})
    with pytest.raises(ValueError, match="No such file"):
        of(["--config", str(tmp_path / "none.toml")], {})


OMNIREDUCE = """\
[omnireduce]
num_workers = 2
num_aggregators = 2
num_threads = 8
worker_cores = -1,-1
ib_hca = mlx5_1
gpu_devId = 0
block_size = 256
tcp_port = 19876
worker_ips = 10.0.0.1,10.0.0.2
aggregator_ips = 192.0.2.7,127.0.0.1
"""
SWITCHML = """\
[general]
rank = 0
num_workers = 2
controller_ip = 127.0.0.1
controller_port = 4000
[backend.dpdk]
cores = 10-13
"""


def test_configuration_of_the_originals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.cfg"
    config = ["--config", str(file)]
    of = aggregator.settings
    file.write_text(OMNIREDUCE)
    assert of(config, {"key": KEY}) == aggregator.Settings("127.0.0.1:19876", KEY, 0)
    said = capsys.readouterr().err
    assert said.count("without meaning here") == 1
    for key in ("num_threads", "worker_cores", "ib_hca", "gpu_devid", "block_size"):
        assert key in said
    assert "tcp_port" not in said
    assert of([*config, "--listen", "c:3"], {}).listen == "c:3"
    capsys.readouterr()
    file.write_text(SWITCHML)
    assert of(config, {}) == aggregator.Settings(udp="127.0.0.1:4000")
    said = capsys.readouterr().err
    assert said.count("without meaning here") == 1
    assert "general.rank, general.num_workers, backend.dpdk.cores" in said
    assert of([*config, "--udp", "d:4"], {}).udp == "d:4"
    file.write_text("[general]\ncontroller_port = 4001\n")
    assert of(config, {}).udp == "127.0.0.1:4001"
    file.write_text("[general]\nrank = 0\n")
    assert of(config, {}).udp == ""
    file.write_text(OMNIREDUCE.replace("127.0.0.1", "192.0.2.8"))
    assert of(config, {"listen": "b:2"}).listen == "b:2"
    for text, message in (
        ("[omnireduce]\ntcp_port = 5", "tcp_port without aggregator_ips"),
        ("[omnireduce]\naggregator_ips = \0", "none of aggregator_ips"),
        (OMNIREDUCE + "ib_hcas = 1", "unknown key omnireduce.ib_hcas"),
        (OMNIREDUCE + "[general]\nrank = 0", "unknown key general.rank"),
        (OMNIREDUCE.replace("aggregators = 2", "aggregators = 3"), "num_aggregators is 3, but"),
        (OMNIREDUCE.replace("workers = 2", "workers = x"), "num_workers is a number"),
        (OMNIREDUCE.replace("19876", "port"), "tcp_port is a number"),
        (OMNIREDUCE.replace("127.0.0.1", "192.0.2.8"), "none of aggregator_ips"),
        (OMNIREDUCE.replace("192.0.2.7", "127.0.0.2"), "more than one of aggregator_ips"),
        (SWITCHML + "core = 3", "unknown key backend.dpdk.core"),
        ("rank = 0", "no section headers"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            of(config, {})


@pytest.mark.parametrize(
    ("listen", "key", "text"),
    [("127.0.0.1:0", "", "32 hexadecimal digits"), ("127.0.0.1", KEY, "host:port"),
     ("203.0.113.7:0", KEY, "cannot listen")],
)  # fmt: skip
def test_does_not_start(listen: str, key: str, text: str) -> None:
    done = subprocess.run(
        harness.python("-m", "fusedpg.aggregator", "--listen", listen),
        env={**os.environ, "FUSEDPG_AGGREGATOR_KEY": key},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert text in done.stderr
