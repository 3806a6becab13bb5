"""A client that sends whatever the schema of the server allows, and the packages `openai` and `anthropic` on
the model that comes with the package; `test_other_clients.py` has clients that take an environment of their
own."""
import json

import anthropic
import openai
import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit import LLM, SamplingParams
from test_serve import idle, post, until, web


@pytest.fixture(scope="module")
def server(small_server): return small_server

# they change what comes after them
ELSEWHERE = {"/pause_generation", "/release_memory_occupation", "/start_profile", "/stop_profile"}


def is_error(path, error):
    "Whether an error has the shape that clients of its path read"
    if path.startswith("/api/"): return isinstance(error, str)
    return error.keys() == ({"message", "type"} if path.startswith("/v1/messages")
                            else {"message", "type", "param", "code"})

def test_whatever_the_schema_allows(server):
    "schemathesis makes requests out of /openapi.json: none is an error of ours, and nothing is left of them"
    schemathesis = pytest.importorskip("schemathesis", reason="not installed: pip install schemathesis")
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json", timeout=60)
    operations = [o.ok() for o in schema.get_all_operations()]
    seen = {o.path for o in operations}
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/v1/models/{name}"} <= seen
    cases = st.one_of([o.as_strategy() for o in operations if o.path not in ELSEWHERE])
    told = []

    @settings(max_examples=60, deadline=None)
    @given(cases)
    def ask(case):
        r = case.call(timeout=60)
        told.append(r.status_code)
        assert r.status_code < 500, (case.method, case.path, case.body, r.text)
        if r.status_code >= 400: assert is_error(case.path, r.json()["error"])

    ask()
    assert len(told) >= 40 and {200, 400} <= {*told}
    until(lambda: idle(server))


def test_as_offline(server):
    """Text, tokens, reason and usage over HTTP are those of `LLM`, hot or greedy, many at once, whole or in
    pieces"""
    wishes = [SamplingParams(temperature=t, seed=i, max_tokens=5 + 9*i, stop=["e t"]*(i % 2))
              for i, t in enumerate((0, 1., 1., 1.5))]
    prompts = ["The page", "What is a row?", "A tree of pages", "Hello"]
    with LLM(num_pages=512, max_running_req=16, max_seq_len=256, device="cpu") as llm:
        want = llm.generate(prompts, wishes)
    names = ("temperature", "seed", "max_tokens", "stop")
    for stream in (False, True):
        for prompt, p, o in zip(prompts, wishes, want):
            body = dict(text=prompt, sampling_params={k: getattr(p, k) for k in names})
            if not stream: told = [post(server, "/generate", **body).json()]
            else:
                r = web.post(server.url + "/generate", json=body | dict(stream=True))
                told = [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: {")]
            assert told[-1]["text"] == o.text
            assert told[-1]["output_ids"] == o.token_ids
            assert told[-1]["meta_info"]["finish_reason"]["type"] == o.finish_reason
            assert all(t["meta_info"]["completion_tokens"] == len(t["output_ids"])
                       and t["meta_info"]["prompt_tokens"] == o.prompt_tokens for t in told)


# -- tools ---------------------------------------------------------------------------------------

TOOLS = [dict(type="function", function=dict(name=name,
    parameters=dict(type="object", properties=dict(city=dict(type="string")), required=["city"])))
         for name in ("get_time", "get_weather")]

def say_whole(client, **ask): return client.chat.completions.create(**ask).choices[0].message

def say_streamed(client, **ask):
    "The same, made of its pieces"
    pieces = [c.choices[0].delta for c in client.chat.completions.create(stream=True, **ask) if c.choices]
    calls = [c for p in pieces for c in p.tool_calls or []]
    message = dict(role="assistant", content="".join(p.content or "" for p in pieces))
    if calls:
        assert (calls[0].function.name and calls[0].id and not calls[0].function.arguments
                and len(calls) > 1), "the name first, then arguments"
        message["tool_calls"] = [dict(id=calls[0].id, type="function",
                                      function=dict(name=calls[0].function.name,
                                          arguments="".join(c.function.arguments or "" for c in calls)))]
    return openai.types.chat.ChatCompletionMessage(**message)

@pytest.mark.parametrize("say", [say_whole, say_streamed])
@pytest.mark.parametrize("strict", [False, True])
def test_an_agent(server, say, strict):
    "The model in the package calls a function, is told the result, and answers"
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    tools = [dict(o, function=dict(o["function"], strict=strict)) for o in TOOLS]
    ask, dialog = (dict(model=server.model, tools=tools, temperature=0),
                   [dict(role="user", content="What time is it in Oslo?")])
    called = say(client, messages=dialog, **ask)
    [call] = called.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"city": "Oslo"})
    dialog += [called.model_dump(exclude_none=True), dict(role="tool", tool_call_id=call.id, content="14:30")]
    answer = say(client, messages=dialog, **ask)
    assert answer.content == "It is 14:30 in Oslo." and not answer.tool_calls


