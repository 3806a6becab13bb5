"""Requests that cost more than they may: each is refused with its limit, and the work that it would have been
is counted."""
import asyncio, json, subprocess, sys, threading

import httpx
import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import FinishReason
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.server.api_server import create_app
from minisgl_lit.server.protocol import NativeSamplingRequest
from minisgl_lit.server.tokenizing import TextThreads
from minisgl_lit.testing.toy_engine import ToyEngine
from minisgl_lit.text.chat_template import RENDER_S
from minisgl_lit.text.tokenizer import TextStopChecks, Tokenizer

CHAT, PLAIN, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MAX_LEN, QUEUED = 400, 3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


class Counting:
    "What the tokenizers library has been given, and in which threads"
    def __init__(self, backend): self.backend, self.characters, self.threads = backend, 0, set()
    def __getattr__(self, name): return getattr(self.backend, name)
    def encode_batch_fast(self, texts, **options):
        self.characters += sum(map(len, texts))
        self.threads.add(threading.current_thread())
        return self.backend.encode_batch_fast(texts, **options)
    def decode(self, ids, *options):
        assert len(ids) <= 1_000   # the library keeps the interpreter's lock
        return self.backend.decode(ids, *options)
    def decode_batch(self, lists, *options):
        self.threads.add(threading.current_thread())
        return self.backend.decode_batch(lists, *options)

def bytewise():
    tok = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(LETTERS)}, []))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tok

@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    def make(template):
        folder = tmp_path_factory.mktemp("bytes")
        bytewise().save(str(folder/"tokenizer.json"))
        (folder/"tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return folder
    return make

@pytest.fixture
def tokenizer(checkpoint):
    tok = Tokenizer(checkpoint(TEMPLATE))
    tok.chars_per_token   # known when the server starts
    tok.backend = Counting(tok.backend)
    return tok


class InProcess:
    "An engine client whose scheduler runs in the event loop, on the toy engine; `held`: it does nothing"
    model, alive, trouble, held = "toy", True, "", False

    def __init__(self, tokenizer, **settings):
        table = TableManager(8, MAX_LEN, page_size=4, dummy_page=600)
        cache = CacheManager(600, table, make_prefix_cache("radix", 4))
        engine, self.now = ToyEngine(table.page_table, table.token_pool, 4, 600, 256), 0.
        def grammar(pending):
            if pending.params.regex == "(": raise RequestError("regex", "regex is no pattern")
        config = EngineConfig(max_running_req=8, max_queued_req=QUEUED, overlap=False, **settings)
        self.scheduler = Scheduler(engine, cache, 256, lambda: self.now, config,
                                   rules=TextRules(TextStopChecks(tokenizer), grammar))
        self.outputs, self.taken = {}, 0

    async def stream(self, requests):
        self.taken += len(requests)
        for r in requests: self.scheduler.add(r.rid, r.input_ids, r.params)
        left = {r.rid for r in requests}
        while left:
            await asyncio.sleep(0)
            if not self.held and self.scheduler.has_work:
                for o in self.scheduler.step(): self.outputs.setdefault(o.rid, []).append(o)
            for rid in list(left):
                for o in self.outputs.pop(rid, []):
                    if o.finish_reason: left.discard(rid)
                    yield o

@pytest.fixture
def engine(tokenizer): return InProcess(tokenizer, queue_timeout=60.)

@pytest.fixture
def web(engine, tokenizer):
    app = create_app(engine, tokenizer, {"max_seq_len": MAX_LEN, "max_queued_req": QUEUED})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")

def post(web, path, **body): return asyncio.run(web.post(path, json=body))
def say(*texts): return [{"role": "user", "content": o} for o in texts]

def one_token(path, body):
    "The same body for an answer of one token, as this route has it"
    if path in (PLAIN, CHAT): return body | {"max_tokens": 1}
    if path == GENERATE:
        return body | {"sampling_params": {"max_new_tokens": 1} | body.get("sampling_params", {})}
    return body


# -- long texts ----------------------------------------------------------------------------------

HUGE = "x" * 2_000_000

@pytest.mark.parametrize("path, body", [
    (PLAIN, {"prompt": HUGE}), (PLAIN, {"prompt": ["x", HUGE]}), (GENERATE, {"text": HUGE}),
    (CHAT, {"messages": say("x", HUGE)}), ("/tokenize", {"prompt": HUGE}),
    ("/tokenize", {"messages": say(HUGE)}), (PLAIN, {"prompt": [5]*100_000}),
    ("/detokenize", {"tokens": [5]*600_000})])
def test_what_cannot_fit_is_refused_by_its_length(web, tokenizer, engine, path, body):
    r = post(web, path, **one_token(path, body))
    assert (r.status_code in (400, 413)
            and any(limit in r.text for limit in (f"{MAX_LEN}", "524,288", "500,000"))), r.text
    assert (tokenizer.backend.characters, engine.taken) == (0, 0)

@pytest.mark.parametrize("path, body, status", [
    ("/tokenize", {"prompt": ["x"*100]*200}, 200), ("/tokenize", {"prompt": [""]*200}, 200),
    ("/tokenize", {"messages": say(*"x"*300)}, 200), ("/detokenize", {"tokens": [[5]*9]*2000}, 200),
    ("/detokenize", {"tokens": [5]*20_000}, 200), ("/tokenize", {"messages": say(*"x"*10_000)}, 400),
    (CHAT, {"messages": say(*"x"*5_000)}, 400)])
def test_long_work_is_done_in_a_thread(web, tokenizer, path, body, status, monkeypatch):
    seen = tokenizer.backend.threads
    render = type(tokenizer.chat_template).render
    monkeypatch.setattr(type(tokenizer.chat_template), "render",
                        lambda *args: (seen.add(threading.current_thread()), render(*args))[1])
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode",
                        lambda *args: (seen.add(threading.current_thread()), decode(*args))[1])
    r = post(web, path, **body)
    assert r.status_code == status and threading.main_thread() not in seen, r.text

