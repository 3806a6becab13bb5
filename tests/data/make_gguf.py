"""Make the GGUF files beside this one: models of few weights, quantized by llama.cpp itself.

    pip install torch transformers gguf safetensors llama-cpp-python==0.3.36
    python tests/data/make_gguf.py

`embedded-Q4_K_M.gguf` is the embedded model with its vocabulary and chat template; the others have random
weights and no vocabulary. Rows have 256 numbers, which K-quants need."""
import ctypes, json, math, sys
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
ARCHS = dict(
    Llama='llama', Qwen2='qwen2', Qwen3='qwen3', Qwen3Moe='qwen3moe', Gemma='gemma', Gemma2='gemma2',
    Gemma3='gemma3', Phi3='phi3', Glm4='glm4', Granite='granite', Olmo='olmo', Olmo2='olmo2', Olmo3='olmo2',
    Exaone4='exaone4', Cohere='command-r', Cohere2='cohere2', SmolLM3='smollm3', SeedOss='seed_oss',
    Ernie4_5='ernie4_5', HunYuanDenseV1='hunyuan-dense', Starcoder2='starcoder2', StableLm='stablelm',
    Nemotron='nemotron', Arcee='arcee', Mistral='mistral3', Ministral3='mistral3')
PAIRED = 'llama', 'granite', 'arcee', 'smollm3', 'mistral3', 'olmo'   # see `pairs_together`
PLUS_ONE = 'gemma', 'gemma2', 'gemma3', 'nemotron'   # whose norms are stored minus 1 elsewhere
FIELDS = {   # by the names of a config.json
    'max_position_embeddings': 'context_length', 'hidden_size': 'embedding_length',
    'intermediate_size': 'feed_forward_length', 'num_hidden_layers': 'block_count',
    'num_attention_heads': 'attention.head_count', 'num_key_value_heads': 'attention.head_count_kv',
    'rms_norm_eps': 'attention.layer_norm_rms_epsilon', 'layer_norm_eps': 'attention.layer_norm_epsilon',
    'norm_epsilon': 'attention.layer_norm_epsilon', 'norm_eps': 'attention.layer_norm_epsilon',
    'head_dim': 'attention.key_length', 'sliding_window': 'attention.sliding_window',
    'attn_logit_softcapping': 'attn_logit_softcapping', 'logit_scale': 'logit_scale',
    'final_logit_softcapping': 'final_logit_softcapping', 'logits_scaling': 'logit_scale',
    'clip_qkv': 'attention.clamp_kqv', 'attention_multiplier': 'attention.scale',
    'embedding_multiplier': 'embedding_scale', 'residual_multiplier': 'residual_scale',
    'use_parallel_residual': 'use_parallel_residual'}
ROPE = {
    'rope_theta': 'freq_base', 'factor': 'scaling.factor', 'mscale_all_dim': 'scaling.yarn_log_multiplier',
    'original_max_position_embeddings': 'scaling.original_context_length'}
SMALL = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=1, head_dim=64,
             vocab_size=96, eos_token_id=95, initializer_range=.06)
EXPERTS = dict(num_hidden_layers=1, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=256,
               norm_topk_prob=True)
# and the embedded model
FILES = dict(Llama=('Q5_K_M', {}), Qwen2=('Q4_0', {}), Qwen3=('Q5_1', {}), Qwen3Moe=('Q8_0', EXPERTS))


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    "All of a checkpoint, float32"
    from safetensors.torch import load_file
    return {name: o.float().numpy() for file in checkpoint.glob('*.safetensors')
            for name, o in load_file(file).items()}

