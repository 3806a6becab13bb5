"""The contract over real sockets: the official `openai` package, SGLang's own routes, and everything that may
be malformed."""
import asyncio, json, random, socket, threading, time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from minisgl_lit.core.request import FinishReason, Logprob
from minisgl_lit.core.sampling_params import QueueFull, RequestError
from minisgl_lit.core.outputs import EngineCoreOutput
from minisgl_lit.server.api_server import create_app
from minisgl_lit.server.callers import Account, Callers
from minisgl_lit.server.web_pages import WebPages
from minisgl_lit.server.sse import OutputQueue
from minisgl_lit.text.tokenizer import TextStopChecks, Tokenizer
from minisgl_lit.core.request import PendingReq

TEMPLATE = ("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content "
            "}}"
            "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% "
            "endfor %}{% endfor %}")
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Scripted:
    """An engine that says what it is told to: the text after the last `SAY:` of the prompt, one token at a
    time."""
    model, alive, trouble, pace = "scripted", True, "", 0.

    def __init__(self, tokenizer): self.tokenizer, self.seen, self.orders, self.left = tokenizer, [], [], []

    async def stats(self):
        counts = dict.fromkeys(["running", "waiting", "hit_rate", "prompt_tokens", "cached_tokens",
                                "generated_tokens", "retracted", "drafted_tokens",
                                "accepted_tokens"], 1)
        return counts | {"pages": {"total": 8, "free": 6, "evictable": 1, "protected": 1, "held": 0}}

    async def control(self, command, argument=""):
        if command == "flush_cache" and self.pace: raise RequestError("cache", "somebody is using the cache")
        self.orders.append((command, argument))
        return {"n": 1}

    async def stream(self, requests):
        left = {r.rid for r in requests}
        try:
            for r in requests:
                if not len(r.input_ids): raise RequestError("prompt", "the prompt must not be empty")
                if r.input_ids.min() < 0 or r.input_ids.max() > 255:
                    raise RequestError("prompt", "a token is outside the vocabulary")
                if r.params.grammars: raise RequestError(r.params.grammars[0], "no grammars here")
                if len(r.input_ids) > 4_000: raise QueueFull("max_queued_req", "too many are waiting")
            self.seen = [self.tokenizer.decode(r.input_ids) for r in requests]
            for r, prompt in zip(requests, self.seen):
                for reply in self.replies(r, prompt.rsplit("SAY:", 1)[-1]):
                    await asyncio.sleep(self.pace)
                    if reply.finish_reason: left.discard(r.rid)
                    yield reply
        finally: self.left += left

    def replies(self, r, say):
        ids, p = self.tokenizer.encode(say, False).tolist(), r.params
        ids = ids[:p.max_tokens]
        prompt = (None if p.prompt_logprobs is None
                  else [Logprob(t, -1. if i else None, []) for i, t in enumerate(r.input_ids.tolist())])
        told = lambda i: None if p.logprobs is None else [Logprob(i, -.5, [(i, -.5)]*bool(p.logprobs))]
        end = FinishReason.LENGTH if len(ids) == p.max_tokens else FinishReason.STOP
        checks = TextStopChecks(self.tokenizer)
        checks.validate(p)
        stop = checks.make(PendingReq("x", r.input_ids, p, 10**5))
        for k, i in enumerate(ids):
            stop.push(i, None, (end, None) if k + 1 == len(ids) else None)
            while not (new := stop.take()): checks.search([stop])   # a busy machine may put a search off
            if not new.end: yield EngineCoreOutput(r.rid, [i], logprobs=told(i), shown=new.shown)
            else:
                guessed = dict(drafted_tokens=5, accepted_tokens=2) if "GUESS" in say else {}
                return (yield EngineCoreOutput(r.rid, [i], *new.end, None, len(r.input_ids), 3, (.1, .2, .3),
                                               prompt, told(i), new.shown, **guessed))
        # nothing was said
        yield EngineCoreOutput(r.rid, [], end, None, None, len(r.input_ids), 3, (.1, .2, .3), prompt)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tok = tokenizers.Tokenizer(models.BPE({c: i
        for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.save(str(folder/"tokenizer.json"))
    (folder/"tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Tokenizer(folder)

def running(app):
    "A web server in a thread: its address, and how to end it"
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=asyncio.run, args=[server.serve([listener])], daemon=True)
    thread.start()
    def end():
        server.should_exit = True
        thread.join(10)
        listener.close()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", end

@pytest.fixture(scope="module")
def engine(tokenizer): return Scripted(tokenizer)

@pytest.fixture(scope="module")
def url(engine, tokenizer):
    url, end = running(create_app(engine, tokenizer,
        {"max_seq_len": 4096, "model": "/x/scripted", "vocab_size": 256, "api_key": "secret"}, max_body_mb=1))
    yield url
    end()

@pytest.fixture(scope="module")
def client(url): return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)

def post(url, path, **body): return httpx.post(url + path, json=body, timeout=30)

def say(text, role="user"): return [{"role": role, "content": "SAY:" + text}]


# -- chat ----------------------------------------------------------------------------------------

def test_chat(client):
    ask = dict(model="scripted", messages=say("Grüße 👋!"), temperature=0, user="me", metadata={"a": "b"},
               store=False)
    whole = client.chat.completions.create(**ask)
    assert whole.choices[0].message.content == "Grüße 👋!" and whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens_details.cached_tokens == 3
            and whole.usage.completion_tokens == len("Grüße 👋!".encode()))
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Grüße 👋!"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage == whole.usage
    assert ({c.id for c in chunks} == {chunks[0].id}
            and all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks[:-1]))

