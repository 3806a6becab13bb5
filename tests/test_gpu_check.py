"""The parts of `gpu_check` that need no GPU: what it is asked, how time is shared, what it writes, and that
it says when there is none."""
import json, platform, re, subprocess, time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_check
from minisgl_lit.tools import roofline as limits
from minisgl_lit.core.engine.cuda_graph import bucket_sizes
from minisgl_lit.llm import LLM
from minisgl_lit.tools.load_generator import RequestRecord
from gpu_check import (
    LIMITS, STEPS, Step, busy, check_report, fitting_archives, line, module_state, parse, read_figures,
    report, run_all, script_of, shares)
from test_graph import fake_capture, record

def test_arguments(capsys):
    args = parse([])
    assert ((args.steps, args.seconds, args.out.name, args.wide)
            == (list(LIMITS), 420, 'gpu_check.json', False))
    assert parse(['bench256', 'tests', '--wide', '--seconds', '60']).steps == ['bench256', 'tests']
    for wrong, text in [(['nothing'], "not 'nothing'"), (['--seconds', '0'], 'must be above 0')]:
        with pytest.raises(SystemExit): parse(wrong)
        assert text in capsys.readouterr().err
    assert list(STEPS) == list(LIMITS) and sum(LIMITS.values()) <= 420

@given(st.lists(st.sampled_from(list(LIMITS)), unique=True, min_size=1), st.floats(1, 540), st.floats(0, 1))
def test_steps_never_take_more_than_there_is(names, left, used):
    total = left
    for i in range(len(names)):
        seconds = shares(names[i:], left)
        assert 0 <= seconds <= left + 1e-9
        if sum(LIMITS[o] for o in names[i:]) <= left: assert seconds >= LIMITS[names[i]]
        else: assert seconds <= LIMITS[names[i]]   # and what is left over goes to the next
        left -= min(seconds, left) * used
    assert 0 <= left <= total

@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_busy_counts_each_moment_once(spans):
    assert busy((a, a + n) for a, n in spans) == len({t for a, n in spans for t in range(a, a + n)})

def test_parts_of_the_host_add_up():
    def inner(): return sum(range(3000))
    def step(): return inner()
    parts = gpu_check.host_parts(step, 20)
    assert (len(parts) <= 16 and parts['all'] >= parts['test_gpu_check:inner'] > 0
            and max(parts, key=parts.get) == 'all')

def fake(name, seconds, args):
    if name == 'profile': return Step(name, False, 1., 'the profiler saw no kernel')
    return Step(name, True, 1., figures=dict(tokens_per_s=21e3))

def test_a_failed_step_is_recorded_and_the_rest_goes_on(tmp_path, capsys):
    args = parse(['--out', str(tmp_path/'told.json')])
    told = run_all(args, fake)
    check_report(told)
    assert json.loads((tmp_path/'told.json').read_text()) == told and not told['ok']
    assert ([o for o, step in told['steps'].items() if not step['ok']] == ['profile']
            and list(told['steps']) == list(LIMITS))
    lines = [json.loads(o) for o in capsys.readouterr().out.splitlines()]
    assert ([*map(list, lines)] == [[o] for o in LIMITS]
            and lines[0]['machine']['figures'] == dict(tokens_per_s=21e3))
    assert [name for part in lines for name, o in part.items() if o['error']] == ['profile']
    assert run_all(parse(['machine', '--out', str(tmp_path/'told.json')]), fake)['ok']

def test_who_comes_when_no_time_is_left(tmp_path):
    def slow(name, seconds, args):
        time.sleep(.2)
        return Step(name, True, .2)
    told = run_all(parse(['machine', 'modules', '--seconds', '1.1', '--out', str(tmp_path/'told.json')]),
                   slow)
    # half of 1.1 seconds is too little
    assert [o['error'] for o in told['steps'].values()] == ['no time was left', None]