# -- other protocols -----------------------------------------------------------------------------

GET_TIME = dict(type="object", properties=dict(city=dict(type="string")), required=["city"],
                additionalProperties=False)
CHOICE = dict(type="object", properties=dict(city=dict(enum=["Oslo", "Rome"])), required=["city"],
              additionalProperties=False)
TIME = "What time is it in Oslo?"

@pytest.fixture(scope="module")
def responses(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0).responses

@pytest.fixture(scope="module")
def messages(server): return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).messages

def test_responses(server, responses):
    "Whole and streamed the same; a tool, its result, and what was said before, by name; a schema; a limit"
    ask = dict(model=server.model, temperature=0, max_output_tokens=40)
    whole = responses.create(**ask, input="Count from 3 to 5", metadata={"a": "b"})
    assert ((whole.output_text, whole.status, whole.metadata,
             whole.usage.output_tokens_details.reasoning_tokens) == ("3, 4, 5", "completed", {"a": "b"}, 0))
    with responses.stream(**ask, input="Count from 3 to 5") as stream: events = [*stream]
    final = stream.get_final_response()
    assert final.output_text == whole.output_text and final.usage.output_tokens == whole.usage.output_tokens
    assert ([e.sequence_number for e in events] == [*range(len(events))]
            and events[-1].type == "response.completed")
    tools = [dict(type="function", name="get_time", parameters=GET_TIME, strict=True)]
    called = responses.create(**ask, input=TIME, tools=tools)
    assert ([(o.type, o.name, json.loads(o.arguments)) for o in called.output]
            == [("function_call", "get_time", {"city": "Oslo"})])
    result = dict(type="function_call_output", call_id=called.output[0].call_id, output="14:30")
    by_name = responses.create(**ask, previous_response_id=called.id, input=[result], tools=tools)
    sent = responses.create(**ask, input=[dict(role="user", content=TIME), *called.output, result],
                            tools=tools, store=False)
    reference = dict(type="item_reference", id=called.output[0].id)
    referred = responses.create(**ask, input=[dict(role="user", content=TIME), reference, result],
                                tools=tools)
    assert {o.output_text for o in (by_name, sent, referred)} == {"It is 14:30 in Oslo."}
    assert by_name.usage.input_tokens == sent.usage.input_tokens == referred.usage.input_tokens
    form = dict(format=dict(type="json_schema", name="choice", schema=CHOICE))
    assert (json.loads(responses.create(**ask, input="Oslo or Rome?", text=form).output_text)["city"]
            in ("Oslo", "Rome"))
    cut = responses.create(**ask | dict(max_output_tokens=2), input="Count from 3 to 5")
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == ("incomplete",
        "max_output_tokens", "incomplete")
    assert responses.retrieve(whole.id).output_text == whole.output_text
    responses.delete(whole.id)
    for gone in (whole.id, sent.id):
        with pytest.raises(openai.NotFoundError, match="there is no response"): responses.retrieve(gone)