def test_guesses_in_the_usage(client, url):
    "Where there were any: as OpenAI names them, and as SGLang does"
    def details(text, **more):
        ask = dict(model="scripted", messages=say(text), **more)
        return client.chat.completions.create(**ask).usage.completion_tokens_details
    told = details("GUESS"), details("GUESS", n=2), details("ab")
    assert ([(o.accepted_prediction_tokens, o.rejected_prediction_tokens) for o in told]
            == [(2, 3), (4, 6), (None, None)])
    told = client.completions.create(model="scripted", prompt="SAY:GUESS").usage.completion_tokens_details
    assert (told.accepted_prediction_tokens, told.rejected_prediction_tokens) == (2, 3)
    metas = [post(url, "/generate", text=f"SAY:{o}").json()["meta_info"] for o in ("GUESS", "ab")]
    names = "spec_draft_token_num", "spec_accept_token_num"
    assert [[o.get(name) for name in names] for o in metas] == [[5, 2], [None, None]]

def test_several_answers(client):
    whole = client.chat.completions.create(model="scripted", messages=say("abc"), n=3, seed=1)
    assert [(c.index, c.message.content) for c in whole.choices] == [(i, "abc") for i in range(3)]
    assert whole.usage.completion_tokens == 9 and whole.usage.prompt_tokens == len("<user>SAY:abc")
    texts = [""]*3
    for c in client.chat.completions.create(model="scripted", messages=say("abc"), n=3, stream=True):
        texts[c.choices[0].index] += c.choices[0].delta.content or ""
    assert texts == ["abc"]*3

def test_logprobs(client):
    whole = client.chat.completions.create(model="scripted", messages=say("ab"), logprobs=True,
                                           top_logprobs=1)
    assert ([(o.token, o.logprob, o.bytes, len(o.top_logprobs)) for o in whole.choices[0].logprobs.content]
            == [("a", -.5, [97], 1), ("b", -.5, [98], 1)])
    chunks = list(client.chat.completions.create(model="scripted", messages=say("ab"), logprobs=True,
        stream=True))
    assert ([o.token for c in chunks if c.choices[0].logprobs for o in c.choices[0].logprobs.content]
            == ["a", "b"])

@pytest.mark.parametrize("stop, shown", [(dict(stop=["</e", "zz"]), "4 < 5 "),
    (dict(stop="zz"), "4 < 5 </end>"), (dict(extra_body={"stop_regex": r"<\W"}), "4 "),
                                         (dict(stop="5", extra_body={"stop_regex": r"<\s\d",
                                             "no_stop_trim": True}), "4 < 5")])
def test_stops(client, stop, shown):
    ask = dict(model="scripted", messages=say("4 < 5 </end>"), **stop)
    assert client.chat.completions.create(**ask).choices[0].message.content == shown
    assert ("".join(c.choices[0].delta.content or ""
                    for c in client.chat.completions.create(**ask, stream=True)) == shown)


# -- tools ---------------------------------------------------------------------------------------

FORMS = [("So. " + CALL, "So."), (CALL + "\n" + CALL, None),
         ('{"name": "weather", "parameters": {"city": "Rome"}}', None),
         ('{"parameters": {"city": "Rome"}, "name": "weather"}', None)]   # the last one can only come whole

