"""What the agent's answers say to a person: pure, from the API's JSON to lines.

Owns the words and their order; status answers four questions before anything else.  Reads no
socket and no clock: ages come with the answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.ledger import WORKING
from ..core.model import WISHES
from .text import (
    BAD,
    CARE,
    FAINT,
    GOOD,
    STRONG,
    Cell,
    Line,
    Span,
    clock,
    count,
    cut,
    field,
    line,
    seconds,
    size,
    table,
)

Json = Mapping[str, Any]
STORE_WHY_MAX = 200  # characters; `status --json` has all of them
STORE_SLOW_S = 0.5  # and page.html's: a busy machine is not slow yet, and a lease stands seconds
INDENT = 12  # of the text beside a severity
ACTION = re.compile(r"[a-z_]+: ")
HEALTH_STYLE = {"ok": GOOD, "suspect": CARE, "fault": BAD}
# the worst first
SEVERITY_STYLE = {"fatal": BAD, "degraded": CARE, "warn": CARE, "unknown": CARE, "ok": GOOD}


# -------------------------------------------------------------------------------------- status


def status(answers: Sequence[Json], run: str | None = None) -> list[Line]:
    """Every run's block, then every node's."""
    runs = [one for answer in answers for one in answer["runs"] if run in (None, one["run"])]
    far = {one["run"]: one for answer in answers for one in answer.get("elsewhere", ())
           if run in (None, one["run"])}
    lines: list[Line] = []
    if not runs and not far:
        lines += [*field("training", Span("no: no run is registered here", CARE)), ()]
    for one in runs:
        lines += [*_run(one), ()]
    for name in sorted(far):
        lines += [*_elsewhere(far[name]), ()]
    for answer in answers:
        lines += _node(answer)
    return lines


def _run(run: Json) -> list[Line]:
    training = Span("yes", GOOD) if run["training"] else Span("no", BAD)
    if run.get("suspicion"):
        training = Span(f"in doubt: {run['suspicion']}", CARE)
    restarts = f", {count(run['restarts'], 'restart')}" if run.get("restarts") else ""
    pace = f", {seconds(run['step_time_s'])} a step" if run.get("step_time_s") else ""
    stage = f", stage {run['stage']}" if run.get("stage") else ""
    loss = f", loss {run['loss']:.4f}" if run.get("loss") is not None else ""
    need = run.get("need") or "nothing"
    return [
        *field("training", training),
        *field("checkpoint", checkpoint(run)),
        *field("doing", run["doing"]),
        *field("you", need if need == "nothing" else Span(need, CARE)),
        *field("run", f"{run['run']} ({run['grade']}): {run['state']}{stage}, generation "
               f"{run['generation']}, step {run['step']}{pace}{loss}{restarts}"),
        *_goal(run),
        *_logs(run),
        (),
        *_ranks(run.get("ranks", ())),
        *_nodes(run.get("nodes", ())),
    ]


def _goal(run: Json) -> list[Line]:
    """When it will be done, where its number of steps is known, and whether that is in time."""
    books = run.get("books") or {}
    if not books.get("total_steps") or books.get("eta_s") is None:
        return []
    late_s = books.get("late_s")
    when = "" if late_s is None else (
        f"; {seconds(abs(late_s))} {'after' if late_s > 0 else 'before'} its deadline")
    said = f"in {seconds(books['eta_s'])}, at step {books['total_steps']}{when}"
    return field("done", Span(said, CARE) if late_s and late_s > 0 else said)


def is_elsewhere(found: Sequence[tuple[object, Json]], run: str) -> bool:
    """Whether other nodes alone have this run."""
    here = any(one["run"] == run for _, answer in found for one in answer["runs"])
    return not here and any(
        one["run"] == run for _, answer in found for one in answer.get("elsewhere", ()))


def _elsewhere(run: Json) -> list[Line]:
    """A run that has no launcher on this node, as its nodes tell of it."""
    said = (f"{run['run']} ({run['grade']}), on other nodes: generation {run['generation']}, "
            f"step {run['step']}, {run['running']} of {run['world']} ranks run")
    rows: list[list[Cell]] = [
        [one["node"], one["part"] or "-", "leads" if one["node"] == run["leader"] else "",
         Span(f"{one['word']}, {seconds(one['age_s'])} ago", BAD if one["word"] == "lost" else "")]
        for one in run["nodes"]]
    return [*field("run", said), *table(("node", "part", "", "word"), rows, indent=2)]


def words(rows: Sequence[Json]) -> list[Line]:
    """The nodes that did not answer now, and how old what is shown of them is."""
    lines: list[Line] = []
    for row in rows:
        if row["problem"]:
            known = (f"what is shown of it is {seconds(row['age_s'])} old"
                     if row["age_s"] is not None else "nothing of it is shown")
            lines.append(line(Span(f"{row['node']} does not answer", CARE),
                              f": {row['problem']}; {known}"))
    return [(), *lines] if lines else []


def _logs(run: Json) -> list[Line]:
    """The findings in the ranks' logs, where there are any."""
    if run.get("root"):
        return field("logs", Span(run["root"], CARE))
    logs = run.get("logs") or {}
    if logs.get("problem"):
        return field("logs", Span(logs["problem"], CARE))
    if not logs.get("seen"):
        return []
    last = logs["seen"][-1]
    who = f" on rank {last['rank']}" if last["rank"] >= 0 else ""
    said = f"at {clock(last['wall_s'])} {last['signature']}{who} ({last['culprit']})"
    return field("logs", Span(f"{said}: {last['line']}", FAINT))


