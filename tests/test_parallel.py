"""Ranks: parts that add up to the whole, whatever the shapes; the same tokens from two and four processes;
and no process that stays."""
import json, os, signal, subprocess, sys, threading, time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from minisgl_lit.adapters.low_rank import changeable
from minisgl_lit.adapters.peft import read_adapter
from minisgl_lit.config import EngineConfig
from minisgl_lit.core.request import Batch, ForwardMode, LogprobRequests
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.core.device import ProcessGroup
from minisgl_lit.runtime import build
from minisgl_lit.distributed.tensor_parallel import (BatchMsg, PromptWrite, StepMsg, TableUpdate,
    TorchProcessGroup, decode,
    encode)
from minisgl_lit.llm import LLM
from minisgl_lit.server.serve import serve
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.decoder import (
    Decoder, DenseMlp, ModelConfig, kv_heads, shard_config, weight_shapes)
from minisgl_lit.core.models.moe import MoeMlp
from minisgl_lit.core.models.operations import linear
from minisgl_lit.formats.dummy_weights import dummy_weights
from minisgl_lit.core.models.weights import list_files, targets, tensor_placements
from reference import MAX_NEW, VARIANTS, Comparison, generate, make_checkpoint, prompts

GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0)

@st.composite
def models(draw) -> tuple[ModelConfig, int]:
    "A small model of any shape, and into how many parts it shall be cut"
    size, group, kv = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    heads = group * kv
    if heads % size: heads, kv = heads * size, kv * draw(st.sampled_from([1, size]))
    def some(most=9): return draw(st.integers(1, most))
    dense = st.builds(DenseMlp, st.integers(1, 12), st.booleans())
    routed = st.builds(MoeMlp, st.just(3), st.integers(1, 3), st.integers(1, 9), st.booleans(),
                       st.integers(0, 5))
    flags = {o: draw(st.booleans())
             for o in ('qkv_bias', 'o_bias', 'mlp_bias', 'qk_norm', 'tie_word_embeddings')}
    return (ModelConfig(
        architecture='x', vocab_size=some(20), hidden_size=some(), intermediate_size=some(12), num_layers=2,
        num_heads=heads, num_kv_heads=kv, head_dim=2 * some(3),
        mlps=draw(st.just(()) | st.tuples(dense | routed, dense | routed)), **flags), size)

def attend(q, k, v, layer):
    o = F.scaled_dot_product_attention(*(o.transpose(0, 1)[None] for o in (q, k, v)), is_causal=True,
                                       enable_gqa=True)
    return o[0].transpose(0, 1)

def loud(config: ModelConfig, group: ProcessGroup) -> Decoder:
    "Weights that matter"
    weights = dummy_weights(config, torch.float32, group=group)
    for name, o in weights.items():
        if not name.endswith('norm.weight'): o *= 20
    return Decoder(config, weights, group)

@settings(max_examples=60)
@given(models(), st.integers(0, 9))
def test_parts_add_up(drawn, seed):
    "A group that adds nothing up shows each rank's part"
    config, size = drawn
    whole, ranks = loud(config, ProcessGroup()), [loud(config, ProcessGroup(r, size)) for r in range(size)]
    x = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(seed))
    ids = torch.arange(4) % config.vocab_size
    def same(part, join):
        torch.testing.assert_close(join([part(o) for o in ranks]), part(whole), rtol=1e-3, atol=1e-4)
    same(lambda m: m.embed(ids), sum)
    for i in range(2):
        same(lambda m: m.attention(i, x, m.angles(torch.arange(4)), attend), sum)
        same(lambda m: m.mlps[i].forward(x, m.layers[i], m.operations), sum)
    same(lambda m: m.logits(x), lambda found: torch.cat(found, -1)[:, :config.vocab_size])

