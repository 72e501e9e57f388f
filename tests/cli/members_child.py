"""A run of processes, for the tests that send it signals: each member is `python -c PROGRAM`.

usage: members_child.py COUNT PROGRAM
"""

from __future__ import annotations

import sys

from penstock.supervisor.processes import Processes

sys.exit(Processes([sys.executable, "-c", sys.argv[2]], int(sys.argv[1])).run())
