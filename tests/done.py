"""A chapter is done: from text to notebook and package, run, with its outputs stored. `make done` calls it.

    python tests/done.py core/10_kv_cache.table

What `make check` would refuse of this chapter is refused here, in the same words. A chapter that is refused,
or of which a cell fails, leaves package and notebook as they were; a text that was edited stays, to be
mended. (A notebook that was edited itself, as in Jupyter, is left alone.)
"""
import os, re, subprocess, sys, tempfile
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import nbrun
from nbrun import cfg, root

NOT_NOW = " or ".join([   # needs stored outputs or all chapters, or is of no chapter
    "the_export", "are_clean", "drawn", "of_the_weekend", "sliders", "readme", "settings_agree", "public",
    "old_names", "named_parameter", "is_light", "stands_on_little"])

def program(*words, **how): return subprocess.Popen([str(o) for o in words], cwd=root, **how)

@contextmanager
def all_or_nothing(files):
    "Puts these back as they were if what is done fails, and removes what was not there"
    def read(): return {p: p.read_bytes() for p in files()}
    before = read()
    try: yield
    except BaseException:
        for p, data in read().items():
            if p not in before: p.unlink()
            elif data != before[p]: p.write_bytes(before[p])
        for p in before.keys() - {*files()}: p.write_bytes(before[p])
        raise

def to_notebook(text, notebook):
    from jupytext.cli import jupytext
    kernel = '{"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}'
    jupytext(["--quiet", "--update", "--update-metadata", kernel, "--to", "ipynb", str(text), "-o",
              str(notebook)])

def checks(stem, told):
    "What `make check` says of a chapter, into a file of JUnit's kind, while the chapter runs"
    asked = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-W", "ignore", "-k",
             f"not ({NOT_NOW})", f"--junitxml={told}"]
    tests = [root/"tests"/o for o in ("test_project.py", "test_chapters.py")]
    env = os.environ | {"PYTHONPATH": str(root), "TST_CHAPTER": stem}
    return program(sys.executable, "-m", "pytest", *asked, *tests, env=env, stdout=subprocess.PIPE,
                   stderr=subprocess.STDOUT, text=True)

def ruff():
    "What it says of the package"
    words = [Path(sys.executable).with_name("ruff"), "check", "--quiet", "--output-format", "concise",
             cfg["lib_path"]]
    return program(*words, stdout=subprocess.PIPE, text=True).communicate()[0].splitlines()

def refusals(told):
    "The sentences of the tests that have failed"
    said = [o.get("message") for o in ElementTree.parse(told).iter() if o.tag in ("failure", "error")]
    return [re.sub(r"^(AssertionError|Failed): |\nassert (.|\n)*", "", o) for o in said]

def done(stem):
    notebook = root/"nbs"/f"{stem}.ipynb"
    text = notebook.with_suffix(".py")
    def files():
        own = [notebook] * (text.exists() and notebook.exists())
        return [*own, *(p for p in (root/cfg["lib_path"]).rglob("*.py"))]
    with all_or_nothing(files):
        if text.exists(): to_notebook(text, notebook)
        if not notebook.exists():
            raise SystemExit(f"there is neither {text.relative_to(root)} nor {notebook.relative_to(root)}")
        if program(sys.executable, root/"tests"/"export.py", root, notebook).wait(): raise SystemExit(1)
        nbrun.preload_little()
        with tempfile.TemporaryDirectory() as folder:
            checking = checks(stem, told := Path(folder)/"told.xml")
            def refused():
                said, lint = checking.communicate()[0], ruff()
                if checking.returncode: lint = [*refusals(told), *lint] if told.exists() else [said]
                if lint: raise SystemExit("make check would refuse this chapter:\n" + "\n".join(lint))
            try:
                err, stale, seconds = nbrun.run(notebook, os.environ.get("TST_FLAGS", "").split(), save=True,
                                                before_saving=refused)
            finally:
                if checking.poll() is None:
                    checking.kill()
                    checking.wait()
        if err: raise SystemExit(err)
    text.unlink(missing_ok=True)
    print(f"{seconds:6.1f}s  {f'updated {len(stale)}' if stale else 'ok'}  {notebook.name}")
    if stem == "index": program(sys.executable, root/"docs"/"readme.py").wait()

if __name__ == "__main__": done(sys.argv[1].removeprefix("nbs/").removesuffix(".ipynb"))