def test_short_work_is_not(web, tokenizer):
    assert post(web, PLAIN, prompt=["ab", "c"], max_tokens=1).status_code == 200
    assert tokenizer.backend.threads == {threading.main_thread()}

def test_a_caller_has_one_thread_and_all_have_two():
    "Nothing ends before it is let go: what has begun by then is all that may work at once"
    async def life():
        threads, go, begun = TextThreads(), threading.Event(), []
        def work(caller): begun.append(caller), go.wait(20)
        calls = [asyncio.ensure_future(threads.run(o, work, [o])) for o in "aaabbbcc"]
        while len(begun) < 2: await asyncio.sleep(.001)
        await asyncio.sleep(.02)
        first = [*begun]
        go.set()
        await asyncio.gather(*calls)
        return first, begun
    first, all_ = asyncio.run(asyncio.wait_for(life(), 20))
    assert sorted(first) == ["a", "b"] and sorted(all_) == [*"aaabbbcc"]

def test_what_is_cancelled_does_not_go_on():
    async def life():
        threads, go, begun = TextThreads(), threading.Event(), []
        def work(i): begun.append(i), go.wait(20)
        call = asyncio.ensure_future(threads.run("a", work, range(9)))
        while not begun: await asyncio.sleep(.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError): await call
        go.set()
        await threads.run("a", begun.append, ["next"])   # when it is the caller's turn again
        return begun
    assert asyncio.run(asyncio.wait_for(life(), 20)) == [0, "next"]

def test_an_answer_of_many_tokens_is_refused(web):
    "Each prompt fits; their ids would be a body of many megabytes, made on the loop"
    r = post(web, "/tokenize", prompt=["x"*MAX_LEN]*1_311)
    assert (r.status_code == 400
            and "prompt may come to at most 524,288 tokens in one call, not 524,400" in r.text)

def test_who_hangs_up_leaves_the_queue(engine, tokenizer):
    app, body = create_app(engine, tokenizer), json.dumps({"prompt": ["x"*9_999]*100}).encode()
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    async def receive(): return messages.pop(0) if messages else await asyncio.Event().wait()
    async def send(message): pass
    scope = dict(type="http", method="POST", path=PLAIN, query_string=b"",
                 headers=[(b"content-type", b"application/json")])
    asyncio.run(app(scope, receive, send))
    assert tokenizer.backend.characters < 20*9_999 and engine.taken == 0

def named(normalizer=None, pre=None, **options):
    tok = tokenizers.Tokenizer(models.BPE(**options))
    if normalizer: tok.normalizer = normalizer
    if pre: tok.pre_tokenizer = pre
    return tok

def with_merges(*normalizer):
    vocab = ({c: i for i, c in enumerate(LETTERS)} | {"ab": 256, "abc": 257, "ĠĠ": 258, "ĠĠĠĠ": 259,
        "Ã¤": 260, "aÌĪ": 261})
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "¤")]
    tok = named(normalizers.Sequence(list(normalizer)) if normalizer else None,
                pre_tokenizers.ByteLevel(add_prefix_space=False), vocab=vocab, merges=merges)
    tok.add_special_tokens(["<|end|>", "<é>"])
    return tok

