// The plans of a search (ddpx/timeline/export/plan_rows.py): gradients, predicted all-reduces, and the
// predicted and the measured end of communication. The page draws them once.
"use strict";

function drawPlans(section, {title, ready, rows}) {
  section.hidden = false;
  const ends = rows.flatMap((row) => [row.predicted_end_ms, row.measured_end_ms ?? 0]);
  const length = 1.02 * Math.max(...ready, ...ends);
  section.append(element("p", {}, `${title}. Times count from the start of the backward.`));
  for (const row of rows) section.append(planFigure(row, ready, length));
}

function planFigure(row, ready, length) {
  const at = (ms) => `${100 * ms / length}%`;
  const mark = (kind, ms, text) => {
    const made = element("i", {class: kind, title: text});
    made.style.left = at(ms);
    return made;
  };
  const bar = (kind, [begin, end], text) => {
    const made = mark(kind, begin, text);
    made.style.width = at(end - begin);
    return made;
  };
  const backward = bar("backward", [0, Math.max(...ready)], "backward");
  const gradients = ready.map((ms) => mark("gradient", ms, `gradient at ${ms.toFixed(2)} ms`));
  const reductions = row.spans_ms.map(([begin, end], index) => bar("reduction", [begin, end],
    `bucket ${index}, ${row.sizes[index]}: ${begin.toFixed(2)} to ${end.toFixed(2)} ms, as predicted`));
  const found = [["predicted", row.predicted_end_ms], ["measured", row.measured_end_ms]].filter(([, ms]) => ms !== null);
  const lines = found.map(([kind, ms]) => mark(`end ${kind}`, ms, `${kind} end of communication: ${ms.toFixed(2)} ms`));
  const keys = found.map(([kind, ms]) => element("span", {class: `key ${kind}`}, `${kind} end ${ms.toFixed(1)} ms`));
  return element("figure", {class: "plan"},
    element("figcaption", {}, element("b", {}, row.title), ...keys),
    element("div", {class: "tracks"}, backward, ...gradients, ...reductions, ...lines));
}
