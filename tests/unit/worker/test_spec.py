"""The command line: torchrun's flags mean what they mean there; a mistake is one line and 78."""

from __future__ import annotations

import time

import pytest

from holdfast.agent.launchers import protocol
from holdfast.agent.peers import choice
from holdfast.trainer.config import ConfigError, load
from holdfast.worker import naming
from holdfast.worker.launcher import spec


@pytest.fixture()
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def parse(*argv: str, command: str = "run", **environ: str) -> spec.Spec:
    return spec.parse(command, list(argv), dict(environ))


def test_a_torchrun_line_is_a_holdfast_run_line(script):
    options = parse(
        "--standalone", "--nnodes=1", "--nproc_per_node", "2", "--rdzv-backend", "c10d",
        "--rdzv_endpoint=localhost:0", "--max-restarts=5", "--redirects", "3", "--tee", "3",
        "--local-ranks-filter", "0", "--log-dir", "/tmp/logs", script, "--lr", "1", "-m", "x",
    )
    assert options.nproc == 2 and options.max_restarts == 5 and options.tee
    assert options.log_dir == "/tmp/logs"
    assert options.program == ("script", script, ["--lr", "1", "-m", "x"], False, True, False)


def test_a_module_and_a_command(script):
    assert parse("-m", "package.train", "--x").program[:3] == ("module", "package.train", ["--x"])
    assert parse("--no-python", "echo", "-n", "hi").program[:3] == ("command", "echo", ["-n", "hi"])
    assert parse("--no-python", "echo").preload == []


def test_torchruns_environment_defaults_count(script, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    options = parse(script)
    assert (options.nproc, options.max_restarts) == (3, 7)
    assert parse("--nproc-per-node", "2", script).nproc == 2


def test_the_trainer_takes_the_flags_and_the_rest_is_its_own(tmp_path):
    file = tmp_path / "t.toml"
    file.touch()
    options = parse("--nproc-per-node", "2", "--config", str(file), "steps=5", command="train")
    assert options.program.trainer and options.program.argv == ["--config", str(file), "steps=5"]
    assert options.standby == 1 and "torch" in options.preload


def test_a_standby_of_a_script_is_said_to_have_no_effect(script, capfd):
    assert parse("--standby", "2", script).standby == 0
    said = capfd.readouterr().err
    assert said.count("--standby has no effect on a script") == 1
    for argv, command in ((["--standby", "2", "steps=5"], "train"), (["--standby", "0", script],
                          "run"), ([script], "run")):
        parse(*argv, command=command)
        assert capfd.readouterr().err == ""
    assert parse("--standby", "2", command="train").standby == 2


def test_a_standby_takes_no_neuron_core_unasked(monkeypatch):
    monkeypatch.setattr(spec.glob, "glob", lambda path: [path] if "neuron" in path else [])
    assert parse("device=xla", command="train").standby == 0
    assert parse("--standby", "1", "device=xla", command="train").standby == 1
    assert parse("device=cpu", command="train").standby == 1


def test_a_standby_shares_no_gpu_with_a_rank(capfd):
    def standby(*argv: str) -> int:
        return parse(*argv, command="train", CUDA_VISIBLE_DEVICES="0,1,2").standby

    assert standby("--nproc-per-node", "3") == 0 and standby("device=cpu") == 1
    assert standby("--nproc-per-node", "2", "--standby", "1") == 1
    assert standby("--nproc-per-node", "3", "--standby", "2", "device=cpu") == 2
    assert capfd.readouterr().err == ""
    assert standby("--nproc-per-node", "2", "--standby", "2") == 1
    assert "--standby 2: 3 GPUs for 2 ranks leave 1 to stand by on" in capfd.readouterr().err
    # Another vendor's are not counted, and may be as many as the ranks.
    assert parse("device=accelerator", command="train").standby == 0


def test_gpus_are_counted_without_opening_one(script):
    assert spec.count_accelerators({"CUDA_VISIBLE_DEVICES": "0,3,GPU-abc"}) == 3
    assert spec.count_accelerators({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert parse("--nproc-per-node", "gpu", script, CUDA_VISIBLE_DEVICES="0,1").nproc == 2
    auto = parse("--nproc-per-node", "auto", script, CUDA_VISIBLE_DEVICES="")
    assert auto.nproc == parse("--nproc-per-node", "cpu", script).nproc


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "what shall run"),
        (["--nproc-per-node", "0", "SCRIPT"], "from 1 to 256"),
        (["--nproc-per-node", "many", "SCRIPT"], "auto, gpu, cpu"),
        (["--nproc-per-node", "gpu", "SCRIPT"], "no GPU"),
        (["--nnodes", "2", "SCRIPT"], "one name on all of them"),
        (["--nnodes", "0", "SCRIPT"], "from 1 to 2048, or MIN:MAX"),
        (["--nnodes", "4:2", "SCRIPT"], "MIN:MAX"),
        (["--nnodes", "two", "SCRIPT"], "MIN:MAX"),
        (["--standalone", "--nnodes", "2", "SCRIPT"], "--standalone is one node"),
        (["--nnodes", "2", "--node-rank", "2", "SCRIPT"], "the last is 1"),
        (["--max-restarts", "-1", "SCRIPT"], "from 0 to"),
        (["--max-restarts", "x", "SCRIPT"], "max-restarts"),
        (["missing.py"], "no such file"),
        (["--no-such-flag", "SCRIPT"], "no-such-flag"),
        (["-m", "--no-python", "x"], "exclude"),
        (["--ignore-check", "clock", "SCRIPT"], "say why with --reason"),
        (["--reason", "it is late", "SCRIPT"], "--reason belongs to --ignore-check"),
    ],
)
def test_a_mistake_is_one_line_and_78(argv, says, script, capfd):
    words = [script if word == "SCRIPT" else word for word in argv]
    with pytest.raises(SystemExit) as leaving:
        spec.parse("run", words, {"CUDA_VISIBLE_DEVICES": ""})
    assert leaving.value.code == 78
    error = capfd.readouterr().err
    assert says in error and error.count("\n") == 1
    assert error.startswith("holdfast: ends with code 78: ")


