"""The core stands alone: it imports nothing of the rest, it fits a head, its chapters need no ring, and
copied into an empty folder it answers as `transformers` does."""
import ast, json, os, re, shutil, statistics, subprocess, sys

import nbformat, pytest

from nbrun import cfg, directives, notebooks, root
from reference import MAX_NEW, generate, make_checkpoint, prompts

core = root/cfg["lib_path"]/"core"
FILES = sorted(core.rglob("*.py"))
# rooms, and what stands beside them
OTHERS = "|".join(sorted(o.stem for o in core.parent.iterdir() if o.name[0] != "_" and o != core))
MOST_LINES = 8421        # of the whole core: 8,000, what families, guesses and adapters take; may only shrink
MOST_FUNCTIONS = 231     # that one answer runs through; may only shrink
# where its chapters begin
WEEKEND = [f"weekend.{o.stem}" for o in sorted((core.parent/"weekend").glob("*.py")) if o.stem[0] != "_"]
# what they draw and try with
BESIDE = ["tools.drawing", "testing.manual_stream", "testing.toy_engine", "testing.flashinfer_emulator",
          "testing.triton_emulator", *WEEKEND]

ALONE = ("""
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
""")   # noqa: E501

def test_it_imports_nothing_outside():
    "Lazy imports and names in strings, too"
    for file in FILES:
        tree, home = (ast.parse(file.read_text(encoding="utf-8")),
                      file.relative_to(core.parent.parent).with_suffix("").parts)
        for n in ast.walk(tree):
            if isinstance(n, ast.ImportFrom) and n.level:
                assert home[:-n.level][:2] == ("minisgl_lit", "core"), (file, n.lineno)
            elif isinstance(n, ast.ImportFrom):
                assert not (n.module or "").startswith(cfg["lib_path"]), (file, n.lineno)
            elif isinstance(n, ast.Import):
                assert not [a.name for a in n.names if a.name.startswith(cfg["lib_path"])], (file, n.lineno)
            elif isinstance(n, ast.Constant) and isinstance(n.value, str):
                assert not re.search(rf"{cfg['lib_path']}\.({OTHERS})\b", n.value), (file, n.lineno)

def test_it_fits_a_head():
    "Its lines, and the length of its functions, may only shrink"
    assert sum(len(o.read_text(encoding="utf-8").splitlines()) for o in FILES) <= MOST_LINES
    functions = [n.end_lineno - n.lineno + 1 for o in FILES
        for n in ast.walk(ast.parse(o.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    assert statistics.median(functions) <= 8 and max(functions) <= 60, (statistics.median(functions),
        max(functions))

def test_its_chapters_need_no_ring():
    bad = set()
    for nb in notebooks():
        if nb.parent.name != "core": continue
        code = "\n".join("".join(c["source"]) for c in json.loads(nb.read_text(encoding="utf-8"))["cells"]
                         if c["cell_type"] == "code")
        bad |= {f"{nb.stem}: {m}" for m in re.findall(rf"minisgl_lit\.((?:{OTHERS})\b(?:\.\w+)?)", code)
                if m not in BESIDE}
    assert not bad, sorted(bad)

def run_alone(house, program, *args, beside=(), given=""):
    """What a program prints that finds the core in this folder, and nothing else of the package but these
    modules"""
    shutil.copytree(core, house/"minisgl_lit"/"core", ignore=shutil.ignore_patterns("__pycache__"))
    (house/"minisgl_lit"/"__init__.py").touch()
    for name in beside:
        file = house/"minisgl_lit"/f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        shutil.copy(core.parent/file.relative_to(house/"minisgl_lit"), file)
    here = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"MPLBACKEND": "agg"}
    run = subprocess.run([sys.executable, "-c", program, *args], cwd=house, env=here, input=given,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout

@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Llama", marks=pytest.mark.long)])
def test_it_answers_alone(tmp_path, family):
    "Copied into an empty folder, beside nothing of the package"
    make_checkpoint(family, model := tmp_path/"model")
    told = json.loads(run_alone(tmp_path/"house", ALONE, str(model), json.dumps(asked := prompts()),
                                str(MAX_NEW)))
    right = [generate(model, o) for o in asked]
    assert told["told"] == [right, right] and told["others"] == []
    assert 100 < told["functions"] <= MOST_FUNCTIONS, told["functions"]

CHAPTER = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.loads(sys.stdin.read()): assert shell.run_cell(cell).success, cell
import minisgl_lit.core
assert minisgl_lit.core.__path__[0].startswith(sys.argv[1]), minisgl_lit.core.__path__
"""

@pytest.mark.long
@pytest.mark.parametrize("path", [o for o in notebooks() if o.parent.name == "core"], ids=lambda o: o.stem)
def test_its_chapters_run_alone(tmp_path, path):
    "The same folder, and beside it what draws and what stands in for an engine"
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"
             and not {"gpu", "slow", "eval"} & directives(c).keys()]
    run_alone(tmp_path/"house", CHAPTER, str(tmp_path), beside=BESIDE, given=json.dumps(cells))
