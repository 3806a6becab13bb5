"""The guide's file for `serve deploy` on a Ray of this machine: an engine is killed, an ingress is killed, and a new version is deployed under load."""
import os, re, signal, socket, subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest, yaml

from test_faults import LONG
from test_ray import actors, all_joined, patient, ray   # noqa: F401
from test_serve import events, info, post, until, web

pytestmark = pytest.mark.long
root = Path(__file__).resolve().parents[1]

@pytest.fixture(scope="module")
def served(ray, tmp_path_factory):
    "The file of the guide, deployed: its URL, and a function that deploys it anew, changed"
    folder = tmp_path_factory.mktemp("serve")
    text = next(o for o in re.findall(r"^```yaml\n(.*?)^```$", (root/"docs/guides/many-machines.md").read_text(), re.S | re.M) if "serve.yaml" in o)
    with socket.create_server(("127.0.0.1", 0)) as o: port = o.getsockname()[1]
    ray.init("local", num_cpus=2, include_dashboard=True, dashboard_port=0, object_store_memory=80 << 20, logging_level="error")
    def deploy(**args):
        file = yaml.safe_load(text)
        file["http_options"]["port"] = port
        file["applications"][0]["args"].update(args)
        (folder/"serve.yaml").write_text(yaml.safe_dump(file))
        address = "http://" + ray._private.worker._global_node.address_info["webui_url"]
        done = subprocess.run([str(Path(sys.executable).parent/"serve"), "deploy", str(folder/"serve.yaml"), "--address", address], text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
    class Served: url = f"http://127.0.0.1:{port}"
    Served.deploy = staticmethod(deploy)
    try:
        deploy()
        patient(lambda: answers(Served) and len(info(Served)["per_replica"]) == 2 and all_joined(Served))
        yield Served
    finally:
        from ray import serve as ray_serve
        ray_serve.shutdown()
        ray.shutdown()

def answers(s):
    "Whether it is served; Ray Serve's proxy says 404 and 503 until it is"
    try: return web.get(s.url + "/health").status_code == 200
    except OSError: return False
    except Exception as e: return "Connect" not in type(e).__name__ and "Remote" not in type(e).__name__ and None

def test_an_application_of_ray_serve(served):
    "It is the web application of one server; a second engine takes over when the first dies, and Ray Serve replaces that"
    assert web.get(served.url + "/v1/models").json()["data"][0]["id"] == "embedded"
    before = actors("ServeReplica:minisgl-lit:EngineReplica")
    assert len(before) == 2
    streams = [events(served, "/generate", text=f"Hello {i}", **LONG) for i in range(4)]
    for o in streams: next(o)
    there = [o["running"] + o["waiting"] for o in info(served)["per_replica"]]
    os.kill(before[0], signal.SIGKILL)
    until(lambda: any(o["why"] for o in info(served)["per_replica"]))
    [dead] = [i for i, o in enumerate(info(served)["per_replica"]) if o["why"]]
    assert post(served, "/generate", text="x", sampling_params=dict(max_tokens=2)).status_code == 200
    ends = [list(o)[-1] for o in streams]
    whole = [o for o in ends if "error" not in o]
    assert sum(there) == 4 and len(whole) == 4 - there[dead]   # those of the dead engine ended with an error
    assert {o["meta_info"]["completion_tokens"] for o in whole} <= {LONG["sampling_params"]["max_tokens"]}
    patient(lambda: all_joined(served) and len({*actors("ServeReplica:minisgl-lit:EngineReplica")} - {*before}) == 1)

def test_an_ingress_is_killed(served):
    "Another answers; the engines have stopped to compute for the first"
    stream = events(served, "/generate", text="Hello", **LONG)
    next(stream)
    [pid] = actors("ServeReplica:minisgl-lit:Ingress")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Exception): list(stream)
    patient(lambda: answers(served))
    patient(lambda: all_joined(served))
    assert info(served)["running"] == 0
    assert post(served, "/generate", text="x", sampling_params=dict(max_tokens=2)).status_code == 200

def test_a_new_version_costs_no_stream(served):
    "Engines and ingress are replaced while callers read; each of them gets its whole answer"
    before, stop, ends = {*actors("ServeReplica:minisgl-lit")}, threading.Event(), []
    def call(i):
        while not stop.is_set():
            *_, last = events(served, "/generate", text=f"Hello {i}", sampling_params=dict(max_tokens=300, ignore_eos=True))
            ends.append(last["meta_info"]["completion_tokens"] if "meta_info" in last else last)
    with ThreadPoolExecutor(3) as pool:
        callers = [pool.submit(call, i) for i in range(3)]
        try:
            served.deploy(num_pages=300)
            patient(lambda: not before & {*actors("ServeReplica:minisgl-lit")})
        finally: stop.set()
        for o in callers: o.result()
    assert ends and {*ends} == {300}
    patient(lambda: info(served)["pages"]["total"] == 600)
