"The page at `/` and its live view, without a browser (`make test-browser` has one)."
import json, re, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import minisgl_lit
from minisgl_lit import serve
from minisgl_lit.server.engine_core import BatchLog

FOLDER = Path(minisgl_lit.__file__).parent / "webui"


@pytest.fixture(scope="module")
def server():
    with serve(port=0, num_pages=512, max_running_req=16, log_interval=0, api_key="k") as s: yield s

@pytest.fixture(scope="module")
def web(server):
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=60) as client: yield client

@contextmanager
def live(web):
    "An iterator of events, as the page sees them"
    with web.stream("GET", "/live") as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in r.iter_lines() if line)


def test_the_page_is_served_to_everybody(server):
    "Without the key, since it is the page that asks for it; every file that it names is there"
    html = httpx.get(server.url + "/").text
    named = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', html)
    assert sorted(named) == ["webui/app.js", "webui/style.css"]
    for name in ("", *named):
        r = httpx.get(f"{server.url}/{name}")
        assert r.status_code == 200 and r.content == (FOLDER / (Path(name).name or "index.html")).read_bytes()
        assert "default-src 'none'" in r.headers["content-security-policy"]
    assert httpx.get(server.url + "/live").status_code == 401

def test_nothing_comes_from_elsewhere():
    "No address of another host; paths are relative, so that the page may stand behind another server's prefix"
    for file in FOLDER.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")   # the name of a language, not an address
        assert not re.findall(r"//\w+\.\w+|@import|url\(", text), file.name
        assert not re.findall(r"""(?:fetch|call|src=|href=)\(?['"]/""", text), file.name

def test_every_name_is_there():
    "What the script looks for stands in the page, and what the page shows is looked for"
    html, js = ((FOLDER / o).read_text() for o in ("index.html", "app.js"))
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    assert len(ids) == len(re.findall(r'\bid="', html))
    shown = set(re.findall(r"(\w+):", js[js.index("const texts = {"):js.index("for (const [id, text]")]))
    assert set(re.findall(r"\$\('([\w-]+)'\)", js)) <= ids and shown <= ids
    assert set(re.findall(r'aria-(?:labelledby|describedby|controls)="([\w-]+)"', html)) <= ids
    numbers = set(re.findall(r'<dd id="(\w+)"', html))
    assert numbers == shown - {"brief", "speed", "steps", "total"}

def test_the_live_view_tells_the_truth(web):
    "When nothing runs it says what `/get_server_info` says; while something runs, the four kinds of pages add up; 128 batches are kept"
    with live(web) as told, ThreadPoolExecutor(1) as pool:
        first = next(told)
        asked = dict(text="The page", sampling_params=dict(max_tokens=450, ignore_eos=True))
        answer = pool.submit(web.post, "/generate", json=asked)
        seen = [first]
        while not answer.done() or seen[-1]["running"]: seen.append(next(told))
        last = next(told)
    info = web.get("/get_server_info").json()
    only = {"time", "batches"}
    assert {k: info[k] for k in last if k not in only} == {k: v for k, v in last.items() if k not in only}
    rows = {o[0]: dict(zip(BatchLog.columns, o)) for e in [*seen, last] for o in e["batches"] if o[0] > first["steps"]}
    assert {*range(last["steps"] - 127, last["steps"] + 1)} <= {*rows} <= {*range(first["steps"] + 1, last["steps"] + 1)} and last["steps"] == first["steps"] + 450
    assert all(o["made"] == 1 and o["rows"] == 1 and o["kind"] == ("decode" if i > first["steps"] + 1 else "prefill") for i, o in rows.items())
    if prompt := rows.get(first["steps"] + 1): assert prompt["prompt"] + prompt["cached"] == last["prompt_tokens"] - first["prompt_tokens"]
    times = [(o["start"], o["start"] + o["seconds"]) for o in rows.values()]
    assert all(a <= b + 1e-6 and b <= c + 1e-6 for (a, b), (c, _) in zip(times, times[1:])) and times[-1][1] <= last["time"]
    assert last["generated_tokens"] - first["generated_tokens"] == 450
    assert any(0 < e["generated_tokens"] - first["generated_tokens"] < 450 and e["running"] == 1 for e in seen)
    for a, b in zip(seen, seen[1:]):
        assert a["time"] < b["time"] and a["generated_tokens"] <= b["generated_tokens"] and a["steps"] <= b["steps"]
        assert sum(v for k, v in b["pages"].items() if k != "total") == b["pages"]["total"] == 512

def test_viewers_see_the_same(web):
    "One question a tick, however many look"
    with live(web) as a, live(web) as b:
        one, two = [next(a) for _ in range(6)], [next(b) for _ in range(6)]
    assert len({e["time"] for e in one} & {e["time"] for e in two}) >= 4
    assert 4*.2 < one[-1]["time"] - one[0]["time"]

def test_a_viewer_is_told_the_end():
    "Nobody who looks on keeps a server from ending"
    with serve(port=0, num_pages=64, log_interval=0) as s:
        with httpx.Client(base_url=s.url, timeout=60) as web, live(web) as told:
            next(told)
            start = time.monotonic()
            s.stop()
            assert time.monotonic() - start < 5
            assert "stopped" in list(told)[-1]["error"]["message"]
