"""Keys and values in 8 bits: tokens equal `transformers` with a cache that rounds them in the same way,
whatever the settings; and who is refused."""
import pytest
import torch
from transformers import DynamicCache

from minisgl_lit.config import EngineConfig
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.assembly import ResolvedConfig, plan_memory
from minisgl_lit.kernels.kv_formats import round_rows, widen_rows
from minisgl_lit.llm import LLM
from minisgl_lit.runtime import build
from reference import FAMILIES, MAX_NEW, VARIANTS, load, make_checkpoint, prompts
from test_parity import serve
from test_products import needs_compiler
from test_recorded_steps import start, watch
from test_recorded_steps import serve as serve_all

MODELS = ({family: (family, {}) for family in FAMILIES}
          | {o: VARIANTS[o] for o in ('window everywhere', 'window in listed layers', 'constants')})

def rounded(x): return widen_rows(round_rows(x))

class RoundedCache(DynamicCache):
    "Keeps what 8 bits keep"
    def update(self, keys, values, *args, **more):
        return super().update(*map(rounded, (keys, values)), *args, **more)

@torch.inference_mode()
def expected(path, prompt: list[int]) -> list[int]:
    model = load(path)
    out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                         max_new_tokens=MAX_NEW,
                         do_sample=False, pad_token_id=0, past_key_values=RoundedCache(config=model.config))
    return out[0, len(prompt):].tolist()

SETTINGS = (
    dict(attention='torch', page_size=1, overlap=False, num_pages=400),
    dict(attention='native', page_size=4, max_prefill_tokens=16, num_pages=400, mixed_chunk=True),
    dict(attention='native', page_size=16, overlap=False, num_pages=5, admission='optimistic'),
    dict(attention='native', page_size=4, cache='none', num_pages=60, threads=2))

@pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long] * (o in ('Qwen2', 'Llama')))
                                  for o in MODELS])
def test_parity(name, tmp_path):
    make_checkpoint(MODELS[name][0], tmp_path, **MODELS[name][1])
    want = {i: expected(tmp_path, prompt) for i, prompt in enumerate(prompts())}
    for settings in SETTINGS:
        was = torch.get_num_threads()
        runtime = build(EngineConfig(model=str(tmp_path), device='cpu', dtype='float32', kv_dtype='int8',
                                     max_running_req=6, **settings))
        try:
            assert runtime.engine.attention.pool.buffer.dtype == torch.int8
            assert serve(runtime, 'a')[0] == want, settings
            again, cached = serve(runtime, 'b')
            assert again == want and (any(cached.values()) or settings.get('cache') == 'none'), settings
        finally:
            runtime.close()
            torch.set_num_threads(was)

@needs_compiler
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_replayed_steps_are_those_computed_layer_by_layer(dtype, tmp_path, monkeypatch):
    "Logits, codes and scales, to the last bit"
    make_checkpoint('Qwen3', tmp_path)
    was = torch.get_num_threads()
    runtime = start(tmp_path, monkeypatch, dtype=dtype, kv_dtype='int8')
    seen = watch(runtime)
    serve_all(runtime)
    runtime.close()
    torch.set_num_threads(was)
    assert not seen.apart and sum(seen.replayed.values()) > 5

def test_more_context_in_the_same_memory():
    "A head of 64 numbers takes 68 bytes instead of 128"
    def pages(**more):
        resolved = ResolvedConfig.of(EngineConfig(device='cpu', dtype='bfloat16', max_running_req=4000,
            **more))
        assert resolved.model.head_dim == 64
        return plan_memory(resolved, free=10**7, weights=0).num_pages
    assert pages(kv_dtype='int8') + 1 == pytest.approx((pages() + 1) * 128 / 68, abs=2)

def test_it_is_the_same_answer():
    "Of the model in the package, to a question that it knows"
    question = [dict(role='user', content='What is a page table?')]
    def answer(**more):
        with LLM(**more) as llm: return llm.chat(question, SamplingParams(max_tokens=80, temperature=0)).text
    assert answer(kv_dtype='int8') == answer()

@pytest.mark.parametrize('settings, words', [
    (dict(dtype='float16'), "kv_dtype='int8' needs dtype bfloat16 or float32, not float16"),
    (dict(attention='flashinfer'), "kv_dtype='int8' is for native or torch attention, not 'flashinfer'")])
def test_refused(settings, words):
    with pytest.raises(ValueError) as e:
        ResolvedConfig.of(EngineConfig(kv_dtype='int8', device='cpu', **settings))
    assert str(e.value) == words

def test_odd_heads_are_refused(tmp_path):
    make_checkpoint(VARIANTS['odd sizes'][0], tmp_path, **VARIANTS['odd sizes'][1])
    with pytest.raises(ValueError, match='heads of a multiple of 4 numbers, not 10'):
        ResolvedConfig.of(EngineConfig(model=str(tmp_path), device='cpu', kv_dtype='int8'))
