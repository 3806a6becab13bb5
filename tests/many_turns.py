"""Conversations over a pool that holds a tenth of their pages: without a disk below it, with one, and after a restart.

    python tests/many_turns.py 2000 nbs/79c_turns.json    # so many conversations of ten turns

The embedded model computes, sixteen turns at a time; whose turn is next is drawn by lot. Each run is a process of its own."""
import json, shutil, subprocess, sys, tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from minisgl_lit.config import EngineConfig
from minisgl_lit.core.sampling_params import SamplingParams
from minisgl_lit.runtime import Runtime, build

TURNS, NEW, ANSWER, PAGE, AT_ONCE = 10, 24, 8, 16, 16
PARAMS = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)


def order(chats: int) -> list[int]: return np.random.default_rng(0).permutation(np.arange(chats).repeat(TURNS)).tolist()


def start(chats: int, folder: str | None) -> Runtime:
    pages = chats*TURNS*(NEW + ANSWER)//PAGE
    return build(EngineConfig(num_pages=pages//10, max_seq_len=512, max_running_req=AT_ONCE, device='cpu', threads=2, overlap=False,
                              seed=0, kv_disk_path=folder, kv_disk_gib=8))


def replay(runtime: Runtime, turns: list[int], said: dict[int, np.ndarray]) -> dict[str, float]:
    "Serve these turns, `said` goes on; a conversation whose last turn is still being answered is waited for"
    s, waiting, running, ttfts = runtime.scheduler, [*reversed(turns)], {}, []
    before, began = dict(s.counts), perf_counter()
    while waiting or running:
        while waiting and len(running) < AT_ONCE and waiting[-1] not in running:
            i = waiting.pop()
            past = said.get(i, np.zeros(0, dtype=np.int32))
            new = np.random.default_rng((i, len(past))).integers(300, 1500, NEW, dtype=np.int32)
            running[i] = s.add(str(i), np.concatenate([past, new]), PARAMS)
        for output in s.step().outputs:
            if not output.finish_reason: continue
            assert output.times and not output.error
            i = int(output.rid)
            said[i] = running.pop(i).input_ids.copy()
            ttfts.append(output.times[1])
    seconds, counts = perf_counter() - began, {k: s.counts[k] - before[k] for k in before}
    return dict(turns=len(turns), prompt_tokens=counts['prompt_tokens'], computed=counts['prompt_tokens'] - counts['cached_tokens'],
                cached=counts['cached_tokens'], seconds=seconds, turns_a_second=len(turns)/seconds,
                ttft_p50=float(np.quantile(ttfts, .5)), ttft_p99=float(np.quantile(ttfts, .99)))


def whole(chats: int, folder: str | None) -> dict[str, float]:
    "All turns on one server"
    runtime = start(chats, folder)
    try: return replay(runtime, order(chats), {})
    finally: runtime.close()


def restarted(chats: int, folder: str, kill: bool) -> dict[str, float]:
    "The turns of the second half of which the first 5 % count; before them the server is killed, or not"
    turns, half = order(chats), chats*TURNS//2
    runtime, said = start(chats, folder), {}
    replay(runtime, turns[:half], said)
    if kill:   # what a killed process leaves is the files as they are
        copy = tempfile.mkdtemp(dir=Path(folder).parent)
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        runtime.close()
        runtime = start(chats, copy)
    try: return replay(runtime, turns[half:half + half//20], said)
    finally: runtime.close()


def main(chats: str, out: str) -> None:
    "Each run in a process and a folder of its own"
    results = json.loads(Path(out).read_text()) if Path(out).exists() else {}
    for name in ('pool', 'disk', 'alive', 'killed'):
        if name in results: continue
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, __file__, chats, out, name, f'{folder}/kv']
            Path(run[-1]).mkdir()
            done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout
        results[name] = json.loads(done.splitlines()[-1])
        Path(out).write_text(json.dumps({'chats': int(chats), **results}, indent=1) + '\n')
        print(name, results[name], flush=True)


def one(chats: str, out: str, name: str, folder: str) -> None:
    n = int(chats)
    result = restarted(n, folder, name == 'killed') if name in ('alive', 'killed') else whole(n, folder if name == 'disk' else None)
    print(json.dumps(result))


if __name__ == '__main__': (one if len(sys.argv) > 3 else main)(*sys.argv[1:])
