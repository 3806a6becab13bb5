"""Several models in one server, and adapters of some: each is found by its name, and whatever is loaded,
unloaded and killed meanwhile, each answers as it does alone."""
import contextlib, gc, json, os, random, re, signal, time
from concurrent.futures import ThreadPoolExecutor
from threading import active_count

import pytest

from random_adapters import write_adapter
from test_serve import until, web
from test_several_models import HI, HOW, get, made, pid_of, post, said
from minisgl_lit import serve

ADAPTERS = [f"tune-{i}" for i in range(8)]

@pytest.fixture(scope="module")
def table(tmp_path_factory):
    "Two models that chat, one that embeds; the first has eight adapters, and one lies there for the second"
    place = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(["chat", "other", "embed"]):
        made(place, name, seed=seed or None, embeds=name == "embed")
    for seed, name in enumerate([*ADAPTERS, "late"]):
        write_adapter(place/name, place/"chat", seed, only="down_proj", size=1.)
    lora = {o: str(place/o) for o in ADAPTERS}
    (path := place/"models.json").write_text(json.dumps({"models": {
        "chat": {"model": str(place/"chat"), "lora": lora},
        "other": {"model": str(place/"other"), "lora": {}}, "embed": str(place/"embed")}}))
    return path

def load_late(server, table, do="load"):
    return web.post(f"{server.url}/v1/{do}_lora_adapter", params=dict(model="other"),
                    json=dict(lora_name="late", lora_path=str(table.parent/"late")) if do == "load" else
                    dict(lora_name="late"))

def listed(server): return {o["id"]: o.get("parent") for o in get(server, "/v1/models")["data"]}

def test_an_adapter_has_its_model_loaded(table):
    """Its name is a `model`, also before its model is loaded; one that comes later is there until its model
    leaves"""
    of_chat = dict.fromkeys(ADAPTERS, "chat")
    with serve(models=str(table), max_loaded=2, **HOW) as s:
        assert listed(s) == dict(chat=None, **of_chat, other=None, embed=None)
        assert len({said(s, o) for o in ("tune-1", "tune-2", "chat")}) == 3
        assert [*s._models.loaded] == ["chat"]
        about = get(s, "/v1/models/tune-3")
        assert about["parent"] == "chat" and about["status"]["value"] == "loaded"
        r = post(s, "/api/chat", model="tune-1:latest", messages=HI, stream=False)   # as Ollama's clients say
        assert r.status_code == 200 and r.json()["model"] == "tune-1"
        assert web.get(s.url + "/get_server_info", params=dict(model="tune-1")).status_code == 200
        r = post(s, "/api/chat", model="tune-9", messages=HI, stream=False)
        assert r.status_code == 404 and "'tune-9' is not served here" in r.json()["error"]
        assert load_late(s, table).status_code == 503   # `other` is not loaded
        before = said(s, "other")
        assert load_late(s, table).status_code == 200 and listed(s)["late"] == "other"
        assert said(s, "late") != before == said(s, "other")
        taken = post(s, "/v1/load_lora_adapter?model=other", lora_name="tune-1",
                     lora_path=str(table.parent/"late"))
        assert taken.status_code == 400 and "'tune-1' is the name of a model, or of an adapter" in taken.text
        names = [o["name"] for o in get(s, "/api/tags")["models"]]
        assert {"late:latest", "tune-1:latest", "other:latest"} <= {*names}
        r = post(s, "/models/unload", model="late")
        assert r.status_code == 400 and "'late' is an adapter of 'other'" in r.json()["error"]["message"]
        assert post(s, "/models/unload", model="other").status_code == 200
        assert "late" not in listed(s) and "other" not in s._models.loaded
        r = post(s, "/v1/completions", model="late", prompt="A page")
        assert r.status_code == 404 and r.json()["error"]["code"] == "model_not_found"

def test_replicas_of_one_model_keep_the_adapters_of_its_table(table, tmp_path):
    "Also when it is loaded by its own name, and none of them has been asked for"
    place = table.parent
    both = dict(model=str(place/"chat"), replicas=2, lora={"tune-0": str(place/"tune-0")})
    (path := tmp_path/"models.json").write_text(json.dumps({"models": {"two": both}}))
    with serve(models=str(path), **HOW) as s:
        alone = said(s, "two")
        assert listed(s) == {"two": None, "tune-0": "two"} and said(s, "tune-0") != alone

