"""Prints what torchrun promises its ranks, then ends as its argument says."""

import json
import os
import sys

NAMES = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE OMP_NUM_THREADS"
).split()
print("env " + json.dumps({name: os.environ.get(name) for name in NAMES}), flush=True)
print("argv " + json.dumps(sys.argv[1:]), "python", sys.version_info[:2], __name__, flush=True)
if len(sys.argv) > 1 and os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("the reader's own mistake")
    sys.exit(int(sys.argv[1]))