@pytest.mark.parametrize("text, talk", FORMS)
def test_tools(client, engine, text, talk):
    ask = dict(model="scripted", messages=say(text), tools=[WEATHER])
    message = client.chat.completions.create(**ask).choices[0]
    assert message.finish_reason == "tool_calls" and message.message.content == talk
    assert ([(c.function.name, json.loads(c.function.arguments)) for c in message.message.tool_calls]
            == [("weather", {"city": "Rome"})]*max(1, text.count("<tool_call>")))
    assert json.dumps(WEATHER) in engine.seen[0]
    calls, said, reasons = {}, "", []
    for c in client.chat.completions.create(**ask, stream=True):
        said += c.choices[0].delta.content or ""
        reasons.append(c.choices[0].finish_reason)
        for o in c.choices[0].delta.tool_calls or []:
            # the name first, and once
            assert (o.index in calls) == (o.id is None) == (o.function.name is None)
            calls.setdefault(o.index, []).append(o.function.arguments)
    if not text.startswith('{"parameters'):
        assert all(len(o) > 3 and "".join(o) == '{"city": "Rome"}' for o in calls.values())   # piece by piece
    with client.chat.completions.stream(**ask) as stream:
        last = stream.get_final_completion().choices[0].message
    assert ([c.function.parsed_arguments or json.loads(c.function.arguments) for c in last.tool_calls]
            == [{"city": "Rome"}]*len(calls))
    assert (said, list(calls), reasons[-1]) == (talk or "", [*range(max(1, text.count("<tool_call>")))],
                                                "tool_calls")

DEEP = '{"city": ' + "["*1000 + "]"*1000 + "}"

@pytest.mark.parametrize("arguments, read",
                         [('{"city": NaN}', {"city": "NaN"}), ('{"city": [1e999]}', {"city": ["1e999"]}),
                          (r'{"city": "\ud800"}', {"city": "\ufffd"}), (DEEP, {"arguments": DEEP}),
                          ('{"city": "a\nb"}', {"city": "a\nb"})],
                         ids=["nan", "infinite", "half", "deep", "line"])
def test_arguments_that_no_object_can_have(url, arguments, read):
    "Where a protocol has them as an object, the answer does not fail for them"
    text, tool = ('<tool_call>{"name": "weather", "arguments": ' + arguments + "}</tool_call>",
                  WEATHER["function"])
    whole = post(url, "/v1/messages", model="scripted", max_tokens=1500, messages=say(text),
                 tools=[dict(name="weather", input_schema=tool["parameters"])])
    assert [o["input"] for o in whole.json()["content"]] == [read]
    for stream in (False, True):
        r = post(url, "/api/chat", model="scripted", messages=say(text), tools=[WEATHER], stream=stream,
                 options={"num_predict": 1500})
        messages = [json.loads(o)["message"] for o in r.text.splitlines()]
        assert [c["function"]["arguments"] for o in messages for c in o.get("tool_calls", [])] == [read]

def test_tools_are_a_matter_of_choice(client, engine):
    for more in (dict(tools=[WEATHER], tool_choice="none"), {}):
        whole = client.chat.completions.create(model="scripted", messages=say(CALL), **more).choices[0]
        assert whole.message.content == CALL and whole.finish_reason == "stop" and "Now" not in engine.seen[0]
    one = client.chat.completions.create(model="scripted", messages=say(CALL*2), tools=[WEATHER],
                                         parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1
    for more in (dict(tools=[WEATHER], tool_choice="required"),
                 dict(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}),
                 dict(response_format={"type": "json_object"}),
                 dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}})):
        with pytest.raises(openai.BadRequestError, match="no grammars here") as e:
            client.chat.completions.create(model="scripted", messages=say("x"), **more)
        assert e.value.param == ("tools" if "tools" in more else "response_format")

