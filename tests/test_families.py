"""Families that are Llamas once they are edited: greedy tokens of a random checkpoint of each equal those of
`transformers`, and no edit is for nothing."""
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_lit.core.models import weights
from minisgl_lit.core.models.checkpoint import Family, families, read_config
from minisgl_lit.core.models.decoder import DenseMlp, Layer, ModelConfig
from minisgl_lit.core.models.moe import MoeMlp
from minisgl_lit.core.models.weights import load_weights, sources
from minisgl_lit.families.edits import edited, norms_of_heads, renamed
from minisgl_lit.families import dense, experts, layers, llamas
from minisgl_lit.families.llamas import usual
from minisgl_lit.families.mlps import ClampedMlp, PlainMlp, RoutedMlp, XieluMlp
from minisgl_lit.formats.ropes import SharpenedYarn
from minisgl_lit.llm import LLM
from minisgl_lit.text.sampling_params import SamplingParams
from minisgl_lit.testing.random_family import logits_of
from minisgl_lit.tools.doctor import what_fits
from minisgl_lit.tools.quantize import packed_tensors, quantize_checkpoint, stated
from minisgl_lit.kernels.codes import quantize
import test_recorded_steps as recorded
from reference import MAX_NEW, Comparison, generate, load, make_checkpoint, prompts, rope

factors = dict(embedding_multiplier=12., residual_multiplier=.22, attention_multiplier=.1, logits_scaling=8.)
half = dict(rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=.5))
tokens = dict(bos_token_id=197, pad_token_id=196)
table = {**llamas.table, **dense.table, **experts.table}
two = dict(full_attention=dict(rope_type='default', rope_theta=1e5),
           sliding_attention=dict(rope_type='default', rope_theta=1e3))
mixed = dict(layer_types=['sliding_attention', 'full_attention', 'sliding_attention'], sliding_window=9)
capped = mixed | dict(query_pre_attn_scalar=20, attn_logit_softcapping=2., final_logit_softcapping=30.)
groups = tokens | dict(
    n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=24, n_group=4, topk_group=2,
    first_k_dense_replace=1, num_experts_per_tok=3, routed_scaling_factor=2.5, norm_topk_prob=True)
stable = tokens | half | dict(hidden_size=64, head_dim=None, tie_word_embeddings=False)
FAMILIES = {   # by the name of their classes
    'Phi3': tokens | half | dict(sliding_window=9, tie_word_embeddings=False),
    'Glm': tokens | half | dict(attention_bias=True),
    'Granite': tokens | factors,
    'Mixtral': dict(num_local_experts=5, sliding_window=None),
    'Ministral': dict(sliding_window=7),
    'Ministral3': tokens | rope('yarn', factor=8., original_max_position_embeddings=16, mscale=1.,
                                mscale_all_dim=1., llama_4_scaling_beta=.4),
    'Cwm': tokens | rope('llama3', factor=8., low_freq_factor=1.,
                         high_freq_factor=4.) | dict(sliding_window=7),
    'SeedOss': tokens | dict(attention_bias=True, attention_out_bias=False),
    'Ernie4_5': tokens | dict(use_bias=True),
    'Helium': tokens | dict(hidden_size=64),
    'GraniteMoeHybrid': tokens | factors | dict(hidden_size=64, layer_types=['attention'] * 3,
        num_local_experts=0, shared_intermediate_size=80, position_embedding_type='rope'),
    'GraniteMoeHybrid without positions': tokens | factors | dict(hidden_size=64,
        layer_types=['attention'] * 3, num_local_experts=0, shared_intermediate_size=80,
                                                                  position_embedding_type='nope'),
    'Olmo': tokens | dict(clip_qkv=1.), 'Olmo without clipping': tokens,
    'Gemma': tokens, 'Olmo2': tokens, 'Arcee': tokens,
    'SmolLM3': tokens | dict(sliding_window=None, no_rope_layers=[1, 0, 1]),
    'Gemma2': tokens | capped, 'VaultGemma': tokens | capped,
    'Gemma3': tokens | mixed | dict(query_pre_attn_scalar=20, rope_parameters=two,
                                    final_logit_softcapping=4.),
    'Olmo3': tokens | mixed | dict(rope_parameters=two), 'Exaone4': tokens | mixed,
    'Cohere': tokens | dict(logit_scale=.5), 'Cohere2': tokens | mixed | dict(logit_scale=.5),
    'GraniteSWA': tokens | factors | mixed | dict(layer_rope_theta=[1e3, 0, 1e4]),
    'Glm4': tokens | half | dict(attention_bias=True), 'HunYuanDenseV1': tokens, 'Apertus': tokens,
    'Starcoder2': tokens | dict(sliding_window=9),
    'StableLm': stable | dict(use_qkv_bias=True),
    'StableLm side by side': stable | dict(use_parallel_residual=True),
    'StableLm with QK norms': stable | dict(qk_layernorm=True, intermediate_size=96),
    'StableLm with both': stable | dict(use_parallel_residual=True, qk_layernorm=True, initializer_range=.3),
    'Nemotron': tokens | half, 'Phi': tokens | half | dict(num_key_value_heads=4),
    'NanoChat': tokens | dict(final_logit_softcapping=5., attention_bias=True, tie_word_embeddings=False),
    'Olmoe': tokens | dict(hidden_size=64, head_dim=None, num_experts=5, num_experts_per_tok=2),
    'FlexOlmo': tokens | dict(num_experts=5, num_experts_per_tok=2),
    'Glm4Moe': half | groups | dict(use_qk_norm=True), 'Dots1': groups | mixed,
    'MiniMaxM2': tokens | half | dict(num_local_experts=5, num_experts_per_tok=2),
    'Afmoe': tokens | mixed | dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
                                   num_dense_layers=1, route_scale=1.5, mup_enabled=True),
    'Ernie4_5_Moe': tokens | dict(moe_num_experts=5, moe_k=2, moe_intermediate_size=24),
    'HunYuanMoEV1': tokens | dict(num_experts=5, moe_topk=2),
    'GraniteMoe': tokens | factors | dict(num_local_experts=5, num_experts_per_tok=2),
    'GptOss': tokens | rope('yarn', factor=2., original_max_position_embeddings=256, truncate=False) | dict(
        num_local_experts=5, num_experts_per_tok=2, sliding_window=9, swiglu_limit=1.5, swiglu_alpha=1.2),
}
EDITS = 'Phi3', 'Glm', 'Granite', 'Mixtral', 'NanoChat'   # each edit once
KNOBS = ('Gemma2', 'Gemma3', 'FlexOlmo', 'Apertus', 'Glm4Moe', 'Afmoe', 'HunYuanMoEV1', 'GptOss',
         'Ministral3', 'Olmo', 'Phi', 'StableLm with both')   # and all else that a config can say
