"""One verb per job. `nox -s tests` works anywhere nox is; `python3 dev.py tests` brings nox along.

    demo    kill a worker in the middle of a run and see another one resume it
    tests   everything below tests/; a suite over its time budget is a warning, and an error where DURABLE_BUDGET_FACTOR is set
    lint    ruff, and the floors as import contracts
    types   mypy strict and pyright strict
    docs    every Python block of the README and of docs/ is run, every link inside the repository followed
    bench   figures, with the machine they were taken on
    wheel   build sdist and wheel, install the wheel elsewhere, and pass all tests against it

Arguments after `--` go to the tool behind the session. A session makes an environment of its own, except when dev.py started
nox: then the one that dev.py keeps is used, which is quicker.

The next ones run tests of the whole at full length:

    fuzz    random programs, killed at every position
    races   conflicting operations in every order, on SQLite with many trials
    waits   the five races of runs that wait, 10,000 on each store
    wakes   how often a parent of 1,000 children is woken, on each store
    suspended   100,000 suspended runs beside a worker and a claim, on each store
    families   a parent of 1,000 children, killed three times, on each store
    chaos   kills at random moments over many runs and several processes
    requirements   the requirements as data on PostgreSQL and MongoDB, with a crash after every record
    kills   kill -9 inside the writes of SQLite
    flow    schedules, limits and coalescing with processes that are killed, and a purge under traffic
    cron    the rule of local time against its slow reading, for every zone
    fairness   a single run behind the backlog of another tenant
    encrypted   the whole conformance suite on encrypted payloads
    mongo   MongoDB: fail-overs of three nodes, plans beside many runs, races, the state machine
    statemachine   the whole protocol against the oracle, on SQLite at full length
    postgres   conformance, state machine, races and the backend's own tests on the oldest and the newest PostgreSQL
    restarts   crashes of a PostgreSQL server under a flow of runs
    migrations eight processes that migrate an empty PostgreSQL database at once
    plans      the plans of the hot statements of PostgreSQL among 200,000 runs of each kind

To add a suite of that last kind: tests that read their length from an environment variable, and a session of two lines that
calls `_long` with their path and the variable. To add a suite to the whole: put it below tests/ and give
it a line in BUDGETS.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
# How much slower than two current cores that are idle: only a machine that says so, as CI does, is held to the budgets.
BINDING = "DURABLE_BUDGET_FACTOR" in os.environ
FACTOR = float(os.environ.get("DURABLE_BUDGET_FACTOR", "1"))
ROOM = 2 << 30  # bytes for each process of pytest: its two servers, and what they log
WHOLE = 840  # with the two servers
ALONE = 960  # seconds of processors for tests without a server: 480 on two
# Seconds of processors: test time by the processors for each process of pytest. The first pattern that fits a file of tests counts it.
BUDGETS = {
    "fuzz": ("tests/*fuzz*", 60),
    "mongodb": ("tests/*mongo*", 480),
    "postgres": ("tests/*postgres*", 480),
    "races": ("tests/*races*", 90),
    "state machine": ("tests/*statemachine*", 120),
    "crash": ("tests/crash/*", 120),
    "plans": ("tests/plans/*", 90),
    "conformance": ("tests/conformance/*", 120),
    "sqlite": ("tests/sqlite/*", 60),
    "one program and the examples, three stores": ("tests/stores/*", 420),
    "tenants": ("tests/tenants/*", 150),
    "schedules, limits, coalescing, retention": ("tests/flow/*", 240),  # processes that start, are killed and come back
    "typing": ("tests/typing/*", 90),
    "engine": ("tests/engine/*", 180),
    "replay": ("tests/replay/*", 120),
    "cli": ("tests/cli/*", 90),
    "floors": ("tests/floors/*", 120),
    "cases": ("tests/cases/*", 60),
    "migrations": ("tests/migrations/*", 60),
    "house": ("tests/house/*", 120),
    "servers of tests": ("tests/servers/*", 10),
}

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True


@nox.session
def demo(session: nox.Session) -> None:
    """Five steps, a SIGKILL in the middle of the fourth, and the proof."""
    _install(session)
    session.run("durable", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, in two processes or more; says which suite took longer than its budget."""
    _install(session, "test", extra="testing")
    _whole(session, ROOT)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff's rules and format, and the import contracts."""
    _install(session, "lint")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", silent=True)


