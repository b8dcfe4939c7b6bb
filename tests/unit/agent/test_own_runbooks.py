"""A site's own runbooks at /runbooks, where the link of its own alert leads."""

from __future__ import annotations

import html
import re

import aiohttp
from browsing import browse
from fakes import until
from ports import free_port

from holdfast.agent.config import runbooks
from holdfast.agent.config.runbooks import PAGE_MAX_CHARS, PAGES_MAX_CHARS, load_in_force
from holdfast.runbooks import index, prose

HEAD = """+++
severity = "degraded"
scope    = "run"
ladder   = ["restart_ranks"]
budget   = { count = 2, window_h = 24 }
+++
"""
TEXT = """## Meaning
Two switches of row 7 drop packets. <script>alert(1)</script>

## Mitigation
Call the row's owner; curl -H 'Authorization: Bearer abcdef0123456789' https://switch/
"""


def write(folder, name, text, head=HEAD):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(head + text)


async def read(client, path):
    async with client.get(path) as answer:
        return answer.status, answer.content_type, await answer.text()


def test_a_runbook_of_the_sites_own_opens_wherever_a_shipped_one_does(agent, tmp_path):
    own = tmp_path / "own"
    write(own, "fabric_storm", TEXT)
    write(own, "no_words", "")
    write(own, "rank_hung", "")  # shadows the machine part alone
    write(own, "rank_killed", "## Meaning\nAsk Eve first.\n")
    address = f"127.0.0.1:{free_port()}"

    async def scenario(daemon, node, launcher, tcp, unix):
        async with aiohttp.ClientSession(f"http://{address}") as metrics:
            for client in (tcp, unix, metrics):
                status, kind, text = await read(client, "/runbooks/fabric_storm.md")
                assert (status, kind) == (200, "text/plain")  # never HTML, whatever is in it
                assert "<script>alert(1)</script>" in text
                assert "Bearer ***" in text and "abcdef" not in text
                assert "Ask Eve first." in (await read(client, "/runbooks/rank_killed.md"))[2]
                assert "## Diagnosis" in (await read(client, "/runbooks/rank_hung.md"))[2]
                status, _, text = await read(client, "/runbooks/no_words.md")
                assert status == 200 and "holdfast explain no_words" in text
                assert str(own / "no_words.md") in text
                rows = (await read(client, "/runbooks"))[2].splitlines()
                assert sum("fabric_storm.md" in one for one in rows) == 1
                assert rows[rows.index("  rank_killed.md") + 1].strip() == "Ask Eve first."
                assert rows.index("Of this site") < rows.index("  fabric_storm.md")
                for path in ("/runbooks/../own/fabric_storm.md", "/runbooks/%2e%2e%2fagent.toml",
                             "/runbooks/none.md"):
                    assert (await read(client, path))[0] == 404
            async with metrics.get("/runbooks/fabric_storm.md") as answer:
                assert answer.headers["X-Content-Type-Options"] == "nosniff"

    browse(scenario, agent, tmp_path, runbooks__directory=str(own), agent__metrics_listen=address)


def test_the_index_is_by_symptom_and_every_link_of_it_opens(agent, tmp_path):
    own = tmp_path / "own"
    write(own, "fabric_storm", "## Meaning\nRow <b>7</b> & its switches drop packets.\n")

    async def scenario(daemon, node, launcher, tcp, unix):
        _, kind, text = await read(tcp, "/runbooks")
        assert kind == "text/plain" and max(map(len, text.splitlines())) <= 80
        rows = text.splitlines()
        titles = [one for one in rows if one in index.SYMPTOMS]
        assert titles == list(index.SYMPTOMS)
        hung = rows.index("  rank_hung.md")
        assert rows.index(titles[1]) < hung < rows.index(titles[2])
        async with tcp.get("/runbooks", headers={"Accept": "text/html,*/*;q=0.8"}) as answer:
            assert answer.content_type == "text/html" and answer.headers["X-Frame-Options"]
            page = await answer.text()
        assert "Row &lt;b&gt;7&lt;/b&gt; &amp; its switches" in page and "<script" not in page
        assert re.findall("<h2>(.*?)</h2>", page) == [*map(html.escape, titles), "Of this site"]
        links = re.findall('href="([^"]+)"', page)
        assert len(links) == len(prose.pages()) + 1 == text.count(".md\n")
        for link in links:
            status, _, one = await read(tcp, link)
            assert status == 200 and "## Meaning" in one, link

    browse(scenario, agent, tmp_path, runbooks__directory=str(own))


