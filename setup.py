"""Packaging. All metadata is in settings.ini; nothing to edit here."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_namespace_packages, setup

root = Path(__file__).resolve().parent
ini = ConfigParser(delimiters=["="])
ini.read(root/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

def lines(key): return [o.strip() for o in cfg.get(key, "").splitlines() if o.strip()]

extras = {k.removesuffix("_requirements"): lines(k) for k in cfg if k.endswith("_requirements")}
extras["dev"] += extras["structured"] + extras["viz"] + extras["docs"]
setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"],
    long_description=(root/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"], license=cfg["license"], keywords=cfg["keywords"].split(),
    python_requires=f">={cfg['min_python']}",
    packages=find_namespace_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"],   # folders of data, too
                                     exclude=["*.__pycache__"]),
    include_package_data=True,
    install_requires=lines("requirements"), extras_require=extras,
    entry_points={"console_scripts": lines("console_scripts")},
    zip_safe=False,
)