def test_what_is_no_report_is_refused():
    good = report([Step('machine', True), Step('tests', False, error='one failed')], 3)
    check_report(good)
    for wrong in (dict(ok=None), dict(steps=[]), dict(version='1'), dict(steps=dict(other={})),
                  dict(steps=dict(machine=dict(ok=True))),
                  dict(steps=dict(machine=dict(ok=True, seconds=1, error='but', figures={})))):
        with pytest.raises(ValueError): check_report(good | wrong)
    assert (json.loads(line(Step('machine', figures=dict(a=1/3, b=dict(c=2/3), d='x'))))['machine']['figures']
            == dict(a=.3333, b=dict(c=.6667), d='x'))

def test_a_step_apart_is_ended_when_its_time_is_over(tmp_path, monkeypatch):
    script = tmp_path/'hangs.py'
    script.write_text('''import sys, time
open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{"a": 1}\\n{"b": ')
print('began', flush=True); time.sleep(60)''')
    monkeypatch.setattr(gpu_check, '__file__', str(script))
    began = time.perf_counter()
    step = gpu_check.run_apart('machine', 2., parse([]))
    assert not step.ok and 'not done after 2 s' in step.error and time.perf_counter() - began < 20
    assert step.figures in (dict(a=1), {}), 'what it told is kept, unless two seconds were too short to begin'
    script.write_text('raise SystemExit("no such card")')
    assert gpu_check.run_apart('machine', 30., parse([])).error == 'no such card'
    script.write_text('import sys; open(sys.argv[sys.argv.index("--out") + 1], "w").write("{\\"a\\": 1}\\n")')
    assert gpu_check.run_apart('machine', 30., parse(['--wide'])).figures == dict(a=1)

def test_the_benchmark_runs_on_a_cpu_over_the_stand_in(monkeypatch):
    "Not what a GPU says, but that every word is understood: a tiny shape, few requests"
    def make_llm(path, graphs, **settings):
        small = (dict(device='cpu', attention='torch', max_running_req=8,
                      num_pages=200) | dict.fromkeys({'max_seq_len'} & set(settings), 400))
        llm = LLM(str(path), **settings | small)
        record(gpu_check.runtime_of(llm), bucket_sizes(8) if graphs else [], fake_capture([]))
        return llm
    monkeypatch.setattr(gpu_check, 'make_llm', make_llm)
    monkeypatch.setattr(gpu_check, 'QWEN3_06B', gpu_check.QWEN3_06B | dict(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=500, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16))
    monkeypatch.setitem(limits.workloads, 'bench256', limits.WorkloadShape(9, (10, 40), (3, 9)))
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(gpu_check, 'compilations', lambda runtime: 0)
    monkeypatch.setattr(gpu_check, 'decode_ms',
        lambda runtime, n, ms=gpu_check.decode_ms, **params: ms(runtime, n, context=20, steps=5, **params))
    told = {k: v for part in gpu_check.bench256(parse([])) for k, v in part.items()}
    assert told['output_tokens'] > 20 and 0 < told['share_of_limit'] < 1 and json.dumps(told)
    for name in ('overlap_greedy', 'overlap_random', 'overlap_qwen3', 'normal_greedy'):
        assert (told[name]['steps'] >= 9 and told[name]['cached_tokens'] == told[name]['compilations'] == 0
                and list(told[f'{name}_step_ms']) == ['1'])
    monkeypatch.setattr(gpu_check, 'compilations', lambda runtime: 2)
    with pytest.raises(AssertionError, match='4 kernels were compiled after the start'):
        [*gpu_check.bench256(parse([]))]

def test_which_compiled_modules_are_taken_along(tmp_path):
    names = ['flashinfer-0.6.13-sm90a-aot.tgz', 'flashinfer-0.6.13-sm80-aot.tgz',
             'flashinfer-0.6.18.post1-sm90a-aot.tgz', 'other.tgz']
    for name in names: (tmp_path/name).touch()
    assert ([[o.name for o in fitting_archives(tmp_path, *o)]
             for o in (('0.6.13', '90'), ('0.6.13', '80'), ('0.6.18.post1', '90'), ('0.6.1', '90'))] \
        == [[o] for o in names[:3]] + [[]])
    assert fitting_archives(tmp_path/'nowhere', '0.6.13', '90') == []
    assert ([module_state('norm', ['norm'], []), module_state('batch_*', ['norm'], ['batch_1']),
             module_state('norm', [], [])] == ['aot', 'kept', 'compiled'])

