"""Options and fixtures of all tests: messages, signals, and files of numbered rows."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from fastgpu.process.launch import UserError
from fastgpu.process.signals import STOP
from support.rows import write_ragged, write_rows
from support.runs import write_minimal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-messages", action="store_true", help="write each messages.yaml anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start a Slurm cluster run only where `-m slurm` asks for them."""
    if config.option.markexpr != "slurm":
        items[:] = [item for item in items if not item.get_closest_marker("slurm")]


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
def write(tmp_path: Path) -> Callable[..., str]:
    """write(rows, ..., name=...) is `write_rows` in tmp_path."""
    return lambda *sizes, name="rows.h5", **options: write_rows(tmp_path / name, *sizes, **options)


@pytest.fixture(name="write_ragged")
def _write_ragged(tmp_path: Path) -> Callable[..., str]:
    """write_ragged(rows, name, start, ...) is that of the harness in tmp_path."""
    return lambda rows=100, name="ragged.h5", *start, **options: write_ragged(tmp_path / name, rows, *start, **options)


@pytest.fixture
def compare_messages(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """compare_messages({mistake: call}): each call raises a UserError, with the message in messages.yaml."""
    path = request.path.with_name("messages.yaml")

    def compare(mistakes: dict[str, Callable[[], object]]) -> None:
        messages = {}
        for mistake, call in mistakes.items():
            with pytest.raises(UserError) as caught:
                call()
            messages[mistake] = str(caught.value).replace(str(tmp_path), "TMP")
        if request.config.getoption("--rewrite-messages"):
            path.write_text(yaml.safe_dump(messages, sort_keys=False, width=200, allow_unicode=True))
        assert messages == yaml.safe_load(path.read_text())

    return compare


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with config.yaml and rows.h5 for the workload `minimal`."""
    write_minimal(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
