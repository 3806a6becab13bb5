"""A model on a hub of this machine: a download that is killed goes on, a revision is another model, and
without the hub the cache serves."""
import hashlib, json, os, re, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from minisgl_lit.formats.hub import embedded_path

FILES = {o.name: o.read_bytes() for o in embedded_path().iterdir() if o.is_file()}
COMMITS = {"a" * 40: FILES,
           "b" * 40: FILES | {"generation_config.json": json.dumps({"eos_token_id": 0}).encode()}}
REFS = {"some/model": {"main": "a" * 40, "v1": "b" * 40}}
RUN = ("from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 20_000; import sys; from "
       "minisgl_lit.cli import main; sys.exit(main(sys.argv[1:]))")

class Hub(BaseHTTPRequestHandler):
    "The repositories of `REFS`; weights come slowly while `server.slow`, and as far as `server.most`"
    def log_message(self, *args): pass
    def do_HEAD(self): self.do_GET()
    def do_GET(self):
        path = self.path.partition("?")[0]
        asked = re.fullmatch(r"/api/models/(some/\w+)/(revision|tree)/(.+)", path)
        if asked and asked[1] in REFS: self.about(*asked.groups())
        elif found := re.fullmatch(r"/some/\w+/resolve/(\w+)/(.+)", path): self.file(*found.groups())
        else: self.say(404, x_error_code="RepoNotFound")
    def say(self, status, data=b"", **headers):
        self.send_response(status)
        for name, value in ({"content_length": len(data)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET": self.send(data)
    def send(self, data):
        step = 20_000 if self.server.slow and len(data) > 10**6 else len(data) or 1
        for at in range(0, len(data), step):
            try:
                self.wfile.write(data[at:at + step][:self.server.most])
                while (most := self.server.most) and most < len(data): time.sleep(.01)
            except OSError: return   # the caller was killed
            if step < len(data): time.sleep(.01)
    def about(self, repo, what, revision):
        commit = REFS[repo].get(revision, revision)
        if commit not in COMMITS: self.say(404, x_error_code="RevisionNotFound")
        elif what == "revision":
            self.say(200, json.dumps(dict(id=repo, sha=commit, siblings=[])).encode())
        else:
            self.say(200,
                     json.dumps([dict(type="file", path=k, size=len(v), oid=hashlib.sha1(v).hexdigest())
                                 for k, v in COMMITS[commit].items()]).encode())
    def file(self, commit, name):
        data = COMMITS[commit].get(name)
        if data is None: return self.say(404, x_error_code="EntryNotFound")
        first = int((self.headers["range"] or "bytes=0-")[6:].partition("-")[0])
        if self.command == "GET": self.server.asked.append((name, first))
        self.say(206 if first else 200, data[first:], etag=f'"{hashlib.sha256(data).hexdigest()}"',
                 x_repo_commit=commit)

def start_hub(slow=False):
    "A hub of this machine: `asked` has the files that were fetched, and from which byte"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.slow, server.most = [], slow, None
    threading.Thread(target=server.serve_forever, args=(.01,), daemon=True).start()
    return server

@pytest.mark.long
def test_killed_it_goes_on(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    server = start_hub(slow=True)
    env |= dict(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=str(tmp_path/"hf"))
    def command(name, *more):
        return [sys.executable, "-c", RUN, "generate", "What is a page?", "--model", name, "--max-tokens",
                "8", "--temperature", "0", "--num-pages", "64", *more]
    def answer(name, **more):
        return subprocess.run(command(name), env=env | more, capture_output=True, text=True, timeout=120)
    want = answer("embedded").stdout
    with subprocess.Popen(command("some/model"), env=env, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as p:
        end = time.monotonic() + 60
        while not any(o.stat().st_size > 200_000 for o in tmp_path.rglob("*.part")):
            assert time.monotonic() < end and p.poll() is None
            time.sleep(.01)
        p.send_signal(signal.SIGKILL)
    [part] = tmp_path.rglob("*.part")
    kept = part.stat().st_size
    server.slow, server.asked[:] = False, []
    done = answer("some/model")
    assert (done.returncode, done.stdout) == (0, want), done.stderr
    assert (server.asked == [("model.safetensors", kept)]
            and not [*tmp_path.rglob("*.part")]), "only the rest is asked for"
    server.asked.clear()
    assert (answer("some/model@v1").returncode == 0
            and [name for name, _ in server.asked]
            == ["generation_config.json"]), "what both revisions have is fetched once"
    refused = answer("some/model@v2")
    assert (refused.returncode == 2 and refused.stderr.count("\n") == 1
            and "it has no such revision of this model" in refused.stderr)
    server.shutdown()
    server.server_close()
    assert answer("some/model").stdout == want, "the hub is gone"
    assert answer("some/model", HF_HUB_OFFLINE="1").stdout == want
    lost = answer("other/model", HF_HUB_OFFLINE="1")
    assert lost.returncode == 2 and "it cannot be reached, and its cache has no such model" in lost.stderr