@pytest.mark.parametrize(
    ("given", "rdzv", "environ", "name"),
    [
        ("night", "x", {"SLURM_JOB_ID": "7"}, "night"),
        ("", "x", {"SLURM_JOB_ID": "7"}, "x"),
        ("", "none", {"SLURM_JOB_ID": "7"}, "7"),
        ("a/b c", "", {}, "a-b-c"),
        ("n" * naming.LIMIT, "", {}, "n" * naming.LIMIT),
        ("n" * 100, "", {}, "n" * 39 + "-4e9d8231"),
        ("", "", {"PBS_JOBID": "n" * 100}, "n" * 39 + "-4e9d8231"),
    ],
)
def test_the_runs_name(given, rdzv, environ, name):
    assert naming.run_name(given, rdzv, "dir/train.py", environ) == name


def test_two_long_names_with_one_beginning_stay_two_runs():
    long = "finetune-of-the-large-model-on-the-cleaned-data-seed-"
    first, second = (naming.run_name(long + end, "", "train.py", {}) for end in "12")
    assert first != second and len(first) == len(second) == naming.LIMIT
    assert naming.run_name(first, "", "train.py", {}) == first  # as --on hands it on


def test_two_static_jobs_on_one_master_address_are_two_runs(script):
    static = ("--nnodes", "2", "--master-addr", "node0")
    names = [parse(*static, "--node-rank", rank, "--master-port", port, script).run
             for port in ("29501", "29502") for rank in ("0", "1")]
    assert names == ["train-node0-29501"] * 2 + ["train-node0-29502"] * 2
    # A line without a port, or with the one that torchrun takes then, is called as it was.
    for more in ((), ("--master-port", "29500"), ("--master-port", "0")):
        options = parse(*static, *more, script)
        assert (options.run, options.rendezvous) == ("train-node0", "node0")
    # Where c10d meets is what names its run; the port is that of the ranks' store alone.
    c10d = ("--nnodes", "2", "--rdzv-endpoint", "node0:29400", "--master-port", "29501")
    assert parse(*c10d, script).run == "train-node0-29400"
    assert parse("--nnodes", "2", "--master-addr", "fd00::1", "--master-port", "29501",
                 script).run == "train-fd00-1-29501"


