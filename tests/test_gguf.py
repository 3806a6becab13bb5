"""GGUF files, written by llama.cpp's own quantizer (`tests/data/make_gguf.py`): the same weights as the
format's own package makes of them, the same tokens as `transformers`, whoever shares the batch; and files
that are damaged, cut off or of another kind."""
import json, shutil, unicodedata
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl_lit import LLM, SamplingParams
from minisgl_lit.core.device import ProcessGroup
from minisgl_lit.core.models.checkpoint import read_config
from minisgl_lit.core.models.decoder import shard_config, weight_shapes
from minisgl_lit.formats.hub import embedded_path
from minisgl_lit.kernels.compiler import cache_folder
from minisgl_lit.formats.gguf import (
    GgufTensor, _architectures as architectures, gguf_folder, index_tensors, read_index, read_tensor)
from minisgl_lit.formats.gguf_blocks import block_formats, read_blocks
from minisgl_lit.formats.quantization import pack_parts
from minisgl_lit.core.models.weights import Assembly, load_weights, open_checkpoint
from minisgl_lit.formats.coded_rows import CodedAssembly
from minisgl_lit.text.tokenizer import Tokenizer
from data.make_gguf import write
from reference import MAX_NEW, Comparison, generate, make_checkpoint, prompts, rope
from test_families import factors, half, tokens
from test_products import needs_compiler

DATA = Path(__file__).parent/'data'
FILES = sorted(DATA.glob('*.gguf'))
files = pytest.mark.parametrize('file', FILES, ids=lambda o: o.stem)
GREEDY = SamplingParams(max_tokens=MAX_NEW, temperature=0)


@pytest.fixture(scope='module')
def folder():
    "The folder of a file, in the cache, where alone an index of tensors is believed"
    return lambda file: gguf_folder(file, cache_folder()[0]/'gguf')


@given(st.sampled_from(sorted(block_formats)), st.integers(1, 5), st.integers(1, 3),
       st.integers(0, 2**32 - 1))
def test_blocks_are_the_weights_of_the_package(kind, rows, blocks, seed):
    "Of any bytes, to the last bit; scales that are not finite apart"
    form = block_formats[kind]
    data = np.random.default_rng(seed).integers(0, 256, (rows, blocks * form.nbytes), dtype=np.uint8)
    with np.errstate(invalid='ignore', over='ignore'):
        want = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    q = read_blocks(kind, torch.from_numpy(data))
    got, finite = q.dequantize().numpy(), np.isfinite(want)
    assert ((q.bits, q.group) == (form.bits, form.group)
            and int(q.codes.max()) < 2**q.bits)
    assert got.shape == want.shape and np.array_equal(got[finite], want[finite])


def theirs(file, folder):
    """The same file in transformers, which widens it; its config is ours, since theirs leaves out the size of
    a head"""
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder(file))
    return AutoModelForCausalLM.from_pretrained(str(DATA), gguf_file=file.name, config=config,
                                                dtype=torch.float32).eval()


@torch.inference_mode()
def answers(model, asked):
    "Greedy ones, each prompt alone"
    def answer(prompt):
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW,
                              do_sample=False, pad_token_id=0)[0, len(prompt):].tolist()
    return [answer(o) for o in asked]


@files
def test_the_same_tokens_as_transformers(file, folder):
    "With exact products; chunks, batches, pages and cache hits change nothing"
    asked = prompts(90)
    want = answers(theirs(file, folder), asked)
    for more in (dict(), dict(page_size=4, chunked_prefill_size=16, max_running_req=3)):
        with LLM(folder(file), dtype='float32', quantization_compute='exact', num_pages=512, **more) as llm:
            assert [o.token_ids for o in llm.generate(asked, GREEDY)] == want


@files
@needs_compiler
def test_whole_numbers_are_near(file, folder):
    "The default: inputs rounded to 8 bits. Each row is as if it were alone, and few tokens change"
    asked = prompts(90)
    def told(**more):
        with LLM(folder(file), dtype='float32', num_pages=512, **more) as llm:
            return [o.token_ids for o in llm.generate(asked, GREEDY)]
    near = told()
    assert near == told(max_running_req=1, chunked_prefill_size=16)
    exact = told(quantization_compute='exact')
    assert sum(a[0] == b[0] for a, b in zip(near, exact)) >= len(asked) - 1


