"""Costs against counts by hand, least times against a plain reckoning, and the form of every report."""
import inspect
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from minisgl_lit.tools import bench, roofline as limits
from minisgl_lit import cli
from minisgl_lit.tools.bench import TokenTimes, BenchmarkTarget, percentiles
from minisgl_lit.tools.busy import benchmarks
from minisgl_lit.config import EngineConfig
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.tools.roofline import (
    ModelCosts, LowerBound, Roofline, WorkloadShape, Workload, lower_bound, workloads)
from minisgl_lit.kernels.plan import load_kernels, team_c
from minisgl_lit.core.models.decoder import ModelConfig
from minisgl_lit.core.models.moe import MoeMlp
from minisgl_lit.core.outputs import EngineCoreOutput

tiny = EngineConfig(num_pages=60, threads=1, device="cpu")
qwen3 = ModelConfig(architecture="Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, num_layers=28,
                    intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True,
                    tie_word_embeddings=True)
moe = replace(qwen3, architecture="Qwen3MoeForCausalLM", hidden_size=2048, num_layers=48, num_heads=32,
              num_kv_heads=4,
              mlps=(MoeMlp(128, 8, 768),) * 48)


def test_costs_of_a_dense_model():
    "Qwen3-0.6B: 596,049,920 weights in all, of which the embedding table is also the head"
    c = ModelCosts.of(qwen3, torch.bfloat16)
    layer = 2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128 + 3 * 3072 * 1024 + 2 * 1024
    assert (c.layer_weights, c.head_weights, c.experts) == (28 * layer, 151936 * 1024, ())
    assert c.layer_weights + c.head_weights + 1024 == 596_049_920
    assert c.active_weights == c.weights_read(1) == c.weights_read(1000) == c.layer_weights
    assert (c.token_kv * c.itemsize, c.pair_flops) == (28 * 2 * 8 * 128 * 2, 28 * 4 * 16 * 128)


def test_costs_of_a_model_of_experts():
    "Qwen3-30B-A3B: 30.5 billion weights, of which a token uses 3.3 billion"
    c = ModelCosts.of(moe, torch.bfloat16)
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048
    expert = 3 * 768 * 2048
    assert c.layer_weights == 48 * (attention + 128 * 2048)
    assert c.experts == ((128 * expert, 8 / 128),) * 48
    assert c.layer_weights + 48 * 128 * expert + 2 * c.head_weights + 2048 == 30_532_122_624
    assert c.active_weights == c.weights_read(1) == c.layer_weights + 48 * 8 * expert
    two = c.layer_weights + 48 * expert * (16 - 8 * 8 / 128)   # the second's eight, less those the first had
    assert c.weights_read(2) == pytest.approx(two)
    assert c.weights_read(10_000) == pytest.approx(c.layer_weights + 48 * 128 * expert)


def test_a_dense_first_layer_and_a_shared_expert():
    mixed = replace(moe, num_layers=2, intermediate_size=100,
                    mlps=(moe.mlps[0], MoeMlp(4, 1, 10, shared_size=7)))
    mixed = replace(mixed, mlps=(replace(qwen3, intermediate_size=100).mlp(0), mixed.mlps[1]))
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048
    c = ModelCosts.of(mixed, torch.float32)
    assert c.layer_weights == 2 * attention + 3 * 100 * 2048 + 4 * 2048 + 2048 + 3 * 7 * 2048
    assert c.experts == ((4 * 3 * 10 * 2048, 1 / 4),)


def test_the_faster_format_computes_and_is_named(monkeypatch):
    rates = {torch.float32: 5., torch.bfloat16: 1.}
    monkeypatch.setattr(limits, "matmul_rate", lambda dtype, device: rates[dtype])
    assert (limits.peak_matmul_rate(torch.bfloat16, "cpu") == limits.peak_matmul_rate(torch.float32, "cpu")
            == (5., torch.float32))
    assert limits.peak_matmul_rate(torch.bfloat16, "cuda") == (1., torch.bfloat16)
    rates[torch.bfloat16] = 9.
    assert limits.peak_matmul_rate(torch.bfloat16, "cpu") == (9., torch.bfloat16)
    assert limits.peak_matmul_rate(torch.float32, "cpu") == (5., torch.float32)


