"""Structured output: whatever is sampled, with tokenizers of three kinds, matches the grammar; and all that
matches can be sampled."""
import json, random, re, subprocess, sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import PendingReq
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.runtime import build
from minisgl_lit.text import grammar
from minisgl_lit.text.grammar import GrammarCompiler, pack_mask
from minisgl_lit.formats.hub import embedded_path
from test_tokenizer import byte_fallback, byte_level

pytest.importorskip("llguidance")
FEW = settings(max_examples=40, deadline=None)


def embedded(): return tokenizers.Tokenizer.from_file(str(embedded_path()/"tokenizer.json"))


def allowed(mask): return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


class Speaker:
    "Says anything that is allowed, by chance."
    def __init__(self, make, eos):
        self.tok, self.eos = make(), eos
        # models have more numbers than tokenizers have tokens
        self.vocab_size = self.tok.get_vocab_size() + 5
        self.compiler = GrammarCompiler(self.tok, self.vocab_size, eos)

    def grammar(self, **params):
        return self.compiler(PendingReq("", np.array([1]), SamplingParams(**params), 10))

    def mask(self, g):
        out = np.full(-(-self.vocab_size // 32), -1, dtype=np.int32)
        g.mask(out)
        return allowed(out)

    def say(self, g, ends, seed=0, most=2000):
        rng, said = random.Random(seed), []
        while len(said) < most:
            may = self.mask(g)
            assert max(may) < self.vocab_size - 5
            said.append(rng.choice(may))
            complete = g.accept(said[-1])
            if said[-1] in ends: return self.tok.decode(said[:-1])
            if complete: return self.tok.decode(said)
        raise AssertionError(f"no end: {self.tok.decode(said)!r:.200}")

    def takes(self, g, text):
        "Move on by a text; whether it may end there"
        ids, done = self.tok.encode(text, add_special_tokens=False).ids, False
        for t in ids: done = g.accept(t)
        return done or bool({*self.eos} & {*self.mask(g)})


SPEAKERS = {"embedded": Speaker(embedded, [0, 2]), "bytes": Speaker(byte_level, [257]),
            "fallback": Speaker(byte_fallback, [260])}
# 260 is two spaces: an end that could be text, too, must not come before its time
# the third begins each text that it reads with a space
two = pytest.mark.parametrize("name", ["embedded", "bytes"])
everyone = pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)

# schemas whose answers are short: all that grows is counted
leaf = st.one_of(
    st.builds(lambda a, b: dict(type="integer", minimum=min(a, b), maximum=max(a, b)), st.integers(-300, 300),
              st.integers(-300, 300)),
    st.builds(lambda n: dict(type="string", maxLength=n), st.integers(0, 6)),
    st.builds(lambda xs: dict(enum=xs),
              st.lists(st.one_of(st.text("abé\"\\ 世", max_size=4), st.integers(0, 99), st.none(),
                                 st.booleans()), min_size=1, max_size=4, unique_by=json.dumps)),
    st.sampled_from([dict(type="boolean"), dict(type="null"), dict(type="string", format="date"),
                     dict(type="string", pattern="^[a-c]{2,4}$")]))


def objects(children):
    def made(properties, data):
        required = [k for k, keep in zip(properties, data) if keep]
        return dict(type="object", properties=properties, required=required, additionalProperties=False)
    return st.builds(made, st.dictionaries(st.text("abxyé", min_size=1, max_size=3), children, max_size=3),
                     st.lists(st.booleans(), min_size=3, max_size=3))


def arrays(children):
    return st.builds(lambda o, n: dict(type="array", items=o, minItems=n // 2, maxItems=n), children,
                     st.integers(0, 4))


schemas = st.recursive(leaf, lambda children: objects(children) | arrays(children), max_leaves=5)

# patterns that Python and the library read alike
piece = st.sampled_from(["a", "b c", "[a-d]", "[^a\n]", "é", "世", r"\.", "[0-9]", r'"'])
patterns = st.recursive(piece, lambda o: st.one_of(
    st.tuples(o, o).map("".join), st.tuples(o, o).map(lambda x: f"({x[0]}|{x[1]})"),
    st.tuples(o, st.sampled_from(["?", "{2}", "{1,3}"])).map(lambda x: f"({x[0]}){x[1]}")), max_leaves=6)


@everyone
@FEW
@given(schema=schemas, seed=st.integers(0, 99))
def test_json_fits_its_schema(speaker, schema, seed):
    text = speaker.say(speaker.grammar(json_schema=json.dumps(schema)), speaker.eos, seed)
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker(["date"]))


@everyone
@FEW
@given(pattern=patterns, seed=st.integers(0, 99))
def test_text_matches_its_pattern(speaker, pattern, seed):
    assert re.fullmatch(pattern, speaker.say(speaker.grammar(regex=pattern), speaker.eos, seed))


@two
@FEW
@given(data=st.data())
def test_all_that_matches_can_be_said(name, data):
    pattern = data.draw(patterns)
    text = data.draw(st.from_regex(pattern, fullmatch=True))
    assert SPEAKERS[name].takes(SPEAKERS[name].grammar(regex=pattern), text)


@two
@FEW
@given(data=st.data())
def test_all_json_of_a_schema_can_be_said(name, data):
    schema = dict(type="object", properties=dict(a=dict(type="integer"), b=dict(enum=["x", "é\n"])),
                  required=["a"], additionalProperties=True)
    value = dict(a=data.draw(st.integers(-10**9, 10**9)))
    if data.draw(st.booleans()): value["b"] = data.draw(st.sampled_from(["x", "é\n"]))
    if data.draw(st.booleans()):
        value["more"] = data.draw(st.lists(st.text("a\"\\\t世", max_size=5) | st.none() | st.integers(),
                                           max_size=3))
    text = json.dumps(value, ensure_ascii=False)   # the library spells each character in one way
    assert SPEAKERS[name].takes(SPEAKERS[name].grammar(json_schema=json.dumps(schema)), text)


@everyone
@pytest.mark.parametrize("ebnf", ['root ::= item ("," item)? \nitem ::= [0-9]{1,3} | "(" root ")"',
                                  'start: item ("," item)?\nitem: /[0-9]{1,3}/ | "(" start ")"'])
def test_both_ways_to_write_a_grammar(speaker, ebnf):
    item = r"[0-9]{1,3}"
    for _ in range(6): item = rf"(?:[0-9]{{1,3}}|\({item}(?:,{item})?\))"
    said = set()
    for seed in range(60):
        g = speaker.grammar(ebnf=ebnf)
        try: said.add(speaker.say(g, speaker.eos, seed, most=14))
        except AssertionError as e: assert "no end" in str(e)   # nested too deep for our patience
    assert len(said) > 5 and all(re.fullmatch(rf"{item}(,{item})?", o) for o in said)


@FEW
@given(st.sets(st.integers(0, 199)))
def test_packed_bits(tokens):
    words = pack_mask(tokens, 7)
    assert words.dtype == np.int32 and words.shape == (7,)
    assert {32*j + i for j, word in enumerate(words.tolist()) for i in range(32) if word >> i & 1} == tokens


INVALID = [
    ("json_schema", "{", "EOF"), ("json_schema", "[]", ""), ("json_schema", "3", ""),
    ("json_schema", "nonsense", ""), ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
    ("json_schema", '{"enum": []}', "Unsatisfiable"),
    ("json_schema", '{"type": "' + "x" * 500 + '"}', "Invalid type: xxx"),
    ("json_schema", '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
    ("json_schema", '{"$ref": "#/nope"}', "/nope"), ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}', ""),
    # must not be pasted into something larger
    ("json_schema", '{}}],"max_tokens":3,"x":[{"a":{}', "trailing"),
    ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "levels"),
    ("json_schema", '{"type": "string", "pattern": "("}', "unclosed group"),
    ("regex", "(ab", "unclosed group"), ("regex", r"a\1", "backreferences"),
    ("regex", "(" * 5000 + "a" + ")" * 5000, ""), ("regex", r"[^\x00-\x{10ffff}]", "no text matches it"),
    ("ebnf", 'root ::= "a" | foo', "foo"), ("ebnf", "nonsense!!", ""),
    ("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "")]


@pytest.mark.parametrize("name, text, why", INVALID, ids=range(len(INVALID)))
def test_what_makes_no_sense_is_refused_in_a_sentence(name, text, why):
    for ask in (lambda p: SPEAKERS["embedded"].compiler.validate(p),
                lambda p: SPEAKERS["embedded"].grammar(**{name: text})):
        with pytest.raises(RequestError) as e: ask(SamplingParams(**{name: text}))
        sentence = str(e.value)
        assert e.value.field == name and sentence.startswith((f"{name}=", f"{name} has ")) and why in sentence
        assert "\n" not in sentence and 20 < len(sentence) < 350


def serve(compiler, params, **config):
    "What the embedded model says to one question, with its text, reason and token counts"
    r = build(EngineConfig(device="cpu", **config))
    r.scheduler.rules.make_grammar, tok = compiler, embedded()
    said, ends = {str(i): [] for i in range(len(params))}, {}
    for i, p in enumerate(params):
        r.scheduler.add(str(i),
                        tok.encode("<|im_start|>user\nSay it.<|im_end|>\n<|im_start|>assistant\n").ids, p)
    while r.scheduler.has_work:
        for o in r.scheduler.step():
            said[o.rid] += o.token_ids
            if o.finish_reason: ends[o.rid] = o
    stats = r.scheduler.stats()
    r.close()
    return [tok.decode(o) for o in said.values()], [ends[o] for o in said], stats


LONG = json.dumps(dict(type="array", items=dict(enum=["one", "two", "three"]), minItems=8, maxItems=12))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_survives_retraction(overlap):
    params = [SamplingParams(json_schema=LONG, seed=i, temperature=1.0, max_tokens=150) for i in range(6)]
    compiler = SPEAKERS["embedded"].compiler
    compiler = GrammarCompiler(compiler._tokenizer, 1536, [0, 2])
    roomy, _, _ = serve(compiler, params, overlap=overlap)
    texts, ends, stats = serve(compiler, params, overlap=overlap, page_size=1, num_pages=190,
                               admission="optimistic", schedule_conservativeness=.05)
    assert stats["retracted"] > 0 and texts == roomy
    for text in texts: jsonschema.validate(json.loads(text), json.loads(LONG))


def test_neighbours_and_limits():
    compiler = GrammarCompiler(embedded(), 1536, [0, 2])
    plain = SamplingParams(temperature=0, max_tokens=12)
    (alone,), _, _ = serve(None, [plain])
    texts, ends, _ = serve(compiler, [plain, SamplingParams(json_schema=LONG, temperature=0, max_tokens=5),
                                      SamplingParams(regex="yes|no", temperature=0)])
    assert texts[0] == alone and texts[2] in ("yes", "no")
    assert ('["one","two","three","one"'.startswith(texts[1][:2])
            and [o.finish_reason.value for o in ends[1:]] == ["length", "stop"])


def test_without_an_end_token():
    compiler = GrammarCompiler(embedded(), 1536, [5000])   # the library guesses one
    g, out, (a,) = (compiler(PendingReq("", np.array([1]), SamplingParams(regex="aa?"), 10)),
                    np.zeros(48, dtype=np.int32), embedded().encode("a").ids)
    for complete in (False, True):
        g.mask(out)
        assert allowed(out) and all({*embedded().decode([i])} == {"a"} for i in allowed(out))
        assert g.accept(a) == complete


def test_threads_share_a_compiler():
    compiler = GrammarCompiler(embedded(), 1541, [0, 2])
    def life(i):
        speaker = SPEAKERS["embedded"]
        params = SamplingParams(json_schema=json.dumps(dict(type="array",
            items=dict(type="integer", minimum=0, maximum=i % 3 + 5), minItems=3, maxItems=9)))
        compiler.validate(params)
        return speaker.say(compiler(PendingReq("", np.array([1]), params, 10)), [0, 2], seed=i)
    with ThreadPoolExecutor(4) as pool: said = [*pool.map(life, range(24))]
    assert said == [life(i) for i in range(24)] and all(3 <= len(json.loads(o)) <= 9 for o in said)


def test_old_grammars_make_room():
    compiler = GrammarCompiler(embedded(), 1536, [0, 2], most=3)
    for i in range(5): compiler.validate(SamplingParams(regex=f"a{{{i + 1}}}"))
    assert [text for _, text in compiler._cache] == ['a{3}', 'a{4}', 'a{5}']


def test_the_library_is_not_missed_before_it_is_needed():
    code = ("import sys; sys.modules['llguidance'] = None\n"
            "from minisgl_lit.text.grammar import *; from minisgl_lit.text.sampling_params import *; from "
            "minisgl_lit.core.sampling_params import RequestError; import tokenizers\n"
            "c = GrammarCompiler(tokenizers.Tokenizer(tokenizers.models.BPE()), 5)\n"
            "c.validate(SamplingParams())\n"
            "try: c.validate(SamplingParams(ebnf='x'))\n"
            "except RequestError as e: print(e.field, '|', e)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.stdout.startswith("ebnf | ebnf needs the package llguidance")
            and "pip install llguidance" in run.stdout), run.stderr


@pytest.mark.parametrize('ask', [lambda c, p: c.validate(p), lambda c, p: c.begin(p).result(),
                                 lambda c, p: c(PendingReq('', np.array([1]), p, 10))])
def test_what_was_missing_once_is_asked_for_again(ask, monkeypatch):
    "A request that came before the library was installed says nothing about the same grammar after it"
    compiler, params = GrammarCompiler(embedded(), 1536, [0, 2]), SamplingParams(regex='ab?')
    with monkeypatch.context() as without:
        without.setitem(sys.modules, 'llguidance', None)
        for _ in range(2):
            with pytest.raises(RequestError, match='llguidance'): ask(compiler, params)
        assert not compiler.prepare()
    assert not isinstance(ask(compiler, params), RequestError)


def test_a_single_mask_is_bounded_without_a_clock(monkeypatch):
    "A mask cannot be interrupted: the parser's items are counted, and a longer text has more of them."
    monkeypatch.setattr(grammar, "thread_time", lambda: 0.)
    speaker = SPEAKERS["embedded"]
    g, [a] = (speaker.grammar(ebnf="start: e\ne: e e | e e e | /[a-z ]/\n"),
              speaker.tok.encode("a", add_special_tokens=False).ids)
    with pytest.raises(RequestError, match="^ebnf=.* cannot be followed: .*Too many items"):
        for _ in range(100):
            speaker.mask(g)
            g.accept(a)
