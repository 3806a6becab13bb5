"""Programs without the seconds that Python takes to import torch: forked off a process that has imported what
engines and servers do and nothing else has happened to. It is there under xdist on Linux; elsewhere `Popen`
is the usual one, as it is with arguments that a fork cannot have (`-X`, other variables that are read by an
import)."""
import atexit, builtins, ctypes, faulthandler, gc, importlib, io, json, os, pickle, re, runpy, signal, socket
import subprocess, sys, threading, time, traceback, types

from setproctitle import getproctitle, setproctitle

# torch itself sets the folder that it compiles into, in the middle of a run
_READ_AT_IMPORT = re.compile(r"OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|TORCH(?!INDUCTOR_CACHE)|CUDA|LD_|MALLOC_|"
                             r"PYTHON(?!PATH)")
_SUBREAPER, _PDEATHSIG = 36, 1   # of linux/prctl.h
_libc = ctypes.CDLL(None)

def _fixed(env): return {k: v for k, v in env.items() if _READ_AT_IMPORT.match(k)}

_python = sys.executable   # as it is; a test may pretend another

def what(command):
    "How Python is asked to run something: how, what, its arguments; `None` if it is not, or otherwise"
    first, *rest = map(str, command)
    if first != _python: return None
    match rest:
        case ["-P", "-m", module, *args]: return "-P", module, args
        case ["-m" | "-c" as how, thing, *args]: return how, thing, args
        case [file, *args] if file.endswith(".py"): return "", file, args

class Nursery:
    "The process that programs are forked off; it ends with this one."
    def __init__(self):
        self._lock, self.env = threading.Lock(), _fixed(os.environ)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            try:
                _libc.prctl(_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent: _serve(its)
            finally: os._exit(0)
        self.pid, self._socket = pid, ours
        its.close()

    def start(self, order, files):
        "Have a program started with these files as 0, 1, 2 and what it inherits; its process id"
        with self._lock:
            _libc.prctl(_SUBREAPER, 1)   # whoever has lost its parent meanwhile is ours: that is the program
            try:
                socket.send_fds(self._socket, [pickle.dumps(order)], files)
                return int(self._socket.recv(99))
            finally: _libc.prctl(_SUBREAPER, 0)

nursery = None   # of this process

class Popen(subprocess.Popen):
    "A program of this process, as the usual one is."
    of = "-P", "-m", "-c", ""
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                       creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                       *rest, **more):
        program, env = what(args) if isinstance(args, list) else None, os.environ if env is None else env
        is_usual = (shell or executable or preexec_fn or nursery is None or program is None
                    or program[0] not in self.of or _fixed(env) != nursery.env)
        if is_usual: return super()._execute_child(
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest, **more)
        start_new_session = rest[-2]   # before `process_group`
        order = dict(program=program, title=[str(o) for o in args], env=dict(env), cwd=cwd or os.getcwd(),
                     session=start_new_session, inherited=[*pass_fds])
        files = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = nursery.start(order, [*files, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

run = types.FunctionType(subprocess.run.__code__, vars(subprocess) | dict(Popen=Popen))
run.__kwdefaults__ = subprocess.run.__kwdefaults__
run.__doc__ = "`subprocess.run` with this `Popen`"

def _serve(orders):
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
    gc.freeze()   # or each program would look through all that was imported
    _close_all_but(orders.fileno())
    path = None
    while True:
        order, files, _, _ = socket.recv_fds(orders, 1 << 20, 250)
        if not order: return
        path = path or _usual_path()
        told, tells = os.pipe()
        if (between := os.fork()) == 0:
            me = os.getpid()
            if os.fork() == 0:
                order = pickle.loads(order)
                if order["session"]: os.setsid()
                os.write(tells, str(os.getpid()).encode())
                while os.getppid() == me: time.sleep(.0005)
                _become(order, files, path)
            os._exit(0)
        os.waitpid(between, 0)   # only then has the program its new parent
        orders.send(os.read(told, 99))
        for o in (*files, told, tells): os.close(o)

def _close_all_but(*kept):
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            try: os.close(fd)
            except OSError: pass   # that of the list

def _become(order, files, path):
    "Be the program that was asked for, with nothing left of the process that this was"
    code = 1
    try:
        numbers = [0, 1, 2, *order["inherited"]]
        free = max(numbers + files) + 1
        files = [os.dup2(fd, free + i) for i, fd in enumerate(files)]
        for fd, number in zip(files, numbers): os.dup2(fd, number)
        _close_all_but(*numbers)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        _as_new(order["title"])
        # others than engines may start some themselves
        if order["program"][0] != "-P" and "minisgl_lit.process" in sys.modules: _fork_off_nursery()
        code = _run(path, *order["program"])
    except BaseException: traceback.print_exc()
    finally:
        for o in (sys.stdout, sys.stderr):
            try: o.closed or o.flush()
            except Exception: code = code or 120
        os._exit(code)

def _as_new(title):
    "As Python is at its start"
    setproctitle(" ".join(title))
    atexit._clear()
    faulthandler.disable()
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGCHLD): signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        file = io.TextIOWrapper(open(fd, f"{mode}b", -1 if fd < 2 else 0, closefd=False), encoding="utf-8",
                                errors="strict" if fd < 2 else "backslashreplace",
                                line_buffering=fd == 2 or os.isatty(fd), write_through=fd == 2)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    builtins.__dict__.pop("_", None)

def _run(path, how, thing, args):
    "Its exit code"
    own = [o for o in os.environ.get("PYTHONPATH", "").split(os.pathsep) if o]
    first = {"-P": [], "": [os.path.dirname(os.path.abspath(thing))]}.get(how, [""])
    sys.path[:] = [*first, *own, *path]
    importlib.invalidate_caches()
    sys.argv = [thing if how != "-c" else "-c", *args]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    try:
        if how == "-c": exec(compile(thing, "<string>", "exec"), main.__dict__)
        elif how:
            sys.modules.pop(thing, None)   # else there is a warning that it may be there twice
            runpy.run_module(thing, run_name="__main__", alter_sys=True)
        else: runpy.run_path(thing, run_name="__main__")
        return 0
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int): return (e.code or 0) & 255
        print(e.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()

def _usual_path():
    "Where Python looks for modules when nobody has said anything"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = "import json, sys; print(json.dumps(sys.path))"
    return json.loads(subprocess.check_output([sys.executable, "-P", "-c", code], env=env))

class EnginePopen(Popen):
    "The same for engines alone"
    of = "-P",

def _fork_off_nursery():
    global nursery
    nursery = Nursery()
    # only what this module starts
    minisgl_lit.process.subprocess = types.SimpleNamespace(**vars(subprocess) | dict(Popen=Popen))

def begin_kernel():
    "For a notebook, which imports the package only later, perhaps another one"
    global nursery
    getproctitle()
    nursery = Nursery()
    subprocess.Popen = EnginePopen

def begin():
    """Import what engines and servers import, and fork the process off; before anything else has happened to
    this one"""
    global minisgl_lit
    import minisgl_lit.process, minisgl_lit.cli
    import minisgl_lit.server.engine_process, minisgl_lit.server.serve   # noqa: F401 (torch, too)
    getproctitle()   # it finds where the title is, which it could not later
    _fork_off_nursery()