def test_nodes_come_to_one_name_and_say_how_many_they_are(script):
    options = parse("--nnodes", "2:4", "--rdzv-id", "job", "--rdzv-backend", "c10d",
                    "--rdzv-endpoint", "node0:29500", "--node-rank", "1", script)
    assert (options.nnodes_min, options.nnodes, options.nnodes_text) == (2, 4, "2:4")
    assert (options.run, options.rendezvous, options.node_rank) == ("job", "node0:29500", 1)
    options = parse("--nnodes", "2", "--master-addr", "node0", "--local-addr", "10.0.0.2", script)
    assert (options.run, options.local_addr) == ("train-node0", "10.0.0.2")
    assert parse("--nnodes", "2", script, SLURM_JOB_ID="7").run == "7"
    assert parse("--nnodes", "2", "--run", "r", script).nnodes_text == "2"


def test_a_run_over_nodes_says_what_its_world_may_be(script, capfd):
    options = parse("--nnodes", "2:4", "--run", "r", "--unit", "2", "--allow-mixed",
                    "--gang-limit", "90", script)
    assert (options.unit, options.mixed, options.gang_limit_s) == (2, True, 90.0)
    assert (parse(script).unit, parse(script).mixed, parse(script).gang_limit_s) == (1, False, 0.0)
    with pytest.raises(SystemExit) as ended:
        parse("--nnodes", "2", "--run", "r", "--unit", "3", script)
    assert ended.value.code == 78 and "--unit 3 of --nnodes 2" in capfd.readouterr().err


def test_without_any_name_script_and_time_are_one(script):
    assert naming.run_name("", "", "dir/train.py", {}).startswith("train-20")


def test_many_ranks_get_one_thread_each_unless_the_user_says_otherwise(script):
    assert parse("--nproc-per-node", "2", script).nproc_unset_threads
    assert not parse("--nproc-per-node", "1", script).nproc_unset_threads
    assert not parse("--nproc-per-node", "2", script, OMP_NUM_THREADS="4").nproc_unset_threads


@pytest.mark.parametrize("words", [
    ("--grace", "nan"), ("--grace", "-5"), ("--grace", "inf"), ("--grace=1e9",),
    ("--hang-limit", "-3"), ("--hang-limit", "inf"), ("--hang-limit", "nan"),
    ("--master-port", "99999"), ("--master_port=-1",), ("--standby", "-2"), ("--standby", "1e3"),
    ("--max-restarts", "-1"), ("--max-restarts", "9" * 400), ("--max-restarts", "1.5"),
    ("--nproc-per-node", "²"), ("--nproc-per-node", "9" * 5000),
], ids=str)
def test_every_number_has_bounds(words, capfd):
    with pytest.raises(SystemExit) as ended:
        parse(*words, "--no-python", "echo")
    assert ended.value.code == 78
    said = capfd.readouterr().err
    assert " from " in said and said.count("\n") == 1 and len(said) < 6000


def test_numbers_of_the_environment_have_the_same_bounds(monkeypatch, capfd):
    monkeypatch.setenv("PET_MASTER_PORT", "70000")
    with pytest.raises(SystemExit):
        parse("--no-python", "echo")
    assert "70000" in capfd.readouterr().err


def test_a_flag_that_is_almost_one_is_named(capfd):
    for word, meant in (("--nproc_per_nod=2", "--nproc-per-node"), ("--graze=3", "--grace")):
        with pytest.raises(SystemExit):
            parse(word, "--no-python", "echo")
        assert f"did you mean {meant}?" in capfd.readouterr().err