QUICK = *EDITS, *KNOBS
def those(quick): return pytest.mark.parametrize('name',
    [pytest.param(o, marks=[pytest.mark.long] * (o not in quick)) for o in FAMILIES])
every = those(EDITS)

def make(name, path, **more): make_checkpoint(name.partition(' ')[0], path, **FAMILIES[name] | more)

def compare(path, asked, right, **settings):
    "All at once, in chunks and pages, and again from the cache"
    comparison = Comparison()
    with LLM(path, device='cpu', dtype='float32', num_pages=400,
             **dict(page_size=4, max_prefill_tokens=16) | settings) as llm:
        for _ in range(2):
            outs = llm.generate(asked, SamplingParams(max_tokens=MAX_NEW, temperature=0))
            for prompt, out, answer in zip(asked, outs, right):
                comparison.check(path, prompt, out.token_ids, answer, settings)
    assert sum(o.cached_tokens for o in outs) > (200 if len(asked) == 8 else 60)
    comparison.done()

@those(QUICK)
def test_tokens_are_those_of_the_reference(tmp_path, name, long):
    "In pages, in chunks, from the cache, and with windows shorter than the text"
    make(name, tmp_path)
    # without time: a text that is longer than any window, two that share a beginning
    asked = prompts() if long or name in EDITS else [prompts()[i] for i in (4, 1, 7)]
    right = [generate(tmp_path, o) for o in asked]
    assert len({tuple(o) for o in right}) > (4 if len(asked) == 8 else 1)
    compare(tmp_path, asked, right)

WAYS = [dict(page_size=1, attention='torch'), dict(page_size=16, overlap=False),
        dict(mixed_chunk=True, max_prefill_tokens=4096)]

@pytest.mark.long
@pytest.mark.parametrize('name', FAMILIES)
def test_settings_that_must_not_matter(tmp_path, name):
    make(name, tmp_path)
    asked = prompts()
    right = [generate(tmp_path, o) for o in asked]
    for settings in [*WAYS, *[dict(tp=2)] * (name in QUICK)]: compare(tmp_path, asked, right, **settings)

@pytest.mark.long
@pytest.mark.parametrize('name', ['Olmo2', 'MiniMaxM2', 'StableLm with both'])
def test_ranks_that_have_the_same_keys(tmp_path, name):
    "A norm of all heads counts each of them once"
    make(name, tmp_path, num_key_value_heads=1)
    asked = prompts()[:4]
    compare(tmp_path, asked, [generate(tmp_path, o) for o in asked], tp=2)

def logits(path, config):
    "Of a text that is computed at once, by the decoder alone"
    return logits_of(path, config, torch.tensor(prompts()[4]))

@every
def test_no_edit_is_for_nothing(tmp_path, name, monkeypatch):
    "Without any one of a family's edits its checkpoint cannot be read, or a logit moves"
    make(name, tmp_path)
    config = read_config(tmp_path)
    architecture = json.loads((tmp_path/'config.json').read_text())['architectures'][0]
    edits, right = table[architecture][1], logits(tmp_path, config)
    for left_out in edits:
        if left_out is norms_of_heads and not isinstance(config.layer, layers.HeadLayerNorms): continue
        monkeypatch.setitem(sources, architecture, edited(*(o for o in edits if o is not left_out)))
        try: moved = float((logits(tmp_path, config) - right).abs().max())
        except ValueError: continue
        assert moved > 1e-3, left_out

LAYERS = [getattr(layers, o) for o in layers.__all__ if o != 'Stream']

def other_mlps(mlp, layer: Layer) -> Iterator:
    "An MLP with one of its fields as it would be by default; for what has no default, the other value"
    if isinstance(mlp, MoeMlp):
        usual = dict(shared_size=0) | (dict(score='softmax', bias=False, groups=1, scale=1.0)
                                       if isinstance(mlp, RoutedMlp) else {})
        if isinstance(mlp, ClampedMlp): usual |= dict(alpha=1.702, limit=7.0)
        for name, value in usual.items():
            # of equal groups as many as there are may be chosen
            if getattr(mlp, name) != value:
                yield replace(mlp, **{name: value}, **(dict(top_groups=1) if name == 'groups' else {}))
        # a softmax of the chosen sums to 1 already; a norm behind all of the MLP undoes any factor
        undone = 'post_feedforward_layernorm' in layer.norms and not mlp.shared_size
        if getattr(mlp, 'score', '') != 'chosen' and not undone:
            yield replace(mlp, norm_topk_prob=not mlp.norm_topk_prob)
    elif mlp != DenseMlp(mlp.intermediate_size, mlp.bias):
        yield DenseMlp(mlp.intermediate_size, mlp.bias)
        if type(mlp) in (DenseMlp, PlainMlp):
            yield from (replace(mlp, act=o) for o in ('silu', 'relu2') if o != mlp.act)
        if isinstance(mlp, XieluMlp): yield PlainMlp(mlp.intermediate_size, mlp.bias, 'relu2')

