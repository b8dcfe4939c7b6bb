"""The commands as data: name, one line of help, an example, arguments, and where each one lives.

Owns the public surface's words.  Nothing here runs a command.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from holdfast.worker import exits

from ..system.arguments import PROG, Parser, number, span

INJECTABLE = ("kill", "stop", "stall", "exception", "hold-gil", "skip-collective")
CONVENTIONS = ("slurm-prolog", "slurm-health", "batch", "k8s")
WIDTH = 80
Configure = Callable[[argparse.ArgumentParser], None]


class Command(NamedTuple):
    name: str
    help: str
    example: str
    place: str  # "module:function" inside this package; "" = handed over whole
    configure: Configure | None = None
    json: bool = True  # a program may read it


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="NAME", help="the run, where several go on")


def _end(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="its name")


def _why(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", nargs="?", help="the node's name (default: this one)")


def _incidents(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("id", nargs="?", metavar="ID", help="one of them, whole (a prefix will do)")
    parser.add_argument("--all", action="store_true", help="every closed one, not the newest alone")
    parser.add_argument("--would-have", action="store_true",
                        help="only those where acting was off: what would have been done")
    parser.add_argument("--refused", action="store_true",
                        help="who asked for what they may not, instead of incidents")
    parser.add_argument("--asked", action="store_true",
                        help="what people and alerts asked for (pause, drain ...) and why, "
                             "instead")
    parser.add_argument("--ack", action="store_true",
                        help="say that you have seen it and see to it; with --reason for others")
    parser.add_argument("--label", choices=("true", "false"),
                        help="say whether it was right: counted in its detector's precision")
    parser.add_argument("--reason", default="", help="of --ack or --label: kept in the journal")
    parser.add_argument("--alerts", action="store_true",
                        help="alerts that were sent here and what became of them, instead")


def _close(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="which (a prefix will do)")
    parser.add_argument("--reason", required=True, help="what was repaired: kept in the journal")
    _no_wait(parser)


def _no_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the answer")


def _jobs(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--team", metavar="NAME", help="this team's alone")
    parser.add_argument("--limit", type=number(int, 1, 1000), default=20, metavar="N",
                        help="how many, the newest first (default %(default)s)")


def _bundle(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("id", metavar="ID", help="of which incident (a prefix will do)")
    parser.add_argument("--to", metavar="FILE", help="default: holdfast-ID.tar.gz, here")
    parser.add_argument("--reason", default="for somebody who helps",
                        help="kept in the journal (default: %(default)s)")


def _drift(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("file", nargs="*", metavar="FILE",
                        help="compare what `holdfast drift --json` said on several nodes, with no "
                             "agent; one or many in a file, or - for stdin")


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="one checkpoint, or a directory of them")


def _carry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("export", "import"))
    parser.add_argument("source", metavar="FROM", help="a checkpoint; for import, a file")
    parser.add_argument("target", metavar="TO", help="*.safetensors or *.pt (a plain state_dict); "
                        "for import, a directory: set init_from to it")


def _promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="one step-*.gen-* directory")
    parser.add_argument("target", metavar="DEST", help="what it becomes; not there yet")


def _parity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN_A", help="what is compared with: the run's "
                        "checkpoint.dir, its work_dir, or one file of its evaluations")
    parser.add_argument("second", metavar="RUN_B", help="what is judged")
    parser.add_argument("--metric", action="append", metavar="NAME",
                        help="mrr@K or recall@K (default mrr@10); may be given again")
    parser.add_argument("--within", default="0.1%", metavar="MARGIN",
                        help="a part of RUN_A's value as 0.1%%, or a difference as 0.001 "
                             "(default 0.1%%)")
    parser.add_argument("--task", default="", metavar="NAME",
                        help="whose pairs, where data has several tasks (default: the first)")
    parser.add_argument("--step", type=number(int, 0, 10**18), metavar="N",
                        help="the evaluation of that step (default: the newest)")
    parser.add_argument("--seed", type=number(int, 0, 2**63), default=0,
                        help="of what is drawn (default 0): the same gives the same")


def _peers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tests between nodes (docs/checks.md)")
    group.add_argument("--peers", default="", metavar="LIST",
                       help="start the same on each of these nodes: a,b,gpu[1-4], a=10.0.0.1, or "
                            "`slurm` for the job's")
    group.add_argument("--hostfile", default="", metavar="FILE", help="one node a line instead")
    group.add_argument("--as", dest="own", default="", metavar="NAME",
                       help="which of them this node is (default: by name or address)")
    group.add_argument("--token-file", default="", metavar="FILE",
                       help="what every node proves to know (or HOLDFAST_CHECK_TOKEN)")
    group.add_argument("--port", type=number(int, 1, 65535), default=9857, metavar="PORT",
                       help="where the first of them listens, at its own address (%(default)s)")
    group.add_argument("--join-wait", type=number(float, 1, 3600), default=60.0,
                       metavar="SECONDS", help="for the others to come (%(default)s)")
    group.add_argument("--deadline", type=number(float, 0.5, 600), default=15.0,
                       metavar="SECONDS", help="of one test between nodes (%(default)s)")
    group.add_argument("--group-size", type=number(int, 2, 4096), default=0, metavar="N",
                       help="measure within partition groups of N nodes, and across them")
    group.add_argument("--rail", action="store_true",
                       help="measure each rail: of all nodes the first accelerators, ...")


def _check(parser: argparse.ArgumentParser) -> None:
    _peers(parser)
    parser.add_argument("name", nargs="*", metavar="NAME",
                        help="which checks (default: those that are made before a job)")
    parser.add_argument("--list", action="store_true", help="what can be checked, and how long")
    parser.add_argument("--history", action="store_true",
                        help="what these checks, or all, said before; makes none")
    parser.add_argument("--for", dest="convention", choices=CONVENTIONS,
                        help="speak this scheduler's exit status, and say one line")
    parser.add_argument("--max-age", type=number(float, 0, 86400), metavar="SECONDS",
                        help="take a verdict that is no older (default 0; with --for 300)")
    parser.add_argument("--force", action="store_true", help="even while a run trains here")
    parser.add_argument("--warm", action="store_true",
                        help="compile the tests' graphs for XLA devices, once for each SDK")
    parser.add_argument("--path", action="append", default=[], metavar="DIR",
                        help="where checkpoints go: write there and read back")
    parser.add_argument("--python", default="", metavar="FILE",
                        help="the interpreter that has torch")
    parser.add_argument("--profile", metavar="NAME|FILE", help="take the node for such a machine")
    parser.add_argument("--sizes", default="", metavar="LIST",
                        help="of the collective tests, as 64K,1M,1G")
    parser.add_argument("--ranks", type=number(int, 2, 256), metavar="N",
                        help="of the collective tests, with --peers on each node (default: one a "
                             "device; on processors 2, with --peers 1)")
    parser.add_argument("--agent", action="store_true",
                        help="have this node's agent make them, beside its runs; with --reason")
    parser.add_argument("--reason", default="", help="of --agent: kept in the journal")
    parser.add_argument("--table", action="store_true",
                        help="show the collective tests' tables, as with their name")
    parser.add_argument("--config", metavar="FILE", help="default: /etc/holdfast/agent.toml")


def _diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", nargs="+", metavar="LOG",
                        help="one file a rank or all in one; .gz, a folder of them, or - for stdin")
    parser.add_argument("--config", metavar="FILE",
                        help="whose own signatures to use (default: /etc/holdfast/agent.toml)")


def _inject(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("fault", choices=INJECTABLE, help="what to do to the rank")
    parser.add_argument("--rank", type=number(int, 0, 1 << 20), default=0,
                        help="to which rank (default 0)")
    parser.add_argument("--seconds", type=number(float, 0, 86400),
                        help="how long a stall or a held GIL lasts")
    parser.add_argument("--reason", default="injected by hand",
                        help="kept in the journal (default: %(default)s)")


def _node(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("node", nargs=nargs, help="its name, as `holdfast status` has it")
    parser.add_argument("--reason", required=True, help="kept in the journal and with the node")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the answer")


def _drain(parser: argparse.ArgumentParser) -> None:
    _node(parser, nargs="?")
    parser.add_argument("--run", metavar="NAME",
                        help="a run instead: its ranks save, and it ends with 75")
    parser.add_argument("--within", type=number(float, 1, 86400), default=660.0, metavar="S",
                        help="how long to wait for its end, in seconds (default 660)")


def _explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fault", nargs="?", help="its name; without one, all are listed")


def _config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("check", "show"))
    parser.add_argument("--config", metavar="FILE", help="default: /etc/holdfast/agent.toml")


def _pause(parser: argparse.ArgumentParser) -> None:
    _hand(parser)
    parser.add_argument("--for", dest="for_s", type=span, default=0.0, metavar="TIME",
                        help="resume by itself after 30m, 2h or 3d (default: not)")


def _restart(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--rank", type=number(int, 0, 1 << 20),
                        help="because of this rank (default: none in particular)")
    parser.add_argument("--reason", required=True, help="kept in the journal")
    _no_wait(parser)


def _hand(parser: argparse.ArgumentParser) -> None:
    _run(parser)
    parser.add_argument("--node", metavar="NAME", help="a whole node instead of a run")
    parser.add_argument("--fleet", action="store_true",
                        help="every node of the store (without one: this node) instead of a run")
    parser.add_argument("--reason", required=True, help="kept in the journal")
    _no_wait(parser)


def _store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show", "seed", "forget"), help=(
        "show: its members and whose cluster it holds; seed: make an empty one this node's cluster "
        "again; forget: have this node join the cluster that is there"))
    parser.add_argument("--config", metavar="FILE",
                        help="the node agent's (default: /etc/holdfast/agent.toml)")


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE",
                        help="the node agent's (default: /etc/holdfast/agent.toml)")


def _dashboards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("render", "push"))
    parser.add_argument("--to", metavar="DIR",
                        help="render: write holdfast-alerts.yml there, samples for Prometheus, "
                             "Alertmanager and Grafana, and the dashboards, and make DIR (default: "
                             "rules to standard output)")
    parser.add_argument("--runbook-base", metavar="URL",
                        help="address below which people read the runbooks (default: the first "
                             "agent that answers, by http; `https://` alone: the same by TLS)")
    group = parser.add_argument_group("push (docs/dashboards.md)")
    group.add_argument("--url", metavar="URL", help="Grafana's address")
    group.add_argument("--token-file", metavar="FILE",
                       help="a service account's token, in a file that others may not read")
    group.add_argument("--folder", default="", metavar="NAME",
                       help="its title or uid; made where there is none (default: where a "
                            "dashboard is, else Holdfast)")
    group.add_argument("--datasource", default="", metavar="NAME=UID",
                       help="which of Grafana's data sources is `prometheus` (default: the only "
                            "one of that type, or the default one)")
    group.add_argument("--dry-run", action="store_true", help="say what would change, and end")
    group.add_argument("--diff", action="store_true", help="show what differs, line by line")


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=number(int, 1, 256), default=2, help="how many (default 2)")
    parser.add_argument("--steps", type=number(int, 1, 10_000_000), default=200,
                        help="how many steps (default 200)")
    parser.add_argument("--keep", action="store_true", help="keep logs and checkpoints at the end")


COMMANDS = (
    Command("run", "run a torchrun script: same flags, same environment",
            "holdfast run --standalone --nproc-per-node 2 train.py --epochs 3", "", json=False),
    Command("train", "the built-in trainer", "holdfast train --config train.toml steps=500", "",
            json=False),
    Command("accept", "let your `holdfast run --on` on other nodes start launchers here",
            "holdfast accept", "accept:accept", json=False),
    Command("end", "end a run of yours, on every node", "holdfast end m5", "start_on:end", _end),
    Command("agent", "the node's agent", "holdfast agent --config /etc/holdfast/agent.toml", "",
            json=False),
    Command("status", "is it training, and what must I do?", "holdfast status --run demo",
            "live:status", _run),
    Command("why", "what is wrong with a node, and what that rests on", "holdfast why node-a",
            "live:why", _why),
    Command("incidents", "what happened, who was to blame, what it cost",
            "holdfast incidents --all\n"
            "         holdfast incidents i-16 --label false --reason 'planned work'",
            "control:incidents", _incidents),
    Command("bundle", "an incident for somebody who helps: a tar without secrets",
            "holdfast bundle m5-g3-rank_hung-r1-2 --to /tmp/m5.tar.gz", "bundle:bundle", _bundle),
    Command("ledger", "where the node's seconds went", "holdfast ledger", "live:ledger", _run),
    Command("jobs", "attempts of runs: whose, how each ended, and what it cost",
            "holdfast jobs --team search", "jobs:jobs", _jobs),
    Command("drift", "which nodes of a run differ from most, and in what",
            "holdfast drift --run m5\n"
            "         srun -l --ntasks-per-node=1 holdfast drift --json | holdfast drift -",
            "drift:drift", _drift),
    Command("verify", "prove a checkpoint by its digests", "holdfast verify runs/m5/checkpoints",
            "checkpoint:verify", _verify),
    Command("parity", "are two runs equally good on their held-out pairs?",
            "holdfast parity runs/a runs/b --metric mrr@10 --within 0.1%", "parity:parity",
            _parity),
    Command("checkpoint", "weights to safetensors or a torch state_dict, and from them",
            "holdfast checkpoint export ckpt/step-000000200.gen-1 m5.safetensors\n"
            "         holdfast checkpoint import m5.safetensors weights", "checkpoint:carry",
            _carry),
    Command("promote", "make a checkpoint the one that is served, if all is proven",
            "holdfast promote runs/b/checkpoints/step-000000200.gen-1 models/m5-7",
            "checkpoint:promote", _promote),
    Command("check", "prove this node before training: devices, memory, collectives",
            "holdfast check --path /checkpoints\n"
            "         holdfast check collectives --sizes 64K,1M,64M", "check:check", _check),
    Command("diagnose", "what killed a run, from its logs alone",
            "holdfast diagnose logs/rank*.log", "diagnose:diagnose", _diagnose),
    Command("inject", "cause a fault in your own run", "holdfast inject kill --rank 1",
            "control:inject", _inject),
    Command("explain", "a fault's runbook, and what would happen now",
            "holdfast explain rank_hung", "policy:explain", _explain),
    Command("doctor", "what this host lacks, and what that costs", "holdfast doctor",
            "doctor:doctor", _doctor),
    Command("store", "what many nodes agree through: look at it, or seed it anew",
            "holdfast store show\n"
            "         holdfast store seed      # after etcd lost everything", "store:store",
            _store),
    Command("config", "check the configuration, or show the one in force",
            "holdfast config check --config agent.toml", "policy:config", _config),
    Command("pause", "keep Holdfast's hands off a run, a node or the fleet",
            "holdfast pause --run m5 --for 2h --reason 'debugging rank 3'", "control:pause",
            _pause),
    Command("resume", "let Holdfast act again", "holdfast resume --run m5 --reason done",
            "control:resume", _hand),
    Command("restart", "start a run's ranks again, from its newest proven state",
            "holdfast restart --run m5 --reason 'new driver'", "control:restart", _restart),
    Command("exclude", "keep every run off a node",
            "holdfast exclude node-a --reason 'loose cable'", "control:exclude", _node),
    Command("drain", "have a node's ranks saved and moved, and keep runs off it",
            "holdfast drain node-a --reason 'new disks at noon'", "control:drain", _drain),
    Command("release", "let runs use an excluded or drained node again",
            "holdfast release node-a --reason 'cable changed'", "control:release", _node),
    Command("close", "say that what the kernel told of is repaired",
            "holdfast close node-a-nic_error --reason 'cable changed'", "control:close", _close),
    Command("dashboards", "write alert rules for Prometheus, and dashboards for Grafana",
            "holdfast dashboards render --to /etc/prometheus\n"
            "         holdfast dashboards push --url http://grafana:3000 --token-file FILE",
            "dashboards:dashboards", _dashboards, json=False),
    Command("simulate", "the real policy on a virtual cluster", "holdfast simulate --help", "",
            json=False),
    Command("demo", "train, lose ranks three ways, come back, show the bill (1 min)",
            "holdfast demo", "demo:demo", _demo, json=False),
)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # their indent is not counted for them
            self._action_max_length += 2


def _format(prog: str) -> argparse.HelpFormatter:
    return _Formatter(prog, max_help_position=20, width=WIDTH)


def render_exit_docs() -> str:
    """docs/exit-codes.md."""
    lines = ["# Exit codes", "", *textwrap.wrap(
        "Generated from worker/exits.py; do not edit. Every command takes its codes from that "
        "table, and `--help` of each shows its rows.", 100,
    )]
    shared: dict[tuple[exits.Row, ...], list[str]] = {}
    for command in COMMANDS:
        shared.setdefault(exits.EXITS[command.name], []).append(f"`holdfast {command.name}`")
    for title, rows in [
        *((", ".join(names), rows) for rows, names in shared.items()),
        ("Every command", exits.EVERYWHERE),
    ]:
        lines += ["", f"## {title}", "", "| code | means |", "|---|---|"]
        lines += [f"| {one.code} | {one.meaning} |" for one in rows]
    return "\n".join(lines) + "\n"


def build() -> argparse.ArgumentParser:
    """The whole parser, without importing any command."""
    parser = Parser(
        prog=PROG, formatter_class=_format, description="Keeps training runs going.",
        epilog="`holdfast COMMAND --help` shows an example of each.",
    )
    parser.add_argument("--version", action="store_const", const="version", dest="command",
                        help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name, help=command.help, description=command.help,
            epilog=f"example: {command.example}\n\n{exits.told(command.name)}",
            formatter_class=_format,
        )
        if command.json:
            one.add_argument("--json", action="store_true", help="for a program to read")
        if command.configure:
            command.configure(one)
    return parser


def load(name: str) -> Callable[[argparse.Namespace], int]:
    """The function behind a command; imports its module only now."""
    if name == "version":
        return _version
    place = next(command.place for command in COMMANDS if command.name == name)
    module, function = place.split(":")
    found: Callable[[argparse.Namespace], int] = getattr(
        import_module(f".{module}", __package__), function
    )
    return found


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"holdfast {version('holdfast')}")
    except PackageNotFoundError:  # run from a checkout
        print("holdfast (not installed)")
    return 0
