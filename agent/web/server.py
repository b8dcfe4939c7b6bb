"""The agent's web server: routes, listeners, and what operators ask.

Owns the server of aiohttp; its client is agent/store/etcd_gateway.py's.  Listens on TCP (loopback
unless configured), on api.sock, and, when set, on a port for metrics and runbooks alone.  A failing
handler is an answer of 500 and a counted error, never more.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from holdfast.collectors.contract import legible
from holdfast.runbooks import index, prose

from ..config.load import ConfigError
from ..config.tls import server_context
from ..config.tokens import is_loopback, openable
from ..core import actions
from ..core.model import FLEET, Request, Subject, node_subject, rank_subject, subject_of
from ..core.model.subject import INCIDENT
from ..core.nodes.kernel_incidents import DETECTOR
from ..daemon.alerts import Full
from ..daemon.operators import Operators
from ..daemon.other_nodes import WHOLE, OtherNodes
from ..daemon.state import AgentState
from ..history.incident_log import IncidentLog
from ..history.journal import Review
from ..metrics.families import CONTENT_TYPE, Exposition
from ..store.base import Conflict, StoreError
from ..system.errors import say
from . import alerts, books, drift, fleet, node_places, openapi, starts, status, visibility
from .auth import RUNBOOKS, STARTS, Authorizer, Roles, Tokens, reader_of, refuse
from .body import ACK, BAD_BODY, BUNDLE, INJECT, LABEL, ActionBody, by, read_body
from .connection_limit import ConnectionLimit, LimitedConnection
from .page import load_page
from .rate_limit import RateLimit

PORTS_TRIED = 64
REASON_MAX = 500
NAMED_MAX = 8  # nodes that a refusal names
INJECT_LIMIT_S = 10.0
HANDSHAKE_S = 10.0  # of TLS
STEP_AGE_MAX_S = 5.0  # healthy agents step every second
FAULTS = ("kill", "stop", "stall", "exception", "hold-gil", "skip-collective")


async def serve(
    state: AgentState, operators: Operators, others: OtherNodes, announce: Callable[[str], None],
    on_ready: Callable[[], None],
) -> None:
    """Serves until cancelled.  A port that cannot be had is said; the rest serves on."""
    server = WebServer(state, operators, others, announce)
    try:
        await server.start()
        on_ready()
        await asyncio.Event().wait()
    finally:
        await server.stop()


class WebServer:
    """Handlers and listeners of one agent; `announce` tells its launchers the page's address."""

    def __init__(
        self, state: AgentState, operators: Operators, others: OtherNodes,
        announce: Callable[[str], None],
    ) -> None:
        self._state, self._operators, self._announce = state, operators, announce
        self._others = others
        self._exposition = Exposition(state)
        self._page, self._policy = load_page()
        self._runners: list[web.AppRunner] = []
        self._listeners: list[asyncio.Server] = []
        api = state.config.api
        self._roles = Roles(Tokens(api.tokens_file), api.tls_operators)
        self._rates = RateLimit()
        errors: list[str] = []
        self._tls = server_context(api, errors)
        if errors:
            raise ConfigError(errors)
        self._runbook_pages = prose.pages()
        self._cached: tuple[int, float, visibility.Json] = (-1, 0.0, {})
        self._encoded: dict[str, bytes] = {}  # cached answers, by how much their reader may see

    # ------------------------------------------------------------- listening

    async def start(self) -> None:
        agent = self._state.config.agent
        runtime = Path(agent.runtime_dir)
        host, _, port = agent.listen.rpartition(":")
        loopback = is_loopback(host)
        if agent.listen and not loopback and not self._roles.tokens and not self._certified:
            raise ConfigError([f"agent.listen = {agent.listen!r} is not loopback: set "
                               "api.tokens_file or api.tls_client_ca, or listen on 127.0.0.1"])
        runner = await self._runner(self._application(loopback, full=True))
        api_socket = runtime / "api.sock"
        api_socket.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        listener = await loop.create_unix_server(self._limit(runner), str(api_socket))
        self._listeners.append(listener)
        api_socket.chmod(0o600 if self._state.is_private else 0o666)
        if agent.listen:
            await self._listen(runner, host, int(port))
        if agent.metrics_listen:
            await self._listen_for_metrics(agent.metrics_listen)

    @property
    def _certified(self) -> bool:
        """Whether nobody is answered without a certificate."""
        return bool(self._state.config.api.tls_client_ca)

    async def _runner(self, application: web.Application) -> web.AppRunner:
        runner = web.AppRunner(application, shutdown_timeout=0.5)
        await runner.setup()
        self._runners.append(runner)
        return runner

    def _limit(self, runner: web.AppRunner) -> ConnectionLimit:
        assert runner.server is not None  # it is made by setup
        on_error = functools.partial(self._state.errors, "web connections")
        return ConnectionLimit(runner.server, on_error)

    async def _open(
        self, runner: web.AppRunner, host: str, port: int, over: ssl.SSLContext | None = None
    ) -> int:
        """Listens, and returns the port.  Raises OSError where it cannot be had."""
        limit = self._limit(runner)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            limit, host.strip("[]"), port, ssl=over,
            ssl_handshake_timeout=HANDSHAKE_S if over else None)
        self._listeners.append(listener)
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def _listen(self, runner: web.AppRunner, host: str, port: int) -> None:
        """A node agent takes its port or says why not; a private one takes the next free."""
        tries = PORTS_TRIED if self._state.is_private and port else 1
        for number in range(port, port + tries):
            try:
                bound = await self._open(runner, host, number, self._tls)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or number == port + tries - 1:
                    self._state.errors("web", f"{host}:{number}: {error.strerror}: set "
                                         "agent.listen to a free address")
                    return
                continue
            address = f"http{'s' if self._tls else ''}://{legible(openable(host))}:{bound}"
            place = Path(self._state.config.agent.runtime_dir) / "address"
            draft = place.with_suffix(".new")  # so that a reader never sees half of it
            draft.write_text(address + "\n")
            draft.replace(place)
            self._announce(address)
            say(f"live page {address}")
            return

    async def _listen_for_metrics(self, address: str) -> None:
        """Takes the address or says why not: the API is there without it."""
        host, _, port = address.rpartition(":")
        runner = await self._runner(self._application(True, full=False))
        try:
            await self._open(runner, host, int(port))
        except OSError as error:
            self._state.errors("web", f"agent.metrics_listen = {address!r}: "
                               f"{error.strerror}: set a free address")

    async def stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        for runner in self._runners:
            await runner.cleanup()
        (Path(self._state.config.agent.runtime_dir) / "api.sock").unlink(missing_ok=True)

    def _application(self, loopback: bool, full: bool) -> web.Application:
        headers = {
            "Content-Security-Policy": self._policy, "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }

        async def add_headers(request: web.Request, answer: web.StreamResponse) -> None:
            for name, value in headers.items():
                answer.headers.setdefault(name, value)

        # The metrics listener serves no data of the API; its readers come from other machines.
        authorizer = Authorizer(
            self._roles, loopback and full, self._run_owner, self._state.audit, self._rates)
        application = web.Application(
            middlewares=[authorizer.check] if full else [],
            client_max_size=self._state.config.api.max_body_bytes)
        application.on_response_prepare.append(add_headers)
        routes: list[tuple[str, str, Callable[[web.Request], Awaitable[web.Response]]]] = [
            ("GET", "/metrics", self._metrics),
            ("GET", "/healthz", self._healthz),
            ("GET", "/readyz", self._readyz),
            # An alert's link leads to what Prometheus scrapes: its label `instance`.
            ("GET", RUNBOOKS, self._runbooks), ("GET", RUNBOOKS + "/{page:.+}", self._runbook)]
        if full:
            routes += [
                ("GET", "/", self._index), ("GET", openapi.ROUTE, self._openapi),
                ("GET", "/api/v1/status", self._status),
                ("GET", "/api/v1/incidents", self._incidents),
                ("GET", "/api/v1/incidents/{id:.+}", self._incident),
                ("GET", "/api/v1/fleet/{what}", self._fleet),
                ("GET", "/api/v1/refusals", self._refusals),
                ("GET", "/api/v1/ledger", self._ledger),
                ("GET", "/api/v1/jobs", self._jobs),
                ("GET", "/api/v1/runs/{run}/curves", self._curves),
                ("GET", "/api/v1/explain/{fault}", self._explain),
                ("GET", "/api/v1/drift", self._drift),
                ("GET", "/api/v1/checks", self._checks),
                ("GET", "/api/v1/requests", self._asked),
                ("GET", "/api/v1/requests/{id}", self._answered),
                ("GET", "/api/v1/alerts", self._alerts_kept),
                ("POST", "/api/v1/alerts", self._alerts_sent),
                ("POST", "/api/v1/runs/{run}/{verb}", self._ask_run),
                ("POST", "/api/v1/nodes/{node}/{verb}", self._ask_node),
                ("POST", "/api/v1/fleet/{verb}", self._ask_fleet),
                ("POST", STARTS + "{verb}", lambda one: starts.answer(one, self._others.starts)),
                *(("POST", f"/api/v1/incidents/{{id:.+}}/{verb}", handler)
                  for verb, handler in (("close", self._close), ("ack", self._ack),
                                        ("label", self._label), ("bundle", self._bundled))),
            ]
        for method, path, handler in routes:
            application.router.add_route(method, path, self._guarded(handler))
        return application

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            connection = request.protocol
            assert isinstance(connection, LimitedConnection)
            connection.begin()
            try:
                return await handler(request)
            except web.HTTPException:
                raise
            except Exception as error:  # border of a request
                left = isinstance(error, ConnectionError) and request.transport is None
                if not left:  # before all of the request was read
                    self._state.errors("web", error)
                return refuse(500, "the agent failed to answer; see its log", "")
            finally:
                connection.serving = False

        return answer

    def _run_owner(self, run: str) -> int | None:
        session = self._state.launchers.session(run)
        return session.uid if session is not None else None

    # ------------------------------------------------------------- reading

    def _reader(self, request: web.Request) -> visibility.Reader:
        of_incident = self._state.incident_log.owner
        return reader_of(request, self._roles, self._run_owner, of_incident)

    async def _index(self, request: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8")

    async def _runbooks(self, request: web.Request) -> web.Response:
        """The index by symptom: text, or with links where HTML is asked for."""
        pages = self._runbook_pages
        if self._state.config.runbooks.serve:
            pages = pages | {legible(name): text for name, text in self._state.site_pages.items()}
        found = index.by_symptom(pages)
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(text=index.as_html(found, RUNBOOKS), content_type="text/html")
        return web.Response(text=index.as_text(found, RUNBOOKS))

    async def _runbook(self, request: web.Request) -> web.Response:
        """A runbook as text: what an alert's runbook_url opens.  The site's own go before the
        shipped ones, where they may be served."""
        name = request.match_info["page"].removesuffix(".md")
        own = self._state.site_pages.get(name)
        if own is not None and self._state.config.runbooks.serve:
            return web.Response(text=own)
        text = self._runbook_pages.get(name)
        if text is not None:
            return web.Response(text=text)
        if own is not None:
            return refuse(403, f"{name} is this site's own, and not served by this agent: read it "
                          f"on the node by `holdfast explain {name}`", "runbooks.serve = true")
        return refuse(404, "no such runbook", f"a page that {RUNBOOKS} lists; one of the site's "
                      "own is NAME.md in runbooks.directory here, and is there after a reload")

    async def _openapi(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode(openapi.document()))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _healthz(self, request: web.Request) -> web.Response:
        age_s = time.monotonic() - self._state.last_step_s
        if age_s > STEP_AGE_MAX_S:
            return web.Response(status=503, text=f"no step for {age_s:.1f} s\n")
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        observed = self._state.snapshot.observed
        if not observed.store.up:
            return web.Response(status=503, text="the store does not answer\n")
        if observed.journal_stalled:
            return web.Response(status=503, text="the journal is stalled\n")
        return web.Response(text="ready\n")

    async def _status(self, request: web.Request) -> web.Response:
        """Made at most once a step and a quarter second, however many pages are open."""
        who = self._reader(request)
        number, made_s, document = self._cached
        now_s = time.monotonic()
        if number != self._state.snapshot.number or now_s - made_s > 0.25:
            document = status.status(self._state)
            self._cached = (self._state.snapshot.number, now_s, document)
            self._encoded.clear()
        key = "everything" if who.everything else f"uid {who.uid}"
        if key not in self._encoded:
            self._encoded[key] = msgspec.json.encode(visibility.status(document, who))
        return _json(self._encoded[key])

    async def _incidents(self, request: web.Request) -> web.Response:
        everything = request.query.get("all", "") not in ("", "0")
        found = status.incidents(self._state, everything)
        return _json(msgspec.json.encode(visibility.incidents(found, self._reader(request))))

    async def _incident(self, request: web.Request) -> web.Response:
        incident = self._state.incident_log.incidents.get(request.match_info["id"])
        if incident is None:
            word = await self._others.incident(request.match_info["id"])
            if word is None:
                return refuse(404, "no such incident", "an id that /api/v1/incidents lists")
            found = fleet.as_read("incident", word, self._reader(request))
            return _json(msgspec.json.encode(found | {"node": word.node, "age_s": word.age_s}))
        (one,) = visibility.incidents(
            [status.reviewed(self._state, incident, self._state.jobs.attempts())],
            self._reader(request))
        return _json(msgspec.json.encode(one))

    async def _fleet(self, request: web.Request) -> web.Response:
        """The same of every node, with the age of its word, and why one says nothing."""
        what = request.match_info["what"]
        if what not in WHOLE:
            return refuse(404, f"{what!r} is nothing that all nodes answer",
                          f"one of {', '.join(WHOLE)}")
        who = self._reader(request)
        rows = [fleet.row(what, word, who) for word in await self._others.words(what)]
        return _json(msgspec.json.encode({"node": self._state.name, "nodes": rows}))

    async def _refusals(self, request: web.Request) -> web.Response:
        """Who asked for what they may not: all of it, or a reader's own."""
        who = self._reader(request)
        return web.json_response([
            one._asdict() for one in self._state.audit.listed()
            if who.everything or (who.uid is not None and who.uid == one.uid)])

    async def _asked(self, request: web.Request) -> web.Response:
        """What people asked for, with what became of it; what concerns others' runs is left out."""
        who = self._reader(request)
        return _json(msgspec.json.encode([
            one for one in self._operators.asked()
            if not (run := subject_of(one["subject"]).run) or who.may(run)]))

    async def _answered(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        found = self._operators.answer(id) or await self._others.request_state(id)
        if found is None:
            return refuse(404, "no such request", "an id that a POST was answered with")
        return web.json_response(found)

    async def _explain(self, request: web.Request) -> web.Response:
        """What would be done about a fault now: the core is asked, and nothing is changed."""
        return _json(msgspec.json.encode(self._state.outlook(request.match_info["fault"])))

    async def _ledger(self, request: web.Request) -> web.Response:
        return _json(msgspec.json.encode(status.ledger(self._state)))

    async def _jobs(self, request: web.Request) -> web.Response:
        """Attempts of runs, the newest first; why another's ended is left out."""
        found = visibility.jobs(books.jobs(self._state), self._reader(request))
        return _json(msgspec.json.encode(found))

    async def _curves(self, request: web.Request) -> web.Response:
        """Loss and step time of a run over its life here: [wall_s, step, generation, step_s, loss]
        each."""
        run = request.match_info["run"]
        if self._state.launchers.session(run) is None:
            return refuse(404, f"no run {run!r} on this node", "a run that /api/v1/status lists")
        return _json(msgspec.json.encode(self._state.curves.of(run)))

    async def _drift(self, request: web.Request) -> web.Response:
        run = request.query.get("run", "")
        if run and self._state.launchers.session(run) is None:
            return refuse(404, f"no run {run!r} on this node", "a run that /api/v1/status lists")
        return _json(msgspec.json.encode(drift.drift(self._state, run)))

    async def _alerts_kept(self, request: web.Request) -> web.Response:
        """Alerts that were sent here, with what became of each; others' runs are left out."""
        who = self._reader(request)
        found = [one for one in self._operators.alerts.told() if who.may(one.run)]
        return _json(msgspec.json.encode(found))

    async def _checks(self, request: web.Request) -> web.Response:
        """What was checked last in this boot.  A reason may name a path, or a user's process."""
        who = self._reader(request)
        found = status.checks(self._state)
        return _json(msgspec.json.encode(found if who.everything else visibility.checks(found)))

    # ------------------------------------------------------------- asking

    async def _alerts_sent(self, request: web.Request) -> web.Response:
        """The webhook of Alertmanager and Grafana.  What cannot be kept is sent again by them."""
        try:
            whole = request.clone(client_max_size=alerts.BODY_MAX_BYTES)
            delivered = alerts.read(await whole.read(), time.time())
            new = await self._operators.alerts.take(delivered)
        except web.HTTPException:
            raise
        except BAD_BODY as error:
            return refuse(400, str(error), "Alertmanager's webhook, version 4, or Grafana's")
        except (Full, StoreError, Conflict, TimeoutError) as error:
            return refuse(503, str(error), "send it again")
        return web.json_response({"alerts": len(delivered), "new": new})

    async def _ask_run(self, request: web.Request) -> web.Response:
        run, verb = request.match_info["run"], request.match_info["verb"]
        leader, is_here = self._others.leader(run), self._state.launchers.session(run) is not None
        if not is_here and (not leader or verb == INJECT):
            return refuse(404, f"no run {run!r} on this node", "a run that /api/v1/status lists")
        known = {**actions.of_run(), INJECT: INJECT}
        if verb not in known:
            return refuse(404, f"{verb!r} is no verb", f"one of {', '.join(known)}")
        body = await read_body(request, known[verb])
        if isinstance(body, web.Response):
            return body
        if verb == INJECT:
            return await self._inject(request, run, body)
        subject = rank_subject(run, body.rank)
        to = leader if not is_here or actions.is_by_leader(known[verb]) else ""
        return await self._ask(request, known[verb], subject, run, body, to=to)

    async def _ask_node(self, request: web.Request) -> web.Response:
        node, verb = request.match_info["node"], request.match_info["verb"]
        known, of_fleet = actions.of_node(), node_places.names(self._state)
        if node != self._state.name and not actions.marks_node(known.get(verb, "")):
            return refuse(404, f"this is node {self._state.name}", "ask that node's own agent")
        if node not in of_fleet:
            return refuse(404, f"no node {node!r} is known here", f"one of {_some(of_fleet)}")
        if verb not in known:
            return refuse(404, f"{verb!r} is no verb", f"one of {', '.join(known)}")
        body = await read_body(request, known[verb])
        if isinstance(body, web.Response):
            return body
        names: tuple[str, ...] = ()
        if known[verb] == actions.RUN_CHECK:
            try:
                names = status.checks_named(self._state, body.args.get("checks", []))
            except ValueError as error:
                return refuse(400, str(error), '"args": {"checks": ["devices", "tensor"]}')
        return await self._ask(request, known[verb], node_subject(node), "", body, names)

    async def _ask_fleet(self, request: web.Request) -> web.Response:
        verb, known = request.match_info["verb"], actions.of_fleet()
        if verb not in known:
            return refuse(404, f"{verb!r} is no verb", f"one of {', '.join(known)}")
        body = await read_body(request, known[verb])
        if isinstance(body, web.Response):
            return body
        return await self._ask(request, known[verb], FLEET, "", body)

    async def _close(self, request: web.Request) -> web.Response:
        incident = self._state.incident_log.incidents.get(request.match_info["id"])
        if incident is None:
            return await self._not_here(request.match_info["id"])
        of_kernel_log = {
            (verdict.fault, verdict.subject) for verdict in self._state.snapshot.decision.verdicts
            if verdict.detector == DETECTOR}
        if (incident.fault, incident.subject) not in of_kernel_log:
            return refuse(409, "it closes by itself, or has closed",
                          "an open incident of the kernel's log")
        body = await read_body(request, actions.CLOSE_INCIDENT)
        if isinstance(body, web.Response):
            return body
        subject = str(Subject(INCIDENT, incident.id))
        return await self._ask(request, actions.CLOSE_INCIDENT, subject, "", body)

    async def _ack(self, request: web.Request) -> web.Response:
        return await self._reviewed(request, ACK, lambda log, id, body, by: log.acknowledge(
            id, by, body.reason[:REASON_MAX], time.time()))

    async def _label(self, request: web.Request) -> web.Response:
        def label(log: IncidentLog, id: str, body: ActionBody, by: str) -> Review:
            right = body.args.get("label")
            if not isinstance(right, bool):
                raise TypeError("args.label is true or false")
            return log.label(id, right, by, body.reason[:REASON_MAX], time.time())

        return await self._reviewed(request, LABEL, label)

    async def _reviewed(
        self, request: web.Request, action: str,
        review: Callable[[IncidentLog, str, ActionBody, str], Review],
    ) -> web.Response:
        """What a person says of an incident, kept in the journal; nothing follows from it."""
        id, log = request.match_info["id"], self._state.incident_log
        body = await read_body(request, action)
        if isinstance(body, web.Response):
            return body
        if id not in log.incidents:
            return await self._not_here(id)
        try:
            made = review(log, id, body, by(request, body))
        except TypeError as error:
            return refuse(400, str(error), '"args": {"label": true}')
        except ValueError as error:
            return refuse(409, str(error), "a label is given once")
        self._state.keep(made)
        return web.json_response({"id": id})

    async def _not_here(self, id: str) -> web.Response:
        word = await self._others.incident(id)
        if word is None:
            return refuse(404, "no such incident", "an id that /api/v1/incidents lists")
        return refuse(409, f"it is {word.node}'s", f"ask there: `holdfast` on {word.node}")

    async def _ask(
        self, request: web.Request, action: str, subject: str, run: str, body: ActionBody,
        checks: tuple[str, ...] = (), to: str = "",
    ) -> web.Response:
        """`to`: the other node whose core it is for."""
        made = _request(request, action, subject, body, run, checks)
        if to:
            try:
                await self._others.forward(to, made)
            except ConnectionError as error:
                return refuse(503, f"{to} leads run {run}: {error}", "ask again, or ask there")
        elif not self._operators.request(made):
            return refuse(429, "too many requests wait already", "try again in a minute")
        answer = {"id": made.id, "kind": action, "subject": subject}
        return web.json_response(answer | ({"node": to} if to else {}), status=202)

    async def _inject(self, request: web.Request, run: str, body: ActionBody) -> web.Response:
        if not self._state.config.inject.enabled:
            return refuse(403, "faults on purpose are off here", "inject.enabled = true")
        if body.fault not in FAULTS:
            return refuse(400, f"{body.fault!r} is no fault", f"fault: one of {', '.join(FAULTS)}")
        rank = max(0, body.rank)
        made = _request(request, f"{INJECT} {body.fault}", rank_subject(run, rank), body, run)
        order = {"t": INJECT, "id": made.id, "fault": body.fault, "rank": rank, "args": body.args}
        try:
            outcome = await self._operators.direct(made, order, INJECT_LIMIT_S)
        except ConnectionError as error:
            return refuse(503, str(error), "wait until the launcher is back")
        except TimeoutError:
            return refuse(504, "the launcher did not answer", "")
        if not outcome.ok:
            return refuse(409, outcome.error, "")
        return web.json_response({"id": outcome.id, "detail": outcome.detail})

    async def _bundled(self, request: web.Request) -> web.Response:
        """A person took an incident's bundle, which the command line makes: for the journal."""
        id = request.match_info["id"]
        body = await read_body(request, BUNDLE)
        if isinstance(body, web.Response):
            return body
        if id not in self._state.incident_log.incidents:
            return await self._not_here(id)
        self._operators.done(_request(request, BUNDLE, str(Subject(INCIDENT, id)), body))
        return web.json_response({"id": id})


def _request(
    request: web.Request, action: str, subject: str, body: ActionBody, run: str = "",
    checks: tuple[str, ...] = (),
) -> Request:
    return Request(
        id=f"op-{uuid.uuid4().hex[:12]}", action=action, subject=subject,
        reason=body.reason[:REASON_MAX], run=run, by=by(request, body), checks=checks,
        until_wall_s=time.time() + body.for_s if body.for_s else 0.0)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
