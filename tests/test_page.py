"The page at `/` and its live view, without a browser (`make test-browser` has one)."
import dataclasses, json, re, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import minisgl_lit
from minisgl_lit import SamplingParams, serve
from minisgl_lit.loop.live_view import BatchLog
from vendor import FILES, ROOT, sha256

FOLDER = Path(minisgl_lit.__file__).parent / "webui"


@pytest.fixture(scope="module")
def server():
    with serve(port=0, num_pages=512, max_running_req=16, log_interval=0, api_key="k") as s: yield s

@pytest.fixture(scope="module")
def web(server):
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}, timeout=60) as client:
        yield client

@contextmanager
def live(web):
    "An iterator of events, as the page sees them"
    with web.stream("GET", "/live") as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in r.iter_lines() if line)


def imports(file):
    "What a module imports, as paths in the folder"
    return {(file.parent / o).resolve().relative_to(FOLDER.resolve()).as_posix()
            for o in re.findall(r"(?:from|import) ?\(?'(\.[^']+)'", file.read_text())}

def test_the_page_is_served_to_everybody(server):
    "Without the key, since it is the page that asks for it; every file that it names or imports is there"
    html = httpx.get(server.url + "/").text
    named = {o.removeprefix("webui/") for o in re.findall(r'(?:href|src)="(?!data:)([^"]+)"', html)}
    assert named == {"app.js", "chat.css", "style.css", "theme.js"}
    todo = [*named]
    for name in todo:   # grows while it is walked
        r = httpx.get(f"{server.url}/webui/{name}")
        assert (r.status_code == 200 and r.content == (FOLDER/name).read_bytes()
                and ("css" if name.endswith(".css") else "javascript") in r.headers["content-type"]), name
        assert "default-src 'none'" in r.headers["content-security-policy"]
        if name.endswith(".js"): todo += imports(FOLDER/name) - {*todo}
    assert {*todo} == {o.relative_to(FOLDER).as_posix()
                       for o in FOLDER.rglob("*") if o.suffix in (".js", ".css")} - {"docs.js", "docs.css"}
    assert httpx.get(server.url + "/live").status_code == 401

def test_nothing_comes_from_elsewhere():
    """No address of another host; paths are relative, so that the page may stand behind another server's
    prefix"""
    for file in [o for o in FOLDER.iterdir() if o.is_file()]:
        # the name of a language, not an address
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"//\w+\.\w+|@import|url\(", text), file.name
        assert not re.findall(r"""(?:fetch|call|ask|src=|href=)\(?['"`]/""", text), file.name

def test_what_others_wrote_is_as_they_published_it():
    "and each has its licence"
    assert ({o.relative_to(ROOT).as_posix() for folder in (FOLDER, Path(__file__).parent/"browser")
             for o in (folder/"vendor").iterdir()} == {o[2] for o in FILES})
    for package, name, place, wanted in FILES: assert sha256(ROOT/place) == wanted, place
    assert {Path(o[2]).stem for o in FILES if o[2].endswith(".js")} == {Path(o[2]).stem
        for o in FILES if o[2].endswith(".LICENSE")}

def test_every_name_is_there():
    "What the scripts look for stands in the page, and what the page shows is looked for"
    html, engine = ((FOLDER / o).read_text() for o in ("index.html", "engine.js"))
    scripts = "".join(o.read_text() for o in FOLDER.glob("*.js"))
    ids = set(re.findall(r'\bid="([\w-]+)"', html))
    assert len(ids) == len(re.findall(r'\bid="', html))
    shown = set(re.findall(r"(\w+):",
                           engine[engine.index("const texts = {"):engine.index("for (const [id, text]")]))
    assert set(re.findall(r"\$\('([\w-]+)'\)", scripts)) <= ids and shown <= ids
    assert set(re.findall(r'aria-(?:labelledby|describedby|controls)="([\w-]+)"', html)) <= ids
    numbers = set(re.findall(r'<dd id="(\w+)"', html))
    assert numbers == shown - {"brief", "speed", "steps", "total", "tree"}

def test_all_that_the_server_samples_by_can_be_set():
    """in the form, which asks the server for what it does not know (tests/browser/test_desk.py); it knows
    nothing that is not there"""
    form = (FOLDER/"settings.js").read_text()
    fields = set(re.findall(r"^  (\w+): (?:field|count)\(", form, re.M))
    others = set(re.findall(r"'(\w+)'", form[form.index("const OTHERS"):].split("\n")[0]))
    asked = {f.name for f in dataclasses.fields(SamplingParams)}
    assert fields and others and not fields & others and fields | others <= asked

