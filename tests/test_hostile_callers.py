"""What one caller sends takes nothing from another: shares by weight, limits, names of requests, and keys
that nobody sees.

Work is counted in tokens and steps; nothing is timed.
"""
import asyncio, json, logging
from argparse import Namespace
from concurrent.futures import Future
from itertools import combinations
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit import serve
from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config_sources import from_args
from minisgl_lit.config import EngineConfig
from minisgl_lit.server.config import ServerConfig
from minisgl_lit.core.request import Caller, PendingReq
from minisgl_lit.core.sampling_params import QueueFull, RequestError
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.rules.fairness import FairOrder, VirtualTokenCounters
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.server.api_server import Api, create_app
from minisgl_lit.server.callers import Account, Callers, RateLimitError
from minisgl_lit.loop.engine_core import EngineCore
from minisgl_lit.loop.messages import UserMsg, decode, encode
from minisgl_lit.server.native_protocol import AbortRequest
from minisgl_lit.server.protocol import ApiError
from minisgl_lit.testing.toy_engine import ToyEngine
from test_contract import Scripted, tokenizer   # noqa: F401   a fixture

VOCAB, MAX_SEQ_LEN, ROWS = 13, 24, 3

def server(policy="fair", **config):
    "A scheduler on a toy engine"
    config = EngineConfig(**dict(policy=policy, page_size=4, max_running_req=ROWS, max_prefill_tokens=32,
                                 overlap=False, seed=0, cache="none") | config)
    table = TableManager(config.max_running_req, MAX_SEQ_LEN, 4, dummy_page=60)
    engine = ToyEngine(table.page_table, table.token_pool, 4, 60, VOCAB)
    return Scheduler(engine, CacheManager(60, table, make_prefix_cache(config.cache, 4)), VOCAB, float,
                     config)

def ask(s, rid, caller, n_prompt=4, n_answer=4, prompt=None, **params):
    return s.add(rid, prompt or [int(o) for o in np.arange(n_prompt) % VOCAB],
                 SamplingParams(max_tokens=n_answer, ignore_eos=True, temperature=0, **params), caller)

def finish(s):
    while s.has_work: s.step()
    s.self_check()

def cost(o):
    "What was computed for a request, as the paper counts it"
    return ((o.input_len - o.cached_tokens)*FairOrder.prompt_cost
            + (o.n_tokens - o.input_len)*FairOrder.output_cost if "scheduled" in o.times else 0.)

def worst_gap(s, asked, max_steps=250):
    """While all callers wait: the most that one was ever served ahead of another, by weight, in any stretch
    of time. And how much was served."""
    served = []
    while True:
        s.step()
        if not asked.keys() <= {o.caller for o in s.prefill.waiting.values()} or len(served) == max_steps:
            break
        served.append([sum(map(cost, requests)) / caller.weight for caller, requests in asked.items()])
    ahead = [[row[i] - row[j] for row in served] for i, j in combinations(range(len(asked)), 2)]
    return max((max(o) - min(o) for o in ahead if o), default=0.), sum(served[-1]) if served else 0.

def bound(weights):
    return 2*max(FairOrder.prompt_cost*MAX_SEQ_LEN, FairOrder.output_cost*ROWS*MAX_SEQ_LEN) / min(weights)

# prompt, answer, weight
kinds = st.tuples(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1., 1., .5, 3.]))

@settings(max_examples=6)
@given(st.lists(kinds, min_size=2, max_size=4), st.booleans(), st.sampled_from(["none", "radix"]), st.data())
def test_the_bound_of_the_paper(callers, overlap, cache, data):
    """Of callers that wait all the time none is served further ahead of another than 2 max(w_p L, w_q M),
    whatever they ask for"""
    s, asked = server(overlap=overlap, cache=cache, mixed_chunk=data.draw(st.booleans())), {}
    for i, (n_prompt, n_answer, weight) in enumerate(callers):
        caller = Caller(f"c{i}", weight=weight)
        asked[caller] = [ask(s, f"{i}-{k}", caller, n_prompt, n_answer, priority=i) for k in range(40)]
    gap, _ = worst_gap(s, asked)
    assert gap <= bound([o[2] for o in callers]), (gap, callers)

