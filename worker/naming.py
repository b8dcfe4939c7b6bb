"""What a run is called, and how many nodes its command line asks for: the same on every node.

Owns the rules that `holdfast run` and its launcher share; both are read before anything starts.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from typing import Mapping, Optional

WRONG = re.compile(r"[^A-Za-z0-9._-]+")
NNODES = re.compile(r"([0-9]{1,5})(?::([0-9]{1,5}))?")
LIMIT = 48  # characters of a name; it becomes part of a unix socket's path (108 in all)
DIGEST = 8  # hex digits at the end of a name that was cut
STATIC_PORT = 29500  # torchrun's, where --master-port names none
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
    clean = WRONG.sub("-", name).strip("-.")
    if not clean:
        raise ValueError("--run %r: letters, digits, '.', '_' and '-'" % name)
    return clean if len(clean) <= LIMIT else cut(clean)


def cut(name: str) -> str:
    """A name of LIMIT characters that ends with a digest of the whole, so that two long ones with
    one beginning stay two, on every node alike."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:DIGEST]
    return "%s-%s" % (name[:LIMIT - DIGEST - 1], digest)


def meeting_place(rdzv_endpoint: str, master_addr: str, master_port: int) -> str:
    """What the caller named to all nodes, for the run's name: --rdzv-endpoint as it is, else
    --master-addr with a --master-port that is not torchrun's own, by which two static jobs on one
    node are told apart."""
    if rdzv_endpoint or not master_addr or master_port in (0, STATIC_PORT):
        return rdzv_endpoint or master_addr
    return "%s:%d" % (master_addr, master_port)
