"""Every setting of the agent: names, defaults, bounds and what each is for.

Owns the frozen structs that the rest of the agent reads.  config.py fills them from files;
docs/config.md is generated from the descriptions here.  Reads nothing itself.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..checks import table
from ..core import model
from ..core.actions import ACTIONS, allowable
from ..core.nodes.labels import LABEL, LABEL_MAX

Path = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(min_length=1, max_length=253)]
# What has a pattern has its form in words as well, its `title`: nobody is shown an expression.
Address = Annotated[str, Meta(pattern=r"^(|\[?[^\s]+\]?:\d{1,5})$", title="HOST:PORT")]
PEERS_PORT = 9856
LabelName = Literal["efa_group", "rack", "rail", "nvlink_domain", "model"]
Label = Annotated[str, Meta(pattern=rf"^{LABEL}\Z", max_length=LABEL_MAX)]
_SETTINGS = model.Settings()


def _seconds(text: str, most: float = 86400.0, least: float = 0.01) -> Meta:
    return Meta(ge=least, le=most, description=text)


class Agent(msgspec.Struct, frozen=True):
    """The process itself."""

    node: Annotated[
        str, Meta(max_length=253, description="name of this node; empty: the host name")] = ""
    state_dir: Annotated[Path, Meta(description=(
        "journal, store and lock live here; one agent a directory"))] = "/var/lib/holdfast"
    runtime_dir: Annotated[Path, Meta(description=(
        "sockets live here, and `address`, where the live page is. Anywhere else runs do not find "
        "this agent and start private ones, also with HOLDFAST_RUNTIME_DIR set to the same; "
        "commands find it only with that"))] = "/run/holdfast"
    listen: Annotated[Address, Meta(description=(
        "HOST:PORT of page, API and metrics; empty: none. A private agent takes the next free port"
    ))] = "127.0.0.1:9855"
    metrics_listen: Annotated[Address, Meta(description=(
        "HOST:PORT that serves /metrics, /healthz, /readyz and /runbooks alone, without the API "
        "and without TLS; empty: none"
    ))] = ""
    tick_s: Annotated[
        float, _seconds("a step of the state machine at least this often", 10.0, 0.05)] = 1.0
    fast_s: Annotated[
        float, _seconds("interval of collectors that are cheap and change fast", 60.0, 0.1)] = 5.0
    slow_s: Annotated[float, _seconds("interval of all other collectors", 3600.0, 0.1)] = 15.0
    runs_kept_days: Annotated[float, Meta(ge=0, le=36500, description=(
        "a private agent, when it starts, removes the state of other private runs, logs included, "
        "that was not written to for this long; 0: never. Folders of --log-dir and checkpoints are "
        "no part of it"))] = 30.0
    runs_kept_gb: Annotated[float, Meta(ge=0, le=1e6, description=(
        "and the oldest of them beyond this much in all, but none of the last day; 0: no limit"
    ))] = 20.0
    metrics: Annotated[Literal["minimal", "full"], Meta(description=(
        "`minimal` leaves out what no alert or summary needs"))] = "full"
    metrics_hide: Annotated[tuple[str, ...], Meta(description=(
        "families that are left out: `node_exporter` or `dcgm-exporter` for all that this exporter "
        "serves as well, or the beginning of a name (`host_cpu_`, `train_loss`)"))] = ()


class Detect(msgspec.Struct, frozen=True):
    """When something counts as a fault.  See docs/architecture.md on suspicion and cost."""

    suspect_floor_s: Annotated[float, _seconds(
        "a rank is suspected when its page stood still this long ...")] = _SETTINGS.suspect_floor_s
    suspect_steps: Annotated[float, Meta(ge=0, le=1000, description=(
        "... plus this many median steps"))] = _SETTINGS.suspect_steps
    odds: Annotated[float, Meta(ge=1, le=1000, description=(
        "acts when waiting has cost this many times a restart"))] = _SETTINGS.odds
    odds_active: Annotated[float, Meta(ge=1, le=1000, description=(
        "the same while the rank uses processor or I/O"))] = _SETTINGS.odds_active
    script_floor_s: Annotated[
        float, _seconds("a script's stall is never acted on sooner")] = _SETTINGS.script_floor_s
    phase_factor: Annotated[float, Meta(ge=1, le=1000, description=(
        "a phase may take this many times its 99th percentile"))] = _SETTINGS.phase_factor
    compile_limit_s: Annotated[float, _seconds(
        "a compile whose usual length is unknown may take this long", 604800.0
    )] = _SETTINGS.compile_limit_s
    quiet_limit_s: Annotated[
        float, _seconds("the same for an evaluation, a checkpoint or input that comes slowly")
    ] = _SETTINGS.quiet_limit_s
    stopped_s: Annotated[float, _seconds(
        "a rank stopped (state T) without a debugger this long is a fault")] = _SETTINGS.stopped_s
    park_wait_s: Annotated[float, _seconds(
        "survivors have this long to leave a broken generation", 600.0)] = _SETTINGS.park_wait_s
    stop_grace_s: Annotated[
        float, _seconds("between SIGTERM and SIGKILL", 3600.0)] = _SETTINGS.stop_grace_s
    crash_loop_count: Annotated[int, Meta(ge=2, le=100, description=(
        "the same failure this often is a crash loop: of a trainer at the same true step, of a "
        "script before its first step, of a command within moments of its start; progress in "
        "between clears it"))] = _SETTINGS.crash_loop_count
    breaker_nodes: Annotated[int, Meta(ge=1, le=100000, description=(
        "the same fault on this many nodes and ..."))] = _SETTINGS.breaker_nodes
    breaker_fraction: Annotated[float, Meta(gt=0, le=1, description=(
        "... on more than this fraction of them has a common cause: nothing is done to nodes"
    ))] = _SETTINGS.breaker_fraction
    exclude_fraction: Annotated[float, Meta(gt=0, le=1, description=(
        "at most this fraction of the nodes is excluded for faults within ..."
    ))] = _SETTINGS.exclude_fraction
    exclude_window_s: Annotated[float, _seconds(
        "... so many seconds; two of a small fleet always", 604800.0)] = _SETTINGS.exclude_window_s
    strikes_most: Annotated[int, Meta(ge=1, le=100, description=(
        "after so many exclusions for faults a person alone releases a node"
    ))] = _SETTINGS.strikes_most
    strikes_days: Annotated[float, Meta(gt=0, le=3650, description=(
        "days until such an exclusion is forgotten"))] = _SETTINGS.strikes_days
    drain_limit_s: Annotated[float, _seconds(
        "a drain that is not done by then is given up", 86400.0)] = _SETTINGS.drain_limit_s
    keep_checkpoints: Annotated[int, Meta(ge=1, le=10000, description=(
        "valid checkpoints to keep"))] = _SETTINGS.keep_checkpoints
    lease_s: Annotated[
        float, _seconds("how long a leader leads without renewal", 600.0)] = _SETTINGS.lease_s
    gather_s: Annotated[float, _seconds(
        "a run with --nnodes MIN:MAX starts with fewer than MAX no sooner", 86400.0
    )] = _SETTINGS.gather_s
    gang_limit_s: Annotated[float, _seconds(
        "a run ends with 75 when fewer nodes than it needs are there for so long (--gang-limit)",
        604800.0)] = _SETTINGS.gang_limit_s
    act: Annotated[tuple[str, ...], Meta(description=(
        "detectors that may act; all others are shown only"))] = _SETTINGS.act


class Collectors(msgspec.Struct, frozen=True):
    """What is read of the machine, and from where."""

    disable: Annotated[
        tuple[str, ...], Meta(description="collectors that are not run, by their names below")] = ()
    deadline_s: Annotated[
        float, _seconds("a collector that takes longer is given up and counted", 60.0, 0.05)] = 2.0
    proc: Annotated[Path, Meta(description="root of the proc file system")] = "/proc"
    sys: Annotated[Path, Meta(description="root of the sys file system")] = "/sys"
    kmsg: Annotated[Path, Meta(description="the kernel's log")] = "/dev/kmsg"
    kmsg_users: Annotated[bool, Meta(description=(
        "believe lines that programs wrote into it as well; for tests alone"))] = False
    journalctl: Annotated[Path, Meta(description=(
        "read for the kernel's log where kmsg may not be; empty: it is not"
    ))] = "/usr/bin/journalctl"
    nvml: Annotated[Path, Meta(description=(
        "directory of libnvidia-ml.so.1; empty: where the loader looks by itself"))] = ""
    neuron: Annotated[
        Path, Meta(description="directory of neuron-monitor and neuron-ls")] = "/opt/aws/neuron/bin"
    compile_cache: Annotated[Path, Meta(description=(
        "directory in which Neuron's compiler keeps programs and locks"
    ))] = "/var/tmp/neuron-compile-cache"
    tools: Annotated[
        Path, Meta(description="directory of smartctl and nvme; empty: the usual ones")] = ""
    dns_names: Annotated[tuple[Name, ...], Meta(max_length=16, description=(
        "names that must resolve on this node, the storage's for example; empty: none is asked for"
    ))] = ()
    rocm: Annotated[Path, Meta(description="directory of amd-smi")] = "/opt/rocm/bin"
    root: Annotated[Path, Meta(description=(
        "what stands before /etc, /opt, /usr and /var where versions of drivers and libraries are "
        "looked for; empty: nothing"))] = ""
    systemd: Annotated[Path, Meta(description=(
        "directory that is there exactly where systemd is the init"))] = "/run/systemd/system"
    systemctl: Annotated[Path, Meta(description=(
        "the program that lists systemd's units; empty: the one on the PATH"))] = ""
    shm: Annotated[Path, Meta(description="the file system of shared memory")] = "/dev/shm"
    ec2_metadata: Annotated[Address, Meta(description=(
        "HOST:PORT that answers as EC2's instance metadata does (version 2, with a token); empty: "
        "169.254.169.254, and only where the machine says that it is of EC2"))] = ""


class Cost(msgspec.Struct, frozen=True):
    """What this node costs, so that the ledger can say it in money."""

    node_hour: Annotated[float, Meta(ge=0, le=1e6, description=(
        "price of an hour of this node, used or not; 0: nothing is said in money"))] = 0.0
    currency: Annotated[str, Meta(
        pattern=r"^[A-Z]{3}$", title="three capital letters", description="of that price")] = "USD"


class Api(msgspec.Struct, frozen=True):
    """Who may change something."""

    tokens_file: Annotated[Path, Meta(description=(
        'TOML file, mode 0600, of `"token" = "operator"` or `"read"` lines; without it nothing is '
        'changed over TCP. Empty: what systemd hands over as the credential `tokens`, else the '
        'file `tokens` beside this one, if it may be read'))] = ""
    max_body_bytes: Annotated[
        int, Meta(ge=1024, le=1 << 24, description="longest body a request may have")] = 65536
    tls_cert: Annotated[Path, Meta(description=(
        "PEM file: agent.listen speaks TLS with this certificate; agent.metrics_listen does not"
    ))] = ""
    tls_key: Annotated[Path, Meta(description="its private key, PEM, mode 0600")] = ""
    tls_client_ca: Annotated[Path, Meta(description=(
        "PEM file: whoever asks over agent.listen needs a certificate that one of these signed, "
        "and may read with it"))] = ""
    tls_operators: Annotated[tuple[Name, ...], Meta(max_length=64, description=(
        "common or DNS names of such certificates that may change something, as an operator's "
        "token may"))] = ()


class Evidence(msgspec.Struct, frozen=True):
    """Stacks and bundles."""

    store: Annotated[str, Meta(max_length=4096, description=(
        "directory that incidents are written to, apart from the journal, each with a bundle when "
        "it closes and before an order that the node may not survive; empty: none. It holds "
        "what `holdfast incidents` knows: of this node the newest 1,000 or so"))] = ""


class Logs(msgspec.Struct, frozen=True):
    """The ranks' standard output and error, read by a child of the launcher."""

    read: Annotated[bool, Meta(description=(
        "look for the root in the last 1 MB of every rank's logs at a death or a suspicion"
    ))] = True
    sample_bytes_s: Annotated[int, Meta(ge=0, le=65536, description=(
        "and in between read at most this much a second of a run; 0: nothing"))] = 65536