def reset(config: ModelConfig) -> Iterator[ModelConfig]:
    "A config with one thing reset that it has from its family, for each such thing"
    others = {Layer, *LAYERS} - {type(config.layer), layers.OwnHeads}   # the latter is no layer yet
    # it has norms; where they have no weights RoPE, which keeps lengths, may be before or behind them
    if not config.qk_norm or config.architecture == 'NanoChatForCausalLM': others -= {layers.NormAfterRope}
    yield from (replace(config, layer=o()) for o in sorted(others, key=lambda o: o.__name__))
    mlps = [config.mlp(i) for i in range(config.num_layers)]
    for i, mlp in enumerate(mlps):
        for other in other_mlps(mlp, config.layer):
            yield replace(config, mlps=(*mlps[:i], other, *mlps[i + 1:]))
    if len({*config.ropes}) > 1:
        yield replace(config, ropes=())
        yield replace(config, ropes=(config.ropes[1],) * config.num_layers)
    if isinstance(config.rope, SharpenedYarn):
        yield replace(config, rope=replace(config.rope, llama_4_scaling_beta=None))
    if getattr(config.layer, 'clip', None): yield replace(config, layer=replace(config.layer, clip=None))
    if config.embed_scale != 1: yield replace(config, embed_scale=1.0)
    if config.logits_cap: yield replace(config, logits_cap=None)
    if config.score_cap: yield replace(config, score_cap=None)
    if config.qk_norm: yield replace(config, qk_norm=False)
    if config.head_bias: yield replace(config, head_bias=False)
    if any(config.windows): yield replace(config, windows=())

@those(KNOBS)
def test_no_knob_is_for_nothing(tmp_path, name):
    """With any one thing reset that a config has from its family, or with another family's layer, the
    checkpoint cannot be read, or a logit moves"""
    make(name, tmp_path)
    config = read_config(tmp_path)
    right, others, moved = logits(tmp_path, config), [*reset(config)], []
    for other in others:
        try: ours = logits(tmp_path, other)
        except ValueError: continue
        moved.append(float((ours - right).abs().max()))
        differs = {o.name: getattr(other, o.name) for o in fields(other)
                   if getattr(other, o.name) != getattr(config, o.name)}
        assert moved[-1] > 1e-3, differs
    assert len(others) >= len(LAYERS) - 2   # the abstract one, and its own or one that needs other norms

def used(config: ModelConfig) -> set[str]:
    "Everything in which a model differs from a Llama and which has code of its own, in words"
    found = {o.__name__ for o in type(config.layer).__mro__
             if o.__module__ == layers.__name__ and {*vars(o)} & {'forward', 'attention', 'add_norm', 'turn'}}
    found |= {f'{part} of a norm' for part in config.layer.norm_parts}
    for mlp in {config.mlp(i) for i in range(config.num_layers)}:
        found.add(type(mlp).__name__)
        if getattr(mlp, 'act', 'silu') != 'silu' and type(mlp) is DenseMlp: found.add(f'gate: {mlp.act}')
        if isinstance(mlp, RoutedMlp):
            found |= {f'scores: {mlp.score}', *(name for name, there in dict(
                bias=mlp.bias, groups=mlp.groups > 1, factor=mlp.scale != 1,
                shared=mlp.shared_size).items() if there)}
    parts = {getattr(o, 'partial_rotary_factor', None) for o in config.ropes}
    if 0 in parts: found.add('no positions')
    if len({o for o in config.ropes if getattr(o, 'partial_rotary_factor', None) != 0}) > 1:
        found.add('positions of two kinds')
    if isinstance(config.rope, SharpenedYarn): found.add('sharpened queries')
    if config.embed_scale != 1: found.add('scaled embeddings')
    if config.logits_cap: found.add('capped logits')
    if config.score_cap: found.add('capped scores')
    if config.head_bias: found.add('a bias of the head')
    return found

def class_of(name: str):
    "Its config class"
    import transformers
    return getattr(transformers, f'{name}TextConfig', None) or getattr(transformers, f'{name}Config')

def wide(raw: dict, path) -> ModelConfig:
    "What we read of a config that is stored"
    (path/'config.json').write_text(json.dumps(raw))
    return read_config(path)

def stored(name: str, path, said: dict) -> tuple[ModelConfig, ModelConfig]:
    "What we read of a file that has these fields only, and of one that has all those of its class"
    family = name.partition(' ')[0]
    every = json.loads(class_of(family)(**said).to_json_string(use_diff=False))
    named = dict(architectures=[f'{family}ForCausalLM'])
    return wide(said | named, path), wide(every | named, path)

BASE = dict(hidden_size=64, intermediate_size=80, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=99)

def test_the_quick_ones_use_everything_once(tmp_path):
    "None of them could be left out"
    def told(name):
        said = BASE | dict(num_hidden_layers=3, head_dim=16) | FAMILIES[name]
        return used(stored(name, tmp_path, {o: v for o, v in said.items() if v is not None})[1])
    by_name = {name: told(name) for name in FAMILIES}
    assert set().union(*by_name.values()) == set().union(*(by_name[o] for o in QUICK))
    for name in KNOBS:
        others = set().union(*(by_name[o] for o in QUICK if o != name))
        assert by_name[name] - others, f'{name} uses nothing that no other of them uses'

# what torch computes
TORCH = {'MoeMlp', 'RoutedMlp', 'ClampedMlp', 'PlainMlp', 'XieluMlp', 'LayerNorms', 'GatedSandwich',
         'capped logits', 'sharpened queries'}

@recorded.needs_compiler
@those(('Olmo3', 'GraniteSWA'))
def test_a_recorded_step_has_the_bits_of_layers(tmp_path, monkeypatch, name):
    "Or torch computes a part of it, and that is the reason why there is none"
    make(name, tmp_path)
    runtime = recorded.start(tmp_path, monkeypatch)
    engine = runtime.engine
    try:
        if type(engine) is recorded.GraphEngine:
            seen = recorded.watch(runtime)
            recorded.serve(runtime)
            assert not seen.apart and {*seen.replayed} == {*range(1, 7)}, seen
        else:
            with pytest.raises(recorded.NotRecordable, match='is computed by torch'):
                recorded.RecordedSteps(engine.model, engine.attention, engine.token_pool, 3).capture_all()
        assert (type(engine) is recorded.GraphEngine) == (not used(engine.model.config) & TORCH)
    finally: runtime.close()

@pytest.mark.long
def test_the_guide_says_how_close_each_family_is():
    """`python tests/family_differences.py --write` makes the table. Another processor sums otherwise, so the
    figures are compared loosely"""
    import family_differences as made
    told = made.told()
    assert [*told] == [*made.MODELS]
    for name, apart in told.items():
        now, _ = made.measure(name)
        assert now < 1e-5 and apart < 1e-5 and now < max(20 * apart, 1e-6), (name, now, apart)