def two_callers(policy):
    "One sends long requests, and another, after it, many short ones"
    s, asked = server(policy), {}
    for name, n_answer in (("long", 20), ("short", 2)):
        asked[Caller(name)] = [ask(s, f"{name}{k}", Caller(name), n_answer=n_answer) for k in range(60)]
    return worst_gap(s, asked)

def test_other_orders_have_no_bound():
    for policy in ("fcfs", "lof"): assert two_callers(policy)[0] > 2*bound([1.]), policy
    gap, served = two_callers("fair")
    assert gap <= bound([1.]) / 2 < served / 5, (gap, served)

def steps_to_start(policy, n_before=200):
    "Steps until one request starts that came after many of another caller"
    s = server(policy)
    for i in range(n_before): ask(s, str(i), Caller("flood"), n_answer=8)
    for _ in range(4): s.step()
    one = ask(s, "one", Caller("one"))
    before = s.launched
    while "scheduled" not in one.times: s.step()
    return s.launched - before

def test_two_hundred_requests_of_one_caller_do_not_keep_another_waiting():
    assert steps_to_start("fcfs") > 400   # as long as the other's requests take
    assert steps_to_start("fair") <= 10   # until a row is free

def test_nothing_is_held_back():
    "A caller alone, or with an idle one, is served as fast as ever; so are all together"
    def steps(policy, *names):
        s = server(policy)
        for i in range(40): ask(s, str(i), Caller(names[i % len(names)]), n_answer=1 + i % 5)
        finish(s)
        return s.launched
    for names in (("a",), ("a", "b"), ("a", "b", "c")):
        assert steps("fair", *names) <= steps("fcfs", *names) + 2

def test_who_was_idle_has_nothing_saved_up():
    s = server()
    for i in range(40): ask(s, f"early{i}", Caller("early"))
    for _ in range(30): s.step()
    asked = {Caller("early"): list(s.alive.values())}
    asked[Caller("late")] = [ask(s, f"late{i}", Caller("late")) for i in range(40)]
    gap, served = worst_gap(s, asked)
    assert gap <= bound([1.]) / 2 and served > 200, (gap, served)

def test_a_pause_does_not_forgive_and_invented_users_get_no_more():
    s = server()
    for i in range(60):
        ask(s, f"a{i}", Caller("a", f"invented {i}"))
        ask(s, f"b{i}", Caller("b"))
    asked = {name: [o for o in s.alive.values() if o.caller.name == name] for name in "ab"}
    for _ in range(40): s.step()
    a, b = (sum(map(cost, asked[name])) for name in "ab")
    assert abs(a - b) <= bound([1.]) / 2 and a > 100

def test_users_share_what_their_caller_has():
    s, asked = server(), {}
    for user, n in (("x", 12), ("y", 1)):
        asked[Caller("a", user)] = [ask(s, f"{user}{i}", Caller("a", user), n_answer=n) for i in range(80)]
    for i in range(80): ask(s, f"b{i}", Caller("b"))
    gap, served = worst_gap(s, asked)
    assert gap <= bound([1.]) / 2 < served / 2, (gap, served)

def test_starts_alternate_within_a_pass():
    waiting, started = ([PendingReq(f"{name}{i}", np.arange(4), SamplingParams(), 9, caller=Caller(name))
                         for name in "ab" for i in range(3)], [])
    for o in FairOrder().order(waiting, {o: i for i, o in enumerate(waiting)}):
        o.req = object()
        started.append(o.rid)
    assert started == ["a0", "b0", "a1", "b1", "a2", "b2"]

def test_an_empty_queue_sets_nobody_back():
    "One was served alone, and all have gone; then it comes again, together with a new one"
    s, asked = server(), {}
    for i in range(30): ask(s, f"before{i}", Caller("old"))
    finish(s)
    for name in ("old", "new"): asked[Caller(name)] = [ask(s, f"{name}{i}", Caller(name)) for i in range(20)]
    gap, served = worst_gap(s, asked)
    assert gap <= bound([1.]) / 2 and served > 200, (gap, served)

