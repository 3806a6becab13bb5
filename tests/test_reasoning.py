"""Thinking models over HTTP and in Python: four families of marks, streams and whole answers, budgets, and
rules that begin behind the thinking."""
import asyncio, itertools, json, re

import httpx
import jsonschema
import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minisgl_lit import LLM, SamplingParams
from minisgl_lit.core.outputs import EngineCoreOutput
from minisgl_lit.core.request import FinishReason
from minisgl_lit.server.api_server import create_app
from minisgl_lit.text.tokenizer import Tokenizer
from test_contract import running

TURNS = ("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content "
         "}}<|end|>{% endfor %}{% if add_generation_prompt %}")
CUT = "{% set last = messages[-1].content.split('</think>')[-1] %}"
FAMILIES = dict(   # template; whether the marks are special tokens
    qwen=(CUT + TURNS + "<|assistant|>{% if enable_thinking is defined and not enable_thinking "
                        "%}<think>\n\n</think>\n\n{% endif %}{% endif %}", False),
    deepseek=(CUT + TURNS + "<|assistant|><think>\n{% endif %}", False),
    gpt=("{# <|channel|>analysis<|message|> #}" + TURNS
         + "<|start|>assistant{% endif %}{{ reasoning_effort }}", True),
    cohere=("{# <|START_THINKING|> #}" + TURNS + "<|assistant|>{% if enable_thinking is defined and not "
            "enable_thinking %}<|START_THINKING|><|END_THINKING|>{% endif %}{% endif %}", True))
SAID = dict(
    qwen="<think>\nTwo and two. 🤔\n</think>\n\nFour 👋.", deepseek="Two and two. 🤔\n</think>\n\nFour 👋.",
    gpt="<|channel|>analysis<|message|>Two and two. "
        "🤔<|end|><|start|>assistant<|channel|>final<|message|>Four 👋.",
    cohere="<|START_THINKING|>Two and two. 🤔<|END_THINKING|><|START_RESPONSE|>Four 👋.<|END_RESPONSE|>")
MARKS = ["<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|user|>",
         "<|assistant|>", "<|return|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>",
         "<|END_RESPONSE|>"]
# line feeds beside the marks; that of deepseek's prompt is not its own
N_THOUGHT = dict(qwen=2, deepseek=1, gpt=0, cohere=0)


