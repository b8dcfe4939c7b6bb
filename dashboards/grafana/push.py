"""Dashboards into a Grafana server: folder, data source, what differs, and what was changed.

Owns what is sent and in which order; the requests are grafana_api's, whose import (requests and its
own four) only `dashboards push` pays for.  Never deletes anything.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .panels import SOURCE_VARIABLE

TIMEOUT_S = 15.0
FOLDER = "Holdfast"
UID_MAX = 40  # of folders and dashboards, as Grafana's documents say
MESSAGE = "written by holdfast dashboards push"
OWN_FIELDS = ("id", "version")  # Grafana's, in what it answers
MISSING = 404
CONFLICTS = (409, 412)
PROMETHEUS = "prometheus"


class Refused(Exception):
    """What keeps the dashboards out, and what to do about it."""


class Change(NamedTuple):
    """What became, or would become, of one dashboard or folder."""

    what: str
    done: str  # created | changed | unchanged
    diff: str = ""


class Server:
    """A Grafana server.  Every failure of a call is `Refused`."""

    def __init__(self, url: str, token: str) -> None:
        from grafana_api.grafana_face import GrafanaFace

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise Refused(f"{url!r} is no address of a Grafana server: set --url to one like "
                          "https://grafana.example.com or http://localhost:3000/grafana")
        path = parts.path.strip("/")
        try:
            port = parts.port
        except ValueError as error:
            raise Refused(f"{url!r}: {error}") from error
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.url = url
        self._api = GrafanaFace(
            token, host=host, port=port, protocol=parts.scheme, timeout=TIMEOUT_S,
            url_path_prefix=f"{path}/" if path else "")

    def folders(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask(self._api.folder.get_all_folders)
        return found

    def create_folder(self, title: str, uid: str) -> str:
        """Its uid.  A folder that the list did not show is found by its uid."""
        made = self._ask(self._api.folder.create_folder, title, uid, missing_at=CONFLICTS)
        if made is None:
            made = self._ask(self._api.folder.get_folder, uid)
        return str(made["uid"])

    def sources(self) -> list[dict[str, Any]] | None:
        """Data sources; None where this token may not list them."""
        found: list[dict[str, Any]] | None = self._ask(
            self._api.datasource.list_datasources, missing_at=(403,))
        return found

    def dashboard(self, uid: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._ask(
            self._api.dashboard.get_dashboard, uid, missing_at=(MISSING,))
        return found

    def save(self, board: Mapping[str, Any], folder_uid: str) -> None:
        """With the version that was read: what somebody saves meanwhile is not lost."""
        self._ask(self._api.dashboard.update_dashboard, {
            "dashboard": board, "folderUid": folder_uid, "message": MESSAGE, "overwrite": False})

    def _ask(self, call: Any, *given: Any, missing_at: tuple[int, ...] = ()) -> Any:
        from grafana_api.grafana_api import GrafanaException

        try:
            return call(*given)
        except GrafanaException as error:
            if error.status_code in missing_at:
                return None
            raise Refused(f"{self.url}: {_words(error)}") from error
        except OSError as error:  # requests' own errors are of it
            raise Refused(f"{self.url} does not answer as Grafana does: {_cause(error)}") from error
        except TypeError as error:  # grafana_api takes a page with the word `message` for JSON
            raise Refused(f"{self.url} answers with a page that is not Grafana's API: is the "
                          "address right?") from error


def _cause(error: OSError) -> str:
    """The system's own words, which requests wraps in three classes' names."""
    said = str(error)
    found = re.search(r"\[Errno -?\d+\] ([^'\")]+)", said)
    if found:
        return found[1]
    return f"nothing within {TIMEOUT_S:g} s" if "timed out" in said else said


def _words(error: Any) -> str:
    """What to do, where the status says it."""
    code = int(error.status_code)
    hints = {
        401: "the token is not accepted: make one for a service account with the role Editor",
        403: "the token may not do this: its service account needs the role Editor",
        412: "somebody saved it meanwhile, or another dashboard of that title is in the folder: "
             "look, and push again",
    }
    hint = f" ({hints[code]})" if code in hints else ""
    return f"{code}: {str(error)[:300]}{hint}"


def source_uid(server: Server, chosen: str) -> tuple[str, str]:
    """(the data source's uid, a remark).  `chosen` is a uid, or "" for the only one or the
    default one among those of Prometheus."""
    listed = server.sources()
    if listed is None:
        if not chosen:
            raise Refused("this token may not list data sources: name the one that scrapes the "
                          f"agents with --datasource {PROMETHEUS}=UID")
        return chosen, f"data source {chosen}: taken as given, for this token may not list them"
    found = [one for one in listed if one.get("type") == PROMETHEUS]
    known = ", ".join(f"{one['name']} ({one['uid']})" for one in found) or "none"
    if chosen:
        if all(one["uid"] != chosen for one in found):
            raise Refused(f"no data source of type {PROMETHEUS} with uid {chosen!r} (there are: "
                          f"{known})")
        return chosen, ""
    defaults = [one for one in found if one.get("isDefault")] or found
    if len(defaults) != 1:
        raise Refused(f"which data source? Choose with --datasource {PROMETHEUS}=UID (there are: "
                      f"{known})")
    return str(defaults[0]["uid"]), ""


def with_source(board: dict[str, Any], uid: str) -> dict[str, Any]:
    """The dashboard with that data source chosen when it opens."""
    variables = [
        {**one, "current": {"text": uid, "value": uid}} if one["name"] == SOURCE_VARIABLE else one
        for one in board["templating"]["list"]]
    return {**board, "templating": {"list": variables}}


def push(
    server: Server, boards: Iterable[str], folder: str, uid: str, dry_run: bool = False
) -> Iterator[Change]:
    """Saves what differs.  `folder` "" leaves a dashboard where it is, and a new one goes to the
    folder Holdfast."""
    found = _folder(server, folder or FOLDER)
    made = ""
    for text in boards:
        wanted = with_source(json.loads(text), uid)
        kept = server.dashboard(wanted["uid"])
        if found is None and (folder or kept is None):
            if not made:
                made = _uid_of(folder or FOLDER)
                if not dry_run:
                    made = server.create_folder(folder or FOLDER, made)
                yield Change(f"folder {folder or FOLDER}", "created")
            found = made
        yield _saved(server, wanted, kept, found or "", bool(folder), dry_run)


def _saved(
    server: Server, wanted: dict[str, Any], kept: dict[str, Any] | None, folder_uid: str,
    move: bool, dry_run: bool,
) -> Change:
    name = f"dashboard {wanted['title']}"
    kept = kept or {"dashboard": {}, "meta": {}}
    there, now_in = kept["dashboard"], str(kept["meta"].get("folderUid") or "")
    goes_to = folder_uid if move or not there else now_in
    ours = as_far(there, wanted)
    if ours == wanted and goes_to == now_in:
        return Change(name, "unchanged")
    if not dry_run:
        own = {key: there[key] for key in OWN_FIELDS if key in there}
        server.save({"id": None, **wanted, **own}, goes_to)
    return Change(name, "changed" if there else "created", diff(ours, wanted))


def as_far(there: Any, wanted: Any) -> Any:
    """What stands there of all that we say.  Grafana adds fields of its own."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        return {key: as_far(there[key], value) for key, value in wanted.items() if key in there}
    if isinstance(wanted, list) and isinstance(there, list) and len(there) == len(wanted):
        return [as_far(one, other) for one, other in zip(there, wanted, strict=True)]
    return there


def diff(there: Any, wanted: Any) -> str:
    old, new = (json.dumps(one, indent=1, sort_keys=True).splitlines() if one else []
                for one in (there, wanted))
    return "\n".join(difflib.unified_diff(old, new, "in Grafana", "here", n=2, lineterm=""))


def _folder(server: Server, name: str) -> str | None:
    """The uid of the folder of that uid or title."""
    listed = server.folders()
    if any(one["uid"] == name for one in listed):
        return name
    found = [str(one["uid"]) for one in listed if one["title"] == name]
    if len(found) > 1:
        raise Refused(f"{len(found)} folders are called {name!r}: give --folder a uid "
                      f"({', '.join(found)})")
    return found[0] if found else None


def _uid_of(title: str) -> str:
    """The same for the same title: a second push finds the folder that the first one made."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:UID_MAX] or "holdfast"
