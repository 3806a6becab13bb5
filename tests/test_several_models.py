"""Several models in one server: who is loaded, who leaves, and that each answers as it would alone.

First the lives of toys, thousands of them, then a server with real engines."""
import asyncio, contextlib, json, math, os, random, re, shutil, signal, threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from safetensors.torch import load_file, save_file
import torch

from test_serve import engines, until, web
from minisgl_lit import serve
from minisgl_lit.config import NoRoom
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.server import model_switch, models
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.server.fields import ApiError
from minisgl_lit.server.lives import Lives
from minisgl_lit.server.model_table import ModelSpec

# --- toys

class World:
    "A machine with so much memory, and models that need some of it; each load and each engine may fail"
    def __init__(self, rng, sizes, memory, most, pinned, keep):
        self.rng, self.sizes, self.memory, self.held, self.loading = rng, sizes, memory, {}, set()
        specs = {o: ModelSpec(o, ServerConfig(), keep, o in pinned) for o in sizes}
        self.lives = Lives(specs, self.load, most)
        self.most, self.ended, self.users = most, 0, {}

    async def load(self, name):
        assert name not in self.held and name not in self.loading, "loaded twice"
        self.loading.add(name)
        try:
            for _ in range(self.rng.randrange(4)): await asyncio.sleep(0)
            if self.rng.random() < .1: raise ValueError("this checkpoint is broken")
            if self.rng.random() < .05: raise RuntimeError("the engine process has ended with code -9")
            if sum(self.held.values()) + self.sizes[name] > self.memory: raise NoRoom("there is no memory")
            self.held[name] = self.sizes[name]
        finally: self.loading.discard(name)
        assert self.most is None or len(self.held) <= self.most
        return Toy(self, name)

class Toy:
    def __init__(self, world, name):
        self.world, self.name, self.dead, self.closed = world, name, asyncio.Event(), False

    async def run(self):
        if self.world.rng.random() < .9: await self.dead.wait()
        for _ in range(self.world.rng.randrange(20)): await asyncio.sleep(0)
        self.dead.set()
        raise RuntimeError("the engine process has ended with code -11")

    async def close(self):
        assert not self.closed, "closed twice"
        # nobody reads an answer of it, unless it has died or the server ends
        assert not self.world.users.get(self) or self.dead.is_set() or self.world.lives.closed
        self.closed = True
        await asyncio.sleep(0)
        del self.world.held[self.name]

async def one(world, name, keep):
    rng = world.rng
    for _ in range(rng.randrange(30)): await asyncio.sleep(0)
    try:
        async with world.lives.use(name, keep) as stay:
            toy = stay.held
            assert toy.name == name and not toy.closed, "a model that has left"
            world.users[toy] = world.users.get(toy, 0) + 1
            try:
                for _ in range(rng.randrange(8)): await asyncio.sleep(0)
                assert not toy.closed or toy.dead.is_set() or world.lives.closed
            finally: world.users[toy] -= 1
        return "answered"
    except ApiError as e:
        assert e.status in (400, 503) and str(e)
        return "refused"
    finally: world.ended += 1

async def live(seed):
    rng = random.Random(seed)
    sizes = {o: rng.randint(1, 5) for o in "abcde"[:rng.randint(1, 5)]}
    pinned = {o for o in sizes if rng.random() < .15}
    world = World(rng, sizes, rng.randint(4, 12), rng.choice([None, 1, 2, 3]), pinned,
                  rng.choice([0., .0005, 60., math.inf]))
    names = [*sizes]
    calls = [asyncio.create_task(one(world, rng.choice(names), rng.choice([None, None, 0., .001, math.inf])))
             for _ in range(rng.randint(1, 25))]
    async def meddle():
        for _ in range(rng.randrange(6)):
            for _ in range(rng.randrange(12)): await asyncio.sleep(0)
            match rng.randrange(3):
                case 0: await world.lives.unload(rng.choice(names))
                case 1: rng.choice(calls).cancel()
                case 2:
                    for life in world.lives.lives.values():
                        if life.stay and rng.random() < .3: life.stay.held.dead.set()
    meddling = asyncio.create_task(meddle())
    stop = rng.random() < .2
    if stop:
        for _ in range(rng.randrange(20)): await asyncio.sleep(0)
        await world.lives.close()
    ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    wrong = [o for o in ends if not isinstance(o, str | asyncio.CancelledError)]
    assert not wrong, wrong
    await asyncio.wait_for(meddling, 20)
    assert world.lives.calls == 0
    for life in world.lives.lives.values():
        assert not life.waiting and (life.stay is None or not life.stay.users)
    if not stop and "answered" in ends:   # whoever was held is idle, and may be asked again
        again = await asyncio.gather(*(one(world, o, None) for o in world.held), return_exceptions=True)
        assert {*again} <= {"answered", "refused"}
    await asyncio.wait_for(world.lives.close(), 20)
    assert not world.held and not world.lives._tasks
    return ends

