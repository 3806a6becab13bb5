"""Many coroutines on one driver: streams read to the end, left, cancelled; several event loops; Ctrl-C; an
engine that fails; and what editors see."""
import asyncio, gc, json, random, signal, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from minisgl_lit.async_llm import AsyncEngineDriver, AsyncLLM
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.llm import LLM
from test_llm import expected, failing, prompt, toy_driver


def async_driver(overlap=False, **more): return toy_driver(overlap, driver=AsyncEngineDriver, **more)

async def idle(driver):
    "Wait until the thread has ended; every page is free or cached then"
    async with asyncio.timeout(20):
        while driver._runs or driver._released: await asyncio.sleep(.001)
    driver.runtime.scheduler.self_check()
    assert (driver._open, driver._waiting, *driver._backlog, *driver._submitted) == ({}, {})

async def read(driver, ids, n, most=None):
    "The tokens of a stream, left after `most` pieces"
    request, = driver.make_requests([ids], np.array, SamplingParams(max_tokens=n, temperature=0),
                                    streamed=True)
    got = []
    async with aclosing(driver.pieces(request)) as pieces:
        async for piece in pieces:
            assert not piece.error, piece.error
            got += piece.token_ids
            if most is not None and len(got) >= most: break
    return got

@pytest.mark.parametrize("overlap", [False, True])
def test_a_thousand_streams(overlap):
    "Each gets its own tokens, whoever leaves; a moment later nothing is left"
    rng = random.Random(7)
    async def one(driver, k):
        ids, n, how = prompt(rng), rng.randint(0, 6), rng.choice(["read", "read", "leave", "cancel", "list"])
        if how == "list":
            params = SamplingParams(max_tokens=n, temperature=0)
            out, = await driver.outputs(driver.make_requests([ids], np.array, params), False)
            return out.token_ids == expected(ids, n)
        most = rng.randint(1, 4) if how == "leave" else None
        task = asyncio.create_task(read(driver, ids, n, most))
        if how == "cancel":
            await asyncio.sleep(rng.random() / 20)
            task.cancel()
        got, = await asyncio.gather(task, return_exceptions=True)
        return (isinstance(got, asyncio.CancelledError) or got == expected(ids, n)[:len(got)]
                and (most is not None or len(got) == n))
    async def main():
        driver = async_driver(overlap, rows=40, pages=400, queued=64)
        assert all(await asyncio.gather(*(one(driver, k) for k in range(1000))))
        await idle(driver)
        driver.close()
    asyncio.run(main())

def test_event_loops_in_several_threads_and_one_after_the_other():
    driver, wrong = async_driver(rows=4), []
    async def main(seed):
        rng = random.Random(seed)
        asked = [(prompt(rng), rng.randint(1, 5)) for _ in range(30)]
        got = await asyncio.gather(*(read(driver, *o) for o in asked))
        wrong.extend(o for o, ids in zip(asked, got) if ids != expected(*o))
    threads = [threading.Thread(target=lambda k=k: asyncio.run(main(k))) for k in range(3)]
    for t in threads: t.start()
    for t in threads: t.join(30)
    asyncio.run(main(4))
    assert not wrong
    asyncio.run(idle(driver))
    driver.close()

def test_ctrl_c_ends_the_program_and_frees_the_requests():
    driver = async_driver(delay=.002)
    async def main():
        asyncio.get_running_loop().call_later(.05, signal.raise_signal, signal.SIGINT)
        await asyncio.gather(*(read(driver, [1, 2], 40) for _ in range(8)))
    with pytest.raises(KeyboardInterrupt): asyncio.run(main())
    asyncio.run(idle(driver))
    assert asyncio.run(read(driver, [1], 3)) == expected([1], 3)
    driver.close()