class Checks(msgspec.Struct, frozen=True):
    """What `holdfast check` takes."""

    python: Annotated[
        Path,
        Meta(description=(
            "the interpreter that has torch; empty: the active environment's, this one, or "
            "python3 on the PATH"
        )),
    ] = ""
    paths: Annotated[
        tuple[str, ...],
        Meta(max_length=16, description="where checkpoints go: written to and read back"),
    ] = ()
    profile: Annotated[str, Meta(max_length=4096, description=(
        "which machine this node must be: the name of a shipped profile, or the path of a file "
        "with one `[profile]` of your own; empty: by the machine's name, of which EC2's instance "
        "types alone are known"))] = ""
    gate: Annotated[
        tuple[str, ...],
        Meta(max_length=32, description=(
            "what a run's start needs: `passive` (every check that disturbs nobody), `full` (all "
            "that are made before a job), or names of checks; empty: nothing"
        )),
    ] = ("passive",)
    max_age_s: Annotated[
        float,
        Meta(ge=10, le=86400, description=(
            "a verdict that is older is made anew for a start; the agent keeps those of the "
            "passive checks younger"
        )),
    ] = 300.0
    wait_s: Annotated[
        float,
        Meta(ge=0, le=86400, description=(
            "how long a start that a failed check refuses waits for it to pass; 0: it leaves at "
            "once with 75"
        )),
    ] = 0.0
    after: Annotated[
        bool,
        Meta(description="make the checks of `gate` again when the last run of the node has ended"),
    ] = False
    between: Annotated[
        tuple[str, ...],
        Meta(max_length=32, description=(
            "names of checks that are made between two generations as well, where a fault of the "
            "hardware puts this node under suspicion; those of the devices may be among them, "
            "since no rank computes then. For no longer than the run's start took"
        )),
    ] = ()
    peers: Annotated[
        tuple[str, ...],
        Meta(max_length=2, description=(
            "what the nodes of a run over several test with each other before its first start, "
            "arranged by the agent that leads it: `links` (each computes, pairs exchange, and who "
            "failed is tried again with nodes that passed), `groups` (the same, then all of them "
            "together make every operation); empty: nothing. It takes torch and some seconds"
        )),
    ] = ()
    peers_limit_s: Annotated[
        float,
        Meta(ge=30, le=3600, description=(
            "how long such a start waits for these tests; what is not known then is unknown, and "
            "it starts"
        )),
    ] = 120.0
    suspects_limit_s: Annotated[
        float,
        Meta(ge=0, le=3600, description=(
            "how long the next generation of such a run waits while the nodes that a fault put "
            "under suspicion are tested with others, once it has cost more than the tests take, "
            "30 for example; 0: none is tested between two generations"
        )),
    ] = 0.0
    limits: Annotated[
        tuple[str, ...],
        Meta(max_length=64, description=(
            "`NAME >= NUMBER` of a measure, in bytes or operations a second; below it is critical, "
            "whatever profile and baseline say"
        )),
    ] = ()
    drain_after_s: Annotated[float, _seconds(
        "a node of Slurm with a critical is drained this long after it has said so to the others, "
        "unless they have the same: `--for slurm-health`; a Prolog waits 3 s at most")] = 90.0
    drain_share: Annotated[float, Meta(ge=0, le=1, description=(
        "of a partition's nodes, and one at least, are drained for checks at a time by "
        "`--for slurm-health`; a Prolog asks only whether many fail the same check"))] = 0.1


    def core_settings(self) -> model.GateSettings:
        return model.GateSettings(
            names=table.of_gate(self.gate), full=table.of_gate((table.FULL,)), paths=self.paths,
            max_age_s=self.max_age_s, limit_s=table.limit_s(self.gate),
            full_limit_s=table.limit_s((table.FULL,)), wait_s=self.wait_s,
            disturbing=tuple(one.name for one in table.CHECKS if one.disturbs), after=self.after,
            between=table.of_gate(self.between), peers=self.peers,
            peers_limit_s=self.peers_limit_s, suspects_limit_s=self.suspects_limit_s)