def checkpoint(run: Json) -> str:
    """The last verified one, and the snapshot in memory."""
    found = run.get("checkpoint")
    said = "none verified yet" if run.get("grade") == "trainer" else (
        "the program's own, which is not seen from here")
    if found:
        said = f"step {found['step']}, verified {seconds(found['age_s'])} ago"
        if found.get("unread_step", -1) >= 0:
            said += f" (step {found['unread_step']} is not read back yet)"
    if run.get("snapshot_step") is not None:
        said += f"; in memory: step {run['snapshot_step']}"
    return said


def _ranks(ranks: Sequence[Json]) -> list[Line]:
    heads = ("rank", "pid", "state", "step", "phase", "for", "health")
    rows: list[list[Cell]] = []
    for one in ranks:
        health = one.get("health", "ok")
        rows.append([
            str(one["rank"]), str(one["pid"]), one["state"], str(one["step"]), one["phase"],
            seconds(one["phase_age_s"]), Span(health, HEALTH_STYLE.get(health, "")),
        ])
    said = [
        row for one in ranks
        for text in (one.get("place"), one.get("why") and Span(_of_rank(one), CARE)) if text
        for row in field(f"  rank {one['rank']}", text)
    ]
    return [*(table(heads, rows, indent=2) if rows else []), *said]


def _of_rank(one: Json) -> str:
    """Why it is not well, without its name where the reason begins with that."""
    named = f"rank {one['rank']} (pid {one['pid']}) on "
    why: str = one["why"]
    return why.removeprefix(named).partition(" ")[2] if why.startswith(named) else why


def _nodes(nodes: Sequence[Json]) -> list[Line]:
    """Every node of the run, with the age of its word."""
    rows: list[list[Cell]] = []
    for one in nodes:
        said = "here" if one["here"] else one["word"]
        if one["age_s"] is not None and not one["here"]:
            said += f", {seconds(one['age_s'])} ago"
        bad = one["word"] in ("lost", "not heard of") or one["fatal"] or one.get("held")
        steps = [rank["step"] for rank in one["ranks"]]
        rows.append([
            one["node"], one["part"] or "-", str(one["generation"]),
            str(min(steps)) if steps else "-", "leads" if one["leads"] else "",
            Span(f"{said} {one['fatal'] or one.get('held', '')}".strip(), BAD if bad else ""),
        ])
    heads = ("node", "part", "generation", "step", "", "word")
    return [(), *table(heads, rows, indent=2)] if rows else []


def _node(answer: Json) -> list[Line]:
    agent = answer["agent"]
    down = [one for one in answer.get("collectors", ()) if not one["up"] and not one.get("absent")]
    said = [
        f"agent {answer['version']} (pid {agent['pid']}), up {seconds(agent['uptime_s'])}, "
        f"{size(agent['rss_bytes'])}",
        _store(answer),
    ]
    if answer.get("disk_problem"):
        said[-1] = f"nothing is kept: {answer['disk_problem']}"
    said += [f"collector {one['name']} down: {one['error']}" for one in down]
    said += [_pause("paused", answer, "")] if answer.get("paused") else []
    said += [_pause("the fleet is paused", answer, "fleet_")] if answer.get("fleet_paused") else []
    said += [f"refused: {why}" for _, why in sorted(answer.get("refused_nodes", {}).items())]
    said += ["breaker open: a common cause is suspected"] if answer.get("breaker_open") else []
    lines = field(f"node {answer['node']}", "; ".join(said), indent=len(answer["node"]) + 7)
    lines += _devices(answer.get("devices", ()))
    return lines + _opened(answer.get("incidents", ()))


