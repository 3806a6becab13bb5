"""Prefill apart from decode, in real processes: the same tokens as one server's, and a prefill engine that is killed, frozen, or never was."""
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from minisgl_lit import serve

SMALL = dict(device='cpu', port=0, dtype='float32', num_pages=400, max_running_req=8, log_interval=0, threads=1)
PROMPTS = [np.random.default_rng(i).integers(100, 500, 300 + 50*i).tolist() for i in range(6)]

def ask(url, prompt, n=24):
    body = {'input_ids': prompt, 'sampling_params': {'max_new_tokens': n, 'temperature': 0, 'ignore_eos': True}}
    answer = httpx.post(url + '/generate', json=body, timeout=120).json()
    return answer['text'], answer['meta_info']['cached_tokens'], answer['meta_info']['finish_reason']['type']

def ask_all(url, prompts=PROMPTS):
    with ThreadPoolExecutor(len(prompts)) as threads: return [*threads.map(ask, [url]*len(prompts), prompts)]

def test_somebody_must_answer():
    with pytest.raises(ValueError, match='prefill_replicas=2 must be less than replicas=2: others make the answers'):
        serve(**SMALL, replicas=2, prefill_replicas=2)

@pytest.mark.long
def test_two_processes_give_the_tokens_of_one():
    "Greedy, float32; the prompts are computed by one, and all but the last page of each travels; then the first is killed, and the second goes on alone"
    with serve(**SMALL) as s: right = ask_all(s.url)
    with serve(**SMALL, replicas=2, prefill_replicas=1) as s:
        folder = s._config.kv_handoff_path
        assert ask_all(s.url) == right
        answers, prompts = (o for o in httpx.get(s.url + '/get_server_info').json()['per_replica'])
        n_pages = sum((len(o) - 1) // 16 for o in PROMPTS)
        assert prompts['handoffs']['sent'] == answers['handoffs']['received'] == n_pages and answers['handoffs']['missed'] == 0
        assert os.listdir(folder) == []
        others = [o[::-1] for o in PROMPTS]
        killing = threading.Timer(.2, lambda: os.kill(s._processes[1].process.pid, signal.SIGKILL))
        killing.start()
        first = ask_all(s.url, others)
        assert {end for *_, end in first} == {'length'}
        with serve(**SMALL) as alone: assert [o for o, *_ in ask_all(alone.url, others)] == [o for o, *_ in first]
        assert ask(s.url, PROMPTS[0][5:])[2] == 'length'
    assert not os.path.exists(folder)

@pytest.mark.long
def test_a_frozen_prefill_engine_is_passed_by():
    "Its heartbeat stops: after three seconds the prompts that wait there are computed by the other, and later ones at once"
    with serve(**SMALL) as s: right = ask_all(s.url)
    with serve(**SMALL, replicas=2, prefill_replicas=1) as s:
        frozen = s._processes[1].process.pid
        os.kill(frozen, signal.SIGSTOP)
        try: assert [o for o, *_ in ask_all(s.url)] == [o for o, *_ in right]
        finally: os.kill(frozen, signal.SIGCONT)
