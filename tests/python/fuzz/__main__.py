"""`make fuzz`: random programs of all subjects for MINUTES, or of one, or a seed's again."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

import harness
from fuzz import core


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--subject", choices=core.SUBJECTS, help="default: all in turn")
    parser.add_argument("--where", help="on which ranks; default: all of the subject's in turn")
    parser.add_argument("--seed", type=int, help="this one's programs alone")
    options = parser.parse_args()
    names = [options.subject] if options.subject else list(core.SUBJECTS)
    places = {
        name: [options.where] if options.where else core.subject(name).WHERE for name in names
    }
    turns = itertools.zip_longest(*([(name, where) for where in places[name]] for name in names))
    cases = [case for turn in turns for case in turn if case is not None]
    begin = options.seed if options.seed is not None else int(time.time())
    seconds = round(60 * options.minutes)
    until, found, seen = time.monotonic() + seconds, 0, 0
    print(f"seeds from {begin}")
    with tqdm(total=seconds, unit="s") as bar:
        for number, (name, where) in enumerate(itertools.cycle(cases)):
            over = time.monotonic() > until if options.seed is None else number == len(cases)
            if over:
                break
            try:
                seen += core.search(name, where, begin + number // len(cases), shrink=True)
            except core.Failure as error:
                found += 1
                bar.write(f"=== {error}")
            bar.update(min(seconds, round(seconds - until + time.monotonic())) - bar.n)
            bar.set_postfix_str(f"{seen} seen, {found} bad")
    harness.close_pools()
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