def _store(answer: Json) -> str:
    if not answer["store_up"]:
        why = " ".join(answer.get("store_problem", "").split()).removeprefix("store: ")
        return "store down" + (f" ({cut(why, STORE_WHY_MAX)})" if why else "")
    took_s = answer.get("store_answer_s", 0.0)
    if took_s < STORE_SLOW_S:
        return "store up"
    return f"store slow: up to {took_s:.1f} s for an answer (holdfast store show)"


def _pause(what: str, answer: Json, of: str) -> str:
    until = answer.get(f"{of}paused_until_wall_s")
    why = answer.get(f"{of}paused_reason", "")
    return what + (f" until {clock(until)}" if until else "") + (f" ({why})" if why else "")


def _devices(devices: Sequence[Json]) -> list[Line]:
    """One row each that is unwell or has a rank; the others are counted."""
    rows: list[list[Cell]] = []
    quiet = {"accelerator": 0, "network": 0}
    for one in devices:
        ranks = " ".join(f"{rank['run']}/{rank['rank']}" for rank in one["ranks"])
        kind = one.get("kind", "accelerator")
        if ranks or one["health"] != "ok":
            style = SEVERITY_STYLE.get(one["health"], CARE)
            name = f"{one['vendor']} {one['device']}".rstrip()
            none = "" if kind == "network" else "none"
            rows.append([name, Span(one["health"], style), ranks or none, one["why"]])
        else:
            quiet["network" if kind == "network" else "accelerator"] += 1
    heads = ("device", "health", "ranks", "why")
    lines = [(), *table(heads, rows, indent=2, wrap=True)] if rows else []
    said = [f"{count(quiet['accelerator'], 'device')} ok, without a rank"]
    said += [f"{count(quiet['network'], 'network card')} ok"]
    return lines + [line(f"  {text}") for text, n in zip(said, quiet.values()) if n]


# ------------------------------------------------------------------------------------- incidents


def _opened(found: Sequence[Json]) -> list[Line]:
    rows = [row for one in worst_first(found) for row in incident_line(one)]
    return [(), line(Span("open incidents", FAINT)), *rows] if rows else []


def worst_first(found: Sequence[Json]) -> list[Json]:
    order = {name: place for place, name in enumerate(SEVERITY_STYLE)}
    return sorted(found, key=lambda one: order.get(one["severity"], -1))


def incident_line(incident: Json) -> list[Line]:
    """How bad, what, where and why, and what is asked for beyond the run."""
    severity = incident["severity"]
    who, reason = incident["culprit"] or incident["subject"], _reason(incident)
    text = reason if reason.startswith(who) else f"{who}: {reason}"
    (_, first), *more = field("", f"{incident['fault']}: {text}", indent=INDENT)
    if incident.get("would_have"):
        more += field("", Span(asked_for(incident["would_have"]), FAINT), indent=INDENT)
    style = SEVERITY_STYLE.get(severity, "")
    return [line(Span(f"  {severity}".ljust(INDENT), style), first), *more]


def asked_for(would_have: str) -> str:
    """What is not done, or not yet: an action and why, or only why."""
    return f"asks for {would_have}" if ACTION.match(would_have) else would_have


def _reason(incident: Json) -> str:
    """The reason without the device, where it begins with it as the kernel's do, because the
    culprit names it already.  `XID 79 on gpu/0000:4e:00 of a: it fell off` is `XID 79: it fell
    off`."""
    reason: str = incident["reason"]
    kind, _, rest = incident["subject"].partition("/")
    head, _, text = reason.partition(": ")
    if kind != "node" or not text or not head.endswith(f" of {rest.partition('/')[0]}"):
        return reason
    event, on, _ = head.partition(" on ")
    return f"{event}: {text}" if on else text


