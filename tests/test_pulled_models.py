"""Models that come and go while a server of several runs: pulled from a hub of this machine, named twice,
deleted; and what may never be deleted."""
import contextlib, json, os, random, shutil, time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from test_hub import COMMITS, REFS, start_hub
from test_serve import engines, until, web
from minisgl_lit import serve
from minisgl_lit.cli import main
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.server.model_table import read_table

DATA, KEY = Path(__file__).parent/"data", "k"*16
GGUF = {"tiny-Q4_K_M.gguf": (DATA/"embedded-Q4_K_M.gguf").read_bytes(),
        "large-Q8_0.gguf": b"GGUF" + random.Random(0).randbytes(25 << 20)}
HI = [{"role": "user", "content": "Hello, what is a page?"}]

@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REFS, "some/files", {"main": "c"*40})
        patch.setitem(COMMITS, "c"*40, GGUF)
        server = start_hub()
        for name, value in dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HUB_OFFLINE="0",
                                HF_HOME=str(tmp_path_factory.mktemp("hf"))).items():
            patch.setenv(name, value)
        yield server
        server.shutdown()
        server.server_close()

@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("models")

@pytest.fixture(scope="module")
def server(hub, folder):
    with serve(models=str(folder), port=0, num_pages=64, max_running_req=4, max_seq_len=512, log_interval=0,
               admin_key=KEY, keep_alive="10m") as s: yield s

def order(server, path, method="POST", key=KEY, **body):
    head = {"authorization": f"Bearer {key}"} if key else {}
    return web.request(method, server.url + path, json=body, headers=head, timeout=60)
def pull(server, model): return order(server, "/api/pull", model=model, stream=False)
def delete(server, model): return order(server, "/api/delete", "DELETE", model=model)
def names(server): return [o["id"] for o in web.get(server.url + "/v1/models").json()["data"]]
def said(server, model):
    r = web.post(server.url + "/api/chat", json=dict(
        model=model, messages=HI, stream=False, options=dict(temperature=0, num_predict=12)))
    assert r.status_code == 200, r.text
    return r.json()["message"]["content"]

def test_from_nothing_and_back(server, hub, folder, capsys):
    """An empty folder is served; what is pulled answers by its name, its second name shares the engine and
    outlives the first; in the end nothing is left"""
    before = engines()
    assert names(server) == []
    r = web.post(server.url + "/v1/chat/completions", json=dict(messages=HI))
    assert r.status_code == 404 and "this server has no model yet" in r.json()["error"]["message"]
    for path, method, body in [("/api/pull", "POST", dict(model="some/model")),
                               ("/api/copy", "POST", dict(source="a", destination="b")),
                               ("/api/delete", "DELETE", dict(model="a"))]:
        assert order(server, path, method, key=None, **body).status_code == 403
    r = order(server, "/api/pull", model="some/model")
    steps = [json.loads(o) for o in r.text.splitlines()]
    weights = len(COMMITS["a"*40]["model.safetensors"])
    assert r.headers["content-type"] == "application/x-ndjson"
    assert steps[0] == {"status": "pulling manifest"} and steps[-1] == {"status": "success"}
    assert steps[-2]["completed"] == steps[-2]["total"] == weights and "sha256:" in steps[-2]["digest"]
    assert names(server) == ["some/model"] and not (folder/"some"/"model").is_symlink()
    hub.asked.clear()
    assert main(["pull", "some/model", "--url", server.url, "--api-key", KEY]) == 0
    assert hub.asked == [] and "some/model is served at" in capsys.readouterr().out
    assert order(server, "/api/copy", source="some/model", destination="gpt-4o").status_code == 200
    assert said(server, "gpt-4o") == said(server, "some/model:latest") != ""
    assert len(engines().keys() - before.keys()) == 1
    tags = web.get(server.url + "/api/tags").json()["models"]
    assert [o["name"] for o in tags] == ["some/model:latest", "gpt-4o:latest"]
    assert tags[0]["digest"] == tags[1]["digest"]
    assert order(server, "/pause_generation?model=some/model", mode="in_place").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        open_one = pool.submit(said, server, "gpt-4o")
        until(lambda: web.get(server.url + "/get_server_info?model=some/model").json()["waiting"])
        refused = delete(server, "some/model")
        assert order(server, "/continue_generation?model=some/model").status_code == 200
        assert refused.status_code == 409 and "has open requests" in refused.json()["error"]
        answer = open_one.result(60)
    until(lambda: not server._models.calls)
    assert delete(server, "some/model").json() == {"status": "success"}
    assert names(server) == ["gpt-4o"] and not (folder/"some").exists()
    until(lambda: engines().keys() <= before.keys())
    assert said(server, "gpt-4o") == answer
    assert main(["rm", "gpt-4o", "--url", server.url, "--api-key", KEY]) == 0
    assert names(server) == [] and [o.name for o in folder.iterdir()] == [".pulling"]
    assert delete(server, "gpt-4o").status_code == 404
    until(lambda: engines().keys() <= before.keys())