@pytest.mark.parametrize(("flags", "shown"), [
    ((), {(0, 1), (0, 2), (1, 1), (1, 2)}),
    (("--local-ranks-filter", "1"), {(1, 1), (1, 2)}),
    (("--local_ranks_filter=0, 7",), {(0, 1), (0, 2)}),
    (("--redirects", "3"), set()),
    (("-r", "1"), {(0, 2), (1, 2)}),
    (("-r", "0:1,1:2"), {(0, 2), (1, 1)}),
    (("-r", "3", "--tee", "1:3"), {(1, 1), (1, 2)}),
    (("-r", "3", "-t", "1", "--local-ranks-filter", "0"), {(0, 1)}),
])
def test_redirects_and_filter_decide_what_the_terminal_shows(flags, shown):
    given = parse(*flags, "--no-python", "echo").shown
    assert {(rank, bit) for rank in (0, 1) for bit in (1, 2) if given.shows(rank, bit)} == shown


@pytest.mark.parametrize("words", [("--redirects", "4"), ("-t", "x"), ("--local-ranks-filter", "a"),
                                   ("-r", "0:1,")])
def test_bad_streams_and_ranks_are_a_mistake(words, capfd):
    with pytest.raises(SystemExit):
        parse(*words, "--no-python", "echo")
    assert ": give " in capfd.readouterr().err


def test_flags_that_nobody_does_here_are_said(capfd, monkeypatch):
    parse("--rdzv-backend", "c10d", "--monitor-interval", "5", "--no-python", "echo")
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGUSR1")
    parse("--numa-binding", "node", "--virtual-local-rank", "--no-python", "echo")
    said = capfd.readouterr().err
    assert said == ("holdfast: accepted, and without effect here: --numa-binding, "
                    "--signals-to-handle, --virtual-local-rank\n")


def test_a_server_of_etcd_that_torchrun_would_use_is_said_not_to_be(capfd, script):
    words = ("--nnodes", "2", "--rdzv-id", "r", "--rdzv-endpoint", "etcd-host:2379")
    for backend in ("etcd-v2", "etcd"):
        parse(*words, "--rdzv-backend", backend, script)
        said = capfd.readouterr().err
        assert f"--rdzv-backend {backend}: the etcd that" in said and "[store] url" in said
        assert said.count("\n") == 1
    for more in (("--rdzv-backend", "c10d"), ("--rdzv-backend", "static"), ()):
        parse(*words, *more, script)
        assert capfd.readouterr().err == ""


def test_no_run_has_more_nodes_than_an_agent_keeps_in_touch_with():
    assert spec.NNODES_MAX == protocol.NNODES_MAX == choice.LINES_MAX


# Each flag of torchrun's: what it does here, or that it changes nothing on one node, or is said.
NOTHING, SAID = "nothing", "said"
TORCHRUN = {
    "--nnodes": (("1:1",), NOTHING), "--standalone": ((), NOTHING),
    "--rdzv-backend": (("c10d",), NOTHING),
    "--rdzv-conf": (("a=1",), SAID), "--monitor-interval": (("5",), NOTHING),
    "--rdzv-endpoint": (("localhost:0",), lambda s: s.rendezvous == "localhost:0"),
    "--master-addr": (("localhost",), lambda s: s.rendezvous == "localhost"),
    "--node-rank": (("0",), lambda s: s.node_rank == 0),
    "--local-addr": (("localhost",), lambda s: s.local_addr == "localhost"),
    "--run-path": ((), NOTHING),  # every script is run that way
    "--event-log-handler": (("null",), SAID), "--logs-specs": (("default",), SAID),
    "--numa-binding": (("node",), SAID), "--signals-to-handle": (("SIGTERM",), SAID),
    "--shutdown-timeout": (("30",), SAID), "--virtual-local-rank": ((), SAID),
    "--duplicate-stdout-filters": (("x",), SAID), "--duplicate-stderr-filters": (("x",), SAID),
    "--nproc-per-node": (("3",), lambda s: s.nproc == 3),
    "--rdzv-id": (("job",), lambda s: s.run_id == "job" and s.run == "job"),
    "--max-restarts": (("9",), lambda s: s.max_restarts == 9),
    "--start-method": (("spawn",), lambda s: s.start_method == "spawn"),
    "--role": (("reader",), lambda s: s.role == "reader"),
    "--module": ((), lambda s: s.program.kind == "module"),
    "--no-python": ((), lambda s: s.program.kind == "command"),
    "--log-dir": (("/l",), lambda s: s.log_dir == "/l"),
    "--redirects": (("3",), lambda s: not s.shown.shows(0, 1)),
    "--tee": (("3",), lambda s: s.tee),
    "--local-ranks-filter": (("1",), lambda s: not s.shown.shows(0, 1) and s.shown.shows(1, 1)),
    "--master-port": (("4711",), lambda s: s.master_port == 4711),
}


