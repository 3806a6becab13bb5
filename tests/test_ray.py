"""Three engines of the embedded model on a Ray of this machine: one is killed, one stands still.

What of it needs no Ray is tried over toy engines in the chapters 53f, 53g and 56a.
"""
import os, signal, socket, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from minisgl_lit import serve
from test_faults import LONG, health
from test_serve import SMALL, alive, events, info, post, until, web

pytestmark = pytest.mark.long

@pytest.fixture(scope="module", autouse=True)
def ray():
    """Usage statistics are off, and all listens on 127.0.0.1, in what the tests start as in what the server
    does"""
    if not find_spec("ray"): pytest.skip("ray is not installed: make .venv/.ray")
    from minisgl_lit.server.ray_engine import import_ray
    return import_ray(loopback=True)

def actors(name):
    "Process ids of actors whose processes Ray gives such names, of the Ray that this process has started"
    rows = [o.split(None, 2) for o in subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,command="],
        text=True, capture_output=True).stdout.splitlines()]
    parents = {int(pid): int(ppid) for pid, ppid, _ in rows}
    return sorted(int(pid) for pid, ppid, command in rows if command.startswith(f"ray::{name}")
                  and parents.get(int(ppid)) == os.getpid())

def all_joined(s): return all(o["joined"] and not o["why"] for o in info(s)["per_replica"])

def patient(condition):
    "As `until`, but Ray takes its time"
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(.2)


def test_two_servers_in_one_process(ray):
    """They share Ray; the first to end takes nothing from the other, and the last ends it (so this comes
    before the server of all other tests)"""
    settings = SMALL | dict(log_interval=0, ray_address="local")
    def answers(s): return post(s, "/generate", text="x", sampling_params=dict(max_tokens=2)).status_code
    with serve(**settings) as first:
        second = serve(**settings)
        assert answers(first) == answers(second) == 200
    with second: assert answers(second) == 200
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def server(ray):
    with serve(**SMALL | dict(num_pages=2048), log_interval=0, replicas=3, ray_address="local",
               restart=True) as s:
        yield s
    assert not actors("EngineActor")

def test_an_engine_is_killed_under_16_streams(server):
    """Its streams end with an error, those of the others are whole; newcomers are served at once, and another
    takes its place"""
    patient(lambda: all_joined(server))
    streams = [events(server, "/generate", text=f"Hello {i}", rid=f"s{i}", **LONG) for i in range(16)]
    for o in streams: next(o)
    there = [o["running"] + o["waiting"] for o in info(server)["per_replica"]]
    assert sum(there) == 16 and all(there)
    os.kill(actors("EngineActor")[1], signal.SIGKILL)
    until(lambda: sum(bool(o["why"]) for o in info(server)["per_replica"]) == 1)
    [dead] = [i for i, o in enumerate(info(server)["per_replica"]) if o["why"]]
    assert (health(server.url) == 200
            and post(server, "/generate", text="x", sampling_params=dict(max_tokens=2)).status_code == 200)
    ends = [list(o)[-1] for o in streams]
    died = [o for o in ends if "error" in o]
    assert (len(died) == there[dead]
            and all("link to the engine has ended" in o["error"]["message"] for o in died))
    assert all(o["meta_info"]["finish_reason"]["type"] == "length" for o in ends if "error" not in o)
    patient(lambda: all_joined(server))
    assert len(actors("EngineActor")) == 3

def test_an_engine_stands_still(server):
    "Nothing new is sent there; when it goes on it is as the others are"
    patient(lambda: all_joined(server))
    pid = actors("EngineActor")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: any("has not been heard of" in o["why"] for o in info(server)["per_replica"]))
        for i in range(6):
            assert (post(server, "/generate", text=f"{i} pages",
                         sampling_params=dict(max_tokens=2)).status_code == 200)
        assert web.get(server.url + "/metrics").status_code == 200
    finally: os.kill(pid, signal.SIGCONT)
    until(lambda: all_joined(server))

def program(folder, *flags, **env):
    "The command line's server, as from a terminal: in a process group of its own"
    command = [sys.executable, "-m", "minisgl_lit", "serve", "--port", "0", "--num-pages", "256",
               "--log-interval", "0", *flags]
    return subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, start_new_session=True,
                            env=os.environ | dict(TMPDIR=str(folder)) | env)