def pairs_together(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Llama's queries or keys in the order of the format: those that turn together stand beside
    each other"""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)

def add_vocabulary(out: gguf.GGUFWriter, checkpoint: Path) -> None:
    "Tokens, merges, the chat template, and the whole tokenizer.json"
    whole, about = ((checkpoint/name).read_text() for name in ('tokenizer.json', 'tokenizer_config.json'))
    model, added, about = json.loads(whole)['model'], json.loads(whole)['added_tokens'], json.loads(about)
    tokens = {i: t for t, i in model['vocab'].items()} | {o['id']: o['content'] for o in added}
    kinds = {o['id']: gguf.TokenType.CONTROL if o['special'] else gguf.TokenType.USER_DEFINED for o in added}
    out.add_tokenizer_model('gpt2')
    out.add_tokenizer_pre('qwen2')
    out.add_token_list([tokens[i] for i in range(len(tokens))])
    out.add_token_types([kinds.get(i, gguf.TokenType.NORMAL) for i in range(len(tokens))])
    out.add_token_merges([o if isinstance(o, str) else ' '.join(o) for o in model['merges']])
    out.add_eos_token_id(2), out.add_pad_token_id(0), out.add_add_bos_token(False)
    out.add_chat_template(about['chat_template'])
    out.add_string(gguf.Keys.Tokenizer.HF_JSON, whole)

def add_fields(out: gguf.GGUFWriter, arch: str, config: dict) -> None:
    "What a config.json says, and RoPE's factors, which are tensors"
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    def say(name: str, value) -> None:
        if value is not None: out.add_key_value(f'{arch}.{name}', value, kinds[type(value)])
    for ours, name in FIELDS.items(): say(name, config.get(ours))
    say('attention.value_length', config.get('head_dim'))
    if config.get('sliding_window') and arch in ('olmo2', 'exaone4'):   # others go by the architecture
        out.add_sliding_window_pattern([o == 'sliding_attention' for o in config['layer_types']])
    both = config['rope_parameters']
    rope = both.get('full_attention', both)
    head_dim = config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']
    turned = int(head_dim * rope.get('partial_rotary_factor', 1))
    say('rope.dimension_count', turned)
    kind = rope.get('rope_type')
    if kind in ('linear', 'yarn'): out.add_string(f'{arch}.rope.scaling.type', kind)
    for ours, name in ROPE.items():
        if arch not in ('gemma', 'gemma2'): say(f'rope.{name}', rope.get(ours))   # 10,000 goes without saying
    say('rope.freq_base_swa', both.get('sliding_attention', {}).get('rope_theta'))
    say('attention.temperature_scale', rope.get('llama_4_scaling_beta'))
    if kind == 'longrope':
        longer = config['max_position_embeddings'] / (old := rope['original_max_position_embeddings'])
        say('rope.scaling.attn_factor', math.sqrt(1 + math.log(longer) / math.log(old)))
        for o in ('short', 'long'):
            out.add_tensor(f'rope_factors_{o}.weight', np.array(rope[f'{o}_factor'], np.float32))

def write(checkpoint: Path, file: Path) -> None:
    "A checkpoint as a GGUF file, in float32"
    config = json.loads((checkpoint/'config.json').read_text())
    family = config['architectures'][0].removesuffix('ForCausalLM')
    arch, n = ARCHS[family], config['num_hidden_layers']
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), n)
    out = gguf.GGUFWriter(file, arch)
    if (checkpoint/'tokenizer.json').exists(): add_vocabulary(out, checkpoint)
    else:
        out.add_tokenizer_model('none')
        out.add_vocab_size(config['vocab_size'])
        out.add_eos_token_id(config['eos_token_id'])
    heads, kv_heads = config['num_attention_heads'], config.get('num_key_value_heads')
    add_fields(out, arch, config)
    found, experts = tensors(checkpoint), config.get('num_experts') or config.get('num_local_experts')
    if experts:
        out.add_expert_count(experts), out.add_expert_used_count(config['num_experts_per_tok'])
        out.add_expert_feed_forward_length(config['moe_intermediate_size'])
        for i in range(n):
            for part in ('gate', 'up', 'down'):
                layer = f'model.layers.{i}.mlp.experts.'
                found[f'{layer}{part}_proj.weight'] = np.stack([found.pop(f'{layer}{e}.{part}_proj.weight')
                    for e in range(experts)])
    for name, weight in found.items():
        if name == 'lm_head.weight' and config['tie_word_embeddings']: continue
        if arch in PAIRED and 'q_proj' in name: weight = pairs_together(weight, heads)
        if arch in PAIRED and 'k_proj' in name: weight = pairs_together(weight, kv_heads)
        if arch in PLUS_ONE and name.endswith('norm.weight'): weight = weight + 1
        target = names.get_name(name, try_suffixes=('.weight', '.bias'))
        out.add_tensor(target or sys.exit(f'{name} has no name in the format'), np.ascontiguousarray(weight))
    out.write_header_to_file(), out.write_kv_data_to_file(), out.write_tensors_to_file()
    out.close()

def quantize(source: Path, file: Path, kind: str) -> None:
    "By llama.cpp"
    import llama_cpp as llama
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f'LLAMA_FTYPE_MOSTLY_{kind}')
    if llama.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params)):
        raise SystemExit(f'no {file}')

def main() -> None:
    from reference import make_checkpoint
    from minisgl_lit.formats.hub import embedded_path
    with TemporaryDirectory() as folder:
        for family, (kind, more) in FILES.items():
            checkpoint, full = Path(folder)/family, Path(folder)/f'{family}.gguf'
            make_checkpoint(family, checkpoint, **SMALL | more)
            write(checkpoint, full)
            quantize(full, HERE/f'{ARCHS[family]}-{kind}.gguf', kind)
        write(embedded_path(), Path(folder)/'embedded.gguf')
        quantize(Path(folder)/'embedded.gguf', HERE/'embedded-Q4_K_M.gguf', 'Q4_K_M')

if __name__ == '__main__': main()
