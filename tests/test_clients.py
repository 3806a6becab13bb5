"A client that sends whatever the schema of the server allows; `test_other_clients.py` has those that others have written."
import json

import pytest
from hypothesis import given, settings, strategies as st

from minisgl_lit import LLM, SamplingParams, serve
from test_serve import SMALL, idle, post, until, web


@pytest.fixture(scope="module")
def server():
    with serve(**SMALL, max_seq_len=256, log_interval=0) as s: yield s

ELSEWHERE = {"/pause_generation", "/start_profile", "/stop_profile"}   # they change what comes after them


def test_whatever_the_schema_allows(server):
    "schemathesis makes requests out of /openapi.json: none is an error of ours, and nothing is left of them"
    schemathesis = pytest.importorskip("schemathesis", reason="not installed: pip install schemathesis")
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    operations = [o.ok() for o in schema.get_all_operations()]
    seen = {o.path for o in operations}
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/v1/models/{name}"} <= seen
    cases = st.one_of([o.as_strategy() for o in operations if o.path not in ELSEWHERE])
    told = []

    @settings(max_examples=100, deadline=None)
    @given(cases)
    def ask(case):
        r = case.call()
        told.append(r.status_code)
        assert r.status_code < 500, (case.method, case.path, case.body, r.text)
        if r.status_code >= 400: assert {"message", "type", "param", "code"} <= r.json()["error"].keys()

    ask()
    assert len(told) >= 60 and {200, 400} <= {*told}
    until(lambda: idle(server))


def test_as_offline(server):
    "Text, tokens, reason and usage over HTTP are those of `LLM`, hot or greedy, many at once, whole or in pieces"
    wishes = [SamplingParams(temperature=t, seed=i, max_tokens=5 + 9*i, stop=["e t"]*(i % 2)) for i, t in enumerate((0, 1., 1., 1.5))]
    prompts = ["The page", "What is a row?", "A tree of pages", "Hello"]
    with LLM(num_pages=512, max_running_req=16, max_seq_len=256, device="cpu") as llm: want = llm.generate(prompts, wishes)
    names = ("temperature", "seed", "max_tokens", "stop")
    for stream in (False, True):
        for prompt, p, o in zip(prompts, wishes, want):
            body = dict(text=prompt, sampling_params={k: getattr(p, k) for k in names})
            if not stream: told = [post(server, "/generate", **body).json()]
            else:
                r = web.post(server.url + "/generate", json=body | dict(stream=True))
                told = [json.loads(line[6:]) for line in r.text.splitlines() if line.startswith("data: {")]
            assert told[-1]["text"] == o.text
            assert told[-1]["output_ids"] == o.token_ids
            assert told[-1]["meta_info"]["finish_reason"]["type"] == o.finish_reason
            assert all(t["meta_info"]["completion_tokens"] == len(t["output_ids"]) and t["meta_info"]["prompt_tokens"] == o.prompt_tokens for t in told)
