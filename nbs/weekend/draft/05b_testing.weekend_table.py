# %%
#| default_exp testing.weekend_table

# %% [markdown]
# # The weekend's table
# > One fixed set of requests, and one table in which each chapter of the weekend adds its row.
#
# The ten chapters of the [weekend](weekend/01_model.ipynb) grow one engine. *What has each of them brought?* All of them serve the same requests and print the same table, with one row more. This chapter makes both, so that no chapter has to.

# %%
#| export
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer

# %%
#| hide
import tempfile
from fastcore.test import test_eq, expect_fail

# %% [markdown]
# ## The requests
# Six questions to the embedded model, and a long text with a short answer between them. All begin with the same system prompt, and the chat's marks are written by hand.

# %%
#| export
folder = Path(str(resources.files('minisgl_lit'))) / 'models' / 'embedded_data' / 'checkpoint'
tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
QUESTION = 'What is a radix cache?'
OTHERS = ('What is a page?', 'What is overlap?', 'What is a lock?', 'What is chunked prefill?',
          'What is a token?')

def prompt_of(
    question: str,   # Of the user
) -> list[int]:      # Token ids of a chat that asks it
    "A system prompt, the question, and the mark with which the answer begins"
    chat = dict(system='You are a helpful guide to this engine. Answer briefly.', user=question)
    said = [f'<|im_start|>{role}\n{text}<|im_end|>\n' for role, text in chat.items()]
    return tokenizer.encode(''.join(said) + '<|im_start|>assistant\n').ids

def fixed_requests() -> list[tuple[str, list[int], int]]:
    "(name, prompt, longest answer in tokens) of each, in the order in which they come"
    document = ('document', prompt_of('What is a page? ' * 40), 4)
    asked = [(question, prompt_of(question), 24) for question in (QUESTION, *OTHERS)]
    return [*asked[:3], document, *asked[3:]]


# %%
[(name, len(prompt), most) for name, prompt, most in fixed_requests()]


# %% [markdown]
# ## A row
# A chapter serves them in steps, and says of each step which tokens it made, how many tokens it computed and how many slots of the KV cache were reserved meanwhile. The rest is counting. What the first request was answered is kept: it has to stay the same.

# %%
#| export
@dataclass
class Step:
    "One step of an engine."
    made: list[tuple[str, int]]   # New tokens, each with the name of its request
    computed: int                 # Tokens that went through the model
    slots: int = 0                # Slots of the KV cache that were reserved, used or not

@dataclass
class FixedRun:
    "A run of the fixed requests."
    steps: int           # Calls of the model
    computed: int        # Tokens that went through it
    tokens_s: float      # Tokens of answers in a second
    first_s: float       # Seconds to the first token of an answer, on average
    longest_ms: float    # The longest step
    slots: int           # Of the KV cache, at most
    answer: str          # To the first question

def measure(
    steps: Iterable[Step],   # An engine at work on `fixed_requests`
) -> FixedRun:
    "Take the time of each step"
    answers: dict[str, list[int]] = {}
    began = now = time.perf_counter()
    seen, longest, first = [], 0., []
    for step in steps:
        before, now = now, time.perf_counter()
        longest = max(longest, now - before)
        first += [now - began for name, _ in step.made if name not in answers]
        for name, token in step.made: answers.setdefault(name, []).append(token)
        seen.append(step)
    n_made = sum(map(len, answers.values()))
    said = tokenizer.decode(answers.get(QUESTION, []))
    return FixedRun(len(seen), sum(o.computed for o in seen), n_made / (now - began),
                    sum(first) / len(first), longest * 1000, max(o.slots for o in seen), said)


# %%
def two_steps():
    yield Step([('a', 5), (QUESTION, 7)], computed=9, slots=16)
    yield Step([('a', 6)], computed=1, slots=16)

found = measure(two_steps())
found.steps, found.computed, found.slots

# %%
#| checks
test_eq(found.answer, tokenizer.decode([7]))
assert found.longest_ms > 0 and found.first_s > 0 and found.tokens_s > 0

# %% [markdown]
# ## The table
# Rows of earlier chapters are read from their pages, where they have been printed: they were measured when those pages were made, on the same machine if all were.

# %%
#| export
_TITLES = (f'{"":26}{"steps":>6}{"computed":>10}{"tokens/s":>10}{"first":>9}{"longest":>10}'
           f'{"slots":>7}')

def _row(chapter: str, run: FixedRun) -> str:
    return (f'{chapter:26}{run.steps:6}{run.computed:10,}{run.tokens_s:10,.0f}{run.first_s:7.2f} s'
            f'{run.longest_ms:7.0f} ms{run.slots:7,}')

def earlier_rows(
    number: int,     # Of the chapter that asks
    pages: Path,     # Where the chapters are
) -> list[str]:
    "The rows that the chapter before has printed"
    found = [*pages.glob(f'{number - 1:02}_*.ipynb')]
    if not found: return []
    cells = json.loads(found[0].read_text(encoding='utf-8'))['cells']
    texts = [''.join(o.get('text', '')) for c in cells for o in c.get('outputs', [])]
    table = next((o for o in reversed(texts) if o.startswith(_TITLES.rstrip()[:40])), '')
    return [o for o in table.splitlines() if re.match(r'\d+ ', o)]

def print_table(
    chapter: str,        # Its number, and what it has brought
    found: FixedRun,     # Its own row
    pages: Path = Path(),   # Where the chapters are
) -> None:
    "All rows so far, and the answer to the first question"
    number = int(chapter.split()[0])
    print('\n'.join([_TITLES, *earlier_rows(number, pages), _row(chapter, found)]))
    print(f'\n{QUESTION} {found.answer}')


# %%
#| volatile
print_table('1 an example', found)

# %%
#| checks
with tempfile.TemporaryDirectory() as place:
    printed = f'{_TITLES}\n{_row("1 first", found)}\n'
    page = dict(cells=[dict(outputs=[dict(text=[printed])]), dict(outputs=[])])
    (Path(place) / '01_model.ipynb').write_text(json.dumps(page))
    test_eq(earlier_rows(2, Path(place)), [_row('1 first', found)])
    test_eq(earlier_rows(3, Path(place)), [])

# %% [markdown]
# **What we left out.** Requests that come later than others, which [an experiment](76_batching.ipynb) measures.
