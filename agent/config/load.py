"""Reads the agent's configuration: TOML files, every error at once, the origin of each value.

Owns loading and checking.  The settings themselves are in settings.py.  Bad input changes nothing
and is named by file, key and what to set.
"""

from __future__ import annotations

import importlib
import ipaddress
import itertools
import os
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from holdfast.worker import exits, toml_text
from holdfast.worker.time_limit import TooSlow, or_leave

from ..checks import table
from ..core import actions
from ..core.model import MAY_ACT, PEER_TESTS
from ..system.regular import read_regular
from . import runbooks, store
from .runbooks import InForce
from .settings import PEERS_PORT, Config
from .tls import server_context
from .tokens import check_listening, usual_file

FILE_MAX_BYTES = 1 << 20
CONF_D_MAX = 100
READ_S = 30.0  # of waiting for the disks on which configuration and runbooks lie
LISTENERS = ("agent.listen", "agent.metrics_listen", "cluster.listen")
ADDRESSES = (*LISTENERS, "collectors.ec2_metadata")
PORT_MAX = 65535
EXAMPLE_ADDRESS = "127.0.0.1:9855"  # for an address that is empty by default
TABLE, EXAMPLE_TABLE = "table of short texts for any of", '{ rack = "r7" }'
DEFAULT_FILE = Path("/etc/holdfast/agent.toml")

# (shorter, longer, why): checked when the configuration is loaded
LATTICE = (
    ("agent.tick_s", "agent.fast_s", "a collector cannot run more often than the agent ticks"),
    ("agent.fast_s", "agent.slow_s", "the slow set is the slower one"),
    ("agent.tick_s", "detect.suspect_floor_s", "a stall is noticed on a tick"),
    ("collectors.deadline_s", "agent.slow_s", "a collector must be given up before it is due"),
    ("detect.suspect_floor_s", "detect.script_floor_s", "suspicion comes before action"),
    ("detect.odds", "detect.odds_active", "activity speaks for waiting longer"),
    ("detect.script_floor_s", "detect.quiet_limit_s", "a quiet phase may be quiet for longer"),
    ("detect.script_floor_s", "detect.compile_limit_s", "a compile may be quiet for longer"),
    ("detect.park_wait_s", "detect.stop_grace_s", "survivors park before ranks are killed"),
    ("agent.tick_s", "detect.lease_s", "a lease is renewed on ticks"),
)


class ConfigError(Exception):
    """The configuration cannot be used; `errors` has one line for each thing to change, `config`
    what is right of it, with the defaults of the rest."""

    def __init__(self, errors: list[str], config: Config | None = None) -> None:
        super().__init__("\n".join(errors))
        self.errors, self.config = errors, config


class Loaded(NamedTuple):
    """A configuration with the origin of each value: {"agent.tick_s": "/etc/... "}."""

    config: Config
    origins: dict[str, str]
    signatures: tuple[dict[str, Any], ...] = ()  # the operator's own, as written


def load(
    file: Path | None, overrides: Mapping[str, tuple[object, str]] | None = None,
    serves: bool = False,
) -> Loaded:
    """Reads FILE and conf.d/*.toml beside it (sorted, a later file wins), then the overrides
    {"agent.state_dir": (value, origin)}.  Raises ConfigError with every error found.  `serves`:
    also what stands in the way of page and API, which only the agent's own user can say."""
    errors: list[str] = []
    values: dict[str, tuple[Any, str]] = {}
    signatures: list[tuple[dict[str, Any], str]] = []
    for path in _files(file, errors):
        for key, value in _read(path, errors):
            if key == "signature":
                rows = logrules().check(value, str(path), errors)
                signatures += [(row, str(path)) for row in rows]
            elif _is_known(key, value, str(path), errors):
                values[key] = (value, str(path))
    for key, (value, origin) in (overrides or {}).items():
        if _is_known(key, value, origin, errors):
            values[key] = (value, origin)
    if "api.tokens_file" not in values and (tokens := usual_file(file, os.environ)):
        values["api.tokens_file"] = tokens, tokens
    config = _build(values)
    errors.extend(_check_lattice(config, values) + _check_hidden(config, values))
    errors.extend(_check_ports(config, values))
    try:
        table.limits_of(config.checks.limits)
    except ValueError as error:
        errors.append(f"{_origin('checks.limits', values)}: {error}")
    if config.checks.profile:
        from ..checks import profiles  # most have none, and every command reads a configuration

        try:
            profiles.chosen(config.checks.profile)
        except ValueError as error:
            errors.append(f"{_origin('checks.profile', values)}: checks.profile: {error}")
    named = [("actions.allow", "action", config.actions.allow, actions.allowable()),
             ("detect.act", "detector that may act", config.detect.act, MAY_ACT),
             ("checks.gate", "check", config.checks.gate, table.gate_words()),
             ("checks.between", "check of a gap", config.checks.between, table.gap_words()),
             ("checks.peers", "test between nodes", config.checks.peers, PEER_TESTS)]
    if config.collectors.disable:
        named.append(("collectors.disable", "collector", config.collectors.disable, collectors()))
    for key, what, words, known in named:
        where = f"{_origin(key, values)}: {key}"
        errors.extend(f"{where}: {word!r} is no {what}: {_nearest(word, known)}"
                      for word in words if word not in known)
    if signatures:
        logrules().check_together(signatures, errors)
    lasting = [one for one in config.actions.allow if one in actions.root_verbs()]
    if lasting and not config.evidence.store:
        errors.append(
            f"{_origin('actions.allow', values)}: evidence.store is empty, but actions.allow names "
            f"{lasting[0]}: set a directory that outlives this node")
    store.check(config.store, lambda key: _origin(key, values), errors, serves)
    if serves:
        _check_served(config, values, errors)
    if errors:
        raise ConfigError(errors, config)
    origins = {key: _origin(key, values) for key, _ in flatten(config)}
    return Loaded(config, origins, tuple(row for row, _ in signatures))


