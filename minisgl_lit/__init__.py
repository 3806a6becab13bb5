"""minisgl_lit: a book that runs. Names are imported when they are first used (PEP 562)."""
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

# how torch's threads wait, which it asks when it is loaded: shortly awake, then asleep (chapter `process`)
threads_wait = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100000"}
if "torch" not in sys.modules and not threads_wait.keys() & os.environ.keys(): os.environ.update(threads_wait)


@contextmanager
def no_garbage() -> Iterator[None]:
    "For imports, which make objects by the million and drop none: nobody looks for garbage meanwhile"
    was_enabled = gc.isenabled()
    gc.disable()
    try: yield
    finally:
        if was_enabled: gc.enable()


if TYPE_CHECKING:   # for editors and type checkers, which do not run `__getattr__`
    from minisgl_lit.async_llm import AsyncLLM as AsyncLLM
    from minisgl_lit.text.sampling_params import SamplingParams as SamplingParams
    from minisgl_lit.llm import LLM as LLM
    from minisgl_lit.server.serve import serve as serve
    __version__: str

_lazy = {"LLM": "llm", "AsyncLLM": "async_llm", "SamplingParams": "text.sampling_params", "serve": "server.serve"}   # public name -> module
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "serve", "__version__"]


def __getattr__(name):
    from importlib import metadata
    if name in _lazy:
        with no_garbage(): value = getattr(import_module(f"{__name__}.{_lazy[name]}"), name)
    elif name == "__version__":
        try: value = metadata.version(__name__)
        except metadata.PackageNotFoundError: value = "0+source"   # run from the source tree, not installed
    else: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value   # next time Python finds it at once
    return value


_moved_to = {   # until 0.4: rooms, and the old names of their modules, with the new one where that differs
    "core": "device",
    "core.kv_cache": "kv_cache.pool kv_cache.table kv_cache.eviction kv_cache.radix kv_cache.manager",
    "core.attention": "core.library attention.torch attention.flashinfer",
    "core.scheduler": "scheduler.policy scheduler.prefill scheduler.decode scheduler.batch scheduler.scheduler scheduler.lifecycle=scheduler "
                      "scheduler.control=scheduler core.scheduler.lifecycle=scheduler core.scheduler.control=scheduler",
    "core.models": "models.operations models.decoder models.moe models.weights models.checkpoint models.layers=operations",
    "core.engine": "engine.memory engine.sampler engine.pooling=engine engine.engine engine.cuda_graph core.engine.pooling=engine",
    "kernels": "attention.cpu=cpu_attention attention.cpu_kernels=attention_c attention.choice=attention_choice engine.recorded_steps "
               "engine.kernel_trials kernels.vector_math=compiler",
    "formats": "models.gguf models.gguf_text models.hub models.packed_files models.quantization models.dummy_weights "
               "models.weight_update models.embedded=hub",
    "distributed": "engine.tensor_parallel kv_cache.events=kv_events kv_cache.page_file kv_cache.tier kv_cache.handoff",
    "text": "engine.grammar engine.json_schema scheduler.thinking",
    "rules": "scheduler.fairness",
    "": "engine.worker=assembly engine.second_tier",
    "loop": "server.messages server.weight_updates server.live_view server.engine_core",
    "server": "cluster",
    "testing": "kernels.flashinfer_reference=flashinfer_emulator kernels.triton_reference=triton_emulator",
}
_moved = {old: f"{room}.{new or old.rpartition('.')[2]}".removeprefix(".")
          for room, names in _moved_to.items() for old, _, new in (o.partition("=") for o in names.split())}
_rooms = {old.rpartition(".")[0] for old in _moved} - {""}   # folders that are no more


class _Moved(MetaPathFinder, Loader):
    "Finds modules by their old names: one module, two names."
    def find_spec(self, name, path=None, target=None):
        old = name.removeprefix(f"{__name__}.")
        if old in _moved: return ModuleSpec(name, self)
        gone = old in _rooms and not os.path.isdir(os.path.join(os.path.dirname(__file__), *old.split(".")))
        return ModuleSpec(name, self, is_package=True) if gone else None

    def create_module(self, spec): return None

    def exec_module(self, module):
        old = module.__name__.removeprefix(f"{__name__}.")
        if old in _moved: sys.modules[module.__name__] = import_module(f"{__name__}.{_moved[old]}")
        if old.startswith('models.'): import_module(f"{__name__}.formats.checkpoints")   # what these knew, it registers


sys.meta_path.insert(0, _Moved())


def __dir__(): return sorted({*globals(), *__all__})
