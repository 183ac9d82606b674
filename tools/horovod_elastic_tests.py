"""Run Horovod's own tests of elastic jobs of torch on fusedpg-run.

    git clone https://github.com/horovod/horovod
    python tools/horovod_elastic_tests.py horovod

The tests (test/integration/test_elastic_torch.py) and the program that they start are those of the
checkout. They call horovodrun's functions; here those start fusedpg-run's driver, and its errors
get Horovod's words. fusedpg-run tells ranks of a new host when a rank on it is ready, so what the
program asks for messages waits for that. One test is left out: where a rank failed, Horovod gives
up all slots of its host, and fusedpg-run that rank's (resurrecting_blacklisted_hosts). Its authors
skip four others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from horovod_tests import SERVED, folder

LAUNCH = """
import os
import sys

from fusedpg.hvd.run import options
from fusedpg.hvd.run.driver import Driver, JobFailed
from horovod.runner.elastic import constants


def parse_args():
    return options.parse(sys.argv[1:], os.environ)


def _run_elastic(settings):
    try:
        Driver(settings, os.environ).run()
    except JobFailed as error:
        text = "Horovod detected that one or more processes exited with non-zero status"
        if "reset-limit" in str(error):
            text = constants.RESET_LIMIT_EXCEEDED_MESSAGE.format(settings.reset_limit)
        raise RuntimeError(f"{text}: {error}") from error
"""
MESSAGES = """
import time

from fusedpg.hvd import _membership


class _Messages:
    def empty(self):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if any(_membership.current().changes()):
                return False
            time.sleep(0.1)
        return True


elastic.TorchState._host_messages = _Messages()
"""
PROCESS = """
import os
import signal


class Process:
    def __init__(self, pid):
        self.pid = pid

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
"""
LEFT_OUT = "not resurrecting_blacklisted_hosts"
LIMIT = 900.0
"""Seconds after which the tests are killed."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of Horovod")
    parser.add_argument("--backend", default="fused")
    parser.add_argument("-k", default=LEFT_OUT, help="which tests, as for pytest")
    args = parser.parse_args()
    constants = "horovod/runner/elastic/constants.py"
    switches = "DISCOVER_HOSTS_FREQUENCY_SECS = ELASTIC_TIMEOUT_SECS = 0"
    more = {
        "horovod/torch/__init__.py": SERVED + MESSAGES,
        "horovod/runner/launch.py": LAUNCH,
        constants: (args.checkout / constants).read_text(),
        "psutil.py": PROCESS,
        # What the tests replace or call, and what means nothing here.
        "horovod/runner/elastic/__init__.py": "",
        "horovod/runner/elastic/driver.py": switches,
        "horovod/runner/gloo_run.py": "def _get_min_start_hosts(settings): return 1\n",
        "horovod/runner/common/__init__.py": "",
        "horovod/runner/common/util/__init__.py": "",
        "horovod/runner/common/util/config_parser.py": "def set_env_from_args(env, args): pass\n",
    }
    tests = args.checkout.resolve() / "test/integration/test_elastic_torch.py"
    with tempfile.TemporaryDirectory() as root:
        folder(args.checkout, Path(root), more)
        paths = [root, str(Path(__file__).resolve().parents[1]), str(tests.parents[1] / "utils")]
        paths.append(os.environ.get("PYTHONPATH", ""))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "FUSEDPG_HVD_BACKEND": args.backend,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", root, "-rs"]
        command += ["-p", "no:cacheprovider", "--timeout", "240", str(tests), "-k", args.k]
        return subprocess.run(command, env=env, cwd=root, timeout=LIMIT).returncode


if __name__ == "__main__":
    sys.exit(main())
