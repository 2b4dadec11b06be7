"""A run's folder: what it was set by, what it measured, where it can go on.

config.toml       the settings, whole
metrics.jsonl     one line an evaluation, appended: nothing in it depends on the machine's speed
times.jsonl       the seconds that belong to these lines
diagnostics.jsonl one line a look at how good the steps are, where they are asked for (docs/diagnostics.md)
checkpoint.pt     where the run can go on
result.json       written at the end: a run that has it is done
run.log           what the run said, where a sweep started it

Files that are replaced are written beside themselves and renamed. A checkpoint knows how long the .jsonl files were when it was
written, and their checksums; a run that goes on cuts off what came later, and writes it again. A result knows them too, so that
a file that was edited, or lost a part, is noticed.
"""

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from llqr_lab.errors import ConfigError, LabError, RunError
from llqr_lab.experiments.config import Config, differences, read
from llqr_lab.results import read_json, replacing, write_json


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.result = path / "config.toml", path / "result.json"
        self.metrics, self.times = path / "metrics.jsonl", path / "times.jsonl"
        self.diagnostics, self.log = path / "diagnostics.jsonl", path / "run.log"
        self._logs = (self.metrics, self.times, self.diagnostics)
        self.checkpoint = path / "checkpoint.pt"

    @property
    def done(self) -> bool:
        return self.result.is_file()

    @property
    def begun(self) -> bool:
        return self.config.is_file()

    @property
    def running(self) -> bool:
        """Whether a process is at work on it now."""
        lock = self.path / ".lock"
        if not self.done and lock.exists():
            try:
                FileLock(lock).acquire(timeout=0).lock.release()
            except Timeout:
                return True
            except OSError:
                return False  # a folder that may only be read: nobody trains in it
        return False

    def last_words(self) -> str:
        """The last line of its log that says something."""
        if not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip(" ╭╮╰╯─│")), "")

    def check(self, config: Config, resume: bool) -> None:
        """Whether this run may be made here: nothing is there, or this very run is and is to go on."""
        if not self.begun:
            return
        if not resume:
            raise RunError(f"there is a run in '{self.path}' already: go on with --resume, or remove the folder")
        try:
            found = read(self.config)
        except ConfigError as error:
            raise RunError(f"{error}; remove the folder '{self.path}' to start over") from None
        changed = differences(found, config)
        if changed:
            raise RunError(
                f"the run in '{self.path}' has other settings than were asked for ({'; '.join(changed[:5])}): "
                "resume it with its own settings, or remove the folder"
            )

    def begin(self, config: Config) -> None:
        """Write the settings, if they aren't there; with the lock, so that they are those of the process that trains."""
        if self.begun:
            self.check(config, resume=True)
            return
        with _disk(self.path), replacing(self.config) as file:
            file.write(config.to_toml().encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the folder is made if it isn't there."""
        with _disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0.5)  # longer than it takes to ask whether it is running
        except Timeout:
            raise RunError(f"another process is at work on the run in '{self.path}'") from None
        try:
            yield
        finally:
            lock.release()

    def save(self, state: dict[str, Any]) -> None:
        """A checkpoint, with the lengths and checksums of the files that go with it."""
        lengths = [_length(path) for path in self._logs]
        whole = io.BytesIO()
        torch.save({**state, "lengths": lengths, "checksums": list(map(_checksum, self._logs, lengths))}, whole)
        with _disk(self.path), replacing(self.checkpoint) as file:
            file.write(whole.getbuffer())

    def load(self, restore: Callable[[dict[str, Any]], None]) -> None:
        """Restore the checkpoint, if there is one, and cut the logs to its length."""
        lengths = [0] * len(self._logs)
        if self.checkpoint.is_file():
            try:
                with zipfile.ZipFile(
                    self.checkpoint
                ) as archive:  # torch doesn't look at the checksums that are in the file
                    if damaged := archive.testzip():
                        raise ValueError(f"{damaged} in it is damaged")
                state = dict(torch.load(self.checkpoint, weights_only=True, map_location="cpu"))
                lengths = state["lengths"]
                for log, length, checksum in zip(self._logs, lengths, state["checksums"], strict=True):
                    if _checksum(log, length) != checksum:
                        raise ValueError(f"{log.name} isn't what it was: it has been edited, or damaged")
                restore(state)
            except LabError:
                raise
            except Exception as error:  # whatever reading and restoring may end in
                told = next(iter(str(error).splitlines()), type(error).__name__)
                raise RunError(
                    f"the run in '{self.path}' can't go on: '{self.checkpoint.name}' can't be used ({told}). Remove the folder "
                    "to start over"
                ) from None
        for log, length in zip(self._logs, lengths, strict=True):
            if log.exists():
                os.truncate(log, length)

    def append(self, metrics: dict[str, Any], times: dict[str, Any]) -> None:
        self._write(self.metrics, metrics)
        self._write(self.times, times)

    def note(self, line: dict[str, Any]) -> None:
        """What a look at the steps gave."""
        self._write(self.diagnostics, line)

    def _write(self, path: Path, line: dict[str, Any]) -> None:
        with _disk(self.path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def finish(self, state: dict[str, Any], result: dict[str, Any]) -> None:
        """The result, beside the trained model in a last checkpoint."""
        self.save(state)
        checksums = {path.name: _checksum(path) for path in self._logs}
        with _disk(self.path):
            write_json(self.result, {**result, "checksums": checksums})

    def read_result(self) -> dict[str, Any]:
        try:
            return dict(read_json(self.result.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise RunError(f"'{self.result}' isn't a result ({error}): remove it, and resume the run") from None

    def edited(self, result: dict[str, Any]) -> list[str]:
        """The files that aren't what they were when the result was written."""
        known = result.get("checksums")
        known = known if isinstance(known, dict) else {}
        return [path.name for path in self._logs if known.get(path.name, _checksum(path)) != _checksum(path)]

    def read_metrics(self) -> list[dict[str, Any]]:
        """What was measured so far, with its seconds; a last line that is half written isn't there yet."""
        return [{**metrics, **times} for metrics, times in zip(_lines(self.metrics), _lines(self.times), strict=False)]


@contextmanager
def _disk(run: Path) -> Iterator[None]:
    """What a full disk or a missing permission looks like to a person."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the run in '{run}' couldn't be written ({error}): make room, then go on with --resume; no checkpoint is lost"
        ) from None


def _checksum(path: Path, length: int | None = None) -> str:
    """Of the first bytes of a file; of all of them without a length."""
    content = path.read_bytes() if path.exists() else b""
    return blake2b(content[:length], digest_size=16).hexdigest()


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    try:
        return [dict(read_json(line)) for line in whole.splitlines()]
    except (ValueError, TypeError) as error:
        raise RunError(f"'{path}' has a line that can't be read ({error}): remove the run, and make it again") from None
