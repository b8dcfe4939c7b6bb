"""What test_ray_data.py runs in a Python with ray: a head of Ray, children that read from it, and a
JSON line of what was seen.

The datasets are a user's, named as `on_ray:rows` and run by Ray's own workers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

ROWS, BLOCKS = 200, 8
COLUMNS = ("number", "x", "y")


def arrays():
    draw = np.random.RandomState(5)
    x = draw.randn(ROWS, 8).astype(np.float32)
    return {"number": np.arange(ROWS), "x": x, "y": x.sum(1, keepdims=True)}


# ----------------------------------------------------------------------- a user's datasets


def rows(options):
    """The same as `arrays`; its first blocks are ready last, and a worker dies on its way."""
    import ray

    folder = Path(options["folder"])

    def fill(batch):
        with open(folder / "made", "a") as file:
            file.write(f"{batch['id'][0]}\n")
        if batch["id"][0] and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05 * (BLOCKS - batch["id"][0] * BLOCKS // ROWS))
        whole = arrays()
        return {name: whole[name][batch["id"]] for name in COLUMNS}

    return ray.data.range(ROWS, override_num_blocks=BLOCKS).map_batches(fill, batch_size=None)


def dying(options):
    """A worker that dies at every try."""
    import ray

    def fill(batch):
        os.kill(os.getpid(), signal.SIGKILL)

    return ray.data.range(ROWS, override_num_blocks=1).map_batches(fill, batch_size=None)


def changing(options):
    """Other rows each time."""
    import ray

    return ray.data.range(ROWS).map_batches(
        lambda batch: {"number": batch["id"] + time.time_ns() % 100_000}, batch_size=None)


def raising(options):
    import ray

    def fill(batch):
        raise ValueError("row 7 has no label")

    return ray.data.range(ROWS, override_num_blocks=1).map_batches(fill)


# ----------------------------------------------------------------------- what is seen


def feed(name, folder, **more):
    from holdfast.trainer.feed.ray_data import RayData

    return RayData({"dataset": f"on_ray:{name}", "options": {"folder": str(folder)}, "rows": 48,
                    "address": os.environ["RAY_HEAD"], **more}, folder)


def said(what):
    from holdfast.trainer.config import ConfigError

    try:
        return what()
    except ConfigError as error:
        return str(error)


def end_holders():
    """Kills the actors that have rows: Ray's workers are below its head, which is ours."""
    import psutil

    for one in psutil.Process().children(recursive=True):
        if "ray::Holder" in " ".join(one.cmdline()):
            one.kill()


def order(folder):
    """Two ranks, one dataset: what each reads, how often it was made, and again when it is lost."""
    first, second = feed("rows", folder), feed("rows", folder)
    wanted = random.Random(0).sample(range(ROWS), ROWS)
    batch = second.batch(wanted)
    found = {"equal": first.digest == second.digest, "shards": [one.rows for one in first.shards],
             "numbers": batch["number"].tolist() == wanted,
             "x": bool((batch["x"].numpy() == arrays()["x"][wanted]).all()),
             "died": (folder / "died").exists(), "made": made(folder)}
    end_holders()
    for copy in (folder / "shards").iterdir():
        copy.unlink()
    found["again"] = first.batch(range(ROWS))["number"].tolist() == list(range(ROWS))
    found["made again"] = made(folder)
    first._fetcher.close()
    second._fetcher.close()
    return found


def made(folder):
    """How often each block was."""
    told = (folder / "made").read_text().split()
    return sorted(told.count(one) for one in set(told))


def trained(folder):
    """The same rows from Ray and from shards on disk: the digest of the weights at the end."""
    from ways import Way

    from holdfast.trainer.feed import shards
    from holdfast.trainer.standalone import Assignment

    shards.write(folder / "disk", [arrays()])
    ways = {"ray": ["data=holdfast.trainer.feed.ray_data:RayData", "data_options.rows=48",
                    "data_options.dataset=on_ray:rows", f"data_options.options.folder={folder}",
                    f"data_options.address={json.dumps(os.environ['RAY_HEAD'])}"],
            "shards": ["data=holdfast.trainer.feed.shards:Shards",
                       f"data_options.root={folder / 'disk'}"]}
    found = {}
    for name, settings in ways.items():
        way = Way(["model=tiny:Model", "steps=6", "batch=5", "micro_batches=2", "device=cpu",
                   "checkpoint.every=0", f"work_dir={folder / name}", *settings])
        generation = way.begin()
        found[name] = generation.run(Assignment(1, 0, 0, 1)).digest
        generation.leave()
        generation.checkpoints.close()
    return found


def changed(folder):
    """Rows that are others when they are made again."""
    data = feed("changing", folder, in_memory=1)
    data.batch([0])
    end_holders()
    found = said(lambda: data.batch([ROWS - 1]))
    data._fetcher.close()
    return found


def dies(folder):
    return said(lambda: feed("dying", folder, deadline_s=15.0))


def raises(folder):
    return said(lambda: feed("raising", folder))


def nowhere(folder):
    return said(lambda: feed("rows", folder, deadline_s=8.0, address="127.0.0.1:1"))


def main(folder):
    import ray

    head = ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False,
                    log_to_driver=False, logging_level="ERROR")
    os.environ["RAY_HEAD"] = head.address_info["gcs_address"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        case = line.strip()
        home = folder / case
        home.mkdir()
        print(json.dumps(globals()[case](home)), file=answers, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    sys.modules["on_ray"] = sys.modules["__main__"]
    main(Path(sys.argv[1]))