def descendants(pid):
    "Process ids of all that a process has started, and they"
    children = {}
    for line in subprocess.run(["ps", "-A", "-o", "pid=,ppid="], text=True,
                               capture_output=True).stdout.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, queue = [], [pid]
    while queue: found += (new := children.get(queue.pop(), [])); queue += new
    return found

@pytest.fixture
def short():
    "A folder for files of a server and its Ray, whose name is short enough for Ray's sockets"
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)

@pytest.mark.parametrize("seconds", [1, 4, 7])
def test_ctrl_c_while_it_starts(ray, short, seconds):
    "To all processes of the terminal at once, as a terminal does it: it ends, and no process is left"
    p = program(short, "--ray-address", "local", "--replicas", "2")
    time.sleep(seconds)
    started = descendants(p.pid)
    os.killpg(p.pid, signal.SIGINT)
    _, said = p.communicate(timeout=60)
    assert "Traceback" not in said, said
    patient(lambda: not any(map(alive, started)))

def test_the_server_is_killed(ray, short):
    "With kill -9, no engine and nothing of its Ray outlives it"
    p = program(short, "--ray-address", "local", "--replicas", "2")
    assert "is served on" in p.stdout.readline()
    started = descendants(p.pid)
    assert len(started) > 5
    p.kill()
    p.communicate(timeout=60)
    patient(lambda: not any(map(alive, started)))

def killed(*parts):
    "Kill all processes whose command lines have these"
    for line in subprocess.run(["ps", "-A", "-ww", "-o", "pid=,command="], text=True,
                               capture_output=True).stdout.splitlines():
        pid, command = line.split(None, 1)
        if all(o in command for o in parts): os.kill(int(pid), signal.SIGKILL)

NO_TOKEN = dict(RAY_AUTH_MODE="disabled")

@pytest.fixture
def head(ray, short):
    "The head of a cluster, on 127.0.0.1: its address, and what the command lines of its processes have"
    with socket.create_server(("127.0.0.1", 0)) as o: port = o.getsockname()[1]
    subprocess.run([str(Path(sys.executable).parent/"ray"), "start", "--head", f"--port={port}",
                    "--node-ip-address=127.0.0.1", "--num-cpus=2", "--include-dashboard=false",
                    "--object-store-memory=80000000", f"--temp-dir={short}/r"], env=os.environ | NO_TOKEN,
                   check=True, capture_output=True)
    try: yield SimpleNamespace(address=f"127.0.0.1:{port}", mark=f"{short}/r/")
    finally: killed(f"{short}/r/")

def no_error(server, i):
    "One stream after the other, until one ends with an error or is refused: its events"
    while True:
        if not (seen := [*events(server, "/generate", text=f"Hello {i}", **LONG)]) or "error" in seen[-1]:
            return seen

@pytest.mark.parametrize(("parts", "why"), [(["gcs_server"], "Ray has not answered for 45 s"),
    (["gcs_server", "raylet/raylet"], "the link to the engine has ended")],
                         ids=["alone", "with its machine"])
def test_the_head_dies(head, short, parts, why):
    """Whoever has asked is told so, nobody waits in vain, and the server ends with a sentence and before Ray
    ends it"""
    p = program(short, "--replicas", "2", "--threads", "1", "--ray-address", head.address, **NO_TOKEN)
    s = SimpleNamespace(url=p.stdout.readline().split()[-1])
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(no_error, s, i) for i in range(4)]
        until(lambda: info(s)["running"] == 4)
        for o in parts: killed(head.mark, o)
        ends = [seen[-1] for o in asked if (seen := o.result(90))]
    assert ends and all(why in o["error"]["message"] for o in ends)
    assert why in web.get(s.url + "/health").text and post(s, "/generate", text="x").status_code == 503
    while p.poll() is None:
        try: assert web.get(s.url + "/health", timeout=5).status_code == 503
        except (httpx.NetworkError, httpx.RemoteProtocolError): pass   # it listens no more
        time.sleep(.2)
    said = p.stderr.read()
    assert (p.returncode == 1 and f"the server failed: {why}" in said
            and "The program will terminate" not in said), said
