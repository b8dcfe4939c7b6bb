"""What the core did in each storm, as digests: any change of behaviour shows as a changed seed.

    python tests/sim/frozen.py [--seeds N]   # which seeds differ from digests.json
    python tests/sim/frozen.py --write       # after a change that is meant, and said in its commit

A digest covers every line of the world's trace and the values of every decision of every node
(effects, verdicts, incidents, plans, reasons, ledger, next step), in order.  Field names are left
out, so that a rename is no change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import msgspec

from holdfast.agent.simulate import STORMS, Report, run_storm
from holdfast.agent.simulate.cluster import Cluster

FILE = Path(__file__).with_name("digests.json")
SEEDS = 20  # of each storm: 320 worlds; the invariants are held over more of them
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
HEX = 8  # of each digest: one seed in four thousand million would hide a change


def _values(thing: object) -> object:
    """The values of nested builtins without the names of their fields."""
    if isinstance(thing, dict):
        return [_values(value) for value in thing.values()]
    if isinstance(thing, list):
        return [_values(one) for one in thing]
    return thing


@lru_cache(maxsize=1024)
def _written(field: bytes) -> str:
    """One field of a decision as JSON without names: most are those of the step before."""
    return json.dumps(_values(json.loads(field)))


def judged(seed: int, storm: str) -> tuple[Report, str]:
    """(report, digest) of one seed."""
    digest = hashlib.sha256()

    def watch(cluster: Cluster) -> None:
        for edge in cluster.edges.values():
            before = edge.on_step

            def decided(edge, now, observed, decision, before=before):  # type: ignore
                # Its beats say again what the node observed.
                judged = msgspec.structs.replace(decision, beats=())
                fields = FIELDS.decode(msgspec.json.encode(judged)).values()
                digest.update(f"[{', '.join(_written(bytes(one)) for one in fields)}]".encode())
                before(edge, now, observed, decision)

            edge.on_step = decided

    report = run_storm(seed, storm, hook=watch, sink=lambda line: digest.update(line.encode()))
    return report, digest.hexdigest()[:HEX]


def judge(seeds: range, storm: str, processes: int = 2) -> list[tuple[Report, str]]:
    """Every seed's report and digest, in order."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(partial(judged, storm=storm), seeds, chunksize=10))


def known() -> dict[str, list[str]]:
    """storm -> digest of seed 0, 1, 2 ..."""
    found: dict[str, list[str]] = json.loads(FILE.read_text())
    return found


def changed(storm: str, digests: list[str]) -> list[int]:
    """Seeds whose digest is not the kept one; all of a storm that has none yet."""
    kept = known().get(storm, [""] * len(digests))
    return [seed for seed, digest in enumerate(digests[: len(kept)]) if digest != kept[seed]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    judged = {storm: judge(range(options.seeds), storm) for storm in sorted(STORMS)}
    made = {storm: [digest for _, digest in found] for storm, found in judged.items()}
    for report in (report for found in judged.values() for report, _ in found if not report.ok):
        print(report.text().splitlines()[0])
    if options.write:
        rows = (f'"{storm}": {json.dumps(digests)}' for storm, digests in made.items())
        FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return 0
    differ = {storm: found for storm, digests in made.items() if (found := changed(storm, digests))}
    print(differ or "every seed as before")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
