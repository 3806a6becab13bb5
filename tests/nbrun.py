"""Run notebooks in fresh Jupyter kernels, compare their outputs with the stored ones, and store them.

    python tests/nbrun.py                     run all notebooks; fail on an error or an output that is no
    longer true
    python tests/nbrun.py --save nbs/60_*     the same, and write the new outputs into the notebooks

`#| volatile` outputs are compared without their numbers, `#| machine` outputs not at all; `#| slow` and `#|
gpu` cells run only if `--flags` names them. What a cell writes to stderr (progress bars, warnings) is not an
output.
"""
import argparse, ast, atexit, gc, json, os, re, sys, time
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from multiprocessing import forkserver, get_context, parent_process
from pathlib import Path
from queue import Empty
from threading import Lock, Thread
from unittest.mock import patch

import nbformat
import warm
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

root = Path(__file__).resolve().parents[1]
_ini = ConfigParser(); _ini.read(root/"settings.ini", encoding="utf-8")
cfg = _ini["DEFAULT"]
_ansi = re.compile(r"\x1b\[[0-9;]*m")
_addr = re.compile(r" at 0x[0-9a-f]+")
_wstate = "application/vnd.jupyter.widget-state+json"
_exports = {"export", "exporti", "exports"}
# no network, one thread (two kernels share the cores), and nothing that differs from run to run
_env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": "0",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "MATPLOTLIBRC": str(root/"nbs")}
_env.pop("TRITON_EMULATOR", None)   # a chapter that needs it says so
_env.pop("PYTHONDONTWRITEBYTECODE", None)   # programs that chapters start would compile the package anew

def notebooks():
    return sorted(p for p in (root/"nbs").rglob("*.ipynb")
                  if not any(part[0] in "._" for part in p.relative_to(root/"nbs").parts))

def chapter(path):
    "A notebook's name: its place in nbs/, without the ending"
    return Path(path).resolve().relative_to(root/"nbs").with_suffix("").as_posix()

def prose_of(path):
    "The texts of a notebook's markdown cells, which nbformat would take twenty times as long to read"
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]

def directives(cell):
    "The `#| name: value` lines at the top of a code cell, as a dict."
    res = {}
    if cell.cell_type != "code": return res
    for line in cell.source.splitlines():
        m = re.match(r"#\|\s*([\w-]+)\s*:?\s*(.*)", line)
        if not m: break
        res[m[1]] = m[2].strip()
    return res

def _key(outputs, volatile=False, pictures=False):
    """What must stay the same in outputs: texts (without numbers if `volatile`), never widget ids or
    addresses; pictures only when storing."""
    res = []
    for o in outputs:
        if o.output_type == "stream":
            if res and res[-1][0] == o.name: res[-1] = (o.name, res[-1][1] + o.text)
            else: res.append((o.name, o.text))
        elif o.output_type == "error": res.append(("error", o.ename, o.evalue))
        else:
            res.append(tuple((k, str(v)) for k, v in sorted(o.data.items())
                             if (pictures and not volatile or not k.startswith("image/"))
                             and "widget-view" not in k))
    res = _addr.sub("", repr(res))
    return re.sub(r"-?[\d.,]+(e[+-]\d+)?|\s+", "", res) if volatile else res

def _fix_widget_ids(nb):
    "Number the widget models in order of creation, so that a rerun gives the same file."
    state = nb.metadata.get("widgets", {}).get(_wstate, {}).get("state", {})
    if not state: return nb
    txt = nbformat.writes(nb)
    for i, k in enumerate(state): txt = txt.replace(k, f"{i:032x}")
    return nbformat.reads(txt, as_version=4)

def use_package(nb):
    """Replace exported cells by names of the installed module: the same tests, on the package, and coverage
    sees them."""
    home = next((d["default_exp"] for c in nb.cells if "default_exp" in (d := directives(c))), None)
    for c in nb.cells:
        d = directives(c)
        if not (k := _exports & d.keys()): continue
        mod, names = d[k.pop()] or home, [*_names(ast.parse(c.source).body)]
        c.source = (f"import importlib as _il; _m = _il.import_module('{cfg['lib_path']}.{mod}'); __name__ = "
                    "_m.__name__   # where a test pretends something\n"
            f"globals().update({{k: getattr(_m, k) for k in {names} if hasattr(_m, k)}})")