@nox.session
def types(session: nox.Session) -> None:
    """Two type checkers, both strict: the project is used by people of either."""
    _install(session, "test", extra="testing")
    session.run("mypy", *session.posargs)
    session.run("pyright", "--pythonpath", _python(session), *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The documents keep what they say: code runs, commands exist, links lead somewhere."""
    _install(session, "test", extra="testing")
    session.run("pytest", "tests/house/test_docs.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Each tests/benchmarks/bench_*.py prints its figures and exits non-zero if it misses its aim."""
    _install(session, "test")  # the servers that are measured
    programs = sorted((ROOT / "tests/benchmarks").glob("bench_*.py"))
    if not programs:
        session.skip("there is no tests/benchmarks/bench_*.py yet")
    for program in programs:
        session.run("python", str(program), *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """What users get is what is tested: the tests run against the installed wheel, far from the sources."""
    if not _borrowed(session):
        session.install(*_group("wheel"))
    with tempfile.TemporaryDirectory(prefix="durable-wheel-") as folder:
        place = Path(folder)
        session.run("python", "-m", "build", "--outdir", str(place / "dist"), str(ROOT), silent=True)
        built = sorted((place / "dist").iterdir())
        session.log("built " + ", ".join(f"{path.name} ({path.stat().st_size // 1024} kB)" for path in built))
        (package,) = (place / "dist").glob("*.whl")
        # Only what tests need beside the package; README and docs for the tests that read them. No durable/, no backends/.
        for name in ("tests", "docs", "schemas"):
            if (ROOT / name).exists():
                shutil.copytree(ROOT / name, place / "away" / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in (
            "pyproject.toml",
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "LICENSE",
            "noxfile.py",
            "dev.py",
        ):
            shutil.copy(ROOT / name, place / "away" / name)
        python = place / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        session.run("python", "-m", "virtualenv", "--quiet", str(place / "venv"))
        session.run(
            *(str(python), "-m", "pip", "install", "--quiet", f"{package}[testing]", *_group("test")), external=True
        )
        where = "import durable, durable_sqlite, sys; print(durable.__file__); sys.exit('venv' not in durable.__file__)"
        with session.chdir(place / "away"):
            session.run(str(python), "-c", where, external=True)
            _whole(session, place / "away", python=str(python))


@nox.session
def fuzz(session: nox.Session) -> None:
    """2,000 random programs with a crash at every position, and every mutant."""
    _long(session, "**/test_*fuzz*", DURABLE_FUZZ_PROGRAMS="2000")


@nox.session
def races(session: nox.Session) -> None:
    """Pairs of conflicting operations, 100 trials each."""
    _long(session, "races/**/test_*", DURABLE_RACE_TRIALS="100", DURABLE_POSTGRES_RACE_TRIALS="100")


@nox.session
def wakes(session: nox.Session) -> None:
    """A parent of 1,000 children: how often it is woken, on the three stores."""
    _long(session, "stores/test_wakes", DURABLE_WAKES="1000")


@nox.session
def statemachine(session: nox.Session) -> None:
    """3,000 random histories of 60 steps, the store against the oracle; 300 on PostgreSQL."""
    _long(
        session,
        "statemachine/test_*",
        DURABLE_STATE_EXAMPLES="3000",
        DURABLE_STATE_STEPS="60",
        DURABLE_POSTGRES_STATE_EXAMPLES="300",
        DURABLE_POSTGRES_STATE_STEPS="60",
    )


@nox.session
def chaos(session: nox.Session) -> None:
    """200 SIGKILLs over 1,000 runs and three worker processes on one file."""
    _long(session, "**/test_*chaos*", DURABLE_CHAOS_KILLS="200", DURABLE_CHAOS_RUNS="1000")


@nox.session
def waits(session: nox.Session) -> None:
    """10,000 races on each store: signal, child and cancel against suspend, cancel against complete, retry against purge."""
    _long(session, "races/test_races_waits*", DURABLE_WAIT_RACES="10000")


@nox.session
def suspended(session: nox.Session) -> None:
    """What 100,000 suspended runs cost a worker and a claim: nothing."""
    _long(session, "plans/test_suspended*", DURABLE_SUSPENDED_RUNS="100000")


@nox.session
def families(session: nox.Session) -> None:
    """1,000 children of one parent whose worker is killed three times, on the three stores."""
    _long(
        session,
        "crash/test_families",
        DURABLE_FAMILY_CHILDREN="1000",
        DURABLE_FAMILY_STORES="sqlite,postgresql,mongodb",
    )


@nox.session
def requirements(session: nox.Session) -> None:
    """Every requirement with a crash after every record, on the servers, too."""
    _long(session, "conformance/test_requirements*", DURABLE_REQUIREMENT_CRASHES="1")


@nox.session
def fairness(session: nox.Session) -> None:
    """A single run behind 100,000 of another tenant, on the three stores."""
    _long(session, "tenants/test_fairness", DURABLE_FAIR_BACKLOG="100000")


@nox.session
def kills(session: nox.Session) -> None:
    """200 SIGKILLs inside the writes of SQLite."""
    _long(session, "sqlite/test_writer", DURABLE_SQLITE_KILLS="200")


@nox.session
def flow(session: nox.Session) -> None:
    """Six schedulers for 120 slots, 10,000 limited runs with kills, 1,000 rounds of coalescing, a purge of 200,000 runs."""
    _long(
        session,
        "flow/test_*",
        DURABLE_FLOW_SLOTS="120",
        DURABLE_FLOW_SCHEDULERS="6",
        DURABLE_FLOW_RUNS="10000",
        DURABLE_FLOW_ROUNDS="1000",
        DURABLE_FLOW_PURGE="200000",
    )


@nox.session
def cron(session: nox.Session) -> None:
    """50,000 random expressions, every transition of 60 zones, and 3,000 schedules that live through one."""
    _long(session, "**/test_cron*", DURABLE_CRON_CASES="50000", DURABLE_CRON_LIVES="3000")


@nox.session
@nox.parametrize("version", ["15", "18"])
def postgres(session: nox.Session, version: str) -> None:
    """All that runs on PostgreSQL, in the sizes of CI, on the oldest and the newest version; one that is not there fails."""
    files = sorted(str(path) for path in (ROOT / "tests").glob("*/test_*postgres.py"))
    _install(session, "test", extra="testing")
    asked = {"DURABLE_TEST_POSTGRES_VERSION": version, "DURABLE_TEST_POSTGRES_BIN": "", "DURABLE_TEST_POSTGRES_URL": ""}
    session.run("pytest", *files, str(ROOT / "tests/postgres"), *session.posargs, env=asked)


@nox.session
def restarts(session: nox.Session) -> None:
    """20 crashes of a PostgreSQL server, 5 to 20 s apart, while runs of three steps flow."""
    _long(session, "postgres/test_restarts", DURABLE_POSTGRES_RESTARTS="20", DURABLE_POSTGRES_RESTART_GAP="5-20")


@nox.session
def mongo(session: nox.Session) -> None:
    """MongoDB: 25 faults on three nodes, plans beside 200,000 runs of each kind, races and the state machine."""
    _long(
        session,
        *("mongo/test_failover", "mongo/test_plans", "races/test_races_mongo", "statemachine/test_statemachine_mongo"),
        DURABLE_MONGO_FAULTS="25",
        DURABLE_MONGO_PLAN_ROWS="200000",
        DURABLE_MONGO_RACE_TRIALS="100",
        DURABLE_MONGO_STATE_EXAMPLES="300",
        DURABLE_MONGO_STATE_STEPS="60",
    )


@nox.session
def migrations(session: nox.Session) -> None:
    """8 processes migrate an empty PostgreSQL database at once, 20 times."""
    _long(session, "postgres/test_migrations", DURABLE_POSTGRES_MIGRATION_ROUNDS="20")


@nox.session
def plans(session: nox.Session) -> None:
    """200,000 pending, delayed and finished runs and 50,000 suspended and unknown ones beside what the hot statements take."""
    _long(session, "postgres/test_plans", DURABLE_POSTGRES_PLAN_ROWS="200000")


@nox.session
def encrypted(session: nox.Session) -> None:
    """Every room of the conformance suite through encryption."""
    _long(session, "conformance/test_encrypted", DURABLE_ENCRYPTED_SUITE="all")


# ------------------------------------------------------------------------------------------------------------- the tools


def _borrowed(session: nox.Session) -> bool:
    """Whether this session runs in the environment that nox itself stands in (dev.py has filled it)."""
    return session.virtualenv.venv_backend == "none"


def _python(session: nox.Session) -> str:
    if _borrowed(session):
        return sys.executable
    return str(Path(session.bin) / ("python.exe" if os.name == "nt" else "python"))


def _group(name: str) -> tuple[str, ...]:
    return tuple(nox.project.dependency_groups(PROJECT, name))


def _install(session: nox.Session, *groups: str, extra: str = "") -> None:
    if _borrowed(session):
        return
    wanted = [requirement for group in groups for requirement in _group(group)]
    session.install("--editable", f".[{extra}]" if extra else ".", *wanted)


def _long(session: nox.Session, *patterns: str, **lengths: str) -> None:
    """The test files that fit a pattern at full length. A pattern that none fits is an error."""
    found = {pattern: [str(path) for path in (ROOT / "tests").glob(f"{pattern}.py")] for pattern in patterns}
    if lost := [pattern for pattern, paths in found.items() if not paths]:
        session.error(f"there is no tests/{', '.join(lost)}.py")
    files = sorted({path for paths in found.values() for path in paths})
    _install(session, "test", extra="testing")
    session.run("pytest", "--timeout=0", *files, *session.posargs, env=lengths)


def _whole(session: nox.Session, place: Path, *, python: str = "python") -> None:
    """All tests (or those named after `--`) in parallel; then the clock is read."""
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    processes = _processes(processors)
    with tempfile.TemporaryDirectory(prefix="durable-tests-", dir=_memory(processes)) as folder:
        Path(folder).chmod(0o1777)  # as /tmp: a server that refuses root has its files in it, too
        report = Path(folder) / "report.xml"
        own = {"-n", "-p", "--pdb"} & set(session.posargs)
        started = time.monotonic()
        session.run(
            *(python, "-m", "pytest", f"--junitxml={report}"),
            *(() if own else ("-n", str(processes), "--dist", "worksteal")),
            *session.posargs,
            external=python != "python",
            env={"PYTHONPATH": "", "TMPDIR": folder},
        )
        share = 1.0 if own else processors / processes
        _check_budgets(session, report, time.monotonic() - started, share)


def _processes(processors: int) -> int:
    """Half of the tests' time is waiting, for a server or another process: a small machine has twice as many at work as processors."""
    return max(processors, min(2 * processors, 8))


def _memory(processes: int) -> str | None:
    """A folder in memory for what tests write, where there is enough of it; else None, and they write to the disk.

    Nothing is tested less: the tests kill processes, not machines, and what a process wrote outlives it in either place. That an
    answer waits for the disk is looked at where it is asked for. The sessions at full length stay on the disk."""
    place = Path("/dev/shm")
    if not place.is_dir() or not os.access(place, os.W_OK) or os.statvfs(place).f_flag & os.ST_NOEXEC:
        return None
    return str(place) if shutil.disk_usage(place).free >= processes * ROOM else None


def _check_budgets(session: nox.Session, report: Path, whole: float, share: float) -> None:
    """Says a sentence for every suite that took longer than its budget, and fails the session where budgets are binding.

    `share` is what a process has of a processor: with two on each, a test takes twice as long and costs as much as before."""
    spent = dict.fromkeys(BUDGETS, 0.0)
    alone = 0.0
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        if not any(server in file + case.get("name", "") for server in ("mongo", "postgres")):
            alone += share * float(case.get("time", "0"))
        for suite, (pattern, _) in BUDGETS.items():
            if fnmatch.fnmatch(file, pattern):
                spent[suite] += share * float(case.get("time", "0"))
                break
    session.log(
        f"the whole: {whole:.0f} s of {WHOLE * FACTOR:.0f} s; without a server {alone:.0f}/{ALONE * FACTOR:.0f}; "
        + ", ".join(f"{suite} {spent[suite]:.0f}/{BUDGETS[suite][1] * FACTOR:.0f}" for suite in spent if spent[suite])
    )
    late = [
        f"the suite '{suite}' took {spent[suite]:.0f} s, its budget is {budget * FACTOR:.0f} s"
        for suite, (_, budget) in BUDGETS.items()
        if spent[suite] > budget * FACTOR
    ]
    if alone > ALONE * FACTOR:
        late.append(f"the tests that need no server took {alone:.0f} s, their budget is {ALONE * FACTOR:.0f} s")
    if whole > WHOLE * FACTOR:
        late.append(f"all tests took {whole:.0f} s, their budget is {WHOLE * FACTOR:.0f} s")
    if late:
        tell = session.error if BINDING else session.warn
        tell(
            "; ".join(late) + ". Make it quicker, give it a larger budget in noxfile.py with a reason,"
            " or say in DURABLE_BUDGET_FACTOR how much slower this machine is: where it is set, this is an error."
        )
