"""`make fuzz`: random programs and chaos for MINUTES, or one of them again."""

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
from fuzz import chaos, operations
from fuzz.programs import draw_program
from fuzz.rounds import draw_round


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, help="replay this program, or this round")
    parser.add_argument("--world", type=int, help="ranks of a program (default: 1 to 4 in turn)")
    parser.add_argument("--arm", choices=operations.ARMS, help="of programs")
    parser.add_argument("--round", type=int, help="of chaos, with --seed")
    parser.add_argument("--scenario", help="of chaos")
    parser.add_argument("--only", choices=["programs", "chaos"])
    return parser.parse_args()


def replay(options: argparse.Namespace) -> None:
    if options.round is not None:
        one = draw_round(options.seed, options.round, options.scenario or None)
        print(one)
        with chaos.Crew() as crew:
            # A process's first round has nothing to compare its leaks with.
            crew.play(draw_round(options.seed, options.round, "fork"))
            crew.play(one)
        return
    arm, world = options.arm or "one host", options.world or 3
    program = draw_program(
        options.seed, world, hosts=operations.between_hosts(arm), steps=operations.STEPS
    )
    for index, group in enumerate(program.groups):
        print(f"group {index}: {group}")
    for lane, steps in enumerate(program.lanes):
        print(f"lane {lane}:", *steps, sep="\n  ")
    operations.run_one(options.seed, world, arm, operations.Tally())


def search(options: argparse.Namespace) -> int:
    """Until the time is over; prints what it finds and goes on."""
    first = int(time.time())
    print(f"seeds from {first}")
    until = time.monotonic() + 60 * options.minutes
    programs, found = operations.Tally(), 0
    worlds = [options.world] if options.world else [2, 3, 4, 2, 3, 1]
    arms = [options.arm] if options.arm else ["one host", "one host", "one host", "hosts", "hosts"]
    with chaos.Crew() as crew, tqdm(total=round(60 * options.minutes), unit="s") as bar:
        for turn in itertools.count():
            if time.monotonic() > until:
                break
            try:
                if options.only != "chaos":
                    arm = arms[turn % len(arms)]
                    world = worlds[turn % len(worlds)]
                    # A group of one rank has no hosts to span.
                    operations.run_one(
                        first + turn, max(world, 1 + operations.between_hosts(arm)), arm, programs
                    )
                for number in range(5 * (options.only != "programs")):
                    one = draw_round(first, 5 * turn + number, options.scenario or None)
                    crew.play(one)
            except (chaos.Failure, operations.Failure) as error:
                found += 1
                bar.write(f"=== {error}")
            bar.update(
                min(bar.total, round(60 * options.minutes - until + time.monotonic())) - bar.n
            )
            bar.set_postfix_str(f"{programs.calls} calls, {crew.tally.rounds} rounds, {found} bad")
        print(f"{programs.programs} programs of {programs.calls} calls\n{crew.tally}")
    harness.close_pools()
    return found


def main() -> int:
    options = arguments()
    if options.seed is not None:
        replay(options)
        harness.close_pools()
        return 0
    return min(search(options), 1)


if __name__ == "__main__":
    sys.exit(main())
