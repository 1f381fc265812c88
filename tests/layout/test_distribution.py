"""What is shipped: wheel and source archive hold every module, those behind symbolic links too."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from tests.layout.rooms import MODULES, ROOT

BUILD = "import sys, setuptools.build_meta as b; folder = sys.argv[1]; b.build_wheel(folder); b.build_sdist(folder)"


def in_package(module: str) -> str:
    path = module.replace(".", "/")
    return f"{path}/__init__.py" if MODULES[module].name == "__init__.py" else f"{path}.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with both archives, built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in ("ptrainx", "mesh", "ops"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=checkout, capture_output=True, check=True)
    return folder


def test_wheel_holds_every_module_and_the_type_marker(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {n for n in wheel.namelist() if not n.partition("/")[0].endswith(".dist-info")}
        assert names == {in_package(module) for module in MODULES} | {"ptrainx/py.typed"}
        assert wheel.read("ptrainx/mesh/axes.py") == (ROOT / "mesh" / "axes.py").read_bytes()


def test_source_archive_holds_every_module_as_a_file(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        files = {member.name.partition("/")[2]: member for member in archive.getmembers() if member.isfile()}
    wanted = {in_package(module) for module in MODULES} | {"ptrainx/py.typed", "LICENSE", "README.md", "pyproject.toml"}
    assert wanted <= set(files)


def test_every_development_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {requirement for group in (project["dependencies"], *extras.values()) for requirement in group}
    names = {_name(requirement) for requirement in wanted} - {"ptrainx"}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in line and "+" not in line for line in lines)
    assert names <= {_name(line) for line in lines}


def _name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def test_ci_runs_the_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
