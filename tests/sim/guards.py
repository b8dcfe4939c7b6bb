"""Guards of the edge, which no storm runs through, each taken out of the real code: does the test
that is named for it fail?

    python tests/sim/guards.py [NAME ...]      # all of them; part of `make mutants-sim`

Owns the table.  The test runs in a process of its own, where this module is a plugin and takes out
the guard that GUARD names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from holdfast.agent.actions import performer
from holdfast.agent.actions.performer import EffectInFlight, Performer
from holdfast.agent.core.model import Effect
from holdfast.agent.core.nodes import exclusions
from holdfast.agent.core.run import fences
from holdfast.agent.daemon.parts.permits import Permits
from holdfast.agent.peers import transport
from holdfast.agent.peers.failure_detector import FailureDetector
from holdfast.agent.store import etcd
from holdfast.agent.store.etcd_gateway import Gateway
from holdfast.agent.store.identity import Known
from holdfast.worker.launcher.rank_processes import RankProcesses

ROOT = Path(__file__).resolve().parents[2]
GUARD = "HOLDFAST_TEST_WITHOUT_GUARD"
TESTS_FAILED = 1  # pytest's own
LIMIT_S = 300.0


class Guard(NamedTuple):
    """One rule taken out, and the test that must not pass without it."""

    name: str
    test: str
    patch: Callable[[pytest.MonkeyPatch], None]


def unread_cluster(patch: pytest.MonkeyPatch) -> None:
    """What this node knows of its cluster is not asked."""
    patch.setattr(etcd, "read_known", lambda *_: Known("node"))


def uncompared(which: Callable[[str, str], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Transactions reach etcd without the comparisons of these targets and keys."""
    def take_out(patch: pytest.MonkeyPatch) -> None:
        real = Gateway.write

        async def write(self, path, body, limit_s):  # type: ignore[no-untyped-def]
            kept = [one for one in body.get("compare", ())
                    if not which(one["target"], b64decode(one["key"]).decode())]
            return await real(self, path, {**body, **({"compare": kept} if kept else {})}, limit_s)

        patch.setattr(Gateway, "write", write)

    return take_out


def runs_alone(patch: pytest.MonkeyPatch) -> None:
    """The breaker counts the nodes that carry a run, and no idle ones."""
    real = exclusions.faults_of
    patch.setattr(exclusions, "faults_of", lambda ctx: real(SimpleNamespace(
        now=ctx.now, settings=ctx.settings, observed=replace(
            ctx.observed, beats=tuple(one for one in ctx.observed.beats if one.run)))))


def put(target: object, name: str, to: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, name, to)


def lasting_as_any_other(patch: pytest.MonkeyPatch) -> None:
    """What outlives the node goes on without a journal."""
    real = Performer._begin

    async def begin(self: Performer, effects: list[Effect], memory: bytes | None) -> None:
        await real(self, [replace(one, outlives_node=False) for one in effects], memory)

    patch.setattr(Performer, "_begin", begin)
    patch.setattr(performer, "needs_sync", lambda _: False)


def replayed(self: Performer, effects: Iterable[Effect]) -> list[Effect]:
    """An intent that an earlier life left is no reason against doing it again."""
    self._orphans.clear()
    return [one for one in effects if one.id not in self._flights and one.id not in self._finished]


def sent_to_a_later_launcher(patch: pytest.MonkeyPatch) -> None:
    """What was decided for one launcher reaches the next of its name."""
    real = Performer._send

    def send(self: Performer, flight: EffectInFlight) -> None:
        flight.launcher = self._launcher_of(flight.run)
        real(self, flight)

    patch.setattr(Performer, "_send", send)


AGENT, STORES = "tests/unit/agent", "tests/unit/agent/test_store_conformance.py"
PERFORMER = f"{AGENT}/test_performer.py"
STALLED = (f"{PERFORMER}::"
           "test_a_stalled_journal_lets_ordinary_effects_go_on_and_refuses_lasting_ones")