@pytest.mark.parametrize("said, shown, called", [
    ('Well.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "Well.", True),
    ("Well, [TOOL_CALLS] is a marker.", "Well,  is a marker.", False)])
def test_markers_that_are_special_tokens(tokenizer, tmp_path, said, shown, called):
    "They are read, though decoding leaves special tokens out, and never shown"
    tok = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    tok.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<other>"])
    tok.save(str(tmp_path/"tokenizer.json"))
    (tmp_path/"tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE + "{# [TOOL_CALLS] [ARGS] #}"}))
    engine = Scripted(Tokenizer(tmp_path))
    replies = engine.replies
    engine.replies = lambda r, _: replies(r, "<other>" + said)
    url, end = running(create_app(engine, engine.tokenizer, {"max_seq_len": 4096, "model": "/x/scripted"}))
    try:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(model="scripted", messages=say("x"),
                                               tools=[WEATHER]).choices[0]
        assert (whole.message.content, bool(whole.message.tool_calls), whole.finish_reason) == (shown, called,
            "tool_calls" if called else "stop")
        with client.chat.completions.stream(model="scripted", messages=say("x"), tools=[WEATHER]) as stream:
            last = stream.get_final_completion().choices[0]
        assert (last.message.content, bool(last.message.tool_calls)) == (shown, called)
        if called:
            assert (whole.message.tool_calls[0].function.arguments
                    == last.message.tool_calls[0].function.arguments == '{"city": "Rome"}')
        plain = client.chat.completions.create(model="scripted", messages=say("x")).choices[0].message.content
        # without tools nothing has changed
        assert plain == said.replace("[TOOL_CALLS]", "").replace("[ARGS]", "")
    finally: end()


def test_result_of_a_tool(client, engine):
    first = client.chat.completions.create(model="scripted", messages=say(CALL),
                                           tools=[WEATHER]).choices[0].message
    dialog = [{"role": "user", "content": "hot?"}, first.model_dump(exclude_none=True),
              {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "20 °C"}]
    client.chat.completions.create(model="scripted", messages=dialog + say("fine"), tools=[WEATHER])
    assert '<assistant>[weather {"city": "Rome"}]<tool>20 °C<user>SAY:fine' in engine.seen[0]


# -- completions ---------------------------------------------------------------------------------

def test_completions(client, tokenizer):
    many = client.completions.create(model="scripted", prompt=["SAY:ab", "SAY:xyz"], n=2, max_tokens=2)
    assert [(c.index, c.text, c.finish_reason) for c in many.choices] == [(0, "ab", "length"),
        (1, "ab", "length"), (2, "xy", "length"), (3, "xy", "length")]
    ids = tokenizer.encode("SAY:ab").tolist()
    assert ([c.text for c in client.completions.create(model="scripted", prompt=[ids, ids]).choices]
            == ["ab"]*2)
    assert client.completions.create(model="scripted", prompt=ids).choices[0].text == "ab"

def test_echo(client, tokenizer):
    ask = dict(model="scripted", prompt="xSAY:ab", echo=True)
    assert client.completions.create(**ask).choices[0].text == "xSAY:abab"
    assert "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True)) == "xSAY:abab"
    scored = client.completions.create(**ask, max_tokens=0, logprobs=1).choices[0]
    assert scored.text == "xSAY:ab" and scored.finish_reason == "length"
    assert (scored.logprobs.tokens == list("xSAY:ab") and scored.logprobs.token_logprobs == [None] + [-1.]*6
            and scored.logprobs.text_offset == [*range(7)])
    both = client.completions.create(**ask, max_tokens=1, logprobs=0).choices[0].logprobs
    assert both.tokens == list("xSAY:aba") and both.token_logprobs[-1] == -.5
    assert (client.completions.create(**ask | {"prompt": tokenizer.encode("SAY:é").tolist()}).choices[0].text
            == "SAY:éé")


# -- errors, names, keys -------------------------------------------------------------------------

def test_errors_of_the_client(client):
    ask = dict(model="scripted", prompt="x")
    for kind, param, more in [(openai.NotFoundError, "model", dict(model="gpt")),
                              (openai.BadRequestError, "best_of", dict(best_of=2)),
                              (openai.BadRequestError, "temperature", dict(temperature=-1)),
                              (openai.BadRequestError, "suffix", dict(suffix="x")),
                              (openai.BadRequestError, "stop_regex", dict(extra_body={"stop_regex": "a*"})),
                              (openai.BadRequestError, "n", dict(n=0)), (openai.BadRequestError, "user",
                                  dict(user=5)), (openai.BadRequestError, "prompt", dict(prompt=""))]:
        with pytest.raises(kind) as e: client.completions.create(**ask | more)
        assert (e.value.param, e.value.type, bool(e.value.message)) == (param, "invalid_request_error", True)

@pytest.mark.parametrize("path, param, body", [
    ("/v1/chat/completions", "messages", {}),
    ("/v1/chat/completions", "tools[0].type", {"messages": say("x"), "tools": [{}]}),
    ("/v1/completions", "prompt", {"prompt": [1, "x"]}), ("/v1/completions", "prompt", {"prompt": "\ud800"}),
    ("/v1/completions", "top_p", {"prompt": "x", "top_p": 1.5}), ("/generate", "text", {}),
    ("/tokenize", "prompt", {}), ("/abort_request", "rid", {}), ("/pause_generation", "mode", {"mode": "x"})])
def test_errors_name_their_field(url, path, param, body):
    for extra in ({}, {"stream": True}) if path.startswith(("/v1", "/gen")) else ({},):
        r = httpx.post(url + path, content=json.dumps(body | extra),
                       headers={"content-type": "application/json"})
        error = r.json()["error"]
        assert ((r.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
                and len(error["message"]) > 9)

def test_full_and_too_long(url):
    r = post(url, "/v1/completions", prompt="x"*4_001)
    assert (r.status_code, r.headers["retry-after"], r.json()["error"]["code"]) == (503, "1", "queue_full")
    r = post(url, "/v1/completions", prompt="x"*2**20)
    assert (r.status_code, r.json()["error"]["code"]) == (413, "body_too_large")
    def parts():
        for _ in range(40): yield b"x"*2**15
    try: assert httpx.post(url + "/v1/completions", content=parts(), timeout=30).status_code == 413
    except httpx.WriteError: pass   # the server hung up while the client was still writing

def test_names_and_keys(tokenizer, url):
    assert httpx.get(url + "/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert "secret" not in httpx.get(url + "/get_server_info").text
    locked, end = running(create_app(Scripted(tokenizer), tokenizer,
        callers=Callers({"open": Account("ann")}), pages=WebPages("*", needs_key=True)))
    try:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=locked + "/v1", api_key="shut", max_retries=0).models.list()
        assert openai.OpenAI(base_url=locked + "/v1", api_key="open").models.list().data[0].id == "scripted"
        assert ([httpx.get(locked + o).status_code for o in ("/health", "/metrics", "/get_server_info")]
                == [200, 200, 401])
        ask = {"origin": "https://a.org", "access-control-request-method": "POST"}
        assert (httpx.options(locked + "/v1/completions", headers=ask).headers["access-control-allow-origin"]
                == "*")
    finally: end()


# -- our own routes ------------------------------------------------------------------------------

def test_models(client, url):
    assert client.models.retrieve("scripted").id == client.models.list().data[0].id == "scripted"
    with pytest.raises(openai.NotFoundError): client.models.retrieve("other/model")
    told = httpx.get(url + "/model_info").json()
    assert (told == httpx.get(url + "/get_model_info").json() and {k: told[k]
        for k in ("model_path", "served_model_name", "is_generation", "max_model_len", "vocab_size")} == {
        "model_path": "/x/scripted", "served_model_name": "scripted", "is_generation": True,
        "max_model_len": 4096, "vocab_size": 256})

def test_generate(url):
    one = post(url, "/generate", text="SAY:abc", sampling_params={"max_new_tokens": 2}, return_logprob=True,
               top_logprobs_num=1, logprob_start_len=2).json()
    meta = one["meta_info"]
    assert (one["text"] == "ab" and meta["finish_reason"] == {"type": "length", "length": 2}
            and meta["completion_tokens"] == 2)
    assert [len(meta[o]) for o in ("output_token_logprobs", "output_top_logprobs")] == [2, 2]
    many = post(url, "/generate", text=["SAY:a", "SAY:b"], sampling_params=[{}, {"n": 2}], rid="r").json()
    assert [(o["text"], o["meta_info"]["id"]) for o in many] == [("a", "r_0"), ("b", "r_1"), ("b", "r_2")]
    with httpx.stream("POST", url + "/generate", json=dict(text=["SAY:ab", "SAY:c"], stream=True)) as r:
        lines = [o[6:] for o in r.iter_lines() if o]
    texts = {0: "", 1: ""}
    for e in map(json.loads, lines[:-1]): texts[e["index"]] = e["text"]   # all of it so far
    assert lines[-1] == "[DONE]" and texts == {0: "ab", 1: "c"}

def test_tokens_and_orders(url, engine):
    said = post(url, "/tokenize", prompt=["Grüße", "👋"]).json()
    assert (said["count"] == 11 and post(url, "/v1/detokenize",
        tokens=said["tokens"]).json() == {"text": ["Grüße", "👋"], "prompt": ["Grüße", "👋"]})
    assert (post(url, "/detokenize", tokens=[]).json()["text"] == ""
            and post(url, "/tokenize", prompt=[]).json()["count"] == 0)
    engine.orders.clear()
    for path, body in [("/flush_cache", {}), ("/abort_request", {"abort_all": True}),
                       ("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {}),
                       ("/start_profile", {}), ("/stop_profile", {})]:
        assert post(url, path, **body).json() == {"success": True, "n": 1}
    assert [o for o, _ in engine.orders] == ["flush_cache", "abort", "pause", "resume", "profile_start",
                                             "profile_stop"]
    assert httpx.get(url + "/health_generate").status_code == 200

def test_metrics(url):
    lines = dict(o.rsplit(" ", 1) for o in httpx.get(url + "/metrics").text.splitlines()
                 if not o.startswith("#"))
    label = '{model_name="scripted"}'
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "cache_hit_rate", "gen_throughput",
                 "num_retracted_reqs_total", "num_aborted_requests_total"):
        assert float(lines[f"minisgl:{name}{label}"]) >= 0
    before = float(lines[f"minisgl:e2e_request_latency_seconds_count{label}"])
    post(url, "/v1/completions", prompt="SAY:abc", n=2)
    lines = dict(o.rsplit(" ", 1) for o in httpx.get(url + "/metrics").text.splitlines()
                 if not o.startswith("#"))
    assert float(lines[f"minisgl:e2e_request_latency_seconds_count{label}"]) == before + 2
    for name in ("time_to_first_token", "inter_token_latency", "queue_time"):
        assert float(lines[f"minisgl:{name}_seconds_count{label}"]) > 0

def test_slow_readers_get_joined_events(tokenizer):
    "The engine is far ahead: what waits comes in one event, and nothing is lost"
    class Ahead(Scripted):
        async def stream(self, requests):
            box = OutputQueue()
            for reply in self.replies(requests[0], "0123456789"*30): box.put(reply)
            for reply in await box.get(): yield reply
    url, end = running(create_app(Ahead(tokenizer), tokenizer))
    try:
        chunks = [o
                  for o in openai.OpenAI(base_url=url + "/v1", api_key="x").completions.create(
                      model="scripted", prompt="x", max_tokens=1000, stream=True)]
        assert "".join(c.choices[0].text for c in chunks) == "0123456789"*30 and len(chunks) == 2
    finally: end()

def test_callers_who_leave(url, engine):
    engine.pace, engine.left = .01, []
    try:
        def leave(stream):
            with pytest.raises(httpx.ReadTimeout):
                (httpx.post(url + "/v1/completions", json=dict(prompt="SAY:" + "x"*500, max_tokens=500,
                    stream=stream), timeout=httpx.Timeout(5, read=.2)).read() if not stream else read_some())
        def read_some():
            with httpx.stream("POST", url + "/v1/completions",
                              json=dict(prompt="SAY:" + "x"*500, max_tokens=500, stream=True)) as r:
                next(r.iter_lines())
            raise httpx.ReadTimeout("left")
        with ThreadPoolExecutor(8) as pool: list(pool.map(leave, [True, False]*4))
        end = time.monotonic() + 60
        while len(engine.left) < 8 and time.monotonic() < end: time.sleep(.05)
        assert len(engine.left) == 8
        assert post(url, "/flush_cache").status_code == 400
    finally: engine.pace = 0


# -- whatever may be malformed -------------------------------------------------------------------

BODIES = {
    "/v1/chat/completions": dict(messages=[{"role": "user", "content": "SAY:x"},
                                           {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "content": [{"type": "text", "text": "y"}], "tool_call_id": "c"}],
        tools=[WEATHER], tool_choice="auto", response_format={"type": "text"}, logprobs=True, top_logprobs=2,
        max_completion_tokens=3),
    "/v1/completions": dict(prompt=["x", "y"], echo=True, max_tokens=2, logit_bias={"3": 1}, logprobs=1,
                            stop=["a"], seed=3),
    "/generate": dict(text="x", sampling_params={"max_new_tokens": 2, "stop_regex": "a+"}, rid="r",
                      return_logprob=True, top_logprobs_num=1, logprob_start_len=0),
    "/tokenize": dict(prompt="x", add_special_tokens=True),
    "/detokenize": dict(tokens=[1, 2], skip_special_tokens=False),
    "/abort_request": dict(rid="x"), "/pause_generation": dict(mode="abort")}
JUNK = [None, True, False, 0, -1, 1, 2**31, 2**63, -2**70, 1e308, -1.5, float("nan"), float("inf"), "", "x",
        "\ud800", "é"*300, "(", "(a|a)*b", "DEEP", [], [[]], [None], [1, "x"],
        [2**70], {}, {"": {}}, {"type": "function"}, {"\ud800": 1}, [[[]]]]
NAMES = ["n", "best_of", "stream", "stream_options", "model", "temperature", "top_p", "top_k", "min_p",
         "seed", "priority", "user", "regex", "ebnf", "json_schema", "extra_key", "stop",
         "stop_token_ids", "skip_special_tokens", "prompt_logprobs", "parallel_tool_calls", "input_ids",
         "messages", "prompt", "\ud800", "max_tokens", "min_tokens"]

def deep(rng, levels=300):
    out = rng.choice(["x", 1])
    for _ in range(levels): out = [out] if rng.random() < .5 else {"a": out}
    return out

def spoil(rng, value):
    "The same, with something wrong somewhere"
    if isinstance(value, dict) and value and rng.random() < .8:
        key = rng.choice(list(value))
        action = rng.random()
        if action < .1: return {k: v for k, v in value.items() if k != key}
        if action < .35: return value | {rng.choice(NAMES): rng.choice(JUNK)}
        return value | {key: spoil(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < .8:
        i = rng.randrange(len(value))
        return value[:i] + [spoil(rng, value[i])] + value[i+1:]
    return deep(rng, rng.choice([3, 300, 700])) if rng.random() < .06 else rng.choice(JUNK)

def mangle(rng, text):
    "The bytes of a body, some of them wrong"
    raw = text.encode("utf-8", "surrogatepass")
    if rng.random() < .8: return raw
    i = rng.randrange(len(raw) + 1)
    return rng.choice([raw[:i], raw[:i] + bytes([rng.randrange(256)]) + raw[i+1:], b"[" * 10_000, b"",
                       b"\xff\xfe", raw[:i] + b"NaN" + raw[i:]])

def test_malformed_requests_are_never_our_fault(tokenizer):
    "300 of them, always the same ones; whatever is refused says so in one form"
    rng, codes = random.Random(7), {}
    app = create_app(Scripted(tokenizer), tokenizer, {"max_seq_len": 99})
    async def all_():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                                     base_url="http://x") as web:
            for k in range(300):
                path = rng.choice(list(BODIES))
                body = spoil(rng, BODIES[path])
                for _ in range(rng.randrange(2)): body = spoil(rng, body)
                text = json.dumps(body).replace('"DEEP"', "[" * 3000 + "]" * 3000)
                r = await web.post(path, content=mangle(rng, text),
                    headers={"content-type": rng.choice(["application/json"]*9 + ["text/plain"])})
                codes[r.status_code] = codes.get(r.status_code, 0) + 1
                assert r.status_code < 500, (k, path, text[:300], r.text)
                if r.status_code != 200:
                    error = r.json()["error"]
                    assert (list(error) == ["message", "type", "param", "code"]
                            and len(error["message"]) > 5), (k, path, text[:300])
            for method, path in [("GET", "/generate"), ("POST", "/v1/models"), ("GET", "/v1/models/%00%ff"),
                                 ("GET", "/\u2028x"), ("DELETE", "/health"), ("PUT", "/v1/x")]:
                assert 400 <= (await web.request(method, path)).status_code < 500
    asyncio.run(all_())
    assert codes[400] > 150 and codes[200] > 10, codes

@pytest.mark.parametrize("kind", [{}, {"content-type": "application/x-www-form-urlencoded"}],
                         ids=["none", "curl -d"])
def test_json_needs_no_content_type(url, kind):
    assert httpx.post(url + "/v1/completions", content=b'{"prompt": "x"}', headers=kind).status_code == 200

@pytest.mark.parametrize("how",
                         [dict(), dict(content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})],
                         ids=["nothing", "another type"])
def test_a_body_that_is_no_json_is_told_what_to_be(url, how):
    answer = httpx.post(url + "/v1/completions", **how)
    assert (answer.status_code == 400
            and answer.json()["error"]["message"]
            == "the body must be a JSON object, sent as Content-Type: application/json")