def test_a_file_of_a_repository(server, folder):
    "As llama.cpp and Ollama name it: by a size, or by the file"
    assert pull(server, "hf.co/some/files:q4_k_m").json() == {"status": "success"}
    assert (folder/"hf.co"/"some"/"files:q4_k_m.gguf").read_bytes() == GGUF["tiny-Q4_K_M.gguf"]
    shown = order(server, "/api/show", model="hf.co/some/files:q4_k_m").json()
    assert shown["details"]["format"] == "gguf"
    r = web.post(server.url + "/v1/completions", json=dict(model="hf.co/some/files:q4_k_m", prompt="x",
                                                           max_tokens=2))
    assert r.status_code == 200, r.text
    assert pull(server, "some/files:tiny-Q4_K_M.gguf").status_code == 200
    assert names(server) == ["hf.co/some/files:q4_k_m", "some/files:tiny-Q4_K_M"]
    for name, sentence in [("some/files:Q9", "no GGUF file of it ends in Q9; it has"),
                           ("no/model", "it has no such model"), ("llama3.2:1b", "on the hub, a model is"),
                           ("../../x", "is no name for a model")]:
        r = pull(server, name)
        assert r.status_code == 400 and sentence in r.json()["error"], r.text
    assert order(server, "/api/pull").status_code == 400
    for name in names(server): assert delete(server, name).status_code == 200

def programs():
    "Downloads that this process has started"
    found, ours = [], f"minisgl_lit.process {os.getpid()} "
    for o in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = o.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if ours in line and "formats.pull" in line: found.append(o.parent.name)
    return found

def parts(folder): return [o for o in folder.rglob("*.part") if o.stat().st_size]

def test_a_pull_goes_on(server, hub, folder):
    """Whoever hangs up ends the download, and what is there is kept: the next pull asks for the rest; a
    second caller waits for the first"""
    hub.most, name = 21 << 20, "some/files:Q8_0"
    with httpx.Client(trust_env=False) as own:
        assert not programs()
        body, head = dict(model=name), {"authorization": f"Bearer {KEY}"}
        with own.stream("POST", server.url + "/api/pull", json=body, headers=head, timeout=60) as r:
            for line in r.iter_lines():
                if json.loads(line).get("completed"): break
            assert len(programs()) == 1
    until(lambda: not programs())
    hub.most = None
    [part] = parts(folder)
    kept = part.stat().st_size
    assert 0 < kept < len(GGUF["large-Q8_0.gguf"]) and names(server) == []
    hub.asked.clear()
    with ThreadPoolExecutor(2) as pool:
        assert {o.status_code for o in pool.map(lambda _: pull(server, name), range(2))} == {200}
    assert hub.asked == [("large-Q8_0.gguf", kept)]
    assert (folder/"some"/"files:Q8_0.gguf").read_bytes() == GGUF["large-Q8_0.gguf"] and not parts(folder)
    assert delete(server, name).status_code == 200

def contents(folder): return {o.relative_to(folder): o.read_bytes() for o in folder.rglob("*") if o.is_file()}