@files
def test_shards_are_parts_of_the_whole(file, folder):
    """Rows are shared among ranks in whatever bits they have; columns where no group is cut, and widened
    where one is"""
    config = read_config(folder(file))
    whole = load_weights(folder(file), config, torch.float32)
    def plain(weight): return weight if isinstance(weight, torch.Tensor) else weight.unpack()
    def join(parts): return pack_parts(parts, torch.float32, False)
    for rank in range(2):
        group = ProcessGroup(rank, 2)
        packed = load_weights(folder(file), config, torch.float32, group=group,
                              assembly=partial(CodedAssembly, join=join) if join else Assembly)
        widened = load_weights(folder(file), config, torch.float32, group=group)
        assert {k: tuple(v.shape) for k, v in packed.items()} == weight_shapes(shard_config(config, 2))
        assert all(torch.equal(plain(packed[k]), widened[k]) for k in packed)
    assert whole.keys() == packed.keys()


def test_the_config_is_that_of_the_model(folder):
    "The embedded model's, but for what a file cannot say"
    ours, meant = read_config(folder(DATA/'embedded-Q4_K_M.gguf')), read_config(embedded_path())
    assert ([k for k in vars(meant) if getattr(ours, k) != getattr(meant, k)]
            == ['eos_token_ids', 'generation'])


def test_it_talks(folder):
    "With its vocabulary and chat template, as the model that it was made from"
    messages = [dict(role='user', content='Count from 3 to 9')]
    with LLM(DATA/'embedded-Q4_K_M.gguf', num_pages=256) as llm, LLM('embedded', num_pages=256) as origin:
        got, want = (o.chat(messages, SamplingParams(max_tokens=40, temperature=0)) for o in (llm, origin))
        assert got.text == want.text == '3, 4, 5, 6, 7, 8, 9' and got.finish_reason == 'stop'
        text = 'What is a page?  Ünïcödé <think>'
        assert llm.tokenizer.encode(text).tolist() == origin.tokenizer.encode(text).tolist()


def test_a_vocabulary_without_its_tokenizer_json(tmp_path):
    "It is made from tokens and merges; nothing but how numbers and spaces are split may differ"
    from minisgl_lit.text.tokenizer import Tokenizer
    name, whole = b'tokenizer.huggingface.json', (DATA/'embedded-Q4_K_M.gguf').read_bytes()
    assert name in whole
    (tmp_path/'m.gguf').write_bytes(whole.replace(name, b'generally.huggingface.json'))
    made, meant = Tokenizer(gguf_folder(tmp_path/'m.gguf', tmp_path/'cache')), Tokenizer(embedded_path())
    for text in ('Hello', 'What is a page?', '<|im_start|>user'):
        assert made.encode(text).tolist() == meant.encode(text).tolist()
        assert made.decode(made.encode(text).tolist(), False) == text
    assert made.chat_template is not None


def refused(sentence, **settings):
    with pytest.raises(ValueError, match=sentence): LLM(**settings)

