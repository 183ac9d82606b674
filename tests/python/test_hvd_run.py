"""fusedpg-run: flags, hosts, output, exit status, and that no process is left."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts as namespaces
from fusedpg.hvd.run import hosts, options
from fusedpg.hvd.run.driver import Driver
from fusedpg.hvd.run.host import AGENT

JOB = [sys.executable, "-m", "fusedpg.hvd.run"]
SECONDS = 120  # a deadline for jobs that hang, on a machine that does other things


def start(*arguments: str, env: dict[str, str] | None = None, **more: object) -> subprocess.Popen:
    return subprocess.Popen(
        [*JOB, *arguments],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
        **more,  # type: ignore[call-overload]
    )


def finish(job: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"the job does not end: {job.communicate()}") from None
    return job.returncode, out, err


def launch(*arguments: str, **more: object) -> tuple[int, str, str]:
    return finish(start(*arguments, **more))  # type: ignore[arg-type]


def alive(marker: str) -> list[str]:
    """Command lines of processes that have a marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
                continue
            if marker.encode() in folder.joinpath("environ").read_bytes():
                found.append(folder.joinpath("cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def expect_none_left(marker: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while left := alive(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.fixture
def marker(request: pytest.FixtureRequest) -> Iterator[str]:
    """The value of a variable that all processes of a job inherit; none is left at the end."""
    value = f"{request.node.name}-{os.getpid()}"
    yield value
    expect_none_left(value)


# --- flags, environment, configuration file


def parse(*arguments: str, environ: dict[str, str] | None = None) -> options.Settings:
    settings = options.parse([*arguments, "true"], environ or {})
    assert settings is not None
    return settings


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(
        "params:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 7.5\n  cache_capacity: 9\n"
        "stall_check:\n  enabled: false\n"
    )
    environ = {"HOROVOD_FUSION_THRESHOLD": "5", "HOROVOD_CYCLE_TIME": "5"}
    flags = ["-np", "2", "--config-file", str(config), "--cycle-time-ms", "3"]
    assert parse(*flags, environ=environ).variables == {
        "HOROVOD_CYCLE_TIME": "3.0",  # the flag; the threshold stays the environment's
        "HOROVOD_CACHE_CAPACITY": "9",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
    }
    assert parse(*flags).variables["HOROVOD_FUSION_THRESHOLD"] == str(32 << 20)


@pytest.mark.parametrize("tunable", options.TUNABLES, ids=lambda tunable: tunable.name)
def test_each_tunable_parameter(tunable: options.Tunable, tmp_path: Path) -> None:
    """By its flag and by its key in the file the variable becomes the same."""
    value = {"logging.level": "debug", "autotune.gaussian_process_noise": "0.25"}.get(
        tunable.key, "3"
    )
    if tunable.switch:
        flags, text = [tunable.flag], str(not tunable.inverted).lower()
    else:
        flags, text = [tunable.flag, value], value
    by_flag = parse("-np", "1", *flags).variables
    section, _, name = (tunable.key or tunable.inverted).partition(".")
    config = tmp_path / "job.yaml"
    config.write_text(f"{section}:\n  {name}: {text}\n")
    assert by_flag == parse("-np", "1", "--config-file", str(config)).variables
    assert list(by_flag) == [tunable.variable]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "-np is missing"),
        ("-np 0", "-np must be >= 1"),
        ("-np 2 -H a:2 --hostfile b", "not allowed with"),
        ("-np 2 --min-np 3", "does not hold"),
        ("-np 2 --min-np 1 --max-np 1", "does not hold"),
        ("-np 2 --max-np 3", "needs --min-np"),
        ("-np 2 --cycle-time-ms -1", "--cycle-time-ms: must be >= 0"),
        ("-np 2 --autotune-gaussian-process-noise 2", "from 0 to 1"),
        ("-np 2 --log-level loud", "must be one of"),
        ("-np 2 -H a:0", "name:slots"),
        ("-np 2 -H a:1,a:1", "appears twice"),
        ("-np 2 --fusion-threshold 3", "unrecognized|fusion-threshold"),
        ("-np 2 --hostfile /nowhere", "No such file"),
    ],
)
def test_wrong_flags_end_with_usage(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse([*arguments.split(), "true"], {})
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")), error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params:\n  fusion_treshold_mb: 3\n", "unknown keys: params.fusion_treshold_mb"),
        ("verbose: true\n", "unknown keys: verbose"),
        ("params:\n  cycle_time_ms: fast\n", "params.cycle_time_ms"),
        ("- a list\n", "expected sections"),
        ("a: {b\n", "job.yaml"),
    ],
)
def test_wrong_configuration_files(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit):
        options.parse(["-np", "1", "--config-file", str(config), "true"], {})
    assert message in capsys.readouterr().err


