import sys

from cluster.json_output import run
from ops.chaos.processes.cli import main

raise SystemExit(run(main, sys.argv[1:]))
