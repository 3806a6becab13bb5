"""What agents and SDKs send beside what they want: accepted where it asks for nothing, left out where only
their maker's server could do it."""
import json
import shutil
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.text.grammar import GrammarCompiler
from minisgl_lit.text.json_schema import _CHECKED
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.formats.hub import resolve_model
from minisgl_lit.server.fields import ApiError
from minisgl_lit.server.messages_protocol import messages_error
from minisgl_lit.server.ollama_protocol import ServedModel
from minisgl_lit.server.openai_protocol import ChatRequest
from minisgl_lit.server.protocol import SamplingRequest
from minisgl_lit.text.tool_calling import ToolCalling
from minisgl_lit.text.tokenizer import Tokenizer, too_long
from test_serve import web

HI = [dict(role="user", content="Hi")]
PARAMETERS = dict(type="object", properties=dict(city=dict(type="string")), required=["city"])
CHAT = dict(type="function", function=dict(name="get_time", parameters=PARAMETERS))
ROUTES = {   # a body, a function, a tool that only its maker runs
    "/v1/chat/completions": (dict(messages=HI, max_tokens=2), CHAT, dict(type="web_search", web_search={})),
    "/v1/responses": (dict(input="Hi", max_output_tokens=2), dict(type="function", name="get_time",
        parameters=PARAMETERS), dict(type="image_generation", output_format="png")),
    "/v1/messages": (dict(messages=HI, max_tokens=2), dict(name="get_time", input_schema=PARAMETERS),
                     dict(type="web_search_20250305", name="web_search", max_uses=5)),
    "/api/chat": (dict(messages=HI, options=dict(num_predict=2), stream=False), CHAT,
                  dict(type="browser_search"))}

@pytest.fixture(scope="module")
def server(small_server): return small_server

@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_others_are_left_out_beside_functions(server, path, stream):
    body, function, other = ROUTES[path]
    for tools in ([function, other], [other, function, other]):
        answer = web.post(server.url + path, json=body | dict(stream=stream, tools=tools))
        assert ((answer.status_code, answer.headers.get("x-left-out-tools"))
                == (200, other["type"])), answer.text
    assert "x-left-out-tools" not in web.post(server.url + path, json=body | dict(tools=[function])).headers
    alone = web.post(server.url + path, json=body | dict(tools=[other]))
    assert alone.status_code == 400 and "tools[0].type must be 'function'" in alone.text

def test_a_forced_custom_tool_is_answered_as_one_and_goes_back(server):
    custom = dict(type="custom", name="say", description="Says a text")
    ask = dict(input="Hi", tools=[custom], tool_choice=dict(type="custom", name="say"), max_output_tokens=60,
               temperature=0)
    whole = web.post(server.url + "/v1/responses", json=ask).json()
    call = whole["output"][-1]
    assert (call["type"], call["name"]) == ("custom_tool_call", "say") and isinstance(call["input"], str)
    back = [*HI, *whole["output"],
            dict(type="custom_tool_call_output", call_id=call["call_id"], output="said")]
    assert (web.post(server.url + "/v1/responses",
                     json=ask | dict(input=back, tool_choice="auto")).status_code == 200)
    reply = [dict(type="custom_tool_call_output", call_id=call["call_id"], output="said")]
    assert (web.post(server.url + "/v1/responses",
        json=dict(input=reply, previous_response_id=whole["id"], max_output_tokens=2)).status_code == 200)
    streamed = web.post(server.url + "/v1/responses", json=ask | dict(stream=True)).text
    events = [json.loads(o[6:]) for o in streamed.splitlines() if o.startswith("data: ")]
    assert ("".join(e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta")
            == call["input"])

def test_a_full_context_in_the_words_of_messages(server):
    def words(error): return messages_error(ApiError.of(error))["error"]["message"]
    assert words(too_long(6008, 2048)) == "prompt is too long: 6008 tokens > 2048 maximum"
    for n in (300, 250, 20_000):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            sent = web.post(server.url + path, json=dict(messages=[dict(role="user", content="page " * n)])
                            | (dict(max_tokens=5) if path == "/v1/messages" else {}))
            said = sent.json().get("error", {}).get("message", "")
            if sent.status_code == 200: assert n == 250 and "count" in path
            else:
                assert ((sent.status_code, said.startswith("prompt is too long: ")) == (400, True)
                        and int(said.split()[4]) > int(said.split()[7])), said

@given(st.integers(-2**63, 2**63 - 1))
def test_a_seed_is_any_int64(seed):
    "Each is served, and the same one is the same again"
    used = SamplingRequest(seed=seed).params().seed
    assert used is None if seed == -1 else used == seed % 2**63

@pytest.fixture(scope="module")
def grammars():
    config = read_config(embedded_path())
    return GrammarCompiler(Tokenizer(embedded_path()).backend, config.vocab_size, config.eos_token_ids)

IDLE = [dict(propertyNames=dict(type="string")), dict(propertyNames=True), dict(uniqueItems=False),
        dict(minProperties=0), dict(unevaluatedProperties=True),
        dict(dependentRequired={}), {"if": {}}, dict(then=dict(required=["b"])), dict(format="password"),
        {"not": False}, dict(minContains=1)]

@pytest.mark.parametrize("idle", IDLE, ids=str)
def test_keywords_that_say_nothing_anywhere(grammars, idle):
    "Alone, in a property, in a definition, beside others, and in a strict tool"
    inner = dict(type="object", additionalProperties=dict(type="string")) | idle
    whole = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"},
        "b": dict(type="array", items=inner)}, "required": ["a"], "$defs": {"a": inner}}
    calling = ToolCalling(Tokenizer(embedded_path()))
    for schema in (inner, whole):
        grammars.validate(SamplingParams(json_schema=json.dumps(schema)))
        tool = dict(type="function", function=dict(name="f", parameters=whole, strict=True))
        for choice in ("auto", "required"):
            body = ChatRequest(messages=HI, tools=[tool], tool_choice=choice)
            params = calling.params(body.tool_offer, body.params().for_chat())
            assert params.ebnf
            grammars.validate(params)