@settings(max_examples=60)
@given(models())
def test_every_number_of_a_file_has_a_place(drawn):
    """Cut tensors are taken once by one rank, key heads by each rank with a query head of their group, the
    rest by all; and no two are written to one place"""
    config, size = drawn
    taken = {name: np.zeros(o.shape, dtype=int) for name, o in tensor_placements(config).items()}
    for group in (ProcessGroup(r, size) for r in range(size)):
        shapes = weight_shapes(shard_config(config, size))
        written = {name: np.zeros(shape, dtype=int) for name, shape in shapes.items()}
        for name, place in tensor_placements(config, group).items():
            row = place.start
            for cut in place.slices:
                taken[name][cut] += 1
                n = len(part := taken[name][cut])
                written[place.weight][row:row + n][..., :part.shape[-1]] += 1
                row += n
        assert max(o.max() for o in written.values()) <= 1
    asked = np.bincount([h for r in range(size) for h in kv_heads(config, ProcessGroup(r, size))],
                        minlength=config.num_kv_heads)
    for name, counts in taken.items():
        module = name.split('.')[-2]
        if module in ('k_proj', 'v_proj'):
            right = asked.repeat(config.head_dim).reshape(-1, *[1] * (counts.ndim - 1))
        else:
            right = (1 if module in ('q_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj', 'embed_tokens',
                                     'lm_head') else size)
        assert (counts == right).all(), name
    assert asked.min() >= 1

@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 5), st.integers(0, 9))
def test_each_rank_has_its_part_of_an_adapter(drawn, rank, seed):
    "Its weights change as if the change had been in the file, whatever is left of it for the last ranks"
    config, size = drawn
    rng = torch.Generator().manual_seed(seed)
    places, tensors, deltas = tensor_placements(config), {}, {}
    for name, place in places.items():
        if not changeable(place.weight) or len(place.shape) < 2: continue
        a, b = (torch.randn(o, generator=rng) for o in ((rank, place.shape[1]), (place.shape[0], rank)))
        stem = f'base_model.model.{name.removesuffix(".weight")}'
        tensors |= {f'{stem}.lora_A.weight': a, f'{stem}.lora_B.weight': b}
        deltas[name] = 2 * b @ a
    with TemporaryDirectory() as folder:
        (Path(folder)/'adapter_config.json').write_text(
            json.dumps(dict(peft_type='LORA', r=rank, lora_alpha=2 * rank)))
        save_file(tensors, Path(folder)/'adapter_model.safetensors')
        for group in (ProcessGroup(r, size) for r in range(size)):
            shapes, right = weight_shapes(shard_config(config, size)), {}
            for name, delta in deltas.items():
                place = tensor_placements(config, group)[name]
                weight = right.setdefault(place.weight, torch.zeros(shapes[place.weight]))
                for target, part in targets(place, delta, weight): target.copy_(part)
            changes = read_adapter(Path(folder), config, torch.float32, group).changes
            for name, weight in right.items():
                found, eye = torch.zeros(weight.shape), torch.eye(weight.shape[1])
                for o in changes.get(name, []):
                    found[o.first:o.first + o.b.shape[0]] += linear(linear(eye, o.a), o.b).T
                torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-4)

arrays = st.lists(st.integers(-2**63, 2**63 - 1)).map(lambda o: np.array(o, dtype=np.int64))
writes = st.builds(PromptWrite, st.integers(0, 999), st.integers(0, 2**40), arrays)

@given(st.sampled_from(ForwardMode), st.integers(0, 2**60), st.lists(arrays, min_size=7, max_size=7),
       st.none() | st.builds(LogprobRequests, arrays, arrays, arrays, arrays, st.integers(0, 20)),
       st.builds(TableUpdate, arrays, arrays, arrays, st.lists(writes)))
