"""Files of timelines: Chrome trace events for viewers, and all recorded data."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddpx.timeline.export.chrome import to_events
from ddpx.timeline.model import Recording
from ddpx.timeline.record.rank_data import RankData

_VERSION = 2
_TRACE = "trace.json"
_UNUSABLE = (IsADirectoryError, PermissionError)
_FILE_NAME = re.compile(r"(?:model(\d+)-)?rank\d+\.json")


def write(path: str | Path, recording: Recording, ranks: Sequence[RankData]) -> None:
    """Writes a file, or leaves the path as it is.

    Args:
        path: The file.
        recording: The recording that viewers show.
        ranks: The data that :func:`read` returns.

    Raises:
        OSError: The file cannot be written.
    """
    contents = {
        "traceEvents": to_events(recording),
        "displayTimeUnit": "ms",
        "ddpx": {"version": _VERSION, "ranks": [data.to_json() for data in ranks]},
    }
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.new")
    try:
        unfinished.write_text(json.dumps(contents))
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def file_name(rank: int, model: int) -> str:
    """The name of the file with one rank's data of one model."""
    return f"model{model}-rank{rank}.json" if model else f"rank{rank}.json"


def launch_name(number: int) -> str:
    """The name of the file with all ranks of one launch, counted from 0."""
    return f"trace-{number + 1}.json" if number else _TRACE


def launches_in(folder: Path) -> list[Path]:
    """Returns the files of all launches that ``ddpx timeline`` wrote into a folder, in order."""
    return [folder / _TRACE, *_more_launches(folder)] if (folder / _TRACE).is_file() else []


def _more_launches(folder: Path) -> list[Path]:
    files = [file for file in folder.glob("trace-*.json") if file.stem[6:].isdigit()]
    return sorted(files, key=lambda file: int(file.stem[6:]))


def check_folder(folder: str | Path) -> None:
    """Checks that files can be written into a folder. A missing folder is not created.

    Raises:
        ValueError: The folder, or the nearest existing folder above it, is not writable.
    """
    folder = Path(folder).absolute()
    try:
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as cause:
        raise ValueError(
            f"cannot write into the folder '{folder}': {cause.strerror}. Choose another folder."
        ) from cause


def check_replaceable(folder: Path, names: Iterable[str]) -> None:
    """Checks that the files of ``ddpx timeline`` can be written into a folder, if it exists.

    Args:
        folder: The folder.
        names: The names of the files without traces. Such a file belongs to an earlier recording
            only if the folder has the trace of that recording.

    Raises:
        ValueError: The folder has files of DDPX_TIMELINE, or files of another tool with the names
            of files of a recording.
    """
    if models_in(folder):
        raise ValueError(
            f"{folder} has the rank*.json files of another recording. Choose another folder."
        )
    traces = [folder / _TRACE, *_more_launches(folder)]
    others = [folder / name for name in names if not _is_timeline(traces[0])]
    for file in (*traces, *others):
        if file.exists() and not _is_timeline(file):
            raise ValueError(
                f"{file} is no file of a recording of ddpx, and would be replaced. "
                "Choose another folder."
            )


def _is_timeline(path: Path) -> bool:
    try:
        contents = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(contents, dict) and "ddpx" in contents


def read(path: str | Path, model: int = 0) -> list[RankData]:
    """Reads the data of all ranks from a file or a folder.

    Args:
        path: The file, or a folder with a file of each rank, or a folder of ``ddpx timeline``. Of
            several launches in such a folder, the first file is read.
        model: The number of a model in the folder, from 0, in the order of wrapping.

    Raises:
        ValueError: The path has no timeline, or no such model; or files do not belong together.
    """
    path = Path(path)
    by_model = models_in(path) if path.is_dir() else {0: [path]}
    if launches := launches_in(path):
        if by_model:
            raise ValueError(
                f"{path} has a {_TRACE} and rank*.json files, which are two recordings. Pass the "
                f"{_TRACE}, or move one recording into another folder."
            )
        by_model = {0: launches[:1]}
    if not by_model:
        raise _not_a_timeline(path, f"the folder has no {_TRACE} and no rank*.json files")
    files = by_model.get(model, [])
    if not files:
        numbers = ", ".join(str(number) for number in sorted(by_model))
        raise ValueError(
            f"{path} has no recording of model {model!r}. Recorded "
            f"{'model' if len(by_model) == 1 else 'models'}: {numbers}."
        )
    ranks = [data for file in files for data in _read_file(file)]
    ranks.sort(key=lambda data: data.rank)
    if len({data.rank for data in ranks}) < len(ranks) or len({data.name for data in ranks}) > 1:
        raise _not_a_timeline(
            path, "its files are from several jobs or process groups. Use one folder for each"
        )
    if len({data.clock for data in ranks}) > 1:
        raise _not_a_timeline(
            path,
            "its ranks ran on several machines, and the clocks of the machines were not compared. "
            "Load the file of one rank, or record again with init_sync=True or ddpx.record()",
        )
    return ranks


def models_in(folder: Path) -> dict[int, list[Path]]:
    """Returns the files in a folder, by the number of the model."""
    found: dict[int, list[Path]] = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        if (match := _FILE_NAME.fullmatch(file.name)) is not None:
            found[int(match[1] or 0)].append(file)
    return dict(found)


def _read_file(path: Path) -> list[RankData]:
    try:
        contents = json.loads(path.read_text())
        stored = contents["ddpx"]
        version = stored["version"]
        ranks = [RankData.from_json(v) for v in stored["ranks"]] if version == _VERSION else []
    except (*_UNUSABLE, ValueError, KeyError, TypeError, RuntimeError) as cause:
        raise _not_a_timeline(path, f"{type(cause).__name__}: {cause}") from cause
    if version != _VERSION:
        raise _not_a_timeline(
            path, f"the file has version {version}, but this ddpx reads version {_VERSION}"
        )
    return ranks


# ---- errors --------------------------------------------------------------------------------------


def _not_a_timeline(path: object, why: str) -> ValueError:
    return ValueError(f"{path} holds no usable timeline of ddpx: {why}.")
