"""The part of the configuration and of the runbooks that the core needs."""

from __future__ import annotations

from .time import Value


class Runbook(Value, frozen=True):
    """The machine part of runbooks/<fault>.md: the policy for one fault."""

    fault: str
    severity: str
    scope: str  # gpu | neuron | nic | rank | node | run | store
    ladder: tuple[str, ...] = ()  # restart_ranks resume_older exclude_node stop_run ...
    budget_count: int = 3  # per action and subject, then climb
    budget_window_h: float = 24.0
    clears: str = "check"  # reboot | quiet_10m | check | operator
    alert: str = ""
    checks: tuple[str, ...] = ()  # that run_check makes and that clear it; () = those of its scope
    path: str = ""  # the file that spoke


class GateSettings(Value, frozen=True):
    """What a run's start needs, by names of checks."""

    names: tuple[str, ...] = ("incidents",)  # () = nothing
    full: tuple[str, ...] = ()  # the same for a run with --check full
    paths: tuple[str, ...] = ()  # beside the run's own checkpoint directory
    max_age_s: float = 300.0  # a verdict is made anew when it is older
    limit_s: float = 60.0  # how long a start waits for checks; then they are unknown
    full_limit_s: float = 600.0
    wait_s: float = 0.0  # how long it waits for a check that failed to pass
    window_s: float = 1800.0  # failures of many nodes that begin within it have one cause
    disturbing: tuple[str, ...] = ()  # checks that are not made while ranks run
    after: bool = False  # made again when the node's last run has ended
    between: tuple[str, ...] = ()  # before a restart, on a node that hardware puts under suspicion
    peers: tuple[str, ...] = ()  # what the nodes of a run test with each other before its start
    peers_limit_s: float = 120.0  # how long it waits for that
    suspects_limit_s: float = 30.0  # how long a restart waits for such tests; 0 = it makes none


PEER_TESTS = LINKS, GROUPS = ("links", "groups")  # what `checks.peers` may name
MAY_ACT = ("ended", "hang", "kernel", "alerts")  # what `detect.act` may name


class Settings(Value, frozen=True):
    """What of the configuration the core needs."""

    suspect_floor_s: float = 2.0
    suspect_steps: float = 3.0
    odds: float = 3.0
    odds_active: float = 9.0
    script_floor_s: float = 60.0
    phase_factor: float = 10.0
    compile_limit_s: float = 7200.0
    quiet_limit_s: float = 1800.0  # evaluation and checkpoint, until their p99 is known
    stopped_s: float = 1.0  # state T without a tracer must last this long
    park_wait_s: float = 1.0  # survivors have this long to park before they are replaced
    stop_grace_s: float = 5.0
    crash_loop_count: int = 3  # same signature in the same place
    breaker_nodes: int = 3
    breaker_fraction: float = 0.05
    exclude_fraction: float = 0.1  # of the fleet: more nodes are not excluded for faults
    exclude_window_s: float = 1800.0  # within this; as many as do not open the breaker always may
    strikes_most: int = 3  # exclusions for faults, after which a person alone releases
    strikes_days: float = 30.0  # until one is forgotten
    drain_limit_s: float = 600.0  # until a drain is given up
    keep_checkpoints: int = 3
    lease_s: float = 10.0
    gather_s: float = 30.0  # with fewer than the most, a run starts no sooner; as torchrun's
    gang_limit_s: float = 600.0  # how long a run waits for as many nodes as it needs
    act: tuple[str, ...] = MAY_ACT[:3]  # alerts act where an operator says so
    allow: tuple[str, ...] = ()  # reboot_node, replace_node, ...: off until turned on
    alone: bool = False  # reboot and replace also where no fleet is seen that opens the breaker
    single_node: bool = True
    store_node: str = ""  # HOST:PORT of the one node that has the store; "" = it outlives nodes
    gate: GateSettings = GateSettings()
