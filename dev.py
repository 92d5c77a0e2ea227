"""Sets up everything and does one job: `python3 dev.py demo`, `python3 dev.py tests`, or any other session of noxfile.py.

Needs Python 3.11 or newer and nothing else: only the standard library is used here. It makes the virtual environment `.venv`
beside this file, installs into it what pyproject.toml says for the job, and runs the job there. The system's Python is never
touched, so it does not matter whether pip refuses to change it (PEP 668). A second run installs nothing: what is installed is
remembered under the hash of pyproject.toml. Never imports the project.

    python3 dev.py demo                          the main job
    python3 dev.py tests                         all tests (arguments after -- go to pytest)
    python3 dev.py tests --python 3.12 -- -k x   the same on another interpreter of this machine, in an environment of its own
    python3 dev.py setup                         only the environment, with everything a contributor needs
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

if sys.version_info < (3, 11):  # noqa: UP036  # said in words here, since an older Python may well be what runs this
    sys.exit("durable needs Python 3.11 or newer; this is " + sys.version.split()[0])

import tomllib

ROOT = Path(__file__).resolve().parent
SUPPORTED = ("3.11", "3.12", "3.13", "3.14")
JOB_GROUPS = {  # what a job needs beside the project itself; any other job gets the group `dev`
    "demo": (),
    "tests": ("nox", "test"),
    "lint": ("nox", "lint"),
    "types": ("nox", "test"),
    "docs": ("nox", "test"),
    "wheel": ("nox", "wheel"),
}


def main(arguments: Sequence[str]) -> int:
    """The job's own exit code; 2 if there is no such thing to do."""
    own, _, passed = _split(arguments)
    pythons: list[str] = []
    jobs: list[str] = []
    words = iter(own)
    for word in words:
        if word in ("-h", "--help"):
            print(__doc__)
            return 0
        if word == "--python":
            pythons.append(next(words, ""))
        elif word.startswith("--python="):
            pythons.append(word.removeprefix("--python="))
        elif word == "--json":  # the one option of the demo that is worth a short way
            passed = [*passed, word]
        elif word.startswith("-"):
            print(f"dev.py does not know {word}; what is meant for the job itself goes after --", file=sys.stderr)
            return 2
        else:
            jobs.append(word)
    if not jobs:
        print(__doc__)
        return 2
    worst = 0
    for interpreter, environment in _targets(pythons):
        for job in jobs:
            python = _set_up(environment, interpreter, JOB_GROUPS.get(job, ("dev",)))
            worst = worst or _run(job, python, passed)
    return worst


def _split(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    if "--" in arguments:
        at = list(arguments).index("--")
        return list(arguments[:at]), "--", list(arguments[at + 1 :])
    return list(arguments), "", []


def _run(job: str, python: Path, passed: Sequence[str]) -> int:
    if job == "setup":
        print(f"ready: {python}")
        return 0
    if job == "demo":
        command = [str(python.with_name("durable")), "demo", *passed]
    else:
        command = [str(python), "-m", "nox", "--force-venv-backend", "none", "--session", job]
        command += ["--", *passed] if passed else []
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment["VIRTUAL_ENV"] = str(python.parent.parent)
    environment.pop("PYTHONHOME", None)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


# ------------------------------------------------------------------------------------------------------- the environment


def _targets(pythons: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Which interpreter with which environment: this one in `.venv`, a named one in `.venv-<name>`."""
    if not pythons:
        yield sys.executable, ROOT / ".venv"
        return
    for name in pythons:
        if name == "all":
            found = [(version, path) for version in SUPPORTED if (path := _find(version))]
            yield from ((path, ROOT / f".venv-{version}") for version, path in found)
            continue
        path = _find(name)
        if path is None:
            _give_up(f"there is no Python {name!r} on this machine")
        yield path, ROOT / f".venv-{Path(name).name.removeprefix('python')}"


def _find(name: str) -> str | None:
    """The path of an interpreter named by its version or its path."""
    if os.sep in name:
        return name if Path(name).exists() else None
    homes = [
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions",
        Path.home() / ".local/share/uv/python",
    ]
    installed = [path for home in homes for path in sorted(home.glob(f"*{name}*/bin/python{name[:4]}"))]
    on_path = shutil.which(f"python{name.removeprefix('python')}")
    for path in [*([on_path] if on_path else []), *map(str, reversed(installed))]:
        answer = subprocess.run(
            [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode == 0 and name.removeprefix("python").startswith(answer.stdout.strip()):
            return path
    return None


def _set_up(environment: Path, interpreter: str, groups: Sequence[str]) -> Path:
    """The environment's Python, with the project (editable) and these groups installed."""
    python = environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if not _works(python):
        print(f"making {environment.name} with {interpreter} ...", file=sys.stderr, flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        _make(environment, interpreter, python)
    wanted = [f"--editable={ROOT}"]
    for group in groups:
        wanted += _requirements(project["dependency-groups"], group)
    stamp = (
        environment / "installed-for-durable"
    )  # the hash of pyproject.toml, then what is known to be installed, a line each
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    known = stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else []
    if not known or known[0] != state:
        known = [state]
    if missing := [requirement for requirement in wanted if requirement not in known]:
        print(f"installing into {environment.name} what the job needs ...", file=sys.stderr, flush=True)
        _pip(python, ["install", *wanted])
        stamp.write_text("\n".join([*known, *missing]) + "\n", encoding="utf-8")
    return python


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    check = "import pip, sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([str(python), "-c", check], capture_output=True, check=False).returncode == 0


def _make(environment: Path, interpreter: str, python: Path) -> None:
    """A virtual environment with pip in it, also where Python came without ensurepip (Debian and its kin split it off)."""
    usual = subprocess.run([interpreter, "-m", "venv", str(environment)], capture_output=True, text=True, check=False)
    if usual.returncode == 0:
        return
    shutil.rmtree(environment, ignore_errors=True)
    bare = subprocess.run(
        [interpreter, "-m", "venv", "--without-pip", str(environment)], capture_output=True, text=True, check=False
    )
    if bare.returncode != 0:
        _give_up(f"{interpreter} can not make a virtual environment: {bare.stderr.strip() or usual.stderr.strip()}")
    lenders = [[interpreter, "-m", "pip"], *([path] for name in ("pip3", "pip") if (path := shutil.which(name)))]
    for lender in lenders:  # a pip of the system may install into an environment that is not its own
        lent = subprocess.run(
            [*lender, "--python", str(python), "--disable-pip-version-check", "install", "--quiet", "pip"],
            capture_output=True,
            text=True,
            check=False,
        )
        if lent.returncode == 0:
            return
    uv = shutil.which("uv")
    if (
        uv
        and subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), "pip"], check=False).returncode
        == 0
    ):
        return
    shutil.rmtree(environment, ignore_errors=True)
    _give_up(
        "this Python has neither ensurepip nor pip, so nothing can be installed:"
        " install the package python3-venv (Debian, Ubuntu: apt install python3-venv) and start this again"
    )


def _requirements(groups: dict[str, list[Any]], name: str) -> list[str]:
    """The requirements of a dependency group, included groups unfolded (PEP 735). pip itself can do this from 25.1 on."""
    if name not in groups:
        _give_up(f"pyproject.toml has no dependency group {name!r}")
    found: list[str] = []
    for entry in groups[name]:
        found += [entry] if isinstance(entry, str) else _requirements(groups, entry["include-group"])
    return list(dict.fromkeys(found))


def _pip(python: Path, arguments: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        _give_up("pip could not install what the project needs; its own words are above")


def _give_up(sentence: str) -> NoReturn:
    sys.exit(f"dev.py: {sentence}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