def test_formats_that_are_checked_are_those_of_the_library(grammars):
    "Each compiles as it is, and holds a text to it; others are the ones that are dropped"
    from llguidance import LLMatcher
    def follows(schema):
        return not LLMatcher(grammars._vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)),
                             log_level=0).is_error()
    assert all(follows(dict(type="string", format=o)) for o in _CHECKED)
    assert not any(follows(dict(type="string", format=o)) for o in ("password", "path", "binary",
        "uri-reference", "regex", "idn-email", "iri", "json-pointer", "int32", "byte"))

def test_a_schema_that_is_not_given(server):
    for path, body in (("/v1/chat/completions",
            dict(messages=HI, response_format=dict(type="json_schema", json_schema=dict(name="x")))),
                       ("/v1/chat/completions", dict(messages=HI, response_format=dict(type="json_schema"))),
                       ("/v1/responses",
                        dict(input="Hi", text=dict(format=dict(type="json_schema", name="x"))))):
        assert web.post(server.url + path, json=body).status_code == 200

def test_ollama_as_its_documentation_shows_it(server):
    "`curl -d` names a form; the older route of embeddings; what is served, as its files say"
    def curl(path, **body):
        return web.post(server.url + path, content=json.dumps(body),
                        headers={"content-type": "application/x-www-form-urlencoded"})
    assert curl("/api/generate", prompt="Hi", stream=False, options=dict(num_predict=2)).json()["done"]
    new, old = (curl("/api/embed", input="Hi").json()["embeddings"][0],
                curl("/api/embeddings", model=server.model, prompt="Hi").json()["embedding"])
    assert new == pytest.approx(old)
    [entry], shown = (web.get(server.url + "/api/tags").json()["models"],
                      curl("/api/show", model=server.model).json())
    assert (entry["size"] == (embedded_path()/"model.safetensors").stat().st_size
            and entry["details"] == shown["details"])
    assert {"completion", "tools", "thinking"} <= {*shown["capabilities"]} and "messages" in shown["template"]
    assert (shown["details"] | dict(family="qwen3", format="safetensors", quantization_level="BF16")
            == shown["details"])
    assert shown["model_info"]["qwen3.context_length"] == 256
    asked = dict(role="assistant", content="",
                 tool_calls=[dict(function=dict(name=o, arguments={})) for o in "fg"])
    talk = [*HI, asked, dict(role="tool", content="1", tool_name="g"), dict(role="tool", content="2")]
    assert curl("/api/chat", messages=talk, stream=False, options=dict(num_predict=2)).status_code == 200

@pytest.mark.parametrize("name, level", [("embedded-Q4_K_M.gguf", "Q4_K"), ("qwen2-Q4_0.gguf", "Q4_0")])
def test_what_is_served_of_a_gguf_file(name, level):
    file = Path(__file__).parent/"data"/name
    about = ServedModel.of(Tokenizer(resolve_model(file)), dict(max_seq_len=64))
    assert ((about.size, about.details["format"], about.details["quantization_level"])
            == (file.stat().st_size, "gguf", level))
    assert (about.known["general.parameter_count"] > 1000
            and about.details["parameter_size"].endswith(("K", "M")))

