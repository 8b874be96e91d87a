"""Runs the program on mutants of every text that it reads; prints a Markdown table of exit codes by kind of text.

python docs/benchmarks/fuzz_texts.py WORKDIR [--cases N] [--seed S] [--from N]

Exit code 1, a traceback or a verdict that takes more than 20 s is a fault: it is printed with its case, which
`--from NUMBER --cases 1` runs again, and the script ends with 1.
"""

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "cli"), str(TESTS / "hub")]

from fuzzed_texts import TextFuzzer  # noqa: E402 - it lies beside the tests


def main() -> int:
    """Run the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="first", type=int, default=0)
    asked = parser.parse_args()
    fuzzer = TextFuzzer(asked.workdir)
    counts: dict[str, Counter[int | None]] = defaultdict(Counter)
    slowest: dict[str, float] = defaultdict(float)
    faults = 0
    for number in range(asked.first, asked.first + asked.cases):
        case = fuzzer.case(asked.seed, number)
        found = fuzzer.outcome(case)
        counts[case.kind][found.code] += 1
        slowest[case.kind] = max(slowest[case.kind], found.seconds)
        if number % 1000 == 0:
            print(f"{number:,} cases", file=sys.stderr, flush=True)
        if found.wrong:
            faults += 1
            print(f"case {number}: {found.wrong}: {' '.join(case.args)!a}\n{found.err[-6000:]}", file=sys.stderr)
    fuzzer.close()
    codes = sorted({code for each in counts.values() for code in each}, key=str)
    print(f"| text | cases | {' | '.join(f'exit {code}' for code in codes)} | slowest |")
    print("|---" * (len(codes) + 3) + "|")
    for kind, each in counts.items():
        row = " | ".join(f"{each[code]:,}" for code in codes)
        print(f"| {kind} | {each.total():,} | {row} | {slowest[kind]:.1f} s |")
    print(f"\n{asked.cases:,} cases, {asked.cases - faults:,} as they should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
