"""Many threads on one driver: streams read to the end, left halfway, forgotten; lists; an engine that fails
once."""
import os, random, re, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from minisgl_lit import LLM
from minisgl_lit.text.answer_rules import TextRules
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import FinishReason
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import InlineStream, WorkerStream
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.core.kv_cache.radix import make_prefix_cache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.engine_driver import EngineDriver
from minisgl_lit.loop.engine_core import EngineCore
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.testing.toy_engine import ToyEngine, expected_output
from minisgl_lit.text.tokenizer import TextStopChecks

VOCAB = 50


class Letters:
    "A tokenizer whose tokens are letters."
    backend, byte_level = None, True   # no grammars here
    def decode(self, ids, skip_special_tokens=True): return "".join(chr(65 + i) for i in ids)
    def decode_first(self, token, skip_special_tokens=True): return chr(65 + token)
    def special_ids(self, texts): return {}


def toy_driver(overlap, rows=3, pages=24, queued=4, delay=0.0, driver=EngineDriver):
    table = TableManager(rows, 48, page_size=4, dummy_page=pages)
    stream = WorkerStream() if overlap else InlineStream()
    engine = ToyEngine(table.page_table, table.token_pool, 4, pages, VOCAB, stream, delay=delay)
    cache = CacheManager(pages, table, make_prefix_cache("radix", 4))
    scheduler = Scheduler(engine, cache, VOCAB, float, EngineConfig(max_queued_req=queued, overlap=overlap),
                          rules=TextRules(TextStopChecks(letters := Letters())))
    runtime = SimpleNamespace(scheduler=scheduler, core=EngineCore(scheduler), engine=engine,
                              close=stream.close, tokenizer=letters,
                              grammars=SimpleNamespace(validate=lambda params: None))
    return driver(runtime)


def prompt(rng): return rng.choices(range(3), k=rng.randint(1, 14))   # many begin alike
def expected(ids, n): return expected_output(ids, n, VOCAB)


def one_caller(driver, seed):
    "Twelve things that a caller may do; each answer is compared with what the toy gives alone."
    rng, errors = random.Random(seed), []
    for _ in range(12):
        n = rng.randint(0, 9)
        params, many = (SamplingParams(max_tokens=n, temperature=0),
                        [prompt(rng) for _ in range(rng.randint(1, 6))])
        what = rng.choice(["list", "stream", "leave", "forget", "stop"])
        if what == "list":
            outs = driver.collect(driver.make_requests(many, np.array, params), progress=False)
            errors += [o for o in outs if o.finish_reason is FinishReason.ERROR]
            assert [o.token_ids for o in outs if not o.error] == [expected(i, n)
                for i, o in zip(many, outs) if not o.error]
        elif what == "stop":
            want = expected(many[0], 9)
            stop = Letters().decode(want[3:5])
            params = SamplingParams(max_tokens=12, temperature=0, stop=stop)
            out, = driver.collect(driver.make_requests(many[:1], np.array, params), progress=False)
            if out.error: errors.append(out)
            else:
                assert (out.text == Letters().decode(want).split(stop)[0]
                        and out.finish_reason is FinishReason.STOP)
        else:
            stream = driver.read(*driver.make_requests(many[:1], np.array, params, streamed=True))
            if what == "stream": pieces = list(stream)
            else: pieces = [p for p, _ in zip(stream, range(rng.randint(0, n)))]   # and the stream is dropped
            if what == "leave": stream.close()
            if pieces and pieces[-1].error: errors.append(pieces[-1])
            else:
                assert ([i for p in pieces for i in p.token_ids]
                        == expected(many[0], n)[:sum(len(p.token_ids) for p in pieces)])
            del stream
    return errors


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_callers_do_not_mix(overlap, seed):
    driver = toy_driver(overlap)
    with ThreadPoolExecutor(4) as pool:
        errors = [*pool.map(lambda k: one_caller(driver, 10 * seed + k), range(4))]
    assert errors == [[]] * 4 and driver._open == {} and not driver._backlog
    driver.release([])
    driver.runtime.scheduler.self_check()
    driver.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_engine_is_told_and_forgotten(overlap):
    told = []
    for fail_at in (5, 7, 9):   # who is told may just have left
        driver = toy_driver(overlap)
        driver.runtime.engine.fail_at = fail_at
        with ThreadPoolExecutor(3) as pool:
            errors = sum(pool.map(lambda k: one_caller(driver, k), range(3)), [])
        assert all("the engine failed" in o.error for o in errors)
        assert one_caller(driver, 99) == []
        told += errors
        driver.release([])
        driver.runtime.scheduler.self_check()
        driver.close()
    assert told


