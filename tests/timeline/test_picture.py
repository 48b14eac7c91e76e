"""Pictures of recordings made by hand: positions of all parts, and that nothing is cut off."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from contrasts import contrast
from synthetic import (
    accumulated,
    late_rank,
    make_recording,
    many_buckets,
    many_ranks,
    one_rank_alone,
    with_write_back,
)

from ddpx.timeline.analyze.extent import find_step
from ddpx.timeline.export.picture import draw, make_figure
from ddpx.timeline.export.picture_rows import Rows
from ddpx.timeline.export.rows import label, size
from ddpx.timeline.model import Interval, Recording

colors = pytest.importorskip("matplotlib.colors", reason="matplotlib is not installed")

NOT_BEGUN, FORWARD, BACKWARD = "#d9d9d9", "#56b4e9", "#0072b2"
FILLING, QUEUED, HELD_UP, MOVING, WRITING = "#f5cf80", "#e69f00", "#a6dccb", "#009e73", "#cc79a7"
AVERAGED = "#ead1de"


def _bars(figure, position: int, color: str | None) -> list[tuple[float, float]]:
    """Begin and end in ms of the bars of a color (None: hatched), per rank from the top row to
    the bottom row.

    Bars of zero length are left out.
    """
    found = []
    for bars in figure.axes[position].collections:
        drawn = bars.get_facecolor()
        if color is None:
            wanted = bars.get_hatch() is not None
        else:
            wanted = len(drawn) > 0 and colors.to_hex(drawn[0]) == color
        if wanted:
            for path in bars.get_paths():
                (left, top), (right, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                if right > left:
                    found.append((round(top, 6), round(left, 6), round(right, 6)))
    return [(left, right) for _, left, right in sorted(found)]


def test_where_everything_is():
    figure = make_figure(make_recording(), 12)
    assert len(figure.axes) == 2
    assert _bars(figure, 0, FORWARD) == [(0, 10)]
    assert _bars(figure, 0, BACKWARD) == [(12, 32)]
    assert _bars(figure, 0, FILLING) == [(16, 18), (28, 30)]
    assert _bars(figure, 0, QUEUED) == []
    # Rank 1 launches the three buckets at 22, 29 and 36 ms.
    assert _bars(figure, 0, HELD_UP) == [(18, 22), (24, 29), (30, 36)]
    assert _bars(figure, 0, MOVING) == [(22, 26), (29, 36), (36, 40)]
    assert _bars(figure, 0, None) == [(33, 36), (37, 40)]
    assert _bars(figure, 0, AVERAGED) == [(26, 32), (40, 41)]
    assert _bars(figure, 0, WRITING) == [(32, 33), (36, 37), (41, 42)]
    assert _bars(figure, 0, NOT_BEGUN) == []
    assert _bars(figure, 1, NOT_BEGUN) == [(0, 2)]
    assert _bars(figure, 1, FORWARD) == [(2, 14)]
    assert _bars(figure, 1, HELD_UP) == []
    assert _bars(figure, 1, None) == [(40, 41)]


def test_backwards_in_no_sync():
    figure = make_figure(accumulated(), 12)
    assert _bars(figure, 0, FORWARD) == [(0, 10), (30, 40)]
    assert _bars(figure, 0, BACKWARD) == [(11, 26), (42, 62)]


def test_gradients_are_ticks():
    axes = make_figure(make_recording(), 12).axes[1]
    ticks = [
        segment[0][0]
        for lines in axes.collections
        if hasattr(lines, "get_segments")
        for segment in lines.get_segments()
    ]
    assert ticks == [20, 22, 29, 34, 36]


def test_queued_behind_an_earlier_bucket():
    figure = make_figure(make_recording(), 13)
    assert _bars(figure, 0, QUEUED) == [(18, 23)]
    assert _bars(figure, 1, QUEUED) == [(14, 18)]


def _texts(figure) -> list[str]:
    titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "right")]
    return [text.get_text() for text in figure.texts] + titles


def test_titles():
    assert _texts(make_figure(make_recording(), 12)) == [
        "Step 12: 43.0 ms on 2 ranks over gloo, on cpu",
        "Step 12 was asked for. Longest wait: rank 0 waits 3.0 ms for bucket 1, mostly for its "
        "transfer of 2.0 MiB (3.0 ms).",
        "rank 0 (host)",
        "compute 30.0 ms, communication 22.0 ms: 16.0 overlapped, 6.0 exposed",
        "rank 1 (host)",
        "not begun 2.0 ms, compute 35.0 ms, communication 16.0 ms: 15.0 overlapped, 1.0 exposed",
    ]


def test_the_step_of_median_length():
    """Of two middle steps, 43 ms and 40 ms, the shorter one is chosen."""
    title, subtitle, *_ = _texts(make_figure(make_recording(), None))
    assert "Step 13: 40.0 ms" in title
    assert subtitle.startswith("Of 2 recorded steps, this step has the median duration. Longest")


def test_one_rank_alone():
    """The title has the number of ranks of the job."""
    figure = make_figure(replace(one_rank_alone(), world_size=4), None)
    assert "on 4 ranks over gloo" in _texts(figure)[0]
    assert _bars(figure, 0, BACKWARD) == [(12, 32)]
    assert _bars(figure, 0, MOVING) == []
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["compute", "gradients"]
    assert _texts(figure)[1] == (
        "This is the only recorded step. No rank waits for a bucket at the end of its backward."
    )


def _labels(figure, position: int) -> list[str]:
    return [label.get_text() for label in figure.axes[position].get_yticklabels()]


def test_many_ranks_and_buckets_are_folded():
    """Rank 5 is late from bucket 15 on, and rank 0 is the first of the ranks that wait."""
    figure = make_figure(late_rank(30, 16), None)
    assert _texts(figure)[2] == (
        "In full: rank 0, which has the longest wait; rank 5, which others wait for longest. "
        "Other ranks are folded."
    )
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["rank 0 (host)", "rank 5 (host)", "14 other ranks"]
    for position in range(2):
        labels = _labels(figure, position)
        assert labels[:4] == ["compute", "gradients", "bucket 0, 1.0 MiB", "buckets 1 to 14"]
        assert labels[-1] == "bucket 29, 1.0 MiB" and len(labels) <= 22
    assert _labels(figure, 2) == [f"rank {rank}" for rank in range(16) if rank not in (0, 5)]
    # Of rank 1: until bucket 14, then while rank 5 is late, then from bucket 15 on.
    assert _bars(figure, 2, MOVING)[:2] == [(13, 29), (36, 52)]
    assert _bars(figure, 2, HELD_UP)[0] == (28, 50)


def test_ranks_that_fit_are_not_folded():
    figure = make_figure(many_ranks(8), None)
    assert [axes.get_title("left") for axes in figure.axes] == [
        f"rank {r} (host)" for r in range(8)
    ]


def test_hundreds_of_ranks():
    figure = make_figure(many_ranks(512), None)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles[:2] == ["rank 0 (host)", "rank 507 (host)"]
    assert titles[2] == "16 of 510 other ranks, those with the longest exposed waits"


def _legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_legend_has_what_is_drawn():
    assert _legend(make_figure(one_rank_alone(), None)) == [
        *("forward", "backward", "gradient arrives"),
    ]
    assert "full, queued" not in _legend(make_figure(make_recording(), 12))
    assert _legend(make_figure(make_recording(), 13)) == [
        *("forward", "backward", "gradient arrives", "bucket fills", "full, queued"),
        *("launched, other ranks not yet", "in flight on all ranks"),
        *("averaged, not yet written back", "written back", "exposed wait"),
    ]


def test_thin_bars_are_visible():
    """A write-back of 10 µs in a step of 43 ms, at the end of the axis, too."""
    figure = make_figure(with_write_back(ms=0.01), 12)
    bars = _bars(figure, 0, WRITING)
    assert len(bars) == 3
    limit, inches = figure.axes[0].get_xlim()[1], figure.axes[0].get_position().width * 11
    for begin, end in bars:
        assert (end - begin) / limit * inches == pytest.approx(0.02, rel=0.01)
        assert end <= limit
    assert "written back" not in _legend(make_figure(with_write_back(ms=0.0001), 12))


def test_hatching_contrasts_with_its_bar():
    """WCAG 2 asks for a contrast of 3 between graphical objects."""
    axes = make_figure(make_recording(), 13).axes[1]
    hatched = {
        round(bars.get_paths()[0].vertices[:, 0].min()): colors.to_hex(bars.get_edgecolor()[0])
        for bars in axes.collections
        if bars.get_hatch() is not None
    }
    assert set(hatched) == {31, 32}  # rank 0 launches the bucket at 32 ms
    assert contrast(hatched[31], HELD_UP) >= 3
    assert contrast(hatched[32], MOVING) >= 3


RECORDINGS = {
    "two ranks": make_recording(),
    "one rank": one_rank_alone(),
    "16 ranks": many_ranks(16),
    "512 ranks": many_ranks(512),
    "30 buckets on 16 ranks": late_rank(30, 16),
    "60 buckets on 8 ranks": many_buckets(60, 8),
    "60 buckets on 2 ranks": many_buckets(60, 2),
}


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS)
def test_nothing_is_cut_and_no_texts_overlap(recording: Recording):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    figure = make_figure(recording, None)
    FigureCanvasAgg(figure).draw()
    width, height = figure.canvas.get_width_height()
    assert height / figure.dpi < 13
    unseen = {
        id(tick.label1)
        for axes in figure.axes
        for tick in axes.xaxis.get_major_ticks()
        if not 0 <= tick.get_loc() <= axes.get_xlim()[1]
    }
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text() and id(text) not in unseen
    ]
    assert len(boxes) > 10
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
    for (text, box), (other_text, other) in combinations(boxes, 2):
        assert not box.overlaps(other), (text, other_text)


def test_written(tmp_path):
    path = tmp_path / "step.png"
    draw(make_recording(), path, 12)
    assert path.read_bytes().startswith(b"\x89PNG")
    draw(make_recording(), str(tmp_path / "step.svg"), None)
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_pyplot_stays_out():
    script = (
        "import sys, synthetic; from ddpx.timeline.export.picture import make_figure; "
        "assert 'matplotlib' not in sys.modules; "
        "make_figure(synthetic.make_recording(), 12); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_errors(monkeypatch, tmp_path):
    with pytest.raises(
        ValueError, match=r"step 11 is not in this timeline\. Recorded steps: 12, 13\."
    ):
        draw(make_recording(), tmp_path / "a.png", 11)
    nothing = Recording((), (), {}, {}, "gloo", "cpu", 2, {})
    with pytest.raises(RuntimeError, match="no complete step was recorded"):
        draw(nothing, tmp_path / "a.png", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    needs = "the picture needs matplotlib, .* pip install matplotlib"
    with pytest.raises(ImportError, match=needs):
        draw(make_recording(), tmp_path / "a.png", 12)
    assert list(tmp_path.iterdir()) == []


def test_a_long_recording_does_not_list_all_its_steps():
    step = make_recording().steps[0]
    steps = tuple(type(step)(number, step.layout, step.ranks) for number in range(5, 55))
    recording = Recording((), steps, {}, {}, "gloo", "cpu", 2, {})
    with pytest.raises(ValueError, match=r"step 2 is not .* Recorded steps: 50 from 5 to 54\."):
        find_step(recording, 2)


def test_labels_of_rows():
    step = find_step(make_recording(), 12)
    assert label(step, (0, 1, 2)) == "buckets 0 to 2"
    assert label(step, (1,)) == "bucket 1, 2.0 MiB"
    assert size(0) == "sparse"


@pytest.mark.parametrize(
    ("begin", "end", "bar"),
    [(10, 20, (10, 10)), (10, 10.05, (10, 0.2)), (99.95, 100, (99.8, 0.2))],
)
def test_a_thin_bar_is_visible_and_within_the_axes(begin, end, bar):
    """The axes have 10 inches and 100 ms. The least width is 0.02 inches."""
    ns = Interval(round(begin * 1e6), round(end * 1e6))
    assert Rows(0, 100, 10)._bar(ns) == pytest.approx(bar)