def test_flags_without_a_meaning_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    parse("-np", "1", "--gloo", "--mpi-args=--map-by socket", "--hierarchical-allreduce")
    lines = capsys.readouterr().err.splitlines()
    names = ("--gloo", "--mpi-args", "--hierarchical-allreduce")
    assert lines == [f"fusedpg-run: {name} has no meaning here" for name in names]


def test_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two\na slots=4\n\nb  # one\n")
    assert hosts.parse_hostfile(file) == {"a": 4, "b": 1}
    file.write_text("a 4\n")
    with pytest.raises(ValueError, match=":1: expected"):
        hosts.parse_hostfile(file)


def test_local_names() -> None:
    assert all(map(hosts.is_local, ["localhost", "127.0.0.1", socket.gethostname()]))
    assert not hosts.is_local("10.254.254.254")
    assert not hosts.is_local("no-such-host.invalid")


# --- fixed jobs


@pytest.mark.long
def test_ranks_output_and_files(tmp_path: Path, marker: str) -> None:
    script = 'echo "$RANK/$WORLD_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_CYCLE_TIME"; echo oh >&2'
    code, out, err = launch(
        *("-np", "3", "--cycle-time-ms", "2.5", "--output-filename", str(tmp_path / "out")),
        *("sh", "-c", script),
        env={"MARKER": marker, "RANK": "9"},
    )
    assert code == 0, err
    lines = [f"[{rank}]<stdout>:{rank}/3 {rank} 2.5" for rank in range(3)]
    assert sorted(out.splitlines()) == lines
    assert sorted(err.splitlines()) == [f"[{rank}]<stderr>:oh" for rank in range(3)]
    for rank in range(3):
        folder = tmp_path / "out" / f"rank.{rank}"
        assert folder.joinpath("stdout").read_text() == f"{rank}/3 {rank} 2.5\n"
        assert folder.joinpath("stderr").read_text() == "oh\n"


UNEDITED = """
import subprocess, sys
import horovod.torch as hvd
import torch
hvd.init()
if sys.argv[1:] == ["x"]:
    child = subprocess.run([sys.executable, "-c", "import horovod.torch as t; print(t.__name__)"],
                           capture_output=True, text=True, check=True)
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    print(f"{total} {__name__} {child.stdout}")  # in one piece: another rank writes there, too
"""