ILLEGAL = 'torch.AcceleratorError: CUDA error: an illegal memory access was encountered'
CPP = ['CUDA kernel errors might be asynchronously reported at some other API call',
       'For debugging consider passing CUDA_LAUNCH_BLOCKING=1',
       'Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44 (most recent call '
       'first):', *(f'frame #{i}: <unknown function> + {i:#x} (0x7f861262 in libc.so.6)' for i in range(42))]
RAISED = ['Traceback (most recent call last):', '  File "gpu_check.py", line 7, in bench256', '    work()',
          '    ~~~~^^', ILLEGAL, *CPP]
ABORTED = ["terminate called after throwing an instance of 'c10::AcceleratorError'",
           '  what():  CUDA error: an illegal memory access was encountered', *CPP,
           'Fatal Python error: Aborted', '', 'Current thread 0x0001 (most recent call first):',
           '  File "choice.py", line 60 in measure', 'Extension modules: numpy (total: 1)']

def test_an_error_keeps_what_says_something():
    """The first line that names CUDA and the traceback in Python, whatever C++ adds, before it and behind it;
    also if Python was ended before it could raise"""
    told = gpu_check.what_failed('\n'.join(['Attention, measured', *RAISED, *ABORTED]))
    assert told == f'  File "gpu_check.py", line 7, in bench256 |     work() | {ILLEGAL}'.strip()
    told = gpu_check.what_failed('\n'.join(['CUDA graphs are off', *ABORTED]))
    assert (told == 'what():  CUDA error: an illegal memory access was encountered | Current thread 0x0001 '
                    '(most recent call first): |   File "choice.py", line 60 in measure')
    late = [*RAISED, 'During handling of the above exception, another exception occurred:',
        'Traceback (most recent call last):', '  File "b.py", line 1, in close', 'RuntimeError: it has died',
            'Exception ignored in: <function __del__>', 'Traceback (most recent call last):',
            '  File "c.py", line 1, in __del__', 'OSError: no']
    told = gpu_check.what_failed('\n'.join(late))
    assert told.startswith(f'{ILLEGAL} |') and 'File "b.py"' in told and 'RuntimeError: it has died' in told
    assert gpu_check.what_failed('one\ntwo\n\n') == 'one | two' and gpu_check.what_failed('') == ''
    many = [*RAISED[:2] * 50, 'AssertionError: first', *(f'line {i}' for i in range(99))]
    told = gpu_check.what_failed('\n'.join(many))
    assert 'AssertionError: first | line 0 | …' in told and told.endswith('line 98') and len(told) < 2200

@pytest.mark.parametrize('ending, words', [
    ('raise RuntimeError("CUDA error: no\\n" + "\\n".join(f"frame #{i}: x" for i in range(40)))',
     ['line 5, in inner', 'RuntimeError: CUDA error: no']),
    ('print("CUDA error: yes", flush=True); os.abort()', ['CUDA error: yes', 'line 5 in inner'])])
def test_a_step_that_fails_says_where(tmp_path, monkeypatch, ending, words):
    "Through all of it: in a process apart, which raises, or is ended by C++"
    script = tmp_path/'fails.py'
    script.write_text(f"""import os, sys
sys.path[:0] = [{str(gpu_check.ROOT/'tests')!r}, {str(gpu_check.ROOT)!r}]
import gpu_check, torch
def inner():
    {ending}
def step(args):
    yield dict(a=1)
    inner()
gpu_check.STEPS['machine'], torch.cuda.is_available = step, lambda: True
sys.exit(gpu_check.main(sys.argv[1:]))""")
    monkeypatch.setattr(gpu_check, '__file__', str(script))
    step = gpu_check.run_apart('machine', 60., parse([]))
    assert not step.ok and step.figures == dict(a=1) and step.error, step
    for word in words: assert word in step.error, step.error
    assert 'frame #1:' not in step.error

def test_a_step_that_hangs_says_where(tmp_path, monkeypatch):
    script = tmp_path/'hangs.py'
    script.write_text('import time\ndef waits(): time.sleep(60)\nwaits()')
    monkeypatch.setattr(gpu_check, '__file__', str(script))
    step = gpu_check.run_apart('machine', 2., parse([]))
    assert 'not done after 2 s' in step.error and 'line 2 in waits' in step.error