class Actions(msgspec.Struct, frozen=True):
    """Actions that outlive a run are off until they are named here."""

    allow: Annotated[
        tuple[str, ...], Meta(description=f"of {', '.join(allowable())}")] = _SETTINGS.allow
    alone: Annotated[
        bool,
        Meta(
            description=(
                f"do {' and '.join(one.name for one in ACTIONS.values() if one.needs_breaker)} "
                "although the breaker, which takes the same fault on many nodes for a common "
                "cause, can never open on one that sees no fleet"
            )
        ),
    ] = _SETTINGS.alone
    socket: Annotated[Path, Meta(description=(
        "where the node's root unit takes orders (holdfast-node.socket)"
    ))] = "/run/holdfast-node.sock"


class Inject(msgspec.Struct, frozen=True):
    """Faults on purpose."""

    enabled: Annotated[bool, Meta(description=(
        "whether `holdfast inject` works on runs of this agent; always on in a private one"
    ))] = False


class Runbooks(msgspec.Struct, frozen=True):
    """The policy for each fault."""

    directory: Annotated[Path, Meta(description=(
        "*.md here shadow the machine part of a shipped runbook of the same name, or are the site's"
        " own"
    ))] = "/etc/holdfast/runbooks"
    serve: Annotated[bool, Meta(description=(
        "whether the words of files there are served at /runbooks like the shipped ones: to "
        "whoever reaches agent.listen or agent.metrics_listen, without a token. Secrets are taken "
        "out as far as they can be told; `false` where strangers reach the metrics"
    ))] = True