def test_closing_wakes_those_who_wait():
    driver, told = toy_driver(True, delay=.002), []
    def reader():
        params = SamplingParams(max_tokens=40, temperature=0)
        with pytest.raises(RuntimeError, match="has been closed"):
            with closing(
                    driver.read(*driver.make_requests([[1]], np.array, params, streamed=True))) as stream:
                for piece in stream: told.append(piece)
    threads = [threading.Thread(target=reader) for _ in range(3)]
    for t in threads: t.start()
    while len(told) < 6 and all(t.is_alive() for t in threads): threading.Event().wait(.001)
    driver.close()
    for t in threads: t.join(5)
    assert not any(t.is_alive() for t in threads)


def test_a_list_longer_than_the_queue():
    driver = toy_driver(False, queued=2)
    prompts = [[k % VOCAB] for k in range(40)]
    params = SamplingParams(max_tokens=3, temperature=0)
    outs = driver.collect(driver.make_requests(prompts, np.array, params), progress=False)
    assert [o.token_ids for o in outs] == [expected(o, 3) for o in prompts]
    driver.close()


def test_closing_at_once_in_several_threads():
    "Only one closes, and none is told of it"
    driver, errors = toy_driver(False), []
    def close():
        try: driver.close()
        except Exception as e: errors.append(e)
    threads = [threading.Thread(target=close) for _ in range(3)]
    with driver.exclusive():
        for t in threads: t.start()
        while not driver._turnstile.locked(): threading.Event().wait(.001)
    for t in threads: t.join(5)
    assert driver.closed and errors == []


def failing(*args): raise ZeroDivisionError("a bug")


def test_an_engine_that_fails_while_it_is_closed_is_ended():
    driver = toy_driver(False)
    stream = driver.read(*driver.make_requests([[1]], np.array, SamplingParams(max_tokens=9, temperature=0),
                                               streamed=True))
    next(stream)
    driver.core.scheduler.step = failing
    with pytest.raises(ZeroDivisionError): driver.close()
    assert driver.closed and not driver._end_engine.alive


def without_weights(driver):
    driver.runtime.weights = driver.core.updates.weights = driver.core.memory.weights = SimpleNamespace(
        check=lambda path: None, load=lambda path: None, check_release=lambda parts: None,
                                             release=lambda parts: None, reload=lambda: None)
    return driver


def test_a_step_that_fails_loses_nobody_who_waits_for_room():
    "The queue is full, and the step raises: those that were refused for now are served all the same"
    driver, params, prompts = (toy_driver(False, queued=1), SamplingParams(max_tokens=5, temperature=0),
                               [[k] for k in range(9)])
    requests = driver.make_requests(prompts, np.array, params)
    driver.submit(requests)
    step, driver.core.scheduler.step = driver.core.scheduler.step, failing
    for _ in range(2):
        with pytest.raises(ZeroDivisionError): driver.wait(requests[0])
    driver.core.scheduler.step = step
    for _ in range(500):
        if all(o.output for o in requests): break
        driver._advance()
    assert [o.output and o.output.token_ids for o in requests] == [expected(o, 5) for o in prompts]
    driver.release(requests)
    driver.close()


