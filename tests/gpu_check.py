"""Proves and times the GPU engine: each step runs in a process of its own, within what is left of the time; a step that fails is
recorded and the others go on. Writes one JSON; `tests/gpu_check` starts it."""
import argparse, json, os, platform, shutil, signal, subprocess, sys, tempfile, time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

VERSION, ROOT = 1, Path(__file__).parents[1]

# ---- the pure parts: what is asked, what is told ---------------------------------------------------------------------------

@dataclass
class Step:
    "What came of one step."
    name: str
    ok: bool = False
    seconds: float = 0.
    error: str | None = None    # why it failed, in one line
    figures: dict = field(default_factory=dict)

LIMITS = dict(machine=30, kernels=180, parity=60, equality=50, bench256=100, profile=70, sanitizer=60, tests=90)   # seconds; in order of weight

def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser('tests/gpu_check', description=__doc__)
    parser.add_argument('steps', nargs='*', help=f'which of {", ".join(LIMITS)} (default: all)')
    parser.add_argument('--out', type=Path, default=Path('gpu_check.json'), help='the JSON to write (default: gpu_check.json)')
    parser.add_argument('--seconds', type=float, default=540, help='for all together (default: 540)')
    parser.add_argument('--wide', action='store_true', help='all GPU tests, not only those of the shape that is timed')
    parser.add_argument('--only', help=argparse.SUPPRESS)   # run this step in this process, and write its figures
    args = parser.parse_args(argv)
    if unknown := [o for o in args.steps if o not in LIMITS]: parser.error(f'steps must be {", ".join(LIMITS)}, not {unknown[0]!r}')
    if args.seconds <= 0: parser.error(f'--seconds must be above 0, not {args.seconds:g}')
    args.steps = args.steps or list(LIMITS)
    return args

def shares(names: list[str], left: float) -> float:
    "Seconds that the first of these steps may take: its limit if the others keep theirs, else its part of what is left"
    limit, rest = LIMITS[names[0]], sum(LIMITS[o] for o in names[1:])
    return max(min(limit, left - rest), left * limit / (limit + rest), 0)

def busy(spans: Iterable[tuple[float, float]]) -> float:
    "How long at least one of these spans lasts"
    total, end = 0., float('-inf')
    for a, b in sorted(spans):
        total += max(b - max(a, end), 0)
        end = max(end, b)
    return total

def report(steps: list[Step], seconds: float) -> dict:
    "The JSON"
    return dict(version=VERSION, ok=bool(steps) and all(o.ok for o in steps), seconds=round(seconds, 1), host=platform.platform(),
                steps={o.name: {k: v for k, v in asdict(o).items() if k != 'name'} for o in steps})

def check_report(told: dict) -> None:
    "Raise `ValueError` at the first thing that is not as `report` writes it"
    kinds = dict(version=int, ok=bool, seconds=(int, float), host=str, steps=dict)
    for name, kind in kinds.items():
        if not isinstance(told.get(name), kind): raise ValueError(f'{name} must be {kind}, not {told.get(name)!r}')
    for name, step in told['steps'].items():
        if name not in LIMITS: raise ValueError(f'unknown step {name!r}')
        if set(step) != {f.name for f in fields(Step)} - {'name'}: raise ValueError(f'{name} has {sorted(step)}')
        if step['ok'] == bool(step['error']): raise ValueError(f'{name} must have an error or be ok')

def sentence(o: Step) -> str:
    "One line for people"
    told = ', '.join(f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}' for k, v in o.figures.items() if isinstance(v, (int, float, str)))
    return f'{"ok  " if o.ok else "FAIL"} {o.name:10} {o.seconds:5.0f} s  {o.error or told}'

# ---- models and runtimes ---------------------------------------------------------------------------------------------------

QWEN3_06B = dict(
    architectures=['Qwen3ForCausalLM'], model_type='qwen3', vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
    tie_word_embeddings=True, torch_dtype='bfloat16', hidden_act='silu', attention_bias=False, eos_token_id=151645)

@contextmanager
def shape_of_qwen3():
    "A folder with nothing but the shape of Qwen3-0.6B"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder)/'config.json').write_text(json.dumps(QWEN3_06B))
        yield folder