@pytest.mark.parametrize("flag", TORCHRUN)
def test_a_flag_of_torchrun_is_done_or_said_or_changes_nothing(flag, script, capfd):
    values, does = TORCHRUN[flag]
    for spelling in {flag, "--" + flag[2:].replace("-", "_")}:
        plain, given = parse("--run", "r", script), parse(spelling, *values, "--run", "r", script)
        if flag == "--rdzv-id":
            given = parse(spelling, *values, script)
        said = capfd.readouterr().err
        assert said == (f"holdfast: accepted, and without effect here: {flag}\n"
                        if does is SAID else "")
        if does in (NOTHING, SAID):
            assert given._replace(argv=plain.argv) == plain
        else:
            assert does(given) and not does(plain)


def test_every_flag_of_the_installed_torchrun_is_known():
    run = pytest.importorskip("torch.distributed.run")
    actions = [one for one in run.get_args_parser()._actions if one.option_strings]
    flags = {flag for action in actions for flag in action.option_strings}
    assert flags <= set(spec.build("run")._option_string_actions)
    judged = {flag for one in actions for flag in one.option_strings if flag in TORCHRUN}
    assert len(judged) == len(actions) - 1, "all but --help stand in TORCHRUN"


def test_the_trainers_settings_may_have_the_deadline(tmp_path, capfd):
    """train.toml has it as text or as a moment of TOML's own; key=value is above it, and the flag
    above both."""
    file = tmp_path / "train.toml"
    config = ("--config", str(file))

    def deadline(*argv: str, text: str = 'deadline = "2026-12-24T18:00+01:00"') -> float:
        file.write_text(text)
        found = parse(*argv, command="train").goal["deadline_wall_s"]
        trainers = load(str(file) if "--config" in argv else None,
                        [one for one in argv if one.startswith("deadline=")]).deadline
        assert not trainers or spec.moment(trainers)(0.0) > 0, "the trainer takes it as well"
        return found

    assert deadline(*config) == 1798131600.0
    assert deadline(*config, text="deadline = 2026-12-24T18:00:00+01:00") == 1798131600.0
    assert deadline(*config, text="steps = 5") == 0.0 == deadline()
    above = "deadline=2026-12-25T18:00:00+01:00"
    assert deadline(*config, above) == deadline(above) == 1798131600.0 + 86400
    flag = ("--deadline", "2026-12-26T18:00+01:00")
    assert deadline(*config, *flag, above) == 1798131600.0 + 2 * 86400
    before_s = time.time()
    assert before_s + 5400 <= deadline("deadline=+1.5h") <= time.time() + 5400
    with pytest.raises(SystemExit) as ended:
        parse("deadline=soon", command="train")
    assert ended.value.code == 78 and "deadline = 'soon': set 2026" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="deadline = 'soon': set 2026"):
        load(None, ["deadline=soon"])
    assert parse(str(file), "deadline=+1h").goal["deadline_wall_s"] == 0.0, "a script's own word"


