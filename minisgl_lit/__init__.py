"""minisgl_lit: a book that runs. Names are imported when they are first used (PEP 562)."""
import os
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

# how torch's threads wait, which it asks when it is loaded: shortly awake, then asleep (chapter 02a)
threads_wait = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100000"}
if "torch" not in sys.modules and not threads_wait.keys() & os.environ.keys(): os.environ.update(threads_wait)

if TYPE_CHECKING:   # for editors and type checkers, which do not run `__getattr__`
    from minisgl_lit.async_llm import AsyncLLM as AsyncLLM
    from minisgl_lit.core.sampling_params import SamplingParams as SamplingParams
    from minisgl_lit.llm import LLM as LLM
    from minisgl_lit.server.serve import serve as serve
    __version__: str

_lazy = {"LLM": "llm", "AsyncLLM": "async_llm", "SamplingParams": "core.sampling_params", "serve": "server.serve"}   # public name -> module
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "serve", "__version__"]


def __getattr__(name):
    from importlib import metadata
    if name in _lazy: value = getattr(import_module(f"{__name__}.{_lazy[name]}"), name)
    elif name == "__version__":
        try: value = metadata.version(__name__)
        except metadata.PackageNotFoundError: value = "0+source"   # run from the source tree, not installed
    else: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value   # next time Python finds it at once
    return value


_moved = {"kernels.flashinfer_reference": "testing.flashinfer_emulator", "kernels.triton_reference": "testing.triton_emulator",
          "models.embedded": "models.hub", "models.embedded_tasks": "tools.embedded_tasks",
          "scheduler.thinking": "text.thinking", "models.layers": "models.operations"}   # old module -> new one, until 0.4


class _Moved(MetaPathFinder, Loader):
    "Finds modules by their old names: one module, two names."
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.removeprefix(f"{__name__}.") in _moved else None

    def create_module(self, spec): return None

    def exec_module(self, module):
        sys.modules[module.__name__] = import_module(f"{__name__}.{_moved[module.__name__.removeprefix(f'{__name__}.')]}")


sys.meta_path.insert(0, _Moved())


def __dir__(): return sorted({*globals(), *__all__})
