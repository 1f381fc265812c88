"""`python -m tests.random_programs [--seeds 0-19] [--count 100]`: by default 2,000 programs."""

from __future__ import annotations

import argparse
import textwrap

from tests.random_programs.check import Tally, run_seed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.random_programs", description=__doc__)
    parser.add_argument("--seeds", default="0-19", help="first-last, both included")
    parser.add_argument("--count", type=int, default=100, help="programs of each seed")
    parser.add_argument("--shrink", action="store_true", help="make a program that departs small (minutes)")
    parser.add_argument("--verbose", action="store_true", help="show a program for each kind of refusal")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    tally, failed = Tally(), []
    for seed in range(int(first), int(last or first) + 1):
        try:
            run_seed(seed, arguments.count, tally, arguments.shrink)
        except Exception as error:
            failed.append(seed)
            print(
                f"seed {seed}: {type(error).__name__}: {error}", *getattr(error, "__notes__", []), sep="\n", flush=True
            )
    print(f"{tally.total} programs: {tally.equal} equal to one device, {tally.refused.total()} refused")
    for reason, times in tally.refused.most_common():
        print(f"  {times} x {reason}")
        if arguments.verbose:
            print(textwrap.indent(tally.examples[reason], "      "))
    print("operators:", ", ".join(f"{name} {times}" for name, times in sorted(tally.operators.items())))
    if failed:
        raise SystemExit(f"programs of seeds {failed} depart")


if __name__ == "__main__":
    main()