def make_llm(path, graphs: bool, **settings):
    "An `LLM` on the GPU with FlashInfer, with recorded decode steps or without"
    from minisgl_lit.llm import LLM
    return LLM(str(path), **dict(device='cuda', attention='flashinfer', cuda_graph_max_bs='auto' if graphs else 0) | settings)

def runtime_of(llm): return llm.runtime if hasattr(llm, 'runtime') else llm._driver.runtime

def give_back() -> None:
    "The next engine shall find the memory that this one had"
    import gc
    import torch
    gc.collect()
    torch.cuda.empty_cache()

def timed(scheduler) -> dict:
    "Count a scheduler's steps from now on, the seconds they take, and how many of these wait for the device"
    from minisgl_lit.device import CudaEvent
    told, step, wait = dict(steps=0, seconds=0., waited=0.), scheduler.step, CudaEvent.synchronize
    def counted_step():
        began = time.perf_counter()
        try: return step()
        finally:
            told['steps'] += 1
            told['seconds'] += time.perf_counter() - began
    def counted_wait(event):
        began = time.perf_counter()
        try: wait(event)
        finally: told['waited'] += time.perf_counter() - began
    scheduler.step, CudaEvent.synchronize = counted_step, counted_wait
    return told

# ---- the steps: each gives its figures, or raises --------------------------------------------------------------------------

def machine(args) -> dict:
    "What there is"
    import torch
    import transformers
    told = dict(gpu=torch.cuda.get_device_name(), capability='{}.{}'.format(*torch.cuda.get_device_capability()), torch=torch.__version__,
                transformers=transformers.__version__, python=platform.python_version(), cores=os.cpu_count())
    free, total = torch.cuda.mem_get_info()
    told |= dict(memory_gib=total / 2**30, free_gib=free / 2**30)
    import flashinfer
    return told | dict(flashinfer=flashinfer.__version__)