LONG = dict(rope_type='longrope', rope_theta=1e4, partial_rotary_factor=.75,
            original_max_position_embeddings=32,
            short_factor=[1.1, 1.2, 1.3, 1., 1., 1.4], long_factor=[2., 2.5, 3., 3., 4., 5.])

def test_longrope_within_and_beyond_the_original_context(tmp_path):
    """Within it the answer is the reference's. Beyond it that of a reference in which each token turns by its
    own position, and not the reference's own"""
    make_checkpoint('Phi3', tmp_path, **tokens, hidden_size=64, sliding_window=None,
                    original_max_position_embeddings=32, rope_parameters=LONG)
    short = [o[:19] for o in prompts()]   # with the answer 31
    long = [o for o in prompts() if len(o) > 36]
    with LLM(tmp_path, device='cpu', dtype='float32', page_size=4, num_pages=400) as llm:
        def answers(asked):
            return [o.token_ids for o in llm.generate(asked,
                SamplingParams(max_tokens=MAX_NEW, temperature=0))]
        comparison = Comparison()
        for prompt, ours in zip(short, answers(short)):
            comparison.check(tmp_path, prompt, ours, generate(tmp_path, prompt))
        comparison.done()
        ours = answers(long)
        model = load(tmp_path)
        theirs = [generate(tmp_path, o) for o in long]
        rotary, config = model.model.rotary_emb, read_config(tmp_path).rope
        def by_position(x, position_ids):
            freqs = config.freqs(16)[(position_ids[0] >= 32).long(), :6]   # those that turn
            angle = torch.cat([position_ids[0][:, None] * freqs] * 2, -1)[None]
            return angle.cos() * config.scale, angle.sin() * config.scale
        plain = rotary.forward
        try:
            rotary.forward = by_position
            assert [generate(tmp_path, o) for o in long] == ours
        finally: rotary.forward = plain
        assert ours != theirs

SEEING = [('Mistral3', 'mistral', {}), ('InternVL', 'qwen2', dict(image_size=[28, 28], patch_size=[14, 14])),
          ('InternVL', 'qwen3', dict(image_size=[28, 28], patch_size=[14, 14])),
          ('SmolVLM', 'llama', {}), ('Gemma3', 'gemma3_text', {}), ('Mistral3', 'ministral3', {})]

@pytest.mark.parametrize('name, text, vision',
                         [pytest.param(*o, marks=[pytest.mark.long] * (i > 0)) for i, o in enumerate(SEEING)])
def test_the_text_part_of_a_model_that_sees(tmp_path, name, text, vision):
    import transformers
    torch.manual_seed(0)
    sizes = (dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=.2,
                 max_position_embeddings=128, eos_token_id=198, bos_token_id=197,
                 pad_token_id=196) | ({} if text in ('llama', 'gemma3_text') else dict(sliding_window=None)))
    seen = (dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                 image_size=28, patch_size=14, head_dim=16) | vision)
    config = getattr(transformers, f'{name}Config')(text_config=dict(model_type=text, **sizes),
        vision_config=seen, tie_word_embeddings=False, image_token_id=195, image_token_index=195)
    model = getattr(transformers, f'{name}ForConditionalGeneration')(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor(prompts()[4])
    with torch.inference_mode(): right = model(input_ids=ids[None]).logits[0]
    file = next(tmp_path.glob('*.safetensors'))   # what is not read may be anything
    save_file(load_file(file) | {'vision.position_ids': torch.arange(3), 'vision.scale': torch.tensor(2.)},
              file)
    read = read_config(tmp_path)
    assert ((logits(tmp_path, read) - right).abs().max() < 1e-5 * right.abs().max()
            and read.architecture.lower().startswith(text.partition('_')[0]))

def test_each_row_is_tried():
    assert ({f'{o.partition(" ")[0]}ForCausalLM' for o in FAMILIES}
            | {f'{name}ForConditionalGeneration' for name, *_ in SEEING} == {*table} <= {*families})

@pytest.mark.parametrize('name', ['Phi3', 'Granite'])
def test_weights_in_few_bits(tmp_path, name):
    """What is edited can be compressed while it is loaded; the answers are those of a Llama's compression,
    not checked here"""
    make(name, tmp_path, hidden_size=64, intermediate_size=96)
    with LLM(tmp_path, device='cpu', quantization='int8', num_pages=100) as llm:
        out = llm.generate([prompts()[0]], SamplingParams(max_tokens=4, temperature=0))[0]
    assert out.error is None and len(out.token_ids) == 4

class Stored:
    "A checkpoint of a family, to be written again with something wrong"
    def __init__(self, name, path, **more):
        (path/'whole').mkdir(parents=True)
        make(name, path/'whole', **more)
        self.path, self.raw = path, json.loads((path/'whole'/'config.json').read_text())
        self.tensors = {name: o for file in (path/'whole').glob('*.safetensors')
                        for name, o in load_file(file).items()}

    def write(self, fields={}, tensors={}, without=()):
        "Its folder"
        folder = self.path/'other'
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder/'config.json').write_text(json.dumps({o: v
            for o, v in (self.raw | fields).items() if o not in without}))
        save_file({o: v.clone().contiguous() for o, v in (self.tensors | tensors).items()
                   if o not in without}, folder/'model.safetensors')
        return folder

    def logits(self, *what, **more):
        folder = self.write(*what, **more)
        return logits(folder, read_config(folder))

    def refused(self, words, *what, **more):
        with pytest.raises(ValueError) as e: self.logits(*what, **more)
        said = str(e.value)
        assert type(e.value) is ValueError and words in said and '\n' not in said and len(said) < 400, said

ODD = None, 'x', True, -1, 0, 1.5, [], [[1]], {}, 10**30, 1e308

