"""Calls as models write them, well and badly: whatever comes, in whatever pieces, the arguments of a call
that has ended are JSON, and none of the text is lost."""
import ast, json

import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit.text.json_object import JsonReader, as_json, parse_json
from minisgl_lit.text.tool_calls import ToolCall, ToolParser, join_calls
from minisgl_lit.text.tool_formats import tool_formats, PYTHONIC, PythonReader, XmlReader

MANY = 3 * settings.default.max_examples   # 3000 where there is time
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def cut(text, sizes):
    "A text in pieces of these sizes, again and again"
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at:at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    return pieces

def read(*pieces):
    "JSON of arguments, and the text behind them; `None` if they have not ended"
    reader, out = PythonReader({}), ""
    for i, piece in enumerate(pieces, 1):
        more, rest = reader.read(piece)
        out += more
        if rest is not None: return out, rest + "".join(pieces[i:])
    return out, None

def said(*pieces, tools=("time", "weather")):
    parser = ToolParser(tools, formats=[PYTHONIC])
    return join_calls([part for o in pieces for part in parser.push(o)] + parser.finish())


plain = (st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
         | st.text())
literals = st.recursive(plain,
                        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner)
                        | st.lists(inner, min_size=2).map(tuple), max_leaves=9)

def as_lists(value):
    "As JSON has it: no tuples, and keys are texts"
    if isinstance(value, dict): return {str(k): as_lists(v) for k, v in value.items()}
    return [*map(as_lists, value)] if isinstance(value, (list, tuple)) else value

@settings(max_examples=MANY, deadline=None)
@given(st.dictionaries(st.sampled_from(["city", "days", "ö"]), literals), SIZES)
def test_what_python_writes_is_read(arguments, sizes):
    text = ", ".join(f"{k} = {v!r}" for k, v in arguments.items()) + "), so"
    found, rest = read(text)
    assert (json.loads(found), rest) == (as_lists(arguments), ", so")
    assert read(*cut(text, sizes)) == (found, rest)

@pytest.mark.parametrize("value",
                         ["'a' \"b\"", "'a'\n 'b'   'c'", '"""a"""', "'''a \"b\" 'c' '''",
                          '"""\n"a" \'\'b\'\' \\""""', '""""a"""', '""', "''", '""""""', "'' ''",
                          "'\\x41\\u20ac\\U0001F600'", "[1, 2,]", "{'a': {},}", "(1, (2, 3),)",
                          "{5: 'a', 'b': None}", "{'a\\n\"': 1}", "1_000", "-0x1F", ".5", "1.", "-1e-3", "+7",
                          "[ ( ) , [ ] ]", "[\n    1,\n    2,\n]"])
def test_a_value_is_what_python_says(value):
    found, rest = read(f"at={value}, to=5) so")
    assert (json.loads(found), rest) == ({"at": as_lists(ast.literal_eval(f"({value})")), "to": 5}, " so")
    assert read(*f"at={value}, to=5) so") == (found, rest)

@pytest.mark.parametrize("value", [r'"C:\users\x"', r'"\u12"', r"'\xg'", r'"\U0001F60"'])
def test_a_backslash_that_begins_no_escape_stays(value):
    with pytest.raises(SyntaxError): ast.literal_eval(value)
    assert json.loads(read(*f"at={value})")[0]) == {"at": value[1:-1]}

WORDS = ["at=", "to=", ")", "(", "[", "]", "{", "}", ",", ":", "=", '"', "'", '"""', "'''", '"a"', "5", "-",
         "None", "Rome", " ", "\n", "\\", "\\x4", "\\u12", "\\n", '{"k": ', "[1, ", "٣", "\ud800", "#", "*",
         "é", "x" * 40]

@settings(max_examples=2 * MANY, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=20).map("".join) | st.text(), SIZES)
def test_any_arguments_that_end_are_json(text, sizes):
    text = "at=" + text
    found, rest = read(text)
    assert read(*cut(text, sizes)) == read(*text) == (found, rest)
    # the beginning of what they would be
    if rest is None: assert read(text + "'\"" * 3)[0].startswith(found)
    else:
        assert isinstance(json.loads(found), dict) and text.endswith(rest)
        found.encode()

@settings(max_examples=MANY, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "time(", "weather(", "time(at=5)", "<|python_start|>[",
                                 "<|python_end|>"]), max_size=12).map("".join), SIZES)
def test_any_answer_is_read_alike_in_any_pieces(text, sizes):
    whole = said(text)
    assert said(*cut(text, sizes)) == whole
    if not any(isinstance(o, ToolCall) for o in whole): assert "".join(whole) == text
    assert_whole(whole)

def assert_whole(parts):
    "The arguments of each call are an object that every client can read"
    for call in parts:
        if not isinstance(call, ToolCall): continue
        assert isinstance(parse_json(call.arguments), dict), call
        call.arguments.encode()

@pytest.mark.parametrize("text, want",
                         [('at="Ro', {"at": "Ro"}), ('at=["Ro", {"a": [1, ', {"at": ["Ro", {"a": [1]}]}),
                          ("at=", {}), ("at=5, to=1", {"at": 5}), ("at=\"\"\"Ro'", {"at": "Ro'"})])
def test_a_call_that_breaks_off_is_closed(text, want):
    [call] = said("[time(" + text)
    assert json.loads(call.arguments) == want


# -- all formats: what a model may write that no one expects ------------------------------------------

