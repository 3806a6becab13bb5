"""Install the wheel in an empty environment, far from this checkout, and use it: `make wheel`.

    python tests/wheel_check.py dist      the wheel in dist/, and the sdist beside it

Of the environment that runs this, only the libraries are lent: what is imported of the project must be
the wheel's. The compiler is hidden: the wheel's kernels must do. It takes seconds and no network.
"""
import json, os, subprocess, sys, sysconfig, tarfile, venv, zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

root = Path(__file__).resolve().parents[1]

def tracked(*where):
    "Files that git knows, as it names them"
    return set(subprocess.check_output(["git", "ls-files", "-z", *where], cwd=root,
                                       text=True).split("\0")) - {""}

def check_files(wheel, sdist):
    "Nothing of the package is missing, and nothing of this machine is added"
    names = zipfile.ZipFile(wheel).namelist()
    kernels = {o for o in names if o.startswith("minisgl_lit/kernels/shipped/") and o.endswith(".so")}
    assert kernels and not wheel.name.endswith("-any.whl"), wheel.name
    inside = {o for o in names if ".dist-info/" not in o} - kernels
    assert inside == tracked("minisgl_lit"), inside ^ tracked("minisgl_lit")
    packed = {o.split("/", 1)[1] for o in tarfile.open(sdist).getnames() if "/" in o}
    missing = tracked("minisgl_lit", "nbs", "settings.ini", "pyproject.toml", "LICENSE", "README.md") - packed
    assert not missing, missing

def empty_environment(folder, wheel):
    "A virtual environment with the wheel, which may borrow our libraries, but not this checkout"
    venv.create(folder, with_pip=False)
    python = folder/"bin"/"python"
    subprocess.run([sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps",
                    "--no-index", wheel], check=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site/"borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")   # a .pth in there is not read
    return python

def fetch(url, body=None):
    data = body and json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as o:
        return o.read().decode()

def check_server(command, folder, env):
    "It serves the page with all that it is made of, answers, and ends when told to; what it said"
    with subprocess.Popen([command, "serve", "--port", "0"], cwd=folder, env=env, stdout=subprocess.PIPE,
                          text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]
            page = fetch(url + "/")
            assert page.startswith("<!doctype html>"), page[:100]
            for o in "webui/style.css", "webui/app.js":
                assert f'"{o}"' in page and len(fetch(f"{url}/{o}")) > 1000
            asked = dict(messages=[dict(role="user", content="What is a page table?")], temperature=0)
            answer = json.loads(fetch(url + "/v1/chat/completions",
                                      asked))["choices"][0]["message"]["content"]
            assert "page" in answer, answer
            return answer
        finally: server.terminate()
        server.wait(30)

def main(dist):
    [wheel], [sdist] = Path(dist).resolve().glob("*.whl"), Path(dist).resolve().glob("*.tar.gz")
    check_files(wheel, sdist)
    with TemporaryDirectory() as folder:
        folder = Path(folder)
        python = empty_environment(folder/"env", wheel)
        env = ({k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"CC": "/bin/false",
            "XDG_CACHE_HOME": str(folder/"cache")})
        def run(*args):
            done = subprocess.run(args, cwd=folder, env=env, check=True, capture_output=True, text=True,
                                  timeout=120)
            assert "plain torch" not in done.stderr, done.stderr
            return done.stdout
        where = run(python, "-c",
                    "import minisgl_lit; print(minisgl_lit.__file__, minisgl_lit.__version__)").split()
        assert where[0].startswith(str(folder)) and f"-{where[1]}-" in wheel.name, where
        command = folder/"env"/"bin"/"minisgl-lit"
        # continued as it stands, without a chat
        assert run(command, "generate", "What is a page table?").strip()
        answer = check_server(command, folder, env)
    print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, asked in an empty environment what a page "
          f"table is: {answer}")

if __name__ == "__main__": main(sys.argv[1])
