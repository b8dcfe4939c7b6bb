"""What a run is called, and how many nodes its command line asks for: the same on every node.

Owns the rules that `holdfast run` and its launcher share; both are read before anything starts.
"""

from __future__ import annotations

import os
import re
import time
from typing import Mapping, Optional

WRONG = re.compile(r"[^A-Za-z0-9._-]+")
NNODES = re.compile(r"([0-9]{1,5})(?::([0-9]{1,5}))?")
LIMIT = 48  # characters of a name; it becomes part of a unix socket's path (108 in all)
JOBS = ("SLURM_JOB_ID", "AWS_BATCH_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def run_name(
    given: str, rdzv_id: str, target: str, environ: Mapping[str, str],
    rendezvous: Optional[str] = None,
) -> str:
    """--run, else --rdzv-id, else the scheduler's job id, else script and start time.

    With a `rendezvous` (of a run over nodes; "" = none was named) all nodes must come to one name:
    script and rendezvous take the place of the time.  Raises ValueError that says what to give.
    """
    job = next((environ[name] for name in JOBS if environ.get(name)), "")
    stem = os.path.splitext(os.path.basename(target.rstrip("/")))[0]
    name = given or (rdzv_id if rdzv_id != "none" else "") or job
    if not name and rendezvous == "":
        raise ValueError(
            "a run over nodes needs one name on all of them: give --run NAME or --rdzv-id NAME")
    name = name or "%s-%s" % (stem, rendezvous or time.strftime("%Y%m%d-%H%M%S"))
    clean = WRONG.sub("-", name).strip("-.")[:LIMIT]
    if not clean:
        raise ValueError("--run %r: letters, digits, '.', '_' and '-'" % name)
    return clean