def test_all_pages_of_a_site_are_listed_with_the_beginning_of_what_they_mean():
    pages = {f"own_{number:04}": "## Meaning\nIt.\n" for number in range(1000)}
    pages["own_0007"] = "## Meaning\n" + "word " * 50_000
    found = index.by_symptom(prose.pages() | pages)
    assert [one.name for one in found[index.OWN]] == sorted(pages)
    assert len(found[index.OWN][7].meaning) <= index.MEANING_MAX
    assert found[index.OWN][7].meaning.endswith("word ...")
    assert sum(map(len, found.values())) == len(prose.pages()) + len(pages)


def test_where_they_are_not_to_be_served_the_page_says_where_to_read_them(agent, tmp_path):
    own = tmp_path / "own"
    write(own, "fabric_storm", TEXT)
    write(own, "rank_killed", "## Meaning\nAsk Eve first.\n")

    async def scenario(daemon, node, launcher, tcp, unix):
        status, _, text = await read(tcp, "/runbooks/fabric_storm.md")
        assert status == 403 and "holdfast explain fabric_storm" in text
        assert "runbooks.serve = true" in text
        _, _, text = await read(tcp, "/runbooks/rank_killed.md")
        assert "## Diagnosis" in text and "Eve" not in text
        assert "Eve" not in (await read(tcp, "/runbooks"))[2]

    browse(scenario, agent, tmp_path, runbooks__directory=str(own), runbooks__serve=False)


def test_a_reload_takes_new_words(agent, tmp_path):
    own = tmp_path / "own"

    async def scenario(daemon, node, launcher, tcp, unix):
        status, _, text = await read(tcp, "/runbooks/fabric_storm.md")
        assert status == 404 and "runbooks.directory" in text
        write(own, "fabric_storm", TEXT)
        await daemon.reload()
        assert daemon.state.reload_ok, daemon.state.reload_error
        await until(lambda: "fabric_storm" in daemon.state.site_pages)
        assert "row 7" in (await read(tcp, "/runbooks/fabric_storm.md"))[2]

    browse(scenario, agent, tmp_path, runbooks__directory=str(own))


def test_no_site_fills_the_agents_memory_with_words(tmp_path):
    """Nor an answer of the child that reads them, which has a bound of its own."""
    long = "## Meaning\nA long one.\n" + '"\\\x01' * PAGE_MAX_CHARS
    write(tmp_path, "a_long_one", long[:200_000])
    short = PAGES_MAX_CHARS // PAGE_MAX_CHARS + 3
    for number in range(short):
        write(tmp_path, f"b{number:03}", "## Meaning\nOne.\n" + "x" * (PAGE_MAX_CHARS - 100))
    pages = load_in_force(tmp_path).site_pages
    assert len(pages) == short + 1, "each has a page, if only one that says where the words are"
    assert "too long" in pages["a_long_one"] and "explain a_long_one" in pages["a_long_one"]
    assert "x" * 1000 in pages["b000"] and "x" * 1000 not in pages[f"b{short - 1:03}"]
    assert sum(map(len, pages.values())) < PAGES_MAX_CHARS + 1000 * len(pages)
    assert runbooks.shown("a\x1b[31mb\ttab\r\n") == "a[31mb\ttab\n"
