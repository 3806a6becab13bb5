"""Conversations over a pool that holds a tenth of their pages: without a disk below it, with one, and after a
restart.

    python tests/many_turns.py nbs/experiments/turns.json

Sixteen turns at a time; whose turn is next is drawn by lot. The toy engine serves 2,000 conversations of ten
turns, whose tokens are counted, and the embedded model 300, which are timed. Each run is a process of its
own."""
import json, os, shutil, subprocess, sys, tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from minisgl_lit.config import EngineConfig
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import InlineStream
from minisgl_lit.core.kv_cache.manager import CacheManager
from minisgl_lit.distributed.page_file import PageFile
from minisgl_lit.core.kv_cache.radix import RadixCache
from minisgl_lit.core.kv_cache.table import TableManager
from minisgl_lit.distributed.tier import Tier
from minisgl_lit.runtime import build
from minisgl_lit.core.scheduler.scheduler import Scheduler
from minisgl_lit.testing.toy_engine import ToyEngine

TURNS, NEW, ANSWER, PAGE, AT_ONCE = 10, 24, 8, 16, 16
RUNS = ([('toy', 2000, o) for o in ('pool', 'disk', 'alive', 'killed')]
        + [('embedded', 300, o) for o in ('pool', 'disk')])
PARAMS = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)


def order(chats: int) -> list[int]:
    return np.random.default_rng(0).permutation(np.arange(chats).repeat(TURNS)).tolist()


def start(kind: str, chats: int, folder: str | None) -> Scheduler:
    pages = chats*TURNS*(NEW + ANSWER)//PAGE
    config = EngineConfig(num_pages=pages//10, max_seq_len=512, max_running_req=AT_ONCE, device='cpu',
                          threads=2, overlap=False, seed=0)
    if kind == 'embedded': return build(replace(config, kv_disk_path=folder, kv_disk_gib=8.)).scheduler
    table = TableManager(AT_ONCE, 512, PAGE, dummy_page=pages//10)
    engine, tier = ToyEngine(table.page_table, table.token_pool, PAGE, pages//10, verify=False), None
    if folder:
        file = PageFile(folder, engine.empty_pages(1)[0].nbytes, 1 << 28)
        tier = Tier(engine, PAGE, lambda: bytes(20), InlineStream(), file)
        tier.moving_pages = pages//10
    return Scheduler(engine, CacheManager(pages//10, table, RadixCache(PAGE),
                                          dict(tier=tier) if tier else None), 1000, perf_counter, config)


def replay(s: Scheduler, turns: list[int], said: dict[int, np.ndarray]) -> dict[str, float]:
    "Serve these turns, `said` goes on; a conversation whose last turn is still being answered is waited for"
    waiting, running, ttfts = [*reversed(turns)], {}, []
    before, began = dict(s.counts), perf_counter()
    while waiting or running:
        while waiting and len(running) < AT_ONCE and waiting[-1] not in running:
            i = waiting.pop()
            past = said.get(i, np.zeros(0, dtype=np.int32))
            new = np.random.default_rng((i, len(past))).integers(300, 1000, NEW, dtype=np.int32)
            running[i] = s.add(str(i), np.concatenate([past, new]), PARAMS)
        for output in s.step().outputs:
            if not output.finish_reason: continue
            assert output.times and not output.error, output.error
            i = int(output.rid)
            said[i] = running.pop(i).input_ids.copy()
            ttfts.append(output.times[1])
    seconds, counts = perf_counter() - began, {k: s.counts[k] - before[k] for k in before}
    return dict(turns=len(turns), prompt_tokens=counts['prompt_tokens'],
                computed=counts['prompt_tokens'] - counts['cached_tokens'],
                cached=counts['cached_tokens'], seconds=seconds, turns_a_second=len(turns)/seconds,
                ttft_p50=float(np.quantile(ttfts, .5)), ttft_p99=float(np.quantile(ttfts, .99)))


def whole(kind: str, chats: int, folder: str | None) -> dict[str, float]:
    "All turns on one server"
    return replay(start(kind, chats, folder), order(chats), {})


def restarted(kind: str, chats: int, folder: str, kill: bool) -> dict[str, float]:
    "Of the second half of all turns the first 5 %; before them the server is killed, or not"
    turns, half = order(chats), chats*TURNS//2
    scheduler, said = start(kind, chats, folder), {}
    replay(scheduler, turns[:half], said)
    if kill:   # what a killed process leaves is its files as they are
        copy = tempfile.mkdtemp(dir=Path(folder).parent)
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        scheduler = start(kind, chats, copy)
    return replay(scheduler, turns[half:half + half//20], said)


def one(kind: str, chats: str, name: str, folder: str) -> None:
    "One run: print its figures, and end without closing anything"
    n = int(chats)
    result = (restarted(kind, n, folder, name == 'killed') if name in ('alive', 'killed')
              else whole(kind, n, folder if name == 'disk' else None))
    print(json.dumps(result), flush=True)
    os._exit(0)


def main(out: str) -> None:
    "What is not there yet, each run in a process and a folder of its own"
    path = Path(out)
    results = json.loads(path.read_text()) if path.exists() else {}
    for kind, chats, name in RUNS:
        if name in results.setdefault(kind, {}): continue
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, __file__, kind, str(chats), name, f'{folder}/kv']
            Path(run[-1]).mkdir()
            done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout
        results[kind][name] = json.loads(done.splitlines()[-1])
        path.write_text(json.dumps(results, indent=1) + '\n')
        print(kind, name, results[kind][name], flush=True)


if __name__ == '__main__': (one if len(sys.argv) > 2 else main)(*sys.argv[1:])