FALLBACK = {f"<0x{b:02X}>": b for b in range(256)} | {"▁": 256, "a": 257, "▁▁": 258, "aa": 259}
BACKENDS = [with_merges(), with_merges(normalizers.NFC()),
            with_merges(normalizers.NFKC(), normalizers.Lowercase()),
            named(normalizers.Replace(" ", "▁"), vocab=FALLBACK, merges=[("▁", "▁"), ("a", "a")],
                  byte_fallback=True),
            named(pre=pre_tokenizers.Metaspace(), vocab={"[UNK]": 0, "a": 1, "▁": 2, "▁a": 3},
                  merges=[("▁", "a")], unk_token="[UNK]")]

@given(st.sampled_from(BACKENDS),
       st.text(st.sampled_from("abc  ä\u0308\u0301ǖu가각ﬁ①👋İ") | st.characters(codec="utf-8"), max_size=60),
       st.sampled_from(["", "<|end|>", "<é>", "    "]))
def test_the_bound_never_refuses_what_fits(backend, text, more):
    "A token never has more characters than we say"
    from minisgl_lit.text.tokenizer import _chars_per_token
    text, bound = text + more*3, _chars_per_token(backend)
    assert bound < 20 and len(text) <= bound * len(backend.encode(text).ids)


# -- limits --------------------------------------------------------------------------------------

@pytest.mark.parametrize("path, field, limit, body", [
    (PLAIN, "stop", "64", {"prompt": "x", "stop": ["a"]*65}),
    (CHAT, "stop", "64", {"messages": say("x"), "stop": [f"{i}" for i in range(20_000)]}),
    (PLAIN, "stop", "1,000", {"prompt": "x", "stop": HUGE}),
    (GENERATE, "stop", "1,000", {"text": "x", "sampling_params": {"stop": "a"*1001}}),
    (PLAIN, "stop_token_ids", "1,024", {"prompt": "x", "stop_token_ids": [1]*100_000}),
    (PLAIN, "logit_bias", "4,096", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(9_999)}}),
    (GENERATE, "rid", "128", {"text": "x", "rid": HUGE}),
    (GENERATE, "rid", "128", {"text": "x", "rid": "r"*129}), ("/abort_request", "rid", "256", {"rid": HUGE}),
    (PLAIN, "extra_key", "256", {"prompt": "x", "extra_key": HUGE}),
    (CHAT, "extra_key", "256", {"messages": say("x"), "cache_salt": "k"*257}),
    (PLAIN, "prompt", "3 requests (max_queued_req)", {"prompt": ["x"]*10_000}),
    (PLAIN, "prompt", "not 12,800", {"prompt": ["x"]*100, "n": 128}),
    (GENERATE, "text", "3 requests (max_queued_req)", {"text": ["x"]*10_000, "sampling_params": [{}]*10_000}),
    (GENERATE, "text", "not 4", {"text": ["x"]*2, "sampling_params": {"n": 2}}),
    (CHAT, "messages", "3 requests (max_queued_req)", {"messages": say("x"), "n": 4}),
    (CHAT, "messages", "10,000", {"messages": say(*"x"*10_001)})])
def test_limits_are_said(web, engine, tokenizer, path, field, limit, body):
    r = post(web, path, **body)
    error = r.json()["error"]
    assert (r.status_code, error["param"]) == (400, field) and limit in error["message"], error
    assert len(r.content) < 700 and (engine.taken, tokenizer.backend.characters) == (0, 0)

def test_parameters_of_too_many_prompts_are_not_looked_at(web, monkeypatch):
    looked_at = []
    monkeypatch.setattr(NativeSamplingRequest, "params", looked_at.append)
    r = post(web, GENERATE, text=["x"]*10_000, sampling_params=[{}]*10_000)
    assert r.status_code == 400 and "3 requests (max_queued_req)" in r.text and not looked_at

def test_a_prompt_counts_for_each_answer(web, engine, monkeypatch):
    monkeypatch.setattr("minisgl_lit.server.api_server._MAX_CALL_TOKENS", 100)
    r = post(web, PLAIN, prompt="x"*60, n=2)
    assert (r.status_code == 400 and "at most 100 tokens, each counted n times, not 120" in r.text
            and engine.taken == 0)