def cost(incident: Json) -> str:
    """What it cost the run, in steps and seconds."""
    parts = []
    if incident.get("lost_steps", 0) > 0:
        parts.append(count(incident["lost_steps"], "step") + " redone")
    if incident.get("lost_s"):
        parts.append(seconds(incident["lost_s"]))
    if not parts and incident.get("state") == "acted":
        return "not over"  # what it costs is counted when training goes on
    return ", ".join(parts) or "nothing"


def phases(incident: Json) -> list[Line]:
    """Where the seconds of its cost went, where training went on."""
    until = {"detection_s": "until the verdict", "decision_s": "until the plan",
             "restart_s": "until training went on"}
    if not any(incident.get(phase) for phase in until):
        return []
    return field("", "; ".join(f"{seconds(incident[phase])} {what}" for phase, what in
                               until.items()))


def incidents(found: Sequence[Json], would_have: bool = False) -> list[Line]:
    """Two rows each, newest first, and what acting would have done where that was asked.  The id is
    what one asks for next: it is never cut."""
    if not found:
        return [line("no incidents")]
    rows: list[list[Cell]] = [
        [
            clock(one["opened_wall_s"]), one.get("state", "open"), one["fault"], cost(one),
            (one["culprit"] or one["subject"]).partition(" (")[0],
        ]
        for one in found
    ]
    head, *first = table(("opened", "state", "fault", "cost", "who"), rows)
    second = [
        line(Span(f"  {one['severity']}".ljust(INDENT), SEVERITY_STYLE.get(one["severity"], "")),
             Span(one["id"], FAINT))
        for one in found
    ]
    third = [field("", one["would_have"], indent=INDENT) if would_have else [] for one in found]
    return [head, *(row for one, two, more in zip(first, second, third, strict=True)
                    for row in (one, two, *more))]


def refused(found: Sequence[Json]) -> list[Line]:
    """Who asked for what they may not, two rows a kind, newest first."""
    if not found:
        return [line("nobody asked for what they may not")]
    lines = []
    for one in found:
        who = f"uid {one['uid']}" if one["uid"] >= 0 else "somebody on the network"
        lines += [
            line(f"{clock(one['wall_s'])}  {who}, {count(one['times'], 'time')}: ", one["what"]),
            *field("", f"{one['why']}; last for {one['example']}")]
    return lines


def asked(found: Sequence[Json]) -> list[Line]:
    """What people asked for, two rows a request, newest first."""
    if not found:
        return [line("nobody asked for anything")]
    lines = []
    for one in found:
        until = f" until {clock(one['until_wall_s'])}" if one["until_wall_s"] else ""
        became = one["state"] + (f": {one['text']}" if one["state"] == "refused" else "")
        lines += [
            line(f"{clock(one['wall_s'])}  ", Span(f"{one['action']}{until}", STRONG),
                 f" {one['subject']}, by {one['by']}, {became}"),
            *field("", one["reason"])]
    return lines


def alerts(found: Sequence[Json]) -> list[Line]:
    """Alerts from outside and what became of each, two rows an alert, newest first."""
    if not found:
        return [line("no alert was sent here (docs/alerts.md)")]
    lines = []
    for one in found:
        state = "firing" if one["firing"] else "resolved"
        lines += [
            line(f"{clock(one['taken_wall_s'])}  ", Span(one["name"] or "(no name)", STRONG),
                 *(f", {what} {one[what]}" for what in ("run", "node") if one.get(what)),
                 f", {state}"),
            *field("", one["outcome"] or "waits to be settled")]
    return lines


def incident(one: Json) -> list[Line]:
    """One incident, whole: culprit, evidence, timeline, cost."""
    state = one.get("state", "open")
    lines = [
        line(Span(f"{one['fault']}", SEVERITY_STYLE.get(one["severity"], STRONG)),
             f"  {one['id']}, {state}"),
        *field("reason", one["reason"]),
        *field("culprit", one["culprit"] or "none"),
        *field("run", f"{one['run'] or 'none'}, generation {one['generation']}"
               + (f", attempt {one['attempt']}" if one.get("attempt") else "")),
        *field("cost", cost(one)), *phases(one),
    ]
    if one.get("would_have"):
        lines += field("would have", one["would_have"])
    if one.get("evidence"):
        lines += [(), line(Span("evidence", FAINT))]
        lines += [row for what, value in one["evidence"] for row in evidence(what, value)]
    if one.get("timeline"):
        start = one["timeline"][0][0]
        lines += [(), line(Span(f"timeline, from {clock(start)}", FAINT))]
        for wall_s, text in one["timeline"]:
            lines += field(f"{wall_s - start:+9.2f} s", text)
    todo = "nothing: this was no fault" if one["fault"] in WISHES else (
        f"holdfast explain {one['fault']}")
    return [*lines, (), line(f"what to do: {todo}")]