def test_random_lives(long):
    """No request is lost, answered by a model that has left, or left hanging; no model is loaded twice, and
    none leaves that is in use; what fails is one request's error"""
    ends = [end for seed in range(20_000 if long else 250) for end in asyncio.run(live(seed))]
    assert ends.count("answered") > len(ends)/3 and "refused" in ends

def test_nobody_is_kept_out_for_ever():
    "One model is asked without a pause, by several callers; another is asked once"
    async def main():
        world = World(random.Random(7), dict(a=1, b=1), 10, 1, (), math.inf)
        world.rng.random = lambda: .5   # nothing fails
        stop = asyncio.Event()
        async def again():
            while not stop.is_set():
                async with world.lives.use("a"): await asyncio.sleep(.002)
        callers = [asyncio.create_task(again()) for _ in range(4)]
        await asyncio.sleep(.05)
        async with asyncio.timeout(5), world.lives.use("b"): assert [*world.held] == ["b"]
        stop.set()
        await asyncio.gather(*callers)
        await world.lives.close()
    asyncio.run(main())

def test_a_load_that_hangs_keeps_no_other_out(monkeypatch):
    "Others are loaded after a while, and what is loaded answers; in the end it has failed"
    monkeypatch.setattr("minisgl_lit.server.lives._TURN", .02)
    async def main():
        world = World(random.Random(7), dict(a=1, b=1, c=1), 10, None, (), math.inf)
        world.rng.random = lambda: .5
        async def load(name): return await asyncio.Event().wait() if name == "a" else await world.load(name)
        world.lives.load, world.lives.load_limit = load, .2
        hanging = asyncio.create_task(one(world, "a", None))
        assert await one(world, "b", None) == await one(world, "c", None) == "answered"
        assert not hanging.done() and await hanging == "refused"
        assert "it took more than 0.2 s" in world.lives.lives["a"].error
        await world.lives.close()
    asyncio.run(main())


# --- real engines

HI = [{"role": "user", "content": "Hello, what is a page?"}]