def load_all(
    file: Path | None, overrides: Mapping[str, tuple[object, str]] | None = None,
) -> tuple[Loaded, InForce]:
    """As `load` for an agent that serves, with the runbooks in force.  Raises ConfigError with the
    errors of both: whoever mends the one would only then learn of the other."""
    errors: list[str] = []
    loaded, books = None, None
    try:
        loaded = load(file, overrides, serves=True)
        config = loaded.config
    except ConfigError as error:
        errors += error.errors
        config = error.config or Config()
    try:
        books = runbooks.load_in_force(Path(config.runbooks.directory))
    except runbooks.RunbookError as error:
        errors += error.errors
    except OSError as error:
        errors.append(f"{error.filename}: {error.strerror}: set runbooks.directory to one that "
                      f"uid {os.getuid()} may read")
    if loaded is None or books is None:
        raise ConfigError(errors)
    return loaded, books


def within_limit(
    command: str, file: Path | None, code: int = exits.FAILED
) -> AbstractContextManager[None]:
    """Ends a process that only begins where the reading does not come back: a mount that hangs
    holds whoever asks it.  Not with 78: it may answer later."""
    return or_leave(READ_S, (
        f"{command}: no configuration within {READ_S:g} s: a file system does not answer: see to "
        f"the mounts of {file or 'the defaults'}, of conf.d beside it, of what it names and of "
        "runbooks.directory"), code)


def collectors() -> tuple[str, ...]:
    """Names of all collectors, sorted.  A costly import, needed where one is switched off."""
    return tuple(sorted(one.name for one in importlib.import_module("holdfast.collectors").ALL))


def flatten(config: Config) -> list[tuple[str, object]]:
    """Every setting as ("section.key", value)."""
    return [
        (f"{section}.{key}", getattr(getattr(config, section), key))
        for section in config.__struct_fields__
        for key in getattr(config, section).__struct_fields__]


def describe(key: str) -> tuple[str, str]:
    """(type and bounds, description) of "section.key", for people."""
    section, name = key.split(".", 1)
    hint = get_type_hints(type(getattr(Config(), section)), include_extras=True)[name]
    metas = _metas(hint)
    text = next((meta.description for meta in reversed(metas) if meta.description), "")
    bounds = [
        f"{sign} {getattr(meta, field):g}"
        for meta in metas
        for field, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(meta, field) is not None
    ]
    base = hint
    while hasattr(base, "__metadata__"):
        base = base.__origin__
    choices = get_args(base) if get_origin(base) is Literal else ()
    if choices:
        return " or ".join(f"`{one}`" for one in choices), text
    form = _form(metas)
    if form:
        return form, text
    if get_origin(base) is dict:
        return f"{TABLE} {', '.join(get_args(get_args(base)[0]))}", text
    kind = {float: "number", int: "whole number", str: "text", bool: "true or false"}.get(
        base, "list of texts")
    return " ".join([kind, " and ".join(bounds)]).strip(), text


