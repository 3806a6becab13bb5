"""Notebooks to the package: clean, export, fold patches into their classes, and write keyword arguments as
types.

    python tests/export.py                    the project
    python tests/export.py FOLDER             a copy of it
    python tests/export.py . nbs/11_*.ipynb   some chapters
"""
import json, os, re, subprocess, sys
from pathlib import Path
from tangle import TangleError, tangle_file

# what nbdev-clean and nbdev-export do, with one start and one index of names for all. The cells of several
# chapters go into one module, one chapter after the other; it begins as that begins which has its name
NBDEV = """
import json, sys
from functools import cache
from pathlib import Path
from textwrap import fill
import nbdev.config
nbdev.config._load_toml = cache(nbdev.config._load_toml)   # which it reads a thousand times
from nbdev.clean import nbdev_clean
from nbdev.config import add_init, get_config
from nbdev.doclinks import _build_modidx, nbglob
from nbdev.export import nb_export
from nbdev.maker import ModuleMaker

def join(module, named, first, *others):
    def parts(): return module.read_text(encoding="utf-8").partition("\\n\\n# %% auto")
    nb_export(named)
    head = parts()[0]
    nb_export(first)
    for o in others: nb_export(o, mod_maker=lambda **how: ModuleMaker(**how | dict(is_new=False)))
    text = head + "".join(parts()[1:])
    names = next(o for o in text.splitlines() if o.startswith("__all__"))
    filled = fill(names, 120, subsequent_indent=" " * 11, break_long_words=False)
    module.write_text(text.replace(names, filled), encoding="utf-8")

chosen, joined = json.load(sys.stdin)
for o in chosen or [None]: nbdev_clean(o)
for o in chosen or nbglob(as_path=True).sorted("name"): nb_export(o)
for module, *chapters in joined: join(Path(module), *chapters)
add_init(get_config().lib_path)
_build_modidx()
"""

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
    def named(module, chapters):
        return next(o for o in chapters if module.endswith(o.stem.lstrip("0123456789_")))
    parts = [(root/"minisgl_lit"/(module.replace(".", "/") + ".py"), named(module, chapters), *chapters)
             for module, chapters in joined.items()]
    orders = json.dumps([[*notebooks], parts], default=str)
    subprocess.run([sys.executable, "-c", NBDEV], cwd=root, check=True, input=orders, text=True)
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
