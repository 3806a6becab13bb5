# needs: --no-deps sglang>=0.5.20 aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl
# idna requests urllib3 certifi charset-normalizer numpy tqdm pybase64 msgspec orjson typing_extensions
# packaging
"""SGLang's front end language, and the client of its benchmark, from its own wheel. Its server half is a
stub: whatever of it they import."""
import asyncio, importlib.abc, importlib.machinery, inspect, sys, types
from pathlib import Path
from unittest.mock import MagicMock

url, model = sys.argv[1:3]

class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Modules in which every name is there and does nothing"
    heavy = ('sglang.srt', 'sglang.benchmark.datasets', 'sglang.benchmark.goodput', 'transformers', 'torch',
             'IPython', 'pydantic')
    def find_spec(self, name, path=None, target=None):
        if any(name == o or name.startswith(o + '.') for o in self.heavy):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__all__, module.__spec__ = [], [], spec
        return module
    def exec_module(self, module): pass

sys.meta_path.insert(0, Stubs())
package = types.ModuleType('sglang')   # without its `__init__`, which imports the server
package.__path__ = [str(Path(importlib.machinery.PathFinder.find_spec('sglang').origin).parent)]
sys.modules['sglang'] = package

from sglang.lang.api import function, gen, select, set_default_backend   # noqa: E402
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint   # noqa: E402
from sglang.lang.choices import greedy_token_selection, token_length_normalized   # noqa: E402

backend = RuntimeEndpoint(url)
set_default_backend(backend)
assert backend.get_model_name() == 'embedded' and backend.get_server_info()['page_size']
backend.flush_cache()

# ---- one answer, a stream of it, and what is known about it
@function
def tell(s, what, **wishes):
    s += what
    s += gen('answer', temperature=0, **wishes)

whole = tell.run(what='The page', max_tokens=30)
streamed = tell.run(what='The page', max_tokens=30, stream=True)
pieces = list(streamed.text_iter('answer'))
assert ''.join(pieces) == whole['answer'], (pieces, whole['answer'])
meta = whole.get_meta_info('answer')
assert (meta['completion_tokens'] <= 30 and meta['prompt_tokens'] > 0
        and meta['finish_reason']['type'] in ('length', 'stop')), meta

short = tell.run(what='The page', max_tokens=30, stop=' ', ignore_eos=True)
assert (' ' not in short['answer']
        and short.get_meta_info('answer')['finish_reason']
        == {'type': 'stop', 'matched': ' '}), short.get_meta_info('answer')
scored = tell.run(what='The page', max_tokens=4, return_logprob=True, top_logprobs_num=2,
                  return_text_in_logprobs=True, logprob_start_len=0).get_meta_info('answer')
assert ([len(o) for o in scored['output_top_logprobs']] == [2]*len(scored['output_token_logprobs'])
        and scored['input_token_logprobs'][0][0] is None)
assert (''.join(text for _, _, text in scored['output_token_logprobs'])
        and tell.run(what='A', max_tokens=9, regex='[a-c]{3}')['answer']
        in {a+b+c for a in 'abc' for b in 'abc' for c in 'abc'})
assert ([len(o['answer']) > 0 for o in tell.run_batch([dict(what=o) for o in ('The tree', 'A lock', 'Hello')],
    progress_bar=False)] == [True]*3)

@function
def count(s):
    s += 'Count: ' + gen('n', dtype=int, max_tokens=5, temperature=0)
assert int(count.run()['n']) is not None

# ---- a choice is one of logprobs of prompts
@function
def choose(s, method):
    s += 'The page table of a'
    s += select('which', [' request', ' zebra', ' qqq'], choices_method=method)

for method in (token_length_normalized, greedy_token_selection):
    assert choose.run(method=method)['which'] in (' request', ' zebra', ' qqq')

# ---- the benchmark's client counts tokens as the server does
from sglang.benchmark import serving   # noqa: E402
serving.args = types.SimpleNamespace(temperature=0., disable_ignore_eos=False, top_p=1., disable_stream=False,
                                     return_logprob=False, return_routed_experts=False,
                                     logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
                                     cache_report=True, header=None, disable_tqdm=True)
fields = inspect.signature(serving.RequestFuncInput).parameters
known = dict(prompt='The page ' * 15, api_url=url + '/generate', prompt_len=10, output_len=24, model=model,
             lora_name='', image_data=None, extra_request_body={})
def bench(**more):
    given = {k: v for k, v in (known | more).items() if k in fields}
    return asyncio.run(serving.async_request_sglang_generate(serving.RequestFuncInput(**given)))
for _ in range(2):
    out = bench()
    assert (out.success and out.output_len == 24 and out.prompt_len > 30 and out.generated_text
            and out.ttft > 0), out
    assert len(out.itl) == 23 or sum(out.itl) > 0, out
assert out.cached_tokens > 0, out
print('ok', out.prompt_len, out.output_len, out.cached_tokens)
