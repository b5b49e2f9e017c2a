import os
import sys

from straightdp.cli import main

code = main()
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    # Of a team: all is written and synced. gloo's threads may abort an interpreter that is taken down (seen with torch
    # 2.13), and torchrun would end the other processes for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
raise SystemExit(code)
