"""Families of models by their chat templates, reduced here to what they write of calls: the template is taken
for its own family and for no other, and the calls that it writes are found in every cut."""
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

import test_contract, test_reasoning
from minisgl_lit.core.request import PendingReq
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.text.chat_template import ChatTemplate
from minisgl_lit.text.grammar import GrammarCompiler
from minisgl_lit.text.reasoning import (
    ReasoningDelta, ReasoningParser, find_format, place_of, reasoning_formats)
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.text.tokenizer import Tokenizer
from minisgl_lit.text.tool_calls import ToolCall, ToolParser, join_calls
from minisgl_lit.text.tool_formats import PythonReader, XmlReader, choose_formats, tool_formats
from minisgl_lit.text.tool_grammar import call_grammar
from test_tool_formats import SIZES, cut

JSON = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
COMMA = "{{ ', ' if not loop.last }}"
ITEMS = "{% for k, v in c.arguments.items() %}"
PYTHON = f"{{{{ c.name }}}}({ITEMS}{{{{ k }}}}={{{{ v | tojson }}}}{COMMA}{{% endfor %}})"
VALUE = "{{ v if v is string else v | tojson }}"
THINKS = "{# of an earlier answer: content.split('</think>')[-1] #}"

def listed(opens, closes): return opens, JSON + COMMA, closes
def tagged(opens, argument, closes):
    argument = argument.replace("KEY", "{{ k }}").replace("VALUE", VALUE)
    return "", f"{opens}{ITEMS}{argument}{{% endfor %}}{closes}", ""

