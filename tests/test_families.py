"""Families that are Llamas once they are edited: greedy tokens of a random checkpoint of each equal those of `transformers`, and no edit is for nothing."""
import json

import pytest
import torch

from minisgl_lit.core.models.checkpoint import families, read_config
from minisgl_lit.core.models.decoder import Decoder
from minisgl_lit.core.models.weights import load_weights, sources
from minisgl_lit.families.edits import edited
from minisgl_lit.families.llamas import table
from minisgl_lit.llm import LLM
from minisgl_lit.text.sampling_params import SamplingParams
from reference import MAX_NEW, Comparison, generate, load, make_checkpoint, prompts, rope

factors = dict(embedding_multiplier=12., residual_multiplier=.22, attention_multiplier=.1, logits_scaling=8.)
half = dict(rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=.5))
tokens = dict(bos_token_id=197, pad_token_id=196)
FAMILIES = {   # by the name of their classes
    'Phi3': tokens | half | dict(sliding_window=9, tie_word_embeddings=False),
    'Glm': tokens | half | dict(attention_bias=True),
    'Granite': tokens | factors,
    'Mixtral': dict(num_local_experts=5, sliding_window=None),
    'Ministral': dict(sliding_window=7),
    'Cwm': tokens | rope('llama3', factor=8., low_freq_factor=1., high_freq_factor=4.) | dict(sliding_window=7),
    'SeedOss': tokens | dict(attention_bias=True, attention_out_bias=False),
    'Ernie4_5': tokens | dict(use_bias=True),
    'Helium': tokens | dict(hidden_size=64),
    'GraniteMoeHybrid': tokens | factors | dict(hidden_size=64, layer_types=['attention'] * 3, num_local_experts=0, shared_intermediate_size=80, position_embedding_type='rope'),
    'GraniteMoeHybrid without positions': tokens | factors | dict(hidden_size=64, layer_types=['attention'] * 3, num_local_experts=0, shared_intermediate_size=80,
                                                                  position_embedding_type='nope'),
}
QUICK = 'Phi3', 'Glm', 'Granite', 'Mixtral'   # each edit once
every = pytest.mark.parametrize('name', [pytest.param(o, marks=[pytest.mark.long] * (o not in QUICK)) for o in FAMILIES])

def make(name, path, **more): make_checkpoint(name.partition(' ')[0], path, **FAMILIES[name] | more)

def compare(path, asked, right, **settings):
    "All at once, in chunks and pages, and again from the cache"
    comparison = Comparison()
    with LLM(path, device='cpu', dtype='float32', num_pages=400, **dict(page_size=4, max_prefill_tokens=16) | settings) as llm:
        for _ in range(2):
            outs = llm.generate(asked, SamplingParams(max_tokens=MAX_NEW, temperature=0))
            for prompt, out, answer in zip(asked, outs, right): comparison.check(path, prompt, out.token_ids, answer, settings)
    assert sum(o.cached_tokens for o in outs) > 200
    comparison.done()

@every
def test_tokens_are_those_of_the_reference(tmp_path, name):
    make(name, tmp_path)
    asked = prompts()
    right = [generate(tmp_path, o) for o in asked]
    assert len({tuple(o) for o in right}) > 4
    compare(tmp_path, asked, right)

@pytest.mark.long
@pytest.mark.parametrize('settings', [dict(page_size=1, attention='torch'), dict(page_size=16, overlap=False), dict(mixed_chunk=True, max_prefill_tokens=4096), dict(tp=2)],
                         ids=lambda o: ' '.join(map(str, o)))
@pytest.mark.parametrize('name', QUICK)
def test_settings_that_must_not_matter(tmp_path, name, settings):
    make(name, tmp_path)
    asked = prompts()
    compare(tmp_path, asked, [generate(tmp_path, o) for o in asked], **settings)

