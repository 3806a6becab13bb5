"""Tiny random checkpoints, what `transformers` says about them, and a fair comparison with it."""
from functools import cache
from pathlib import Path

import torch

FAMILIES = ('Qwen3', 'Qwen2', 'Llama')
MAX_NEW = 12
NEAR_TIE = 1e-4    # logits this close may be told apart either way (DESIGN: same answer)

def prompts() -> list[list[int]]:
    "Ragged, with shared prefixes, a repeated one and one of a single token"
    g = torch.Generator().manual_seed(1)
    def some(n): return torch.randint(0, 190, (n,), generator=g).tolist()
    system, more = some(33), some(16)
    return [system + some(5), system + more + some(3), some(1), system + more + some(9), some(50), system, some(17), system + more]

@cache
def load(path: Path, dtype=torch.float32):
    "The same checkpoint in transformers"
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

def make_checkpoint(family: str, path: Path) -> None:
    "Save a small model with random weights; large ones, so that its choices are clear"
    import transformers
    torch.manual_seed(0)
    config = getattr(transformers, f'{family}Config')(
        vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=128, initializer_range=.2, tie_word_embeddings=family != 'Llama', eos_token_id=198,
        bos_token_id=None, pad_token_id=None)
    getattr(transformers, f'{family}ForCausalLM')(config).save_pretrained(path, max_shard_size='40KB')

@torch.inference_mode()
def generate(path: Path, prompt: list[int], max_new: int = MAX_NEW) -> list[int]:
    "Greedy answer of `transformers.generate`, its end token included"
    out = load(path).generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                              max_new_tokens=max_new, do_sample=False, pad_token_id=0)
    return out[0, len(prompt):].tolist()

class Comparison:
    "Counts tokens, and differences that a near tie of the reference excuses"
    def __init__(self): self.tokens = self.excused = 0

    def check(self, path: Path, prompt: list[int], ours: list[int], reference: list[int], what: object = '') -> None:
        "Fail at the first token that differs without excuse"
        self.tokens += len(reference)
        if ours == reference: return
        at = next((i for i, (a, b) in enumerate(zip(ours, reference)) if a != b), min(len(ours), len(reference)))
        with torch.inference_mode(): best = load(path)(torch.tensor([prompt + reference[:at]])).logits[0, -1].topk(2).values
        gap = float(best[0] - best[1])
        assert at < len(reference) and gap < NEAR_TIE, f'{what}: token {at} of {ours} differs from {reference}; the best two are {gap:.2e} apart'
        self.excused += 1

    def done(self) -> None:
        "Say how often a tie was excused, and fail if that was more than one in a thousand"
        print(f'{self.tokens} tokens compared, {self.excused} near ties')
        assert self.excused <= .001 * self.tokens
