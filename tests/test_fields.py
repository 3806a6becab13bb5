"""What becomes of a field of a request: served on every route, without effect, or refused by name; and no
error is in the words of a library."""
import json, re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from minisgl_lit import serve
from minisgl_lit.server.completions_protocol import CompletionRequest
from minisgl_lit.server.fields import ApiObject, explain
from minisgl_lit.server.openai_protocol import ChatRequest
from test_serve import SMALL, info, until, web

LONG = ("The pages of a tree are shared by all requests that begin alike, and that is why a tenant has a key "
        "of its own.")
ROUTES = {   # what generates: the body of a long prompt
    "/v1/chat/completions": dict(messages=[dict(role="user", content=LONG)], max_tokens=1),
    "/v1/completions": dict(prompt=LONG, max_tokens=1),
    "/generate": dict(text=LONG, sampling_params=dict(max_tokens=1))}
VALUES = dict(lora_name="x", lora_path="/x",    # of fields that some body must have
    messages=[dict(role="user", content="x")], prompt="x", tokens=[5], rid="x", input="x", query="x",
    items=["y"], label_token_ids=[5], max_tokens=1, model="embedded", model_path="x", documents=["x"],
    name="embedded", new_version="x", endpoint="/v1/completions",
    input_file_id="x")

@pytest.fixture(scope="module")
def server():
    with serve(**SMALL | dict(max_running_req=1), max_seq_len=256, log_interval=0, admin_key="admin") as s:
        yield s

def ask(server, path, admin=False, **body):
    headers = {"content-type": "application/json"} | ({"authorization": "Bearer admin"} if admin else {})
    return web.post(server.url + path, content=json.dumps(body), headers=headers)

def bodies(server):
    "Each route that takes a body, and what it must have, as the server describes itself"
    told = web.get(server.url + "/openapi.json").json()
    for path, routes in told["paths"].items():
        if "requestBody" not in routes.get("post", {}): continue
        schema = routes["post"]["requestBody"]["content"]["application/json"]["schema"]
        kinds = [o["$ref"].rpartition("/")[2] for o in (schema, *schema.get("anyOf", ())) if "$ref" in o]
        needed = {name for kind in kinds for name in told["components"]["schemas"][kind].get("required", ())}
        assert needed <= VALUES.keys(), (f"{path}: add a value for {needed - VALUES.keys()} to VALUES of "
                                         "tests/test_fields.py")
        yield path, {name: VALUES[name] for name in needed}

def test_an_unknown_field_is_refused_on_every_route(server):
    for path, body in bodies(server):
        error = ask(server, path, admin=True, **body, colour_of_the_page="red")
        assert error.status_code == 400, (path, error.text)
        # in the shape of the route's protocol
        assert "colour_of_the_page is not a field" in error.text, (path, error.text)
    for path, near in (("/v1/chat/completions", "temprature"), ("/v1/completions", "temprature"),
                       ("/generate", "sampling_param")):
        assert "did you mean" in ask(server, path, **ROUTES[path], **{near: 0}).json()["error"]["message"]
    assert ask(server, "/generate", text="x", colour=1).json()["error"]["param"] == "colour"
    nested = ask(server, "/generate", text="x", sampling_params=dict(temprature=0)).json()["error"]
    assert (nested["param"] == "sampling_params.temprature"
            and "did you mean temperature?" in nested["message"])

def test_fields_of_others_are_refused_by_name(server):
    for path, body in ROUTES.items():
        for name in ("image_data", "lora_request", "session_params", "input_embeds", "web_search_options",
                     "prediction"):
            error = ask(server, path, **body, **{name: {"a": 1}}).json()["error"]
            assert error["param"] == name and "is refused: " in error["message"]
            assert ask(server, path, **body, **{name: None}).status_code == 200

def test_all_fields_of_openai_are_known():
    "Served, without effect, or refused by name"
    for ours, theirs in ((ChatRequest, chat_params), (CompletionRequest, completion_params)):
        names = {*theirs.CompletionCreateParamsBase.__annotations__}
        unknown = names - {*ours.model_fields} - {*ours.without_effect} - {*ours.refused}
        assert not unknown, f"{ours.__name__}: {unknown}"

def test_the_guide_lists_fields_without_effect_and_refused_ones():
    guide = (Path(__file__).parents[1]/"docs/guides/openai-client.md").read_text()
    rows = {kind: {*re.findall(r"`(\w+)`", row)}
            for kind, row in re.findall(r"(?m)^\| (served|without effect|refused) \| (.*) \|$", guide)}
    requests = ChatRequest, CompletionRequest
    assert rows["without effect"] == {name for o in requests for name in o.without_effect}
    assert rows["refused"] == {name for o in requests for name in o.refused} | {"best_of"}
    assert rows["served"] <= {name for o in requests for name in o.model_fields}

def streamed(server, path, **body):
    "The choices of each event of a stream, and the first event"
    told = [json.loads(o[6:]) for o in ask(server, path, stream=True, **body).text.splitlines()
            if o.startswith("data: {")]
    return [o["choices"][0] for o in told], told[0]

