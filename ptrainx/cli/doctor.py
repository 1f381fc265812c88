"""`ptrainx doctor`: what there is on this machine, what is missing, and whether training can run.

In: nothing but the machine. Out: a `Report`, printed as tables or as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

__all__ = ["Finding", "Report", "check_package", "check_room", "examine", "print_report"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Args:
        name: what was looked at.
        ok: whether it is there and works.
        value: what was found: a version, a count, a reason.
        fix: what to do where it is missing.
        needed: whether training cannot run without it.
    """

    name: str
    ok: bool
    value: str
    fix: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Report:
    """All findings, by section; `ready` says whether training can run here."""

    sections: dict[str, list[Finding]]

    @property
    def ready(self) -> bool:
        return all(finding.ok for findings in self.sections.values() for finding in findings if finding.needed)


def examine() -> Report:
    """Looks at this machine and this installation; nothing is changed."""
    required, optional = _packages()
    python = Finding("python", sys.version_info >= (3, 11), platform.python_version(), needed=True)
    return Report(
        {
            "versions": [python, *required],
            "devices": _devices(),
            "backends": _backends(),
            "compiler": _compiler(),
            "checkout": _checkout(),
            "optional packages": optional,
        }
    )


def print_report(report: Report, *, as_json: bool = False) -> int:
    """Prints a report and returns the exit status: 0 if training can run."""
    if as_json:
        sections = {name: [asdict(finding) for finding in found] for name, found in report.sections.items()}
        print(json.dumps({"ready": report.ready, **sections}, indent=2))
    else:
        _print_tables(report)
    return 0 if report.ready else 1


def _print_tables(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for column in ("section", "name", "mark", "value"):
        table.add_column(column, no_wrap=column != "value", overflow="fold")
    for section, findings in report.sections.items():
        for index, finding in enumerate(findings):
            colour = "green" if finding.ok else ("red" if finding.needed else "yellow")
            mark = "ok" if finding.ok else ("missing" if finding.needed else "-")
            value = f"{finding.value}  [dim]{finding.fix}[/]" if finding.fix and not finding.ok else finding.value
            title = f"[bold]{section}[/]" if index == 0 else ""
            table.add_row(title, finding.name, f"[{colour}]{mark}[/]", value)
        table.add_row("", "", "", "")
    console.print(table)
    verdict = "[green]Training can run here.[/]" if report.ready else "[red]Training cannot run here:[/] see `missing`."
    console.print(verdict)


def _packages() -> tuple[list[Finding], list[Finding]]:
    """The required and the optional packages, as the installed metadata lists them."""
    try:
        requirements = metadata.requires("ptrainx") or []
        own = Finding("ptrainx", True, metadata.version("ptrainx"), needed=True)
    except metadata.PackageNotFoundError:
        own = Finding("ptrainx", False, "not installed", "pip install -e . in the checkout", needed=True)
        return [own], []
    required, optional = [own], {}
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement).group()  # type: ignore[union-attr]
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
        if name == "ptrainx":
            continue
        if extra is None:
            required.append(check_package(name, "pip install " + requirement.partition(";")[0].strip(), needed=True))
        elif extra[1] != "dev" and name not in optional:
            optional[name] = check_package(name, f"pip install 'ptrainx[{extra[1]}]'", needed=False)
    return required, list(optional.values())


def check_package(name: str, fix: str, *, needed: bool) -> Finding:
    """Whether a package is installed, and in which version; `fix` is the command that installs it."""
    try:
        return Finding(name, True, metadata.version(name), needed=needed)
    except metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", fix, needed=needed)


def _devices() -> list[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = [Finding("cpu", True, f"{usable} cores, {platform.machine()}", needed=True)]
    if not torch.cuda.is_available():
        without = torch.version.cuda is None
        reason = "torch is built without it" if without else "no device, or the driver does not answer"
        return [*found, Finding("cuda", False, reason)]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        value = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute {about.major}.{about.minor}"
        found.append(Finding(f"cuda:{index}", True, f"{value}, CUDA {torch.version.cuda}"))
    return found


def _backends() -> list[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        fix = "install another build of torch"
        return [Finding("torch.distributed", False, "torch is built without it", fix, needed=True)]
    checks: dict[str, Callable[[], bool]] = {"nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    there = {name: check() for name, check in checks.items()}
    return [_gloo(), *(Finding(name, ok, "built in" if ok else "not built into torch") for name, ok in there.items())]


def _gloo() -> Finding:
    """Joins a world of one over gloo and sums in it, which fails where the network setup is broken."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return Finding("gloo", dist.is_gloo_available(), "in use", needed=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        return Finding("gloo", True, "works (a sum in a world of one)", needed=True)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return Finding("gloo", False, reason, "set GLOO_SOCKET_IFNAME to a network interface, such as lo", needed=True)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _compiler() -> list[Finding]:
    """What `backend="inductor"` needs; the `graph` backend needs none of it."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    name = next((name for name in names if name and shutil.which(name)), None)
    if name is None:
        compiler = Finding("C++ compiler", False, "none found", "install g++ or clang++ for backend='inductor'")
    else:
        answer = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
        compiler = Finding("C++ compiler", answer.returncode == 0, (answer.stdout or answer.stderr).partition("\n")[0])
    header = Path(sysconfig.get_path("include")) / "Python.h"
    headers = Finding(
        "Python headers",
        header.exists(),
        str(header.parent) if header.exists() else "Python.h not found",
        "install Python's development package for backend='inductor'",
    )
    return [compiler, headers]


def _checkout() -> list[Finding]:
    """Whether the two rooms that stand at the root are reachable inside the package."""
    import ptrainx

    package = Path(next(iter(ptrainx.__path__)))
    return [check_room(package / name) for name in ("mesh", "ops")]


def check_room(path: Path) -> Finding:
    """Whether a room's link leads to a package; a checkout without symbolic links holds a small text file instead."""
    fix = "git config core.symlinks true, then git checkout -- ptrainx/mesh ptrainx/ops"
    if (path / "__init__.py").is_file():
        value = f"link to {os.readlink(path)}" if path.is_symlink() else "folder"
        return Finding(f"ptrainx/{path.name}", True, value, needed=True)
    state = "dangling link" if path.is_symlink() else ("a file, not a link" if path.is_file() else "not there")
    return Finding(f"ptrainx/{path.name}", False, state, fix, needed=True)
