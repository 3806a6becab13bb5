"""Make the GGUF files beside this one: models of few weights, quantized by llama.cpp itself.

    pip install torch transformers gguf safetensors llama-cpp-python==0.3.36
    python tests/data/make_gguf.py

`embedded-Q4_K_M.gguf` is the embedded model with its vocabulary and chat template; the others have random
weights and no vocabulary. Rows have 256 numbers, which K-quants need."""
import ctypes, json, sys
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
ARCHS = dict(Llama='llama', Qwen2='qwen2', Qwen3='qwen3', Qwen3Moe='qwen3moe')
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
    out.add_context_length(config['max_position_embeddings'])
    out.add_embedding_length(config['hidden_size'])
    out.add_feed_forward_length(config['intermediate_size'])
    out.add_block_count(n)
    out.add_head_count(heads := config['num_attention_heads'])
    out.add_head_count_kv(kv_heads := config['num_key_value_heads'])
    out.add_key_length(config['head_dim']), out.add_value_length(config['head_dim'])
    out.add_layer_norm_rms_eps(config['rms_norm_eps'])
    out.add_rope_freq_base(config['rope_parameters']['rope_theta'])
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
        if arch == 'llama' and 'q_proj' in name: weight = pairs_together(weight, heads)
        if arch == 'llama' and 'k_proj' in name: weight = pairs_together(weight, kv_heads)
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