@pytest.mark.parametrize("how", ["fusedpg-run", "fusedpg-run, its name alone", "torchrun", "-m"])
def test_programs_that_import_horovod(how: str, tmp_path: Path) -> None:
    """They are not edited, and neither are those that they start."""
    script = tmp_path / "unedited.py"
    script.write_text(UNEDITED)
    python = [sys.executable] * ("alone" not in how)
    served = ["-np", "2", "--serve-horovod", *python, str(script), "x"]
    command = [*JOB, *served] if how.startswith("fusedpg-run") else []
    if not command:
        module = how == "-m"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = ["-m", script.stem] if module else [str(script)]
        command = [sys.executable, *torchrun, "-m", "fusedpg.hvd", *program, "x"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2.0 __main__ fusedpg.hvd") == 2


@pytest.mark.long
def test_output_keeps_every_byte(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, long lines, carriage returns, a last line without an end."""
    body = bytes(range(256)) + b"x" * 200_000 + b"\r50%\r100%\nend"
    file = tmp_path / "body"
    file.write_bytes(body)
    arguments = ["-np", "1", "--output-filename", str(tmp_path / "out"), "cat", str(file)]
    code, _, err = launch(*arguments)
    assert code == 0, err
    assert (tmp_path / "out/rank.0/stdout").read_bytes() == body


@pytest.mark.long
def test_timestamps() -> None:
    _, out, _ = launch("-np", "1", "--prefix-output-with-timestamp", "echo", "x")
    stamp, _, rest = out.partition("[0]")
    assert rest == "<stdout>:x\n"
    assert time.time() - time.mktime(time.strptime(stamp, "%a %b %d %H:%M:%S %Y")) < 100


@pytest.mark.parametrize(
    ("how", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("exec /no/such/program", 127)]
)
def test_a_rank_that_fails_ends_the_others(how: str, code: int, marker: str) -> None:
    """Also one that ignores SIGTERM and has a child."""
    others = "trap '' TERM; sleep 1000 & sleep 1000; sleep 1000"
    script = f'if [ "$RANK" = 1 ]; then sleep 0.3; {how}; else {others}; fi'
    got, _, err = launch("-np", "3", "sh", "-c", script, env={"MARKER": marker})
    assert got == code, err
    assert "fusedpg-run: worker 1 (rank 1) on localhost" in err


def test_a_program_that_does_not_exist() -> None:
    code, _, err = launch("-np", "2", "/no/such/program")
    assert code == 127
    assert "cannot start /no/such/program" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_signals_end_everything(number: signal.Signals, code: int, marker: str) -> None:
    script = "echo ready; sleep 100 & trap '' TERM; while :; do sleep 1; done"
    job = start("-np", "2", "sh", "-c", script, env={"MARKER": marker})
    assert job.stdout is not None
    for _ in range(2):
        assert "ready" in job.stdout.readline()
    job.send_signal(number)
    assert finish(job)[0] == code
    expect_none_left(marker)


def test_an_agent_that_is_killed_takes_its_workers_along(marker: str) -> None:
    job = start("-np", "2", "sh", "-c", "echo ready; exec sleep 100", env={"MARKER": marker})
    assert job.stdout is not None
    for _ in range(2):
        job.stdout.readline()
    tasks = Path(f"/proc/{job.pid}/task").glob("*/children")  # other processes come and go
    agents = [int(pid) for children in tasks for pid in children.read_text().split()]
    assert len(agents) == 1
    os.kill(agents[0], signal.SIGKILL)
    code, _, err = finish(job)
    assert code == 1
    assert "host localhost: its agent has ended" in err
    expect_none_left(marker)


def test_output_that_nobody_reads_ends_the_job(marker: str) -> None:
    job = start("-np", "1", "sh", "-c", "yes", env={"MARKER": marker})
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(SECONDS) == 141
    assert job.stderr is not None
    job.stderr.close()


@pytest.mark.long
def test_more_ranks_than_slots() -> None:
    code, _, err = launch("-np", "3", "-H", "localhost:2", "true")
    assert code == 2
    assert "the hosts have 2 slots" in err


@pytest.mark.long
def test_check_build() -> None:
    pytest.importorskip("fusedpg.hvd._basics")
    code, out, _ = launch("--check-build")
    assert code == 0
    assert "[X] PyTorch" in out
    assert "[ ] MPI" in out


# --- what the launcher needs of torch

LAUNCHER = """
import sys
from fusedpg.hvd.run import store
from fusedpg.hvd.run.__main__ import main
store.SERVE_AFTER_SECONDS = float(sys.argv[1])
code = main(sys.argv[2:])
sys.exit(code or 10 + ("torch" in sys.modules))
"""


@pytest.mark.parametrize("elastic", [(), ("--min-np", "2")], ids=["fixed", "elastic"])
def test_a_launcher_whose_workers_end_soon_does_not_import_torch(elastic: tuple[str, ...]) -> None:
    job = [sys.executable, "-c", LAUNCHER, "1e9", "-np", "2", *elastic, "true"]
    done = subprocess.run(job, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 10, done.stderr


@pytest.mark.parametrize("serve_after", ["0", "6"])  # seconds: before workers have torch, and after
def test_workers_may_ask_before_the_launcher_has_torch(serve_after: str) -> None:
    """The port is theirs from the start; what they ask is answered when torch is there."""
    program = (
        "import torch.distributed as dist; dist.init_process_group('fused'); dist.barrier(); "
        "print('met', dist.get_rank())"
    )
    job = [sys.executable, "-c", LAUNCHER, serve_after, "-np", "2", sys.executable, "-c", program]
    done = subprocess.run(job, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 11, done.stderr
    assert {"[0]<stdout>:met 0", "[1]<stdout>:met 1"} <= set(done.stdout.splitlines()), done.stdout


# --- several hosts


def fake_ssh(folder: Path, body: str) -> dict[str, str]:
    """An environment in which `ssh` is a program of ours; see `ssh_log` for its arguments."""
    program = folder / "ssh"
    log = shlex.quote(str(folder / "ssh.log"))  # one of each call: a shell writes line by line
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >> {log}.$$\n{body}')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def ssh_log(folder: Path) -> str:
    """The arguments of all calls of `ssh`, a line each."""
    return "".join(log.read_text() for log in folder.glob("ssh.log.*"))


# As sshd does: a login shell runs the last argument, in the home directory.
RUN = 'echo "Welcome to $HOSTNAME"; cd /; exec bash -c "${@: -1}"\n'
# Addresses that no machine has (RFC 5737), so that `ssh` is asked.
FAR, FARTHER = "198.51.100.1", "198.51.100.2"


def test_ssh(tmp_path: Path, marker: str) -> None:
    """Port, key, quoting of the directory and of arguments, and what is not carried over."""
    folder = tmp_path / "a 'folder' $HOME"
    folder.mkdir()
    env = fake_ssh(tmp_path, f"export HOME=/far FUSEDPG_HOST_ID=far\n{RUN}")
    script = (
        'echo "$RANK $HOROVOD_CROSS_RANK $HOROVOD_HOSTNAME $PWD $HOME $FUSEDPG_HOST_ID $OWN $1"'
    )
    argument = 'it\'s "quoted" * $HOME'
    code, out, err = launch(
        *("-np", "3", "-H", f"{FAR}:2,{FARTHER}:2", "-p", "2222", "-i", "my key"),
        *("sh", "-c", script, "sh", argument),
        env={**env, "MARKER": marker, "OWN": "a\n b", "FUSEDPG_HOST_ID": "near"},
        cwd=folder,
    )
    assert code == 0, err
    text = {
        (rank, host): f"{rank} {host} {name} {folder} /far far a"
        for rank, host, name in [(0, 0, FAR), (1, 0, FAR), (2, 1, FARTHER)]
    }
    lines = out.splitlines()
    for (rank, _), first in text.items():
        assert f"[{rank}]<stdout>:{first}" in lines
        assert f"[{rank}]<stdout>: b {argument}" in lines
    log = ssh_log(tmp_path)
    for name in (FAR, FARTHER):
        assert f"-o\nBatchMode=yes\n-p\n2222\n-i\nmy key\n{name}\n" in log


@pytest.mark.long
def test_a_host_that_ssh_cannot_reach(tmp_path: Path, marker: str) -> None:
    env = fake_ssh(tmp_path, "echo 'Connection refused' >&2; exit 255\n")
    flags = ["-np", "2", "-H", f"localhost:1,{FAR}:1", "sleep", "100"]
    code, _, err = launch(*flags, env={**env, "MARKER": marker})
    assert code == 1
    assert "Connection refused" in err
    assert f"host {FAR}: its agent has ended" in err


@pytest.mark.long
def test_a_host_that_says_nothing(tmp_path: Path, marker: str) -> None:
    env = fake_ssh(tmp_path, "exec sleep 100\n")
    flags = ["-np", "1", "-H", f"{FAR}:1", "--start-timeout", "1", "true"]
    code, _, err = launch(*flags, env={**env, "MARKER": marker})
    assert code == 1
    assert f"host {FAR}: no answer within 1 s" in err


def test_a_lost_connection_ends_the_far_workers(tmp_path: Path, marker: str) -> None:
    """The agent ends its workers when its input ends, whoever is killed."""
    pids = shlex.quote(str(tmp_path / "pids"))
    # As with a real ssh, the process that is killed here is not the agent's parent.
    body = f"echo $$ >> {pids}\nmkfifo {pids}.in\n"
    body += f'(cd /; setsid bash -c "${{@: -1}}" < {pids}.in) &\n'
    env = fake_ssh(tmp_path, body + f"exec cat > {pids}.in\n")
    flags = ["-np", "1", "-H", f"{FAR}:1", "sh", "-c", "echo ready; exec sleep 100"]
    job = start(*flags, env={**env, "MARKER": marker})
    assert job.stdout is not None
    assert "ready" in job.stdout.readline()
    os.kill(int((tmp_path / "pids").read_text()), signal.SIGKILL)
    assert finish(job)[0] == 128 + signal.SIGTERM  # the agent's last words still arrive
    expect_none_left(marker)


@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
def test_hosts_with_networks_of_their_own(tmp_path: Path) -> None:
    """An all_reduce of two ranks on each of two hosts."""
    program = tmp_path / "sum.py"
    program.write_text(
        "import torch, torch.distributed as dist, fusedpg\n"
        "dist.init_process_group('fused')\n"
        "x = torch.full((100,), float(dist.get_rank() + 1))\n"
        "dist.all_reduce(x)\n"
        "print(x.unique().tolist(), fusedpg.group_info()['engine'])\n"
        "dist.destroy_process_group()\n"
    )
    with namespaces.Hosts(2) as machines:
        body = f"export FUSEDPG_HOST_ID=far\nexec ip netns exec {machines.namespace(1)} bash -c "
        env = fake_ssh(tmp_path, body + '"${@: -1}"\n')
        where = f"{machines.address(0)}:2,{machines.address(1)}:2"
        command = [*JOB, "-np", "4", "-H", where, "--network-interfaces", "eth0"]
        job = machines.start(
            0, [*command, sys.executable, str(program)], env, stderr=subprocess.PIPE
        )
        out, err = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:[10.0] tcp" for rank in range(4)]


# --- from Python


def _place_and(value: str) -> tuple[str, str, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], value


def test_run_a_function(marker: str) -> None:
    settings_env = {**os.environ, "MARKER": marker, "PYTHONPATH": str(Path(__file__).parent)}
    from fusedpg.hvd.run import run

    results = run(_place_and, ("x" * 300_000,), np=2, env=settings_env)
    assert results == [("0", "2", "x" * 300_000), ("1", "2", "x" * 300_000)]


@pytest.mark.long
def test_run_a_function_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    from fusedpg.hvd.run import run

    with pytest.raises(RuntimeError, match=r"worker . .*ended: 1"):
        run(divmod, (1, 0), num_proc=2)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_command_is_installed() -> None:
    """The command that pyproject.toml names is there."""
    text = Path(__file__).resolve().parents[2].joinpath("pyproject.toml").read_text()
    module, name = re.findall(r'^fusedpg-run = "(.+):(.+)"', text, re.MULTILINE)[0]
    assert callable(getattr(importlib.import_module(module), name))


def test_the_agent_needs_only_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(AGENT)], input=b"", capture_output=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b'{"hello":')


def test_environment_of_a_launcher_around_it_is_not_passed_on() -> None:
    settings = options.Settings(1, ["true"])
    driver = Driver(settings, {"RANK": "3", "HOROVOD_ELASTIC": "1", "HOROVOD_CYCLE_TIME": "2"})
    assert driver._environ == {"HOROVOD_CYCLE_TIME": "2"}
