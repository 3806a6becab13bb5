"""Stop patterns, stop strings and grammars that are made to cost: what is bounded, and that no other request
notices. Work is counted, not timed."""
import json, random, subprocess, sys, threading
from types import SimpleNamespace

import numpy as np
import pytest
import regex
from hypothesis import HealthCheck, given, settings, strategies as st

from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import PendingReq
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.text import grammar
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.server import engine_process
from minisgl_lit.loop.engine_core import GrammarQueue
from minisgl_lit.loop.messages import AbortMsg, UserMsg, encode
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output
from minisgl_lit.text import stop
from minisgl_lit.text.stop import StopChecker, compile_stop, pattern_items, search_together
from minisgl_lit.text.tokenizer import OutputCollector, TextStopChecks

VOCAB, EVIL = 6, "(?:(?:a?){2000}){2000}b"


class Letters:
    "A tokenizer whose tokens are letters."
    backend, byte_level = None, True
    def decode(self, ids, skip_special_tokens=True): return "".join(chr(65 + i) for i in ids)
    def decode_first(self, token, skip_special_tokens=True): return chr(65 + token)
    def special_ids(self, texts): return {}


# -- a pattern is measured before it is compiled ---------------------------------------------------

@pytest.fixture
def compiled(monkeypatch):
    "The patterns that the library has compiled"
    seen, compile_ = [], regex.compile
    monkeypatch.setattr(stop.regex, "compile",
                        lambda pattern, *args, **kw: seen.append(pattern) or compile_(pattern, *args, **kw))
    compile_stop.cache_clear()
    return seen

@pytest.mark.parametrize("pattern", [EVIL, "(?:a{65535}){65535}", "(?:(?:(?:a|b){13}){13}){13}",
    "(?<=(?:a{100}){100})b", "(?:[[:alpha:])]a?){2000}", "(?x)(?:(?:a # )\n){2000}){2000}",
                                     "(?:a){e<=3}", "(?:abc){i,d,s}", r"\L<words>", "(?R)b", "a(?1)?(b)",
                                     "(?P<n>a(?&n)?b)", "(?V1)[[a]--[b]]", "(?:(?:[^]]a{3}){30}){30}",
                                     "[" + "a-c"*30_000 + "]", "("*51 + "a" + ")"*51])
def test_a_pattern_that_could_be_large_is_not_compiled(pattern, compiled):
    with pytest.raises(RequestError, match="stop_regex must be a regular expression"):
        TextStopChecks(Letters()).validate(SamplingParams(stop_regex=pattern))
    assert not compiled

def test_the_side_that_shows_compiles_nothing(compiled):
    "HTTP makes text of tokens; it is told what may be shown, and searches nothing"
    OutputCollector(Letters(), SamplingParams(stop_regex="a+b", stop=["x"]))
    assert not compiled

def test_patterns_fill_no_cache(compiled):
    "n answers compile once, and of hundreds of patterns only a few are kept"
    checks, before = TextStopChecks(Letters()), len(regex._main._cache)
    for _ in range(128): checks.validate(SamplingParams(stop_regex="same.pattern"))
    assert compiled == ["same.pattern"]
    for i in range(100): checks.validate(SamplingParams(stop_regex=f"pattern{i}"))
    assert compile_stop.cache_info().currsize <= 32 and len(regex._main._cache) <= before

pieces = st.sampled_from(["a", ".", r"\w", "[a-c]", "[^]x]", r"\p{L}", "(?i)", "^", "$", r"\b", "é", "}", "]",
                          r"\{", "{", r"\1", r"\X", "ß"])
patterns = st.recursive(pieces,
                        lambda inner: st.builds(lambda open_, parts, close: open_ + "".join(parts) + close,
                                                st.sampled_from(["(", "(?:", "(?=", "(?<=", "(?<!", "(?>",
                                                    "(?i:"]), st.lists(inner, min_size=1, max_size=4),
                                                st.just(")"))
                        | st.builds(lambda o, times: o + times, inner,
                                    st.sampled_from(["*", "+?", "?", "{3}", "{,40}", "{2,}", "{7,44}",
                                        "{500}", "{100}+", "*+"])) | st.builds("{}|{}".format, inner, inner),
                        max_leaves=14)

