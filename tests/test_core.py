"""The core stands alone: it imports nothing of the rest, it fits a head, its chapters need no ring, and copied into an empty folder it answers as `transformers` does."""
import ast, json, os, re, shutil, statistics, subprocess, sys

import pytest

from nbrun import cfg, notebooks, root
from reference import MAX_NEW, generate, make_checkpoint, prompts

core = root/cfg["lib_path"]/"core"
FILES = sorted(core.rglob("*.py"))
OTHERS = "|".join(sorted(o.stem for o in core.parent.iterdir() if o.name[0] != "_" and o != core))   # rooms, and what stands beside them
MOST_LINES = 8000
MOST_FUNCTIONS = 230     # that one answer runs through; may only shrink
BESIDE = "tools.drawing", "testing.manual_stream", "testing.toy_engine", "testing.flashinfer_emulator", "testing.triton_emulator"   # what its chapters draw and try with

ALONE = """
import json, sys
from minisgl_lit.core.llm import LLM
from minisgl_lit.core.sampling_params import SamplingParams

folder, prompts, max_new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm, params = LLM(folder, device='cpu'), SamplingParams(max_tokens=max_new, temperature=0)
def answer(prompts): return [o.token_ids for o in llm.generate(prompts, params)]
told = answer(prompts), answer(prompts)     # again, from the cache
ran = set()
def look(frame, event, arg):
    name = frame.f_code.co_filename
    if event == 'call' and 'minisgl_lit' in name and frame.f_code.co_name[0] != '<': ran.add((name, frame.f_code.co_qualname))
sys.setprofile(look)
answer(prompts[:1])
sys.setprofile(None)
others = sorted(m for m in sys.modules if m.startswith('minisgl_lit') and not m.startswith('minisgl_lit.core') and m != 'minisgl_lit')
print(json.dumps(dict(told=told, functions=len(ran), others=others)))
"""

def test_it_imports_nothing_outside():
    "Lazy imports and names in strings, too"
    for file in FILES:
        tree, home = ast.parse(file.read_text(encoding="utf-8")), file.relative_to(core.parent.parent).with_suffix("").parts
        for n in ast.walk(tree):
            if isinstance(n, ast.ImportFrom) and n.level: assert home[:-n.level][:2] == ("minisgl_lit", "core"), (file, n.lineno)
            elif isinstance(n, ast.ImportFrom): assert not (n.module or "").startswith(cfg["lib_path"]), (file, n.lineno)
            elif isinstance(n, ast.Import): assert not [a.name for a in n.names if a.name.startswith(cfg["lib_path"])], (file, n.lineno)
            elif isinstance(n, ast.Constant) and isinstance(n.value, str): assert not re.search(rf"{cfg['lib_path']}\.({OTHERS})\b", n.value), (file, n.lineno)

def test_it_fits_a_head():
    "Its lines, and the length of its functions, may only shrink"
    assert sum(len(o.read_text(encoding="utf-8").splitlines()) for o in FILES) <= MOST_LINES
    functions = [n.end_lineno - n.lineno + 1 for o in FILES for n in ast.walk(ast.parse(o.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    assert statistics.median(functions) <= 8 and max(functions) <= 60, (statistics.median(functions), max(functions))

def test_its_chapters_need_no_ring():
    bad = set()
    for nb in notebooks():
        if nb.parent.name != "core": continue
        code = "\n".join("".join(c["source"]) for c in json.loads(nb.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code")
        bad |= {f"{nb.stem}: {m}" for m in re.findall(rf"minisgl_lit\.((?:{OTHERS})\b(?:\.\w+)?)", code) if m not in BESIDE}
    assert not bad, sorted(bad)

@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_it_answers_alone(tmp_path, family):
    "Copied into an empty folder, beside nothing of the package"
    house, model, asked = tmp_path/"house", tmp_path/"model", prompts()
    shutil.copytree(core, house/"minisgl_lit"/"core", ignore=shutil.ignore_patterns("__pycache__"))
    (house/"minisgl_lit"/"__init__.py").touch()
    make_checkpoint(family, model)
    here = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", ALONE, str(model), json.dumps(asked), str(MAX_NEW)], cwd=house, env=here, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    right = [generate(model, o) for o in asked]
    assert told["told"] == [right, right] and told["others"] == []
    assert 100 < told["functions"] <= MOST_FUNCTIONS, told["functions"]
