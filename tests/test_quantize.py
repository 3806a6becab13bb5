"""Checkpoints that `minisgl-lit quantize` writes: read by others as they are meant, served to the token, and
refused in a sentence where that cannot be."""
import json
from dataclasses import replace

import pytest
import torch

from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.kernels.codes import quantize
from minisgl_lit.llm import LLM
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.weights import open_checkpoint
from minisgl_lit.tools.quantize import calibrate, quantize_checkpoint, whole_tensors
from reference import MAX_NEW, VARIANTS, make_checkpoint, prompts

@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint('Qwen3', tmp_path/'model', hidden_size=64, intermediate_size=96, num_attention_heads=4)
    return tmp_path/'model'

def examples(path, lines) -> str:
    path.write_text('\n'.join(lines))
    return path

@pytest.mark.parametrize('bits, group', [(4, 32), (8, 16)])
def test_others_read_what_is_meant(bits, group, checkpoint, tmp_path):
    "`transformers` with the package compressed-tensors: the same weights, and the same greedy tokens"
    from transformers import AutoModelForCausalLM
    quantize_checkpoint(str(checkpoint), tmp_path/'small', bits, group)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path/'small', dtype=torch.float32).eval()
    whole = dict(whole_tensors(open_checkpoint(checkpoint, read_config(checkpoint))))
    def answer(ids):
        with torch.inference_mode():
            out = theirs.generate(torch.tensor([ids]),
                                  attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                                  max_new_tokens=MAX_NEW, do_sample=False, pad_token_id=0)
        return out[0, len(ids):].tolist()
    want = [answer(o) for o in prompts()]
    mine = {name: o for name, o, _ in open_checkpoint(tmp_path/'small', read_config(tmp_path/'small')).read()}
    for name, weight in whole.items():
        if name.split('.')[-2].endswith('_proj'):
            assert torch.equal(mine[name].codes, quantize(weight, bits, group).codes), name
            assert torch.equal(mine[name].scales, quantize(weight, bits, group).scales), name
        else: assert torch.equal(mine[name], weight), name
    with LLM(tmp_path/'small', device='cpu', dtype='float32', quantization_compute='exact',
             num_pages=400) as llm:
        told = [o.token_ids for o in llm.generate(prompts(),
            SamplingParams(max_tokens=MAX_NEW, temperature=0))]
    assert told == want

def test_the_embedded_model_calibrated(tmp_path):
    "Its file is smaller, its tokenizer comes along, and it answers"
    texts = examples(tmp_path/'texts.jsonl',
        [json.dumps('What is a page table?'), '', json.dumps(dict(text='A page holds 16 tokens.'))])
    before, after = quantize_checkpoint('embedded', tmp_path/'small', 4, 64, texts)
    assert after < .8 * before
    with LLM(tmp_path/'small') as llm:
        out = llm.chat([dict(role='user', content='What is a page table?')],
                       SamplingParams(max_tokens=30, temperature=0))
    assert 'page' in out.text

@pytest.mark.parametrize('family, fields', [
    ('Gemma2', dict(attn_logit_softcapping=1., query_pre_attn_scalar=20)),
    ('GraniteSWA', dict(sliding_window=9, layer_rope_theta=[1e3, 0, 1e4]))])
def test_what_becomes_of_scores_is_calibrated_too(family, fields, tmp_path):
    "Caps and sinks: without them codes would be chosen for other inputs"
    make_checkpoint(family, tmp_path, hidden_size=64, bos_token_id=197, pad_token_id=196, **fields)
    config, texts = read_config(tmp_path), [torch.tensor(prompts()[4])]
    def codes(config): return {name: o.dequantize() for name, o in calibrate(tmp_path, config, texts, 4, 16)}
    right = codes(config)
    assert len(right) >= 4 * config.num_layers
    if config.score_cap:
        other = codes(replace(config, score_cap=None))
        assert any(not torch.equal(o, other[name]) for name, o in right.items())

def test_experts_are_rounded_and_not_calibrated(tmp_path):
    family, fields = VARIANTS['experts']
    make_checkpoint(family, tmp_path/'model', **fields | dict(moe_intermediate_size=32, hidden_size=64))
    with pytest.raises(ValueError, match='calibration is for dense models'):
        next(calibrate(tmp_path/'model', read_config(tmp_path/'model'), [], 4, 16))
    quantize_checkpoint(str(tmp_path/'model'), tmp_path/'small', 4, 16)
    with LLM(tmp_path/'small', device='cpu', dtype='float32', num_pages=100) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids)
    left = json.loads((tmp_path/'small'/'config.json').read_text())['quantization_config']['ignore']
    assert 'model.layers.0.mlp.gate' in left and not any('proj' in o or 'embed' in o for o in left)

def test_refused(checkpoint, tmp_path):
    "Before anything is written"
    def refused(words, model=checkpoint, out=tmp_path/'out', **more):
        with pytest.raises(ValueError, match=words): quantize_checkpoint(str(model), out, **more)
    refused('--group 48 does not divide the 64 inputs of model', group=48)
    refused('is not an empty folder', out=checkpoint)
    refused('no_such.jsonl', model='embedded', texts=tmp_path/'no_such.jsonl')
    for i, (line, words) in enumerate([('{"txt": 1}',
            'line 2: neither a JSON string nor an object with a "text"'), ('nonsense', 'line 2: neither')]):
        refused(words, model='embedded', texts=examples(tmp_path/f'{i}.jsonl', ['"fine"', line]))
    refused('has no text', model='embedded', texts=examples(tmp_path/'empty.jsonl', ['']))
    assert not (tmp_path/'out').exists()
    quantize_checkpoint(str(checkpoint), tmp_path/'small', 4, 16)
    refused('is compressed already', model=tmp_path/'small')

def test_many_files(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr('minisgl_lit.tools.quantize.FILE_BYTES', 20_000)
    quantize_checkpoint(str(checkpoint), tmp_path/'small', 8, 32)
    assert len([*(tmp_path/'small').glob('*.safetensors')]) > 2
    assert (read_config(tmp_path/'small')
            and {*open_checkpoint(tmp_path/'small', read_config(tmp_path/'small')).tensors}
            == {*open_checkpoint(checkpoint, read_config(checkpoint)).tensors})
