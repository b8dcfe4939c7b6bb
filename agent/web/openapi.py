"""The API as an OpenAPI document, served at /api/v1/openapi.json.

Owns what is said of each route: parameters, body, and every status that it may answer with.  A test
holds the list equal to the server's routes, and another holds a running agent to the document.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..core import actions
from ..daemon.other_nodes import WHOLE
from ..system.version import VERSION
from .starts import VERBS as STARTS

ROUTE = "/api/v1/openapi.json"
Json = dict[str, Any]
JSON, TEXT = "application/json", "text/plain"
ERRORS = {
    400: "not understood: the body says what to set",
    401: "a token, or another one, is needed",
    403: "this one may not",
    404: "there is none of that name here",
    405: "no such method",
    409: "it cannot be done as things are",
    413: "the body is too long",
    429: "too many requests",
    500: "the agent failed to answer",
    503: "not now: ask again",
    504: "the launcher did not answer",
}
EVERYWHERE = (401, 403, 405, 429, 500)


def _errors(*also: int) -> Json:
    body = {"content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {str(one): {"description": ERRORS[one], **body} for one in sorted({*EVERYWHERE, *also})}


def _answer(text: str, schema: Json, kind: str = JSON) -> Json:
    return {"description": text, "content": {kind: {"schema": schema}}}


def _get(
    summary: str, schema: str = "object", *also: int, query: Json | None = None, kind: str = JSON
) -> Json:
    made: Json = {
        "summary": summary,
        "responses": {"200": _answer(summary, {"type": schema}, kind), **_errors(*also)}}
    if query:
        made["parameters"] = [{"name": name, "in": "query", "required": False,
                               "schema": {"type": "string"}, "description": text}
                              for name, text in query.items()]
    return made


def _post(summary: str, body: str, status: int, *also: int) -> Json:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {
            JSON: {"schema": {"$ref": f"#/components/schemas/{body}"}}}},
        "responses": {
            str(status): _answer(summary, {"type": "object"}), **_errors(400, 413, *also)},
        "security": [{"token": []}],
    }


def _path(name: str, text: str, words: list[str] | None = None) -> Json:
    schema: Json = {"type": "string", "minLength": 1} | ({"enum": words} if words else {})
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": text}


def paths() -> Json:
    """Every route of the API by path and method.  What may be asked of runs and nodes is read from
    the table of actions."""
    incident, run = _path("id", "an incident's id"), _path("run", "a run on this node")
    page = _path("page", "as the list names it")
    run_verb = _path("verb", "what to do", [*sorted(actions.of_run()), "inject"])
    node_verb = _path("verb", "what to do", sorted(actions.of_node()))
    return {
        "/": {"get": _get("The live page", "string", kind="text/html")},
        "/healthz": {"get": _get("Whether it steps", "string", 503, kind=TEXT)},
        "/readyz": {"get": _get("Whether it decides", "string", 503, kind=TEXT)},
        "/metrics": {"get": _get("Metrics for Prometheus", "string", kind=TEXT)},
        "/runbooks": {"get": _get("The runbooks by symptom", "string", kind=TEXT)},
        "/runbooks/{page}": {
            "parameters": [page], "get": _get("One runbook", "string", 403, 404, kind=TEXT)},
        ROUTE: {"get": _get("This document")},
        "/api/v1/status": {"get": _get("The node, its runs, open incidents and faults")},
        "/api/v1/incidents": {"get": _get(
            "Incidents, newest first", "array", query={"all": "1: every closed one too"})},
        "/api/v1/incidents/{id}": {
            "parameters": [incident], "get": _get("One incident", "object", 404)},
        "/api/v1/incidents/{id}/close": {
            "parameters": [incident],
            "post": _post("Say that it is repaired", "Reason", 202, 404, 409)},
        "/api/v1/incidents/{id}/ack": {
            "parameters": [incident],
            "post": _post("Say that a person has it", "Review", 200, 404, 409)},
        "/api/v1/incidents/{id}/label": {
            "parameters": [incident],
            "post": _post("Say whether it was right", "Review", 200, 404, 409)},
        "/api/v1/incidents/{id}/bundle": {
            "parameters": [incident],
            "post": _post("Say that a person took its bundle", "Reason", 200, 404, 409)},
        "/api/v1/fleet/{what}": {
            "parameters": [_path("what", "what every node answers", list(WHOLE))],
            "get": _get("The same of every node, with the age of its word", "object", 404)},
        "/api/v1/refusals": {"get": _get("Who asked for what they may not", "array")},
        "/api/v1/ledger": {"get": _get("Seconds by category")},
        "/api/v1/jobs": {"get": _get("Attempts of runs: whose, how each ended", "array")},
        "/api/v1/explain/{fault}": {
            "parameters": [_path("fault", "a runbook's name")],
            "get": _get("What would be done about it now", "array")},
        "/api/v1/drift": {"get": _get(
            "Nodes, and where they differ", "object", 404, query={"run": "of this run alone"})},
        "/api/v1/checks": {"get": _get("Each check's newest verdict")},
        "/api/v1/requests": {"get": _get("What people asked for, newest first", "array")},
        "/api/v1/requests/{id}": {
            "parameters": [_path("id", "as a POST answered")],
            "get": _get("What became of a request", "object", 404)},
        "/api/v1/alerts": {
            "get": _get("Alerts that were sent here", "array"),
            "post": _post("Alertmanager's and Grafana's webhook", "Delivery", 200, 503)},
        "/api/v1/runs/{run}/curves": {
            "parameters": [run], "get": _get("Its loss and step time", "object", 404)},
        "/api/v1/runs/{run}/{verb}": {
            "parameters": [run, run_verb],
            "post": _post("Ask something of a run", "Action", 202, 404, 409, 503, 504)},
        "/api/v1/nodes/{node}/{verb}": {
            "parameters": [_path("node", "this node's name"), node_verb],
            "post": _post("Ask something of this node", "Action", 202, 404)},
        "/api/v1/starts/{verb}": {
            "parameters": [_path("verb", "what to do", list(STARTS))],
            "post": _post("Runs on other nodes, and who accepts them here: over the agent's socket "
                          "alone", "Starts", 200, 404, 409)},
        "/api/v1/fleet/{verb}": {
            "parameters": [_path("verb", "what to do", sorted(actions.of_fleet()))],
            "post": _post("Ask something of every node of the store", "Action", 202, 404)},
    }


SCHEMAS: Json = {
    "Error": {
        "type": "object", "required": ["error"],
        "properties": {"error": {"type": "string"}, "set": {"type": "string"}}},
    "Action": {
        "type": "object", "required": ["reason"], "additionalProperties": False,
        "properties": {
            "reason": {"type": "string", "minLength": 1, "description": "kept in the journal"},
            "by": {"type": "string", "description": "who asks; what the kernel or the token proves "
                                                    "is added"},
            "fault": {"type": "string", "description": "of inject; refused elsewhere"},
            "rank": {"type": "integer", "minimum": -1, "maximum": 1048576,
                     "description": "of restart and inject, refused elsewhere; -1: none in "
                                    "particular"},
            "for_s": {"type": "number", "minimum": 0, "maximum": 2592000,
                      "description": "of pause, refused elsewhere; 0: until resumed"},
            "args": {"type": "object", "description": "`checks` of check, `seconds` of inject's "
                                                      "stall and hold-gil; refused elsewhere"}}},
    "Starts": {
        "type": "object", "additionalProperties": False,
        "properties": {
            "nodes": {"type": "array", "items": {"type": "string"}}, "run": {"type": "string"},
            "order": {"type": "object", "description": "of start alone"},
            "life": {"type": "string", "description": "of next, as the two below; `runs` of still "
                                                      "as well"},
            "wait_s": {"type": "number", "minimum": 0, "maximum": 30},
            "runs": {"type": "array", "maxItems": 64, "items": {"type": "object"}}}},
    "Reason": {
        "type": "object", "required": ["reason"], "additionalProperties": False,
        "properties": {
            "reason": {"type": "string", "minLength": 1}, "by": {"type": "string"}}},
    "Review": {
        "type": "object", "additionalProperties": False,
        "properties": {
            "reason": {"type": "string"}, "by": {"type": "string"},
            "args": {"type": "object", "properties": {"label": {"type": "boolean"}}}}},
    "Delivery": {
        "type": "object", "required": ["alerts"],
        "properties": {
            "receiver": {"type": "string"}, "externalURL": {"type": "string"},
            "alerts": {"type": "array", "maxItems": 1000, "items": {
                "type": "object", "required": ["status", "labels", "fingerprint", "startsAt"],
                "properties": {
                    "status": {"enum": ["firing", "resolved"]},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
                    "fingerprint": {"type": "string", "minLength": 1},
                    "startsAt": {"type": "string", "minLength": 1}}}}}},
}


@lru_cache(maxsize=1)
def document() -> Json:
    """OpenAPI 3.1."""
    found = paths()
    found["/api/v1/runs/{run}/{verb}"]["post"]["responses"]["200"] = _answer(
        "A fault was injected", {"type": "object"})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast", "version": VERSION, "license": {"name": "Apache-2.0"},
            "description": "The agent of one node. Reading is free on loopback, but for the words "
                           "of other people's jobs; changing something needs a role."},
        "paths": found,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
