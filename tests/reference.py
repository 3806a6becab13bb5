"""Tiny random checkpoints, what `transformers` says about them, and a fair comparison with it."""
import json
from functools import cache
from pathlib import Path

import torch

import minisgl_lit.formats.ropes   # noqa: F401 (registers those of the variants below)

FAMILIES = ('Qwen3', 'Qwen2', 'Llama')
MAX_NEW = 12
NEAR_TIE = 1e-4    # logits this close may be told apart either way (DESIGN: same answer)

def rope(kind: str, original: int | None = 16, **more) -> dict:
    "Fields of a config: positions stretched from a context that most prompts are longer than"
    old = {} if original is None else dict(original_max_position_embeddings=original)
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4) | old | more)

window = dict(sliding_window=7, use_sliding_window=True)
experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
# everything by which the families differ, beyond `FAMILIES` themselves
VARIANTS: dict[str, tuple[str, dict]] = {
    'window everywhere': ('Mistral', dict(sliding_window=7)),
    'no window': ('Mistral', dict(sliding_window=None, num_key_value_heads=4)),
    'window in upper layers': ('Qwen2', window | dict(max_window_layers=1)),
    'window in listed layers': ('Qwen3',
        window | dict(layer_types=['sliding_attention', 'full_attention', 'sliding_attention'])),
    'window that nobody asked for': ('Qwen2', dict(sliding_window=7)),
    'llama3': ('Llama', rope('llama3', factor=8., low_freq_factor=1., high_freq_factor=4.)),
    'llama3, old spelling': ('Llama',
        rope('llama3', factor=8., low_freq_factor=1., high_freq_factor=4.) | dict(old_spelling=True)),
    'yarn': ('Qwen3', rope('yarn', factor=8.)),
    'yarn, old spelling': ('Qwen2', rope('yarn', factor=8.) | dict(old_spelling=True)),
    'yarn with its own scale': ('Llama',
        rope('yarn', factor=4., attention_factor=1.3, beta_fast=8., beta_slow=2., truncate=False)),
    'linear': ('Llama', rope('linear', None, factor=4.) | dict(max_position_embeddings=32)),
    'linear, old spelling': ('Llama',
        rope('linear', None, factor=4.) | dict(max_position_embeddings=32, old_spelling=True)),
    'dynamic': ('Llama', rope('dynamic', None, factor=4.) | dict(max_position_embeddings=32)),
    'constants': ('Llama',
                  dict(attention_bias=True, mlp_bias=True, num_key_value_heads=1, tie_word_embeddings=True)),
    'odd sizes': ('Qwen3', dict(vocab_size=131, head_dim=10, hidden_size=52, num_attention_heads=6,
                                num_key_value_heads=3, attention_bias=True)),
    'stored in bfloat16': ('Qwen3', dict(dtype='bfloat16', tie_word_embeddings=False)),
    'experts': ('Qwen3Moe', experts | dict(norm_topk_prob=True, head_dim=None)),
    'experts in some layers': ('Qwen3Moe', experts | dict(decoder_sparse_step=2, tie_word_embeddings=False)),
    'experts but in one layer, and a window': ('Qwen3Moe', experts | window | dict(mlp_only_layers=[0])),
    'shared expert': ('Qwen2Moe', experts | dict(shared_expert_intermediate_size=20, head_dim=None)),
}

def prompts(vocab_size: int = 190) -> list[list[int]]:
    "Ragged, with shared prefixes, a repeated one and one of a single token"
    g = torch.Generator().manual_seed(1)
    def some(n): return torch.randint(0, vocab_size, (n,), generator=g).tolist()
    system, more = some(33), some(16)
    return [system + some(5), system + more + some(3), some(1), system + more + some(9), some(50), system,
            some(17), system + more]

@cache
def load(path: Path, dtype=torch.float32):
    "The same checkpoint in transformers"
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

def spell_as_before(path: Path) -> None:
    "Rewrite `config.json` as transformers 3 and 4 did"
    raw = json.loads((path/'config.json').read_text())
    rope = raw.pop('rope_parameters')
    raw |= dict(rope_theta=rope.pop('rope_theta'), torch_dtype=raw.pop('dtype'))
    raw['rope_scaling'] = dict(type=rope.pop('rope_type')) | rope
    (path/'config.json').write_text(json.dumps(raw))

def make_checkpoint(family: str, path: Path, dtype: str = 'float32', old_spelling: bool = False,
                    **fields) -> None:
    "Save a small model with random weights; large ones, so that its choices are clear"
    import transformers
    torch.manual_seed(0)
    usual = dict(
        vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=.2,
        tie_word_embeddings=family != 'Llama', eos_token_id=198, bos_token_id=None, pad_token_id=None)
    make = getattr(transformers, f'{family}ForCausalLM')
    given = {o: v for o, v in (usual | fields).items() if (o, v) != ('head_dim', None)}
    model = make(make.config_class(**given))
    biases = [(name, o) for name, o in model.named_buffers() if name.endswith('_bias')]   # of routers
    for name, o in [*model.named_parameters(), *biases]:   # what does nothing would hide mistakes
        if o.dim() == 1 or name.endswith('_bias') or not o.any():
            (torch.nn.init.uniform_(o.data, .5, 1.5) if 'norm' in name
             else torch.nn.init.normal_(o.data, std=.2))
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size='40KB')
    if old_spelling: spell_as_before(path)

@torch.inference_mode()
def generate(path: Path, prompt: list[int], max_new: int = MAX_NEW) -> list[int]:
    "Greedy answer of `transformers.generate`, its end token included"
    out = load(path).generate(torch.tensor([prompt]),
                              attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                              max_new_tokens=max_new, do_sample=False, pad_token_id=0)
    return out[0, len(prompt):].tolist()

@torch.inference_mode()
def generate_stepwise(path: Path, prompt: list[int], max_new: int = MAX_NEW) -> list[int]:
    "The same, given the prompt token by token: how `dynamic` positions are a function of what came before"
    model, told, past = load(path), list(prompt), None
    for i in range(len(prompt) + max_new - 1):
        out = model(torch.tensor([[told[i]]]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        if i + 1 == len(told): told.append(int(out.logits[0, -1].argmax()))
        if told[-1] == model.config.eos_token_id: break
    return told[len(prompt):]

class Comparison:
    "Counts tokens, and differences that a near tie of the reference excuses"
    def __init__(self): self.tokens = self.excused = 0

    def check(self, path: Path, prompt: list[int], ours: list[int], reference: list[int],
              what: object = '') -> None:
        "Fail at the first token that differs without excuse"
        self.tokens += len(reference)
        if ours == reference: return
        at = next((i for i, (a, b) in enumerate(zip(ours, reference)) if a != b),
                  min(len(ours), len(reference)))
        with torch.inference_mode():
            best = load(path)(torch.tensor([prompt + reference[:at]])).logits[0, -1].topk(2).values
        gap = float(best[0] - best[1])
        assert at < len(reference) and gap < NEAR_TIE, (
            f'{what}: token {at} of {ours} differs from {reference}; the best two are {gap:.2e} apart')
        self.excused += 1

    def done(self) -> None:
        "Say how often a tie was excused, and fail if that was more than one in a thousand"
        print(f'{self.tokens} tokens compared, {self.excused} near ties')
        assert self.excused <= .001 * self.tokens
