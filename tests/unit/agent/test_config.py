"""Configuration: every error at once, each with file, key and what to set."""

from __future__ import annotations

import asyncio
import os
import tomllib
from pathlib import Path

import msgspec
import pytest
from waiting import until

from holdfast.agent.cli import policy
from holdfast.agent.config.load import (
    LATTICE,
    ConfigError,
    describe,
    flatten,
    load,
    render_config_docs,
)
from holdfast.agent.config.settings import Config, Detect
from holdfast.agent.core.model import Settings

ROOT = Path(__file__).resolve().parents[3]


def the_only_error(file: Path, text: str) -> str:
    """What is wrong with a file that holds this text; the file itself is named before it."""
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    (error,) = caught.value.errors
    assert error.startswith(f"{file}: ")
    return error


def test_defaults_are_valid_and_are_the_cores_defaults():
    loaded = load(None)
    assert loaded.config == Config()
    gate = loaded.config.checks.core_settings()
    assert loaded.config.core_settings() == Settings(gate=gate)
    assert {"devices", "paths"} < set(gate.names) < set(gate.full) >= {"tensor"}
    assert set(loaded.origins.values()) == {"default"}
    known = set(Settings.__struct_fields__)
    assert set(Detect.__struct_fields__) == known - {
        "allow", "alone", "single_node", "gate", "store_node"}


def test_conf_d_wins_in_order_and_origins_are_kept(tmp_path):
    main = tmp_path / "agent.toml"
    main.write_text('[agent]\ntick_s = 0.5\nlisten = "127.0.0.1:1234"\n[detect]\nodds = 2\n')
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10-a.toml").write_text("[detect]\nodds = 4\nodds_active = 12\n")
    (tmp_path / "conf.d" / "20-b.toml").write_text("[detect]\nodds = 5\n")
    loaded = load(main, {"agent.state_dir": ("/tmp/x", "command line")})
    assert loaded.config.agent.tick_s == 0.5 and loaded.config.detect.odds == 5.0
    assert loaded.config.agent.state_dir == "/tmp/x"
    assert loaded.origins["agent.tick_s"] == str(main)
    assert loaded.origins["detect.odds"].endswith("20-b.toml")
    assert loaded.origins["detect.odds_active"].endswith("10-a.toml")
    assert loaded.origins["agent.state_dir"] == "command line"
    assert loaded.origins["agent.slow_s"] == "default"
    assert len(flatten(loaded.config)) == len(loaded.origins)