def test_closing_tells_all_who_wait():
    async def main():
        driver = async_driver(delay=.002)
        tasks = [asyncio.create_task(read(driver, [1], 40)) for _ in range(5)]
        await asyncio.sleep(.02)
        await asyncio.to_thread(driver.close)
        for e in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(e, RuntimeError) and "has been closed" in str(e)
        with pytest.raises(RuntimeError, match="has been closed"): await read(driver, [1], 1)
    asyncio.run(main())

def test_an_engine_that_fails_while_it_is_closed():
    "Who waits is told all the same"
    async def main():
        driver = async_driver(delay=.002)
        tasks = [asyncio.create_task(read(driver, [1], 40)) for _ in range(3)]
        while len(driver._waiting) < 3: await asyncio.sleep(.001)
        reached, gate, has_work = threading.Event(), threading.Event(), driver._has_work
        # the thread is between two steps then
        driver._has_work = lambda: reached.set() or gate.wait(5) and has_work()
        while not reached.is_set(): await asyncio.sleep(.001)
        driver.runtime.scheduler.abort_all = failing
        with pytest.raises(ZeroDivisionError): await asyncio.to_thread(driver.close)
        gate.set()
        for e in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(e, RuntimeError) and "has been closed" in str(e)
    asyncio.run(asyncio.wait_for(main(), 10))

def test_a_failing_engine_is_told_and_forgotten():
    async def main():
        driver = async_driver(True)
        driver.runtime.engine.fail_at = 5
        told = await asyncio.gather(*(read(driver, [1, k], 9) for k in range(3)), return_exceptions=True)
        assert any("the engine failed" in str(o) for o in told)
        assert await read(driver, [1], 3) == expected([1], 3)
        await idle(driver)
        driver.close()
    asyncio.run(main())

def left(llm):
    "Nothing is left of any request: each page is free or cached"
    pages = llm.runtime.scheduler.stats()["pages"]
    assert (pages["held"] == pages["protected"] == 0
            and pages["free"] + pages["evictable"] == pages["total"]), pages

CALLS = dict(
    chat=lambda llm: texts(llm.chat(["Count from 3 to 5"], temperature=0)),
    many=lambda llm: texts(llm.generate(["The page", "A lock", "The page"], max_tokens=3, temperature=0)),
    json=lambda llm: llm.chat("What is 3 plus 4?", json_schema=int, temperature=0),
    embed=lambda llm: llm.embed(["A page", "A lock"]),
    stream=lambda llm: whole(llm.stream("The page", max_tokens=4, temperature=0)),
    stats=lambda llm: llm.stats(), sleep=lambda llm: llm.sleep(), wake=lambda llm: llm.wake())

async def texts(call): return [answer.text for answer in await call]
async def whole(stream): return "".join([piece.text async for piece in stream])

@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sleep needs Linux")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")   # cancelled before its first line
def test_cancelled_at_every_await(long):
    """After so many turns of the event loop the caller is cancelled, wherever it is then; nothing hangs, and
    nothing is left"""
    moments = (0, 1, 2, 3, 5, 10, 30, 100) if long else (0, 2, 5, 30)
    async def main():
        loop, spare = asyncio.get_running_loop(), ThreadPoolExecutor(2)
        async def cancelled(call, turns):
            with ThreadPoolExecutor(4) as threads:   # what they do is over at the end of the block
                loop.set_default_executor(threads)
                task = asyncio.create_task(call)
                for _ in range(turns): await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            loop.set_default_executor(spare)
        async with AsyncLLM(num_pages=32, max_seq_len=64) as llm:
            want = [await CALLS[name](llm) for name in ("chat", "many", "stream")]
            for name, call in CALLS.items():
                for turns in moments:
                    await cancelled(call(llm), turns)
                    await idle(llm._driver)
                    await llm.wake()   # a model that falls asleep goes on to do so when its caller has left
                    left(llm)
            assert [await CALLS[name](llm) for name in ("chat", "many", "stream")] == want
        spare.shutdown()
    asyncio.run(asyncio.wait_for(main(), 60))