def copies(node, seen=0):
    "Parts of a pattern as the library has parsed it, its repeats written out"
    name = type(node).__name__
    if name.startswith("Set"): return 1   # one character of several
    inner = [o for key in ("items", "branches", "subpattern", "characters", "yes_item", "no_item")
             for found in [getattr(node, key, None)] if found is not None
             for o in (found if isinstance(found, (list, tuple)) else [found])
             if not isinstance(o, (int, str))]
    total = sum(map(copies, inner)) or 1
    return total * max(node.max_count or node.min_count, 1) if name.endswith("Repeat") else total

@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(patterns, min_size=1, max_size=4).map("".join))
def test_no_pattern_is_larger_than_measured(pattern):
    "The library's own parser is the judge: it finds no more parts than we have counted"
    core = regex._regex_core
    try: items = pattern_items(pattern)
    except ValueError: return
    source = core.Source(pattern)
    info = core.Info(0, source.char_type, {})
    info.guess_encoding = core.UNICODE
    try: parsed = core._parse_pattern(source, info)
    except (core.error, core._UnscopedFlagSet, RecursionError): return
    assert copies(parsed) <= items + 1

FUZZ = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
import regex
for pattern in sys.stdin.read().split("\\0"):
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try: regex.compile(pattern, cache_pattern=False)
    except MemoryError: raise
    except Exception: pass
    took, more = time.thread_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert took < .5 and more < 30_000, (pattern, took, more)
