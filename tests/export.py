"""Notebooks to the package: clean, export, fold patches into their classes, and write keyword arguments as
types.

    python tests/export.py                    the project
    python tests/export.py FOLDER             a copy of it
    python tests/export.py . nbs/11_*.ipynb   some chapters
"""
import json, os, re, subprocess, sys
from pathlib import Path
from tangle import TangleError, tangle_file

# the cells of several chapters go into one module, one chapter after the other; it begins as that begins
# which has its name
JOIN = ("""
import sys
from pathlib import Path
from textwrap import fill
from nbdev.doclinks import _build_modidx
from nbdev.export import nb_export
from nbdev.maker import ModuleMaker
module, named, first, *others = sys.argv[1:]
module = Path(module)
def parts(): return module.read_text(encoding="utf-8").partition("\\n\\n# %% auto")
nb_export(named)
head = parts()[0]
nb_export(first)
for o in others: nb_export(o, mod_maker=lambda **how: ModuleMaker(**how | dict(is_new=False)))
text = head + "".join(parts()[1:])
names = next(o for o in text.splitlines() if o.startswith("__all__"))
module.write_text(text.replace(names, fill(names, 120, subsequent_indent=" " * 11, break_long_words=False)), encoding="utf-8")
_build_modidx()
""")   # noqa: E501

# some chapters: what nbdev-clean and nbdev-export do, with one start and one index for all
SOME = """
import sys
from nbdev.clean import nbdev_clean
from nbdev.config import add_init, get_config
from nbdev.doclinks import _build_modidx
from nbdev.export import nb_export
for o in sys.argv[1:]:
    nbdev_clean(o)
    nb_export(o)
add_init(get_config().lib_path)
_build_modidx()
"""

def run(program, cwd):
    "A program of the environment that runs this"
    subprocess.run([Path(sys.executable).parent/program], cwd=cwd, check=True)

def families(root):
    "{module: the notebooks that export into it, in order}, of those with several"
    homes = {}
    for nb in sorted((root/"nbs").rglob("*.ipynb")):
        code = "\n".join("".join(c["source"])
                         for c in json.loads(nb.read_text(encoding="utf-8"))["cells"][:3])
        if m := re.search(r"^#\|\s*default_exp\s+(\S+)", code, re.M): homes.setdefault(m[1], []).append(nb)
    return {module: o for module, o in homes.items() if len(o) > 1}

def export(root, notebooks=()):
    "Write the modules of these notebooks, or of all"
    joined = {module: o for module, o in families(root).items() if not notebooks or {*o} & {*notebooks}}
    if notebooks: subprocess.run([sys.executable, "-c", SOME, *map(str, notebooks)], cwd=root, check=True)
    else:
        for program in ("nbdev-clean", "nbdev-export"): run(program, cwd=root)
    for module, chapters in joined.items():
        named = next(o for o in chapters if module.endswith(o.stem.lstrip("0123456789_")))
        file = root/"minisgl_lit"/(module.replace(".", "/") + ".py")
        subprocess.run([sys.executable, "-c", JOIN, *map(str, (file, named, *chapters))], cwd=root,
                       check=True)
    failed = []
    for path in sorted((root/"minisgl_lit").rglob("*.py")):
        try: tangle_file(path)
        except TangleError as e: failed.append(str(e))
    if failed: raise SystemExit("\n".join(failed))
    here = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, Path(__file__).with_name("typed_names.py"), root], cwd=root, env=here,
                   check=True)

if __name__ == "__main__":
    root, *notebooks = sys.argv[1:] or [Path(__file__).parents[1]]
    try: export(Path(root).resolve(), [Path(o).resolve() for o in notebooks])
    except subprocess.CalledProcessError as e: raise SystemExit(e.returncode)
