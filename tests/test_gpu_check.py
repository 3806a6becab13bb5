"""The parts of `gpu_check` that need no GPU: what it is asked, how time is shared, what it writes, and that it says when there is none."""
import json, subprocess, time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpu_check
from minisgl_lit.tools import roofline as limits
from minisgl_lit.engine.cuda_graph import bucket_sizes
from minisgl_lit.llm import LLM
from gpu_check import (
    LIMITS, STEPS, Step, busy, check_report, fitting_archives, line, module_state, parse, read_figures, report, run_all, script_of, shares)
from test_graph import fake_capture, record

def test_arguments(capsys):
    args = parse([])
    assert (args.steps, args.seconds, args.out.name, args.wide) == (list(LIMITS), 540, 'gpu_check.json', False)
    assert parse(['bench256', 'tests', '--wide', '--seconds', '60']).steps == ['bench256', 'tests']
    for wrong, text in [(['nothing'], "not 'nothing'"), (['--seconds', '0'], 'must be above 0')]:
        with pytest.raises(SystemExit): parse(wrong)
        assert text in capsys.readouterr().err
    assert list(STEPS) == list(LIMITS) and sum(LIMITS.values()) <= 540

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
    assert len(parts) <= 16 and parts['all'] >= parts['test_gpu_check:inner'] > 0 and max(parts, key=parts.get) == 'all'

def fake(name, seconds, args):
    if name == 'profile': return Step(name, False, 1., 'the profiler saw no kernel')
    return Step(name, True, 1., figures=dict(tokens_per_s=21e3))

def test_a_failed_step_is_recorded_and_the_rest_goes_on(tmp_path, capsys):
    args = parse(['--out', str(tmp_path/'told.json')])
    told = run_all(args, fake)
    check_report(told)
    assert json.loads((tmp_path/'told.json').read_text()) == told and not told['ok']
    assert [o for o, step in told['steps'].items() if not step['ok']] == ['profile'] and list(told['steps']) == list(LIMITS)
    lines = [json.loads(o) for o in capsys.readouterr().out.splitlines()]
    assert [*map(list, lines)] == [[o] for o in LIMITS] and lines[0]['machine']['figures'] == dict(tokens_per_s=21e3)
    assert [name for part in lines for name, o in part.items() if o['error']] == ['profile']
    assert run_all(parse(['machine', '--out', str(tmp_path/'told.json')]), fake)['ok']

def test_who_comes_when_no_time_is_left(tmp_path):
    def slow(name, seconds, args):
        time.sleep(.2)
        return Step(name, True, .2)
    told = run_all(parse(['machine', 'modules', '--seconds', '1.1', '--out', str(tmp_path/'told.json')]), slow)
    assert [o['error'] for o in told['steps'].values()] == ['no time was left', None]   # 20 : 120 of a second is too little

def test_what_is_no_report_is_refused():
    good = report([Step('machine', True), Step('tests', False, error='one failed')], 3)
    check_report(good)
    for wrong in (dict(ok=None), dict(steps=[]), dict(version='1'), dict(steps=dict(other={})), dict(steps=dict(machine=dict(ok=True))),
                  dict(steps=dict(machine=dict(ok=True, seconds=1, error='but', figures={})))):
        with pytest.raises(ValueError): check_report(good | wrong)
    assert json.loads(line(Step('machine', figures=dict(a=1/3, b=dict(c=2/3), d='x'))))['machine']['figures'] == dict(a=.3333, b=dict(c=.6667), d='x')

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
        small = dict(device='cpu', attention='torch', max_running_req=8, num_pages=200) | dict.fromkeys({'max_seq_len'} & set(settings), 400)
        llm = LLM(str(path), **settings | small)
        record(gpu_check.runtime_of(llm), bucket_sizes(8) if graphs else [], fake_capture([]))
        return llm
    monkeypatch.setattr(gpu_check, 'make_llm', make_llm)
    monkeypatch.setattr(gpu_check, 'QWEN3_06B', gpu_check.QWEN3_06B | dict(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=500, num_attention_heads=2, num_key_value_heads=1, head_dim=16))
    monkeypatch.setitem(limits.workloads, 'bench256', limits.WorkloadShape(9, (10, 40), (3, 9)))
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(gpu_check, 'decode_ms', lambda runtime, n, ms=gpu_check.decode_ms: ms(runtime, n, context=20, steps=5))
    told = {k: v for part in gpu_check.bench256(parse([])) for k, v in part.items()}
    assert told['output_tokens'] > 20 and 0 < told['share_of_limit'] < 1 and json.dumps(told)
    assert told['normal_random']['steps'] >= 9 and told['normal_random']['cached_tokens'] == 0 and list(told['overlap_step_ms']) == ['1']

def test_which_compiled_modules_are_taken_along(tmp_path):
    names = ['flashinfer-0.6.13-sm90a-aot.tgz', 'flashinfer-0.6.13-sm80-aot.tgz', 'flashinfer-0.6.18.post1-sm90a-aot.tgz', 'other.tgz']
    for name in names: (tmp_path/name).touch()
    assert [[o.name for o in fitting_archives(tmp_path, *o)] for o in (('0.6.13', '90'), ('0.6.13', '80'), ('0.6.18.post1', '90'), ('0.6.1', '90'))] \
        == [[o] for o in names[:3]] + [[]]
    assert fitting_archives(tmp_path/'nowhere', '0.6.13', '90') == []
    assert [module_state('norm', ['norm'], []), module_state('batch_*', ['norm'], ['batch_1']), module_state('norm', [], [])] == ['aot', 'kept', 'compiled']

def test_figures_are_read_up_to_the_last_whole_line():
    assert read_figures('{"a": 1}\n{"b": 2, "a": 3}\n{"c"') == dict(a=3, b=2) and read_figures('') == {}

def test_chapters_as_programs():
    "All that a GPU would run of them, without what is never run"
    def cell(*lines, kind='code'): return dict(cell_type=kind, source=[f'{o}\n' for o in lines])
    book = dict(cells=[cell('#| export', 'a'), cell('prose', kind='markdown'), cell('#| gpu', '#| volatile', 'b'), cell('#| eval: false', 'c'), cell('#| slow', 'd')])
    source = script_of(book)
    assert 'a\n' in source and 'b\n' in source and not {'prose', 'c', 'd'} & set(source.split())
    for name in gpu_check.CELL_CHAPTERS: compile(script_of(json.loads((gpu_check.ROOT/'nbs'/f'{name}.ipynb').read_text())), name, 'exec')

@pytest.mark.skipif(torch.cuda.is_available(), reason='this machine has a GPU')
def test_without_a_gpu_it_says_so():
    done = subprocess.run(['bash', str(Path(__file__).with_name('gpu_check')), 'machine'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == '' and done.stderr.count('\n') == 1 and 'no GPU' in done.stderr