def test_who_pays_what():
    """Prompts as far as they are computed, answers twice, once, and over the weight; what has ended is let go
    of"""
    s = server(cache="radix")
    fairness = s.prefill.policy.inner.fairness
    def paid(rid, n_answer, caller):
        before = fairness.callers.served.get(caller.name, 0.)
        ask(s, rid, caller, prompt=[1]*12, n_answer=n_answer)
        finish(s)
        list(s.prefill.policy.order([]))
        return fairness.callers.served[caller.name] - before
    assert paid("cold", 3, Caller("a")) == 12 + 3*2
    assert paid("warm", 3, Caller("a")) == (12 - 8) + 3*2   # two pages are found, the last is computed again
    assert paid("heavy", 3, Caller("a", weight=2.)) == ((12 - 8) + 3*2)/2
    assert fairness.users["a"].served[""] == 18 + 10 + 10 and not fairness._charged

def test_counters_are_bounded():
    counters = VirtualTokenCounters()
    for i in range(10_000):
        counters.lift([str(i)], set())
        counters.add(str(i), 1)
    assert len(counters.served) <= counters.max_idle + 2
    order = FairOrder()
    for i in range(3000):
        one = PendingReq(str(i), np.array([1]), SamplingParams(), 2, caller=Caller(str(i)))
        list(order.order([one], {one: 0}))
    assert (len(order.callers.served) <= counters.max_idle + 2
            and len(order.users) <= len(order.callers.served))

# ---- a queue that is full, and priorities

def test_no_caller_can_fill_the_queue():
    for policy, admitted in (("fcfs", False), ("fair", True)):
        s = server(policy, max_queued_req=8)
        for i in range(8): ask(s, f"flood{i}", Caller("flood"))
        with pytest.raises(QueueFull): ask(s, "more", Caller("flood"))
        if not admitted:
            with pytest.raises(QueueFull): ask(s, "one", Caller("one"))
            continue
        for i in range(4): ask(s, f"one{i}", Caller("one"))
        displaced = [o for o in s.step() if o.error]
        assert [o.rid for o in displaced] == ["flood7", "flood6", "flood5", "flood4"]
        assert "a caller with fewer waiting requests" in displaced[0].error
        finish(s)

def test_who_cannot_be_served_displaces_nobody():
    def no_grammar(pending): raise RequestError("regex", "no such grammar")
    s = server(max_queued_req=1)
    s.rules = TextRules(make_grammar=no_grammar)
    ask(s, "innocent", Caller())
    with pytest.raises(RequestError, match="no such grammar"):
        ask(s, "wrong", Caller("b"), regex="x", priority=9)
    assert [o.rid for o in s.step() if o.error] == [] and "innocent" in s.alive

@pytest.mark.parametrize("policy, retracted", [("fcfs", 1), ("fair", 0)])
def test_a_priority_preempts_nobody_elses_request(policy, retracted):
    s = server(policy, max_running_req=1, preempt_threshold=0)
    ask(s, "a", Caller("a"), n_answer=9)
    s.step()
    ask(s, "b", Caller("b"), priority=99)
    for _ in range(3): s.step()
    assert s.counts["retracted"] == retracted
    finish(s)
    s = server(policy, max_running_req=1, preempt_threshold=0)   # one's own it does
    ask(s, "a", Caller("a"), n_answer=9)
    s.step()
    ask(s, "b", Caller("a"), priority=99)
    for _ in range(3): s.step()
    assert s.counts["retracted"] == 1

@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_lower_numbers_go_first_if_wanted(policy):
    for lower_first, expected in ((False, ["2", "0", "-3"]), (True, ["-3", "0", "2"])):
        s = server(policy, max_running_req=1, schedule_low_priority_values_first=lower_first)
        for priority in (0, 2, -3): ask(s, str(priority), Caller(), priority=priority)
        started, ended = list(s.alive.values()), []
        while s.has_work: ended += [o.rid for o in s.step() if o.finish_reason]
        assert ended == expected and len(started) == 3

# ---- over HTTP

