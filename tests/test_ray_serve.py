"""The guide's file for `serve deploy` on a Ray of this machine: an engine is killed, an ingress is killed,
and a new version is deployed under load."""
import os, re, signal, socket, subprocess, sys, threading, time
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
    text = next(o for o in re.findall(r"^```yaml\n(.*?)^```$",
        (root/"docs/guides/many-machines.md").read_text(), re.S | re.M) if "serve.yaml" in o)
    with socket.create_server(("127.0.0.1", 0)) as o: port = o.getsockname()[1]
    ray.init("local", num_cpus=2, include_dashboard=True, dashboard_port=0, object_store_memory=80 << 20,
             logging_level="error")
    def deploy(engines=None, ingresses=1, **args):
        file = yaml.safe_load(text)
        file["http_options"]["port"] = port
        [application] = file["applications"]
        application["args"].update(args)
        application["deployments"] = [dict(name="Ingress", num_replicas=ingresses),
                                      dict(name="EngineReplica", **engines or dict(num_replicas=2))]
        (folder/"serve.yaml").write_text(yaml.safe_dump(file))
        address = "http://" + ray._private.worker._global_node.address_info["webui_url"]
        done = subprocess.run([str(Path(sys.executable).parent/"serve"), "deploy", str(folder/"serve.yaml"),
                               "--address", address], text=True, capture_output=True)
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
    except Exception as e:
        return "Connect" not in type(e).__name__ and "Remote" not in type(e).__name__ and None

def test_an_application_of_ray_serve(served):
    """It is the web application of one server; a second engine takes over when the first dies, and Ray Serve
    replaces that"""
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
    patient(lambda: all_joined(served)
            and len({*actors("ServeReplica:minisgl-lit:EngineReplica")} - {*before}) == 1)

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
            *_, last = events(served, "/generate", text=f"Hello {i}",
                              sampling_params=dict(max_tokens=300, ignore_eos=True))
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

def available(s):
    "Engines that an ingress may send requests to; those that have left stay in its list"
    return sum(o["joined"] and not o["why"] for o in info(s)["per_replica"])

def engines(): return actors("ServeReplica:minisgl-lit:EngineReplica")

def read(stream):
    "The last event of a stream, or what has cut it"
    try: return list(stream)[-1]
    except Exception as e: return {"cut": type(e).__name__}

def test_two_ingresses(served):
    """They know what is cached wherever it was asked for, either aborts what is the other's, and if one is
    killed the other's streams are whole"""
    served.deploy(ingresses=2, num_pages=1000)   # so that all streams run at once
    # none of the version before
    def deployed(): return available(served) == 2 and info(served)["pages"]["total"] == 2*1000
    patient(lambda: len(actors("ServeReplica:minisgl-lit:Ingress")) == 2 and answers(served)
            and all(deployed() for _ in range(6)))
    text = "A page is a fixed number of slots. "*6
    def cached():
        return post(served, "/generate", text=text,
                    sampling_params=dict(max_tokens=2)).json()["meta_info"]["cached_tokens"]
    cached()
    time.sleep(2)   # so that both have heard of it
    assert all([cached() > 0 for _ in range(8)])
    stream = events(served, "/generate", text="Hello", rid="two", **LONG)
    next(stream)
    for _ in range(4): assert post(served, "/abort_request", rid="two").status_code == 200   # by either
    assert read(stream)["meta_info"]["finish_reason"]["type"] == "abort"
    streams = [events(served, "/generate", text=f"Hello {i}", **LONG) for i in range(10)]
    with ThreadPoolExecutor(10) as pool:
        for _ in pool.map(next, streams): pass
        os.kill(actors("ServeReplica:minisgl-lit:Ingress")[0], signal.SIGKILL)
        ends = [*pool.map(read, streams)]
    whole = [o["meta_info"]["completion_tokens"] for o in ends if "meta_info" in o]
    assert 0 < len(whole) < 10 and {*whole} == {LONG["sampling_params"]["max_tokens"]}, ends
    patient(lambda: len(actors("ServeReplica:minisgl-lit:Ingress")) == 2 and answers(served)
            and all(available(served) == 2 for _ in range(6)))
    assert info(served)["running"] == 0

SCALED = dict(autoscaling_config=dict(
    min_replicas=1, max_replicas=2, upscale_delay_s=1, downscale_delay_s=3, metrics_interval_s=1,
    look_back_period_s=3, policy=dict(policy_function="minisgl_lit.server.cluster:ByWaitingTokens",
                                      policy_kwargs=dict(tokens=1000, requests=128))))

def test_engines_are_added_and_taken_away(served):
    "By tokens of prompts that wait, from one to two and back, and each stream is whole"
    served.deploy(engines=SCALED, max_running_req=2, num_pages=500)
    patient(lambda: answers(served) and info(served)["pages"]["total"] == 500
            and available(served) == len(engines()) == 1)
    wanted, ends = 12, []
    def call(i):
        while i < wanted:
            *_, last = events(served, "/generate", text=f"{len(ends)} " + "pages and slots "*40,
                              sampling_params=dict(max_tokens=300, ignore_eos=True))
            ends.append(last["meta_info"]["completion_tokens"] if "meta_info" in last else last)
    with ThreadPoolExecutor(12) as pool:
        callers = [pool.submit(call, i) for i in range(12)]
        try:
            patient(lambda: available(served) == len(engines()) == 2)
            patient(lambda: all(o["running"] for o in info(served)["per_replica"] if o["joined"]))
            wanted = 2   # so little waits that one engine is enough
            patient(lambda: available(served) == len(engines()) == 1)
        finally: wanted = 0
        for o in callers: o.result()
    assert {*ends} == {300}
