"""The command line of `holdfast run` and `holdfast train`: torchrun's flags, and a few of ours.

Owns parsing and the resulting Spec.  `torchrun ARGS` -> `holdfast run ARGS` is the whole
migration, so every flag of torchrun's is accepted; what has no meaning here is accepted and
ignored, which `--help` says.  A mistake ends with one line and its own exit code.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import glob
import importlib
import math
import os
import re
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, NoReturn, Tuple

from .. import exits, naming
from ..rank.rank import Program
from ..stderr import say

# Flags of torchrun's that change nothing here; and those that would, and that nobody does here.
HARMLESS = ("--rdzv-backend", "--monitor-interval")
IGNORED = ("--rdzv-conf", "--logs-specs", "--numa-binding", "--signals-to-handle",
           "--event-log-handler", "--duplicate-stdout-filters", "--duplicate-stderr-filters",
           "--shutdown-timeout")
STREAMS = re.compile(r"[0-3]|[0-9]{1,4}:[0-3](,[0-9]{1,4}:[0-3])*")  # of --redirects and --tee
RANKS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*")
TRAINERS_SETTINGS = "holdfast.trainer.config"  # by name, as the preload: no launcher needs it
NNODES_MAX = 2048  # that an agent keeps in touch with (agent/peers/choice.py, docs/scale.md)
OWN_STORES = ("etcd", "etcd-v2")  # of torchrun's backends: theirs is the server that is named
# Of a run's name in the environment: the scheduler's account is the team unless one is given.
TEAM_FROM = ("HOLDFAST_TEAM", "SLURM_JOB_ACCOUNT")
QUEUED_FROM = "HOLDFAST_QUEUED_AT"  # seconds since 1970: `export HOLDFAST_QUEUED_AT=$(date +%s)`
TEAM_MAX = 64
AMOUNT_MAX = 1e30  # floating-point operations of a step, at most
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
RESTARTS_MAX = 1000000
SECONDS_MAX = 604800.0  # a week

EXAMPLES = {
    "run": """examples:
  holdfast run --standalone --nproc-per-node 2 train.py --lr 3e-4
  holdfast run --nproc-per-node gpu --run nightly -m mypackage.train
  srun holdfast run --nnodes 4 --nproc-per-node gpu train.py
""",
    "train": """examples:
  holdfast train --nproc-per-node 2 steps=200 checkpoint.dir=ckpt
  holdfast train --nproc-per-node 2 --config train.toml seed=1
an unknown key=value is answered with the keys that there are
""",
}
EPILOG = """
torchrun's other flags are accepted: --rdzv-backend and the like mean nothing
here, and where one would (--numa-binding, ...) a line says so.

environment:
  HOLDFAST_RUNTIME_DIR  the run has an agent of its own, its sockets below that
                        folder, also on a node that has one for all runs
  HOLDFAST_STATE_DIR    where that agent keeps its journal and store
                        (~/.local/state/holdfast)
  HOLDFAST_CONFIG       the configuration of that agent
  HOLDFAST_AGENT_USER   whom the node's agent runs as (holdfast)
  HOLDFAST_ADDR         the address by which the other nodes reach this one
  HOLDFAST_TEAM         whose job it is, as --team
  HOLDFAST_QUEUED_AT    when it was queued, in seconds since 1970
"""


class Shown(NamedTuple):
    """Which ranks' streams the terminal shows: --local-ranks-filter, and --redirects less --tee."""

    ranks: Tuple[int, ...] = ()  # () for all
    redirects: Dict[int, int] = {}  # rank -> bits, -1 for every rank that is not named
    tee: Dict[int, int] = {}

    def shows(self, rank: int, bit: int) -> bool:
        """`bit`: 1 for standard output, 2 for standard error."""
        if self.ranks and rank not in self.ranks:
            return False
        redirected, tee = (one.get(rank, one.get(-1, 0)) for one in (self.redirects, self.tee))
        return not redirected & ~tee & bit