class Caller:
    "Asks for models and adapters at random, in three ways; an answer is right, or an error that says so"
    def __init__(self, server, right, vector, seed):
        self.server, self.right, self.vector, self.rng = server, right, vector, random.Random(seed)
        self.counts = dict(right=0, told=0, hung_up=0)

    def run(self, goes_on):
        name, names = "embed", [*self.right, "embed", "embed"]
        while goes_on():
            if self.rng.random() < .3: name = self.rng.choice(names)   # most stay for a while
            way = self.embedding if name == "embed" else self.rng.choice([self.whole, self.streamed])
            self.counts[way(name)] += 1
        return self.counts

    def keep(self): return dict(keep_alive=self.rng.choice([0, 1, "5m"])) if self.rng.random() < .2 else {}

    def judged(self, r, value, right):
        if r.status_code == 200:
            assert value(r.json()) == right
            return "right"
        assert r.status_code in (500, 503, 404) and r.json()["error"], r.text
        assert r.status_code != 404 or b'"late"' in r.request.content, r.text   # it comes and goes
        return "told"

    def embedding(self, name):
        return self.judged(post(self.server, "/v1/embeddings", model=name, input="A page"),
                           lambda o: o["data"][0]["embedding"], self.vector)

    def whole(self, name):
        r = post(self.server, "/api/chat", model=name, messages=HI, stream=False,
                 options=dict(temperature=0, num_predict=6), **self.keep())
        return self.judged(r, lambda o: o["message"]["content"], self.right[name])

    def streamed(self, name):
        body, text = dict(model=name, messages=HI, max_tokens=6, temperature=0, stream=True), ""
        patience = self.rng.randrange(20)   # chunks, before some hang up
        hangs_up = self.rng.random() < .2
        with web.stream("POST", self.server.url + "/v1/chat/completions", json=body) as r:
            if r.status_code != 200:
                r.read()
                return self.judged(r, None, None)
            for line in r.iter_lines():
                if hangs_up and not (patience := patience - 1): return "hung_up"
                if not line.startswith("data: {"): continue
                event = json.loads(line[6:])
                if "error" in event: return "told"
                text += "".join(o["delta"].get("content") or "" for o in event["choices"])
        assert text == self.right[name]
        return "right"

def memory():
    "MB that this process holds for itself: the front of all models"
    gc.collect()
    with open("/proc/self/smaps_rollup") as f:
        return sum(map(int, re.findall(r"Private_\w+: +(\d+)", f.read())))/1024

@pytest.mark.long
def test_a_soak(table, record_property):
    """Three models of which two fit, nine adapters, random callers, loads, unloads and kills: every answer is
    right, nothing hangs, and memory is flat. TST_SOAK=1200 has it take 20 minutes"""
    seconds, rng, done = float(os.environ.get("TST_SOAK", 120)), random.Random(3), dict(kills=0, loads=0)
    with serve(models=str(table), max_loaded=2, keep_alive="2s", **HOW) as s:
        right = {o: said(s, o) for o in ("chat", *ADAPTERS, "other")}
        load_late(s, table).raise_for_status()
        right["late"] = said(s, "late")
        assert len({*right.values()}) == len(right)   # each tells itself apart
        vector = post(s, "/v1/embeddings", model="embed", input="A page").json()["data"][0]["embedding"]
        begun, seen, running = time.monotonic(), [], []
        def goes_on():   # to the end, or to the first wrong answer
            return time.monotonic() < begun + seconds and not any(o.done() and o.exception() for o in running)
        with ThreadPoolExecutor(6) as pool:
            for i in range(6): running.append(pool.submit(Caller(s, right, vector, i).run, goes_on))
            while goes_on():
                time.sleep(rng.random()*4)
                if time.monotonic() > begun + seconds*(1 + len(seen))/8: seen.append(memory())
                loaded, what = [*s._models.loaded], rng.random()
                if loaded and what < .3:
                    with contextlib.suppress(KeyError, ProcessLookupError):
                        os.kill(pid_of(s, rng.choice(loaded)), signal.SIGKILL)
                        done["kills"] += 1
                elif what < .5:
                    post(s, "/models/load", model="other")
                    done["loads"] += load_late(s, table).status_code == 200
                elif what < .6: load_late(s, table, "unload")
                elif what < .7 and loaded: post(s, "/models/unload", model=rng.choice(loaded))
            counts = [o.result(120) for o in running]
        until(lambda: not s._models.calls)
        until(lambda: all(post(s, "/models/load", model=o).status_code == 200 for o in ("chat", "other")))
        for name, text in right.items():   # and at the end each is as at the beginning
            if name != "late": assert said(s, name) == text
        seen.append(memory())
    total = {k: sum(o[k] for o in counts) for k in counts[0]}
    record_property("a soak of models and adapters", f"{total}, {done}, {seen}")
    print(total, done, [round(o) for o in seen], active_count())
    assert total["right"] > 20 and done["loads"] and done["kills"]
    assert seen[-1] < seen[1] + 32, seen   # MB