def logits(path, config):
    "Of a text that is computed at once, by the decoder alone"
    ids, rows = torch.tensor(prompts()[4]), torch.arange(50)
    def attend(q, k, v, layer):
        k, v = (o.repeat_interleave(q.shape[1] // o.shape[1], 1).transpose(0, 1) for o in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)
    return Decoder(config, load_weights(path, config, torch.float32, progress=False)).forward(ids, rows, attend, rows)

@every
def test_no_edit_is_for_nothing(tmp_path, name, monkeypatch):
    "Without any one of a family's edits its checkpoint cannot be read, or a logit moves"
    make(name, tmp_path)
    config = read_config(tmp_path)
    architecture = json.loads((tmp_path/'config.json').read_text())['architectures'][0]
    edits, right = table[architecture][1], logits(tmp_path, config)
    for left_out in edits:
        monkeypatch.setitem(sources, architecture, edited(*(o for o in edits if o is not left_out)))
        try: moved = float((logits(tmp_path, config) - right).abs().max())
        except ValueError: continue
        assert moved > 1e-3, left_out

LONG = dict(rope_type='longrope', rope_theta=1e4, partial_rotary_factor=.75, original_max_position_embeddings=32,
            short_factor=[1.1, 1.2, 1.3, 1., 1., 1.4], long_factor=[2., 2.5, 3., 3., 4., 5.])

def test_longrope_within_and_beyond_the_original_context(tmp_path):
    "Within it the answer is the reference's. Beyond it that of a reference in which each token turns by its own position, and not the reference's own"
    make_checkpoint('Phi3', tmp_path, **tokens, hidden_size=64, sliding_window=None, original_max_position_embeddings=32, rope_parameters=LONG)
    short = [o[:19] for o in prompts()]   # with the answer 31
    long = [o for o in prompts() if len(o) > 36]
    with LLM(tmp_path, device='cpu', dtype='float32', page_size=4, num_pages=400) as llm:
        def answers(asked): return [o.token_ids for o in llm.generate(asked, SamplingParams(max_tokens=MAX_NEW, temperature=0))]
        comparison = Comparison()
        for prompt, ours in zip(short, answers(short)): comparison.check(tmp_path, prompt, ours, generate(tmp_path, prompt))
        comparison.done()
        ours = answers(long)
        model = load(tmp_path)
        theirs = [generate(tmp_path, o) for o in long]
        rotary, config = model.model.rotary_emb, read_config(tmp_path).rope
        def by_position(x, position_ids):
            freqs = config.freqs_at(position_ids[0], config.freqs(16))[:, :6]   # those that turn
            angle = torch.cat([position_ids[0][:, None] * freqs] * 2, -1)[None]
            return angle.cos() * config.scale, angle.sin() * config.scale
        plain = rotary.forward
        try:
            rotary.forward = by_position
            assert [generate(tmp_path, o) for o in long] == ours
        finally: rotary.forward = plain
        assert ours != theirs

SEEING = [('Mistral3', 'mistral', {}), ('InternVL', 'qwen2', dict(image_size=[28, 28], patch_size=[14, 14])), ('InternVL', 'qwen3', dict(image_size=[28, 28], patch_size=[14, 14])),
          ('SmolVLM', 'llama', {})]

@pytest.mark.parametrize('name, text, vision', [pytest.param(*o, marks=[pytest.mark.long] * (i > 0)) for i, o in enumerate(SEEING)])
def test_the_text_part_of_a_model_that_sees(tmp_path, name, text, vision):
    import transformers
    torch.manual_seed(0)
    sizes = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=.2,
                 max_position_embeddings=128, eos_token_id=198, bos_token_id=197, pad_token_id=196) | ({} if text == 'llama' else dict(sliding_window=None))
    seen = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14, head_dim=16) | vision
    config = getattr(transformers, f'{name}Config')(text_config=dict(model_type=text, **sizes), vision_config=seen, tie_word_embeddings=False, image_token_id=195, image_token_index=195)
    model = getattr(transformers, f'{name}ForConditionalGeneration')(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor(prompts()[4])
    with torch.inference_mode(): right = model(input_ids=ids[None]).logits[0]
    read = read_config(tmp_path)
    assert (logits(tmp_path, read) - right).abs().max() < 1e-5 * right.abs().max() and read.architecture.lower().startswith(text)

def test_each_row_is_tried(): assert {f'{o.partition(" ")[0]}ForCausalLM' for o in FAMILIES} | {f'{name}ForConditionalGeneration' for name, *_ in SEEING} == {*table} <= {*families}

@pytest.mark.parametrize('name', ['Phi3', 'Granite'])
def test_weights_in_few_bits(tmp_path, name):
    "What is edited can be compressed while it is loaded; the answers are those of a Llama's compression, not checked here"
    make(name, tmp_path, hidden_size=64, intermediate_size=96)
    with LLM(tmp_path, device='cpu', quantization='int8', num_pages=100) as llm:
        out = llm.generate([prompts()[0]], SamplingParams(max_tokens=4, temperature=0))[0]
    assert out.error is None and len(out.token_ids) == 4