# The variables that commands read.  `holdfast run --help` lists them as well.
ENVIRONMENT = (
    ("HOLDFAST_RUNTIME_DIR", "`holdfast run`, `train`: the run has a private agent, whose sockets "
     "lie below DIR/NAME; the node's agent is passed by, which is said. Other commands: ask the "
     "agents in DIR and below it, and no other. `holdfast agent`: as `agent.runtime_dir`"),
    ("HOLDFAST_STATE_DIR", "where private agents keep journal and store, in `runs/NAME`; by "
     "default `~/.local/state/holdfast`. `holdfast agent`: as `agent.state_dir`"),
    ("HOLDFAST_CONFIG", "the configuration of private agents; by default none is read"),
    ("HOLDFAST_AGENT_USER", "name or uid that the node's agent runs as; by default `holdfast`. A "
     "run hands itself to root's, its own user's and this one's agent, and to no other"),
    ("HOLDFAST_ADDR", "`holdfast run`, `train`: the address by which other nodes reach this one, "
     "as `--local-addr`"),
    ("HOLDFAST_TEAM", "whose job it is, as `--team`; else SLURM_JOB_ACCOUNT"),
    ("HOLDFAST_QUEUED_AT", "when the job was queued, in seconds since 1970, for its time in the "
     "queue"),
)


