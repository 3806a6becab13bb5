"""A sampling parameter is one entry: with it come its check, its help, a keyword argument, a field of the
routes and hostile values. A processor of logits follows a parameter without a line in the engine."""
from dataclasses import dataclass, fields

import pytest
import torch

from minisgl_lit import LLM
from minisgl_lit.core.engine.sampler import logits_processors
from minisgl_lit.core.sampling_params import param, real, whole
from minisgl_lit.text.sampling_params import SamplingParams
from copied import Copy

def gaps(cls):
    "What is missing in the entries of sampling parameters, a sentence each"
    for f in fields(cls):
        if "rule" not in f.metadata:
            yield f"{f.name} has no entry: write it as `{f.name}: TYPE = param(DEFAULT, RULE, HELP)`"
            continue
        (ok, words), help, usual, more = (f.metadata[o] for o in ("rule", "help", "usual", "more"))
        if ok(object()): yield f"{f.name} has no rule: it takes anything"
        if not words: yield f"the rule of {f.name} has no words: what would be right?"
        if not (f.default is None or ok(f.default)): yield f"the default of {f.name} is not {words}"
        if not help or help.endswith("."): yield f"{f.name} needs a help of one line, without a full stop"
        if usual is not None and not ok(usual): yield f"{f.name} is usually {usual!r}, which is not {words}"
        if more == "processor" and f.name not in logits_processors: yield \
            f"{f.name} edits logits, and no processor has its name: logits_processors.register({f.name!r}, …)"

def test_every_entry_is_whole(): assert not (missing := [*gaps(SamplingParams)]), "\n".join(missing)

@dataclass(frozen=True, kw_only=True)
class HalfAdded(SamplingParams):
    bare: int = 0
    any: int = param(0, (lambda v: True, "anything"), "Whatever")
    silent: int = param(0, whole(0), "")
    far: int = param(-1, whole(0), "Too low")
    odd: float | None = param(None, real(0, 1), "Twice as much", usual=2.)
    alone: int = param(0, whole(0), "No one follows it", more="processor")

def test_what_is_half_added_is_told():
    said = dict(zip(("bare", "any", "silent", "far", "odd", "alone"), gaps(HalfAdded), strict=True))
    assert said == {
        "bare": "bare has no entry: write it as `bare: TYPE = param(DEFAULT, RULE, HELP)`",
        "any": "any has no rule: it takes anything",
        "silent": "silent needs a help of one line, without a full stop",
        "far": "the default of far is not a whole number of at least 0",
        "odd": "odd is usually 2.0, which is not a finite number from 0 to 1",
        "alone": "alone edits logits, and no processor has its name: logits_processors.register('alone', …)"}
    with pytest.raises(TypeError, match="missing 2 required positional arguments: 'rule' and 'help'"):
        param(0)

NEW = ("    zz_test: float = param(0., real(0, 1), 'Leave out what is below so much of the largest, "
       "squared')\n")
CHAPTER, BEFORE = "core/01_sampling_params", "    max_tokens: int | None = param("

PROGRAM = ('''
import inspect, json, sys
from typing import get_type_hints
import httpx
from minisgl_lit import LLM, SamplingParams, serve
from minisgl_lit.core.sampling_params import RequestError
from minisgl_lit.keywords import ChatFields, SamplingFields

def refusal(call, *args, **given):
    try: call(*args, **given)
    except RequestError as e: return str(e)

def posted(server, path, **body):
    r = httpx.post(server.url + path, json=body, timeout=60, trust_env=False)
    return [r.status_code, r.json().get("error", {}).get("message")]

told = {"check": refusal(SamplingParams, zz_test=2), "help": [o for o in LLM.chat.__doc__.splitlines() if "zz_test" in o]}
told["types"] = [get_type_hints(o).get("zz_test") is float for o in (SamplingFields, ChatFields)]
with LLM(device="cpu", num_pages=64) as llm:
    told["LLM"] = [len(llm.generate(["A page"], zz_test=.5, max_tokens=2)[0].token_ids), refusal(llm.generate, ["A page"], zz_test=2)]
    told["shown"] = "zz_test" in inspect.signature(llm.generate).parameters
with serve(port=0, device="cpu", num_pages=64, log_interval=0) as server:
    for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})):
        told[path] = [posted(server, path, **body, zz_test=o) for o in (.5, 2, "x")]
    told["/generate"] = [posted(server, "/generate", text="x", sampling_params={"max_tokens": 1, "zz_test": o}) for o in (.5, 2, "x")]
    schemas = httpx.get(server.url + "/openapi.json", trust_env=False).json()["components"]["schemas"]
    told["openapi"] = [schemas[o]["properties"]["zz_test"]["description"] for o in ("ChatRequest", "CompletionRequest", "NativeSamplingRequest")]
sys.path.insert(0, "tests")
import hostile
told["hostile"] = "zz_test" in hostile.NUMBERS
print(json.dumps(told))
''')   # noqa: E501