def evidence(what: str, value: str) -> list[Line]:
    """`what: value`; a value of several lines (a stack) stands below it as it is."""
    rows = value.rstrip().splitlines()
    if len(rows) > 1:
        return [line(f"  {what}:"), *(line(f"    {row}") for row in rows[:200])]
    return field(f"  {what}", value, indent=max(16, len(what) + 4))


# ------------------------------------------------------------------------------------ why, ledger


def why(answer: Json) -> list[Line]:
    """What is wrong with a node, the worst first, each with what it rests on."""
    lines = [line(Span(f"node {answer['node']}", STRONG))]
    said = []
    for fault in worst_first(answer.get("faults", ())):
        act = "acted on" if fault.get("act") else "shown only"
        said += [
            line(Span(fault["fault"], SEVERITY_STYLE.get(fault["severity"], "")),
                 f" ({fault['severity']}, {act}): {fault['subject']}"),
            *field("  because", fault["reason"]),
            *(row for what, value in fault.get("evidence", ()) for row in evidence(what, value)),
        ]
    for one in answer.get("collectors", ()):
        if not one["up"] and not one.get("absent"):
            said += field("  not seen", f"{one['name']}: {one['error']} ({seconds(one['age_s'])})")
    if not answer["store_up"]:
        said += field("  store", "does not answer: no new plan can be made")
    if answer.get("paused"):
        said += field("  paused", "an operator's hand is on it: nothing is acted on")
    if answer.get("fleet_paused"):
        said += field("  paused", "the whole fleet, by an operator: nothing is acted on anywhere")
    for row in answer.get("nodes", ()):
        if row["node"] == answer["node"] and (row.get("excluded") or row.get("strikes")):
            said += of_store(row)
    if answer.get("breaker_open"):
        said += field("  breaker", "open: the same fault in many places, a person decides")
    return lines + (said or [line("  nothing is wrong, as far as it is watched")])


def why_another(row: Json) -> list[Line]:
    """What another node's agent and the store say of a node."""
    age_s = row.get("age_s")
    heard = f"heard of {seconds(age_s)} ago" if age_s is not None else "not heard of here"
    return [line(Span(f"node {row['node']}", STRONG), f": {heard}"), *of_store(row)]


def of_store(row: Json) -> list[Line]:
    """A node's place among all runs, by its document."""
    said = field("  fault", f"{row['fatal']}: it gets no ranks") if row.get("fatal") else []
    if row.get("excluded"):
        state = "is being drained" if row.get("draining") else "gets no ranks"
        what = f"excluded{' for ' + row['fault'] if row.get('fault') else ''}, {state}"
        said += field("  " + ("draining" if row.get("draining") else "excluded"),
                      f"{what}: {row['reason']}" + (f" ({row['by']})" if row.get("by") else ""))
        said += field("  do", f"holdfast release {row['node']} --reason TEXT, when it is well")
    elif row.get("reason"):
        said += field("  released", row["reason"])
    if row.get("strikes"):
        said += field("  strikes", f"excluded for faults {count(row['strikes'], 'time')} lately")
    return said or [line("  runs may have ranks there")]


def together(answers: Sequence[Json]) -> Json:
    """The ledgers of several nodes as one."""
    categories: dict[str, float] = {}
    for answer in answers:
        for name, spent in answer["categories"].items():
            categories[name] = categories.get(name, 0.0) + spent
    prices = [answer["cost"] for answer in answers if answer.get("cost")]
    price = {"all": sum(one["all"] for one in prices), "lost": sum(one["lost"] for one in prices),
             "currency": prices[0]["currency"]} if prices else None
    alike = len({one["currency"] for one in prices}) == 1
    return {"categories": categories, "wall_s": sum(answer["wall_s"] for answer in answers),
            "cost": price if alike else None}