def test_left_by_an_exception():
    "What the body of `async for` raises ends the request; so does what a neighbour in a group raises"
    async def reads(llm):
        async for piece in llm.stream("The page", max_tokens=60, ignore_eos=True): raise LookupError("mine")
    async def waits(llm): await llm.generate(["The page"] * 3, max_tokens=60, ignore_eos=True)
    async def main():
        async with AsyncLLM(num_pages=32, max_seq_len=64) as llm:
            with pytest.raises(LookupError, match="mine"): await reads(llm)
            await idle(llm._driver)
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    for _ in range(3): group.create_task(waits(llm))
                    group.create_task(reads(llm))
            await idle(llm._driver)
            left(llm)
    asyncio.run(asyncio.wait_for(main(), 30))

@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning",
                            "ignore:coroutine method 'aclose'")
def test_a_loop_closed_with_streams_open():
    """A loop that is closed without its streams and tasks leaves no request behind, and the next loop is
    served"""
    llm, loop = AsyncLLM(num_pages=64, max_seq_len=512), asyncio.new_event_loop()
    stream = llm.stream("The page", max_tokens=400, ignore_eos=True)
    loop.run_until_complete(anext(stream))
    task = loop.create_task(llm.generate("A lock", max_tokens=400, ignore_eos=True))
    loop.run_until_complete(asyncio.sleep(.05))
    loop.close()
    del stream, task
    while llm._driver._runs: threading.Event().wait(.001)   # what no one reads comes to its end
    gc.collect()                                            # and then no one waits for it
    asyncio.run(idle(llm._driver))
    left(llm)
    assert asyncio.run(llm.generate("The page", max_tokens=3))[0].finish_reason == "length"
    asyncio.run(llm.close())

def test_the_garbage_collector_comes_in_between():
    """It may close a forgotten coroutine at any allocation, even while the thread decides whether to end: no
    deadlock, and the request ends"""
    driver = async_driver()
    one, two = driver.make_requests([[1], [2]], np.array, SamplingParams(max_tokens=40, temperature=0),
                                    streamed=True)
    real, forgotten = type(driver.core.scheduler).has_work, [two]
    class Collecting(type(driver.core.scheduler)):
        @property
        def has_work(self):
            if real.fget(self) and self.n_steps > 2 and forgotten: driver.release([forgotten.pop()])
            return real.fget(self)
    driver.core.scheduler.__class__ = Collecting
    async def main():
        driver.submit([two])
        async with aclosing(driver.pieces(one)) as pieces:
            return [i async for piece in pieces for i in piece.token_ids]
    told = []
    thread = threading.Thread(target=lambda: told.append(asyncio.run(main())), daemon=True)
    thread.start()
    thread.join(20)
    assert told == [expected([1], 40)] and not forgotten and len(two.pieces) < 40
    asyncio.run(idle(driver))
    driver.close()

def test_falling_asleep_has_an_end():
    "Callers that ask again and again do not keep it awake"
    async def main():
        async with AsyncLLM(num_pages=64, max_seq_len=64) as llm:
            answers, refused = [], []
            async def caller():
                while len(refused) < 50:
                    try:
                        answers.append(await llm.generate("The page", max_tokens=4, temperature=0,
                            ignore_eos=True))
                    except RuntimeError as e: refused.append(str(e))
                    await asyncio.sleep(0)
            callers = [asyncio.create_task(caller()) for _ in range(6)]
            while len(answers) < 20: await asyncio.sleep(.001)
            await llm.sleep()
            await asyncio.gather(*callers)
            assert all("asleep" in o or "memory has been released" in o for o in refused)
            await llm.wake()
            assert (len({tuple(o.token_ids) for o in [a for [a] in answers] + await llm.generate("The page",
                max_tokens=4, temperature=0, ignore_eos=True)}) == 1)
            await idle(llm._driver)
            left(llm)
    asyncio.run(asyncio.wait_for(main(), 60))

