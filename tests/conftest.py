"""Options and fixtures of all tests: messages, signals, files of numbered rows, and baked projects."""

import functools
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import yaml

from fastgpu.process.launch import UserError
from fastgpu.process.signals import STOP
from support.projects import bake_all_files, copy_template
from support.rows import write_ragged, write_rows
from support.runs import write_minimal

TIMEOUTS_S = {"slurm": 1200, "nightly": 2400, "slow": 900}
"""{marker: seconds after which a test with it has failed}. The first marker that a test has counts."""

# A few examples find most mistakes in each run of the tests; `make nightly` looks for the rest.
hypothesis.settings.register_profile("day", max_examples=20, deadline=None)
hypothesis.settings.register_profile("night", max_examples=500, deadline=None)
hypothesis.settings.load_profile("day")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-messages", action="store_true", help="write each messages.yaml anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need what few machines have run only where `-m` names their marker. Slow tests have more time."""
    for marker in ("slurm", "hollow"):
        if marker not in config.option.markexpr:
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
    for item in items:
        for marker, seconds in TIMEOUTS_S.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.timeout(seconds))


# A shell lets its children in the background ignore SIGINT, nohup lets them ignore SIGHUP, and so would theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
HANDLERS = {number: signal.getsignal(number) for number in STOP}


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Undo the signal handlers of a run in a test or a fixture: forked children would outlive `terminate`."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture
def dense_file(tmp_path: Path) -> Callable[..., str]:
    """dense_file(rows, ..., name=...) writes numbered rows to tmp_path, as `write_rows`. Returns the path."""
    return lambda *sizes, name="rows.h5", **options: write_rows(tmp_path / name, *sizes, **options)


@pytest.fixture
def ragged_file(tmp_path: Path) -> Callable[..., str]:
    """ragged_file(rows, name, start, ...) writes ragged rows to tmp_path, as `write_ragged`. Returns the path."""
    return lambda rows=100, name="ragged.h5", *start, **options: write_ragged(tmp_path / name, rows, *start, **options)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with `compare_messages` runs once for each case of the messages.yaml beside it, or once to write it."""
    if "compare_messages" in metafunc.fixturenames:
        is_written = metafunc.config.getoption("--rewrite-messages")
        stored = yaml.safe_load(Path(metafunc.module.__file__).with_name("messages.yaml").read_text())
        metafunc.parametrize("case", ["all"] if is_written else [*stored])


def fits(message: str, stored: str) -> bool:
    """Whether a message is the one that is stored, in which … stands for what another library says."""
    return re.fullmatch(re.escape(stored).replace("…", ".+"), message) is not None


@pytest.fixture
def compare_messages(case: str, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """compare_messages({case: call}): the call of this case raises a UserError, with the message in messages.yaml."""
    path = request.path.with_name("messages.yaml")
    stored = yaml.safe_load(path.read_text())

    def message_of(call: Callable[[], object]) -> str:
        with pytest.raises(UserError) as caught:
            call()
        return str(caught.value).replace(str(tmp_path), "TMP")

    def compare(calls: dict[str, Callable[[], object]]) -> None:
        if request.config.getoption("--rewrite-messages"):
            messages = {name: message_of(call) for name, call in calls.items()}
            kept = {name: stored[name] for name in messages.keys() & stored if fits(messages[name], stored[name])}
            text = yaml.safe_dump(messages | kept, sort_keys=False, width=200, allow_unicode=True)
            path.write_text(text)
        else:
            assert [*calls] == [*stored], "`make messages` writes the messages of other cases"
            message = message_of(calls[case])
            assert fits(message, stored[case]), f"{message!r} is not {stored[case]!r}"

    return compare


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with config.yaml and rows.h5 for the workload `minimal`."""
    write_minimal(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the template, as a user clones it."""
    return copy_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def baked(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """baked(workload, **answers) is a project that all tests share and leave as it is, see `bake_all_files`."""

    @functools.cache
    def project(workload: str, **answers: str) -> Path:
        return bake_all_files(tmp_path_factory.mktemp(workload), template, workload, **answers)

    return project


@pytest.fixture
def own_copy(baked: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """own_copy(workload, **answers) is a project that the test may change."""

    def copy(workload: str, **answers: str) -> Path:
        return shutil.copytree(baked(workload, **answers), tmp_path / workload)

    return copy