@those(('Phi3', 'Mixtral'))
def test_a_wrong_file_is_one_sentence(tmp_path, name):
    "It names a field of config.json or a tensor of the checkpoint, and is never another error"
    stored = Stored(name, tmp_path)
    def tried(*what):
        try: stored.logits(*what)
        except ValueError as e:
            assert (type(e) is ValueError and '\n' not in str(e) and len(str(e)) < 400
                    and ('config.json' in str(e) or 'checkpoint' in str(e))), (what, e)
    rope = stored.raw['rope_parameters']
    asked = ('head_dim', 'num_key_value_heads', 'intermediate_size', 'tie_word_embeddings', 'layer_types',
             'sliding_window', 'num_local_experts', 'use_bias', 'logits_scaling')
    for value in ODD:
        for field in asked: tried({field: value})
        for field in ('partial_rotary_factor', 'rope_theta', 'rope_type'):
            tried(dict(rope_parameters=rope | {field: value}))
    for tensor in [o for o in stored.tensors if 'layers.0' in o or 'layers' not in o]:
        value = stored.tensors[tensor]
        rows = value if value.dim() else value[None]   # a single number is a row
        for other in (rows[:-1], torch.cat([rows, rows[:1]]), rows[:0],
                      rows[0, 0] if rows.dim() > 1 else rows[0], rows[..., None], rows.int()):
            tried({}, {tensor: other})
        tried({}, {tensor.replace('.weight', '.bias'): torch.zeros(3)})
    for stray in ('x', 'model.x', 'a.qkv_proj.b'): tried({}, {stray: torch.ones(2)})

def test_rows_that_no_projection_is_given(tmp_path):
    stored = Stored('Phi3', tmp_path)
    for name, n, asked in [('self_attn.qkv_proj', 128, 'q_proj, k_proj, v_proj'),
                           ('mlp.gate_up_proj', 160, 'gate_proj, up_proj')]:
        name = f'model.layers.1.{name}.weight'
        for rows in (n - 1, n + 1):
            stored.refused(f'tensor {name} of the checkpoint has {rows} rows; config.json asks for {n}, '
                           f'those of {asked}', {}, {name: torch.ones(rows, 48)})
    stored.refused('has model.layers.0.self_attn.q_proj.weight twice', {},
                   {'model.layers.0.self_attn.q_proj.weight': torch.ones(64, 48)})
    for share in (3/16, 17/16):
        stored.refused('makes no sense for head_dim=16',
                       dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=share)))

def test_what_changes_nothing_may_be_stored(tmp_path):
    "Biases of zeros, in a fused tensor, too; layers behind the last; for a family of the core they may, too"
    stored = Stored('Phi3', tmp_path)
    right = stored.logits()
    assert torch.equal(right, stored.logits({}, {'model.layers.0.self_attn.qkv_proj.bias': torch.zeros(128),
        'model.layers.1.mlp.down_proj.bias': torch.zeros(48)}))
    assert torch.equal(right,
                       stored.logits({}, {name.replace('layers.0', 'layers.7'): o
                                          for name, o in stored.tensors.items() if 'layers.0' in name}))

def test_large_tensors_come_in_pieces(tmp_path, monkeypatch):
    stored = Stored('Phi3', tmp_path)
    right = stored.logits()
    monkeypatch.setattr(weights, 'MAPPED_BYTES', 1000)
    assert torch.equal(right, stored.logits())

@pytest.mark.parametrize('name', ['Phi3', pytest.param('Granite', marks=pytest.mark.long),
                                  pytest.param('Ernie4_5', marks=pytest.mark.long)])
def test_without_a_head(tmp_path, name):
    "It is edited like the whole model, and the head is what is missing"
    stored = Stored(name, tmp_path, tie_word_embeddings=False)
    whole = stored.write()
    whole = load_weights(whole, read_config(whole), torch.float32, progress=False)
    base = {o.removeprefix('model.'): v for o, v in stored.tensors.items() if o.startswith('model.')}
    base = stored.write(dict(architectures=[f'{name}Model'], tie_word_embeddings=name == 'Granite'), base,
                        without={*stored.tensors})
    found = load_weights(base, read_config(base), torch.float32, progress=False)
    # a factor on logits is one on the last norm, and there are no logits
    norm, factor = 'model.norm.weight', {'Granite': 1 / factors['logits_scaling']}.get(name, 1)
    assert (found.keys() == whole.keys() - {'lm_head.weight'}
            and all(torch.equal(o, whole[name]) for name, o in found.items() if name != norm)
            and torch.equal(found[norm] * factor, whole[norm]))

def test_only_families_that_say_so_turn_a_part(tmp_path):
    "A Llama's rows would not be put in our order"
    make_checkpoint('Llama', tmp_path)
    raw = json.loads((tmp_path/'config.json').read_text())
    for given in (dict(rope_type='default'), LONG):
        (tmp_path/'config.json').write_text(json.dumps(raw
            | dict(rope_parameters=given | dict(partial_rotary_factor=.5))))
        with pytest.raises(ValueError, match='partial_rotary_factor=0.5 of config.json is not served'):
            read_config(tmp_path)

@pytest.mark.parametrize('wrong, words', [
    (dict(short_factor=[1.] * 5), 'makes no sense for head_dim=16'), (dict(long_factor=[0.] + [1.] * 5),
        'long_factor=[0.0,'), (dict(short_factor=[[1.]] * 6), 'short_factor=[[1.0]'),
    (dict(short_factor=[None] * 6), 'short_factor=[None'), (dict(long_factor='x'), 'long_factor='),
    (dict(long_factor=[10**40] * 6), 'long_factor='), (dict(short_factor=[1.] * 9999), 'makes no sense'),
    (dict(original_max_position_embeddings=1), 'original_max_position_embeddings of at least 2'),
    (dict(attention_factor=0), 'attention_factor that is not 0')], ids=lambda o: str(o)[:30])
def test_longrope_of_no_sense(tmp_path, wrong, words):
    stored = Stored('Phi3', tmp_path)
    stored.refused(words, dict(rope_parameters=LONG | wrong))

# without them a file of these says nothing
MORE = {'Dots1': dict(n_routed_experts=8, num_experts_per_tok=3), 'GraniteMoeHybrid': dict(
    layer_types=['attention'] * 8, num_local_experts=0, shared_intermediate_size=80),
        'SmolLM3': dict(pad_token_id=1)}

