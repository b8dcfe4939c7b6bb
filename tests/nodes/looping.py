"""A script of a test: says its environment once, then lives until it is told to end."""

import json
import os
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
         "MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_RESTART_COUNT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
said = {name: os.environ.get(name) for name in names}
draft = folder / f"{rank}.draft"
draft.write_text(json.dumps({**said, "pid": os.getpid()}))
draft.rename(folder / f"{rank}.json")
while not (folder / "end").exists():
    time.sleep(0.05)