def test_an_update_that_fails_holds_nobody():
    "New weights wait for what has begun; if that fails, those who waited meanwhile may start"
    driver, params = without_weights(toy_driver(False)), SamplingParams(max_tokens=9, temperature=0)
    stream = driver.read(*driver.make_requests([[1]], np.array, params, streamed=True))
    next(stream)
    step, driver.core.scheduler.step = driver.core.scheduler.step, failing
    with pytest.raises(ZeroDivisionError): driver.update_weights("other", None)
    driver.core.scheduler.step = step
    assert not driver.core.scheduler.prefill.held
    out, = driver.collect(driver.make_requests([[2]], np.array, params), progress=False)
    assert out.token_ids == expected([2], 9)
    driver.update_weights("other", None)
    driver.close()


def test_falling_asleep_has_an_end():
    "What runs and what waits is ended first; who comes meanwhile is told, however often"
    driver, params = without_weights(toy_driver(False, queued=2)), SamplingParams(max_tokens=5, temperature=0)
    prompts = [[k] for k in range(9)]
    waiting = driver.make_requests(prompts, np.array, params)
    driver.submit(waiting)
    step, refused = driver.core.scheduler.step, []
    def another():   # at each step another caller asks
        with pytest.raises(RuntimeError, match="falling asleep"):
            driver.submit(driver.make_requests([[1]], np.array, params))
        refused.append(1)
        return step()
    driver.core.scheduler.step = another
    driver.sleep({"kv_cache"})
    driver.core.scheduler.step = step
    assert refused and [o.output.token_ids for o in waiting] == [expected(o, 5) for o in prompts]
    with pytest.raises(RuntimeError, match="memory has been released"):
        driver.collect(driver.make_requests([[1]], np.array, params), progress=False)
    driver.control("resume_memory", "kv_cache weights")
    out, = driver.collect(driver.make_requests([[2]], np.array, params), progress=False)
    assert out.token_ids == expected([2], 5)
    driver.release(waiting)
    driver.runtime.scheduler.self_check()
    driver.close()


def test_released_before_it_was_opened():
    "One is submitted and released again while others are being released: no step opens it for nobody"
    driver, params = toy_driver(False), SamplingParams(max_tokens=30, temperature=0)
    one, two = driver.make_requests([[1], [2]], np.array, params, streamed=True)
    driver.submit([one])
    driver.wait(one)
    abort = driver.runtime.scheduler.abort
    def abort_and_come_and_go(rid):
        if rid == one.rid:
            driver.submit([two])
            driver._released.append(two.rid)
        return abort(rid)
    driver.runtime.scheduler.abort = abort_and_come_and_go
    driver.release([one])
    assert driver._open == {} and not driver._submitted
    driver.runtime.scheduler.self_check()
    driver.close()


def test_what_is_reserved_is_not_used():
    "The line at the start says both: weights are in memory, pages take it as they fill"
    def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    before = rss()
    with LLM(num_pages=100_000, device="cpu") as llm:
        told = str(llm.runtime.memory)
        assert llm.runtime.memory.kv > 2 * 2**30 and rss() - before < 300e6
        llm.generate("The page", SamplingParams(max_tokens=20, ignore_eos=True))
        assert rss() - before < 300e6
    assert re.match(r"weights [\d.]+ GiB in use, keys and values [\d.]+ GiB reserved, in use as they fill: "
                    r"100,000 pages of 16 tokens, ", told), told


def test_transformers_stays_out():
    "Importing it would take longer than everything else that a first answer needs."
    code = ("import sys\nfrom minisgl_lit import LLM, SamplingParams\n"
            "LLM(num_pages=9).generate(['The scheduler']*5, "
            "SamplingParams(max_tokens=2))\nprint('transformers' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # where there is no compiler
    said = [o for o in done.stderr.splitlines() if not o.startswith("Without native kernels")]
    assert (done.stdout, said) == ("False\n", [])   # and nothing is said that nobody has asked for