def render_config_docs() -> str:
    """docs/config.md."""
    lines = [
        "# Configuration of the agent", "",
        "Generated from agent/config/settings.py; do not edit. `holdfast agent --config F` reads",
        "F, then every `conf.d/*.toml` beside it in order of their names; a later value wins. An",
        "unknown key is an error. All errors are said at once, each with file, key and what to",
        "set. `holdfast config check` checks, `holdfast config show` shows each value and its",
        "origin.",
    ]
    config = Config()
    for section in config.__struct_fields__:
        part = getattr(config, section)
        lines += ["", f"## [{section}]", "", (type(part).__doc__ or "").strip(), ""]
        lines += ["| key | type | default | what it is for |", "|---|---|---|---|"]
        for key in part.__struct_fields__:
            kind, text = describe(f"{section}.{key}")
            default = msgspec.json.encode(getattr(part, key)).decode()
            lines.append(f"| `{key}` | {kind} | `{default}` | {text} |")
    lines += ["", "## Environment", "", "| variable | what it decides |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in ENVIRONMENT]
    lines += ["", "## Names of collectors", "", ", ".join(f"`{one}`" for one in collectors())]
    lines += ["", "## What must be shorter than what", ""]
    lines += [f"* `{short}` <= `{long}`: {why}" for short, long, why in LATTICE]
    return "\n".join(lines) + "\n"


def _metas(hint: Any) -> list[msgspec.Meta]:
    """The constraints of an annotated type, innermost first."""
    found: list[msgspec.Meta] = []
    while hasattr(hint, "__metadata__"):
        found = [one for one in hint.__metadata__ if isinstance(one, msgspec.Meta)] + found
        hint = hint.__origin__
    return found


def _form(metas: list[msgspec.Meta]) -> str:
    """What a value with a pattern looks like, in words; "" for any other."""
    return next((meta.title or "" for meta in metas if meta.pattern), "")


def _files(file: Path | None, errors: list[str]) -> list[Path]:
    if file is None:
        return []
    try:
        if not file.is_file():
            what = "this is no file" if file.exists() else "no such file"
            errors.append(f"{file}: {what}: create it or give another with --config")
            return []
    except OSError as error:  # a folder above it is closed to this user
        errors.append(f"{file}: {error.strerror}: give another with --config")
        return []
    extra = sorted((file.parent / "conf.d").glob("*.toml"))
    if len(extra) > CONF_D_MAX:
        errors.append(f"{file.parent / 'conf.d'}: more than {CONF_D_MAX} files: join some")
    return [file, *extra[:CONF_D_MAX]]


def _read(path: Path, errors: list[str]) -> list[tuple[str, Any]]:
    """One file as ("section.key", value) pairs; sections that are no tables as ("section", v)."""
    try:
        text = read_regular(path, FILE_MAX_BYTES)
    except IsADirectoryError:
        errors.append(f"{path}: is a folder: take it away, or give it another ending")
        return []
    except OSError as error:
        errors.append(f"{path}: {error.strerror}: make it readable for uid {os.getuid()}")
        return []
    except ValueError as error:
        errors.append(f"{path}: {error}")
        return []
    try:
        content = toml_text.parse(tomllib.loads, text)
    except TooSlow as error:
        errors.append(f"{path}: {error} to read: shorten its keys and tables")
        return []
    except ValueError as error:
        errors.append(f"{path}: no valid TOML: {error}")
        return []
    pairs: list[tuple[str, Any]] = []
    for section, keys in content.items():
        if isinstance(keys, dict) and section != "signature":
            pairs.extend((f"{section}.{key}", value) for key, value in keys.items())
        else:
            pairs.append((section, keys))
    return pairs


def _is_known(key: str, value: Any, origin: str, errors: list[str]) -> bool:
    section, _, name = key.partition(".")
    sections = Config.__struct_fields__
    if section not in sections:
        errors.append(f"{origin}: [{section}] is unknown: {_nearest(section, sections)}")
        return False
    fields = getattr(Config(), section).__struct_fields__
    if not name:
        errors.append(f"{origin}: {section} is a section: write its keys below [{section}]")
        return False
    if name not in fields:
        errors.append(f"{origin}: {key} is unknown: {_nearest(name, fields)}")
        return False
    hint = get_type_hints(type(getattr(Config(), section)), include_extras=True)[name]
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        kind, _ = describe(key)
        default = msgspec.json.encode(getattr(getattr(Config(), section), name)).decode()
        wrong, example = f"{error}: ", default
        if _form(_metas(hint)):
            wrong, example = f"{value!r}: "[:300], default.strip('"') or EXAMPLE_ADDRESS
        elif kind.startswith(TABLE):
            example = EXAMPLE_TABLE
        errors.append(f"{origin}: {key}: {wrong}set {kind}, for example {example}")
        return False
    return True


def logrules() -> ModuleType:
    """Imported where an operator has signatures of their own: it brings the whole catalogue."""
    return importlib.import_module("holdfast.agent.logs.operator_signatures")


def _nearest(word: str, known: tuple[str, ...]) -> str:
    import difflib  # needed for errors alone

    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"set one of {', '.join(known)}"


def _build(values: Mapping[str, tuple[Any, str]]) -> Config:
    tables: dict[str, dict[str, Any]] = {}
    for key, (value, _) in values.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    return msgspec.convert(tables, Config)  # each value was checked before


def _check_lattice(config: Config, values: Mapping[str, tuple[Any, str]]) -> list[str]:
    have: dict[str, Any] = dict(flatten(config))
    return [
        f"{_origin(short if short in values else long, values)}: {short} = {have[short]:g} is "
        f"longer than {long} = {have[long]:g}, but {why}: raise {long} or lower {short}"
        for short, long, why in LATTICE
        if have[short] > have[long]
    ]


def _check_ports(config: Config, values: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Addresses whose port no socket takes, and listeners of which one would take the other's."""
    found = {key: str(address) for key, address in flatten(config) if key in ADDRESSES and address}
    errors = [
        f"{_origin(key, values)}: {key} = {address!r}: set a port of at most {PORT_MAX}"
        for key, address in found.items() if _port(address) > PORT_MAX]
    if _is_unspecified(config.cluster.listen):
        errors.append(
            f"{_origin('cluster.listen', values)}: cluster.listen = {config.cluster.listen!r} is "
            "no address at which the other agents reach this one: set this node's own address")
    listeners = {key: found[key] for key in LISTENERS if key in found}
    named = {key: f"{key} = {address!r}" for key, address in listeners.items()}
    if config.store.url and not config.cluster.listen:
        listeners["cluster.listen"] = f":{PEERS_PORT}"  # at the address that routes to the store
        named["cluster.listen"] = f"the other agents where cluster.listen is empty ({PEERS_PORT})"
    for first, second in itertools.combinations(listeners, 2):
        if _meet(listeners[first], listeners[second]):
            wrong, other = (second, first) if found.get(second) else (first, second)
            errors.append(f"{_origin(wrong, values)}: {named[wrong]} is the port of "
                          f"{named[other]}: set another port")
    return errors


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None where it is a name, or only a port."""
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return None


def _is_unspecified(address: str) -> bool:
    found = _ip(address)
    return found is not None and found.is_unspecified


def _meet(first: str, second: str) -> bool:
    """Whether these cannot both be listened on: one port of one address, of all, or of a name."""
    if _port(first) != _port(second) or not _port(first):
        return False
    one, other = _ip(first), _ip(second)
    if one is None or other is None:
        return True
    return one.version == other.version and (
        one == other or one.is_unspecified or other.is_unspecified)


def _check_served(
    config: Config, values: Mapping[str, tuple[Any, str]], errors: list[str]
) -> None:
    """The files that page, API and the talk between agents begin with."""
    server_context(config.api, errors)
    check_listening(config.agent.listen, config.api.tokens_file, bool(config.api.tls_client_ca),
                    _origin("agent.listen", values), errors)
    if config.store.url and config.cluster.token_file:
        try:
            store.read_password(config.cluster.token_file, "cluster.token_file")
        except ValueError as error:
            errors.append(f"{_origin('cluster.token_file', values)}: cluster.token_file: {error}")


def _check_hidden(config: Config, values: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Words of agent.metrics_hide that hide nothing, or too much."""
    if not config.agent.metrics_hide:
        return []
    from ..metrics import names, selection  # costly, needed where something is hidden alone

    origin = _origin("agent.metrics_hide", values)
    found = selection.wrong_with(config.agent.metrics_hide, names.known())
    return [f"{origin}: agent.metrics_hide: {wrong}" for wrong in found]


def _origin(key: str, values: Mapping[str, tuple[Any, str]]) -> str:
    return values[key][1] if key in values else "default"