def test_open_webui(server, hub):
    """Its calls, one by one, with the fields that its backend sends: names with a tag, both names of a model,
    a pull that is insecure; and what it reads of the answers"""
    def call(path, **body):
        r = order(server, path, "DELETE" if path == "/api/delete" else "POST", **body)
        assert r.status_code == 200, r.text
        return r
    def listed(path): return {o["model"]: o for o in web.get(server.url + path).json()["models"]}
    assert [int(o) for o in web.get(server.url + "/api/version").json()["version"].split(".")] > [0]
    assert listed("/api/tags") == {}
    steps = [json.loads(o) for o in call("/api/pull", model="some/model", name="some/model", insecure=True
                                         ).text.splitlines()]
    assert steps[-1] == {"status": "success"} and all("error" not in o for o in steps)
    name = "some/model:latest"
    assert {*listed("/api/tags")} == {name} and listed("/api/tags")[name]["name"] == name
    assert "completion" in call("/api/show", model=name, name=name).json()["capabilities"]
    chat = call("/api/chat", model=name, stream=True, messages=HI, options=dict(num_predict=6, temperature=0))
    said = [json.loads(o) for o in chat.text.splitlines()]
    assert said[-1]["done"] and "".join(o["message"]["content"] for o in said)
    leaves = datetime.fromisoformat(listed("/api/ps")[name]["expires_at"]).timestamp()
    assert 500 < leaves - time.time() < 700   # 10 minutes
    assert call("/api/generate", model=name, prompt="A page", options={"num_predict": 2}, stream=False
                ).json()["done"]
    assert len(call("/api/embed", model="some/model", input=["A page", "is full"]).json()["embeddings"]) == 2
    gone = call("/api/generate", model=name, keep_alive=0, prompt="")   # "unload", in the list of models
    assert gone.headers["content-type"] == "application/json" and gone.json()["done_reason"] == "unload"
    until(lambda: listed("/api/ps") == {})
    call("/api/copy", source=name, destination="second")
    for o in (name, "second:latest"): call("/api/delete", model=o, name=o)
    assert listed("/api/tags") == {}

def test_what_lies_elsewhere_stays(server, folder, tmp_path):
    """A link out of the folder goes and what it leads to stays, also if the way became a link just now; no
    name is a path; what was put there by hand is found and may go"""
    mine = shutil.copytree(embedded_path(), tmp_path/"mine"/"deep")
    before = contents(mine)
    (folder/"link").symlink_to(mine)
    (folder/"way").mkdir()
    shutil.copytree(mine, folder/"way"/"deep")
    assert order(server, "/api/copy", source="nobody", destination="x").status_code == 404   # reads nothing
    shutil.copytree(mine, folder/"by-hand")
    assert pull(server, "some/model").status_code == 200   # the folder is read again
    assert names(server) == ["by-hand", "link", "some/model", "way/deep"]
    assert order(server, "/api/copy", source="link", destination="second").status_code == 200
    for name in ("..", "../mine/deep", str(mine), "link/../../mine", ".pulling", "way"):
        assert delete(server, name).status_code == 404, name
        r = order(server, "/api/copy", source="link", destination=name)
        assert r.status_code == 400 or name == "way", name
    assert delete(server, "second").status_code == 200
    assert names(server) == ["by-hand", "link", "some/model", "way/deep"]
    assert delete(server, "link").status_code == 200
    shutil.rmtree(folder/"way")
    (folder/"way").symlink_to(mine.parent)
    r = delete(server, "way/deep")
    assert r.status_code == 400 and "lies there no more" in r.json()["error"]
    assert contents(mine) == before and not (folder/"link").exists()
    assert {delete(server, o).status_code for o in names(server)} == {200}
    assert names(server) == []
    (folder/"way").unlink()

def test_a_new_start_finds_all(server, folder):
    "Names, second names and the files of both are in the folder, and nowhere else"
    assert pull(server, "some/model@v1").status_code == 200
    assert order(server, "/api/copy", source="some/model@v1", destination="team/gpt-4o").status_code == 200
    table = read_table(ServerConfig(models=str(folder)))
    assert ([*table.specs], dict(table.aliases)) == (["some/model@v1"], {"team/gpt-4o": "some/model@v1"})
    assert json.loads((folder/"some"/"model@v1"/"generation_config.json").read_bytes()) == {"eos_token_id": 0}
    assert delete(server, "some/model@v1").status_code == 200
    assert [*read_table(ServerConfig(models=str(folder))).specs] == ["team/gpt-4o"]
    assert delete(server, "team/gpt-4o").status_code == 200

def test_a_file_of_names_is_its_users(hub, tmp_path):
    "It is not changed, nor what it names by a path deleted; what it names on the hub may be fetched before"
    mine = shutil.copytree(embedded_path(), tmp_path/"mine")
    named = dict(mine=str(mine), far="some/model@v1")
    (file := tmp_path/"models.json").write_text(json.dumps({"models": named}))
    before = contents(tmp_path)
    with serve(models=str(file), port=0, num_pages=64, log_interval=0) as s:
        for r in (delete(s, "mine"), delete(s, "far"), pull(s, "some/model"),
                  order(s, "/api/copy", source="mine", destination="b")):
            assert r.status_code == 400 and "is not changed by requests" in r.json()["error"]
        hub.asked.clear()
        assert pull(s, "far").status_code == pull(s, "mine").status_code == 200
        assert "model.safetensors" in [name for name, _ in hub.asked]
    assert contents(tmp_path) == before