class Spec(NamedTuple):
    """What one launcher was asked to run."""

    run: str
    program: Program
    nproc: int
    max_restarts: int
    log_dir: str
    tee: bool
    master_port: int
    run_id: str
    role: str
    preload: List[str]
    start_method: str  # fork | spawn
    standby: int
    log_limit_bytes: int
    grace_s: float
    hang_limit_s: float
    nproc_unset_threads: bool
    argv: List[str]
    shown: Shown = Shown()
    ignored_checks: List[str] = []
    ignore_reason: str = ""
    wants_checks: str = ""
    nnodes: int = 1  # at most
    nnodes_min: int = 1
    node_rank: int = -1
    local_addr: str = ""
    rendezvous: str = ""  # HOST or HOST:PORT that the caller named to all nodes
    goal: Dict[str, Any] = {}
    unit: int = 1
    unit_why: str = ""  # where a trainer's strategy wants it
    mixed: bool = False
    gang_limit_s: float = 0.0  # 0 = as the agent's configuration says

    @property
    def nnodes_text(self) -> str:
        few, many = self.nnodes_min, self.nnodes
        return str(many) if few == many else "%d:%d" % (few, many)

    def first_line(self, log_dir: str) -> str:
        """What a person reads before anything else of the run."""
        line = "run %s, logs in %s" % (self.run, log_dir)
        if not self.unit_why:
            return line
        return "%s; %d nodes live and move together: %s" % (line, self.unit, self.unit_why)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        fail(message + near_flags(message, self._option_string_actions))


def near_flags(message: str, known: Iterable[str]) -> str:
    """"; did you mean ...?" for flags that a parser did not know."""
    _, said, words = message.partition("unrecognized arguments: ")
    given = [word.partition("=")[0] for word in words.split() if said and word.startswith("-")]
    flags = [one for one in known if "_" not in one]
    near = [found for word in given
            for found in difflib.get_close_matches(word.replace("_", "-"), flags, 1)]
    return "; did you mean %s?" % " ".join(dict.fromkeys(near)) if near else ""


def number(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], Any]:
    """A converter for argparse: a finite number within its bounds, or what to give."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = math.nan
        if not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                "%.40r: give %s from %g to %g" % (text, what, least, most))
        return value

    return convert


def fail(message: str) -> NoReturn:
    say("holdfast: %s" % exits.ending(exits.CONFIGURATION, message))
    raise SystemExit(exits.CONFIGURATION)


def flag(parser: argparse._ActionsContainer, *names: str, **options: Any) -> None:
    """A flag in both spellings (--a-b, --a_b), its default from torchrun's PET_ variable."""
    spellings: List[str] = []
    for name in names:
        spellings.append(name)
        if name.startswith("--") and "-" in name[2:]:
            spellings.append("--" + name[2:].replace("-", "_"))
    long = next((n for n in names if n.startswith("--")), names[0])
    dest = options.setdefault("dest", long.lstrip("-").replace("-", "_"))
    variable = os.environ.get("PET_" + str(dest).upper())
    if variable is not None:
        if options.get("action") == "store_true":
            options["default"] = variable not in ("", "0", "false", "False")
        else:
            options["default"] = variable  # argparse converts a string default by `type`
    parser.add_argument(*spellings, **options)


DESCRIPTIONS = {
    "run": "Run a training script and bring it back when it fails.",
    "train": "Run the built-in trainer and bring it back when it fails.",
}