FAMILIES = {   # what the template says elsewhere; around and of its calls; formats of calls and thinking
    "GLM 4.6": (THINKS, tagged("\n<tool_call>{{ c.name }}\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE"
                               "</arg_value>\n", "</tool_call>"), "glm45", "qwen3"),
    "GLM 4.7": (THINKS, tagged("<tool_call>{{ c.name }}", "<arg_key>KEY</arg_key><arg_value>VALUE"
                               "</arg_value>", "</tool_call>"), "glm45", "qwen3"),
    "Kimi K2": ("<|im_system|>tool_declare<|im_middle|>", ("<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ c.arguments | tojson }}<|tool_call_end|>", "<|tool_calls_section_end|>"), "kimi_k2", None),
    "MiniMax-M2": (THINKS + "\n<response>a result</response>", (
        "<minimax:tool_call>\n", tagged('<invoke name="{{ c.name }}">\n', '<parameter name="KEY">VALUE'
                                        "</parameter>\n", "</invoke>\n")[1], "</minimax:tool_call>"),
        "minimax_m2", "qwen3"),
    "Seed-OSS": ("<seed:think>{{ '' }}</seed:think>", tagged(
        "<seed:tool_call>\n<function={{ c.name }}>\n", "<parameter=KEY>VALUE</parameter>\n",
        "</function>\n</seed:tool_call>"), "seed_oss", "seed_oss"),
    "Qwen3-Coder": ("", tagged("<tool_call>\n<function={{ c.name }}>\n", "<parameter=KEY>\nVALUE\n"
                               "</parameter>\n", "</function>\n</tool_call>"), "qwen3_coder", None),
    "Qwen3": (THINKS, ("", f"<tool_call>\n{JSON}\n</tool_call>\n", ""), "hermes", "qwen3"),
    "Granite 4": ("<|start_of_role|>", ("", f"<tool_call>\n{JSON}\n</tool_call>", ""), "hermes", None),
    "ERNIE 4.5": ("<global_setting>\nthink_mode=True\n</global_setting>{# <response>\n #}",
                  ("", f"<tool_call>\n{JSON}\n</tool_call>\n", ""), "hermes", "ernie45"),
    "SmolLM3": ("Structure it: <think> Thought section </think> Solution section.",
                ("", f"<tool_call>{JSON}</tool_call>", ""), "hermes", "qwen3"),
    "Granite 3.2": ("Write your thoughts after 'Here is my thought process:'", listed("<|tool_call|>[", "]"),
                    "granite", "granite"),
    "Granite 3.3": ("Thoughts between <think></think>, the response between <response></response>.",
                    listed("<|tool_call|>[", "]"), "granite", "granite33"),
    "Hunyuan A13B": ("{# content.split('<answer>') #}<think>\n</think>\n",
                     listed("<tool_calls>[", "]</tool_calls>"), "hunyuan", "hunyuan"),
    "Hunyuan 7B": ("{# content.split('<answer>') #}<think>\n</think>\n", (
        "<tool_calls>", "<tool_call>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```</tool_call>\n",
        "</tool_calls>"), "hunyuan_dense", "hunyuan"),
    "Phi-4-mini": ("<|tool|>[]<|/tool|>", listed("<|tool_call|>[", "]<|/tool_call|>"), "phi4_mini", None),
    "Phi-4-mini, vLLM": ("", listed("functools[", "]"), "phi4_mini", None),
    "Command R7B": ("<|START_THINKING|>{{ '' }}<|END_THINKING|>", ("<|START_ACTION|>[\n", '{"tool_call_id": '
        '"{{ loop.index0 }}", "tool_name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{{ ',\n' if not loop.last }}", "\n]<|END_ACTION|>"), "cohere", "cohere"),
    "Command R": ("", ("Action: ```json\n[\n", '{"tool_name": "{{ c.name }}", "parameters": '
                       "{{ c.arguments | tojson }}}{{ ',\n' if not loop.last }}", "]```"), "command_r", None),
    "LFM2": ("List of tools: <|tool_list_start|>", ("<|tool_call_start|>[", PYTHON + COMMA,
                                                    "]<|tool_call_end|>"), "lfm2", None),
    "LFM2, JSON": ("", listed("<|tool_call_start|>[", "]<|tool_call_end|>"), "lfm2", None),
    "Olmo 3": ("", ("<function_calls>\n", PYTHON + "\n", "</function_calls>"), "olmo3", None),
    "Gemma 3": ("<start_of_turn>[func_name1(params)]", ("[", PYTHON + COMMA, "]"), "gemma3", None),
    "Gemma 3, fenced": ("<start_of_turn>```tool_code", ("```tool_code\n", PYTHON + "\n", "```"),
                        "gemma3", None),
    "Gemma 3, JSON": ('<start_of_turn>"parameters": dictionary', ("```json\n[", JSON + COMMA, "]\n```"),
                      "gemma3", None),
    "Llama 4": ("<|python_start|>", ("[", PYTHON + COMMA, "]"), "pythonic", None),
    "Mistral Nemo": ("", listed("[TOOL_CALLS][", "]"), "mistral", None),
    "Magistral": ("[THINK]{{ '' }}[/THINK]", (
        "", "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}", ""), "mistral_v11", "mistral"),
    "DeepSeek V3.1": (THINKS, ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
        "{{ c.arguments | tojson }}<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"), "deepseek_v31", "qwen3"),
    "GPT-OSS": ("<|channel|>final<|message|>", ("", "<|start|>assistant<|channel|>commentary to=functions."
        "{{ c.name }} <|constrain|>json<|message|>{{ c.arguments | tojson }}<|call|>", ""),
        "gpt_oss", "gpt-oss")}

def source(name):
    said, (before, call, after), _, _ = FAMILIES[name]
    calls = f"{before}{{% for t in m.tool_calls %}}{{% set c = t.function %}}{call}{{% endfor %}}{after}"
    turn = f"{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}"
    talk = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{turn}{{% endfor %}}"
    return f"{{{{ tools | tojson if tools }}}}{said}{talk}"

MADE = [("weather", {"city": "Rome", "days": [1, 2], "hot": True}), ("time", {})]
TYPES = {"city": {"type": "string"}, "days": {"type": "array"}, "hot": {"type": "boolean"}}
SCHEMAS = {"weather": {"properties": TYPES}, "time": {}}

def found(form, pieces, tools=SCHEMAS):
    parser = ToolParser(tools, formats=[form])
    return join_calls([part for o in pieces for part in parser.push(o)] + parser.finish())

@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_a_template_are_found_by_its_format(name):
    "Whole, by the letter, and with text before and behind; those of other tools are text"
    _, _, tools, thinking = FAMILIES[name]
    [form] = choose_formats("auto", source(name))
    assert form.name == tools
    thinks = find_format("auto", source(name), "")
    assert (thinks and reasoning_formats[thinking]) == thinks, thinking
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in MADE]
    offered = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    written = ChatTemplate(source(name), {}).render(talk, offered)
    text = written.rpartition("<|assistant|>")[2]
    marked = not text.startswith("[") or text.startswith("[TOOL")
    for said in ["", "Well. "] if marked else [""]:
        parts = found(form, [said + text])
        assert [(o.name, json.loads(o.arguments)) for o in parts if isinstance(o, ToolCall)] == MADE
        assert [o for o in parts if isinstance(o, str)] == [said.rstrip()] * bool(said)
        assert found(form, said + text) == parts
        assert found(form, said + text + " So.") == [*parts, "So."]
        assert found(form, said + text, ["date"]) == [said + text]

OTHERS = {"contract": (test_contract.TEMPLATE, None, None), "embedded": ("", "hermes", "qwen3"),
          **{o: (template, None, dict(gpt="gpt-oss", cohere="cohere").get(o, "qwen3"))
             for o, (template, _) in test_reasoning.FAMILIES.items()}}

