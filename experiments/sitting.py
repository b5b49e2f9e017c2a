"""Everything that has no result yet, in one queue for one machine: for a GPU that is lent for a while.

python experiments/sitting.py --heavy 2 --light 2 --stop 570
"""

from __future__ import annotations

import argparse

import audits
import captions
import rivals
import table1
from runner import Job, add_options, run_all


def queue() -> list[Job]:
    """The paper's tables, first what each lacks most."""
    rows = [*table1.TABLE[::-1], *list(table1.ROWS)[len(table1.TABLE) :]]
    ours = [(space, row, e) for row in rows for space, figures in table1.PAPER.items() for e in figures.get(row, ())]
    prior = [rivals.job(method, e, 0) for method, figures in rivals.PAPER.items() for e in figures]
    seeds = [rivals.job("dp-merf", e, seed) for seed in (1, 2) for e in rivals.PAPER["dp-merf"]]
    return [*(table1.job(*one) for one in ours), *prior, *seeds, *audits.mnist(), *captions.jobs()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    run_all(queue(), parser.parse_args())


if __name__ == "__main__":
    main()