def test_token_ids_are_returned(server):
    """In chats and completions, whole and streamed: of the prompt as /tokenize says, of the answer as
    /generate does"""
    messages, rest = (ROUTES["/v1/chat/completions"]["messages"],
                      dict(max_tokens=9, temperature=0, return_token_ids=True))
    prompt = ask(server, "/tokenize", messages=messages).json()["tokens"]
    made = ask(server, "/generate", input_ids=prompt,
               sampling_params=dict(max_new_tokens=9, temperature=0)).json()["output_ids"]
    chat = ask(server, "/v1/chat/completions", messages=messages, **rest).json()
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (prompt, made)
    choices, first = streamed(server, "/v1/chat/completions", messages=messages, **rest)
    assert (first["prompt_token_ids"], [i for o in choices for i in o.get("token_ids", [])]) == (prompt, made)
    text = ask(server, "/v1/completions", prompt=[prompt, prompt[:5]], **rest).json()["choices"]
    assert ([o["prompt_token_ids"] for o in text], text[0]["token_ids"]) == ([prompt, prompt[:5]], made)
    choices, _ = streamed(server, "/v1/completions", prompt=prompt, **rest)
    assert ((choices[0]["prompt_token_ids"], [i for o in choices for i in o.get("token_ids", [])])
            == (prompt, made))
    short = ask(server, "/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    assert len(short) < len(prompt) and prompt[:len(short)] == short

def test_bytes_of_parts_of_characters(server):
    "Each token of a character that is forced has its own bytes, and those together are the text"
    body = dict(messages=ROUTES["/v1/chat/completions"]["messages"], regex="🙂é", max_tokens=20,
                logprobs=True, top_logprobs=20)
    [choice] = ask(server, "/v1/chat/completions", **body).json()["choices"]
    entries = choice["logprobs"]["content"]
    assert (bytes(b for o in entries for b in o["bytes"]).decode().startswith("🙂é")
            and any(o["token"] == "\ufffd" for o in entries))
    [choice] = ask(server, "/v1/completions", prompt="🙂" * 9, regex="🙂🙂", max_tokens=20,
                   logprobs=20).json()["choices"]
    assert {len(o) for o in choice["logprobs"]["top_logprobs"]} <= {20, 21}   # none is lost

@pytest.mark.long
def test_unknown_fields_may_be_ignored():
    with serve(**SMALL, max_seq_len=256, log_interval=0, unknown_fields="ignore") as s:
        for path, body in ROUTES.items():
            assert ask(s, path, **body, temprature=0).status_code == 200
            # it would change the answer
            assert ask(s, path, **body, image_data="cat.png").status_code == 400

def cached(server, path, **more):
    told = ask(server, path, **ROUTES[path], **more).json()
    return (told["meta_info"]["cached_tokens"] if path == "/generate"
            else told["usage"]["prompt_tokens_details"]["cached_tokens"])

@pytest.mark.parametrize("path", ROUTES)
def test_keys_keep_tenants_apart(server, path):
    "A prompt that was computed under one key is found under it alone, whichever name the key has"
    assert ([cached(server, path, cache_salt=path + "a") > 0, cached(server, path, cache_salt=path + "a") > 0]
            == [False, True])
    assert cached(server, path, extra_key=path + "a") > 0
    assert cached(server, path, extra_key=path + "b") == 0

@pytest.mark.parametrize("path", ROUTES)
def test_a_priority_overtakes(server, path):
    "One row; whoever waits with the higher priority is next, and leaves the prompt of both in the cache"
    ask(server, "/pause_generation", admin=True, mode="in_place")
    with ThreadPoolExecutor(2) as pool:
        low = pool.submit(cached, server, path, cache_salt=path + "p")
        until(lambda: info(server)["waiting"] == 1)
        high = pool.submit(cached, server, path, cache_salt=path + "p", priority=5)
        until(lambda: info(server)["waiting"] == 2)
        ask(server, "/continue_generation", admin=True)
    assert [o.result() > 0 for o in (high, low)] == [False, True]

@pytest.mark.parametrize("path, body, param", [
    ("/v1/chat/completions", dict(messages=[dict(role="user", content="page " * 400)]), "messages"),
    ("/v1/completions", dict(prompt="page " * 400), "prompt"),
    ("/v1/completions", dict(prompt=[5] * 257), "prompt"), ("/generate", dict(input_ids=[5] * 300), "text"),
    ("/v1/completions", dict(prompt="x", max_tokens=300), "max_tokens"),
    ("/tokenize", dict(prompt="page " * 9_999), "prompt")])
def test_what_does_not_fit_has_a_code(server, path, body, param):
    "Frameworks branch on it: some shorten the conversation and ask again"
    error = ask(server, path, **body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param), error

def kinds(cls=ApiObject):
    "All bodies, and the objects in them"
    for sub in cls.__subclasses__(): yield from (sub, *kinds(sub))

JUNK = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4),
                    lambda o: st.lists(o, max_size=2)
                    | st.dictionaries(st.sampled_from(["type", "role", "content", "text", "name", "x"]), o,
                                      max_size=3), max_leaves=4)

@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_error_is_in_the_words_of_a_library(data):
    "Whatever a field is given as, the sentence names it and says what it must be in our words"
    cls = data.draw(st.sampled_from(sorted(kinds(), key=lambda o: o.__qualname__)))
    field = data.draw(st.sampled_from(sorted(cls.model_fields)))
    name = cls.model_fields[field].alias or field
    try: cls.model_validate({name: data.draw(JUNK)})
    except ValidationError as invalid:
        errors = [o for o in invalid.errors() if o["loc"][:1] == (name,)]
        if not errors: return
        error = explain(errors)
        assert re.split(r"[.\[]", error.param)[0] == name, error
        assert re.fullmatch(r"\S+ (must (be|have|not be)|may have|is required|is refused).*", str(error),
                            re.S), error
        assert not re.search(r"of another kind|[Ii]nput should|[Ff]ield required|validation error|[Uu]nable "
                             r"to|pydantic", str(error).split(", not ")[0]), error