def test_refusals(tmp_path, monkeypatch):
    "In a sentence, before anything is loaded"
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    small = DATA/'qwen2-Q4_0.gguf'
    refused('the weights of this checkpoint are compressed already', model=small, quantization='int4')
    refused('there is no such folder or file; on the hub, a model is named owner/model',
            model=tmp_path/'no.gguf')
    whole = small.read_bytes()
    (tmp_path/'cut.gguf').write_bytes(whole[:len(whole) // 2])
    refused('damaged or incomplete', model=tmp_path/'cut.gguf')
    (tmp_path/'cut.gguf').write_bytes(b'no model at all')
    refused('damaged or incomplete', model=tmp_path/'cut.gguf')
    shutil.copy(small, tmp_path/'m-00001-of-00002.gguf')
    refused('m-00002-of-00002.gguf is missing', model=tmp_path/'m-00001-of-00002.gguf')
    (tmp_path/'cache/minisgl_lit').chmod(0o777)
    refused('XDG_CACHE_HOME names another', model=small)


def test_a_file_that_changes_is_read_anew(tmp_path):
    "Its folder goes by size and time"
    file, cache = tmp_path/'m.gguf', tmp_path/'cache'
    shutil.copy(DATA/'qwen2-Q4_0.gguf', file)
    first = gguf_folder(file, cache)
    assert gguf_folder(file, cache) == first and len([*cache.iterdir()]) == 1
    shutil.copy(DATA/'qwen3-Q5_1.gguf', file)
    second = gguf_folder(file, cache)
    assert second != first and json.loads((second/'config.json').read_text())['model_type'] == 'qwen3'


def test_a_type_without_a_kernel_is_widened(tmp_path, capfd):
    "And a line says so"
    reader, out = gguf.GGUFReader(DATA/'qwen2-Q4_0.gguf'), gguf.GGUFWriter(tmp_path/'m.gguf', 'qwen2')
    for name, field in reader.fields.items():
        if not name.startswith('GGUF.') and name != 'general.architecture':
            out.add_key_value(name, field.contents(), field.types[0])
    # 18 bytes for 32 weights, as Q4_0 has: other weights from the same bytes
    iq4 = gguf.GGMLQuantizationType.IQ4_NL
    for o in reader.tensors:
        out.add_tensor(o.name, o.data, raw_dtype=iq4 if o.tensor_type.name == 'Q4_0' else o.tensor_type)
    out.write_header_to_file(), out.write_kv_data_to_file(), out.write_tensors_to_file()
    out.close()
    folder = gguf_folder(tmp_path/'m.gguf', cache_folder()[0]/'gguf')
    name = 'model.layers.0.self_attn.o_proj.weight'
    tensor = read_index(folder)[name]
    assert tensor.kind == 'IQ4_NL'
    def join(parts): return pack_parts(parts, torch.float32, False)
    weights = load_weights(folder, read_config(folder), torch.float32,
                           assembly=partial(CodedAssembly, join=join))
    assert (torch.equal(weights[name], read_tensor(tensor))
            and 'IQ4_NL: widened to float32' in capfd.readouterr().err)


def test_the_same_text_as_transformers(tmp_path):
    "Our tokenizer of a file's fields, and the one that `transformers` makes of them"
    from transformers import AutoTokenizer
    whole = (DATA/'embedded-Q4_K_M.gguf').read_bytes()
    (tmp_path/'m.gguf').write_bytes(whole.replace(b'tokenizer.huggingface.json',
        b'generally.huggingface.json'))
    theirs, ours = (AutoTokenizer.from_pretrained(str(tmp_path), gguf_file='m.gguf'),
                    Tokenizer(gguf_folder(tmp_path/'m.gguf', tmp_path/'cache')))
    some = ['  ', '\n\n', "don't", ' 1234', 'append(', '\u00e9', 'e\u0301', '<|im_start|>', '<|im_end|>']
    @given(st.lists(st.one_of(st.text(), st.sampled_from(some)), max_size=6).map(''.join))
    def same(text):   # composed, as Qwen2's own tokenizer does and `transformers` does not for a GGUF file
        text = unicodedata.normalize('NFC', text)
        assert ours.encode(text).tolist() == theirs.encode(text)
    same()


def test_an_index_from_elsewhere_names_no_weights(folder, tmp_path):
    "A downloaded folder that brings an index of tensors: it could name any file of this machine"
    elsewhere = Path(shutil.copytree(folder(FILES[0]), tmp_path/'model'))
    with pytest.raises(ValueError, match='holds no weights|has no safetensors'): LLM(elsewhere, device='cpu')
    with pytest.raises(ValueError, match='holds no weights'):
        open_checkpoint(elsewhere, read_config(elsewhere))


wide = dict(hidden_size=64)   # four heads of 16: these files cannot say another size
windows = tokens | dict(num_hidden_layers=7, sliding_window=9)   # in what layers, llama.cpp knows
capped = dict(query_pre_attn_scalar=16, attn_logit_softcapping=2., final_logit_softcapping=30.)
near = dict(rope_type='default', rope_theta=1e3)
longrope = dict(rope_type='longrope', rope_theta=1e4, short_factor=[1., 1.5, 2., 3.],
                partial_rotary_factor=.5, long_factor=[2., 3., 5., 9.],
                original_max_position_embeddings=100)   # all prompts are shorter
OTHERS = {   # by the name of their classes
    'Gemma': tokens | dict(rms_norm_eps=.01), 'Gemma2': windows | capped,
    'Gemma3': windows | dict(query_pre_attn_scalar=16, final_logit_softcapping=4., rope_parameters=dict(
        full_attention=dict(rope_type='linear', rope_theta=1e5, factor=4.), sliding_attention=near)),
    'Phi3': tokens | half | dict(sliding_window=9, tie_word_embeddings=False),
    'Phi3 longrope': tokens | wide | dict(rope_parameters=longrope, original_max_position_embeddings=100),
    'Glm4': tokens | half | dict(attention_bias=True), 'Granite': tokens | wide | factors,
    'Olmo': tokens | wide | dict(head_dim=None, clip_qkv=1.), 'Olmo2': tokens | wide,
    'Olmo3': windows | wide | rope('yarn', factor=8.), 'Exaone4': windows,
    'Exaone4 without windows': tokens | dict(sliding_window=None, layer_types=['full_attention'] * 3),
    'Cohere': tokens | wide | dict(logit_scale=.5, layer_norm_eps=.01),
    'Cohere2': windows | wide | dict(logit_scale=.5),
    'SmolLM3': tokens | dict(num_hidden_layers=5, sliding_window=None),
    'SeedOss': tokens | dict(attention_bias=True, attention_out_bias=False),
    'Ernie4_5': tokens | dict(use_bias=True), 'HunYuanDenseV1': tokens,
    'Starcoder2': tokens | wide | dict(head_dim=None, sliding_window=None, num_hidden_layers=2),
    'StableLm': tokens | half | wide | dict(head_dim=None, use_qkv_bias=True, tie_word_embeddings=False),
    'Nemotron': tokens | half | wide | dict(tie_word_embeddings=False, norm_eps=.01), 'Arcee': tokens,
    'Mistral': tokens | dict(sliding_window=None),
    'Ministral3': tokens | rope('yarn', factor=8., mscale=1., mscale_all_dim=1., llama_4_scaling_beta=.4)}
QUICK = 'Gemma2', 'Phi3', 'Granite'

@pytest.mark.parametrize('name', [
    pytest.param(o, marks=[pytest.mark.long] * (o not in QUICK)) for o in OTHERS])
def test_files_of_other_families(name, tmp_path):
    "As llama.cpp's converter writes them, in float32: the tokens of the checkpoint that they are made from"
    make_checkpoint(name.partition(' ')[0], tmp_path/'model', **OTHERS[name])
    write(tmp_path/'model', tmp_path/'model.gguf')
    asked, comparison = [prompts()[i] for i in (4, 1, 7)], Comparison()
    with LLM(tmp_path/'model.gguf', device='cpu', page_size=4, max_prefill_tokens=16, num_pages=200) as llm:
        outs = llm.generate(asked, GREEDY)
    right = [generate(tmp_path/'model', o) for o in asked]
    assert len({*map(tuple, right)}) > 1
    for prompt, out, answer in zip(asked, outs, right):
        comparison.check(tmp_path/'model', prompt, out.token_ids, answer)
    comparison.done()

def test_the_guide_lists_what_is_read():
    guide = (Path(__file__).parents[1]/'docs/guides/serve-a-compressed-model.md').read_text(encoding='utf-8')
    assert [o for o in architectures if f'`{o}`' not in guide] == []

def test_a_name_may_hold_anything():
    "What is not known keeps its name, by which it is refused"
    one = GgufTensor('', 0, 8, 'F32', (2,))
    config = dict(model_type='llama', num_attention_heads=1, num_key_value_heads=1, head_dim=2)
    names = ('x{}', '{}{}', 'blk.0.{0}{a}.weight', 'blk.0.ffn_gate_exps{}.weight', '.')
    assert index_tensors(dict.fromkeys(names, one), config) == dict.fromkeys(names, one)