"""

@pytest.mark.long
def test_what_is_let_through_compiles_quickly_and_small():
    rng, largest = random.Random(0), []
    def make(depth):
        part = ("".join(make(depth - 1) for _ in range(rng.randint(1, 3))) if depth
                else rng.choice(["a", "[a-z]", ".", r"\w", "(a|b)", "ab?", "(?i:ß)", "(?=a)", "é*"]))
        return (rng.choice(["(?:{})", "({})", "(?:{}|a)", "(?>{})"]).format(part) + rng.choice(["", "*", "?",
            "+?", f"{{{rng.choice([2, 9, 40, 300])}}}", f"{{,{rng.choice([3, 30])}}}", "{5,}"]))
    while len(largest) < 2000:
        pattern = make(rng.randint(0, 5))[:stop.MAX_PATTERN_LEN]
        try:
            if 300 < pattern_items(pattern) <= stop.MAX_PATTERN_ITEMS: largest.append(pattern)
        except ValueError: pass
    largest += ["(" * 50 + "a" + ")*" * 50, "(?:" * 50 + "a" + "?)*" * 50, "(a|b)" * 200, "a|" * 499 + "b",
                "(?:x?){900}y{900}", "(?i)" + "ß" * 990, "[" + "a-c" * 300 + "]"]
    done = subprocess.run([sys.executable, "-c", FUZZ], input="\0".join(largest), text=True,
                          capture_output=True, timeout=300)
    assert not done.returncode, done.stderr


# -- the time of searches --------------------------------------------------------------------------

class Clock:
    "The thread's CPU time, which only searches spend; a pattern says what each of its searches costs"
    def __init__(self, monkeypatch, **costs):
        self.now, self.costs, self.n = 0., costs, 0
        monkeypatch.setattr(stop, "thread_time", lambda: self.now)
        monkeypatch.setattr(stop, "compile_stop",
            lambda pattern: SimpleNamespace(search=lambda *args, **kw: self.search(pattern, **kw)))

    def search(self, pattern, partial, timeout):
        self.n += 1
        self.now += min(self.costs[pattern], timeout)
        if self.costs[pattern] > timeout: raise TimeoutError

def test_a_step_searches_for_a_millisecond_however_many_ask(monkeypatch):
    "128 answers to one request whose pattern never ends, beside eight quick ones"
    monkeypatch.setattr(stop, "REQUEST_SEARCH_S", .05)
    clock, checks, rng = Clock(monkeypatch, slow=9., quick=3e-6), TextStopChecks(Letters()), random.Random(0)
    def make(pattern, i):
        return checks.make(PendingReq("r", np.array([1, i]), SamplingParams(stop_regex=pattern), 999))
    slow, quick = [make("slow", 0) for _ in range(128)], [make("quick", i) for i in range(8)]
    worst, steps = 0., 0
    while any(not o.error for o in slow):
        assert steps < 300
        live = [o for o in slow if not o.error] + quick
        rng.shuffle(live)
        for check in live: check.push(0, None, None)
        before = clock.now
        checks.search(live)
        worst, steps = max(worst, clock.now - before), steps + 1
        for check in quick: assert check.take(), steps   # its token comes with this step
    assert worst <= stop.STEP_SEARCH_S + 1e-9
    spent = slow[0].checker.budget
    # one budget for all 128
    assert spent.seconds <= stop.REQUEST_SEARCH_S + stop.CHAR_SEARCH_S * spent.n_chars
    with pytest.raises(RequestError, match="stop_regex='slow' took more than 0.05 s of search time"):
        slow[-1].take()
    assert all(o.checker.budget.left > .04 for o in quick)

def test_quick_patterns_are_searched_first(monkeypatch):
    """Twelve requests whose patterns never end could use a whole step; once it is known who is slow, no quick
    one waits for them"""
    clock, checks, rng = Clock(monkeypatch, slow=9., quick=3e-6), TextStopChecks(Letters()), random.Random(0)
    def make(pattern, i):
        return checks.make(PendingReq("r", np.array([1, i]), SamplingParams(stop_regex=pattern), 999))
    slow, quick = [make("slow", i) for i in range(12)], [make("quick", i) for i in range(8)]
    for step in range(40):
        live = slow + quick
        rng.shuffle(live)
        for check in live: check.push(0, None, None)
        checks.search(live)
        shown = [check.take() for check in quick]
        assert step < 8 or all(shown), step
    assert not any(o.error for o in slow) and clock.n > 300   # the slow ones were searched for, too

def test_a_long_answer_does_not_use_up_its_time(monkeypatch):
    clock, steps = Clock(monkeypatch, usual=3e-6), 10_000
    checker = StopChecker(pattern="usual")
    for _ in range(steps): checker.push("word ")
    assert clock.now < checker.budget.left + clock.now and checker.budget.left > stop.REQUEST_SEARCH_S

def test_a_busy_machine_ends_nobody():
    """Time of which the thread had none does not count: a search that the library calls late is put off, and
    asked again"""
    checker, late = StopChecker(pattern="b"), [True]*50
    real = compile_stop("b")
    def search(*args, **kw):
        if late: raise TimeoutError(late.pop())
        return real.search(*args, **kw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stop, "compile_stop", lambda pattern: SimpleNamespace(search=search))
        shown = [checker.push(o) for o in "a"*60 + "b"]
    assert "".join(shown) == "a"*60 and checker.matched == "b" and checker.budget.left > .4

def test_many_patterns_of_one_step_are_all_searched_in_the_end(monkeypatch):
    "More than a step has time for: each comes later, none is lost"
    Clock(monkeypatch, usual=4e-5)
    checkers = [StopChecker(pattern="usual") for _ in range(100)]
    for o in checkers: o.append("word ")
    for n in range(50):
        if not (behind := [o for o in checkers if o.behind]): break
        assert not search_together(behind)
    assert not [o for o in checkers if o.behind] and 3 < n < 20

def calls(f):
    "How many functions of C it calls"
    n = 0
    def count(frame, event, arg):
        nonlocal n
        n += event == "c_call"
    sys.setprofile(count)
    try: f()
    finally: sys.setprofile(None)
    return n

def test_stop_strings_are_linear_and_no_patterns(compiled):
    "64 strings of 1,000 letters, in a text that nearly matches all of them all the time"
    def run(n):
        checker = StopChecker(["a"*999 + chr(1000 + i) for i in range(64)])
        def push():
            for _ in range(n): checker.push("a"*7 + "x")
        return calls(push)
    few, many = run(40), run(80)
    assert many < 2.2*few and many / (80*8*64) < 4 and not compiled


# -- the same answer, however late a search is -----------------------------------------------------

class Late(TextStopChecks):
    "Puts most searches off, at random"
    def __init__(self, rng): super().__init__(Letters()); self.rng = rng
    def search(self, checks): super().search([o for o in checks if self.rng.random() < .3])

def scheduler(stop_checks, overlap, pages=30):
    table = TableManager(3, 48, page_size=4, dummy_page=pages)
    engine = ToyEngine(table.page_table, table.token_pool, 4, pages, VOCAB)
    return Scheduler(engine, CacheManager(pages, table, make_prefix_cache("radix", 4)), VOCAB, float,
                     EngineConfig(overlap=overlap), frozenset({5}), rules=TextRules(stop_checks))

def serve(stop_checks, overlap, asked, abort=()):
    s, out, ends = scheduler(stop_checks, overlap), {}, {}
    for rid, prompt, params in asked:
        s.add(rid, prompt, params)
        out[rid] = OutputCollector(Letters(), params)
    steps = 0
    while s.has_work:
        for o in s.step():
            assert o.rid not in ends
            out[o.rid].add(o)
            if o.finish_reason: ends[o.rid] = o.matched
        steps += 1
        for rid in abort:
            if rid in s.alive and steps == 9: s.abort(rid)
    s.self_check()
    assert not stop_checks._budgets   # forgotten with their requests
    return {rid: (o.output.text, o.output.token_ids, o.output.finish_reason, o.output.error, ends[rid])
            for rid, o in out.items()}

@pytest.mark.parametrize("seed", range(6))
def test_a_late_search_changes_no_answer(seed):
    rng = random.Random(seed)
    def params():
        return SamplingParams(max_tokens=rng.randint(1, 20), temperature=0,
                              stop=rng.sample(["AB", "CD", "EA", "B"], rng.randint(0, 2)),
                              stop_regex=rng.choice([None, "A.B", "C+D$", "D(?=A)", "[AB]{2}"]),
                              no_stop_trim=rng.random() < .3,
                              **rng.choice([dict(ignore_eos=True, min_tokens=1), dict(ignore_eos=True), {}]))
    asked = [(str(i), rng.choices(range(5), k=rng.randint(1, 9)), params()) for i in range(8)]
    plain = serve(TextStopChecks(Letters()), False, asked)
    assert (serve(Late(rng), False, asked) == plain and serve(Late(rng), True, asked) == plain
            and serve(TextStopChecks(Letters()), True, asked) == plain)
    for rid, prompt, p in asked:
        text, ids, reason, *_ = plain[rid]
        want = expected_output(prompt, p.max_tokens, VOCAB, () if p.ignore_eos else (5,))
        assert ids == want[:len(ids)] and (reason != "length" or len(ids) == p.max_tokens)
    ended = serve(Late(rng), bool(seed % 2), asked, abort="0123")
    assert all(got == plain[rid] or got[2] == "abort" and got[1] == plain[rid][1][:len(got[1])]
               for rid, got in ended.items())

def test_a_slow_search_ends_its_own_request_only():
    class Never(TextStopChecks):
        def search(self, checks):
            super().search(checks)
            for o in checks:
                if o.checker.has_pattern: o.error = "stop_regex='A' took more than 0.5 s"
    asked = [("slow", [1, 2], SamplingParams(max_tokens=9, stop_regex="A", ignore_eos=True)),
             ("other", [1, 2], SamplingParams(max_tokens=9, stop="zz", ignore_eos=True))]
    got = serve(Never(Letters()), True, asked)
    assert (got["slow"][2:4] == ("error", "stop_regex='A' took more than 0.5 s")
            and got["other"][1:3] == (expected_output([1, 2], 9, VOCAB), "length"))


# -- grammars --------------------------------------------------------------------------------------

def chain(n): return "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(n)) + f'r{n} ::= "x"'

@pytest.fixture
def compiler():
    c = grammar.GrammarCompiler(None, 64)
    c.started, c.hold = [], threading.Event()
    c._compile = lambda spec: c.started.append(spec.text) or c.hold.wait(20) and c
    yield c
    c.hold.set()
    c._threads.shutdown()

@pytest.mark.parametrize("params, what",
                         [(dict(ebnf=chain(20_000)), "ebnf has [0-9]+ bytes, and at most 65536"),
                          (dict(ebnf=chain(400)), "ebnf has 402 rules, and at most 300"),
                          (dict(json_schema=json.dumps({"enum": [*range(500_000)]})),
                           "json_schema has [0-9]+ bytes"),
                          (dict(json_schema=json.dumps({"enum": [*range(3_000)]})),
                           "json_schema has 3000 items, and at most 2000"),
                          (dict(regex="("*300 + "a" + ")"*300), "regex has 300 levels, and at most 100")])
def test_a_grammar_is_measured_before_it_is_compiled(compiler, params, what):
    for ask in (compiler.begin, compiler.validate):
        with pytest.raises(RequestError, match=what): ask(SamplingParams(**params))
    assert not compiler.started and not compiler._cache

def test_grammars_of_callers_who_have_left_are_not_compiled(compiler):
    """A hundred new forms and their caller hangs up: the next caller's form is begun after the two that were
    running"""
    queue = GrammarQueue(scheduler(None, False), compiler.begin)
    queue.scheduler.rules.make_grammar = compiler
    def ask(rid, pattern): queue.add(UserMsg(rid, np.array([1]), SamplingParams(regex=pattern)))
    for i in range(100): ask(f"flood{i}", f"a{i}")
    ask("shared", "a50")
    assert queue.abort("flood", whole=False) == 100
    ask("next", "b")
    compiler.hold.set()
    compiler.begin(SamplingParams(regex="b")).result(10)
    assert [o for o in compiler.started if o not in ("a0", "a1")] == ["a50", "b"]
    compiler.hold.clear()
    ask("again", "a7")   # it was cancelled, and can be asked for again
    compiler.hold.set()
    assert compiler.begin(SamplingParams(regex="a7")).result(10) is compiler

def test_grammars_of_requests_that_waited_too_long_are_not_compiled(compiler, monkeypatch):
    queue = GrammarQueue(scheduler(None, False), compiler.begin)
    queue.scheduler.rules.make_grammar = compiler
    for i in range(3): queue.add(UserMsg(str(i), np.array([1]), SamplingParams(regex=f"a{i}")))
    monkeypatch.setattr(queue, "_timed_out", lambda arrival: True)
    assert [o.rid for o in queue.ready()] == ["0", "1", "2"]
    compiler.hold.set()
    compiler._threads.shutdown()
    assert "a2" not in compiler.started   # the others may have been running

def test_a_grammar_of_a_request_that_can_never_be_served_is_not_compiled(compiler):
    queue = GrammarQueue(scheduler(None, False), compiler.begin)
    queue.scheduler.rules.make_grammar = compiler
    with pytest.raises(RequestError, match="48"):
        queue.add(UserMsg("long", np.full(60, 1), SamplingParams(regex="a")))
    assert not compiler.started and not compiler._cache

def test_a_grammar_whose_callers_left_can_be_asked_for_again(compiler):
    "What was cancelled stands in the cache for a while, and is compiled when somebody wants it after all"
    asked = [compiler.begin(SamplingParams(regex=f"a{i}")) for i in range(3)]
    assert asked[2].cancel()
    compiler.hold.set()
    assert compiler.begin(SamplingParams(regex="a2")).result(10) is compiler

def test_two_grammars_are_compiled_at_once_and_few_are_kept(compiler):
    asked = [compiler.begin(SamplingParams(regex=f"a{i}")) for i in range(99)]
    for _ in range(1000):
        if len(compiler.started) >= 2: break
        threading.Event().wait(.001)
    assert compiler.started == ["a0", "a1"] and len(compiler._cache) == 99   # requests wait for all of them
    compiler.hold.set()
    for o in asked: o.result(10)
    compiler.begin(SamplingParams(regex="b")).result(10)
    assert len(compiler._cache) <= 33


def test_slow_messages_do_not_keep_a_step_waiting(monkeypatch):
    "Each request costs a while to accept: a step comes after ten milliseconds of them, not after 256"
    now, socket = ([0.],
                   SimpleNamespace(poll=lambda ms: 1, get=lambda what: 1, recv=lambda: encode(AbortMsg("x"))))
    monkeypatch.setattr(engine_process, "monotonic", lambda: now[0])
    taken = 0
    for _ in engine_process.receive_messages(socket, 0, 256):
        taken, now[0] = taken + 1, now[0] + .004
    assert taken == 3