def test_responses_refuses(server, responses):
    "Each with the field that is to change"
    for body, param in [(dict(tools=[dict(type="web_search")]), "tools[0].type"),
                        (dict(input=[dict(type="compaction", id="x")]), "input[0].type"),
                        (dict(previous_response_id="resp_x"), "previous_response_id"),
                        (dict(background=True), "background"), (dict(max_output_tokens=0),
                            "max_output_tokens"), (dict(max_output_tokens=999), "max_output_tokens"),
                        (dict(extra_body=dict(temprature=1)), "temprature"), (dict(input="x"*5000), "input"),
                        (dict(input=[dict(role="user", content=[dict(type="input_image", image_url="x")])]),
                         "input[0].content[0].type")]:
        with pytest.raises(openai.APIStatusError) as e:
            responses.create(**dict(model=server.model, input="Hi") | body)
        assert (e.value.status_code == (404 if param == "previous_response_id" else 400)
                and e.value.body["param"] == param)

def test_messages(server, messages):
    """Whole and streamed the same; a tool and its result; a stop sequence; a schema; more tokens than there
    is room for"""
    # which the package has no argument for
    ask = dict(model=server.model, max_tokens=40, extra_body=dict(temperature=0))
    def user(text): return [dict(role="user", content=text)]
    whole = messages.create(**ask, messages=user("Count from 3 to 5"))
    assert ([o.text for o in whole.content], whole.stop_reason) == (["3, 4, 5"], "end_turn")
    with messages.stream(**ask, messages=user("Count from 3 to 5")) as stream:
        final = stream.get_final_message()
    assert ((final.content[0].text, final.usage.output_tokens,
             final.usage.input_tokens + final.usage.cache_read_input_tokens) == (
        "3, 4, 5", whole.usage.output_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens))
    assert (messages.count_tokens(model=server.model, messages=user("Count from 3 to 5")).input_tokens
            == whole.usage.input_tokens + whole.usage.cache_read_input_tokens)
    assert messages.create(**ask,
                           system=[dict(type="text", text="Count.", cache_control=dict(type="ephemeral"))],
                           messages=user("Hi"))._request_id
    tools = [dict(name="get_time", description="The time in a city", input_schema=GET_TIME)]
    called = messages.create(**ask, messages=user(TIME), tools=tools)
    assert ((called.stop_reason, called.content[-1].name, called.content[-1].input)
            == ("tool_use", "get_time", {"city": "Oslo"}))
    with messages.stream(**ask, messages=user(TIME), tools=tools) as stream:
        assert stream.get_final_message().content[-1].input == {"city": "Oslo"}
    result = dict(type="tool_result", tool_use_id=called.content[-1].id,
                  content=[dict(type="text", text="14:30")])
    dialog = [*user(TIME), dict(role="assistant", content=called.content), *user([result])]
    assert messages.create(**ask, messages=dialog, tools=tools).content[0].text == "It is 14:30 in Oslo."
    forced = messages.create(**ask, messages=user("Hi"), tools=tools, tool_choice=dict(type="any"))
    assert forced.content[-1].name == "get_time"
    stopped = messages.create(**ask, messages=user("Count from 3 to 5"), stop_sequences=["4"])
    assert ((stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text)
            == ("stop_sequence", "4", "3, "))
    roomy = messages.create(**ask | dict(max_tokens=20_000), messages=user("Count from 3 to 5"))
    assert (roomy.content[0].text, roomy.stop_reason) == ("3, 4, 5", "end_turn")
    assert (messages.create(**ask | dict(max_tokens=2), messages=user("Count from 3 to 5")).stop_reason
            == "max_tokens")
    full = messages.create(**ask | dict(max_tokens=20_000, extra_body=dict(temperature=0, ignore_eos=True)),
                           messages=user("Count from 3 to 5"))
    assert full.stop_reason == "model_context_window_exceeded"

def test_messages_refuses(server, messages):
    "In the shape that its clients read"
    for body, words in [(dict(max_tokens=0), "max_tokens must be"), (dict(messages=[]), "messages must"),
                        (dict(tools=[dict(type="bash_20250124", name="bash")]),
                         "tools[0].type must be 'function'"),
                        (dict(messages=[dict(role="user", content=[dict(type="image", source={})])]),
                         "messages[0].content[0].type must be"),
                        (dict(extra_body=dict(temprature=1)), "temprature")]:
        with pytest.raises(anthropic.BadRequestError) as e:
            messages.create(**dict(model=server.model, max_tokens=9,
                                   messages=[dict(role="user", content="Hi")]) | body)
        assert e.value.type == "invalid_request_error" and words in e.value.api_message and e.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        messages.create(model="other", max_tokens=9, messages=[dict(role="user", content="Hi")])

