// Tables: the times of each rank, and the ranks that others waited for.
"use strict";

function figureTables(recording, step, ranks) {
  return [rankTable(step, ranks), holdupTable(recording, step)];
}

function table(caption, headers, rows) {
  const cells = (row) => row.map((cell, i) => i === 0
    ? element("th", {scope: "row"}, cell) : element("td", {}, cell));
  return element("div", {class: "scroll"}, element("table", {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...headers.map((header) => element("th", {scope: "col"}, header)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row))))));
}

function rankTable(step, ranks) {
  const names = ["notBegun", "whole", "compute", "communication", "overlapped", "exposed"];
  return table("Each rank, in ms", ["rank", "not begun", "step", ...names.slice(2)], ranks.map((rank) => {
    const {figures} = step.ranks.get(rank);
    return [`${rank}`, ...names.map((name) => milliseconds(figures[name], 2))];
  }));
}

const MOST_HOLDUPS = 5;

function holdupTable(recording, step) {
  const found = step.holdups
    .map((holdup, index) => holdup && {index, rank: holdup[0], param: holdup[1], waited: holdup[2]})
    .filter((holdup) => holdup && holdup.waited > 0)
    .sort((a, b) => b.waited - a.waited);
  if (found.length === 0) return element("p", {}, "No rank waited for another one's bucket.");
  const caption = found.length > MOST_HOLDUPS
    ? `Who was waited for: the longest ${MOST_HOLDUPS} of ${found.length} waits`
    : "Who was waited for";
  return table(caption, ["bucket", "waited, ms", "for rank", "whose gradient of"],
    found.slice(0, MOST_HOLDUPS).map(({index, rank, param, waited}) => [
      `${index}`, milliseconds(waited, 2), `${rank}`,
      param === null ? "none: the rank began its backward late, its parameters were unused, or backward ended" : recording.params[param]]));
}