def build(command: str) -> argparse.ArgumentParser:
    usage = "holdfast %s [flags] %s" % (
        command, "(SCRIPT | -m MODULE) ARGS" if command == "run" else "[--config F] [key=value ...]"
    )
    parser = Parser(
        prog="holdfast " + command, usage=usage,
        epilog="%s%s\n%s" % (EXAMPLES[command], EPILOG, exits.told(command)), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, description=DESCRIPTIONS[command],
    )
    flag(parser, "--nnodes", default="1", help="number of nodes, or MIN:MAX; each of them starts "
         "this command, all with one name of the run")
    flag(parser, "--node-rank", type=number(int, -1, NNODES_MAX), default=-1,
         help="this node's place among them in the first world (where its agents put it)")
    flag(parser, "--nproc-per-node", default="1", help="ranks on this node: N, auto, gpu or cpu")
    flag(parser, "--max-restarts", type=number(int, 0, RESTARTS_MAX), default=3,
         help="restarts before giving up (3)")
    flag(parser, "--standalone", action="store_true", help="accepted; one node always is")
    flag(parser, "-m", "--module", action="store_true", help="SCRIPT is a module's name")
    flag(parser, "--no-python", action="store_true", help="SCRIPT is a command, run as it is")
    flag(parser, "--log-dir", default="", help="folder for each rank's stdout.log and stderr.log")
    flag(parser, "-t", "--tee", default="", help="prefix each rank's lines on the terminal")
    flag(parser, "--master-port", type=number(int, 0, 65535), default=0,
         help="port of the store; 0 = any free one")
    flag(parser, "--rdzv-id", default="", help="names the run when --run does not")
    flag(parser, "--role", default="default", help="ROLE_NAME of the ranks")
    flag(parser, "--start-method", default="fork", choices=("fork", "forkserver", "spawn"),
         help="fork (warm) or spawn (cold)")
    ours = parser.add_argument_group("holdfast")
    flag(ours, "--run", default="", help="name of the run (scheduler's job id, script and time)")
    flag(ours, "--python", default="", help="the job's interpreter (the active venv's or conda's)")
    flag(ours, "--preload", default="", help="modules to import before the fork (a,b,c), or none")
    flag(ours, "--no-hooks", action="store_true", help="watch nothing inside the script")
    flag(ours, "--standby", type=number(int, -1, 256), default=-1,
         help="warm spares of the trainer (1 on CPU; on Trainium each takes a core)")
    flag(ours, "--grace", type=number(float, 0, SECONDS_MAX), default=30.0,
         help="seconds to save after SIGTERM or Ctrl-C")
    flag(ours, "--check", default="", choices=("full",),
         help="full: also the checks that take the devices, before the start")
    flag(ours, "--ignore-check", action="append", default=None, metavar="NAME",
         help="start though this check failed; again for others; needs --reason")
    flag(ours, "--reason", default="", help="why, for the journal")
    flag(ours, "--time-collectives", action="store_true", help="time the script's collectives")
    if command == "train":
        flag(ours, "--config", default="", help="the trainer's settings, a TOML file")
        flag(ours, "--export", default="", metavar="DIR",
             help="write embeddings of all samples there instead of training; goes on where it "
                  "ended")
    # Wide: a training log comes nowhere near it, and a loop that prints takes no disk with it.
    flag(ours, "--log-limit", type=number(int, 0, 10**9), default=4096,
         help="MB of disk for each rank's stdout.log and stderr.log; beyond it their middle is "
         "dropped (4096; 0 = no limit)")
    flag(ours, "--hang-limit", type=number(float, 0, SECONDS_MAX), default=0.0,
         help="seconds without progress after which a rank is ended: in place of every limit of "
         "Holdfast's own, sooner and later, in mid-compile, evaluation and checkpoint too; not "
         "before a first step (0 = Holdfast's own limits)")
    for_the_nodes(parser)
    for_the_books(parser)
    flag(parser, "-r", "--redirects", default="",
         help="keep streams from the terminal: 1 out, 2 err, 3 both, or RANK:N,...")
    flag(parser, "--local-ranks-filter", default="", help="show these ranks' lines alone: 0,3")
    ignored = parser.add_argument_group("torchrun's, accepted without effect on one node")
    for name in (*HARMLESS, *IGNORED):
        flag(ignored, name, default=None, help=argparse.SUPPRESS)
    for name in ("--run-path", "--virtual-local-rank"):
        flag(ignored, name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script_and_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def amount(text: str) -> float:
    """A number of at least 0, also as 3e15."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= AMOUNT_MAX:
        raise argparse.ArgumentTypeError("%.40r: give a number from 0 to %g" % (text, AMOUNT_MAX))
    return value


def moment(text: str) -> Callable[[float], float]:
    """When: a date and time, or +N and m, h or d from the start on."""
    relative = re.fullmatch(r"\+(\d{1,5}(?:\.\d{1,3})?)([mhd])", text.strip())
    if relative:
        more_s = float(relative.group(1)) * UNITS[relative.group(2)]
        return lambda now_s: now_s + more_s
    try:
        # Python 3.9 and 3.10 do not know the letter.
        found = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text.strip()))
        wall_s = found.timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            "%.40r: give 2026-12-24T18:00+01:00, or +36h (m, h or d)" % text) from None
    return lambda now_s: wall_s


def for_the_nodes(parser: argparse.ArgumentParser) -> None:
    """What a run over nodes may ask of its world."""
    nodes = parser.add_argument_group("for runs over nodes (docs/cluster.md)")
    flag(nodes, "--rdzv-endpoint", default="", help="HOST[:PORT] of the node that keeps "
         "the run's state where no [store] is set; it also tells which way the others are")
    flag(nodes, "--master-addr", default="", help="the same")
    flag(nodes, "--local-addr", default="",
         help="this node's address for the others (the one that routes to them)")
    flag(nodes, "--on", action="append", default=None, metavar="NODE,...",
         help="start the same command on these nodes too, or on `all`, by the agents; each has "
         "`holdfast accept` of yours")
    flag(nodes, "--env", action="append", default=None, metavar="NAME[=TEXT]",
         help="with --on: a variable that goes along; again for others")
    flag(nodes, "--unit", type=number(int, 1, NNODES_MAX), default=0, metavar="N",
         help="so many nodes live and move together: a world is a multiple of it (1; of the "
         "trainer: what its strategy wants)")
    flag(nodes, "--allow-mixed", action="store_true",
         help="take nodes with different models of accelerators into one world")
    flag(nodes, "--gang-limit", type=number(float, 0, SECONDS_MAX), default=0.0, metavar="S",
         help="end with 75 when so long fewer nodes are there than it needs (0 = as configured)")


def for_the_books(parser: argparse.ArgumentParser) -> None:
    """Flags that change nothing of how the run is started or watched."""
    books = parser.add_argument_group("for the books (docs/jobs.md)")
    flag(books, "--team", default="", help="whose job it is (HOLDFAST_TEAM, SLURM_JOB_ACCOUNT)")
    flag(books, "--deadline", type=moment, default=None, metavar="WHEN",
         help="when it must be done: 2026-12-24T18:00Z or +36h; an alert tells when it will not")
    flag(books, "--total-steps", type=amount, default=0.0, metavar="N",
         help="optimizer steps it is to make; the trainer says it by itself")
    flag(books, "--samples-per-step", type=amount, default=0.0, metavar="N",
         help="of all ranks together, for samples a second")
    flag(books, "--tokens-per-step", type=amount, default=0.0, metavar="N",
         help="the same, for tokens a second")
    flag(books, "--flops-per-step", type=amount, default=0.0, metavar="F",
         help="floating-point operations of a step, of all ranks together")
    flag(books, "--peak-flops", type=amount, default=0.0, metavar="F",
         help="what all its devices can do a second: with --flops-per-step MFU is shown")


def trainers_settings(program: Program) -> Any:
    """The trainer's settings by its own reader; None for a script, and where the job's Python has
    no trainer, which the ranks say.  Leaves with a line for each that is wrong."""
    if not program.trainer:
        return None
    try:
        reader = importlib.import_module(TRAINERS_SETTINGS)
    except ImportError:
        return None
    try:
        return reader.from_arguments(program.argv)
    except reader.ConfigError as error:
        for problem in error.problems:
            say("holdfast train: %s" % problem)
    except SystemExit as left:  # of an unknown flag, or of --help behind a key=value
        if not left.code:
            raise
    fail("the trainer's settings are wrong")


def least_unit(fits: Callable[[int], bool], needed: int, few: int, many: int) -> int:
    """The smallest number of nodes of which every multiple from `few` to `many` fits; `needed`
    does."""
    for unit in range(1, needed):
        worlds = range(few + -few % unit, many + 1, unit)
        if len(worlds) > 1 and all(fits(nodes) for nodes in worlds):
            return unit
    return needed


def unit_of(
    options: argparse.Namespace, settings: Any, nproc: int, few: int, many: int
) -> Tuple[int, str]:
    """So many nodes live and move together, and why where a trainer's strategy wants it.  Leaves
    with one line where no world of the nodes asked for is a multiple of them."""
    ranks, why = settings.together if settings is not None and many > 1 else (1, "")
    needed = ranks // math.gcd(ranks, nproc)
    if needed > 1 and settings.fewer:
        whole = needed
        needed = least_unit(lambda nodes: settings.fits(nodes * nproc), needed, few, many)
        if needed == whole and few < many:
            say("holdfast train: fewer stages have no effect with --nnodes %s and %d rank(s) a "
                "node: worlds in between cannot be laid out; %d nodes live and move together" % (
                    options.nnodes, nproc, needed))
    if options.unit % needed:
        fail("--unit %d: %s on nodes of %d rank(s) wants a multiple of %d: set that, or leave "
             "--unit out" % (options.unit, why, nproc, needed))
    unit = options.unit or needed
    if few + -few % unit > many:
        if options.unit:
            fail("--unit %d of --nnodes %s: no world of so many nodes is a multiple of it" % (
                unit, options.nnodes))
        fail("--nnodes %s: %s on nodes of %d rank(s) wants a multiple of %d nodes" % (
            options.nnodes, why, nproc, unit))
    return unit, "%s, %d rank(s) a node" % (why, nproc) if needed > 1 else ""


def goal_of(
    options: argparse.Namespace, settings: Any, environ: Mapping[str, str], now_s: float
) -> Dict[str, Any]:
    """As the launcher's hello says it.  A queue's time that is no number, or lies ahead, is not
    believed."""
    deadline = options.deadline
    if deadline is None and settings is not None and settings.deadline:
        deadline = moment(settings.deadline)
    team = options.team or next((environ[name] for name in TEAM_FROM if environ.get(name)), "")
    try:
        queued_s = float(environ.get(QUEUED_FROM, "0"))
    except ValueError:
        queued_s = 0.0
    return {
        "team": team[:TEAM_MAX], "queued_wall_s": queued_s if 0.0 < queued_s <= now_s else 0.0,
        "deadline_wall_s": deadline(now_s) if deadline else 0.0,
        "total_steps": int(min(options.total_steps, 1e15)),
        "samples_per_step": options.samples_per_step, "tokens_per_step": options.tokens_per_step,
        "flops_per_step": options.flops_per_step, "peak_flops": options.peak_flops,
    }


def count_accelerators(environ: Dict[str, str]) -> int:
    """NVIDIA devices visible here, counted by name: asking the driver would open it."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([v for v in visible.split(",") if v.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def takes_cores(settings: Any) -> bool:
    """Whether each process of a trainer takes a Neuron core of its own, a standby too: while it
    lives no other process has that one."""
    on_xla = settings is not None and settings.device == "xla"
    return on_xla and bool(glob.glob("/dev/neuron[0-9]*"))


def standbys(
    asked: int, program: Program, settings: Any, nproc: int, environ: Dict[str, str]
) -> int:
    """How many stand by.  Each takes a device as a rank does, and two ranks on one never meet."""
    gpus = count_accelerators(environ)
    device = settings.device if settings is not None else "auto"
    if asked < 0:
        on_cpus = device == "cpu" or (
            not gpus and device not in ("cuda", "accelerator") and not takes_cores(settings))
        return int(program.trainer and on_cpus)
    free = gpus - nproc
    if not program.trainer or device in ("cpu", "xla") or not 0 <= free < asked:
        return asked
    say("holdfast: --standby %d: %d GPUs for %d ranks leave %d to stand by on"
        % (asked, gpus, nproc, free))
    return free


def processes(text: str, environ: Dict[str, str]) -> int:
    gpus = count_accelerators(environ)
    cpus = len(os.sched_getaffinity(0))
    if text == "gpu" and not gpus:
        fail("--nproc-per-node gpu: no GPU is visible here; say cpu or a number")
    named = {"gpu": gpus, "cpu": cpus, "auto": gpus or cpus}
    if text in named:
        return named[text]
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= 256:
        fail("--nproc-per-node %s: a number from 1 to 256, or auto, gpu, cpu" % text)
    return int(text)


def parse(command: str, argv: List[str], environ: Dict[str, str]) -> Spec:
    """The Spec of a command line.  Leaves with one line when something is off."""
    options = build(command).parse_args(argv)
    if options.on or options.env:  # agent/cli/launch.py takes them out
        fail("--on and --env are for the command `holdfast`, not for its launcher")
    rest: List[str] = options.script_and_args
    if rest[:1] == ["--"]:
        rest = rest[1:]
    nnodes_min, nnodes = node_counts(options)
    program = program_of(command, options, rest)
    settings = trainers_settings(program)
    nproc = processes(options.nproc_per_node, environ)
    unit, unit_why = unit_of(options, settings, nproc, nnodes_min, nnodes)
    standby = standbys(options.standby, program, settings, nproc, environ)
    if standby and not program.trainer:
        say("holdfast: --standby has no effect on a script: only a trainer's rank can be taken "
            "over; a script's are all started again")
    preload = [m for m in options.preload.split(",") if m and m != "none"]
    if options.preload != "none" and program.kind != "command":
        preload = ["torch", "torch._dynamo", *preload]
        if program.trainer:
            preload.append("holdfast.trainer.loop")
    ignored = ignored_flags(options)
    if ignored:
        say("holdfast: accepted, and without effect here: %s" % ", ".join(ignored))
    if options.ignore_check and not options.reason.strip():
        fail("--ignore-check %s: say why with --reason TEXT; it is written down"
             % options.ignore_check[0])
    if options.reason and not options.ignore_check:
        fail("--reason belongs to --ignore-check NAME, and none is given")
    rendezvous = options.rdzv_endpoint or options.master_addr
    named = naming.meeting_place(
        options.rdzv_endpoint, options.master_addr, options.master_port)
    try:
        name = naming.run_name(options.run, options.rdzv_id, program.target, environ,
                               named if nnodes > 1 else None)
    except ValueError as error:
        fail(str(error))
    return Spec(
        run=name, program=program, nproc=nproc, max_restarts=options.max_restarts,
        log_dir=options.log_dir, tee=options.tee not in ("", "0"), master_port=options.master_port,
        run_id=options.rdzv_id or name, role=options.role, preload=preload,
        start_method=start_method(options, settings),
        standby=standby if program.trainer else 0, grace_s=options.grace,
        log_limit_bytes=options.log_limit << 20, hang_limit_s=options.hang_limit, argv=argv,
        nproc_unset_threads=nproc > 1 and "OMP_NUM_THREADS" not in environ, shown=shown(options),
        ignored_checks=options.ignore_check or [], ignore_reason=options.reason,
        wants_checks=options.check, nnodes=nnodes, nnodes_min=nnodes_min,
        node_rank=options.node_rank, local_addr=options.local_addr, rendezvous=rendezvous,
        goal=goal_of(options, settings, environ, time.time()), unit=unit, unit_why=unit_why,
        mixed=options.allow_mixed, gang_limit_s=options.gang_limit,
    )


def start_method(options: argparse.Namespace, settings: Any) -> str:
    """fork (warm), or spawn (cold): asked for, or because the trainer's device does not live
    through a fork."""
    on_xla = settings is not None and settings.device == "xla"
    return "spawn" if on_xla or options.start_method == "spawn" else "fork"


def node_counts(options: argparse.Namespace) -> Tuple[int, int]:
    """--nnodes as (MIN, MAX)."""
    found = naming.NNODES.fullmatch(options.nnodes)
    few = int(found.group(1)) if found else 0
    many = int(found.group(2) or few) if found else 0
    if not 1 <= few <= many <= NNODES_MAX:
        fail("--nnodes %.40s: a number from 1 to %d, or MIN:MAX" % (options.nnodes, NNODES_MAX))
    if options.standalone and many > 1:
        fail("--standalone is one node, and --nnodes %s more: leave one out" % options.nnodes)
    if options.node_rank >= many > 1:
        fail("--node-rank %d: of --nnodes %s the last is %d"
             % (options.node_rank, options.nnodes, many - 1))
    return few, many


def shown(options: argparse.Namespace) -> Shown:
    """What of the ranks' lines the terminal is to show."""
    kept = re.sub(r"\s", "", options.local_ranks_filter)
    if kept and not RANKS.fullmatch(kept):
        fail("--local-ranks-filter %.60r: give ranks of this node, as in 0,3" % kept)
    return Shown(
        tuple(int(one) for one in kept.split(",") if one),
        streams("--redirects", options.redirects), streams("--tee", options.tee))


def streams(name: str, text: str) -> Dict[int, int]:
    """`3` or `0:1,2:3` as bits by rank, -1 for all."""
    if not text:
        return {}
    if not STREAMS.fullmatch(text):
        fail("%s %.60r: give 0 to 3, or RANK:N with commas between" % (name, text))
    if ":" not in text:
        return {-1: int(text)}
    return {int(rank): int(bits) for rank, _, bits in
            (one.partition(":") for one in text.split(","))}


def ignored_flags(options: argparse.Namespace) -> List[str]:
    """What was asked for, means something, and is not done here."""
    asked = [name for name in IGNORED if getattr(options, name[2:].replace("-", "_")) is not None]
    if options.rdzv_backend in OWN_STORES and options.nnodes != "1":
        say("holdfast: --rdzv-backend %s: the etcd that --rdzv-endpoint names is not used for "
            "it; to have the run's state there, set [store] url = \"etcd://HOST:PORT\" for the "
            "agents (docs/cluster.md)" % options.rdzv_backend)
    return asked + ["--virtual-local-rank"] * options.virtual_local_rank


def program_of(command: str, options: argparse.Namespace, rest: List[str]) -> Program:
    hooks = not options.no_hooks
    if command == "train":
        settings = ["--config", options.config] if options.config else []
        settings += ["--export", options.export] if options.export else []
        return Program("module", "holdfast.trainer", settings + rest, trainer=True)
    if not rest:
        fail("what shall run? holdfast run [flags] SCRIPT ARGS (see holdfast run --help)")
    target = rest[0]
    if options.no_python:
        if options.module:
            fail("-m and --no-python exclude each other")
        return Program("command", target, rest[1:], hooks=False)
    if options.module:
        return Program("module", target, rest[1:], hooks=hooks, tap=options.time_collectives)
    if not os.path.exists(target):
        fail("%s: no such file (from %s)" % (target, os.getcwd()))
    return Program("script", target, rest[1:], hooks=hooks, tap=options.time_collectives)
