"""Writes the results of ``make gpu`` into docs/gpu.md, docs/reliability.md and README.md.

python scripts/gpu_report.py
"""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gpu_timeline_report
from gpu_order import RANKS, ranks_of
from gpu_parts import PARTS
from gpu_results import NO_TIME, OUTCOMES, Results, Row, Unusable, load
from marked_page import write_between_marks

ROOT = Path(__file__).resolve().parent.parent


def check(results: Results, path: Path) -> None:
    """Raises :class:`Unusable` if a result is not from a GPU."""
    for run, machine in results.runs.items():
        if machine["kind"] != "cuda":
            raise Unusable(f"{path}: run {run} was on {machine['device']}, not on a GPU")
    if not results.runs:
        raise Unusable(f"{path} has no run")


def _table(headers: list[str], rows: list[list[str]], num_texts: int = 1) -> str:
    aligned = ["---"] * num_texts + ["---:"] * (len(headers) - num_texts)
    return "\n".join("| " + " | ".join(line) + " |" for line in [headers, aligned, *rows])


def _commit(run: str) -> str:
    return run.partition(" ")[2]


def _runs(results: Results) -> str:
    lines = []
    for run, machine in sorted(results.runs.items(), reverse=True):
        versions = f"torch {machine['torch']}, CUDA {machine.get('cuda')}"
        versions += f", NCCL {machine.get('nccl')}, Python {machine['python']}"
        date = run.partition(" ")[0].replace("T", " ")
        lines.append(f"- {date} UTC, commit {_commit(run)}: one {machine['device']}, {versions}")
    return "Runs with results below:\n\n" + "\n".join(lines)


# ---- tests ---------------------------------------------------------------------------------------


def _commits(rows: Iterable[Row]) -> str:
    counts = collections.Counter(_commit(row["run"]) for row in rows if row["outcome"] == "passed")
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{commit} ({number})" for commit, number in sorted(counts.items()))


def _tests(results: Results) -> str:
    groups: dict[tuple[str, int, str], list[Row]] = collections.defaultdict(list)
    for table in ("tests", "sanitizer"):
        for test, row in results.tables[table].items():
            file = f"`{Path(test.partition('::')[0]).name}`"
            name = file if table == "tests" else f"{file}, sanitizer"
            ranks = ranks_of(test)
            index = RANKS.index(ranks) if ranks in RANKS else len(RANKS)
            groups[name, index, ranks].append(row)
    lines = []
    for (name, _, ranks), rows in sorted(groups.items()):
        counts = collections.Counter(row["outcome"] for row in rows)
        numbers = [str(counts[outcome]) for outcome in OUTCOMES]
        lines.append([name, ranks.replace("-", ", "), _commits(rows) or "-", *numbers])
    return _table(["tests", "ranks", "passed at", *OUTCOMES], lines, num_texts=3)