def test_the_parts_of_a_step_add_up():
    "The kernels' times, their sum, the step; and all weights are read once"
    if not load_kernels(team_c): pytest.skip("no compiler, so no plan")
    costs = ModelCosts.of(bench._model("embedded"), torch.float32)
    for batch in (1, 3):
        report = bench.cpu(tiny, batch=batch, context=40, steps=4)
        *parts, kernels, variation, whole, beyond, read = report.figures
        times = [o.value for o in parts]
        assert (all(o > 0 for o in times) and sum(times) == pytest.approx(kernels.value)
                and kernels.value < whole.value)
        assert (kernels.value + variation.value + beyond.value == pytest.approx(whole.value)
                and variation.value > -1e-9 and beyond.value > 0)
        bytes_read = {o.name.split(" ×")[0]: o.n_bytes for o in parts}
        assert bytes_read["attend"] == batch * 40 * costs.token_kv * costs.itemsize
        weights = sum(bytes_read.values()) - bytes_read["attend"]
        least = costs.itemsize * (costs.layer_weights + costs.head_weights)
        assert least < weights < 1.02 * least   # the final norm, and rows of padding
        counts = [int(o.name.split("× ")[1]) for o in parts]
        assert sum(counts) == int(kernels.name.split("× ")[1]) > 4 * bench._model("embedded").num_layers
        assert "GB/s" in str(report) and json.loads(report.json())["whole_step"] == whole.value


def test_a_step_that_is_not_recorded_is_refused():
    with pytest.raises(ValueError, match="cpu measures a recorded decode step, and this model has none here"):
        bench.cpu(replace(tiny, dtype="float16"), context=9)


def test_a_measurement_reads_as_much_as_a_token_does(monkeypatch):
    monkeypatch.setattr(limits, "memory_bandwidth", lambda n_bytes, device: n_bytes)
    monkeypatch.setattr(limits, "peak_matmul_rate", lambda dtype, device: (3., torch.float32))
    found, c = limits.measure_roofline(moe, torch.bfloat16, "cpu"), ModelCosts.of(moe, torch.bfloat16)
    assert found == Roofline(c, 2 * (c.active_weights + c.head_weights), 3., torch.float32)


def test_a_gigabyte_is_enough(monkeypatch):
    "How much is read, and that the rate is in bytes"
    read = []
    monkeypatch.setattr(limits, "best_time", lambda work, device: read.append(work.__self__.nbytes) or .5)
    monkeypatch.setattr(torch, "ones", lambda *n, device: torch.empty(n, device="meta"))
    rates = [limits.memory_bandwidth(n, "meta") for n in (1, 2**22 + 1., 2**40)]
    assert read == [2**20, 2**22, 2**30] and rates == [2 * n for n in read]


def test_the_limit_of_memory_is_that_of_the_fastest_reader(monkeypatch):
    "On a CPU a matmul of one row may read better than a sum; its numbers are right, and the best time counts"
    told, times = [], iter((4., .5))
    monkeypatch.setattr(limits, "best_time", lambda work, device: told.append(work()) or next(times))
    assert limits.memory_bandwidth(2**20, "cpu") == 2 * 2**20
    assert told[0] == 2**18 and told[1].shape == (1, 2**8) and told[1].unique() == 1024


def test_a_product_multiplies_and_adds(monkeypatch):
    made = []
    monkeypatch.setattr(limits, "best_time", lambda work, device: made.append(work()) or 4.)
    assert limits.matmul_rate(torch.float32, "cpu") == 2 * made[0].numel() * 1024 / 4
    assert made[0].unique().tolist() == [1024.]


windows = st.lists(st.one_of(st.none(), st.integers(1, 30)), max_size=4).map(tuple)


@given(windows, st.integers(0, 40), st.integers(0, 40))
def test_looks_are_the_sum_of_what_each_token_sees(windows, start, more):
    c = ModelCosts(1, 1, 1, 1, 2, windows=windows)
    def seen(n): return np.mean([n if w is None else min(n, w) for w in windows or (None,)])
    each = [seen(n) for n in range(start + 1, start + more + 1)]
    assert float(c.attention_pairs(start, start + more)) == pytest.approx(sum(each))
    assert [float(c.attended(n)) for n in range(start + 1, start + more + 1)] == pytest.approx(each)
    ends = np.arange(start, start + more + 1)
    assert c.attention_pairs(ends * 0 + start, ends) == pytest.approx(np.cumsum([0., *each]))


