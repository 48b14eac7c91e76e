"""Writes the results of ``make gpu`` into the tables of docs/gpu.md and a sentence of README.md.

python scripts/gpu_report.py runs/gpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATUS = ("<!-- gpu status: begin -->", "<!-- gpu status: end -->")
TABLE = ("<!-- gpu: begin -->", "<!-- gpu: end -->")
SCHEMA = 1
Record = dict[str, Any]


class Unusable(Exception):
    """The file is not the result of a run on a GPU."""


def load(path: Path) -> Record:
    record: Record = json.loads(path.read_text())
    if record.get("schema") != SCHEMA:
        raise Unusable(f"{path}: schema {record.get('schema')}, but {SCHEMA} is expected")
    if record["machine"]["kind"] != "cuda":
        raise Unusable(f"{path} is of a run on {record['machine']['device']}, not on a GPU")
    return record


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _where(record: Record) -> str:
    machine = record["machine"]
    versions = f"torch {machine['torch']}, CUDA {machine.get('cuda')}, NCCL {machine.get('nccl')}"
    return (
        f"{record['date']}, one {machine['device']}, {versions}, Python {machine['python']}, "
        f"commit {record['commit']} (sources {record['sources']})"
    )


def _num_unfinished(tests: Record) -> int:
    return int(tests.get("collected", 0)) - sum(tests.get("counts", {}).values())


def _tests(record: Record) -> str:
    rows = []
    for name, title in (("tests", "device tests"), ("sanitizer", "under TORCH_CUDA_SANITIZER=1")):
        part = record["parts"][name]
        for group, counts in part.get("groups", {}).items():
            wrong = counts.get("failed", 0) + counts.get("error", 0)
            cells = [counts.get("passed", 0), wrong, counts.get("skipped", 0)]
            rows.append([f"{title}: {group}", *(str(cell) for cell in cells)])
        if part["status"] == "timed out":
            rows.append([f"{title}: cut short, {_num_unfinished(part)} did not run", "", "", ""])
        elif not part.get("groups"):
            rows.append([f"{title}: {part['status']}", "", "", ""])
    return _table(["tests", "passed", "failed", "skipped"], rows)


def _failures(record: Record) -> str:
    lines = []
    for name, part in record["parts"].items():
        failures = part.get("failures", [])
        lines += [f"- `{failure['id']}` ({name})" for failure in failures]
        if part.get("error"):
            lines.append(f"- part `{name}` {part['status']}: `{part['error'].splitlines()[-1]}`")
    return "Failed:\n\n" + "\n".join(lines) if lines else ""


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _steps(record: Record) -> list[str]:
    texts = []
    for name in ("step", "shared_step"):
        results = record["parts"][name].get("results", {})
        for model, figures in results.get("models", {}).items():
            rows = []
            for contender, row in figures["contenders"].items():
                best = " (best)" if contender == figures["best_ddp"] else ""
                overlap = row.get("overlap", {})
                rows.append(
                    [
                        contender + best,
                        f"{row['ms']:.2f}",
                        f"{row['to_bare']:.3f}",
                        f"{row['to_best_ddp']:.3f}",
                        f"{row['kernels']:.0f}" if "kernels" in row else "-",
                        f"{row['copied_bytes'] / 2**20:.1f}" if row.get("copied_bytes") else "-",
                        _share(overlap.get("share")),
                    ]
                )
            ranks = results["ranks"]
            title = f"{model}, {ranks} rank{'s' if ranks > 1 else ''}, {results['backend']}, "
            title += f"medians over {figures['rounds']} rounds:"
            headers = ["a step", "ms", "/ bare", "/ best DDP", "kernels", "MiB copied", "overlap"]
            texts.append(title + "\n\n" + _table(headers, rows))
    return texts


def _graph(record: Record) -> str:
    graph = record["parts"]["graph"].get("results", {}).get("graph")
    if not graph:
        return ""
    rows = []
    for name, row in graph["contenders"].items():
        if row["captured"]:
            same = "identical" if row["identical"] else f"differ by {row['largest_difference']:g}"
            if row["not_written"]:
                same = f"{row['not_written']} not written"
            rows.append([name, "yes", same, f"{row['eager_ms']:.2f}", f"{row['replay_ms']:.2f}"])
        else:
            rows.append([name, "not run" if row["captured"] is None else "no", "-", "-", "-"])
    headers = ["CUDA graph", "captured", "gradients", "eager, ms", "replayed, ms"]
    return f"{graph['model']}, 1 rank:\n\n" + _table(headers, rows)


def report(record: Record) -> str:
    """All tables, as Markdown."""
    texts = [_where(record) + ":", _tests(record), _failures(record), *_steps(record)]
    return "\n\n".join(filter(None, [*texts, _graph(record)]))


def status(record: Record) -> str:
    """One sentence for the first screen of the README."""
    tests = record["parts"]["tests"]
    counts = tests.get("counts", {})
    wrong = counts.get("failed", 0) + counts.get("error", 0)
    day = record["date"].split()[0]
    return (
        f"**GPU:** last run on {day}, on one {record['machine']['device']} (torch "
        f"{record['machine']['torch']}): {counts.get('passed', 0)} device tests passed, {wrong} "
        f"failed, {_num_unfinished(tests)} did not run. [docs/gpu.md](docs/gpu.md) has the figures."
    )


def between(text: str, marks: tuple[str, str], new: str) -> str:
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise Unusable(f"the marks {marks[0]} and {marks[1]} are not there")
    return f"{before}{begin}\n{new}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=Path, help="the results of make gpu")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    arguments = parser.parse_args()
    try:
        record = load(arguments.file)
        readme = between(arguments.readme.read_text(), STATUS, status(record))
        page = between(arguments.page.read_text(), TABLE, report(record))
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    arguments.readme.write_text(readme)
    arguments.page.write_text(page)
    print(f"written into {arguments.readme} and {arguments.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