@pytest.mark.parametrize('name', [o for o in FAMILIES if ' ' not in o])
def test_fields_that_a_file_leaves_out(tmp_path, name):
    "They are those of the family's config class"
    few, every = stored(name, tmp_path, BASE | MORE.get(name, {}))
    assert replace(few, eos_token_ids=(), dtype=torch.float32) == replace(every, eos_token_ids=(),
                                                                          dtype=torch.float32)

@pytest.mark.parametrize('name',
    ['Phi3', pytest.param('Glm', marks=pytest.mark.long), pytest.param('Granite', marks=pytest.mark.long)])
def test_compressed_as_it_is_stored(tmp_path, name):
    """Fused projections of 4 bits are those of the same model, widened; what we would write is edited
    already, so it is refused"""
    stored = Stored(name, tmp_path, hidden_size=64, intermediate_size=96)
    few = {o: quantize(v, 4, 32) for o, v in stored.tensors.items() if o.endswith('_proj.weight')}
    packed = {o.removesuffix('weight') + part: v for o, codes in few.items()
              for part, v in packed_tensors(codes).items()}
    wide = {o: codes.codes.float().sub(8).mul(codes.scales.bfloat16().float().repeat_interleave(32, 1))
            for o, codes in few.items()}
    right = stored.logits({}, wide)
    assert ((stored.logits(dict(quantization_config=stated(4, 32, ['lm_head'])), packed,
                           without={*few}) - right).abs().max() < 1e-5)
    with pytest.raises(ValueError, match='its tensors are edited while they are loaded'):
        quantize_checkpoint(str(stored.write()), tmp_path/'small', 4, 32)
    # alone it knows the families, too
    said = subprocess.run([sys.executable, '-m', 'minisgl_lit', 'quantize', str(stored.write()),
                           str(tmp_path/'small')], capture_output=True, text=True)
    assert (said.returncode == 2 and 'its tensors are edited' in said.stderr
            and 'Traceback' not in said.stderr), said.stderr
    assert any('ForCausalLM' in str(o) for o in what_fits(str(stored.write())))

def test_weights_are_updated_while_it_runs(tmp_path):
    "Another checkpoint of the family is edited like the first"
    stored = Stored('Phi3', tmp_path)
    first = shutil.copytree(stored.write(), tmp_path/'first')
    other = stored.write({}, {name: o.flip(0) for name, o in stored.tensors.items() if 'down_proj' in name})
    def answer(llm):
        return llm.generate(prompts()[:1], SamplingParams(max_tokens=MAX_NEW, temperature=0))[0].token_ids
    with LLM(other, device='cpu', dtype='float32', num_pages=100) as llm: right = answer(llm)
    with LLM(first, device='cpu', dtype='float32', num_pages=100) as llm:
        before = answer(llm)
        llm.update_weights(other)
        assert answer(llm) == right != before

def test_a_family_of_ones_own(tmp_path, monkeypatch):
    "One that is not in the table: a row and an edit, as the guide has them"
    import transformers
    torch.manual_seed(0)
    config = transformers.ExaoneConfig(vocab_size=199, hidden_size=48, intermediate_size=80,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=.2,
                                       eos_token_id=198)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path/'config.json').read_text()) | dict(architectures=['ExaoneForCausalLM'])
    (tmp_path/'config.json').write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="architecture 'ExaoneForCausalLM' of config.json is not served"):
        read_config(tmp_path)
    monkeypatch.setitem(families, 'ExaoneForCausalLM',
                        Family(as_llama=usual(rope_theta=5e5, rms_norm_eps=1e-5)))
    with pytest.raises(ValueError, match='the checkpoint lacks tensors: lm_head.weight|the checkpoint lacks '
                                         'tensors: model'):
        logits(tmp_path, read_config(tmp_path))
    names = {'transformer.wte.': 'model.embed_tokens.', 'transformer.ln_f.': 'model.norm.',
             'transformer.h.': 'model.layers.', '.attn.attention.': '.self_attn.', '.out_proj.': '.o_proj.',
             '.ln_1.': '.input_layernorm.', '.ln_2.': '.post_attention_layernorm.', '.c_fc_0.': '.gate_proj.',
             '.c_fc_1.': '.up_proj.', '.c_proj.': '.down_proj.'}
    monkeypatch.setitem(sources, 'ExaoneForCausalLM', edited(renamed(names)))
    ids = torch.tensor(prompts()[4])
    with torch.inference_mode(): right = model(ids[None]).logits[0]
    assert (logits(tmp_path, read_config(tmp_path)) - right).abs().max() < 1e-5 * right.abs().max()

# as their makers wrote them, but for sizes: other spellings, fields that `transformers` does not write
small = dict(vocab_size=199, hidden_size=64, intermediate_size=80, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512, initializer_range=.2, eos_token_id=198,
             bos_token_id=197, pad_token_id=196)
stretched = dict(factor=16., high_freq_factor=4., low_freq_factor=1., original_max_position_embeddings=32)
alpha = dict(alpha=1000., beta_fast=32, beta_slow=1, factor=1., mscale=1., mscale_all_dim=1., type='dynamic')
phi = dict(embd_pdrop=0., resid_pdrop=.1, hidden_act='gelu_new', layer_norm_eps=1e-5, qk_layernorm=False,
           rope_scaling=None, rope_theta=10000.)
