"""Other people's code that the page and its tests use, as it was published, with its licences: `make vendor`
fetches it anew.

`FILES` says from which package, which file, where to, and its SHA-256; `tests/test_page.py` compares.
"""
import hashlib, subprocess, tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PAGE, TESTS = "minisgl_lit/webui/vendor", "tests/browser/vendor"
FILES = [   # package@version, file in it, where to, SHA-256
    ("marked@18.2.1", "lib/marked.esm.js", f"{PAGE}/marked.js",
     "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"),
    ("marked@18.2.1", "LICENSE", f"{PAGE}/marked.LICENSE",
     "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c"),
    ("dompurify@3.4.18", "dist/purify.es.mjs", f"{PAGE}/purify.js",
     "1a06b721ad8b46d6174b21f22ea70290aaf3e5a81d65af3b7178113953f7c9b1"),
    ("dompurify@3.4.18", "LICENSE", f"{PAGE}/purify.LICENSE",
     "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"),
    ("@highlightjs/cdn-assets@11.12.0", "es/highlight.min.js", f"{PAGE}/highlight.js",
     "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7"),
    ("@highlightjs/cdn-assets@11.12.0", "LICENSE", f"{PAGE}/highlight.LICENSE",
     "6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490"),
    ("katex@0.19.1", "dist/katex.min.js", f"{PAGE}/katex.js",
     "fa140498b8cfc8302cbe5e7cb1bdbc1f952bc38b3fa258ede09e73edbf9a74bc"),
    ("katex@0.19.1", "LICENSE", f"{PAGE}/katex.LICENSE",
     "766ccc1f306c885aa45542a9846bbd0a505b27a0374f146778171c2254ce18e3"),
    ("axe-core@4.14.1", "axe.min.js", f"{TESTS}/axe.js",
     "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"),
    ("axe-core@4.14.1", "LICENSE", f"{TESTS}/axe.LICENSE",
     "af175b9d96ee93c21a036152e1b905b0b95304d4ae8c2c921c7609100ba8df7e"),
]

def sha256(file): return hashlib.sha256(file.read_bytes()).hexdigest()

def fetch(package, folder):
    "The files of a package, by name, as npm has them"
    packed = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True,
                            text=True).stdout.split()[-1]
    with tarfile.open(folder/packed) as tar:
        return {o.name.removeprefix("package/"): tar.extractfile(o).read() for o in tar if o.isfile()}

def main():
    with TemporaryDirectory() as folder:
        packages = {o: fetch(o, Path(folder)) for o in sorted({o[0] for o in FILES})}
    for package, name, place, wanted in FILES:
        file = ROOT/place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(packages[package][name])
        print(f"{place}: {package}, {file.stat().st_size:,} bytes, {sha256(file)}",
              "" if sha256(file) == wanted else f"IS NOT {wanted or 'known'}")

if __name__ == "__main__": main()