KEYS = """
[alice]
key = "k-alice-0123456789"
weight = 2
requests_per_minute = 3
tokens_per_minute = 40
[bob]
key = "k-bob-0123456789ab"
"""

class Hears(Scripted):
    "Also notes whose requests come"
    def __init__(self, tokenizer): super().__init__(tokenizer); self.requests = []
    def stream(self, requests):
        self.requests += requests
        return super().stream(requests)

@pytest.fixture
def web(tokenizer, tmp_path):   # noqa: F811
    "A way to call a server with a file of keys and an admin"
    file = tmp_path/"keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    config = ServerConfig(api_keys=str(file), admin_key="operator")
    engine, now = Hears(tokenizer), [0.]
    callers = Callers.from_config(config)
    for account in callers._by_digest.values():
        for bucket in account.buckets.values(): bucket.clock, bucket._at = lambda: now[0], 0.
    app = create_app(engine, tokenizer, vars(config), callers)
    def call(path, key="k-bob-0123456789ab", method="POST", **body):
        async def one():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                return await client.request(method, path, json=body if method == "POST" else None,
                                            headers={"authorization": f"Bearer {key}"})
        return asyncio.run(one())
    call.engine, call.now, call.file = engine, now, file
    return call

ROUTES = {"/v1/completions": dict(prompt="SAY:hi"), "/generate": dict(text="SAY:hi"),
          "/v1/chat/completions": dict(messages=[dict(role="user", content="SAY:hi")]),
          "/v1/responses": dict(input="SAY:hi")}

def test_a_request_says_whose_it_is(web):
    for path, body in ROUTES.items():
        assert web(path, user="eve", **body).status_code == 200
        assert web.engine.requests[-1].caller == Caller("bob", "eve", 1.)
        assert web(path, "k-alice-0123456789", **body).status_code == 200
        assert web.engine.requests[-1].caller == Caller("alice", "", 2.)
        r = web(path, user="x"*300, **body)
        assert (r.status_code, r.json()["error"]["param"]) == (400, "user")
        web.now[0] += 600

def test_the_caller_travels_to_the_scheduler():
    s = server()
    message = decode(encode(UserMsg("a", np.array([1, 2]), SamplingParams(max_tokens=2),
                                    Caller("alice", "eve", 2.5))))
    assert EngineCore(s).handle(message) is None
    assert s.alive["a"].caller == Caller("alice", "eve", 2.5)

def test_limits_by_the_minute(web):
    alice = "k-alice-0123456789"
    body = dict(prompt="SAY:hi", max_tokens=2)   # six tokens of prompt, two of answer
    left = [web("/v1/completions", alice, **body).headers["x-ratelimit-remaining-tokens"] for _ in range(3)]
    assert left == ["32", "24", "16"]
    r = web("/v1/completions", alice, **body)
    assert ((r.status_code, r.json()["error"]["code"], r.headers["retry-after"])
            == (429, "rate_limit_exceeded", "21"))
    assert {k: v for k, v in r.headers.items() if "limit" in k} == {
        "x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s", "x-ratelimit-limit-tokens": "40",
        "x-ratelimit-remaining-tokens": "16", "x-ratelimit-reset-tokens": "36.000s"}
    assert len(web.engine.requests) == 3
    assert web("/v1/models", alice, "GET").status_code == 200   # to ask how things are costs nothing
    assert web("/v1/completions", **body).status_code == 200    # and bob has no limits
    web.now[0] = 21.
    # more than there is: a debt
    assert web("/v1/completions", alice, prompt="SAY:" + "x"*60, max_tokens=50).status_code == 200
    web.now[0] = 60.
    r = web("/v1/completions", alice, **body)
    assert r.status_code == 429 and "alice may have 40 tokens a minute" in r.json()["error"]["message"]
    assert "x-ratelimit-limit-requests" not in web("/v1/completions", **body).headers

def test_refused_requests_take_no_tokens(web):
    alice = "k-alice-0123456789"
    assert web("/v1/completions", alice, prompt="SAY:hi", max_tokens=-1).status_code == 400
    assert (web("/v1/completions", alice, prompt="SAY:hi",
                max_tokens=1).headers["x-ratelimit-remaining-tokens"] == "33")

