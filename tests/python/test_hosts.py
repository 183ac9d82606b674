"""Groups over real links: hosts that are network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import harness
import hosts

pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.skipif(hosts.why_not() is not None, reason=f"no hosts: {hosts.why_not()}"),
]

SCRIPT = str(Path(__file__).resolve().parent / "scripts/sparse_hosts.py")


def namespaces() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line.startswith("fpg")}


def moved(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("moved "))
    result: dict[str, Any] = json.loads(line.removeprefix("moved "))
    return result


@pytest.mark.long
@pytest.mark.parametrize(("count", "ranks"), [(2, 1), harness.slow(2, 2)])
def test_bytes_on_the_wire(count: int, ranks: int) -> None:
    """What the interfaces count is what stats() says, and far from the dense bytes."""
    with hosts.Hosts(count) as made:
        outputs = made.run([SCRIPT, "0.05"], ranks=ranks, timeout=120)
        wire = made.sent_bytes()
    assert not {made.namespace(host) for host in range(count)} & namespaces()
    for output, sent in zip(outputs, wire, strict=True):
        found = moved(output)
        # And that of a sparse gradient.
        assert found["paths"] == {"block_sparse": 5, "coordinates": 1}
        # Without headers; besides, there are the rendezvous and a small DDP model.
        if ranks == 1:
            assert 0.95 * found["bytes_sent"] < sent < 1.1 * found["bytes_sent"] + 2_000_000
        assert found["bytes_sent"] < 0.3 * 5 * 2 * 4 * 2_000_003 * (count * ranks - 1) / count


def test_links_have_a_rate() -> None:
    """10 MB over 100 Mbit/s take 0.8 s and not much more."""
    with hosts.Hosts(2, rate="100mbit") as made:
        receive = (
            "import socket, time; s = socket.create_server(('', 5000)); c = s.accept()[0]\n"
            "begin = time.monotonic(); n = 0\n"
            "while part := c.recv(1 << 16): n += len(part)\n"
            "print(n, time.monotonic() - begin)"
        )
        send = (
            "import socket, time\n"
            "for _ in range(100):\n"
            "  try: s = socket.create_connection(('10.77.0.1', 5000)); break\n"
            "  except OSError: time.sleep(0.05)\n"
            "s.sendall(bytes(10_000_000))"
        )
        receiver = made.start(0, ["python3", "-c", receive])
        sender = made.start(1, ["python3", "-c", send])
        amount, seconds = receiver.communicate(timeout=60)[0].split()
        sender.wait(timeout=60)
    assert int(amount) == 10_000_000
    assert float(seconds) > 0.6


@pytest.mark.long
def test_failures_leave_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("raise SystemExit('no luck')")
    with hosts.Hosts(2) as made, pytest.raises(RuntimeError, match="no luck"):
        made.run([str(bad)])
    names = {made.namespace(host) for host in range(2)}
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(20)")
    begin = time.monotonic()
    with hosts.Hosts(2) as made, pytest.raises(RuntimeError, match="did not end"):
        made.run([str(slow)], timeout=4)
    assert time.monotonic() - begin < 60
    names |= {made.namespace(host) for host in range(2)}
    assert len(names) == 4
    assert not names & namespaces()
    with pytest.raises(ValueError, match=f"2 to {hosts.MAX_HOSTS} hosts"):
        hosts.Hosts(1)


def test_killed_host() -> None:
    """A rank whose peer's host is gone raises within its timeout."""
    program = Path(SCRIPT).with_name("lost_host.py")
    with hosts.Hosts(2) as made:
        command = [sys.executable, str(program), made.address(0)]
        ranks = [made.start(host, [*command, str(host)]) for host in range(2)]
        output = ranks[0].communicate(timeout=60)[0]
        assert "raised DistBackendError" in output, output