def _names(body):
    "Names that statements bind at top level; a method added by `@patch` binds none."
    for n in body:
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            yield from ((a.asname or a.name).split(".")[0]
                        for a in n.names if getattr(n, "module", "") != "__future__")
        elif isinstance(n, ast.Assign):
            yield from (t.id for o in n.targets for t in ast.walk(o) if isinstance(t, ast.Name)
                        and isinstance(t.ctx, ast.Store))
        elif isinstance(n, ast.AnnAssign): yield n.target.id
        elif isinstance(n, (ast.If, ast.Try, ast.With)):
            yield from _names([*n.body, *getattr(n, "orelse", []),
                               *(s for h in getattr(n, "handlers", []) for s in h.body)])
        elif hasattr(n, "name") and not any(ast.unparse(d).startswith("patch") for d in n.decorator_list):
            yield n.name

def _joined(outputs):
    "One output for what was printed in a row, however it arrived."
    res = []
    for o in outputs:
        if res and o.output_type == res[-1].output_type == "stream": res[-1].text += o.text
        else: res.append(o)
    return res

_context, _starting = get_context("forkserver"), Lock()
_preloaded = [   # what each kernel imports, and most chapters; before there is a kernel, bars are plain
    "tqdm.auto", "warm",
    "torch", "fastcore.all", "matplotlib.pyplot", "transformers.models.llama.modeling_llama",
    "fastapi", "httpx", "uvicorn", "hypothesis", "openai",
    "ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.debugger",
    "IPython.core.completerlib", "IPython.core.debugger", "IPython.core.logger", "IPython.core.oinspect",
    "IPython.extensions.storemagic", "sqlite3", "tornado.platform.asyncio",
    "traitlets.config.argcomplete_config", "jupyter_client", "nbclient", "nbformat"]
_context.set_forkserver_preload(_preloaded)

def preload_little():
    "For a chapter or two, which import what they need"
    _context.set_forkserver_preload([o for o in _preloaded if o.startswith(("tqdm", "ipykernel"))])

def _start_server():
    with _starting, patch.dict(os.environ, _env): forkserver.ensure_running()

def _end_with_parent():
    parent_process().join()
    os._exit(1)

def _kernel(args, env, cwd):
    if sys.platform == "linux": warm.begin_kernel()
    gc.freeze()   # what the server has imported: engines collect garbage, and would look through all of it
    Thread(target=_end_with_parent, daemon=True).start()   # the server itself waits for its last kernel
    os.setsid()   # a process group of its own
    os.environ.clear()
    os.environ.update(env)
    # read long ago, by the server
    sys.path[:0] = [o for o in env.get("PYTHONPATH", "").split(os.pathsep) if o]
    os.chdir(cwd)
    from ipykernel.kernelapp import launch_new_instance
    launch_new_instance(argv=[*args, f"--IPKernelApp.parent_handle={os.getppid()}"])

class _Fork(_context.Process):
    "A process with the methods of a `Popen` that a kernel's manager calls"
    stdin = stdout = stderr = None
    def poll(self): return self.exitcode
    def wait(self): return self.join()
    def send_signal(self, signum): os.kill(self.pid, signum)

class ForkingManager(AsyncKernelManager):
    "Forks kernels off a process that has imported what they need, which spares each notebook four seconds"
    async def _async_launch_kernel(self, kernel_cmd, *, env, cwd, **kw):
        args = kernel_cmd[kernel_cmd.index("ipykernel_launcher") + 1:]
        _start_server()
        kernel = _Fork(target=_kernel, args=(args, env, cwd))
        kernel.start()
        self.provisioner.process, self.provisioner.pid, self.provisioner.pgid = kernel, kernel.pid, kernel.pid
        self._reconcile_connection_info(self.provisioner.connection_info)

    async def _async_finish_shutdown(self, waittime=None, pollinterval=.01, restart=False):
        "A kernel ends within milliseconds: look often"
        await super()._async_finish_shutdown(waittime, pollinterval, restart)

class Client(NotebookClient):
    """Runs cells as soon as a kernel answers. nbclient's own listens a fifth of a second longer, for messages
    that were left over, but it takes only those of the cell that runs."""
    async def async_start_new_kernel_client(self):
        self.kc = self.km.client()
        self.kc.start_channels()
        self.kc.allow_stdin = False
        until = time.monotonic() + self.startup_timeout
        while time.monotonic() < until:
            self.kc.kernel_info()
            try:
                await self.kc.get_shell_msg(timeout=1)
                await self.kc.get_iopub_msg(timeout=.2)   # it is connected: no output can be missed
                return self.kc
            except Empty:
                if not await self.km.is_alive(): break
        await self._async_cleanup_kernel()
        atexit.unregister(self._cleanup_kernel)   # there is nothing left to clean up
        raise RuntimeError("Kernel died before replying to kernel_info")