def test_limits_are_not_passed_by_what_they_allow(web):
    for path, body in [(PLAIN, {"prompt": ["x"]*QUEUED, "stop": ["~"*1000] + ["~"]*63, "extra_key": "k"*256}),
                       (GENERATE, {"text": "x", "rid": "r"*128})]:
        assert post(web, path, **one_token(path, body)).status_code == 200

def test_many_answers_are_checked_once(monkeypatch):
    import minisgl_lit.core.sampling_params as module
    params, checked = SamplingParams(n=128, logit_bias=dict.fromkeys(range(4096), 1.)), []
    monkeypatch.setattr(module, "_check", checked.append)
    assert len(params.choices()) == 128 and not checked


# -- isolation -----------------------------------------------------------------------------------

@pytest.mark.parametrize("path, body, key", [
    (PLAIN, {"prompt": "x"*48}, lambda k: {"cache_salt": k}),
    (PLAIN, {"prompt": "x"*48}, lambda k: {"extra_key": k}), (CHAT, {"messages": say("x"*48)},
        lambda k: {"cache_salt": k}), (CHAT, {"messages": say("x"*48)}, lambda k: {"extra_key": k}),
    (GENERATE, {"text": "x"*48}, lambda k: {"extra_key": k}),
    (GENERATE, {"text": "x"*48}, lambda k: {"cache_salt": k}),
    (GENERATE, {"text": "x"*48}, lambda k: {"sampling_params": {"extra_key": k}}),
    (GENERATE, {"text": "x"*48}, lambda k: {"sampling_params": {"cache_salt": k}})])
def test_tenants_share_no_cache(web, path, body, key):
    def cached(tenant):
        said = post(web, path, **one_token(path, body | key(tenant))).json()
        return (said["meta_info"]["cached_tokens"] if path == GENERATE
                else said["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert [cached(o) for o in ("A", "B", "A", "B")] == [0, 0, 44, 44]

def test_two_keys_that_differ_are_refused(web):
    for path, body in [(PLAIN, {"prompt": "x", "extra_key": "a", "cache_salt": "b"}),
                       (GENERATE, {"text": "x", "extra_key": "a", "sampling_params": {"cache_salt": "b"}})]:
        r = post(web, path, **body)
        assert r.status_code == 400 and "are the same setting; give one of them" in r.text


# -- a full queue --------------------------------------------------------------------------------

def full_queue(engine, web, *more):
    "Replies to requests of which the first fill the queue, while the engine does nothing; then it goes on"
    async def all_():
        engine.held = True
        posts = []
        for body in [{"prompt": "low", "max_tokens": 1}]*QUEUED + list(more):
            posts.append(asyncio.ensure_future(web.post(PLAIN, json=body)))
            n = engine.taken + 1
            while engine.taken < n: await asyncio.sleep(0)
        engine.held, engine.now = False, engine.now + 1
        return [await o for o in posts]
    return asyncio.run(all_())

def test_a_wrong_grammar_displaces_nobody(engine, web):
    replies = full_queue(engine, web, {"prompt": "high", "priority": 5, "regex": "("})
    assert [r.status_code for r in replies] == [200]*QUEUED + [400] and "regex" in replies[-1].text

def test_who_is_displaced_may_try_again(engine, web):
    replies = full_queue(engine, web, {"prompt": "high", "priority": 5, "max_tokens": 1})
    assert [r.status_code for r in replies] == [200]*(QUEUED - 1) + [503, 200]
    r = replies[QUEUED - 1]
    assert (r.headers["retry-after"] == "1" and "displaced" in r.text
            and r.json()["error"]["code"] == "queue_full")

def test_who_waits_too_long_may_try_again(engine, web):
    engine.now = 0.
    async def late():
        engine.held = True
        posts = [asyncio.ensure_future(web.post(PLAIN, json={"prompt": "x", "stream": o}))
                 for o in (False, True)]
        while engine.taken < 2: await asyncio.sleep(0)
        engine.held, engine.now = False, 99.
        return [await o for o in posts]
    for r in asyncio.run(late()):
        assert (r.status_code, r.headers["retry-after"]) == (503, "1") and "queue_timeout=60" in r.text

def test_a_failure_later_is_ours(tokenizer):
    "Only what never ran may simply be sent again"
    engine = InProcess(tokenizer, run_timeout=5.)
    s = engine.scheduler
    s.add("a", [1, 2], SamplingParams(ignore_eos=True))
    outputs = [*s.step()]
    engine.now = 9.
    while s.has_work: outputs += s.step()
    assert (outputs[-1].finish_reason, outputs[-1].never_ran) == (FinishReason.ERROR, False)


# -- chat templates ------------------------------------------------------------------------------

@pytest.mark.parametrize("template", ["{{ 'a'*300000000 }}", "{{ 1/0 }}", "{% if %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                                      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
                                      "{{ nothing.at.all }}", "{{ " + "("*5000, "{# long #}"*150_000])
def test_a_broken_template_is_the_checkpoints_fault(checkpoint, template):
    tok = Tokenizer(checkpoint(template))
    assert tok.template_problem.startswith("the chat template of this checkpoint cannot be used: ")
    web = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(InProcess(tok), tok)),
                            base_url="http://here")
    for path, more in [(CHAT, {}), (CHAT, {"stream": True}), ("/tokenize", {})]:
        r = post(web, path, messages=say("hi"), **more)
        assert r.status_code == 400 and "of this checkpoint cannot be used" in r.text
    assert post(web, PLAIN, prompt="x", max_tokens=1).status_code == 200