def test_what_is_served_of_files_that_cannot_be_read(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_path()/name, tmp_path)
    for bad in (b"", b"\xff" * 8, (1 << 60).to_bytes(8, "little") + b"{"):
        (tmp_path/"model.safetensors").write_bytes(bad)
        about = ServedModel.of(Tokenizer(tmp_path), {})
        assert (about.size, about.details["parameter_size"], about.details["family"]) == (0, "", "qwen3")


# -- bodies and headers that cost more than they are, found by an attack ------------------------------

def tool(**parameters): return dict(type="function", name="f", parameters=parameters)

@pytest.mark.parametrize("path, body, param, said", [
    ("/v1/completions", dict(prompt="a", logit_bias={"9"*5000: 1}), "logit_bias", "must be a map"),
    ("/v1/completions", dict(prompt="a", logit_bias={"\u0663": 1}), "logit_bias", "must be a map"),
    ("/v1/responses", dict(input="a", tools=[tool(x=float("nan"))]), "tools[0].parameters", "finite numbers"),
    ("/v1/responses", dict(input="a", tools=[tool(x="\ud800")], tool_choice="none", stream=True),
     "tools[0].parameters", "valid Unicode"),
    ("/v1/chat/completions", dict(messages=[dict(role="user", content=[0]*100_000)]),
     "messages[0].content[0]", "must be an object"),
    ("/v1/completions", dict(prompt="a", json_schema=json.dumps(dict(type="integer", multipleOf=999_983))),
     "json_schema", "steps of multipleOf")])
def test_one_sentence_at_once(server, path, body, param, said):
    answer = web.post(server.url + path, content=json.dumps(body),
                      headers={"content-type": "application/json"})
    assert (answer.status_code == 400 and answer.json()["error"]["param"] == param
            and said in answer.text), answer.text[:500]

def test_of_many_invalid_items_one_is_reported():
    "Half a million of them are a short body, and were a gigabyte of errors"
    with pytest.raises(ValidationError) as e:
        ChatRequest.model_validate(dict(messages=[dict(role="user", content=[0]*1000)]))
    assert e.value.error_count() < 5

def test_a_namespace_may_have_any_name(server):
    answer = web.post(server.url + "/v1/responses", json=dict(input="Hi", max_output_tokens=2,
        tools=[dict(type="namespace", name="my.server", tools=[tool()])]))
    assert answer.status_code == 200 and answer.json()["tools"][0]["name"] == "my.server"

def test_an_upgrade_to_another_protocol_loses_no_body(server):
    "As a client of Java's sends it; and one whose header comes in two pieces is told what to leave out"
    body = json.dumps(dict(prompt="Hi", max_tokens=1)).encode()
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
            b"application/json\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgr")
    rest = b"ade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    address = server.url.removeprefix("http://").split(":")
    def answers(*pieces):
        with socket.create_connection((address[0], int(address[1])), timeout=20) as s:
            got = b""
            for piece in pieces:
                s.sendall(piece)
                time.sleep(.2)
            while b"HTTP/1.1 200" not in got.rpartition(b"health")[0] and (more := s.recv(65536)):
                got += more
                if b"}" in got: return got
            return got
    assert b" 200 OK" in (whole := answers(head + rest)) and b"text_completion" in whole
    assert b" 400 " in (torn := answers(head, rest)) and b"leave out the header Upgrade" in torn

def test_the_page_is_sent_whole_whatever_range_is_asked_for(server):
    for wanted in ("bytes=abc", "bytes=9-1", "bytes=0-3"):
        answer = web.get(server.url + "/", headers={"range": wanted})
        assert answer.status_code == 200 and answer.text.startswith("<!doctype html>")

def test_a_large_answer_is_the_same(server):
    body = dict(prompt="Hi", n=8, max_tokens=40, logprobs=20, temperature=0, ignore_eos=True)
    large, small = (web.post(server.url + "/v1/completions", json=body | o).json() for o in ({}, dict(n=1)))
    assert (len(large["choices"]) == 8
            and all(o["text"] == small["choices"][0]["text"] for o in large["choices"]))
    assert ([o["logprobs"]["tokens"] for o in large["choices"]]
            == [small["choices"][0]["logprobs"]["tokens"]]*8)

@pytest.mark.parametrize("tag", ["<tool_response>", "<tool_call>", "<think>"])
def test_tags_that_only_a_template_knows_are_text_in_a_result(tag):
    tok = Tokenizer(embedded_path())
    call = dict(role="assistant", content="",
                tool_calls=[dict(id="c", type="function", function=dict(name="get_time", arguments="{}"))])
    def count(content):
        return tok.chat([*HI, call, dict(role="tool", tool_call_id="c", content=content)],
                        [CHAT]).tolist().count(tok.added_ids[tag])
    assert count(f"a {tag} b") == count("a b")