def ledger(answer: Json, run: str | None = None) -> list[Line]:
    """Seconds by category, and that they sum to the wall time."""
    part = answer["runs"][run] if run else answer
    categories: Mapping[str, float] = part["categories"] if "categories" in part else part
    total = sum(categories.values())
    wall = float(part["wall_s"]) if "wall_s" in part else total
    ordered = sorted(categories.items(), key=lambda item: -item[1])
    rows: list[list[Cell]] = [
        [name, f"{spent:10.1f} s", f"{100 * spent / total if total else 0:5.1f} %"]
        for name, spent in ordered if spent > 0
    ]
    lines = table(("category", "seconds".rjust(12), "share".rjust(7)), rows)
    gap = abs(total - wall)
    price = part.get("cost") if "categories" in part else None
    sums = Span("each of them in one category", GOOD) if gap <= 0.01 * wall + 1.0 else Span(
        f"{seconds(gap)} are not accounted for", BAD)
    training = sum(categories.get(name, 0.0) for name in WORKING)
    share = 100 * training / total if total else 0.0
    return [
        *lines, (),
        line(f"wall time {seconds(wall)}: ", sums),
        line(f"goodput   {share:.1f} % of it was training that counts"),
        *([line(f"cost      {price['all']:,.2f} {price['currency']}, of which "
                f"{price['lost']:,.2f} brought no training")] if price else []),
    ]


def attempts(answer: Json, run: str | None = None) -> list[Line]:
    """How many attempts under a run's name its seconds are of, where it is more than one."""
    several = {name: number for name, number in sorted(answer.get("attempts", {}).items())
               if number > 1 and run in (None, name)}
    return [line(f"{f'{name}: ' * (run is None)}over {number} attempts under this name: holdfast "
                 "jobs tells them apart") for name, number in several.items()]


# ------------------------------------------------------------------------------------------ jobs

HOW = {"done": GOOD, "running": STRONG}


def jobs(rows: Sequence[Json]) -> list[Line]:
    """A line an attempt, the newest first, and what they cost together.  Only the last column is
    cut where a line is full: never a sum of money."""
    currencies = {one["cost"]["currency"] for one in rows if one.get("cost")}
    currency = currencies.pop() if len(currencies) == 1 else ""
    cells: list[list[Cell]] = []
    for one in rows:
        cost = one.get("cost")
        share = one["ettr"]
        money = "-"
        if cost:
            money = f"{cost['all']:,.2f}" + ("" if currency else f" {cost['currency']}")
        cells.append([
            one["run"], str(one["attempt"]),
            Span(one["outcome"].replace("_", " "), HOW.get(one["outcome"], BAD)),
            _began(one["begun_wall_s"]), _took(one["wall_s"]), str(one["step"]),
            "-" if share is None else f"{100 * share:.0f} %", money,
            one["team"] or one["user"] or "-"])
    lines = table(("run", "try", "outcome", "began", "took", "step", "ETTR",
                   f"cost {currency}".strip(), "team"), cells)
    return [*lines, (), *_together(rows)]


def _began(wall_s: float) -> str:
    """Day and minute; of another year the day."""
    then, now = time.localtime(wall_s), time.localtime()
    return time.strftime("%m-%d %H:%M" if then.tm_year == now.tm_year else "%Y-%m-%d", then)


def _took(wall_s: float) -> str:
    """Hours, minutes and seconds, as schedulers write them."""
    whole = round(wall_s)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _together(rows: Sequence[Json]) -> list[Line]:
    """ETTR of all that ended, without and with the time in the queue, and the money."""
    lines = []
    for name, words_ in (("ettr", "without the queue"), ("ettr_queued", "with it")):
        known = [one for one in rows if one[name] is not None]
        walls = [one["wall_s"] + (one["queued_s"] or 0.0) * (name == "ettr_queued")
                 for one in known]
        if sum(walls) > 0:
            trained = sum(one[name] * wall for one, wall in zip(known, walls, strict=True))
            lines.append(line(f"ETTR {100 * trained / sum(walls):.1f} % {words_} "
                              f"({count(len(known), 'attempt')})"))
    costs: dict[str, list[float]] = {}
    for one in rows:
        if one.get("cost"):
            both = costs.setdefault(one["cost"]["currency"], [0.0, 0.0])
            both[0] += one["cost"]["all"]
            both[1] += one["cost"]["lost"]
    lines += [line(f"cost {all_:,.2f} {currency}, of which {lost:,.2f} brought no training")
              for currency, (all_, lost) in sorted(costs.items())]
    return lines