def kernels(args) -> dict:
    "Compile what the later steps use, all at once; then the host's part of a plan, and a layer of decoding against the bytes it reads"
    import numpy as np
    import torch
    from minisgl_lit.core.request import Batch, ForwardMode
    from minisgl_lit.kv_cache.pool import KVPool
    from minisgl_lit.kv_cache.table import TableManager
    from minisgl_lit.tools.roofline import best_time, memory_bandwidth
    from minisgl_lit.attention.torch import TorchAttention
    from minisgl_lit.attention.flashinfer import choose_attention, kind_of
    from minisgl_lit.models.layers import add_norm, apply_rope, rope_angles
    n, length, told = 256, 1024, {}
    pool = KVPool(1, n * length // 16, 16, 8, 128, torch.bfloat16, 'cuda')
    pool.buffer.normal_()
    table = TableManager(n, length, 16, pool.dummy_page, 'cuda')
    table.write(*np.indices((n, length // 16)).reshape(2, -1), np.random.default_rng(0).permutation(pool.num_pages).astype(np.int32))
    table.flush()
    def fresh(): return choose_attention('flashinfer', pool, table.page_table, num_heads=16)
    ours = fresh()
    reference = TorchAttention(pool, table.page_table)
    def batch(cached, lens):
        cached, lens = np.array(cached), np.array(lens)
        rows = np.arange(len(lens))
        owner, at = rows.repeat(lens - cached), np.concatenate([np.arange(*o) for o in zip(cached, lens)])
        return Batch([], ForwardMode.MIXED, 1, rows, cached, lens, owner, at, table.slots(owner, at), rows)
    def qkv(b): return torch.randn(len(b.positions), 32, 128, device='cuda').bfloat16().split([16, 8, 8], 1)
    x = torch.randn(3, 8, 128, device='cuda').bfloat16()
    table_of, flat, weight = rope_angles(torch.arange(3, device='cuda'), torch.rand(64, device='cuda'), x), x.flatten(1), torch.ones(1024, device='cuda').bfloat16()
    def first(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    once = dict(norm=lambda: add_norm(flat.clone(), flat.clone(), weight, 1e-6), rope=lambda: apply_rope(x.clone(), x.clone(), table_of),
                decode=lambda: fresh().prepare(batch([9], [10])), prefill=lambda: fresh().prepare(batch([0], [10])))
    with ThreadPoolExecutor(len(once)) as pool:   # each compiles in processes of its own
        told |= {f'{name}_compile_s': seconds for name, seconds in zip(once, pool.map(first, once.values()))}
    for b in (batch([99, 7, 1023], [100, 8, 1024]), batch([0, 64, 1000], [300, 70, 1024]), batch([0, 0], [300, 17])):
        began, x = time.perf_counter(), qkv(b)
        got = ours.forward(*x, 0, ours.prepare(b))
        torch.cuda.synchronize()
        told[f'{kind_of(b)}_first_s'] = time.perf_counter() - began
        torch.testing.assert_close(got, reference.forward(*x, 0, reference.prepare(b)), rtol=.02, atol=.02)
    full = batch([length - 1] * n, [length] * n)
    x, planned = qkv(full), ours.prepare(full)
    static = ours.static(full, planned.out_loc)
    def host_us(f):   # without waiting for the device
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            f()
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2] * 1e6
    n_bytes, seconds = 2 * n * length * 8 * 128 * 2, best_time(lambda: ours.forward(*x, 0, planned), 'cuda')
    return told | dict(plan_us=host_us(lambda: ours.prepare(full)), update_us=host_us(lambda: ours.update(static, full)),
                       decode_layer_us=seconds * 1e6, decode_layer_share_of_bandwidth=n_bytes / seconds / memory_bandwidth(2**30, 'cuda'))

def small_checkpoint(folder: str, dtype: str):
    from reference import make_checkpoint
    make_checkpoint('Qwen3', Path(folder), dtype=dtype, head_dim=128, hidden_size=256, max_position_embeddings=256)

def parity(args) -> dict:
    "float32 with the reference attention: the tokens of transformers. bfloat16 with FlashInfer and graphs: as near to float32 as transformers is"
    import torch
    from minisgl_lit.core.sampling_params import SamplingParams
    from minisgl_lit.llm import LLM
    from reference import MAX_NEW, Comparison, generate, load, prompts
    told, greedy = {}, SamplingParams(max_tokens=MAX_NEW, temperature=0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as folder:
        small_checkpoint(folder, 'float32')
        right, comparison = [generate(Path(folder), o) for o in prompts()], Comparison()
        for overlap in (False, True):
            with LLM(folder, device='cuda', dtype='float32', attention='torch', overlap=overlap, page_size=4, num_pages=400, max_prefill_tokens=24) as llm:
                for _ in range(2):
                    for prompt, out, o in zip(prompts(), llm.generate(prompts(), greedy), right):
                        comparison.check(Path(folder), prompt, out.token_ids, o, f'overlap={overlap}')
        comparison.done()
        told |= dict(float32_tokens=comparison.tokens, float32_near_ties=comparison.excused)
        with make_llm(folder, graphs=True, dtype='bfloat16', page_size=16, num_pages=200, max_running_req=8) as llm: ours = [o.token_ids for o in llm.generate(prompts(), greedy)]
        theirs = load(Path(folder), torch.bfloat16)
        def same(answer): return sum(a == b for got, want in zip(answer, right) for a, b in zip(got, want)) / sum(map(len, right))
        with torch.inference_mode():
            reference = [theirs.generate(torch.tensor([o]), attention_mask=torch.ones(1, len(o), dtype=torch.long), max_new_tokens=MAX_NEW,
                                         do_sample=False, pad_token_id=0)[0, len(o):].tolist() for o in prompts()]
        told |= dict(bfloat16_same=same(ours), transformers_bfloat16_same=same(reference))
    if told['bfloat16_same'] < told['transformers_bfloat16_same'] - .15:
        raise AssertionError(f'bfloat16 answers are further from float32 than those of transformers: {told}')
    return told

def equality(args) -> dict:
    "Graphs on and off, overlap on and off, bfloat16: the same answers, but for near ties"
    from minisgl_lit.core.sampling_params import SamplingParams
    from reference import prompts
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        small_checkpoint(folder, 'bfloat16')
        for graphs in (False, True):
            for overlap in (False, True):
                with make_llm(folder, graphs, overlap=overlap, page_size=16, num_pages=200, max_running_req=8) as llm: outs = llm.generate(prompts() * 2, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
                if errors := [o.error for o in outs if o.error]: raise AssertionError(errors[0])
                answers[graphs, overlap] = [o.token_ids for o in outs]
    def same(a, b): return sum(x == y for x, y in zip(a, b)) / len(a)
    base = answers[False, False]
    told = {f'same_graphs_{g}_overlap_{o}': same(base, answers[g, o]) for g, o in answers if (g, o) != (False, False)}
    if min(told.values()) < .9: raise AssertionError(f'answers differ: {told}')
    return told

def bench256(args) -> dict:
    "The field's reference run, with graphs, overlap on and off; the share of this GPU's limit; the host's part of a step; one request alone"
    from minisgl_lit.core.sampling_params import SamplingParams
    from minisgl_lit.tools.roofline import lower_bound, measure_roofline, workloads
    told = {}
    with shape_of_qwen3() as folder:
        for overlap in (True, False):
            with make_llm(folder, True, dummy_weights=True, overlap=overlap, max_running_req=256, max_seq_len=2560, page_size=16) as llm:
                runtime = runtime_of(llm)
                work = workloads['bench256'].draw(runtime.model_config.vocab_size, seed=0)
                wishes = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in work.output_lens]
                llm.generate(work.prompts[:8], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))   # warm
                counts = timed(runtime.scheduler)
                began = time.perf_counter()
                outs = llm.generate(work.prompts, wishes)
                seconds = time.perf_counter() - began
                if errors := [o.error for o in outs if o.error]: raise AssertionError(errors[0])
                n = sum(len(o.token_ids) for o in outs)
                name = 'overlap' if overlap else 'normal'
                told |= {f'{name}_tokens_per_s': n / seconds, f'{name}_seconds': seconds, f'{name}_steps': counts['steps'],
                         f'{name}_host_ms_per_step': 1e3 * (counts['seconds'] - counts['waited']) / counts['steps'],
                         f'{name}_waited_ms_per_step': 1e3 * counts['waited'] / counts['steps']}
                if overlap:
                    limits = measure_roofline(runtime.model_config, runtime.engine.model.head.dtype, runtime.engine.device)
                    prefill, decode = lower_bound(limits, work, 256)
                    whole = prefill.plus(decode).seconds
                    began = time.perf_counter()
                    llm.generate([work.prompts[0][:128]], SamplingParams(max_tokens=256, temperature=0, ignore_eos=True))
                    alone = 256 / (time.perf_counter() - began)
                    told |= dict(memory=str(runtime.memory), recordings=len(runtime.engine.graphs.sizes), input_tokens=sum(map(len, work.prompts)), output_tokens=n, limit_tokens_per_s=n / whole,
                                 share_of_limit=whole / seconds, memory_read_gb_s=limits.bandwidth / 1e9, product_tflop_s=limits.peak_flops / 1e12,
                                 one_request_tokens_per_s=alone, one_request_share=alone * limits.decode([256]).seconds)
            del llm, runtime
            give_back()
    return told

def profile(args) -> dict:
    "GPU busy share in steady decode of 256 requests, with overlap on and off; the kernels that take longest"
    import torch
    from torch.profiler import ProfilerActivity
    from minisgl_lit.core.sampling_params import SamplingParams
    told, until = {}, time.perf_counter() + 30
    with shape_of_qwen3() as folder:
        for overlap in (True, False):
            with make_llm(folder, True, dummy_weights=True, overlap=overlap, max_running_req=256, max_seq_len=2560, page_size=16) as llm:
                s = runtime_of(llm).scheduler
                for i in range(256): s.add(f'p{i}', [i % 1000 + 1] * 500, SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))
                while s.stats()['waiting'] or s.stats()['steps'] < 60: s.step()
                torch.cuda.synchronize()
                with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
                    began, n = time.perf_counter(), 0
                    while n < 60 and (n < 20 or time.perf_counter() < until):
                        s.step()
                        n += 1
                    torch.cuda.synchronize()
                    seconds = time.perf_counter() - began
                kernels = [(o.time_range.start, o.time_range.end, o.name) for o in seen.events() if o.device_type == torch.autograd.DeviceType.CUDA]
                if not kernels: raise AssertionError('the profiler saw no kernel')
                span = max(o[1] for o in kernels) - min(o[0] for o in kernels)
                name = 'overlap' if overlap else 'normal'
                told |= {f'{name}_busy_share': busy(o[:2] for o in kernels) / span, f'{name}_step_ms': 1e3 * seconds / n, f'{name}_kernels_per_step': len(kernels) / n}
                if overlap:
                    by_name: dict[str, float] = {}
                    for a, b, o in kernels: by_name[o] = by_name.get(o, 0) + (b - a) / n
                    told['longest_us_per_step'] = {o[:90]: round(by_name[o], 1) for o in sorted(by_name, key=by_name.get)[:-16:-1]}
            del llm, s
            give_back()
    return told

TINY = """
import sys; sys.path[:0] = ['tests', '.']
import tempfile, gpu_check
from minisgl_lit.core.sampling_params import SamplingParams
with tempfile.TemporaryDirectory() as folder:
    gpu_check.small_checkpoint(folder, 'bfloat16')
    with gpu_check.make_llm(folder, True, page_size=16, num_pages=20, max_running_req=2, max_seq_len=64) as llm: print(len(llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))))
"""

def sanitizer(args) -> dict:
    "memcheck over a tiny run"
    tool = shutil.which('compute-sanitizer') or shutil.which('/usr/local/cuda/bin/compute-sanitizer')
    if not tool: return dict(skipped='compute-sanitizer is not installed')
    done = subprocess.run([tool, '--tool', 'memcheck', '--error-exitcode', '9', '--launch-timeout', '60', sys.executable, '-c', TINY], cwd=ROOT,
                          capture_output=True, text=True)
    tail = (done.stdout + done.stderr)[-1500:]
    if done.returncode: raise AssertionError(f'compute-sanitizer ended with {done.returncode}: {tail}')
    return dict(summary=next((o for o in tail.splitlines() if 'ERROR SUMMARY' in o), tail[-200:]).strip('= '))

def tests(args) -> dict:
    "The GPU tests of the project; of the kernels' shapes those that are timed above, unless all are wanted"
    chosen = 'on_a_gpu or takes_what' if args.wide else 'on_a_gpu and not (64-100 or 256-33 or float16) or takes_what'
    files = ['tests/test_flashinfer.py', 'tests/test_graph.py', 'tests/test_streams.py']
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', *files, '-k', chosen], cwd=ROOT, capture_output=True, text=True)
    if done.returncode: raise AssertionError(done.stdout[-1500:] + done.stderr[-500:])
    return dict(pytest=done.stdout.strip().splitlines()[-1])

STEPS: dict[str, Callable[[argparse.Namespace], dict]] = dict(
    machine=machine, kernels=kernels, parity=parity, equality=equality, bench256=bench256, profile=profile, sanitizer=sanitizer, tests=tests)

# ---- running them ----------------------------------------------------------------------------------------------------------

def run_apart(name: str, seconds: float, args: argparse.Namespace) -> Step:
    "One step in a process group of its own, which is ended when its time is over"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder)/'figures.json', Path(folder)/'log'
        command = [sys.executable, __file__, '--only', name, '--out', str(out)] + ['--wide'] * args.wide
        with log.open('w') as told:
            child = subprocess.Popen(command, cwd=ROOT, stdout=told, stderr=subprocess.STDOUT, start_new_session=True)
            try: child.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return Step(name, False, time.perf_counter() - began, f'not done after {seconds:.0f} s: …{tail(log)}')
        took = time.perf_counter() - began
        if child.returncode or not out.exists(): return Step(name, False, took, tail(log) or f'ended with {child.returncode}')
        return Step(name, True, took, figures=json.loads(out.read_text()))

def tail(log: Path) -> str: return ' | '.join(log.read_text(errors='replace').split('\n')[-12:])[-1500:].strip(' |')

def run_all(args: argparse.Namespace, run: Callable[[str, float, argparse.Namespace], Step] = run_apart) -> dict:
    "All steps; the JSON is written anew after each, so that an interrupted run has told what it knew"
    began, done = time.perf_counter(), []
    for i, name in enumerate(args.steps):
        left = args.seconds - (time.perf_counter() - began)
        seconds = shares(args.steps[i:], left)
        done.append(run(name, seconds, args) if seconds > 1 else Step(name, error='no time was left'))
        print(sentence(done[-1]), flush=True)
        told = report(done, time.perf_counter() - began)
        args.out.write_text(json.dumps(told, indent=1))
    return told

def main(argv: list[str]) -> int:
    args = parse(argv)
    try: import torch
    except ImportError as e:
        print(f'gpu_check: needs torch, which cannot be imported: {e}', file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print('gpu_check: this machine has no GPU that torch can use, so there is nothing to check.', file=sys.stderr)
        return 2
    if args.only:
        args.out.write_text(json.dumps(STEPS[args.only](args)))
        return 0
    told = run_all(args)
    check_report(told)
    return 0 if told['ok'] else 1

if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