def parsed(text, sizes, form, **options):
    parser = ToolParser(("time", "weather"), formats=form, **options)
    return join_calls([part for o in cut(text, sizes) for part in parser.push(o)] + parser.finish())

SPACES = ["\n" * 150, " " * 99, "\t"]
ODD = [o for form in tool_formats.values() for call in form.calls
       for o in call.replace("NAME", "time").split("ARGUMENTS")]

@settings(max_examples=MANY, deadline=None)
@given(st.lists(st.sampled_from([*ODD, *ODD, *SPACES, *WORDS, "{}", '{"a": 5}', "<parameter=a>",
                                 "</parameter>", "so"]), max_size=9).map("".join), SIZES,
       st.sampled_from([(o,) for o in tool_formats.values()] + [tuple(tool_formats.values())]))
def test_any_text_of_any_format_is_read_alike_in_any_pieces(text, sizes, form):
    whole = parsed(text, [10**9], form)
    assert parsed(text, sizes, form) == parsed(text, [1], form) == whole
    assert_whole(whole)
    if not any(isinstance(o, ToolCall) for o in whole): assert "".join(whole) == text

JSON_FORMS = [(name, call.replace("NAME", "time").replace("]ID[", "]a1["))
              for name, form in tool_formats.items() if form.reader is JsonReader for call in form.calls]

@pytest.mark.parametrize("name, form", JSON_FORMS)
def test_arguments_that_are_a_text_null_or_nothing(name, form):
    "In every form whose arguments are JSON"
    head, tail = form.split("ARGUMENTS")
    def calls(text):
        return [(o.name, json.loads(o.arguments))
                for o in parsed(text, [7], (tool_formats[name],)) if isinstance(o, ToolCall)]
    if not head.endswith("time"):   # where the arguments would follow the name itself
        for given, want in {r'"{\"at\": 5}"': {"at": 5}, "null": {}, '""': {}}.items():
            assert calls(head + given + tail) == [("time", want)], given
    if not head.endswith((": ", "time")): assert calls(head + tail) == [("time", {})]
    assert calls(head + '{"at": "no') == calls(head + '{"at": "no", "da') == [("time", {"at": "no"})]

TWICE = {   # the first call has lost what closes its value
    "hermes": '<tool_call>\n{"name": "time", "arguments": {"at": "noon%s</tool_call>\n<tool_call>\n{"name": '
              '"time", "arguments": {"at": "noon"}}\n</tool_call>',
    "mistral_v11": '[TOOL_CALLS]time[ARGS]{"at": "noon%s[TOOL_CALLS]time[ARGS]{"at": "noon"}',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{"at": '
                   '"noon%s```<｜tool▁call▁end｜>\n'
                   '<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{"at": '
                   '"noon"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{"at": '
                    '"noon%s<｜tool▁call▁end｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>{"at": '
                    '"noon"}<｜tool▁call▁end｜>',
    "gpt_oss": '<|channel|>commentary to=functions.time<|message|>{"at": '
               '"noon%s<|call|><|start|>assistant<|channel|>commentary to=functions.time<|message|>{"at": '
               '"noon"}',
    "qwen3_coder": (
        '<tool_call>\n<function=time>\n<parameter=at>\nnoon%s</function>\n</tool_call>\n'
        '<tool_call>\n<function=time>\n<parameter=at>\nnoon\n</parameter>\n</function>\n</tool_call>')}

@pytest.mark.parametrize("name", TWICE)
def test_an_end_that_is_missing_takes_no_later_call_with_it(name):
    "In each format that has marks: a quote, or only a brace, or the tag of a value"
    for end in ["\n", ""] if name == "qwen3_coder" else ["\n", '"', '"\n', '"]']:
        for size in (1, 10**9):
            assert (parsed(TWICE[name] % end, [size], (tool_formats[name],))
                    == [ToolCall("time", '{"at": "noon"}')] * 2), end

def test_a_model_that_writes_line_feeds_for_ever_costs_nothing(monkeypatch):
    "Each piece is looked at with a hundred characters before it, not with all"
    parser, most = ToolParser(("time",), formats=tuple(tool_formats.values())), 0
    for _ in range(3000):
        parser.push("\n\n" if parser._fresh is False else "a")
        most = max(most, len(parser._held))
    assert most <= 99
    parser = ToolParser(("time",))
    parser.push('<tool_call>{"name": "time", "arguments": {}}</tool_call>,')
    for _ in range(300): parser.push(" ")
    assert len(parser._held) <= 99 + 1

def test_a_long_value_in_xml_is_searched_once():
    reader, searched = XmlReader({"properties": {"a": {"type": "array"}}}), 0
    closes = reader._closes
    class Counted:
        def search(self, text, begin=0, **how):
            nonlocal searched
            searched += len(text) - begin
            return closes.search(text, begin, **how)
    reader._closes = Counted()
    pieces = ["<parameter=a>", "[1", *[", 2, 3"] * 2000, "]", *"</parameter>", "</function>"]
    assert "".join(reader.read(o)[0] for o in pieces) == '{"a": ' + as_json([1] + [2, 3] * 2000) + "}"
    assert searched < 20 * 2000 + 2000

def test_what_can_be_read_can_be_written():
    "However deep it is"
    depth = 1
    try:
        while True: as_json(parse_json("[" * depth + "]" * depth)); depth += 1
    except ValueError as e: assert depth > 100 and "too deeply" in str(e)
