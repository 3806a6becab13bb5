"""Calls that come back in a history: whatever we answer is accepted again, in every format and on every
route, and so is what others, or a limit, have made of arguments."""
import json

import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit.core.request import FinishReason
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.server.messages_protocol import MessagesRequest, MessagesWriter
from minisgl_lit.server.ollama_protocol import OllamaChatRequest, OllamaChatWriter
from minisgl_lit.server.openai_protocol import ChatRequest, ChatWriter
from minisgl_lit.server.responses_protocol import ResponsesRequest, ResponsesWriter, messages_of
from minisgl_lit.text.json_object import parse_json
from minisgl_lit.text.tokenizer import RequestOutput, Tokenizer
from minisgl_lit.text.tool_formats import tool_formats, markers
from test_serve import web

TEMPLATE = Tokenizer(embedded_path()).tool_template
HI = [dict(role="user", content="Hi")]
TOOLS = {"time": dict(properties=dict(days=dict(type="array"))), "weather": {}}

def chat(answer):
    said = answer["choices"][0]["message"]
    calls = said.get("tool_calls") or []
    results = [dict(role="tool", tool_call_id=o["id"], content="5") for o in calls]
    return ChatRequest, dict(messages=[*HI, said, *results, *HI]), [o["function"]["arguments"] for o in calls]

def responses(answer):
    calls = [o for o in answer["output"] if o["type"] == "function_call"]
    results = [dict(type="function_call_output", call_id=o["call_id"], output="5") for o in calls]
    return (ResponsesRequest, dict(input=[*HI, *answer["output"], *results, *HI]),
            [o["arguments"] for o in calls])

def blocks(answer):
    calls = [o for o in answer["content"] if o["type"] == "tool_use"]
    results = [dict(type="tool_result", tool_use_id=o["id"], content="5") for o in calls]
    talk = [*HI, dict(role="assistant", content=answer["content"]),
            dict(role="user", content=[*results, dict(type="text", text="Hi")])]
    return MessagesRequest, dict(messages=talk, max_tokens=5), [json.dumps(o["input"]) for o in calls]

def ollama(answer):
    calls = answer["message"].get("tool_calls") or []
    results = [dict(role="tool", tool_name=o["function"]["name"], content="5") for o in calls]
    return (OllamaChatRequest, dict(messages=[*HI, answer["message"], *results, *HI]),
            [json.dumps(o["function"]["arguments"]) for o in calls])

ROUTES = {ChatWriter: chat, ResponsesWriter: responses, MessagesWriter: blocks, OllamaChatWriter: ollama}

def render(kind, body):
    "The prompt of a body, checked as the server checks it"
    asked = kind.model_validate(json.loads(json.dumps(body)))   # over the wire
    asked.check_fields()
    request = (asked if kind is ChatRequest else asked.chat(messages_of(asked.input))
               if kind is ResponsesRequest else asked.chat())
    return TEMPLATE.render(request.dialog()[0])

def sent_back(form, text, reason, thought):
    "An answer of each route, sent back to it"
    for writer, history in ROUTES.items():
        output = RequestOutput(text, [1], reason, reasoning=thought)
        answer = writer("id", "tiny", 0, tools=TOOLS, tool_formats=(form,),
                        hidden=markers((form,))).whole([output])
        kind, body, arguments = history(answer)
        for one in arguments: assert isinstance(parse_json(one), dict), one
        assert render(kind, body).count("Hi") >= 2

WORDS = {name: [o for call in form.calls for o in call.replace("NAME", "time").split("ARGUMENTS")]
         for name, form in tool_formats.items()}
COMMON = ['{"at": 5}', '{"at": "no', "{}", "null", r'"{\"at\": 5}"', r'{"a": "\ud83d', '"', "}", "\n", "so",
          "<parameter=at>\n", "<parameter=days>\n[1", "\n</parameter>\n", 'at="no', "at=[1, ", ")"]

def answers(name):
    words = st.lists(st.sampled_from([*WORDS[name], *COMMON]), max_size=7).map("".join)
    call = st.tuples(st.sampled_from(tool_formats[name].calls),
                     st.lists(st.sampled_from(COMMON), max_size=3).map("".join)).map(
                         lambda o: o[0].replace("NAME", "time").replace("ARGUMENTS", o[1]))
    return st.tuples(st.just(tool_formats[name]), st.tuples(call, words).map("".join) | words,
                     st.integers(0, 300)).map(lambda o: (o[0], o[1][:300 - o[2]] if o[2] % 2 else o[1]))

@pytest.mark.parametrize("n", [60, pytest.param(4000, marks=pytest.mark.long)])
def test_any_answer_of_ours_is_a_history(n):
    @settings(max_examples=n, deadline=None)
    @given(st.sampled_from([*tool_formats]).flatmap(answers),
           st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.sampled_from(["", "Well"]))
    def check(answer, reason, thought): sent_back(*answer, reason, thought)
    check()

@pytest.mark.parametrize("name", tool_formats)
def test_a_call_cut_anywhere_is_a_history(name):
    form = tool_formats[name]
    days = "<parameter=at>\nnoon\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
    inside = {"pythonic": 'at="noon", to=[1, 2])', "qwen3_coder": days}.get(
        name, '{"at": "noon", "days": [1, 2]}')
    text = form.before + form.calls[0].replace("NAME", "time").replace("ARGUMENTS", inside)
    for end in range(0, len(text) + 1, 3): sent_back(form, text[:end], FinishReason.LENGTH, "")

HALF = "\ud83d"
ARGUMENTS = ["", " ", "null", '{"contents": "half of', "5", '"so"', "[1]", r'{"a": "\ud83d"}',
             f'{{"a": "{HALF}"}}', r'"{\"a\": 5}"', "{" * 3000, '{"a":' * 3000, None, {}, {"a": HALF}, 5, [1]]

def bodies(given, leave_out):
    "A body for each route, with these arguments in its history, or without any"
    fields = {} if leave_out else dict(arguments=given)
    result, after = dict(role="tool", content="5"), dict(max_tokens=1)
    return {"/v1/chat/completions": dict(messages=[*HI,
        dict(role="assistant", content=None,
             tool_calls=[dict(id="c1", type="function", function=dict(name="f", **fields))]),
        result | dict(tool_call_id="c1")], **after),
            "/v1/responses": dict(input=[*HI, dict(type="function_call", call_id="c1", name="f", **fields),
                dict(type="function_call_output", call_id="c1", output="5")], max_output_tokens=1),
            "/v1/messages": dict(messages=[*HI,
                                           dict(role="assistant",
                                                content=[dict(type="tool_use", id="c1", name="f",
                                                    **({} if leave_out else dict(input=given)))]),
                                           dict(role="user", content=[dict(type="tool_result",
                                               tool_use_id="c1", content="5")])], **after),
            "/api/chat": dict(messages=[*HI,
                                        dict(role="assistant", content="",
                                             tool_calls=[dict(function=dict(name="f", **fields))]), result],
                              options=dict(num_predict=1), stream=False)}

@pytest.fixture(scope="module")
def server(small_server): return small_server

@pytest.mark.parametrize("path", bodies({}, False))
def test_arguments_as_others_leave_them(server, path):
    "Those that are too long for this small model are refused for that alone"
    for said, leave_out in [*((o, False) for o in ARGUMENTS), (None, True)]:
        sent = web.post(server.url + path, content=json.dumps(bodies(said, leave_out)[path]),
                        headers={"content-type": "application/json"})
        if len(str(said)) > 1000: assert sent.status_code == 400 and "tokens" in sent.text, sent.text[:300]
        else: assert sent.status_code == 200, (said, sent.text[:300])
