"""The pages that `embodied.ui` serves: what is listed, what is given to whom, and what an open page shows by itself."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from threading import Thread
from urllib.parse import quote

import pytest
from browser import CHROMIUM, browser
from pages import Page
from written_runs import played, write_group, write_run

from embodied.ui import PageServer, RunList, asked_range, main

CONFIG = (
    "seed: 0\nenv:\n  name: pointmass\n  task: reach\n  own:\n    name: no\npolicy:\n  name: mlp\nalgo:\n  name: ppo\n"
)
FILM = "episode-000_success_reach_seed0.mp4"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """An open page asks again at once."""
    monkeypatch.setattr("embodied.ui.EVERY_S", 0.1)
    monkeypatch.setattr("embodied.ui.SHARE", 1)


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@contextmanager
def serving(*roots):
    with PageServer(roots, 0) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, method="GET", **headers):
    """The status, headers and body of an answer."""
    with closing(HTTPConnection("127.0.0.1", server.server_port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def data(server, path):
    status, _, body = ask(server, path, Accept="application/json")
    return status, json.loads(body)


@pytest.fixture
def runs(tmp_path):
    """A finished run with a video, one without results, one that has no record, and one that is damaged."""
    runs = tmp_path / "runs"
    made = {"provenance": {"command": ["python", "recipe=pointmass_ppo"]}}
    write_run(runs / "a", played([1, 1, 1, 0]), config=CONFIG, videos=[FILM], **made)
    write_run(runs / "deep" / "b", config=CONFIG, started="2026-01-02T00:00:00+00:00", state="failed", cause="no more")
    (runs / "begun").mkdir()
    (runs / "begun" / "config.yaml").write_text(CONFIG)
    write_run(runs / "odd")
    (runs / "odd" / "run.json").write_text("{")
    (runs / "begun" / "loop").symlink_to(runs / "begun" / "loop")
    write_run(runs / os.fsdecode(b"odd-\xff"), config="\nenv:\n  name: [\n")
    return runs


def test_the_list_has_every_run_with_its_state_and_a_broken_one_says_why(runs):
    for name in ("bench.html", "bench.data.json"):
        (runs / "deep" / name).write_text("{}")
    with serving(runs) as server:
        _, shown = data(server, "/")
        assert shown["sections"][1]["blocks"][0]["link"][0] == "deep/bench.html"
        (block,) = shown["sections"][0]["blocks"]
        rows = {row[0]["text"]: [one["text"] if isinstance(one, dict) else one for one in row] for row in block["rows"]}
        assert rows["a"][1:6] == ["pointmass_ppo", "pointmass reach", "finished", "75%", "500"]
        assert rows["b"][3:6] == ["failed", "50%", "500"] and [*rows][-1] == "a", "the newest first"
        assert (rows["begun"][3], rows["odd"][3], rows["odd-\\udcff"][3]) == ("incomplete", "unreadable", "unreadable")
        assert all(ask(server, f"/{row[0]['href']}")[0] in (200, 404) for row in block["rows"])
        assert "run.json cannot be read" in json.dumps(block) and "no more" in json.dumps(block)
        assert data(server, quote(f"{runs}/begun/"))[0] == 404
        assert "run.json" in data(server, quote(f"{runs}/begun/"))[1]["problems"][0]


def test_pages_are_those_of_the_report(runs):
    write_group(runs, {"0.1": [0.5, 0.7]})
    with serving(runs) as server:
        _, shown = data(server, quote(f"{runs}/a/"))
        assert shown["heading"] == "a" and shown["live_s"] > 0
        (film,) = [v for s in shown["sections"] for b in s["blocks"] for v in b.get("videos", ())]
        assert ask(server, quote(f"{runs}/a/") + film["src"])[2] == b"m" * 10
        _, compared = data(server, f"/?run={quote(str(runs / 'a'))}&run={quote(str(runs / 'deep' / 'b'))}")
        assert compared["heading"] == "2 runs compared"
        assert data(server, quote(f"{runs}/group/"))[1]["heading"] == "group"
        status, headers, _ = ask(server, quote(f"{runs}/a"))
        assert (status, headers["Location"]) == (302, quote(f"{runs}/a/"))


def test_only_files_of_runs_are_given_and_only_to_this_machine(runs, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (runs / "a" / "link.json").symlink_to(tmp_path / "secret.json")
    (runs / "a" / "weights.safetensors").write_text("w")
    (runs / "a" / ".hidden.json").write_text("{}")
    with serving(runs) as server:
        folder = quote(f"{runs}/a")
        refused = [
            f"{runs}/../secret.json",
            f"{runs}/%2e%2e/secret.json",
            f"{folder}/link.json",
            "/etc/passwd",
            "//x/y",
        ]
        refused += [f"{folder}/weights.safetensors", f"{folder}/.hidden.json", f"{folder}/%00", "/?run=/etc"]
        for path in refused:
            assert ask(server, path)[0] == 404, path
        assert ask(server, f"{folder}/run.json")[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""):
            assert ask(server, "/", Host=host)[0] == 403, host
        for host in ("localhost:9000", "[::1]:1", "127.0.0.1"):
            assert ask(server, "/", Host=host)[0] == 200, host
        assert ask(server, "/", "POST")[0] == 501
        assert server.server_address[0] == "127.0.0.1"


def test_a_part_of_a_video_is_given(runs):
    with serving(runs) as server:
        film = quote(f"{runs}/a/eval/v000005/videos/{FILM}")
        (runs / "a" / "eval" / "v000005" / "videos" / FILM).write_bytes(b"0123456789")
        for asked, want in (("2-4", b"234"), ("7-", b"789"), ("-3", b"789"), ("0-99", b"0123456789")):
            status, headers, body = ask(server, film, Range=f"bytes={asked}")
            assert (status, body) == (206 if len(want) < 10 else 200, want) and headers["Content-Type"] == "video/mp4"
        assert ask(server, film, Range="bytes=10-")[0] == 416
        status, headers, body = ask(server, film, "HEAD")
        assert (status, headers["Content-Length"], body) == (200, "10", b"")
        assert asked_range("bytes=1-2,4-5", 10) == (0, 10)


def test_an_ended_run_is_read_once_and_a_changed_one_again(runs, monkeypatch):
    listed = RunList([runs])
    listed.page(runs)
    read = []
    monkeypatch.setattr("embodied.ui.read_entry", lambda folder, mark: read.append(folder.name))
    listed.page(runs)
    assert not read
    os.utime(runs / "a" / "metrics.jsonl", (1, 1))
    with suppress(AttributeError):  # of the entry that was not read
        listed.page(runs)
    assert read == ["a"]


@pytest.mark.parametrize(
    ("words", "told"), [(["port=x"], "port=x is no port"), (["nowhere"], "nowhere is not a folder")]
)
def test_mistakes_are_refused(words, told, capsys):
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_the_command_of_the_page_names_its_address_and_ctrl_c_ends_it(runs):
    (command,) = [line for line in Page("evaluation.md").commands if "embodied.ui" in line]
    words = [sys.executable, *command.split()[1:], "port=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=runs.parent, **pipes) as process:
        told = process.stdout.readline() + process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert f"runs        {runs}" in told and "listening   http://127.0.0.1:" in told
    assert (process.returncode, err) == (0, "")


def add_row(run, iteration):
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    row |= {"iteration": iteration, "policy_version": iteration, "env_steps": 100 * iteration}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


CURVE = "document.querySelector('path.line').getAttribute('d')"


def test_an_open_page_follows_its_run_without_a_reload(runs, tab):
    with serving(runs) as server:
        home = f"http://127.0.0.1:{server.server_port}/"
        tab.open(f"{home}{quote(str(runs / 'a'))[1:]}/")
        before = tab.ask(f"window.same = document.querySelector('video'); {CURVE}")
        tab.ask("document.querySelector('.charts .save').focus()")
        add_row(runs / "a", 6)
        assert tab.until(f"{CURVE} !== {json.dumps(before)} && {CURVE}") != before
        assert tab.ask("document.contains(window.same)"), "what did not change stays"
        assert tab.ask("document.activeElement === document.querySelector('.charts .save')"), "and the keyboard's place"
        assert not tab.errors
        (runs / "a").rename(runs / "c")
        tab.until("document.querySelector('[role=status]')?.textContent.includes('is not there')")
        (runs / "c").rename(runs / "a")
        tab.until("!document.querySelector('[role=status]')")
        tab.errors.clear()  # the browser's own, of the missing run
        tab.open(home)
        tab.ask("document.querySelectorAll('[type=checkbox]').forEach((one) => one.click())")
        tab.ask("wanted.value = 'failed'; wanted.dispatchEvent(new Event('input'))")
        tab.ask("document.querySelector('[type=checkbox]').focus()")
        add_row(runs / "deep" / "b", 7)
        tab.until("document.body.textContent.includes('700')")
        assert tab.ask("document.querySelectorAll(':checked').length") == 5, "ticks stay"
        assert tab.ask("document.activeElement.type") == "checkbox", "so does the focus"
        assert not tab.errors


def test_runs_are_compared_by_the_keyboard_alone(runs, tab):
    with serving(runs) as server:
        tab.look(400, 800, "dark")
        tab.open(f"http://127.0.0.1:{server.server_port}/")
        assert tab.ask("document.documentElement.scrollWidth") <= 400, "nothing is cut off on a phone"
        names = tab.ask("[...document.querySelectorAll('[type=checkbox]')].map((one) => one.ariaLabel)")
        wanted = {names.index("compare a"), names.index("compare b")}
        tab.ask("wanted.focus()")
        tab.press("Tab")
        for place in range(len(names)):
            tab.press("Tab")
            assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is seen"
            if place in wanted:
                tab.press(" ", text=" ", windowsVirtualKeyCode=32)
            tab.press("Tab")  # past the link
        tab.ask("wanted.focus()")
        tab.press("Tab")
        tab.press("Enter", text="\r", windowsVirtualKeyCode=13)
        assert (
            tab.until("document.querySelector('h1').textContent.includes('compared') && document.title")
            == "b, a - comparison"
        )
