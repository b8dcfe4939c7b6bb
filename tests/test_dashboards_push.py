"""`holdfast dashboards push` against a stand-in for Grafana's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from grafana import TOKEN, Grafana, grafana

from holdfast.agent.cli import main
from holdfast.dashboards.grafana import push as grafana_push

Captured = pytest.CaptureFixture[str]
UIDS = {f"holdfast-{name}" for name in ("fleet", "run", "node", "recovery")}


class Pushed:
    def __init__(self, held: Grafana, url: str, folder: Path, capsys: Captured) -> None:
        self.held, self.url, self.capsys = held, url, capsys
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")
        self.token.chmod(0o600)

    def __call__(self, *more: str, code: int = 0) -> str:
        """What it said; errors of which there must be some if `code` says so."""
        self.held.asked.clear()
        found = main(["dashboards", "push", "--url", self.url, "--token-file", str(self.token),
                      *more])
        said = self.capsys.readouterr()
        assert found == code, said
        return said.out if code == 0 else said.err

    def wrote(self) -> bool:
        return any(method != "GET" for method, _ in self.held.asked)


@pytest.fixture(params=["", "/tools/grafana"])
def push(request: pytest.FixtureRequest, tmp_path: Path, capsys: Captured) -> Iterator[Pushed]:
    with grafana(request.param) as (held, url):
        yield Pushed(held, url, tmp_path, capsys)


def test_the_second_push_changes_nothing(push: Pushed) -> None:
    said = push()
    assert said.splitlines()[0] == "folder Holdfast: created"
    assert said.count("created") == 5 and set(push.held.boards) == UIDS
    for one in push.held.boards.values():
        assert one["meta"]["folderUid"] == "holdfast"
        chosen = one["dashboard"]["templating"]["list"][0]
        assert chosen["name"] == "datasource" and chosen["current"]["value"] == "prom-1"
        one["dashboard"]["weekStart"] = "monday"  # a field that Grafana adds
    again = push()
    assert again.count("unchanged") == 4 and not push.wrote()


def test_what_a_person_changed_is_shown_and_put_right(push: Pushed) -> None:
    push()
    board = push.held.boards["holdfast-node"]["dashboard"]
    board["title"], board["version"], board["weekStart"] = "Mine", 7, "monday"
    said = push("--dry-run", "--diff")
    assert "dashboard Holdfast: node: would be changed" in said and said.count("unchanged") == 3
    assert '- "title": "Mine",' in said and '+ "title": "Holdfast: node",' in said
    assert "weekStart" not in said and not push.wrote()
    assert "dashboard Holdfast: node: changed\n" in push()
    assert push.held.boards["holdfast-node"]["dashboard"]["version"] == 8


def test_a_save_in_between_is_not_overwritten(push: Pushed) -> None:
    push()
    board = push.held.boards["holdfast-fleet"]["dashboard"]
    board["title"] = "Mine"

    def somebody() -> None:
        board["version"] += 1

    push.held.before_save = somebody
    assert "412: Client Error 412: The dashboard has been changed" in push(code=1)
    assert push.held.boards["holdfast-fleet"]["dashboard"]["title"] == "Mine"


def test_a_dry_run_writes_nothing_anywhere(push: Pushed) -> None:
    said = push("--dry-run")
    assert said.count("would be created") == 5 and not push.wrote()
    assert not push.held.boards and not push.held.folders


def test_dashboards_go_to_the_folder_that_is_named_and_else_stay(push: Pushed) -> None:
    push.held.folders += [{"uid": "u1", "title": "Training"}, {"uid": "u2", "title": "Twice"},
                          {"uid": "u3", "title": "Twice"}]
    push("--folder", "Training")
    assert {one["meta"]["folderUid"] for one in push.held.boards.values()} == {"u1"}
    assert push().count("unchanged") == 4, "nothing was named, so they stay where they are"
    assert "2 folders are called 'Twice': give --folder a uid (u2, u3)" in push(
        "--folder", "Twice", code=1)
    push("--folder", "u3")
    assert {one["meta"]["folderUid"] for one in push.held.boards.values()} == {"u3"}
    assert "folder New one: created" in push("--folder", "New one")
    push.held.list_is_cut = True
    assert push("--folder", "New one").count("unchanged") == 4


def test_the_data_source_is_chosen_or_asked_for(push: Pushed) -> None:
    push.held.sources = [{"uid": "l", "name": "Loki", "type": "loki", "isDefault": True},
                         {"uid": "a", "name": "A", "type": "prometheus"},
                         {"uid": "b", "name": "B", "type": "prometheus"}]
    said = push(code=1)
    assert "--datasource prometheus=UID (there are: A (a), B (b))" in said
    push("--datasource", "prometheus=b")
    board = push.held.boards["holdfast-run"]["dashboard"]
    assert board["templating"]["list"][0]["current"]["value"] == "b"
    assert "no data source of type prometheus with uid 'l'" in push(
        "--datasource", "prometheus=l", code=1)
    assert "set it as prometheus=UID" in push("--datasource", "loki=l", code=2)
    push.held.forbidden.add("/api/datasources")
    assert "may not list data sources" in push(code=1)
    push("--datasource", "prometheus=b")


@pytest.mark.parametrize("page", [
    (200, "<html>Log in</html>"), (502, "<html>no message from upstream</html>"), (500, "[]"),
    (503, '{"message": "database is locked"}'), (404, '{"message": "Not found"}')])
def test_what_is_not_grafana_is_said_in_one_line(push: Pushed, page: tuple[int, str]) -> None:
    push.held.page = page
    said = push(code=1)
    assert said.startswith("holdfast: http://127.0.0.1:") and said.count("\n") == 1


def test_a_token_that_serves_nothing_is_said(push: Pushed) -> None:
    push.token.write_text("another")
    assert "401: Unauthorized (the token is not accepted" in push(code=1)
    push.token.write_text("two words\n")
    assert "no token: one line" in push(code=1)
    push.token.chmod(0o644)
    assert "others may read it: chmod 600" in push(code=1)
    push.token.unlink()
    assert "No such file" in push(code=1)
    assert not push.held.asked


def test_no_server_and_no_address_are_said(tmp_path: Path, capsys: Captured) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for url, words in (
            ("http://127.0.0.1:1", "does not answer as Grafana does: Connection refused\n"),
            ("grafana:3000", "is no address"),
            ("http://h:x", "Port could not"), ("http://", "is no address")):
        assert main(["dashboards", "push", "--url", url, "--token-file", str(token)]) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said
    unresolved = OSError("HTTPConnectionPool(host='h', port=80): Max retries exceeded (Caused by "
                         "NameResolutionError(\"Failed ([Errno -2] Name or service not known)\"))")
    assert grafana_push._cause(unresolved) == "Name or service not known"
    assert grafana_push._cause(OSError("Read timed out. (15)")) == "nothing within 15 s"
    assert main(["dashboards", "push", "--url", "http://h"]) == 2
    assert main(["dashboards", "push", "--to", "x", "--url", "u", "--token-file", "f"]) == 2
    assert main(["dashboards", "render", "--dry-run"]) == 2


def test_a_rendered_dashboard_and_a_pushed_one_are_one(push: Pushed, tmp_path: Path) -> None:
    push("--runbook-base", "https://wiki/books")
    assert main(["dashboards", "render", "--to", str(tmp_path / "r"), "--runbook-base",
                 "https://wiki/books"]) == 0
    for uid in UIDS:
        file = json.loads((tmp_path / f"r/{uid}.json").read_text())
        kept = dict(push.held.boards[uid]["dashboard"])
        file["templating"]["list"][0]["current"] = {"text": "prom-1", "value": "prom-1"}
        assert {**kept, "id": None, "version": None} == {**file, "id": None, "version": None}