def test_messages_arrive_whole(mode, step, fields, asked, update):
    "All but what only rank 0 needs; and the arrays that arrive can be written to"
    batch = Batch(['rank 0 alone knows'], mode, step, *fields, logprob_requests=asked)
    message = decode(encode(StepMsg(3, 9, BatchMsg.of(batch), update)))
    there = message.batch.to_batch()
    assert (message.number, message.digest, there.reqs, there.mode, there.step) == (3, 9, [], mode, step)
    def same(a, b): return a.dtype == np.int64 and a.flags.writeable and np.array_equal(a, b)
    names = 'rows', 'cached_lens', 'device_lens', 'token_rows', 'positions', 'out_loc', 'sampled'
    assert all(same(getattr(there, name), o) for name, o in zip(names, fields))
    assert all(same(getattr(message.table, name), getattr(update, name))
               for name in ('rows', 'cols', 'pages'))
    assert [(o.row, o.start) for o in message.table.prompts] == [(o.row, o.start) for o in update.prompts]
    assert all(same(a.ids, b.ids) for a, b in zip(message.table.prompts, update.prompts))
    if asked is None: assert there.logprob_requests is None
    else:
        found = there.logprob_requests
        assert (same(found.tokens, asked.tokens) and same(found.targets, asked.targets)
                and found.width == asked.width)
        assert len(found.sampled) == len(found.owners) == 0

def gone(pids: list[int], seconds: float = 5) -> bool:
    "Whether these processes end in time; zombies of somebody else have ended"
    def alive(pid):
        try:
            with open(f'/proc/{pid}/stat') as f: return f.read().rsplit(')')[1].split()[0] != 'Z'
        except OSError: return False
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end: time.sleep(.05)
    return not any(map(alive, pids))

def test_parity_of_several_processes(tmp_path, long):
    """Experts, a window: the tokens of `transformers`, and every batch audited. If there is time, fewer key
    heads than ranks"""
    family, fields = VARIANTS['experts but in one layer, and a window']
    make_checkpoint(family, tmp_path, **fields)
    comparison, right = Comparison(), [generate(tmp_path, o) for o in prompts()]
    runtime = build(EngineConfig.of(tmp_path, device='cpu', tp=4 if long else 2, page_size=4, num_pages=200,
                                    max_prefill_tokens=16), audit=True)
    try:
        for again in range(2):
            told = {str(i): [] for i in range(len(right))}
            for i, prompt in enumerate(prompts()): runtime.scheduler.add(str(i), prompt, GREEDY)
            while runtime.scheduler.has_work:
                for o in runtime.scheduler.step():
                    assert o.error is None, o.error
                    told[o.rid] += o.token_ids
            for i, (prompt, o) in enumerate(zip(prompts(), right)):
                comparison.check(tmp_path, prompt, told[str(i)], o, (again, i))
        runtime.scheduler.self_check()
        assert runtime.scheduler.stats()['cached_tokens'] > 200
    finally: runtime.close()
    assert gone([p.pid for p in runtime.ranks.processes])
    comparison.done()