KEY = 'dtype_idx_i32_head_dim_qk_{0}_head_dim_vo_{0}_posenc_0_use_swa_False_use_logits_cap_False'
BUILT = ([f'batch_{kind}_with_kv_cache_dtype_q_bf16_dtype_kv_{stored}_dtype_o_bf16_{KEY.format(dim)}{end}'
          for dim in (64, 128) for stored in ('bf16', 'e4m3')
         for kind, end in (('decode', ''), ('prefill', '_f16qk_False'), ('prefill', '_f16qk_False_sm90'))] + \
        [
            'batch_attention_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_posenc_0_use_logits_soft_cap_false_use_profiler_false'])

def test_a_kernel_is_one_module():
    """So that one of another head size, cache or architecture is not taken for it; only two kernels of
    FlashInfer's are in one"""
    import fnmatch
    kernels = ([(o, kv) for kv in ('bf16', 'e4m3') for o in ('fa2', 'fa3', 'cuda_cores', 'tensor_cores')]
               + [('batch_attention', 'bf16')])
    found = {o: fnmatch.filter(BUILT, gpu_check.module_of(*o)) for o in kernels}
    assert all(len(o) == 1 for o in found.values()) and len({o[0] for o in found.values()}) == 7
    assert found['fa2', 'e4m3'] == found['tensor_cores', 'e4m3'] and found['fa3', 'bf16'][0].endswith('sm90')

def test_what_has_to_be_compiled_comes_last(monkeypatch):
    "Each part runs in its step or in the last one, and one that fails keeps no other from its turn"
    def part(name):
        def work():
            if name.endswith('b'): raise ValueError('no such kernel')
            yield {name: 1}
        return work
    made = {name: (name[-1], part(name)) for name in ('prefill_a', 'prefill_b', 'prefill_c', 'attend_a')}
    monkeypatch.setattr(gpu_check, 'parts', lambda: made)
    monkeypatch.setattr(gpu_check, 'all_trials', dict)
    monkeypatch.setattr(gpu_check, 'load_modules', lambda trials: iter([dict(loaded=[*trials])]))
    def step(generator):
        seen = []
        try:
            for o in generator: seen.append(o)
        except AssertionError as e: seen.append(str(e))
        return seen
    for compiled, now, later in (('ac', [dict(late=['prefill_b']), dict(prefill_a=1), dict(prefill_c=1)],
                                  [dict(parts=['prefill_b']), dict(loaded=[]),
                                   dict(prefill_b='no such kernel'), 'these parts fail: prefill_b']),
                                 ('abc', [dict(prefill_a=1), dict(prefill_b='no such kernel'),
                                     dict(prefill_c=1), 'these parts fail: prefill_b'], [dict(parts=[])])):
        monkeypatch.setattr(gpu_check, 'is_compiled', lambda module, compiled=compiled: module in compiled)
        assert step(gpu_check.parts_of('prefill')) == now and step(gpu_check.late(parse([]))) == later

def test_each_shape_of_prompts_is_timed_before_the_next_is_prepared(monkeypatch):
    """All shapes share the memory of a plan; and one that cannot be prepared fails its part, not the step's
    others"""
    order = []
    def works(kernel):
        for shape in ('fresh', 'cached'):
            if (kernel, shape) == ('fa3', 'cached'): raise ValueError('no such plan')
            order.append(f'prepare {shape}')
            yield shape
    no_llm = SimpleNamespace(runtime=SimpleNamespace(model_config=None,
        engine=SimpleNamespace(model=SimpleNamespace(head=torch.zeros(1)), device='cpu')))
    for name, o in dict(prefill_works=works, recorded_us=lambda work: order.append(f'time {work}') or 1.,
            PROMPTS=(1,), make_llm=lambda *args, **settings: nullcontext(no_llm), arch=lambda: '90',
                        is_compiled=lambda module: True, prompt_seconds=lambda llm, prompts: 1.,
                        compiled_attention=lambda: 'fa2').items():
        monkeypatch.setattr(gpu_check, name, o)
    monkeypatch.setattr(limits, 'measure_roofline',
                        lambda *o: SimpleNamespace(prefill=lambda lengths: SimpleNamespace(seconds=.5)))
    monkeypatch.setattr(limits.WorkloadShape, 'draw', lambda *o, **seed: SimpleNamespace(prompts=[[1]]))
    no_llm.runtime.model_config = SimpleNamespace(vocab_size=9)
    told = []
    with pytest.raises(AssertionError, match='these parts fail: prefill_fa3'):
        for o in gpu_check.prefill(parse([])): told.append(o)
    assert order == ['prepare fresh', 'time fresh', 'prepare cached', 'time cached', 'prepare fresh',
                     'time fresh']
    assert (dict(fa2_layer=dict(fresh_us=1., cached_us=1.)) in told
            and told[-1] == dict(prefill_fa3='no such plan'))

