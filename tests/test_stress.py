"""Real threads and real processes, at once and for a while: two minutes in the long run, seconds in the short
one."""
import asyncio, json, random, time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from minisgl_lit import serve
from test_llm import one_caller, toy_driver
from test_serve import idle, until

QUESTIONS = ["What is a page?", "Count to nine", "What is 3 + 4?", "What is a token?", "Name a colour"]

def threads_for(seconds: float, overlap: bool) -> int:
    "Eight threads on one driver, one round after another; how many rounds"
    driver, end, rounds = toy_driver(overlap), time.monotonic() + seconds, 0
    with ThreadPoolExecutor(8) as pool:
        while time.monotonic() < end:
            assert not any(pool.map(lambda i: one_caller(driver, 8*rounds + i), range(8)))   # lists of errors
            rounds += 1
    driver.close()
    return rounds

async def caller(client: httpx.AsyncClient, rng: random.Random, right: dict[str, list[int]], end: float,
                 counts: dict[str, int]) -> None:
    "Somebody who asks, listens, leaves, or says nonsense, until the time is over"
    while time.monotonic() < end:
        text, what = rng.choice(list(right)), rng.choice(["ask", "stream", "leave", "nonsense"])
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 40},
                "stream": what in ("stream", "leave")}
        counts[what] += 1
        if what == "nonsense":
            assert ((await client.post("/generate",
                json=body | {"sampling_params": {"temperature": -1}})).status_code == 400)
        elif what == "ask":
            assert (await client.post("/generate", json=body)).json()["output_ids"] == right[text]
        else:
            told, leave_after = [], rng.randint(0, 9)
            async with client.stream("POST", "/generate", json=body) as r:
                async for line in r.aiter_lines():
                    if line.startswith("data: {"): told.append(json.loads(line[6:]))
                    if what == "leave" and len(told) > leave_after: break
            ids = told[-1]["output_ids"] if told else []
            assert ids == right[text][:None if what == "stream" else len(ids)]

async def processes_for(seconds: float, callers: int = 24) -> dict[str, int]:
    "Callers of a small server; afterwards every page is back"
    counts = dict.fromkeys(["ask", "stream", "leave", "nonsense"], 0)
    with serve(port=0, num_pages=48, max_running_req=6, page_size=4, max_prefill_tokens=24) as s:
        async with httpx.AsyncClient(base_url=s.url, timeout=60,
                                     limits=httpx.Limits(max_connections=callers)) as client:
            right = {}
            for text in QUESTIONS:
                body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
                right[text] = (await client.post("/generate", json=body)).json()["output_ids"]
            end = time.monotonic() + seconds
            await asyncio.gather(*(caller(client, random.Random(i), right, end, counts)
                                   for i in range(callers)))
        until(lambda: idle(s))
    return counts

@pytest.mark.parametrize("overlap", [False, True])
def test_threads(overlap, record_property):
    record_property("rounds of eight threads", threads_for(1, overlap))

def test_processes(record_property):
    record_property("requests to a server under stress", asyncio.run(processes_for(2)))

@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_threads_long(overlap, record_property):
    record_property("rounds of eight threads", threads_for(30, overlap))

@pytest.mark.long
def test_processes_long(record_property):
    record_property("requests to a server under stress", asyncio.run(processes_for(60)))