AS_PUBLISHED = {
    'Gemma, called gelu': ('Gemma', 'gemma', dict(hidden_act='gelu', head_dim=16, rope_theta=1e4)),
    'Gemma 3 1B': ('Gemma3', 'gemma3_text', dict(
        num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=20, rope_local_base_freq=10000,
        rope_theta=1000000, sliding_window=8, sliding_window_pattern=6,
        rope_scaling=dict(factor=8., rope_type='linear'))),
    'OLMo 3': ('Olmo3', 'olmo3', dict(
        num_hidden_layers=5, rope_theta=500000, sliding_window=8, rope_scaling=dict(
            attention_factor=1.2, beta_fast=32, beta_slow=1, factor=8., original_max_position_embeddings=32,
            rope_type='yarn'))),
    'EXAONE 4 32B': ('Exaone4', 'exaone4', dict(
        num_hidden_layers=5, rope_theta=1000000, sliding_window=8, sliding_window_pattern='LLLG',
        layer_types=['sliding_attention'] * 3 + ['full_attention'] * 2,
        rope_scaling=stretched | dict(rope_type='llama3'))),
    'EXAONE 4 1.2B': ('Exaone4', 'exaone4', dict(
        sliding_window=None, sliding_window_pattern=None, layer_types=['full_attention'] * 3)),
    'Command R7B': ('Cohere2', 'cohere2', dict(
        num_hidden_layers=5, layer_switch=4, logit_scale=.25, sliding_window=8, sliding_window_pattern=4,
        position_embedding_type='rope_gptj', rotary_pct=1., use_parallel_block=True)),
    'Command R7B without windows': ('Cohere2', 'cohere2', dict(
        logit_scale=.25, sliding_window=8, layer_types=['full_attention'] * 3)),
    'SmolLM3 with windows': ('SmolLM3', 'smollm3', dict(
        num_hidden_layers=5, no_rope_layer_interval=2, sliding_window=8, use_sliding_window=True)),
    'Hunyuan 7B': ('HunYuanDenseV1', 'hunyuan_v1_dense', dict(
        attention_head_dim=16, head_dim=16, rope_scaling=alpha, use_cla=False, use_qk_norm=True)),
    'Apertus without positions': ('Apertus', 'apertus', dict(max_position_embeddings=65536)),
    'Granite without factors': ('Granite', 'granite', {}),
    'StarCoder 2': ('Starcoder2', 'starcoder2', dict(
        norm_epsilon=1e-5, norm_type='layer_norm', mlp_type='default', sliding_window=8, use_bias=True)),
    'Phi 2': ('Phi', 'phi', phi | dict(num_key_value_heads=4, partial_rotary_factor=.4)),
    'Phi 1.5': ('Phi', 'phi', phi | dict(num_key_value_heads=None, partial_rotary_factor=.5)),
    'StableLM 2 12B': ('StableLm', 'stablelm', dict(
        hidden_act='silu', hidden_dropout=0., layer_norm_eps=1e-5, norm_eps=1e-5, partial_rotary_factor=.25,
        qk_layernorm=True, rope_theta=10000, use_parallel_residual=True, use_qkv_bias=False)),
    'NanoChat d32': ('NanoChat', 'nanochat', dict(
        attention_bias=False, final_logit_softcapping=15., hidden_act='relu2', num_key_value_heads=4,
        rms_norm_eps=1e-6, rope_parameters=dict(rope_theta=10000., rope_type='default'))),
    'MiniMax M2': ('MiniMaxM2', 'minimax_m2', dict(
        attn_type_list=[1] * 3, head_dim=16, intermediate_size=24, num_local_experts=8,
        num_experts_per_tok=3, rotary_dim=8, scoring_func='sigmoid', shared_intermediate_size=0, use_mtp=True,
        num_mtp_modules=3)),
    'Trinity': ('Afmoe', 'afmoe', dict(
        num_hidden_layers=5, head_dim=16, moe_intermediate_size=24, mup_enabled=True, n_group=1,
        num_experts=8, num_experts_per_tok=3, num_dense_layers=2, num_shared_experts=1, route_norm=True,
        route_scale=2.8, score_func='sigmoid', sliding_window=8, global_attn_every_n_layers=4)),
    'ERNIE 4.5 21B': ('Ernie4_5_Moe', 'ernie4_5_moe', dict(
        moe_num_experts=8, moe_k=3, moe_intermediate_size=24, moe_layer_start_index=1, moe_layer_end_index=2,
        moe_gate='topk', moe_use_aux_free=True, num_nextn_predict_layers=1)),
    'Hunyuan A13B': ('HunYuanMoEV1', 'hunyuan_v1_moe', dict(
        head_dim=16, intermediate_size=24, moe_intermediate_size=[24] * 3, moe_topk=[3] * 3, num_experts=8,
        num_shared_expert=[1] * 3, rope_scaling=alpha, use_cla=False, n_group=None))}

def publish(path, name, **more):
    "A random model of a published config, and that config beside it"
    import transformers
    kind, model_type, fields = AS_PUBLISHED[name]
    raw = small | dict(num_hidden_layers=3) | fields | more | dict(
        architectures=[f'{kind}ForCausalLM'], model_type=model_type, torch_dtype='float32')
    path.mkdir(exist_ok=True)
    (path/'config.json').write_text(json.dumps(raw))
    torch.manual_seed(0)
    model = getattr(transformers, f'{kind}ForCausalLM')(transformers.AutoConfig.from_pretrained(path)).eval()
    for o in [*model.parameters(), *model.buffers()]:
        if o.dim() == 1 and len(o) > 8: torch.nn.init.uniform_(o.data, .5, 1.5)
    for o_name, o in [*model.named_parameters(), *model.named_buffers()]:
        if o_name.endswith(('score_correction_bias', 'expert_bias')): torch.nn.init.normal_(o.data, std=.2)
    model.save_pretrained(path)
    (path/'config.json').write_text(json.dumps(raw))
    (path/'generation_config.json').unlink(missing_ok=True)
    return model

def greedy(model, prompt):
    "What it says, computed anew for each token"
    ids = list(prompt)
    for _ in range(MAX_NEW):
        with torch.inference_mode(): scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(scores.argmax()))
        if ids[-1] == 198: break
    return ids[len(prompt):]

@pytest.mark.parametrize('name', [
    pytest.param(o, marks=[pytest.mark.long] * (o not in ('SmolLM3 with windows', 'Granite without factors')))
    for o in AS_PUBLISHED])
def test_a_config_as_it_was_published(tmp_path, name):
    "Every field that changes the answer is read, in its maker's spelling"
    model = publish(tmp_path/'model', name)
    with LLM(tmp_path/'model', device='cpu', dtype='float32', page_size=4, num_pages=400,
             max_prefill_tokens=16) as llm:
        outs = llm.generate(prompts(), SamplingParams(max_tokens=MAX_NEW, temperature=0))
    assert [o.token_ids for o in outs] == [greedy(model, o) for o in prompts()]