def test_attention_is_named_so_that_no_step_compiles(monkeypatch):
    for arch, compiled, name in (('90', True, 'flashinfer'), ('90', False, 'fa2,flashinfer'),
                                 ('80', False, 'flashinfer')):
        monkeypatch.setattr(gpu_check, 'arch', lambda arch=arch: arch)
        monkeypatch.setattr(gpu_check, 'is_compiled', lambda module, compiled=compiled: compiled)
        assert gpu_check.compiled_attention() == name

@given(st.lists(st.tuples(st.floats(0, 20), st.lists(st.floats(0, 5), min_size=1, max_size=9)), min_size=1,
                max_size=20))
def test_a_steady_rate_counts_tokens_where_requests_still_come(sent):
    """A request's tokens belong to its events in equal parts; those of the first quarter, and of the time
    after the last request, are not counted"""
    records = [RequestRecord(due, [due + o for o in sorted(after)], tokens=3 * len(after))
               for due, after in sent]
    began = min(o.due for o in records)
    counted = sum(3 for o in records for t in o.event_times if 5 <= t - began < 20)
    assert abs(gpu_check.steady_rate(records, 20.) * 15 - counted) < 1e-6
    assert gpu_check.steady_rate([replace(o, error='it has died') for o in records], 20.) == 0

def test_a_report_names_no_machine():
    assert report([], 1)['host'].split() == [platform.system(), platform.machine()]

def test_figures_are_read_up_to_the_last_whole_line():
    assert read_figures('{"a": 1}\n{"b": 2, "a": 3}\n{"c"') == dict(a=3, b=2) and read_figures('') == {}

def test_chapters_as_programs():
    "All that a GPU would run of them, without what is never run"
    def cell(*lines, kind='code'): return dict(cell_type=kind, source=[f'{o}\n' for o in lines])
    book = dict(cells=[cell('#| export', 'a'), cell('prose', kind='markdown'),
                       cell('#| gpu', '#| volatile', 'b'), cell('#| eval: false', 'c'), cell('#| slow', 'd')])
    source = script_of(book)
    assert 'a\n' in source and 'b\n' in source and not {'prose', 'c', 'd'} & set(source.split())
    book = gpu_check.CELL_CHAPTERS + gpu_check.WIDE_CHAPTERS
    having = [o.relative_to(gpu_check.ROOT/'nbs').with_suffix('').as_posix()
              for o in sorted((gpu_check.ROOT/'nbs').rglob('*.ipynb')) if 'weekend' not in o.parts
              and '.ipynb_checkpoints' not in o.parts
              and re.search(r'"#\| gpu\\n', o.read_text(encoding='utf-8'))]
    assert sorted(book) == having, 'each chapter with a cell for a GPU, and no other'
    for name in book:
        compile(script_of(json.loads((gpu_check.ROOT/'nbs'/f'{name}.ipynb').read_text())), name, 'exec')

@pytest.mark.skipif(torch.cuda.is_available(), reason='this machine has a GPU')
def test_without_a_gpu_it_says_so():
    done = subprocess.run(['bash', str(Path(__file__).with_name('gpu_check')), 'machine'],
                          capture_output=True, text=True, timeout=120)
    assert (done.returncode == 2 and done.stdout == '' and done.stderr.count('\n') == 1
            and 'no GPU' in done.stderr)
