"""The command line on a real SQLite file: JSON because stdout is no terminal, tables on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from durable.cli import demo_steps, main
from durable.cli.work_commands import pace_the_collector, quick_loop_factory
from durable.function import default_registry

HERE = Path(__file__).parent


class Shell:
    """A directory with a database, and `durable` in it, called in this process (a start of Python takes longer than a command)."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self.url = f"sqlite:///{directory / 'cli.db'}"
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.chdir(directory)
        monkeypatch.setenv("DURABLE_URL", self.url)
        monkeypatch.syspath_prepend(str(HERE))

    def raw(self, *words: str, code: int = 0) -> str:
        self.monkeypatch.setattr(sys, "argv", ["durable", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed, self.errors = self.capsys.readouterr()
        assert (ended.value.code or 0) == code, (ended.value.code, printed, self.errors)
        return printed

    def __call__(self, *words: str, code: int = 0) -> list[Any]:
        return [json.loads(line) for line in self.raw(*words, code=code).splitlines() if line.startswith("{")]

    def drain(self) -> None:
        importlib.import_module("shop").drain(self.url)

    def process(self, *words: str, **pipes: Any) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(HERE), "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
        return subprocess.Popen([sys.executable, "-m", "durable", *words], cwd=self.directory, env=environment, **pipes)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_start_list_show_and_explain_tell_of_a_run(shell: Shell) -> None:
    started = shell("start", "shop:quote", "abc", "4", "--idempotency-key", "k1")[0]
    assert started["status"] == "pending"
    assert started["disposition"] == "created"
    again = shell("start", "shop:quote", "abc", "4", "--idempotency-key", "k1")[0]
    assert (again["id"], again["disposition"]) == (started["id"], "existing")
    assert shell("explain", started["id"])[0]["code"] == "no_worker"
    shell.drain()
    listed = shell("runs", "list", "--status", "completed")
    assert [run["id"] for run in listed] == [started["id"]]
    shown = shell("runs", "show", started["id"])[0]
    assert [record["step"] for record in shown["journal"]] == ["price"]
    assert json.loads(shown["journal"][0]["result"]) == {"v": 3}


def test_start_waits_for_the_result_of_a_worker_that_runs(shell: Shell) -> None:
    worker = shell.process("worker", "shop")
    try:
        assert shell("start", "shop:quote", "abcd", "--wait")[0]["result"] == 4
        shell("start", "shop:broken", "--wait", code=1)
        assert "no such luck" in shell.errors
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0


def test_retry_runs_a_failed_run_again_and_cancel_tells_whether_it_was_accepted(shell: Shell) -> None:
    failed = shell("start", "shop:broken")[0]["id"]
    shell.drain()
    assert shell("runs", "show", failed)[0]["error_kind"] == "exception"
    assert shell("runs", "retry", failed)[0]["status"] == "pending"
    waiting = shell("start", "shop:patient")[0]["id"]
    assert shell("runs", "cancel", waiting, "--reason", "tests")[0] == {"id": waiting, "accepted": True}
    assert shell("runs", "cancel", waiting, code=1)[0] == {"id": waiting, "accepted": False}


def test_another_tenants_run_is_not_found(shell: Shell) -> None:
    mine = shell("start", "shop:quote", "abc", "--tenant", "acme")[0]
    assert mine["tenant"]
    shell("runs", "show", mine["id"], code=3)
    assert shell("runs", "list") == []
    assert [run["id"] for run in shell("runs", "list", "--tenant", "acme")] == [mine["id"]]
    assert [run["id"] for run in shell("runs", "list", "--all-tenants")] == [mine["id"]]
    shell("runs", "list", "--tenant", "", code=2)


def test_exit_codes_and_hints(shell: Shell, tmp_path: Path) -> None:
    shell("migrate")
    shell("runs", "show", "no-such-run", code=3)
    shell("start", "shop:price", "x", code=2)
    assert "@durable.function" in shell.errors
    shell("start", "no_such_module:f", code=2)
    shell("start", "shop:quote", code=2)
    assert "does not take these arguments" in shell.errors
    assert "sku" in shell.errors
    shell("start", "shop:quote", "abc", "many", code=2)
    assert "$.count" in shell.errors
    shell("runs", "list", "--status", "faild", code=2)
    assert "failed" in shell.errors
    shell("runs", "list", "--url", "nosuch://x", code=2)
    text = tmp_path / "text.db"
    text.write_text("this is no database at all, whatever it is called" * 40)
    shell("runs", "list", "--url", f"sqlite:///{text}", code=4)
    assert text.read_text().startswith("this is no database")


def test_migrate_check_says_whether_the_tables_are_there_and_sql_prints_them(shell: Shell) -> None:
    shell("migrate", "--check", code=1)
    shell("migrate")
    shell("migrate", "--check")
    printed = shell.raw("migrate", "--sql")
    assert "CREATE TABLE durable_run" in printed
    with contextlib.closing(sqlite3.connect(":memory:")) as con:
        con.executescript(printed)


def test_doctor_says_what_is_wrong_with_store_workers_and_queues(shell: Shell) -> None:
    shell("start", "shop:quote", "abc", "--queue", "bulk")
    told = {(check["level"], check["check"]): check["text"] for check in shell("doctor")}
    assert "start one" in told["warn", "workers"]
    assert "'quote' on queue 'bulk'" in told["warn", "unknown function"]
    first = shell.process("worker", "shop", "--queue", "bulk")
    second = shell.process("worker", "shop", "--queue", "bulk", "--lease", "45s", "--max-reclaims", "7")
    try:
        for _ in range(100):
            told = {(check["level"], check["check"]): check["text"] for check in shell("doctor")}
            if told.get(("ok", "workers")) == "2 live":
                break
        assert "45000000" in told["warn", "lease"]
        assert "5, 7" in told["warn", "max_reclaims"]
        assert ("warn", "unknown function") not in told
    finally:
        for worker in (first, second):
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(30) == 0
    with contextlib.closing(sqlite3.connect(shell.directory / "cli.db", isolation_level=None)) as con:
        con.execute("DROP INDEX durable_run_leases")
    shell("doctor", code=4)
    assert "durable_run_leases" in shell.errors


def test_a_workers_process_looks_for_circles_of_references_less_often_and_never_more() -> None:
    before = gc.get_threshold()
    try:
        for given, kept in (((700, 10, 10), 10_000), ((50_000, 10, 10), 50_000)):
            gc.set_threshold(*given)
            pace_the_collector()
            assert gc.get_threshold()[0] == kept
    finally:
        gc.set_threshold(*before)


def test_a_worker_runs_on_uvloop_where_that_is_installed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"
    worker = shell.process("worker", "shop")
    try:
        assert shell("start", "shop:which_loop", "--wait")[0]["result"] == wanted
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert quick_loop_factory() is None


def test_purge_and_audit(shell: Shell) -> None:
    shell("start", "shop:quote", "abc")
    shell.drain()
    assert shell("audit") == []
    assert shell("purge") == [{"runs": 0}]
    assert shell("purge", "--older-than", "0s") == [{"runs": 1}]
    with contextlib.closing(sqlite3.connect(shell.directory / "cli.db", isolation_level=None)) as con:
        con.execute(
            "INSERT INTO durable_step (run_id, step_id, result, created_at, position, seen, kind, digest, fence)"
            " VALUES ('orphan', 's', '{\"v\":1}', 1, 0, -1, 'step', '', 1)"
        )
    findings = shell("audit", "--all-tenants", code=1)
    assert [finding["run_id"] for finding in findings] == ["orphan"]


def test_the_url_of_durable_toml_is_used_and_the_argument_goes_first(shell: Shell) -> None:
    (shell.directory / "durable.toml").write_text('url = "sqlite:///from-toml.db"\n')
    shell.monkeypatch.delenv("DURABLE_URL")
    shell("migrate")
    assert (shell.directory / "from-toml.db").exists()
    shell("migrate", "--url", "sqlite:///from-argument.db")
    assert (shell.directory / "from-argument.db").exists()


def on_terminal(shell: Shell, *words: str) -> str:
    """What a command shows on a terminal of 80 columns: a dumb one always counts as that wide."""
    leader, follower = pty.openpty()
    process = shell.process(*words, stdout=follower)
    os.close(follower)
    shown = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other side has closed: Linux's way to say the end
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    assert process.wait(30) == 0
    return shown.decode()


def test_a_terminal_gets_a_table_and_no_control_character_of_the_data(shell: Shell) -> None:
    shell("start", "shop:quote", json.dumps("\x1b[31mred"))
    shell("start", "shop:quote", "x", "--idempotency-key", "red\u202ekey")
    shown = on_terminal(shell, "runs", "list")
    assert "quote" in shown
    assert "\x1b[31m" not in shown
    assert "{" not in shown


def test_an_id_is_shown_on_one_line_of_a_narrow_terminal_so_that_it_can_be_copied(shell: Shell) -> None:
    (started,) = shell("start", "shop:quote", "x", "--queue", "a-queue-with-a-long-name")
    shown = on_terminal(shell, "runs", "list")
    assert started["id"] in shown
    assert "error" not in shown  # a column that no row fills only takes room


@pytest.mark.parametrize("command", [["worker"], ["runs", "list"], ["doctor"], ["migrate"]])
def test_the_help_names_every_place_of_the_url(shell: Shell, command: list[str]) -> None:
    shell.monkeypatch.setenv("COLUMNS", "200")
    told = " ".join(shell.raw(*command, "--help").split())
    assert "Otherwise DURABLE_URL, durable.toml or tool.durable of pyproject.toml." in told


@pytest.mark.parametrize("command", [["runs", "list"], ["explain", "x"], ["doctor"], ["purge"], ["tenants", "list"]])
def test_a_command_that_begins_nothing_refuses_a_store_that_is_not_there_and_makes_none(
    shell: Shell, command: list[str]
) -> None:
    shell.raw(*command, "--url", "sqlite:///mistyped.db", code=4)
    assert "there is no database at" in shell.errors
    assert "durable migrate" in shell.errors
    assert not list(shell.directory.iterdir())


def test_the_version_is_that_of_the_installed_distribution(shell: Shell) -> None:
    assert shell.raw("--version").strip() == importlib.metadata.version("durable-sdk")


def test_a_worker_does_not_serve_the_functions_of_the_demo(shell: Shell) -> None:
    assert "demo_checkout" in {function.name for function in demo_steps.registry}
    assert "demo_checkout" not in {function.name for function in default_registry}


def test_a_worker_takes_what_is_configured_unless_it_is_told_otherwise(shell: Shell) -> None:
    (shell.directory / "durable.toml").write_text('[settings]\nlease = "7s"\nconcurrency = 3\n')
    shell("migrate")
    process = shell.process("worker", "shop", "--queue", "default", "--queue", "bulk=2")
    try:
        for _ in range(600):
            with contextlib.closing(sqlite3.connect(shell.directory / "cli.db")) as con:
                found = con.execute("SELECT settings, queues FROM durable_worker").fetchall()
            if found:
                break
            time.sleep(0.05)
        ((settings, queues),) = found
        assert json.loads(settings)["lease"] == 7_000_000
        assert json.loads(settings)["concurrency"] == 3
        assert json.loads(queues) == {"default": 3, "bulk": 2}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