OPERATIONS = "/pause_generation", "/continue_generation", "/flush_cache", "/start_profile", "/stop_profile"

def test_operations_are_the_admins(web):
    for path in OPERATIONS:
        r = web(path)
        assert (r.status_code, "admin_key" in r.json()["error"]["message"]) == (403, True), path
        assert web(path, "guess").status_code == 401
        for variant in (path + "/", path + "%0A", path.upper(), "/" + path):
            assert web(variant).status_code in (307, 403, 404, 405), variant
    assert web("/abort_request", abort_all=True).status_code == 403
    assert web.engine.orders == []
    for path in OPERATIONS: assert web(path, "operator").status_code == 200
    assert web("/abort_request", "operator", abort_all=True).status_code == 200
    assert [o for o, _ in web.engine.orders] == ["pause", "resume", "flush_cache", "profile_start",
        "profile_stop", "abort"]

def test_one_key_or_none(tokenizer):   # noqa: F811
    "With the one api_key operations need the admin's, too; without keys they are open as ever"
    def statuses(callers, key):
        engine, found = Hears(tokenizer), []
        async def all_of_them():
            transport = httpx.ASGITransport(create_app(engine, tokenizer, {}, callers))
            async with httpx.AsyncClient(transport=transport, base_url="http://x",
                                         headers={"authorization": f"Bearer {key}"}) as client:
                for path in OPERATIONS: found.append((await client.post(path)).status_code)
                for body in (dict(abort_all=True), dict(rid="*"), dict(rid="a*"), dict(rid="a")):
                    found.append((await client.post("/abort_request", json=body)).status_code)
        asyncio.run(all_of_them())
        return found, [o for o in engine.orders if o[0] == "abort"]
    keyed, admin_only = ServerConfig(api_key="k", admin_key="operator"), ServerConfig(admin_key="operator")
    assert statuses(Callers.from_config(keyed), "k") == ([403]*8 + [200], [("abort", "default/a")])
    assert statuses(Callers.from_config(ServerConfig(api_key="k")), "k")[0][:6] == [403]*6   # nobody may
    assert statuses(Callers.from_config(admin_only), "") == ([403]*8 + [200], [("abort", "a")])
    assert statuses(None, "")[0] == [200]*9

def test_nobody_aborts_or_takes_the_names_of_others(web):
    for key, name in (("k-bob-0123456789ab", "bob"), ("k-alice-0123456789", "alice")):
        assert web("/generate", key, text="SAY:hi", rid="mine").json()["meta_info"]["id"] == "mine"
        assert web.engine.requests[-1].rid == f"{name}/mine"
    for rid in ("mine", "*", "alice/mine", "../alice/mine"):
        assert web("/abort_request", rid=rid).status_code == 200
    assert web.engine.orders == [("abort", "bob/mine"), ("abort", "bob/*"), ("abort", "bob/alice/mine"),
                                 ("abort", "bob/../alice/mine")]
    assert (web("/abort_request", "operator", rid="alice/mine").status_code == 200
            and web.engine.orders[-1] == ("abort", "alice/mine"))

def test_nobody_reads_or_goes_on_with_the_answers_of_others(web):
    said = web("/v1/responses", input="SAY:hi").json()
    path, alice = f"/v1/responses/{said['id']}", "k-alice-0123456789"
    for r in (web(path, alice, "GET"), web(path, alice, "DELETE"),
              web("/v1/responses", alice, input="x", previous_response_id=said["id"]),
              web("/v1/responses", alice, input=[dict(type="item_reference", id=said["output"][0]["id"])])):
        assert r.status_code == 404
    assert web(path, method="GET").json() == said
    assert web("/v1/responses", input="x", previous_response_id=said["id"]).status_code == 200
    assert web(path, method="DELETE").json()["deleted"] and web(path, method="GET").status_code == 404

def test_keys_of_other_clients(web):
    "Anthropic's clients send theirs in `x-api-key`"
    assert (web("/v1/messages", "wrong", max_tokens=9,
        messages=[dict(role="user", content="SAY:hi")]).json()["error"]["type"] == "authentication_error")