class Says:
    "An engine that says one text, in tokens of a byte each but for the marks"
    model, alive, trouble = "says", True, ""
    def __init__(self, tokenizer): self.tokenizer, self.say, self.prompts, self.params = tokenizer, "", [], []
    async def stream(self, requests):
        self.prompts = [self.tokenizer.decode(r.input_ids.tolist(), False) for r in requests]
        self.params = [r.params for r in requests]
        for r in requests:
            for i in self.tokenizer.encode(self.say, False).tolist():
                await asyncio.sleep(0)
                yield EngineCoreOutput(r.rid, [i])
            yield EngineCoreOutput(r.rid, [], FinishReason.STOP, None, None, len(r.input_ids), 0,
                                   (.1, .2, .3))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    "Its name, engine and URL"
    name, (template, special) = request.param, FAMILIES[request.param]
    tok = tokenizers.Tokenizer(models.BPE({c: i
        for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.add_tokens([tokenizers.AddedToken(o, special=special or o[1] == "|", normalized=False)
                    for o in MARKS])
    folder = tmp_path_factory.mktemp(name)
    tok.save(str(folder/"tokenizer.json"))
    (folder/"tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    engine = Says(tokenizer := Tokenizer(folder))
    engine.say = SAID[name]
    url, end = running(create_app(engine, tokenizer,
                                  {"max_seq_len": 4096, "model": "/x/says", "vocab_size": 300}))
    yield name, engine, url
    end()

ASK = dict(model="says", messages=[{"role": "user", "content": "2 + 2"}])
def post(url, path, **body): return httpx.post(url + path, json=body, timeout=30)
def chat(url, **body): return post(url, "/v1/chat/completions", **ASK | body).json()
def streamed(url, path, **body):
    return [json.loads(o[6:]) for o in post(url, path, **body, stream=True).text.split("\n\n")
            if o.startswith("data: {")]


def test_stream_and_whole_agree(family):
    name, engine, url = family
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(**ASK)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two. 🤔", "Four 👋.")
    assert (whole.usage.completion_tokens_details.reasoning_tokens
            == len("Two and two. 🤔".encode()) + N_THOUGHT[name])
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks[:-1]]
    assert "".join(getattr(o, "reasoning_content", None) or "" for o in deltas) == "Two and two. 🤔"
    assert "".join(o.content or "" for o in deltas) == "Four 👋." and chunks[-1].usage == whole.usage
    kinds = [hasattr(o, "reasoning_content") for o in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True) and len(kinds) > 10   # piece by piece, and all thinking first

def test_calls_behind_thinking(family):
    name, engine, url = family
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    engine.say = SAID[name].replace("Four 👋.",
                                    '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    try:
        choice = chat(url, tools=[tool])["choices"][0]
        assert (choice["message"]["reasoning_content"] == "Two and two. 🤔"
                and choice["finish_reason"] == "tool_calls")
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    finally: engine.say = SAID[name]

def test_not_separated(family):
    name, engine, url = family
    message = chat(url, separate_reasoning=False)["choices"][0]["message"]
    assert ("reasoning_content" not in message and message["content"].endswith("Four 👋.")
            and "Two and two" in message["content"])
    if name in ("qwen", "deepseek"): assert message["content"] == SAID[name]   # no special tokens

def test_generate_tells_thinking_only_if_asked(family):
    "The prompt is plain text, so DeepSeek's must have opened the thinking, as its template does"
    name, engine, url = family
    prompt = "<|user|>2 + 2<|end|><|assistant|>" + "<think>\n" * (name == "deepseek")
    plain, told = (post(url, "/generate", text=prompt, separate_reasoning=o).json() for o in (None, True))
    assert "reasoning_text" not in plain and "Two and two" in plain["text"]
    assert ((told["reasoning_text"], told["text"]) == ("Two and two. 🤔", "Four 👋.")
            and told["meta_info"]["reasoning_tokens"] > 10)
    events = streamed(url, "/generate", text=prompt, separate_reasoning=True)
    assert (events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
            and any("reasoning_text" in o for o in events))

def test_what_reaches_the_template(family):
    name, engine, url = family
    chat(url, chat_template_kwargs={"enable_thinking": False})
    assert engine.prompts[0].endswith({"qwen": "</think>\n\n", "deepseek": "<think>\n",
                                       "gpt": "assistant", "cohere": "<|END_THINKING|>"}[name])
    assert engine.params[0].separate_reasoning is True
    wrong = post(url, "/v1/chat/completions", **ASK, chat_template_kwargs={"enable_thinkin": True})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "chat_template_kwargs"
    effort = post(url, "/v1/chat/completions", **ASK, reasoning_effort="high")
    if name == "deepseek":
        assert effort.status_code == 400 and "has no switch" in effort.json()["error"]["message"]
    else: assert engine.prompts[0].endswith("assistanthigh" if name == "gpt" else "<|assistant|>")

def test_an_answer_has_marks_of_its_own_even_if_thinking_is_off(family):
    name, engine, url = family
    if name != "cohere": return
    engine.say = SAID[name].partition("<|END_THINKING|>")[2]
    try:
        for off in ({"enable_thinking": False}, {}):
            message = chat(url, chat_template_kwargs=off)["choices"][0]["message"]
            assert message["content"] == "Four 👋." and "reasoning_content" not in message
    finally: engine.say = SAID[name]

def test_continued_messages(family):
    name, engine, url = family
    begun = [*ASK["messages"], {"role": "assistant", "content": "Two and"}]
    chat(url, messages=begun, continue_final_message=True)
    assert engine.prompts[0].rstrip("high").endswith("<|assistant|>Two and") or name == "gpt"
    chat(url, messages=begun, add_generation_prompt=False)
    assert engine.prompts[0].endswith("Two and<|end|>") or name == "gpt"
    both = post(url, "/v1/chat/completions", **ASK | dict(messages=begun), continue_final_message=True,
                add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


# -- the model that ships with the package thinks before sums ---------------------------------------

def ask(a, b): return [{"role": "user", "content": f"What is {a} plus {b}?"}]
SUMS = [ask(a, b) for a, b in ((17, 25), (30, 4), (21, 19), (8, 33), (12, 12), (40, 9))]
SCHEMA = json.dumps({"type": "object",
                     "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
                     "required": ["sum"], "additionalProperties": False})
TASKS = [SamplingParams(temperature=0), SamplingParams(temperature=0, json_schema=SCHEMA),
         SamplingParams(temperature=0, max_thinking_tokens=7),
         SamplingParams(temperature=1.2, seed=4, regex="[0-9]{2}", max_thinking_tokens=9),
         SamplingParams(temperature=0, stop="2"), SamplingParams(temperature=0, max_thinking_tokens=0)]

def think(llm): return llm.chat(SUMS, TASKS, reasoning_effort="low")

@pytest.fixture(scope="module")
def thoughts():
    with LLM(device="cpu", num_pages=256, max_seq_len=256) as llm: yield think(llm)

def test_what_is_asked_begins_behind_the_thinking(thoughts):
    plain, schema, budget, regex_, stop, none = thoughts
    assert plain.text == "42" and plain.reasoning.endswith("= 42.")
    jsonschema.validate(json.loads(schema.text), json.loads(SCHEMA))
    assert schema.reasoning and "{" not in schema.reasoning
    assert re.fullmatch("[0-9]{2}", regex_.text)
    assert "2" in stop.reasoning or "1" in stop.reasoning
    assert "2" not in stop.text and stop.finish_reason == "stop"

def test_budgets_are_exact(thoughts):
    _, _, budget, regex_, _, none = thoughts
    assert ((budget.reasoning_tokens, none.reasoning_tokens, none.reasoning) == (7, 0, "")
            and regex_.reasoning_tokens <= 9)
    # 4 is `</think>`
    assert budget.token_ids[7] == 4 and none.token_ids[0] == 4 and budget.text and none.text

def retract_now_and_then(llm):
    "Every fifth step finds all requests in the queue again"
    scheduler, step, n = llm.runtime.scheduler, llm.runtime.scheduler.step, itertools.count(1)
    def interrupted():
        if next(n) % 5 == 0:
            scheduler.pause("retract")
            scheduler.resume()
        return step()
    scheduler.step = interrupted

@pytest.mark.parametrize("how", [dict(overlap=True, max_running_req=4), dict(overlap=True, page_size=1),
                                 dict(chunked_prefill_size=7, max_prefill_tokens=9,
    cuda_graph_max_bs=0)], ids=["overlap", "retraction", "chunks"])
def test_thinking_is_the_same_however_it_is_scheduled(thoughts, how):
    with LLM(device="cpu", num_pages=256, max_seq_len=256, **how) as llm:
        if "page_size" in how: retract_now_and_then(llm)
        assert [(o.reasoning, o.text, o.token_ids) for o in think(llm)] == [(o.reasoning, o.text, o.token_ids)
            for o in thoughts]
        assert (llm.stats()["retracted"] > 0) == ("page_size" in how)

@pytest.mark.long
def test_with_two_ranks(thoughts):
    with LLM(device="cpu", num_pages=256, max_seq_len=256, tp=2) as llm:
        assert [(o.reasoning, o.text) for o in think(llm)] == [(o.reasoning, o.text) for o in thoughts]

def test_a_setting_overrides_the_template():
    with LLM(device="cpu", num_pages=64, max_seq_len=256, reasoning_parser="none") as llm:
        whole = llm.chat(SUMS[0], TASKS[0], reasoning_effort="low")
        assert (whole.text.startswith("10 + 20") and whole.text.endswith("</think>\n\n42")
                and not whole.reasoning)
        with pytest.raises(ValueError, match="max_thinking_tokens needs a model that thinks"):
            llm.chat(SUMS[0], TASKS[2])