def made(folder, name, seed=None, embeds=False):
    "A checkpoint made of the embedded one; with a seed its weights are others, and so are its answers"
    shutil.copytree(embedded_path(), place := folder/name)
    if seed is not None:
        weights, random_of = load_file(place/"model.safetensors"), torch.Generator().manual_seed(seed)
        for key, value in weights.items():
            noise = torch.randn(value.shape, generator=random_of)*value.float().std()
            weights[key] = (value.float() + noise).to(value.dtype)
        save_file(weights, place/"model.safetensors", metadata={"format": "pt"})
    if embeds:
        (place/"modules.json").write_text(json.dumps([
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
        (place/"1_Pooling").mkdir()
        (place/"1_Pooling"/"config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return place

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    made(place, "chat")
    made(place, "other", seed=1)
    made(place, "embed", seed=2, embeds=True)
    (made(place, "broken")/"config.json").write_text("{}")
    return place

NAMES = "chat", "other", "embed", "broken", "huge"
HOW = dict(port=0, num_pages=128, max_running_req=8, max_seq_len=512, log_interval=0)

@pytest.fixture(scope="module")
def table(folder):
    path = folder/"models.json"
    path.write_text(json.dumps({
        "models": {o: str(folder/o) for o in NAMES[:4]} | {
            "huge": {"model": str(folder/"chat"), "memory_ratio": 1e-9}}, "default": "chat",
        "aliases": {"gpt-4o": "chat"}}))
    return str(path)

@pytest.fixture(scope="module")
def server(table):
    with serve(models=table, max_loaded=2, keep_alive="10m", **HOW) as s: yield s

def post(server, path, **body): return web.post(server.url + path, json=body)
def get(server, path): return web.get(server.url + path).json()
def states(server): return {o["id"]: o["status"]["value"] for o in get(server, "/v1/models")["data"]}
def said(server, model, **more):
    r = post(server, "/v1/chat/completions", model=model, messages=HI, max_tokens=12, temperature=0, **more)
    assert r.status_code == 200, r.text
    return r.json()["choices"][0]["message"]["content"]

def test_each_protocol_finds_its_model(server):
    """The model of a request chooses, in the words of all protocols; names are aliases, tags or none, and an
    unknown one is told the known"""
    before = engines()
    assert states(server) == dict.fromkeys(NAMES, "unloaded")
    right = {o: said(server, o) for o in ("chat", "other")}
    assert right["chat"] != right["other"] and len(engines().keys() - before.keys()) == 2
    assert said(server, "gpt-4o") == said(server, "chat:latest") == right["chat"]
    for name, text in right.items():
        own = dict(model=name, temperature=0, stream=False)
        assert post(server, "/v1/responses", input=HI, max_output_tokens=12,
                    **own).json()["output"][-1]["content"][0]["text"] == text
        assert post(server, "/v1/messages", messages=HI, max_tokens=12,
                    **own).json()["content"][-1]["text"] == text
        ollama = dict(model=name, stream=False, options=dict(temperature=0, num_predict=12))
        assert post(server, "/api/chat", messages=HI, **ollama).json()["message"]["content"] == text
        assert post(server, "/api/generate", prompt=HI[0]["content"], **ollama).json()["response"] == text
        plain = post(server, "/v1/completions", prompt="A page", max_tokens=8, **own).json()
        native = post(server, "/generate", text="A page", model=name,
                      sampling_params=dict(max_new_tokens=8, temperature=0)).json()["text"]
        assert plain["choices"][0]["text"] == native
        assert post(server, "/tokenize", model=name, prompt="A page").status_code == 200
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert [o.id for o in client.models.list()] == [*NAMES]
    for path, body in [("/v1/chat/completions", dict(messages=HI)), ("/generate", dict(text="x")),
                       ("/v1/messages", dict(messages=HI, max_tokens=1)), ("/api/chat", dict(messages=HI)),
                       ("/v1/embeddings", dict(input="x")), ("/api/show", {})]:
        r = post(server, path, model="nobody", **body)
        assert r.status_code == 404, path
        assert "this server has 'chat', 'other', 'embed', 'broken', 'huge'" in r.text
    assert post(server, "/generate", text="A page", sampling_params=dict(max_new_tokens=8, temperature=0)
                ).status_code == 200   # it names none: the default
    r = web.post(server.url + "/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert r.status_code == 400

def test_an_answer_is_kept_whoever_has_left(server):
    "A conversation goes on with another model, though the first has left"
    first = post(server, "/v1/responses", model="other", input="Hello", max_output_tokens=4).json()
    post(server, "/models/unload", model="other")
    assert get(server, f"/v1/responses/{first['id']}") == first
    then = post(server, "/v1/responses", model="chat", input="And?", previous_response_id=first["id"],
                max_output_tokens=4)
    assert then.status_code == 200 and then.json()["model"] == "chat"

def test_an_embedding_model_beside_a_chat_model(server):
    "Both are loaded, a third model makes the one leave that was idle longest"
    post(server, "/models/load", model="other")
    said(server, "chat")
    vector = post(server, "/v1/embeddings", model="embed", input="A page").json()["data"][0]["embedding"]
    assert states(server) == dict.fromkeys(NAMES, "unloaded") | dict(chat="loaded", embed="loaded")
    assert post(server, "/api/embed", model="embed", input="A page").json()["embeddings"][0] == vector
    said(server, "chat")
    found = {o["id"]: o for o in get(server, "/v1/models")["data"]}
    able = lambda name: {"embedding", "completion"} & {*found[name]["capabilities"]}
    assert able("embed") == {"embedding"} and able("chat") == {"completion"}
    assert [o for o in found if found[o]["default"]] == ["chat"]
    assert found["other"]["max_model_len"] == 512 and found["other"]["size"] > 10**5
    shown = post(server, "/api/show", model="embed").json()
    assert "embedding" in shown["capabilities"] and shown["details"]["format"] == "safetensors"
    assert [o["name"] for o in get(server, "/api/ps")["models"]] == ["chat:latest", "embed:latest"]
    assert len(get(server, "/api/tags")["models"]) == 5
    page = web.get(server.url + "/metrics").text
    for name, value in dict(chat="1.0", embed="1.0", other="0.0").items():
        assert f'minisgl:model_loaded{{model_name="{name}"}} {value}' in page
    assert all(f'minisgl:num_running_reqs{{model_name="{o}"}} 0.0' in page for o in ("chat", "embed"))
    assert page.count("# TYPE minisgl:num_running_reqs gauge") == 1

def test_who_waits_is_told(server, monkeypatch):
    "By comments, pings, or afterwards; an error after that is the last event"
    monkeypatch.setattr(model_switch, "_TELL", .02)
    def stream(path, **body):
        with web.stream("POST", server.url + path, json=body | dict(stream=True)) as r:
            return r.status_code, r.read().decode()
    def leave(): post(server, "/models/unload", model="other")
    ask, right = dict(model="other", messages=HI, max_tokens=12, temperature=0), []
    for path in ("/v1/chat/completions", "/v1/messages"):
        leave()
        assert states(server)["other"] == "unloaded"
        status, text = stream(path, **ask)
        assert status == 200
        first, *rest = text.split("\n\n")
        if path == "/v1/messages": assert first == 'event: ping\ndata: {"type": "ping"}'
        else:
            assert re.fullmatch(": model 'other' is (waiting|loading)", first) and rest[-2] == "data: [DONE]"
            rest = [o for o in rest if not o.startswith(":")]
            deltas = [json.loads(o[6:])["choices"][0]["delta"] for o in rest if o.startswith("data: {")]
            right.append("".join(o.get("content") or "" for o in deltas))
    leave()
    status, text = stream("/v1/completions", model="other", prompt="x", temperature=-1)
    assert right == [said(server, "other")]
    assert status == 200 and text.startswith(": ") and text.endswith("data: [DONE]\n\n")
    assert "temperature must be" in text
    status, text = stream("/v1/completions", model="broken", prompt="x")
    assert "model 'broken' could not be loaded" in text and text.endswith("data: [DONE]\n\n")
    leave()
    ollama = dict(model="other", messages=HI, options=dict(num_predict=1))
    status, text = stream("/api/chat", **ollama)
    last = json.loads(text.splitlines()[-1])
    assert 10**7 < last["load_duration"] < last["total_duration"]
    assert json.loads(stream("/api/chat", **ollama)[1].splitlines()[-1])["load_duration"] < 10**8

def test_a_load_that_fails_is_that_requests_error(server, folder):
    """The next request tries again, and finds it mended; where memory lacks, those that are idle leave before
    it is refused"""
    r = post(server, "/v1/chat/completions", model="broken", messages=HI)
    assert r.status_code == 400 and "model 'broken' could not be loaded: " in r.json()["error"]["message"]
    assert states(server)["broken"] == "unloaded"
    shutil.copy(folder/"chat"/"config.json", folder/"broken"/"config.json")
    assert said(server, "broken") == said(server, "chat")
    r = post(server, "/v1/chat/completions", model="huge", messages=HI)
    assert r.status_code == 503 and "may be filled, by memory_ratio=1e-09" in r.json()["error"]["message"]
    assert {*states(server).values()} == {"unloaded"}

def test_how_long_it_stays(server):
    "As Ollama's clients say it: not at all, for ever, some time; who has left is not loaded to leave again"
    chat = dict(model="other", messages=HI, stream=False, options=dict(num_predict=1))
    def left(): return states(server)["other"] == "unloaded"
    assert post(server, "/api/chat", **chat, keep_alive=0).status_code == 200
    until(left)
    gone = post(server, "/api/chat", model="other", keep_alive=0).json()
    assert gone["done_reason"] == "unload" and left()
    assert post(server, "/api/generate", model="other", keep_alive=-1).json()["done_reason"] == "load"
    [other] = [o for o in get(server, "/api/ps")["models"] if o["name"] == "other:latest"]
    assert other["expires_at"].startswith("9999")
    post(server, "/api/chat", **chat, keep_alive="2s")
    [other] = [o for o in get(server, "/api/ps")["models"] if o["name"] == "other:latest"]
    assert not other["expires_at"].startswith("9999")
    until(left)
    assert post(server, "/api/chat", **chat, keep_alive="soon").status_code == 400

def pid_of(server, name): return server._models.loaded[name]._processes[0].process.pid

def test_what_kills_one_touches_no_other(server, monkeypatch):
    "kill -9 and SIGSTOP: what waits in that model ends with an error, a stream of the other goes on"
    right = {o: said(server, o) for o in ("chat", "other")}
    before = pid_of(server, "chat")
    def stream(model):
        body = dict(model=model, text="A page", stream=True,
                    sampling_params=dict(max_new_tokens=480, ignore_eos=True))
        events = []
        with web.stream("POST", server.url + "/generate", json=body) as r:
            if r.status_code != 200: return [json.loads(r.read())]   # nothing had come before
            for line in r.iter_lines():
                if line.startswith("data: {"): events.append(json.loads(line[6:]))
                if events: begun.set()
        return events
    begun = threading.Event()   # the answer of the one that is not killed
    assert post(server, "/pause_generation?model=other", mode="in_place").status_code == 200
    with ThreadPoolExecutor(2) as pool:
        streams = {"other": pool.submit(stream, "other")}
        until(lambda: get(server, "/get_server_info?model=other")["waiting"])
        streams["chat"] = pool.submit(stream, "chat")
        assert begun.wait(60)
        os.kill(pid_of(server, "other"), signal.SIGKILL)
        ends = {o: streams[o].result(60)[-1] for o in right}
    assert "has ended with code -9" in ends["other"]["error"]["message"]
    assert ends["chat"]["meta_info"]["finish_reason"]["type"] == "length"
    assert said(server, "other") == right["other"] and pid_of(server, "chat") == before
    monkeypatch.setattr(models, "_PATIENCE", .3)
    os.kill(frozen := pid_of(server, "other"), signal.SIGSTOP)
    try:
        assert said(server, "chat") == right["chat"]
        assert 'model_name="chat"' in web.get(server.url + "/metrics").text
    finally: os.kill(frozen, signal.SIGCONT)
    until(lambda: not server._models.loaded["other"].client.why)
    assert said(server, "other") == right["other"]

def test_it_leaves_nothing_behind(table):
    "Whoever waits for a load when the server stops is told; orders are for the admin; settings are checked"
    before = engines()
    with serve(models=table, admin_key="k"*16, **HOW) as s, ThreadPoolExecutor(1) as pool:
        assert repr(s).startswith("Server('chat, other, embed, broken, huge'")
        waiting = pool.submit(post, s, "/v1/chat/completions", model="chat", messages=HI)
        until(lambda: engines().keys() - before.keys())
        assert post(s, "/models/unload", model="chat").status_code == 403
        s.stop()
        # it may just have been loaded
        with contextlib.suppress(httpx.TransportError): assert waiting.result().status_code in (200, 503)
    assert not engines().keys() - before.keys()   # those of another server may have left meanwhile
    for more, sentence in [(dict(model="x"), "model='x' is for a server of one model"),
                           (dict(models="/nowhere"), "models='/nowhere' cannot be read")]:
        with pytest.raises(ValueError, match=sentence): serve(**dict(models=table, port=0) | more)