def test_all_errors_at_once(tmp_path):
    main = tmp_path / "agent.toml"
    main.write_text(
        'tick = 1\n[agent]\ntick_s = "fast"\nlissten = "x"\nlisten = "nonsense"\n'
        '[detekt]\nodds = 3\n[actions]\nallow = ["reboot_nodes"]\n[detect]\nact = "hang"\n'
    )
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "bad.toml").write_text("[agent\n")
    (tmp_path / "conf.d" / "worse.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as caught:
        load(main)
    text = str(caught.value)
    for part in (
        "agent.toml: [tick] is unknown", "agent.tick_s: Expected `float`",
        "agent.lissten is unknown: did you mean listen?", "agent.listen: 'nonsense': set HOST:PORT",
        "[detekt] is unknown: did you mean detect?", "'reboot_nodes' is no action",
        "detect.act: Expected `array`", "bad.toml: no valid TOML", "worse.toml: no valid TOML",
    ):
        assert part in text, part
    assert len(caught.value.errors) == 9
    assert all(": " in line for line in caught.value.errors)


@pytest.mark.parametrize(("text", "said"), [
    ('[collectors]\ndisable = ["nvidai"]', "collectors.disable: 'nvidai' is no collector: did you "
     "mean nvidia?"),
    ('[collectors]\ndisable = ["xyz"]', "'xyz' is no collector: set one of amd, cgroups, clock"),
    ('[checks]\npeers = ["link"]', "checks.peers: 'link' is no test between nodes: did you mean "
     "links?"),
    ('[detect]\nact = ["ended", "hagn"]', "detect.act: 'hagn' is no detector that may act: did "
     "you mean hang?"),
    ('[agent]\nlisten = "127.0.0.1:99999"', "agent.listen = '127.0.0.1:99999': set a port of at "
     "most 65535"),
    ('[agent]\nmetrics_listen = "[::]:65536"', "agent.metrics_listen = '[::]:65536'"),
    ('[cost]\ncurrency = "euro"', "cost.currency: 'euro': set three capital letters, for example "
     "USD"),
    ('[collectors]\nec2_metadata = "127.0.0.1:70000"', "collectors.ec2_metadata = "),
    ('[cluster]\nlabels = { rak = "r7" }', "cluster.labels: Invalid enum value 'rak' - at `key` in "
     "`$`: set table of short texts for any of efa_group, rack, rail, nvlink_domain, model, for "
     'example { rack = "r7" }'),
    ('[cluster.labels]\nrack = "r7\\n"', "cluster.labels: Expected `str` matching regex"),
    (f'[cluster.labels]\nrack = "{"r" * 65}"', "cluster.labels: Expected `str` of length <= 64"),
    ("agent = 1", "agent is a section: write its keys below [agent]"),
])
def test_a_value_that_cannot_be_meant_is_refused(tmp_path, text, said):
    assert said in the_only_error(tmp_path / "agent.toml", text)


STORE = '[store]\nurl = "etcd://10.0.0.1:2379"\n'


@pytest.mark.parametrize(("text", "said"), [
    ('[agent]\nlisten = "127.0.0.1:9000"\nmetrics_listen = "0.0.0.0:9000"', "agent.metrics_listen "
     "= '0.0.0.0:9000' is the port of agent.listen = '127.0.0.1:9000': set another port"),
    ('[agent]\nmetrics_listen = "localhost:9855"', "agent.metrics_listen = 'localhost:9855' is the "
     "port of agent.listen = '127.0.0.1:9855'"),
    (f'[agent]\nmetrics_listen = "0.0.0.0:9856"\n{STORE}', "agent.metrics_listen = '0.0.0.0:9856' "
     "is the port of the other agents where cluster.listen is empty (9856): set another port"),
    (f'{STORE}[cluster]\nlisten = "10.0.0.7:9855"\n[agent]\nlisten = "10.0.0.7:9855"',
     "cluster.listen = '10.0.0.7:9855' is the port of agent.listen = '10.0.0.7:9855'"),
    (f'{STORE}[cluster]\nlisten = "node-7:9858"\n[agent]\nmetrics_listen = "10.0.0.7:9858"',
     "cluster.listen = 'node-7:9858' is the port of agent.metrics_listen = '10.0.0.7:9858'"),
    (f'{STORE}[cluster]\nlisten = "0.0.0.0:9859"', "cluster.listen = '0.0.0.0:9859' is no address "
     "at which the other agents reach this one: set this node's own address"),
    (f'{STORE}[cluster]\nlisten = "[::]:9859"', "cluster.listen = '[::]:9859' is no address"),
    (f'{STORE}[cluster]\nlisten = "10.0.0.7:70000"', "cluster.listen = '10.0.0.7:70000': set a "
     "port of at most 65535"),
])
def test_a_listener_that_cannot_serve_is_refused_by_name(tmp_path, text, said):
    assert said in the_only_error(tmp_path / "agent.toml", text)


@pytest.mark.parametrize("text", [
    # Two addresses or families; no store, so that nobody is called; any free port; nothing.
    '[agent]\nmetrics_listen = "10.0.0.7:9855"', '[agent]\nmetrics_listen = "[::]:9855"',
    '[agent]\nmetrics_listen = "0.0.0.0:9856"',
    '[agent]\nmetrics_listen = "0.0.0.0:0"\nlisten = "127.0.0.1:0"', '[agent]\nlisten = ""',
    f'{STORE}[agent]\nmetrics_listen = "0.0.0.0:9858"',
    f'{STORE}[agent]\nmetrics_listen = "0.0.0.0:9856"\n[cluster]\nlisten = "10.0.0.7:9859"',
])
def test_listeners_that_do_not_meet_are_taken(tmp_path, text):
    file = tmp_path / "agent.toml"
    file.write_text(text)
    load(file)


def test_collectors_are_switched_off_by_the_names_that_the_documentation_lists(tmp_path):
    file = tmp_path / "agent.toml"
    file.write_text('[collectors]\ndisable = ["nvidia", "units"]\n[agent]\nlisten = "[::1]:65535"')
    assert load(file).config.collectors.disable == ("nvidia", "units")
    assert "`nvidia`, `nvme`" in render_config_docs()


def test_labels_are_taken_from_an_inline_table_or_a_section_and_shown_as_toml(tmp_path):
    file = tmp_path / "agent.toml"
    shown = []
    for text in ('[cluster]\nlabels = { rack = "r7", rail = "2" }\n',
                 '[cluster.labels]\nrack = "r7"\nrail = "2"\n'):
        file.write_text(text)
        loaded = load(file)
        assert loaded.config.cluster.labels == {"rack": "r7", "rail": "2"}
        values = {key: (value, "default") for key, value in flatten(loaded.config)}
        shown.append("\n".join(
            "".join(getattr(span, "text", str(span)) for span in line)
            for line in policy.configured(values)))
        assert tomllib.loads(shown[-1])["cluster"]["labels"] == {"rack": "r7", "rail": "2"}
    assert shown[0] == shown[1]


@pytest.mark.parametrize("short, long, why", LATTICE)
def test_the_lattice_of_timeouts(tmp_path, short, long, why):
    defaults = dict(flatten(Config()))
    assert defaults[short] <= defaults[long]
    file = tmp_path / "agent.toml"
    section, key = long.split(".")
    section_short, key_short = short.split(".")
    least = 1.0 if key.startswith("odds") else 0.0
    file.write_text(f"[{section}]\n{key} = {max(least, defaults[short] / 4)}\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert any(f"{short} = " in line and f"raise {long}" in line for line in caught.value.errors)
    assert section_short and key_short


def test_a_missing_or_unreadable_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "nope.toml")
    with pytest.raises(ConfigError, match="this is no file"):
        load(tmp_path)
    if os.getuid() != 0:
        secret = tmp_path / "secret.toml"
        secret.touch(mode=0)
        with pytest.raises(ConfigError, match="make it readable"):
            load(secret)


def test_every_setting_is_described():
    for key, _value in flatten(Config()):
        kind, text = describe(key)
        assert text and kind, key
    assert "| `tick_s` | number >= 0.05 and <= 10 | `1.0` |" in render_config_docs()
    assert msgspec.structs.fields(Config)


def test_reload_keeps_the_old_configuration_when_the_new_is_bad(agent, tmp_path):
    file = tmp_path / "agent.toml"
    file.write_text("[detect]\nstopped_s = 2.0\n")

    async def scenario():
        async with agent() as (daemon, node):
            daemon.options = daemon.options._replace(config_file=file)
            await daemon.reload()
            assert daemon.state.reload_ok and daemon.state.config.detect.stopped_s == 2.0
            assert daemon.node.settings.stopped_s == 2.0
            file.write_text("[detect]\nstopped_s = -2.0\n")
            await daemon.reload()
            assert not daemon.state.reload_ok and daemon.state.config.detect.stopped_s == 2.0
            await until(lambda: [one.fault for one in daemon.state.snapshot.decision.verdicts]
                        == ["agent_config_bad"])
            file.write_text("[detect]\nstopped_s = 3.0\n")
            await daemon.reload()
            assert daemon.state.reload_ok and daemon.state.config.detect.stopped_s == 3.0

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["config", "metrics"])
def test_generated_documents_are_current(name):
    path = ROOT / "docs" / f"{name}.md"
    from holdfast.agent.metrics.selection import render_docs

    made = {"config": render_config_docs, "metrics": render_docs}[name]()
    assert path.read_text() == made, f"docs/{name}.md is old: generate it again"