def test_what_a_run_says_for_the_books(script):
    goal = parse("--team", "search", "--deadline", "2026-12-24T18:00+01:00", "--total-steps", "1e5",
                 "--flops-per-step", "2.5e16", script, HOLDFAST_QUEUED_AT="12.5").goal
    assert goal["team"] == "search" and goal["total_steps"] == 100_000
    assert goal["deadline_wall_s"] == 1798131600.0 and goal["flops_per_step"] == 2.5e16
    assert goal["queued_wall_s"] == 12.5 and goal["peak_flops"] == 0.0
    by_letter = parse("--deadline", "2026-12-24T17:00:00Z", script).goal["deadline_wall_s"]
    assert by_letter == goal["deadline_wall_s"]
    assert parse(script, SLURM_JOB_ACCOUNT="m5", HOLDFAST_QUEUED_AT="junk").goal == {
        **parse(script).goal, "team": "m5"}
    ahead = parse(script, HOLDFAST_QUEUED_AT="1e12", HOLDFAST_TEAM="a" * 99).goal
    assert ahead["queued_wall_s"] == 0.0 and len(ahead["team"]) == 64


@pytest.mark.parametrize("words", [
    ("--deadline", "soon"), ("--deadline", "+3y"), ("--total-steps", "-1"),
    ("--flops-per-step", "nan"), ("--peak-flops", "1e31"), ("--deadline", "2026-13-01")])
def test_a_bad_word_for_the_books_is_a_mistake(words, script, capfd):
    with pytest.raises(SystemExit) as ended:
        parse(*words, script)
    assert ended.value.code == 78 and words[0] in capfd.readouterr().err


def test_a_trainer_on_an_xla_device_is_spawned(tmp_path):
    """An override stands before the file; nothing else that is called device counts."""
    def method(*words):
        return spec.parse("train", ["--run", "r", *words], {}).start_method

    assert method("device=cpu") == "fork" and method() == "fork"
    assert method("device=xla") == method("device='xla'") == method("device=cpu", "device=xla")
    assert method("device=xla") == "spawn" and method("model_options.device=xla") == "fork"
    config = tmp_path / "train.toml"
    for text, wanted in (("device = 'xla'\n", "spawn"),
                         ('steps = 3\n  device="xla"  # trn1\n', "spawn"),
                         ("# device = 'xla'\n", "fork"), ("device = 'cpu'\n", "fork")):
        config.write_text(text)
        assert method("--config", str(config)) == wanted, text
    config.write_text("device = 'xla'\n")
    assert method("--config", str(config), "device=cpu") == "fork"


def test_settings_of_the_trainer_that_are_wrong_are_told_before_any_rank(tmp_path, capfd):
    """All at once, a line each, in the trainer's own words."""
    config, missing = tmp_path / "train.toml", str(tmp_path / "none.toml")
    config.write_text("device = 3\nstepz = 4\n")
    for words, said in (
            (("--config", str(config)), ("device = 3: set a value of type", "stepz: unknown key")),
            (("steps=3", "--config", str(config)), ("stepz: unknown key",)),
            (("--config", missing), (f"{missing}: cannot be read: No such file",)),
            (("steps=3", "--no-such", "x=1"), ("unrecognized arguments: --no-such",)),
            (("steps=0", "strategy=zero3"), ("steps = 0: set", "strategy = 'zero3': set one of"))):
        with pytest.raises(SystemExit) as ended:
            spec.parse("train", ["--run", "r", *words], {})
        told = capfd.readouterr().err
        assert ended.value.code == 78 and all(one in told for one in said), told
        assert told.endswith("holdfast: ends with code 78: the trainer's settings are wrong\n")


GROUPED = ("strategy=mics", "mics.group=4")