def test_the_live_view_tells_the_truth(web):
    """When nothing runs it says what `/get_server_info` says; while something runs, the four kinds of pages
    add up; 128 batches are kept"""
    with live(web) as told, ThreadPoolExecutor(1) as pool:
        first = next(told)
        n = 1500   # takes longer than it is from one look to the next, on a fast machine too
        asked = dict(text="The page", sampling_params=dict(max_tokens=n, ignore_eos=True))
        answer = pool.submit(web.post, "/generate", json=asked)
        seen = [first]
        while not answer.done() or seen[-1]["running"]: seen.append(next(told))
        last = next(told)
    info = web.get("/get_server_info").json()
    only = {"time", "batches", "tree"}
    assert {k: info[k] for k in last if k not in only} == {k: v for k, v in last.items() if k not in only}
    rows = {o[0]: dict(zip(BatchLog.columns, o)) for e in [*seen, last]
            for o in e["batches"] if o[0] > first["steps"]}
    assert ({*range(last["steps"] - 127, last["steps"] + 1)} <= {*rows}
            <= {*range(first["steps"] + 1, last["steps"] + 1)} and last["steps"] == first["steps"] + n)
    assert all(o["made"] == 1 and o["rows"] == 1
               and o["kind"] == ("decode" if i > first["steps"] + 1 else "prefill") for i, o in rows.items())
    if prompt := rows.get(first["steps"] + 1):
        assert prompt["prompt"] + prompt["cached"] == last["prompt_tokens"] - first["prompt_tokens"]
    times = [(o["start"], o["start"] + o["seconds"]) for o in rows.values()]
    assert (all(a <= b + 1e-6 and b <= c + 1e-6 for (a, b), (c, _) in zip(times, times[1:]))
            and times[-1][1] <= last["time"])
    assert last["generated_tokens"] - first["generated_tokens"] == n
    assert any(0 < e["generated_tokens"] - first["generated_tokens"] < n and e["running"] == 1 for e in seen)
    for a, b in zip(seen, seen[1:]):
        assert (a["time"] < b["time"] and a["generated_tokens"] <= b["generated_tokens"]
                and a["steps"] <= b["steps"])
        assert sum(v for k, v in b["pages"].items() if k != "total") == b["pages"]["total"] == 512

def test_the_tree_is_shown_without_what_was_said(web):
    "Its shape: parents first, as many pages as it has; no token, no text, no name of anybody's"
    secret = "xylophone quartz zebra "
    web.post("/generate", json=dict(text=secret*20, rid="secret-rid",
        sampling_params=dict(max_tokens=20, ignore_eos=True, extra_key="secret-key"))).raise_for_status()
    ids = web.post("/tokenize", json=dict(prompt=secret*20)).json()["tokens"]
    with live(web) as told:
        while (event := next(told))["running"]: pass
    tree, text = event["tree"], json.dumps(event)
    assert (tree[0][:3] == [None, 0, False] and all(row[0] < i for i, row in enumerate(tree) if i)
            and not any(row[4] for row in tree))
    assert sum(row[1] for row in tree) == event["pages"]["protected"] + event["pages"]["evictable"] > 0
    assert not any(o in text for o in ("xylo", "secret", json.dumps(ids[:4])[1:-1]))

def test_a_request_and_its_way(web):
    """From the queue through its chunks to its end, told to its caller by its name; unknown ones are a
    sentence"""
    asked = dict(text="The page table of a request "*40, rid="way",
                 sampling_params=dict(max_tokens=7, ignore_eos=True))
    meta = web.post("/generate", json=asked).json()["meta_info"]
    way = web.get("/requests/way").json()
    assert (way["prompt_tokens"], way["cached_tokens"], way["output_tokens"]) == (meta["prompt_tokens"],
        meta["cached_tokens"], 7)
    assert sum(n for _, n, *_ in way["chunks"]) == meta["prompt_tokens"] - meta["cached_tokens"]
    assert ([way["queued"], way["first_token"], way["end"]] == pytest.approx(meta["times"], abs=.01)
            and way["last_step"] - way["chunks"][-1][0] == 6)
    assert all(way["queued"] <= start + 1e-6 and seconds > 0 and start < way["first_token"]
               for _, _, start, seconds in way["chunks"])
    chat = dict(messages=[dict(role="user", content="Hello")], rid="a chat", max_tokens=3)
    assert (web.post("/v1/chat/completions", json=chat).json()["id"] == "a chat"
            and web.get("/requests/a chat").json()["output_tokens"] == 3)
    r = web.get("/requests/nobody")
    assert r.status_code == 404 and "nobody" in r.json()["error"]["message"]

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
