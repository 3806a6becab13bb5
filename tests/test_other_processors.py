"""The chapters as machines without AMX, with AVX2 only or with neither would run them, with other numbers of
threads, and without a compiler: no stored output that is compared may depend on that. All chapters in `make
test-long`, and those that would show it first in `make test`."""
import os, platform, subprocess, sys
from pathlib import Path

import pytest
from nbrun import run
from minisgl_lit.kernels.compiler import LEVELS, find_compiler, flags, levels_here, run_compiler
from ship_kernels import sources
from test_products import no_compiler

root = Path(__file__).parents[1]
LOWER = [o.name for o in levels_here()[1:]]    # what this processor can be taken for
THREADS = [dict(OMP_NUM_THREADS=n) for n in "128"]
MASKS = [dict(CPU_LEVEL=o) for o in LOWER] + THREADS + [dict(CC="/bin/false")]
FIRST = "kernels/compiler"    # it shows levels

def fails(mask):
    "The chapters that fail on such a machine, with what they say"
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2",
                           "tests/test_notebooks.py"], cwd=root,
                          env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | mask,
                          capture_output=True, text=True)
    return ("" if done.returncode == 0 and " passed" in done.stdout
            else done.stdout[-3000:] + done.stderr[-500:])

def named(mask): return "=".join(*mask.items())

needs_kernels = pytest.mark.skipif(no_compiler, reason="needs a C compiler")

@needs_kernels
@pytest.mark.skipif(not LOWER, reason="needs a processor of which lesser ones are known")
def test_levels_are_shown_by_any_machine():
    assert run(root/"nbs"/f"{FIRST}.ipynb", env=dict(CPU_LEVEL=LOWER[-1]))[:2] == ("", [])

@needs_kernels
@pytest.mark.skipif(not levels_here(), reason="needs a processor of which levels are known")
def test_the_best_processor_can_be_compiled_for(tmp_path):
    "What stands in a text for it alone: no test here may run it, and users would be without kernels"
    best = LEVELS[platform.machine()][0]
    build, _ = flags(platform.system(), platform.machine(), *best.target.split())
    paths = []
    for text in sources():
        paths.append(tmp_path/f"{len(paths)}.c")
        paths[-1].write_text(text)
    run_compiler([*find_compiler(), *build, "-fsyntax-only", *map(str, paths)])

@needs_kernels
@pytest.mark.long
@pytest.mark.parametrize("mask", MASKS, ids=named)
def test_all_chapters_on_another_machine(mask):
    assert not (told := fails(mask)), told

def test_a_mask_hides_what_is_above_it(monkeypatch):
    "Also on a processor that has more than this one"
    names = [o.name for o in LEVELS.get(platform.machine(), [])]
    every = frozenset(f for o in LEVELS.get(platform.machine(), []) for f in o.features.split())
    monkeypatch.setattr("minisgl_lit.kernels.compiler.processor_features", lambda: every)
    assert [o.name for o in levels_here()] == names
    for i, name in enumerate(names):
        monkeypatch.setenv("CPU_LEVEL", name)
        assert [o.name for o in levels_here()] == names[i:]
    monkeypatch.setenv("CPU_LEVEL", "fast")
    with pytest.raises(RuntimeError, match="CPU_LEVEL=fast is no level of this machine"): levels_here()