@pytest.mark.parametrize("name", OTHERS)
def test_no_other_template_is_taken_for_one_of_them(name):
    "Those that other tests hold"
    text, tools, thinking = OTHERS[name]
    if name == "embedded": text = Tokenizer(embedded_path()).tool_template.source
    formats = choose_formats("auto", text)
    assert [o.name for o in formats] == ([tools] if tools else [*tool_formats])
    assert find_format("auto", text, "") == (reasoning_formats[thinking] if thinking else None)

def test_the_answer_of_a_template_that_opens_thinking():
    "It need not close it anywhere; then an answer begins in it if its prompt says so, and only then"
    for text, asked, name in (("{{ m }}", "<think>", "qwen3"), (source("ERNIE 4.5"), "<think>\n", "ernie45"),
                              (source("Command R7B"), "<|START_THINKING|>", "cohere")):
        form = find_format("auto", text, asked)
        assert (form.opens, form.unmarked) == (reasoning_formats[name].opens, "answer")
        assert place_of(form, asked) == "thinking" and place_of(form, "") == "answer"


def written(form, calls):
    "Calls as a format has them"
    def arguments(made):
        if issubclass(form.reader, PythonReader): return ", ".join(f"{k}={v!r}" for k, v in made.items())
        if not issubclass(form.reader, XmlReader): return json.dumps(made, ensure_ascii=False)
        return "".join(form.reader.argument.replace("KEY", k).replace(
            "VALUE", v if isinstance(v, str) else json.dumps(v)) for k, v in made.items())
    return form.before + form.between.join(
        form.calls[0].replace("ID", str(i)).replace("NAME", name).replace("ARGUMENTS", arguments(made))
        for i, (name, made) in enumerate(calls)) + form.after

text_values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\r"), max_size=20)
some_arguments = st.fixed_dictionaries({}, optional=dict(
    city=text_values, days=st.lists(st.integers() | text_values, max_size=3), hot=st.booleans()))
some_calls = st.lists(st.tuples(st.sampled_from([*SCHEMAS]), some_arguments), min_size=1, max_size=3)

@settings(deadline=None)
@given(st.sampled_from([*tool_formats.values()]), some_calls, SIZES)
def test_what_a_format_writes_is_read_in_any_pieces(form, calls, sizes):
    tools = {name: {"properties": TYPES} for name in SCHEMAS}
    parts = found(form, cut(written(form, calls), sizes), tools)
    assert [(o.name, json.loads(o.arguments)) for o in parts] == calls


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_line_feeds_at_the_edges_of_a_value_are_its_own(name):
    "But for those that the format has there"
    form = tool_formats[name]
    for city in ("\n", "Rome\n", "\nRome", "\n\nRome\n\n"):
        text = written(form, [("weather", {"city": city})])
        call = ToolCall("weather", json.dumps({"city": city}))
        for pieces in ([text], text): assert found(form, pieces) == [call]

def test_calls_of_cohere_stream_and_may_come_in_another_order():
    form = tool_formats["cohere"]
    parser = ToolParser(SCHEMAS, formats=[form])
    begun = parser.push('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
                        '{"city": "R')
    assert begun[0] == ToolCall("weather", "") and begun[1].text == '{"city": "R'
    for before in ("<|START_ACTION|>[", ""):
        other = before + '{"parameters": {"city": "Rome"}, "tool_name": "weather", "tool_call_id": "0"}'
        last = ', {"tool_name": "time", "tool_call_id": "1"}]<|END_ACTION|>'
        for pieces in ([other + last], other + last):
            assert found(form, pieces) == [ToolCall("weather", '{"city": "Rome"}'), ToolCall("time", "{}")]