def test_a_template_that_fails_on_some_messages(checkpoint):
    tok = Tokenizer(checkpoint("{{ 1 / (messages | length - 2) }}{% if messages[0].content == 'no' %}{{ "
                               "raise_exception('never') }}{% endif %}"))
    web = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(InProcess(tok), tok)),
                            base_url="http://here")
    said = [post(web, CHAT, messages=say(*o), max_tokens=1) for o in (["a"], ["a", "b"], ["no"])]
    assert [r.status_code for r in said] == [200, 400, 400]
    assert ("of this checkpoint fails on these messages: ZeroDivisionError" in said[1].text
            and "refuses these messages: never" in said[2].text)


def test_a_template_that_is_slow_on_some_messages_renders_in_a_thread(checkpoint, monkeypatch):
    "The event loop gives it a twentieth of a second"
    tok = Tokenizer(checkpoint("{% if messages[0].content == 'slow' %}" + "{% for i in range(99999) %}"*2
                               + "{% endfor %}"*2 + "{% endif %}x"))
    web = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(InProcess(tok), tok)),
                            base_url="http://here")
    seen, render = [], type(tok.chat_template).render
    def noted(self, *args):
        if len(args) < 5: return render(self, *args)   # to find the control tokens
        seen.append((threading.current_thread() is threading.main_thread(), args[-1]))
        # what a thread has is too long for a test
        return render(self, *args) if args[-1] < RENDER_S else "x"
    monkeypatch.setattr(type(tok.chat_template), "render", noted)
    assert post(web, "/tokenize", messages=say("quick")).status_code == 200 and seen == [(True, .05)]
    seen.clear()
    assert post(web, "/tokenize", messages=say("slow")).status_code == 200
    assert seen == [(True, .05), (False, RENDER_S)]


# -- what takes long -----------------------------------------------------------------------------

MEMORY = ("""
import asyncio, sys
from pathlib import Path
from fastapi import Request
from minisgl_lit.config import EngineConfig
from minisgl_lit.assembly import ResolvedConfig
from minisgl_lit.server.callers import Account
from minisgl_lit.server.middleware import trim_memory
from minisgl_lit.server.tokenizing import AsyncTokenizer
from minisgl_lit.text.tokenizer import Tokenizer
def mb(): return int(Path('/proc/self/statm').read_text().split()[1]) * 4096 / 1e6
async def waits(): await asyncio.Event().wait()
def caller(i): return Request({'type': 'http', 'client': (f'10.0.0.{i}', 1), 'headers': [], 'state': {'account': Account()}}, waits)
async def main():
    t = AsyncTokenizer(Tokenizer(ResolvedConfig.of(EngineConfig()).path))
    text = 'the quick brown fox ' * 50_000
    for _ in range(2): await t.ids(caller(0), [text])
    await trim_memory(0)
    before = mb()
    waiting = asyncio.gather(*(t.ids(caller(i), [text]) for i in range(6)))
    turns, most = 0, 0
    while not waiting.done():
        await asyncio.sleep(.01)
        turns, most = turns + 1, max(most, mb())
    del waiting
    await trim_memory(.05)
    print(turns, most - before, mb() - before)
asyncio.run(main())
""")   # noqa: E501

@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_of_long_texts_comes_back():
    """Six texts of a million characters, two at a time; meanwhile the loop turns, and afterwards the memory
    is the system's again"""
    said = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=120,
                          check=True)
    turns, most, kept = map(float, said.stdout.split())
    assert turns > 50 and most < 700 and kept < 50, said.stdout