@pytest.mark.parametrize('name', ['Gemma, called gelu', 'Apertus without positions'])
def test_logits_of_a_config_as_it_was_published(tmp_path, name):
    "Where the difference is too small for most tokens"
    model = publish(tmp_path/'model', name)
    with torch.inference_mode(): right = model(torch.tensor([prompts()[4]])).logits[0]
    ours = logits(tmp_path/'model', read_config(tmp_path/'model'))
    assert (ours - right).abs().max() < 1e-5 * right.abs().max()

@pytest.mark.parametrize('name, wrong, words', [
    ('Gemma, called gelu', dict(use_bidirectional_attention=True), 'use_bidirectional_attention=True'),
    ('SmolLM3 with windows', dict(no_rope_layers=[1, 0]), 'no_rope_layers=[1, 0]'),
    ('Hunyuan 7B', dict(use_cla=True), 'use_cla=True'),
    ('Phi 2', dict(qk_layernorm=True), 'qk_layernorm=True'),
    ('NanoChat d32', dict(rope_parameters=dict(rope_type='linear', factor=2.)), "rope_type='linear'"),
    ('NanoChat d32', dict(tie_word_embeddings=True), 'tie_word_embeddings=True'),
    ('MiniMax M2', dict(scoring_func='softmax'), "scoring_func='softmax'"),
    ('MiniMax M2', dict(shared_intermediate_size=24), 'shared_intermediate_size'),
    ('MiniMax M2', dict(num_local_experts=2**30), 'num_experts=1073741824 of config.json in 3 layers'),
    ('Trinity', dict(num_experts=2**20), 'num_experts=1048576 of config.json in 5 layers')],
    ids=lambda o: str(o)[:30])
def test_what_a_published_config_may_not_ask(tmp_path, name, wrong, words):
    "A field that is not computed is named; no number of experts makes it slow"
    kind, model_type, fields = AS_PUBLISHED[name]
    raw = small | dict(num_hidden_layers=3) | fields | wrong | dict(architectures=[f'{kind}ForCausalLM'])
    (tmp_path/'config.json').write_text(json.dumps(raw))
    with pytest.raises(ValueError) as e: read_config(tmp_path)
    assert words in str(e.value) and 'config.json' in str(e.value) and '\n' not in str(e.value)

def test_router_biases_keep_all_their_bits(tmp_path):
    "In bfloat16 steps of a large bias would be lost, and other experts chosen"
    publish(tmp_path/'model', 'ERNIE 4.5 21B')
    file = tmp_path/'model'/'model.safetensors'
    stored = load_file(file)
    biases = {o: 8 + v / 100 for o, v in stored.items() if o.endswith('e_score_correction_bias')}
    save_file(stored | biases, file)
    made = load_weights(tmp_path/'model', read_config(tmp_path/'model'), torch.bfloat16, progress=False)
    for name, right in biases.items():
        found = made[name.replace('moe_statics', 'gate')].float().view(3, -1).sum(0)
        right = right.flatten()
        assert torch.equal(found, right) and not torch.equal(found, right.bfloat16().float())

def test_experts_stacked_in_another_shape(tmp_path):
    "They are cut by rows and columns that are not there, and would be garbage"
    stored = Stored('GraniteMoe', tmp_path)
    for part in ('input_linear', 'output_linear'):
        name = f'model.layers.1.block_sparse_moe.{part}.weight'
        value = stored.tensors[name]
        for other in (value.mT, value[..., :-1], value[:, :-1], value[..., None], value[:, 0, 0], value[0]):
            stored.refused(f'tensor {name} of the checkpoint has shape {list(other.shape)}; config.json '
                           f'asks for {list(value.shape)}', {}, {name: other})

def test_norms_of_heads_are_all_there(tmp_path):
    "Each is a part of one tensor; where one is missing, what memory held before would be taken for it"
    stored = Stored('StableLm with both', tmp_path)
    def norm(i): return f'model.layers.1.self_attn.q_layernorm.norms.{i}.weight'
    fifth, extra = {norm(4): torch.ones(16)}, f'does not account for: {norm(4)}'
    stored.refused('self_attn.q_norm.weight of the checkpoint has shape [48]; config.json asks for [64]',
                   without={norm(2)})
    stored.refused(extra, {}, fifth)
    stored.refused(extra, {}, fifth, without={norm(2)})
    stored.refused(f'tensor {norm(2)} of the checkpoint has shape [8]; config.json asks for [16]', {},
                   {norm(2): torch.ones(8)})

@pytest.mark.long
@pytest.mark.parametrize('name', ['Olmo2', 'MiniMaxM2', 'Afmoe', 'Cohere2', 'Starcoder2', 'GraniteMoe',
                                  'StableLm with both'])
def test_heads_of_new_families_on_two_ranks(tmp_path, name):
    "Three heads of keys on two ranks; norms of all heads are cut as these are"
    make(name, tmp_path, num_attention_heads=6, num_key_value_heads=3,
         **(dict(hidden_size=96) if 'StableLm' in name else {}))
    asked = prompts()
    compare(tmp_path, asked, [generate(tmp_path, o) for o in asked], tp=2)

def test_norms_of_all_heads_are_cut_for_each_rank(tmp_path):
    from minisgl_lit.core.device import ProcessGroup
    make('Olmo2', tmp_path, num_attention_heads=6, num_key_value_heads=3)
    config = read_config(tmp_path)
    whole, *ranks = (load_weights(tmp_path, config, torch.float32, group=o, progress=False)
                     for o in (ProcessGroup(), ProcessGroup(0, 2), ProcessGroup(1, 2)))
    q, k = (whole[f'model.layers.0.self_attn.{o}_norm.weight'].view(-1, 16) for o in 'qk')
    for rank, (queries, keys) in zip(ranks, [([0, 1, 2], [0, 0, 1]), ([3, 4, 5], [1, 2, 2])]):
        assert torch.equal(rank['model.layers.0.self_attn.q_norm.weight'].view(-1, 16), q[queries])
        assert torch.equal(rank['model.layers.0.self_attn.k_norm.weight'].view(-1, 16), k[keys])