def test_ollama(server):
    "Lines of JSON; whole on demand; the model by its tag; errors in one field"
    ask = dict(model=server.model + ":latest", messages=[dict(role="user", content="Count from 3 to 5")],
               options=dict(temperature=0, num_ctx=4096))
    lines = [json.loads(line) for line in web.post(server.url + "/api/chat", json=ask).text.splitlines()]
    whole = post(server, "/api/chat", **ask, stream=False).json()
    assert "".join(o["message"]["content"] for o in lines) == whole["message"]["content"] == "3, 4, 5"
    assert (lines[-1]["done_reason"] == whole["done_reason"] == "stop"
            and lines[-1]["eval_count"] == whole["eval_count"])
    assert (post(server, "/api/generate", prompt="Count from 3 to 5", options=dict(temperature=0),
                 stream=False).json()["response"] == "3, 4, 5")
    tools = [dict(type="function", function=dict(name="get_time", parameters=GET_TIME))]
    called = post(server, "/api/chat", **ask | dict(messages=[dict(role="user", content=TIME)]), tools=tools,
                  stream=False).json()["message"]
    assert called["tool_calls"][0]["function"] == {"name": "get_time", "arguments": {"city": "Oslo"}}
    dialog = [dict(role="user", content=TIME), called,
              dict(role="tool", tool_name="get_time", content="14:30")]
    assert (post(server, "/api/chat", **ask | dict(messages=dialog), tools=tools,
                 stream=False).json()["message"]["content"] == "It is 14:30 in Oslo.")
    chosen = post(server, "/api/chat", **ask | dict(messages=[dict(role="user", content="Oslo or Rome?")]),
                  format=CHOICE, stream=False).json()
    assert json.loads(chosen["message"]["content"])["city"] in ("Oslo", "Rome")
    assert ([web.get(server.url + path).status_code for path in ("/api/tags", "/api/ps", "/api/version")]
            == [200]*3)
    assert "tools" in post(server, "/api/show", model=server.model).json()["capabilities"]
    shown = post(server, "/api/show", model=server.model).json()
    assert ({"completion", "thinking"} <= {*shown["capabilities"]} and "messages" in shown["template"]
            and shown["model_info"]["general.parameter_count"] > 1e5)
    assert (shown["details"]["family"] and shown["details"]["parameter_size"]
            and web.get(server.url + "/api/tags").json()["models"][0]["size"] > 1e5)
    assert len(post(server, "/api/embeddings", model=server.model, prompt="hi").json()["embedding"]) > 8
    as_curl = web.post(server.url + "/api/generate",
                       content=json.dumps(dict(prompt="hi", stream=False, options=dict(num_predict=2))),
                       headers={"content-type": "application/x-www-form-urlencoded"})
    assert as_curl.status_code == 200 and as_curl.json()["done"]
    calls = [dict(function=dict(name="get_time", arguments={})),
             dict(function=dict(name="get_day", arguments={}))]
    without_ids = [dict(role="user", content="When?"), dict(role="assistant", content="", tool_calls=calls),
        dict(role="tool", tool_name="get_day", content="Monday"), dict(role="tool", content="noon")]
    assert (post(server, "/api/chat", model=server.model, messages=without_ids, stream=False,
                 options=dict(num_predict=2)).status_code == 200)
    for path, body, status in [("/api/chat", dict(model="other", messages=dialog), 404),
                               ("/api/show", dict(model="other"), 404),
                               ("/api/generate", dict(prompt="x", images=["x"]), 400),
                               ("/api/nothing", {}, 404)]:
        r = post(server, path, **body)
        assert r.status_code == status and is_error(path, r.json()["error"])