@pytest.mark.long
def test_a_thousand_streams_of_the_model():
    async def main():
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        prompts = [f"The page {k % 50}" for k in range(1000)]
        async with AsyncLLM(num_pages=4096, max_seq_len=64) as llm:
            async def text(o): return "".join([p.text async for p in llm.stream(o, params)])
            got = await asyncio.gather(*map(text, prompts))
            assert (await llm.stats())["running"] == 0
        with LLM(num_pages=4096, max_seq_len=64) as llm:
            assert got == [o.text for o in llm.generate(prompts, params, progress=False)]
    asyncio.run(main())

PROGRAM = """
import asyncio, sys
from minisgl_lit import AsyncLLM
async def main():
    async with AsyncLLM(num_pages=64) as llm:
        print('ready', flush=True)
        async for piece in llm.stream('The page', max_tokens=400, ignore_eos=True): await asyncio.sleep(.05)
asyncio.run(main())
"""

@pytest.mark.long
def test_ctrl_c_at_the_keyboard():
    p = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True)
    assert p.stdout.readline() == "ready\n"
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=20)
    assert p.returncode != 0 and err.rstrip().endswith("KeyboardInterrupt")

TYPED = ("""
from minisgl_lit import LLM, AsyncLLM, SamplingParams
from minisgl_lit.text.answer import Answer

llm = LLM('x', num_pages=3, dtype='float32')
one: Answer = llm.chat('hi', temperature=0, tools=[print], json_schema=dict)
many: list[Answer] = llm.chat(['hi', 'you'], SamplingParams(), stop='x')
more: list[Answer] = llm.generate([[1, 2]], n=3)
for piece in llm.stream([{'role': 'user', 'content': 'hi'}], reasoning_effort='low'): print(piece.text, piece.answer)
async def main() -> None:
    alone = AsyncLLM(page_size=4)
    answer: Answer = await alone.chat('hi', seed=1)
    async for piece in alone.stream('hi', top_p=.5): print(piece.text)
""")   # noqa: E501
WRONG = ["LLM(num_page=3)", "LLM(num_pages='3')", "LLM(dtype='float8')", "llm.generate('hi', temperatur=0)",
         "llm.generate('hi', tools=[print])",
         "llm.chat('hi', temperature='0')", "llm.chat('hi', tool=[print])", "AsyncLLM(pages=3)"]

@pytest.mark.long
def test_checkers_know_the_names(tmp_path):
    "pyright accepts what is right, and refuses each wrong line"
    file = tmp_path/"typed.py"
    file.write_text(TYPED + "\n".join(WRONG) + "\n")
    pyright = Path(sys.executable).with_name("pyright")
    done = subprocess.run([pyright, "--outputjson", "--pythonpath", sys.executable, file],
                          capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1])
    lines = {o["range"]["start"]["line"] for o in json.loads(done.stdout)["generalDiagnostics"]
             if o["severity"] == "error"}
    first = TYPED.count("\n")
    assert lines == {*range(first, first + len(WRONG))}, done.stdout

@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_asleep():
    "What runs is ended first; who comes meanwhile is told; afterwards all is as before"
    async def main():
        async with AsyncLLM(num_pages=64, max_seq_len=64) as llm:
            task = asyncio.create_task(llm.generate(["The page"] * 3, max_tokens=20, temperature=0))
            while not (task.done() or (await llm.stats())["running"]): await asyncio.sleep(.001)
            await llm.sleep()
            before = [o.text for o in await task]
            for _ in range(2):
                with pytest.raises(RuntimeError, match="memory has been released"):
                    await llm.generate("The page")
            await llm.wake()
            assert ([o.text for o in await llm.generate(["The page"] * 3, max_tokens=20, temperature=0)]
                    == before)
            await idle(llm._driver)
    asyncio.run(main())