@pytest.mark.long   # test_one_place.py adds one, too, and looks at less of it
def test_a_new_parameter_is_one_entry(tmp_path):
    "In a copy of the project a line is added to one cell, and the chapter is exported"
    copy = Copy(tmp_path)
    copy.edit(CHAPTER, BEFORE, NEW + BEFORE)
    copy.export()
    assert copy.touched() == {f"nbs/{CHAPTER}.ipynb"}
    assert "    zz_test: float\n" in (tmp_path/"minisgl_lit/_keywords.py").read_text()
    told, said = copy.run(PROGRAM), "zz_test must be a finite number from 0 to 1, not 2"
    help = "Leave out what is below so much of the largest, squared"
    assert (told["check"], told["help"], told["types"]) == (said, [f"    zz_test = 0.0: {help}"],
        [True, True])
    assert (told["LLM"], told["shown"]) == ([2, said], True)
    for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
        where = "sampling_params." if path == "/generate" else ""
        (good, _), wrong, text = told[path]
        assert good == 200 and wrong == [400, f"{said}.0"], told[path]
        assert text == [400, f"{where}zz_test must be a number, not 'x'"], told[path]
    assert told["openapi"] == [help] * 3 and told["hostile"]

# ---- a processor of logits, through the core's engine

@dataclass(frozen=True, kw_only=True)
class MyParams(SamplingParams):
    n_sigma: float = param(0., real(0, 99), "Leave out what is so many standard deviations below the largest",
                           more="processor")
    no_repeat: bool = param(False, (lambda v: isinstance(v, bool), "True or False"), "No token comes again",
                            more="processor")

def n_sigma(logits, values, seen):
    assert logits.dtype == torch.float32 and logits.shape[0] == len(values) == len(seen[0])
    least = logits.amax(-1) - torch.tensor(values) * logits.std(-1)
    return logits.masked_fill(logits < least[:, None], -torch.inf)

@pytest.fixture
def processors(monkeypatch):
    calls = []
    def counted(logits, values, seen):
        calls.append(values)
        return n_sigma(logits, values, seen)
    monkeypatch.setitem(logits_processors, "n_sigma", counted)
    monkeypatch.setitem(logits_processors, "no_repeat",
                        lambda logits, values, seen: logits.scatter(1, seen[0], -torch.inf))
    return calls

def test_a_processor_edits_logits(processors):
    """A hot request whose processor leaves one token is greedy; those beside it are as they were; one that
    reads tokens finds the prompt, too"""
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    hot = dict(temperature=9., seed=3, max_tokens=8, ignore_eos=True)
    with LLM(device="cpu", num_pages=64) as llm:
        def answers(*params): return [o.token_ids for o in llm.generate(prompts, [*params])]
        plain = answers(*[SamplingParams(**hot)] * 3)
        greedy = answers(*[SamplingParams(**hot | dict(temperature=0))] * 3)
        assert not processors, "a processor was called that no request asks for"
        mixed = answers(MyParams(**hot, n_sigma=1e-6), SamplingParams(**hot), MyParams(**hot, n_sigma=1e-6))
        assert mixed == [greedy[0], plain[1], greedy[2]] != plain
        assert processors and {len(o) for o in processors} <= {1, 2}
        processors.clear()
        assert answers(*[MyParams(**hot)] * 3) == plain and not processors   # as usual: not asked for
        again = answers(*[MyParams(**hot | dict(max_tokens=30), no_repeat=True)] * 3)
        assert all(len({*prompt, *answer}) == len(prompt) + 30 for prompt, answer in zip(prompts, again))