class Store(msgspec.Struct, frozen=True):
    """Where many nodes keep what they agree on; one node needs nothing here. See docs/cluster.md.
    """

    url: Annotated[str, Meta(max_length=4096, description=(
        "`etcd://HOST:PORT,HOST:PORT,HOST:PORT`, the members of an etcd of 3.4 or newer, or "
        "`etcds://` with TLS; empty: this node alone, in SQLite below agent.state_dir"))] = ""
    cluster: Annotated[str, Meta(max_length=63, description=(
        "name of the cluster: several may keep their state in one etcd, each under its own name"
    ))] = "main"
    user: Annotated[str, Meta(max_length=253, description=(
        "etcd's user, where its authentication is on; empty: none"))] = ""
    password_file: Annotated[Path, Meta(description=(
        "file, mode 0600, whose first line is that user's password"))] = ""
    ca_file: Annotated[Path, Meta(description=(
        "certificates, in PEM, that signed the members'; empty: the system's"))] = ""
    cert_file: Annotated[Path, Meta(description=(
        "this node's own certificate, in PEM, where the members ask for one"))] = ""
    key_file: Annotated[Path, Meta(description="and its key")] = ""


class Cluster(msgspec.Struct, frozen=True):
    """How the agents of many nodes talk with each other; used where `store.url` is set."""

    listen: Annotated[Address, Meta(description=(
        "HOST:PORT where the other agents reach this one; empty: the address that routes to the "
        f"store, and port {PEERS_PORT}. Where the port is taken it is any free one, which the "
        "agent says"))] = ""
    token_file: Annotated[Path, Meta(description=(
        "file, mode 0600, whose first line all agents of the cluster share; empty: a token that "
        "they keep in the store"))] = ""
    labels: Annotated[dict[LabelName, Label], Meta(description=(
        "in which parts of the network this node is, the widest first: neighbours get ranks beside "
        "each other; `model`: of its accelerators, of which a run takes one alone unless "
        "`--allow-mixed`. What is not set comes from drivers (`model`) and EC2 (`efa_group`)"
    ))] = {}


class Config(msgspec.Struct, frozen=True):
    """All sections."""

    agent: Agent = Agent()
    detect: Detect = Detect()
    collectors: Collectors = Collectors()
    api: Api = Api()
    cost: Cost = Cost()
    evidence: Evidence = Evidence()
    logs: Logs = Logs()
    checks: Checks = Checks()
    actions: Actions = Actions()
    inject: Inject = Inject()
    runbooks: Runbooks = Runbooks()
    store: Store = Store()
    cluster: Cluster = Cluster()

    def core_settings(self) -> model.Settings:
        """The part that the deterministic core needs."""
        values = {name: getattr(self.detect, name) for name in self.detect.__struct_fields__}
        return model.Settings(
            allow=self.actions.allow, alone=self.actions.alone, single_node=not self.store.url,
            gate=self.checks.core_settings(), **values
        )