def execute(nb, path, timeout, allow_errors=False, env={}):
    "Run `nb` in a kernel of its own, with these more variables; return an error message or ''."
    def in_a_kernel():
        Client(nb, kernel_name="python3", timeout=timeout, startup_timeout=300,
               kernel_manager_class=ForkingManager, allow_errors=allow_errors,
               resources={"metadata": {"path": str(path.parent)}},
               extra_arguments=["--log-level=ERROR"]).execute(env=_env | env)
    try:
        try: in_a_kernel()
        except RuntimeError as e:
            if "before replying" not in str(e): raise
            in_a_kernel()   # a port was chosen here and is bound there: another process has taken it between
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as e:
        bad = next((i for i, c in enumerate(nb.cells)
                    if any(o.output_type == "error" for o in c.get("outputs", []))), None)
        where = f"{path.name}, cell {bad} (id {nb.cells[bad].id})" if bad is not None else path.name
        return f"{where}\n{_ansi.sub('', str(e))}"
    for c in nb.cells:
        if c.cell_type == "code": c.outputs = _joined(o for o in c.outputs if o.get("name") != "stderr")
    return ""

def store(nb, path):
    "Write a notebook as nbdev would clean it."
    from fastcore.nbio import write_nb
    from nbdev.clean import clean_nb
    js = json.loads(nbformat.writes(nb))
    clean_nb(js)
    write_nb(js, path)

def run(path, flags=(), save=False, timeout=900, package=False, fresh=False, env={},
        before_saving=lambda: None, skip=()):
    """Run one notebook, but for the cells with the ids `skip`; return (error message or '', ids of cells with
    stale outputs, seconds). `before_saving` may raise, and nothing is saved."""
    t0, path, stale = time.time(), Path(path).resolve(), []
    old, nb = (nbformat.read(path, as_version=4) for _ in range(2))
    marks = set(cfg["tst_flags"].split())
    for c in nb.cells:
        d = directives(c)
        if d.get("eval", "").lower() == "false" or (marks - set(flags)) & d.keys() or c.id in skip:
            c.metadata.tags = ["skip-execution"]
    if package: use_package(nb)
    if path.stem == "process": env = env | {"PYTHON_STARTS": "anew"}   # which shows it: `warm` forks nothing
    err = execute(nb, path, timeout, env=env)
    if err: return err, [], time.time()-t0
    nb = _fix_widget_ids(nb)
    for a, b in zip(old.cells, nb.cells):
        if a.cell_type != "code" or "skip-execution" in b.metadata.get("tags", []): continue
        d = directives(a)
        if not save and marks & d.keys(): continue   # stored by a machine that can run them
        if "machine" in d and (a.outputs or not save) and not fresh: continue
        volatile = "volatile" in d
        if (fresh and a.outputs != b.outputs
                or _key(a.outputs, volatile, save) != _key(b.outputs, volatile, save)):
            stale.append(a.id)
            a.outputs = b.outputs
        elif any("widget-view" in k for o in b.outputs for k in o.get("data", {})): a.outputs = b.outputs
    w = nb.metadata.get("widgets") or None
    if w != (old.metadata.pop("widgets", None) or None) and save: stale.append("widgets")
    if w: old.metadata.widgets = w
    if save: before_saving()
    if save and stale: store(old, path)
    return "", stale, time.time()-t0

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("files", nargs="*", type=Path); ap.add_argument("--save", action="store_true")
    ap.add_argument("--fresh", action="store_true", help="with --save: store volatile outputs too")
    ap.add_argument("--flags", default=os.environ.get("TST_FLAGS", ""),
                    help="cells to run that are skipped otherwise, e.g. 'slow gpu'")
    ap.add_argument("-j", type=int, default=2)
    a = ap.parse_args()
    files, bad = a.files or notebooks(), 0
    if len(files) <= a.j: preload_little()
    with ThreadPoolExecutor(a.j) as ex:
        for f, (err, stale, secs) in zip(files,
                ex.map(lambda f: run(f, a.flags.split(), a.save, fresh=a.fresh), files)):
            what = "FAILED" if err else f"{'updated' if a.save else 'STALE'} {len(stale)}" if stale else "ok"
            print(f"{secs:6.1f}s  {what:10} {f.name}", flush=True)
            if err: print(err)
            bad += bool(err) or bool(stale and not a.save)
    print(f"{len(files)-bad} of {len(files)} notebooks ok")
    sys.exit(bad > 0)

if __name__ == "__main__": main()
