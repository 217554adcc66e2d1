"""Rules of the house that a linter does not know: who may import what, and who may read a clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "safetensors"}
PURE = [
    *sorted((ROOT / "supervisor" / "lifecycle").glob("*.py")),
    ROOT / "supervisor/commit/records.py",
    ROOT / "supervisor/commit/rules.py",
    ROOT / "supervisor/checkpoint/chunks.py",
    ROOT / "supervisor/job/rank_env.py",
    ROOT / "supervisor/measure.py",
    ROOT / "supervisor/units.py",
]
IMPURE = {
    "time", "os", "io", "pathlib", "socket", "select", "threading", "queue", "subprocess", "signal",
    "logging", "structlog", "urllib3", "boto3", "botocore", "psutil", "prometheus_client", "mmap",
    "tempfile", "shutil", "datetime", "random",
}  # fmt: skip
# Each library has one gate, so that what it is used for can be read in one place.
GATES = {
    "boto3": ["supervisor/store/s3*.py"],
    "botocore": ["supervisor/store/s3*.py"],
    "psutil": ["supervisor/job/*.py"],
    "subprocess": ["supervisor/job/*.py", "supervisor/doctor.py"],
    "prometheus_client": ["supervisor/metrics.py", "supervisor/status.py"],
    "click": ["supervisor/cli.py"],
    "rich": ["supervisor/showing.py"],
    "structlog": ["supervisor/log.py"],
}
# The names of the supervisord package, with which ours shares its import name.
SUPERVISORD = {
    "childutils", "compat", "confecho", "datatypes", "dispatchers", "events", "http", "http_client",
    "loggers", "options", "pidproxy", "poller", "process", "rpcinterface", "socket_manager",
    "states", "supervisorctl", "supervisord", "templating", "web", "xmlrpc",
}  # fmt: skip
CLOCK = re.compile(r"^(time\.(time|monotonic|perf_counter)|datetime\.(now|utcnow|today))")


def modules(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def imports(path: Path, *, only_top: bool = False) -> Iterator[str]:
    """Full names of what a module imports; `only_top`: not those inside functions."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if only_top else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots(path: Path, **options: bool) -> set[str]:
    return {name.split(".")[0] for name in imports(path, **options)}


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", modules("supervisor"), ids=str)
def test_the_supervisor_sees_only_the_protocol_of_the_sdk_and_no_tensor_library(path: Path):
    sdk = {name for name in imports(path) if name.split(".")[0] == "trainer_sdk"}

    assert not roots(path) & HEAVY
    assert all(name.startswith("trainer_sdk.protocol") for name in sdk), sdk


@pytest.mark.parametrize("path", modules("trainer_sdk"), ids=str)
def test_the_sdk_never_imports_the_supervisor_or_its_libraries(path: Path):
    assert not roots(path) & {"supervisor", *GATES}


@pytest.mark.parametrize("path", modules("trainer_sdk/protocol"), ids=str)
def test_the_protocol_needs_the_standard_library_and_msgspec_only(path: Path):
    allowed = sys.stdlib_module_names | {"msgspec", "trainer_sdk"}
    sdk = {name for name in imports(path) if name.split(".")[0] == "trainer_sdk"}

    assert roots(path) <= allowed
    assert all(name.startswith("trainer_sdk.protocol") for name in sdk)


@pytest.mark.parametrize("path", PURE, ids=str)
def test_pure_modules_touch_no_clock_file_socket_or_thread(path: Path):
    assert not roots(path) & IMPURE


@pytest.mark.parametrize("path", modules("supervisor"), ids=str)
def test_each_library_has_one_gate(path: Path):
    for library in roots(path) & set(GATES):
        assert any(path.match(pattern) for pattern in GATES[library]), f"{path} imports {library}"


@pytest.mark.parametrize("path", modules("supervisor"), ids=str)
def test_only_the_clock_reads_a_clock(path: Path):
    if path.name == "clock.py":
        return
    assert not [name for name in calls(path) if CLOCK.match(name)]


def test_the_package_that_shares_its_name_with_supervisord_stays_out_of_its_way():
    text = (ROOT / "supervisor/__init__.py").read_text()
    statements = ast.parse(text).body
    names = {path.stem for path in (ROOT / "supervisor").iterdir()}

    assert len(statements) == 2
    assert "extend_path" in text
    assert not names & SUPERVISORD


@pytest.mark.parametrize("package", ["supervisor.cli", "supervisor.wiring", "trainer_sdk"])
def test_importing_it_loads_no_tensor_library(package: str):
    code = f"import sys, {package}; print(sorted({sorted(HEAVY)!r} & sys.modules.keys()))"
    code = code.replace(repr(sorted(HEAVY)), f"set({sorted(HEAVY)!r})")

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_nothing_unpickles():
    """Bytes from a checkpoint must never become code."""
    banned = re.compile(r"\b(pickle|marshal|shelve|dill|cloudpickle)\b|torch\.load|yaml\.load\(")
    for path in modules("supervisor", "trainer_sdk"):
        found = [name for name in imports(path) if banned.search(name)]
        found += [name for name in calls(path) if banned.search(name) or name in ("eval", "exec")]
        assert not found, f"{path}: {found}"


def test_every_log_event_is_declared():
    """Names are an interface: dashboards and people search for them."""
    from supervisor.log import EVENTS

    used: set[str] = set()
    for path in modules("supervisor"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            if node.func.attr in ("report", "debug", "info", "warning", "error"):
                used |= {t for t in texts if isinstance(t, str) and re.fullmatch(r"\w+\.\w+", t)}

    assert used == set(EVENTS)


def test_state_on_disk_is_written_by_the_few_modules_that_sync_it():
    """A bare open(..., "w") on a state path would lose data in a crash."""
    allowed = {"supervisor/checkpoint/files.py", "supervisor/job/keeper.py"}
    for path in modules("supervisor"):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "open":
                modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
                if any("w" in str(mode) or "a" in str(mode) for mode in modes):
                    assert name in allowed, name


def test_every_failpoint_is_passed_somewhere():
    """A declared place that nothing passes would make its crash tests prove nothing."""
    from trainer_sdk.protocol.failpoints import NAMES

    sources = "".join(
        path.read_text() for path in [*modules("supervisor"), *modules("trainer_sdk")]
    )
    made = {f"{what}.{when}" for what in ("dir.link", "dir.rename") for when in ("before", "after")}

    passed = set(re.findall(r'failpoints\.hit\("([a-z.]+)"\)', sources)) | made

    assert passed == NAMES
    assert all(f'what="{name}"' in sources for name in ("dir.link", "dir.rename"))