@pytest.mark.parametrize(("words", "unit", "why"), [
    (("strategy=ddp",), 1, ""), (("strategy=sdp",), 1, ""), (("strategy=fsdp",), 1, ""),
    (("strategy=mics",), 1, ""), (("strategy=mics", "mics.group=2"), 1, ""),
    (GROUPED, 2, "mics.group = 4, 2 rank(s) a node"),
    (("strategy=fsdp", "fsdp.group=3"), 3, "fsdp.group = 3, 2 rank(s) a node"),
    (("strategy=pipeline",), 1, ""),
    (("strategy=pipeline", "pipeline.stages=6", "pipeline.group=2"), 6,
     "pipeline.stages = 6 and pipeline.group = 2, 2 rank(s) a node"),
    (("strategy=mine:Own", "mics.group=4"), 1, ""),
])
def test_nodes_of_a_group_of_ranks_live_and_move_together(tmp_path, words, unit, why):
    """As the strategy wants it, from the command line and from the file."""
    def units(*given):
        found = spec.parse("train", ["--run", "r", "--nnodes", "2:12", "--nproc-per-node", "2",
                                     *given], {})
        return found.unit, found.unit_why

    config = tmp_path / "train.toml"
    name, *options = (word.partition("=")[::2] for word in words)
    config.write_text(f"[strategy]\nname = '{name[1]}'\n" + "".join(
        f"[{key.partition('.')[0]}]\n{key.partition('.')[2]} = {value}\n"
        for key, value in options[:1]))
    assert units(*words) == (unit, why)
    assert units("--config", str(config), *words[2:]) == (unit, why)
    assert units("--unit", str(2 * unit), *words) == (2 * unit, why), "a multiple is a person's"


@pytest.mark.parametrize(("nodes", "fewest", "unit"), [
    ("3:4", 3, 1),  # four stages, or three
    ("3:4", 0, 4), ("3:4", 4, 4), ("4", 3, 4), ("2:4", 3, 4), ("2:4", 2, 1), ("1:4", 1, 1),
    ("4:8", 3, 2),  # of 5 and 7 nodes neither three nor four stages are made: 8, 6, 4
    ("3:8", 2, 2), ("4:8", 1, 1), ("7:8", 3, 4),
])
def test_a_pipeline_that_may_have_fewer_stages_shrinks_by_fewer_nodes(capfd, nodes, fewest, unit):
    words = ("strategy=pipeline", "pipeline.stages=4", f"pipeline.fewest={fewest}")
    found = spec.parse("train", ["--run", "r", "--nnodes", nodes, "--nproc-per-node", "1", *words],
                       {})
    assert found.unit == unit
    told = "fewer stages have no effect with --nnodes" in capfd.readouterr().err
    assert told == (unit == 4 and nodes != "4" and fewest == 3)
    # A multiple of it is a person's to ask for; four nodes at most are needed in any case.
    assert spec.parse("train", ["--run", "r", "--nnodes", nodes, "--nproc-per-node", "1",
                                "--unit", "4", *words], {}).unit == 4
    if unit == 2:
        with pytest.raises(SystemExit):
            spec.parse("train", ["--run", "r", "--nnodes", nodes, "--nproc-per-node", "1",
                                 "--unit", "3", *words], {})
        assert "pipeline.stages = 4, pipeline.fewest = 3" in capfd.readouterr().err or fewest == 2


@pytest.mark.parametrize(("flags", "said"), [
    (("--nnodes", "2:4", "--unit", "3"), "--unit 3: mics.group = 4 on nodes of 2 rank(s) wants a "
     "multiple of 2: set that, or leave --unit out"),
    (("--nnodes", "3"), "--nnodes 3: mics.group = 4 on nodes of 2 rank(s) wants a multiple of 2 "
     "nodes"),
    (("--nnodes", "5", "--unit", "2"), "--unit 2 of --nnodes 5: no world of so many nodes"),
])
def test_nodes_that_cannot_be_whole_groups_are_a_mistake(capfd, flags, said):
    with pytest.raises(SystemExit) as ended:
        spec.parse("train", ["--run", "r", *flags, "--nproc-per-node", "2", *GROUPED], {})
    told = capfd.readouterr().err
    assert ended.value.code == 78 and said in told and told.count("\n") == 1, told


def test_the_first_line_says_which_nodes_live_and_move_together():
    two = ("--run", "r", "--nnodes", "4", "--nproc-per-node", "2")
    assert parse(*two, *GROUPED, command="train").first_line("/l") == (
        "run r, logs in /l; 2 nodes live and move together: mics.group = 4, 2 rank(s) a node")
    assert parse(*two, "strategy=ddp", command="train").first_line("/l") == "run r, logs in /l"


def test_of_one_node_the_trainer_itself_says_what_its_groups_lack():
    assert spec.parse("train", ["--nproc-per-node", "2", *GROUPED], {}).unit == 1