def _reasons(results: Results) -> str:
    """Why tests were skipped or did not run, with their numbers."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for table in ("tests", "sanitizer"):
        for row in results.tables[table].values():
            if row["outcome"] in ("skipped", "not run"):
                counts[row["outcome"], row.get("text", "")] += 1
    lines = [f"- {number} {name}: {text}" for (name, text), number in sorted(counts.items())]
    for name, part in PARTS.items():
        row = results.parts.get(name, {"outcome": "not run", "text": NO_TIME})
        if row["outcome"] in ("skipped", "not run"):
            lines.append(f"- part `{name}` ({part.about}) {row['outcome']}: {row['text']}")
    return "Skipped, or not run:\n\n" + "\n".join(lines) if lines else ""


def _failures(results: Results) -> str:
    lines = []
    for table, rows in results.tables.items():
        about = "" if table == "tests" else f" ({'part' if table == 'parts' else table})"
        for name, row in sorted(rows.items()):
            if row["outcome"] == "failed":
                reason = " ".join(row.get("text", "no text").split("\n")[:2])[:200]
                lines.append(f"- `{name}`{about}, at {_commit(row['run'])}: `{reason}`")
    return "Failed:\n\n" + "\n".join(lines) if lines else ""


# ---- measured parts ------------------------------------------------------------------------------


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _where(results: Results, row: Row) -> str:
    return f"{results.runs[row['run']]['device']}, commit {_commit(row['run'])}"


def _step(results: Results, row: Row) -> list[str]:
    texts = []
    found: dict[str, Any] = row.get("results", {})
    for model, figures in found.get("models", {}).items():
        rows = []
        for contender, line in figures["contenders"].items():
            best = " (best)" if contender == figures["best_ddp"] else ""
            rows.append(
                [
                    contender + best,
                    f"{line['ms']:.2f}",
                    f"{line['to_bare']:.3f}",
                    f"{line['to_best_ddp']:.3f}",
                    *(f"{line[key]:.0f}" if key in line else "-" for key in ("kernels", "copies")),
                    f"{line['copied_bytes'] / 2**20:.1f}" if line.get("copied_bytes") else "-",
                    _share(line.get("overlap", {}).get("share")),
                ]
            )
        ranks = found["ranks"]
        title = f"{model}, {ranks} rank{'s' if ranks > 1 else ''}, {found['backend']}, "
        title += f"medians over {figures['rounds']} rounds ({_where(results, row)}):"
        headers = [
            "a step",
            "ms",
            "/ bare",
            "/ best DDP",
            "kernels",
            "copies",
            "MiB copied",
            "overlap",
        ]
        texts.append(title + "\n\n" + _table(headers, rows))
    return texts


def _graph(results: Results, row: Row) -> list[str]:
    graph = row.get("results", {}).get("graph")
    if not graph:
        return []
    rows = []
    for name, line in graph["contenders"].items():
        if line["captured"]:
            same = "identical" if line["identical"] else f"differ by {line['largest_difference']:g}"
            if line["not_written"]:
                same = f"{line['not_written']} not written"
            times = [f"{line['eager_ms']:.2f}", f"{line['replay_ms']:.2f}"]
            rows.append([name, "yes", same, *times])
        else:
            captured = "not run: no time was left" if line["captured"] is None else "no"
            rows.append([name, captured, "-", "-", "-"])
    headers = ["CUDA graph", "captured", "gradients", "eager, ms", "replayed, ms"]
    title = f"{graph['model']}, 1 rank ({_where(results, row)}):"
    return [title + "\n\n" + _table(headers, rows)]


def failures_page(results: Results) -> str:
    """What ranks see when an NCCL rank fails, for docs/reliability.md."""
    row = results.parts.get("failures", {})
    found = row.get("results")
    if not found:
        return "Not measured yet: `make gpu`."
    lines = [
        [
            each["fault"],
            each["wrapper"],
            "-" if each["seconds"] is None else f"{each['seconds']:.1f}",
            f"`{each['text']}`" if each["text"] else "nothing",
        ]
        for each in sorted(found["rows"], key=lambda each: (each["fault"], each["wrapper"]))
    ]
    left_out = found["num_cases"] - len(found["rows"])
    text = (
        f"{found['ranks']} NCCL ranks that share a GPU, group timeout {found['timeout_s']:g} s "
        f"({_where(results, row)}). Seconds from the fault to the error on the survivor that got "
        "it last."
    )
    if left_out:
        text += f" No time was left for {left_out} of {found['num_cases']} cases."
    return text + "\n\n" + _table(["fault", "wrapper", "seconds", "a survivor sees"], lines, 2)


def timeline_page(results: Results) -> str:
    """Timelines against the profiler, for docs/timeline.md."""
    row = results.parts.get("timeline", {})
    if "results" not in row:
        return "Not measured yet: `make gpu`."
    return f"{_where(results, row)}. {gpu_timeline_report.text_of(row['results'])}"


# How the figures of a part are shown in docs/gpu.md.
_TABLES = {"step": _step, "small_step": _step, "shared_step": _step, "graph": _graph}


def report(results: Results) -> str:
    """All tables, as Markdown."""
    texts = [_runs(results), _tests(results), _failures(results), _reasons(results)]
    for name in PARTS:
        if name in results.parts and name in _TABLES:
            texts += _TABLES[name](results, results.parts[name])
    return "\n\n".join(filter(None, texts))


def status(results: Results) -> str:
    """The sentences for the first screen of the README."""
    counts = collections.Counter(row["outcome"] for row in results.tests.values())
    sanitized = [row["outcome"] != "not run" for row in results.tables["sanitizer"].values()]
    run = results.last_run
    machine = results.runs[run]
    return (
        f"**GPU:** last run on {run[:10]}, on one {machine['device']} (torch {machine['torch']}). "
        f"{counts['passed']} device tests passed, {counts['failed']} failed, {counts['skipped']} "
        f"were skipped, {counts['not run']} have not run. Under the sanitizer, {sum(sanitized)} of "
        f"{len(sanitized)} have run. [docs/gpu.md](docs/gpu.md) has the commits and figures."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = ROOT / "benchmarks" / "results" / "gpu.json"
    parser.add_argument("file", type=Path, nargs="?", default=default)
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of the pages")
    arguments = parser.parse_args()
    try:
        results = load(arguments.file)
        check(results, arguments.file)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    texts = {
        "README.md": ("gpu status", status(results)),
        "docs/gpu.md": ("gpu", report(results)),
        "docs/reliability.md": ("nccl", failures_page(results)),
        "docs/timeline.md": (gpu_timeline_report.MARK, timeline_page(results)),
    }
    for page, (mark, text) in texts.items():
        write_between_marks(arguments.root / page, mark, text)
    print(f"written into {', '.join(texts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