@pytest.mark.parametrize("name, text", [
    ("granite", '<tool_call>[{"name": "time", "arguments": {}}]'),
    ("phi4_mini", '<|tool_call|>{"name": "time", "arguments": {}}<|/tool_call|>'),
    ("kimi_k2", "<|tool_call_begin|>time:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("gemma3", '```json\n{"name": "time", "parameters": {}}\n```'),
    ("gemma3", "```tool_code\n[time()]\n```"), ("seed_oss", "<function=time>\n</function>")])
def test_other_forms_of_a_call(name, text):
    "Which models, or other templates of theirs, are known to write"
    for pieces in ([f"Well. {text} So."], f"Well. {text} So."):
        assert found(tool_formats[name], pieces) == ["Well.", ToolCall("time", "{}"), "So."]


BROKEN = {   # a text in the first call has lost its end
    "glm45": "<tool_call>time\n<arg_key>at</arg_key>\n<arg_value>noon\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="time">\n<parameter name="at">noon</invoke>\n'
                  "</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=time>\n<parameter=at>noon</function>\n</seed:tool_call>",
    "hunyuan": '<tool_calls>[{"name": "time", "arguments": {"at": "noon\n</tool_calls>',
    "hunyuan_dense": '<tool_calls><tool_call>time\n```json\n{"at": "noon\n```</tool_call></tool_calls>',
    "phi4_mini": '<|tool_call|>[{"name": "time", "arguments": {"at": "noon\n<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "time", "arguments": {"at": "noon"}]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>"
               '{"at": "noon\n<|tool_call_end|><|tool_calls_section_end|>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "time", "parameters": {"at": "noon\n'
              "<|END_ACTION|>",
    "command_r": 'Action: ```json\n[{"tool_name": "time", "parameters": {"at": "noon"]```'}

@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_takes_no_later_call_with_it(name):
    form, noon = tool_formats[name], ToolCall("time", '{"at": "noon"}')
    for pieces in ([BROKEN[name]], BROKEN[name]):
        assert found(form, pieces) == [noon]
        assert found(form, [*pieces, "\n", written(form, [("time", {"at": "noon"})])]) == [noon, noon]
    half = form.before + form.calls[0].split("ARGUMENTS")[0].replace("NAME", "time")
    for end in range(1, len(half) - 12, 3):   # no call yet
        assert all(isinstance(o, str) for o in found(form, half[:end])) and "".join(found(form, half[:end]))

@pytest.mark.parametrize("name", ["glm45", "kimi_k2", "cohere"])
def test_a_grammar_demands_marks_that_are_tokens(name):
    "And no text can have them in it: it ends with the first"
    pytest.importorskip("llguidance")
    form, tools = tool_formats[name], {"weather": {"properties": TYPES, "required": ["city", "days"]}}
    marks = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
             "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
             "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|START_ACTION|>", "<|END_ACTION|>"]
    words = tokenizers.Tokenizer.from_file(str(embedded_path()/"tokenizer.json"))
    words.add_special_tokens(marks)
    ids = {o: words.token_to_id(o) for o in marks}
    compiler = GrammarCompiler(words, words.get_vocab_size(), (0,))
    def takes(text, must):
        params = SamplingParams(ebnf=call_grammar(form, tools, ids, must))
        grammar = compiler(PendingReq("", np.array([5]), params, max_len=1000))
        mask = np.empty(-(-words.get_vocab_size() // 32), dtype=np.int32)
        for token in [*words.encode(text).ids, 0]:
            grammar.mask(mask)
            if not mask.view(np.uint32)[token // 32] >> token % 32 & 1: return words.decode([token], False)
            grammar.accept(token)
        return True
    call = written(form, [("weather", {"city": "Rome", "days": [5]})])
    twice = written(form, [("weather", {"city": "Rome", "days": [5]})] * 2)
    for text in (call, twice): assert takes(text, True) is True and takes("So: " + text, False) is True
    assert takes("So.", False) is True and takes("So.", True) is not True
    assert takes(call.replace("[5]", "5"), True).strip() == "5"
    mark = next(o for o in marks if o in call)
    assert takes(call.replace("Rome", "Ro" + mark), True) == mark


BITS = {name: st.lists(st.sampled_from(
    [form.opens, form.closes, form.answers, form.ends, form.opens[:-2], form.closes[:3], form.ends[:4], "yes",
     " ", "\n", "<", "Here is"]), max_size=9).map("".join) for name, form in reasoning_formats.items()}

def split(form, place, pieces):
    parser = ReasoningParser(form, place)
    parts = [o for piece in pieces for o in parser.push(piece)] + parser.finish()
    return ("".join(o.text for o in parts if isinstance(o, ReasoningDelta)),
            "".join(o for o in parts if isinstance(o, str)))

@pytest.mark.parametrize("name", ["hunyuan", "ernie45", "granite33", "cohere"])
def test_line_feeds_beside_the_marks_of_an_answer_mean_nothing(name):
    form = reasoning_formats[name]
    text = f"{form.opens}\nSo\n{form.closes}\n{form.answers}\nYes.\n{form.ends}\n"
    for pieces in ([text], text): assert split(form, "start", pieces) == ("So", "Yes.")

@settings(deadline=None)
@given(st.sampled_from([*BITS]).flatmap(lambda o: st.tuples(st.just(o), BITS[o])),
       st.sampled_from(["start", "thinking", "answer"]), SIZES)
def test_thinking_is_the_same_in_any_pieces(said, place, sizes):
    name, text = said
    form = reasoning_formats[name]
    whole = split(form, place, [text])
    assert split(form, place, cut(text, sizes)) == split(form, place, text) == whole
    marks = [o for o in (form.opens, form.closes, form.answers.strip(), form.ends) if o]
    if place == "thinking" or any(o in text for o in marks): return
    assert "".join(whole).strip() == text.strip()