requests = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=50)
@given(requests, st.integers(1, 8), st.floats(1e-2, 1e2))
def test_least_serves_everybody_in_as_few_steps_as_there_is_room_for(requests, at_once, read):
    "Against a plain loop over requests, with one list of who runs"
    machine = Roofline(ModelCosts(50, 10, 4, 8, 2, experts=((40, .25),)), bandwidth=read, peak_flops=100.)
    work = Workload([[1] * n for n, _ in requests], [m for _, m in requests])
    waiting, running, steps = list(requests), [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            n, m = waiting.pop(0)
            running.append([n, m - 1])
            running = [o for o in running if o[1]]
        for o in running: o[:] = o[0] + 1, o[1] - 1
        if running: steps.append(machine.decode([o[0] for o in running]))
        running = [o for o in running if o[1]]
    prefill, decode = lower_bound(machine, work, at_once)
    assert decode.memory_bound == pytest.approx(sum(o.memory_bound for o in steps))
    assert decode.compute_bound == pytest.approx(sum(o.compute_bound for o in steps))
    assert prefill == machine.prefill([n for n, _ in requests])


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_step_takes_the_longer_of_both(reading, computing):
    step = LowerBound.step(reading, computing)
    assert step.seconds == max(reading, computing)
    if step.seconds: assert step.by_memory == (reading > computing)


def test_workloads_have_their_sizes():
    sizes = {name: [(len(w.prompts), sum(map(len, w.prompts)), sum(w.output_lens))]
             for name, o in workloads.items() if (w := o.draw(50_000, seed=0))}
    assert sizes["single"] == [(1, 128, 128)] and sizes["long"] == [(2, 8192, 64)]
    assert sizes["prefix"] == [(32, 32 * 544, 32 * 16)] and sizes["bench256"] == [(256, 142_827, 133_966)]
    assert sizes["batch16"][0][0] == 16 and 16 * 64 < sizes["batch16"][0][1] < 16 * 256


@given(st.integers(1, 5), st.tuples(st.integers(1, 9), st.integers(0, 9)), st.integers(0, 5),
       st.integers(2, 20_000), st.integers())
def test_drawn_requests_fit_their_shape(n, length, shared, vocab_size, seed):
    lengths = length[0], sum(length)
    w = WorkloadShape(n, lengths, lengths, shared).draw(vocab_size, seed)
    assert len(w.prompts) == len(w.output_lens) == n and w.prefix_len == shared
    assert all(lengths[0] <= o <= lengths[1] for o in [*w.output_lens, *(len(p) - shared for p in w.prompts)])
    assert all(p[:shared] == w.prompts[0][:shared] and 0 <= min(p) <= max(p) < vocab_size for p in w.prompts)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_percentiles_split_the_waits(seconds):
    for q, f in zip((50, 90, 99), percentiles("x", seconds)):
        assert f.name == f"x p{q}" and f.unit == "ms" and f.limit is None
        below = sum(o * 1e3 <= f.value * (1 + 1e-9) + 1e-9 for o in seconds) / len(seconds)
        above = sum(o * 1e3 >= f.value * (1 - 1e-9) - 1e-9 for o in seconds) / len(seconds)
        one = 1 / len(seconds)   # numpy reads between two values
        assert below >= q / 100 - one and above >= 1 - q / 100 - one


def test_a_wait_counts_from_when_it_was_due():
    "Steps of 50 ms, and a request due every 10 ms: who came during a step has waited already"
    class Slow:
        def __init__(self): self.rids = []
        def add(self, rid, ids, params): self.rids.append(rid)
        @property
        def has_work(self): return bool(self.rids)
        def step(self):
            time.sleep(.05)
            done, self.rids = self.rids, []
            return [EngineCoreOutput(o, [1], "length", times=(0., 0., 0.)) for o in done]
    late = [o.times[1] for o in bench._serve_at_rate(Slow(), Workload([[1]] * 4, [1] * 4), rate=100.)]
    assert min(late) >= 0 and sum(late) > .05, late


always = {"name", "setting", "figures", "shares"}
waits = {f"{o}_p{q}" for o in ("ttft", "itl") for q in (50, 90, 99)}
ends = {"peak_memory", "weights", "room_for_cache", "prompt_tokens", "cached_tokens", "memory_read",
        "matrix_product"}
phases = {"output", "prefill", "decode", "whole_run"}
expected = dict(
    offline=(dict(requests=2, input_len=5, output_len=3, repeat=1), phases | waits | ends),
    prefix=(dict(requests=3, shared_len=32, own_len=3, output_len=2),
            phases | waits | ends | {"without_cache", "ratio"}),
    latency=(dict(requests=2, input_len=4, output_len=3), {"output"} | waits | ends),
    limits=({}, {"memory_read", "matrix_product", "weights_of_a_token", "cache_of_a_token", "prefill_of_512",
                 "decode_of_1", "decode_of_16", "memory_decides_up_to"}))


@pytest.mark.parametrize("name", expected)
def test_reports_of_a_model(name):
    sizes, keys = expected[name]
    report = benchmarks[name](tiny, **sizes)
    told = json.loads(report.json())
    assert told.keys() == keys | always and told["name"] == name == report.name
    assert told["setting"]["model"] == "embedded" and told["setting"]["products"] == "float32"
    assert all(np.isfinite(told[o]) and told[o] >= 0 for o in keys)
    assert all(0 < o < 50 for o in told["shares"].values())
    assert set(told["shares"]) == {f.name for f in report.figures if f.limit is not None}
    table = str(report).splitlines()
    assert len(table) == 2 + len(report.figures) and table[0].startswith(f"{name}: model embedded")
    if name in ("offline", "prefix"):
        assert all(0 <= f.by_memory <= 1 for f in report.figures if f.name in phases)
    if name == "prefix":
        assert told["cached_tokens"] == 2 * 32 and told["setting"]["cache"] == "radix" and told["ratio"] > 0


def test_figures_of_a_machine_with_known_rates(monkeypatch):
    # a token reads 50 weights
    known = Roofline(ModelCosts(40, 10, 6_000, 0, 1), bandwidth=100., peak_flops=1e9)
    monkeypatch.setattr(bench, "measure_roofline", lambda model, dtype, device: known)
    def told(name, config=tiny, **sizes): return json.loads(benchmarks[name](config, **sizes).json())
    c = told("limits")
    assert ((c["memory_read"], c["matrix_product"], c["weights_of_a_token"], c["cache_of_a_token"])
            == (1e-7, 1., 5e-5, 6.))
    assert c["decode_of_1"] == pytest.approx(100 / (50 + 6_000 * 512))
    assert c["decode_of_16"] == pytest.approx(1600 / (50 + 6_000 * 512 * 16))
    c = told("latency", requests=2, rate=10., input_len=4, output_len=4)
    best = {f["name"]: f["limit"] for f in c["figures"]}
    assert (best["ttft p50"], best["itl p99"]) == pytest.approx((500., (50 + 6_000 * 6) * 10.))
    assert c["output"] <= 8 / .1 and 10 < c["weights"] < 12 and 100 < c["peak_memory"] < 20_000
    c = told("prefix", replace(tiny, cache="none"), requests=2, shared_len=32, own_len=3, output_len=2)
    assert c["cached_tokens"] == 32 and c["ratio"] == c["without_cache"] / c["whole_run"]


def test_every_answer_runs_to_its_end():
    wishes = bench._greedy_params(Workload([[1], [2]], [7, 8]))
    assert wishes == [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (7, 8)]


def test_answers_of_one_token_have_no_decode():
    told = json.loads(benchmarks["offline"](tiny, requests=2, input_len=5, output_len=1, repeat=1).json())
    assert {"output", "prefill", "ttft_p50"} <= told.keys() and not {"decode", "itl_p50"} & told.keys()


def test_report_of_the_scheduler(monkeypatch):
    "Each figure has its control, and they keep their names"
    monkeypatch.setattr(bench, "_step_times",
                        lambda n, steps, **sizes: np.full((steps, len(bench.parts)), float(n)))
    pieces = bench._other_costs()
    monkeypatch.setattr(bench, "_other_costs",
                        lambda: {k: (unit, lambda: 7.) for k, (unit, _) in pieces.items()})
    told = json.loads(benchmarks["scheduler"](steps=3).json())
    sizes = ["64", "64_page_1", "64_long", "256", "256_long", "2048"]
    keys = {f"decode_step_us_{k}" for k in sizes} | {"decode_step_us_256_p99"} | set(pieces)
    keys |= ({f"{part}_us_{n}" for part in bench.parts for n in (64, 256)}
             | {f"control_us_{k}" for k in [*sizes, *pieces]})
    assert told.keys() == keys | always and told["setting"]["steps"] == 3
    assert ((told["decode_step_us_2048"], told["process_us_64"], told["lpm_128_ms"])
            == (2048 * len(bench.parts), 64, 7))
    assert all(told[f"control_us_{k}"] > 0 for k in [*sizes, *pieces])


def test_report_of_the_start(monkeypatch):
    for name in ("_seconds", "_seconds_to_serve"): monkeypatch.setattr(bench, name, lambda *args: 2.)
    told = json.loads(benchmarks["start"]().json())
    names = {"import minisgl_lit", "import LLM", "first answer of LLM", "first answer of serve"}
    assert (told.keys() == {o.replace(" ", "_") for o in names} | always
            and told["shares"] == dict.fromkeys(names, 1.))


def test_a_command_line_can_be_made_of_the_signatures():
    for name, run in benchmarks.items():
        first, *rest = inspect.signature(run).parameters.values()
        if first.name == "config":
            assert first.annotation is EngineConfig and first.default is inspect.Parameter.empty
        else: rest = [first, *rest]
        assert all(o.default is not inspect.Parameter.empty and o.annotation is not inspect.Parameter.empty
                   for o in rest)
        assert name == run.__name__ and run.__doc__ and "\n" not in run.__doc__


def test_a_failed_answer_is_told():
    with BenchmarkTarget(tiny) as target:
        bad = EngineCoreOutput("x", [], "error", error="the engine failed: no numbers")
        with pytest.raises(ValueError, match="the engine failed: no numbers"): target._timed(lambda: [bad])
        with pytest.raises(ValueError, match="prompt 1: .*5000"):
            target.run(Workload([[1], [1] * 5000], [1, 1]))


def test_the_cache_is_empty_at_the_beginning_of_a_run():
    with BenchmarkTarget(tiny) as target:
        work = WorkloadShape(1, (40, 40), (3, 3)).draw(target.model.vocab_size)
        runs = [target.run(work) for _ in range(2)]
    assert [o.outputs[0].cached_tokens for o in runs] == [0, 0]
    assert all(isinstance(o.token_times, TokenTimes)
               and o.seconds >= sum(o.token_times.seconds.values()) * .99 for o in runs)


wrong = [("offline", dict(output_len=10**9)), ("offline", dict(repeat=0)), ("offline", dict(requests=True)),
         ("offline", dict(requests=2.)), ("prefix", dict(shared_len=0)), ("prefix", dict(own_len=10**7)),
         ("latency", dict(input_len=0)), ("scheduler", dict(steps=10_001))]


@pytest.mark.parametrize("name, sizes", wrong)
def test_sizes_are_looked_at_before_anything_is_loaded(name, sizes, monkeypatch):
    monkeypatch.delattr(bench, "BenchmarkTarget")
    (field, value), = sizes.items()
    needs = [tiny] if "config" in inspect.signature(benchmarks[name]).parameters else []
    with pytest.raises(ValueError, match=f"^{field} must be a whole number from 1 to 10*, not {value!r}$"):
        benchmarks[name](*needs, **sizes)


absurd = [("offline --requests 0", "requests"), ("offline --requests 99999999999", "requests"),
          ("offline --input-len 0", "input_len"), ("offline --output-len -1", "output_len"),
          ("offline --requests 1000000 --input-len 1000000", "tokens"),
          ("offline --input-len 4000", "max_seq_len"), ("offline --num-pages 2 --input-len 100", "KV cache")]


@pytest.mark.parametrize("args, said", absurd)
def test_absurd_sizes_are_one_sentence_and_code_2(args, said, capsys):
    try: code = cli.main(["bench", *args.split()])
    except SystemExit as end: code = end.code
    err = capsys.readouterr().err
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err