GUARDS = (
    Guard("no second observer",
          f"{AGENT}/test_failure_detector.py::"
          "test_a_silent_node_is_asked_and_lost_on_two_words",
          put(FailureDetector, "lost", lambda self: frozenset(self.unreachable()))),
    Guard("no cluster id",
          f"{AGENT}/test_etcd_faults.py::"
          "test_an_etcd_that_came_back_empty_or_is_anothers_is_refused", unread_cluster),
    Guard("a store that became another is written to",
          f"{AGENT}/test_etcd_faults.py::"
          "test_a_store_that_changed_between_two_questions_takes_no_write",
          uncompared(lambda target, key: target == "VALUE" and key.endswith("/cluster"))),
    Guard("etcd sets without comparing versions",
          f"{STORES}::test_of_many_at_once_one_wins[etcd]",
          uncompared(lambda target, _: target in ("VERSION", "MOD"))),
    Guard("etcd takes a plan from anybody",
          f"{STORES}::"
          "test_a_holder_who_has_not_heard_of_his_successor_writes_nothing_below_his_lease[etcd]",
          uncompared(lambda target, key: target == "VALUE" and "/lease/" in key)),
    Guard("permits without anybody's word",
          f"{AGENT}/test_permits.py::"
          "test_without_the_store_all_of_the_plan_must_have_answered",
          put(Permits, "failsafe_s", lambda *_: 1e12)),
    Guard("a node that is missed renews its permits",
          f"{AGENT}/test_permits.py::test_a_node_that_reads_that_it_is_missed_renews_nothing",
          put(fences, "may_renew", lambda *_: True)),
    Guard("no permit check", "tests/unit/worker/test_rank_processes.py::"
          "test_ranks_end_with_a_permit_that_nobody_renews",
          put(RankProcesses, "end_with_permit", lambda _: None)),
    Guard("breaker blind to idle nodes",
          "tests/unit/core/test_exclusion.py::test_idle_nodes_count_for_the_breaker", runs_alone),
    Guard("a distant release is spoken with",
          f"{AGENT}/test_beats.py::"
          "test_a_neighbouring_release_is_spoken_with_and_any_other_is_refused_by_name",
          put(transport, "_refuse_far", lambda _: None)),
    Guard("what an earlier life left is done again",
          f"{AGENT}/test_performing.py::test_what_an_earlier_life_left_is_never_done_again",
          put(Performer, "fresh", replayed)),
    Guard("an order for one launcher reaches the next",
          f"{PERFORMER}::test_an_order_never_reaches_a_later_launcher_of_the_same_name",
          sent_to_a_later_launcher),
    Guard("a restart waits for a disk that does not answer", STALLED,
          put(performer, "JOURNAL_WAIT_S", 1e9)),
    Guard("what outlives the node goes on without a journal", STALLED, lasting_as_any_other),
)


def pytest_configure() -> None:
    name = os.environ.get(GUARD)
    if name:
        next(one for one in GUARDS if one.name == name).patch(pytest.MonkeyPatch())


def without(guard: Guard | None, test: str) -> tuple[int, str]:
    """pytest's exit status of one test without this guard, and its last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "guards", "-p", "no:cacheprovider",
               test]
    environ = {**os.environ, GUARD: guard.name if guard else "",
               "PYTHONPATH": os.pathsep.join(
                   (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True,
                          timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout[-2000:]


def main(names: list[str]) -> int:
    chosen = [one for one in GUARDS if not names or one.name in names]
    missed = 0
    for guard in chosen:
        whole, told = without(None, guard.test)
        status, told = (whole, told) if whole else without(guard, guard.test)
        good = not whole and status == TESTS_FAILED
        missed += not good
        print(f"{guard.name}: {'noticed' if good else f'NOT NOTICED ({whole}, {status}): {told}'}",
              flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