def test_a_star_reaches_nobody_elses_requests():
    "With one key for all, or none beside an admin's, a prefix would be one of everybody's names"
    for account, allowed in ((Account('alice'), True), (Account('default', is_shared=True), False),
                             (Account(is_shared=True), False),
                             (Account(is_admin=True, is_shared=True), True)):
        asked = []
        async def control(command, argument): asked.append(argument)
        app, request = (SimpleNamespace(operations=SimpleNamespace(control=control)),
                        SimpleNamespace(state=SimpleNamespace(account=account)))
        for rid in ('*', 'a*', 'a'):
            abort = Api.abort_request(app, AbortRequest(rid=rid), request)
            if allowed or rid == 'a': asyncio.run(abort)
            else:
                with pytest.raises(ApiError, match='admin_key'): asyncio.run(abort)
        assert len(asked) == (3 if allowed else 1)

def test_nobody_sees_a_key(web, caplog):
    secrets = "k-alice-0123456789", "k-bob-0123456789ab", "operator"
    with caplog.at_level(logging.DEBUG):
        texts = [r.text + str(r.headers) for key in (*secrets, "guess-0123456789")
                 for r in (web("/get_server_info", key, "GET"), web("/v1/models", key, "GET"),
                           web("/generate", key, text="SAY:hi", rid=3), web("/flush_cache", key))]
    said = "".join(texts) + caplog.text
    assert '"running"' in said and len(caplog.records) >= 16
    for secret in (*secrets, "guess-0123456789", str(web.file)): assert secret not in said

def test_a_server_starts_with_right_keys_only(tmp_path, monkeypatch):
    file = tmp_path/"keys.json"
    for entries, why in (({"a": {"key": "0123456789abcdef", "limit": 3}}, "caller a: .*limit"),
                         ([], "must name at least one"),
                         ({"a": {"key": "0123456789abcdef"}, "b": {"key": "0123456789abcdef"}},
                          "a and b have the same key")):
        file.write_text(json.dumps(entries))
        file.chmod(0o600)
        with pytest.raises(ValueError, match=why) as said: serve(port=0, api_keys=str(file))
        assert "0123456789" not in str(said.value)
    with pytest.raises(ValueError, match="give one of them"): serve(port=0, api_keys=str(file), api_key="k")
    file.write_text(json.dumps({"a": {"key": "0123456789abcdef"}}))
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="other users of this machine may read"):
        callers = Callers.from_config(ServerConfig(api_keys=str(file)))
    assert (callers.identify(b"bEaReR 0123456789abcdef").name == "a"
            and callers.identify(b"Bearer 0123456789abcdeF") is None)
    monkeypatch.setenv("MINISGL_LIT_ADMIN_KEY", " operator\n")
    assert from_args(ServerConfig, Namespace()).admin_key == "operator"

def test_an_account_without_limits_counts_nothing():
    account = Account("a")
    for _ in range(3): account.admit()
    account.take_tokens(10**9)
    account.admit()
    assert account.limit_headers == {}
    with pytest.raises(RateLimitError, match="b may have 1 requests"):
        limited = Account("b", requests_per_minute=1)
        for _ in range(2): limited.admit()

def test_a_caller_who_waited_for_a_grammar_is_still_the_same():
    "Late or aborted, a request that is added at last is its caller's: shares and limits are counted on"
    s, compiling, caller = server(), Future(), Caller("a", weight=2.)
    s.rules = TextRules(make_grammar=lambda pending: None)
    core = EngineCore(s, lambda params: compiling if params.grammars else None)
    queue = core.grammar_queue
    for rid in ("waits", "leaves"): queue.add(UserMsg(rid, np.array([1]), SamplingParams(regex="a"), caller))
    queue.abort("leaves")
    compiling.set_result(None)
    callers = {}
    for message in queue.ready():
        core.handle(message)
        callers |= {o.rid: o.caller for o in s.alive.values()}
    assert callers == dict(waits=caller, leaves=caller) and [*s.alive] == ["waits"]
