"""Environments with some of tsemon's extras."""

import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needed(requirements, of="", found=None):
    """The names of all packages that pip would install for these, besides tsemon itself."""
    found = {} if found is None else found
    for text in requirements:
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras}:
            if (wanted.marker and not wanted.marker.evaluate({"extra": of})) or extra in found.setdefault(name, set()):
                continue
            found[name].add(extra)
            if name == "tsemon":
                of_extra = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
                needed(of_extra, found=found)
            else:
                needed(distribution(name).requires or (), extra, found)
    return {name for name, extras in found.items() if extras} - {"tsemon"}


def environment(folder, *extras, with_pip=False):
    """A fresh environment with what these extras of tsemon need and nothing else; its folder of packages.

    It has links to the packages of this environment, so it takes no time and no network.
    """
    venv.create(folder, with_pip=with_pip)
    packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for name in needed(f"tsemon[{extra}]" for extra in extras):
        for file in distribution(name).files or ():
            top = packages / file.parts[0]
            if file.parts[0] not in ("..", "__pycache__") and not top.is_symlink():
                top.symlink_to(distribution(name).locate_file(file.parts[0]))
    return packages