def test_llm_on_two_ranks_that_one_leaves(tmp_path):
    """An odd vocabulary, GQA groups that are split, overlap; sampled as with one rank; then rank 1 is killed
    while it computes"""
    family, fields = VARIANTS['odd sizes']
    make_checkpoint(family, tmp_path, **fields)
    params = SamplingParams(max_tokens=9, seed=3, temperature=.7, top_k=20, repetition_penalty=1.2,
                            logprobs=2, prompt_logprobs=1)
    asked, comparison, how = (prompts(fields['vocab_size']), Comparison(),
                              dict(device='cpu', page_size=4, num_pages=200, max_prefill_tokens=16))
    with LLM(tmp_path, **how) as llm: right = llm.generate(asked, params)
    with LLM(tmp_path, **how, tp=2, overlap=True) as llm:
        for prompt, o in zip(asked, llm.generate(asked, GREEDY)):
            comparison.check(tmp_path, prompt, o.token_ids, generate(tmp_path, prompt))
        comparison.done()
        for a, b in zip(llm.generate(asked, params), right):
            assert a.token_ids == b.token_ids
            one, two = ([t.logprob for t in (*o.logprobs, *o.prompt_logprobs[1:])] for o in (a, b))
            assert one == pytest.approx(two, abs=1e-4)
        pid = llm.runtime.ranks.processes[0].pid
        pieces = llm.stream(asked[0], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        next(pieces)
        os.kill(pid, signal.SIGKILL)
        sentence = 'rank 1 of 2 was killed by signal 9, and without it the model cannot compute'
        *_, last = pieces
        assert last.finish_reason == 'error'
        after = llm.generate([1, 2, 3], GREEDY)
        assert (after[0].finish_reason, after[0].error) == ('error', f'the engine failed: {sentence}')
        assert llm.runtime.failure() == sentence and llm.stats()['running'] == 0
    assert gone([pid])

def test_serve_on_two_ranks_that_one_leaves(tmp_path):
    """Llama, with biases, and one key head for both ranks; when a rank is killed, the server knows before the
    next request"""
    family, fields = VARIANTS['constants']
    make_checkpoint(family, tmp_path, **fields)
    def post(url, **body):
        return json.load(urlopen(Request(url, json.dumps(body).encode(),
                                         {'Content-Type': 'application/json'}), timeout=60))
    def children(pid):
        return [int(o) for f in Path('/proc').glob(f'{pid}/task/*/children') for o in f.read_text().split()]
    def ranks():
        return [o for pid in children(os.getpid())
                for o in children(pid) if ':rank_main' in Path(f'/proc/{o}/cmdline').read_text()]
    with serve(tmp_path, port=0, tp=2, device='cpu', dtype='float32', num_pages=100) as s:
        told = post(f'{s.url}/generate', input_ids=prompts()[0],
                    sampling_params=dict(max_new_tokens=MAX_NEW, temperature=0))
        assert told['output_ids'] == generate(tmp_path, prompts()[0])
        rank, = ranks()
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + 20
        with pytest.raises(HTTPError) as e:
            while time.monotonic() < end:
                urlopen(f'{s.url}/health').close()
                time.sleep(.1)
        assert e.value.code == 503 and 'the engine process has ended' in e.value.read().decode()
    assert gone([rank])

def test_a_flaw_in_the_part_of_another_rank(tmp_path):
    "Only rank 1 reads the last columns of `down_proj`, and it says so"
    make_checkpoint('Qwen3', tmp_path)
    for file in list_files(tmp_path):
        tensors = load_file(file)
        if (name := 'model.layers.1.mlp.down_proj.weight') in tensors:
            tensors[name][3, -1] = torch.nan
            save_file(tensors, file)
    with pytest.raises(ValueError, match=rf'^tensor {name} of the checkpoint holds NaN or infinity$'):
        build(EngineConfig.of(tmp_path, device='cpu', tp=2, num_pages=20))

ORPHANS = '''
from minisgl_lit import LLM, SamplingParams
llm = LLM(device='cpu', num_pages=50, tp=2)
print(llm.runtime.ranks.processes[0].pid, flush=True)
while True: llm.generate('Hello', SamplingParams(max_tokens=50, ignore_eos=True))
'''

def test_a_rank_that_says_nothing_any_more(tmp_path):
    "Whoever waits for it learns of its end within seconds, even if its connection stays open"
    code = f'''
import time, torch
from pathlib import Path
from minisgl_lit.distributed.tensor_parallel import TorchProcessGroup
group = TorchProcessGroup.join(1, 2, Path({str(tmp_path/'meet')!r}), torch.device('cpu'))
time.sleep(60)
'''
    other, ended = subprocess.Popen([sys.executable, '-c', code]), []
    try:
        group = TorchProcessGroup.join(0, 2, tmp_path/'meet', torch.device('cpu'),
                                       failure=lambda: ended[0] if ended else None)
        threading.Timer(1.5, ended.append, ['rank 1 has ended']).start()
        with pytest.raises(ConnectionError, match='rank 1 has ended'): group.all_reduce(torch.zeros(3))
    finally:
        other.kill()
        other.wait()

def test_a_rank_that_is_only_slow_is_waited_for():
    "A wait that ends without an answer is no loss, nor is one whose answer comes just behind it; an error is"
    class Late:
        def __init__(self, fails): self.waits, self.fails = 0, fails
        def is_completed(self): return self.waits >= 2   # just behind the second wait
        def wait(self, seconds=None):
            self.waits += 1
            if self.waits < 3: raise RuntimeError('Operation timed out!')
            if self.fails: raise RuntimeError('Connection closed by peer')
    group = TorchProcessGroup(0, 2, backend=None, failure=lambda: None, look_after=timedelta(seconds=1))
    group._wait(late := Late(fails=False))
    assert late.waits == 3
    with pytest.raises(ConnectionError, match='rank 0 of 2 has lost the others'):
        group._wait(Late(fails=True))

def test_ranks_do_not_outlive_rank_0():
    "Killed while it computes"
    parent = subprocess.Popen([sys.executable, '-c', ORPHANS], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True)
    pid = int(parent.stdout.readline())
    time.sleep(.3)
    parent.kill()
    told = parent.communicate(timeout=30)[1]
    # where there is no compiler
    last_words = [o for o in told.splitlines() if not o.startswith('Without native kernels')]
    assert gone([pid]) and last_words in ([], ['rank 1 of 2 has lost the others'])

def test_sizes_that_cannot_be(tmp_path):
    make_checkpoint('Qwen3', tmp_path)
    for tp in (3, 8):
        with pytest.raises(ValueError, match=f'^tp={tp} does not divide the 4 query heads of this model; for '
                                             'it tp must be one of 1, 2, 4$'):
            LLM(tmp_path, device='cpu', tp=tp)
    with pytest.raises(ValueError, match='tp must be a whole number from 1 to 64, not 0'): LLM(tmp_path, tp=0)
    assert (read_config(tmp_path).num_heads == 4
            and json.loads((tmp_path/'config.json').read_text())['num_attention_heads'] == 4)

OTHER_RANKS = """
import os, sys, threading
from minisgl_lit import assembly as worker
folder, *works = sys.argv[1:]
children = []
for i, work in enumerate(works):
    children.append(os.fork())
    if children[-1]: continue
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(f"{folder}/{i}.{name}", os.O_RDWR | os.O_CREAT), number)
    exec("def run(messages, reply, _): " + work)
    worker._run_rank = run
    worker.worker_main()
    os._exit(99)
print(*(os.waitstatus_to_exitcode(os.waitpid(o, 0)[1]) for o in children))
"""

def test_what_another_rank_says_at_its_end(tmp_path):
    """What libraries print is no reply, threads that wait for ever do not keep the process, and a rank that
    only lost the others shows no traceback; the rank 0 of each has gone at once"""
    noisy = 'os.write(1, b"noise\\n"); threading.Thread(target=threading.Event().wait).start(); reply("said")'
    works = [noisy, 'next(messages)', 'raise ConnectionError("rank 1 has lost the others")', '1 / 0']
    env = os.environ | dict(PYTHONPATH=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, '-c', OTHER_RANKS, str(tmp_path), *works], capture_output=True,
                          text=True, env=env, timeout=60)
    codes = [*map(int, done.stdout.split())]
    a, b, c, d = ([(tmp_path/f'{i}.{name}').read_text() for name in ('out', 'err')] for i in range(4))
    assert (codes == [0, 1, 1, 1] and a == ['"said"\n', 'noise\n'] and b == ['', '']
            and c == ['', 'rank 1 has lost the others\n'])
    assert d[0] == '' and 'Traceback' in d[1] and 'ZeroDivisionError' in d[1]
