"""Notebooks to the package: clean, export, fold patches into their classes, and write keyword arguments as types.

    python tests/export.py                    the project
    python tests/export.py FOLDER             a copy of it
    python tests/export.py . nbs/11_*.ipynb   some chapters
"""
import os, subprocess, sys
from pathlib import Path
from tangle import TangleError, tangle_file

def run(program, *args, cwd):
    "A program of the environment that runs this"
    subprocess.run([Path(sys.executable).parent/program, *map(str, args)], cwd=cwd, check=True)

def export(root, notebooks=()):
    "Write the modules of these notebooks, or of all"
    for nb in notebooks or [None]:
        run("nbdev-clean", *(["--fname", nb] if nb else []), cwd=root)
        run("nbdev-export", *(["--path", nb] if nb else []), cwd=root)
    failed = []
    for path in sorted((root/"minisgl_lit").rglob("*.py")):
        try: tangle_file(path)
        except TangleError as e: failed.append(str(e))
    if failed: raise SystemExit("\n".join(failed))
    here = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, Path(__file__).with_name("typed_names.py"), root], cwd=root, env=here, check=True)

if __name__ == "__main__":
    root, *notebooks = sys.argv[1:] or [Path(__file__).parents[1]]
    try: export(Path(root).resolve(), [Path(o).resolve() for o in notebooks])
    except subprocess.CalledProcessError as e: raise SystemExit(e.returncode)
